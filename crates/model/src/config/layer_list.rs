//! A choice of a model's layers, as a flag writes it.

use foretoken_core::error::{Error, Result};
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Layers, counted from 0, in ascending order: `0-11,24-29`. Not empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerList(Vec<RangeInclusive<usize>>);

impl LayerList {
    /// The default, for a model with `num_layers` layers: the first two fifths and the last quarter, at
    /// least one of each end.
    ///
    /// With 19 to 25 of SmolLM2-135M's 30 layers, most drafted tokens were accepted without a run in the
    /// middle (22% with the layers 0-12,23-29, and 5% with 0-15,26-29). A model that small accepts too few
    /// to gain anything; large ones lose less (arXiv 2309.08168, section 4).
    pub fn of_a_draft(num_layers: usize) -> Self {
        let (first, last) = (num_layers * 2 / 5, num_layers / 4);
        let end = num_layers.max(1);
        let (first, last) = (first.max(1), end - last.clamp(1, end));
        if last >= first {
            Self(vec![0..=first - 1, last..=end - 1])
        } else {
            Self(vec![0..=end - 1])
        }
    }

    /// The list of `layers`, which ascend.
    pub fn of(layers: impl IntoIterator<Item = usize>) -> Self {
        let mut ranges: Vec<RangeInclusive<usize>> = Vec::new();
        for layer in layers {
            match ranges.last_mut() {
                Some(last) if *last.end() + 1 == layer => *last = *last.start()..=layer,
                _ => ranges.push(layer..=layer),
            }
        }
        Self(ranges)
    }

    /// The layers, of a model that has `num_layers`.
    ///
    /// # Errors
    /// A setup error that says which layers there are, if one of the list does not exist.
    pub fn indices(&self, num_layers: usize) -> Result<Vec<usize>> {
        match self.0.last() {
            Some(last) if *last.end() >= num_layers => Err(Error::setup(format!(
                "--draft-layers {self}: the model has the layers 0-{}",
                num_layers.saturating_sub(1)
            ))),
            _ => Ok(self.0.iter().cloned().flatten().collect()),
        }
    }
}

impl FromStr for LayerList {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const ACCEPTED: &str = "must be layers in ascending order, as in 0-11,24-29";
        let range = |part: &str| -> Result<RangeInclusive<usize>, Self::Err> {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |digits: &str| digits.trim().parse::<usize>().map_err(|_| ACCEPTED);
            Ok(number(first)?..=number(last)?)
        };
        let ranges: Vec<_> = text.split(',').map(range).collect::<Result<_, _>>()?;
        let sound = ranges.iter().all(|range| !range.is_empty())
            && ranges.is_sorted_by(|a, b| a.end() < b.start());
        sound.then_some(Self(ranges)).ok_or(ACCEPTED)
    }
}

impl fmt::Display for LayerList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, range) in self.0.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            if range.start() == range.end() {
                write!(f, "{comma}{}", range.start())?
            } else {
                write!(f, "{comma}{}-{}", range.start(), range.end())?
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_ascending_and_within_the_model() {
        let list: LayerList = "0-2, 5,7-7,9-10".parse().unwrap();
        assert_eq!(list.to_string(), "0-2,5,7,9-10");
        assert_eq!(list.indices(11).unwrap(), [0, 1, 2, 5, 7, 9, 10]);
        let error = list.indices(10).unwrap_err().to_string();
        assert!(error.contains("--draft-layers 0-2,5,7,9-10"), "{error}");
        assert!(error.ends_with("0-9"), "{error}");
        for wrong in ["", "a", "3-", "-3", "4-2", "0-3,3", "5,1", "1,,2", "1-2-3"] {
            assert!(wrong.parse::<LayerList>().is_err(), "{wrong:?}");
        }
        // Only the ends are read, so that a long list takes no memory.
        let long: LayerList = "0-99999999999999".parse().unwrap();
        long.indices(30).unwrap_err();
    }

    #[test]
    fn every_model_has_a_default() {
        let of = |layers| LayerList::of_a_draft(layers).to_string();
        assert_eq!(of(1), "0");
        assert_eq!(of(2), "0,1");
        assert_eq!(of(3), "0,2");
        assert_eq!(of(30), "0-11,23-29");
        for layers in 1..200 {
            let list = LayerList::of_a_draft(layers);
            assert_eq!(list.to_string().parse(), Ok(list.clone()));
            let indices = list.indices(layers).unwrap();
            assert!(!indices.is_empty(), "{layers}");
            let again = LayerList::of(indices.clone());
            assert_eq!(again.indices(layers).unwrap(), indices);
        }
    }
}

//! Lists of matrices, as configurations name them.

use regex::{RegexSet, RegexSetBuilder};
use std::collections::HashMap;

/// Maximum bytes of the compiled expressions of a list, which strangers wrote.
const MAX_EXPRESSION_BYTES: usize = 16 << 20;

/// Names of matrices, or of what they are parts of, and expressions for such names.
#[derive(Debug, Clone, Default)]
pub struct Modules {
    /// Names, with their places in the list.
    names: HashMap<String, usize>,
    /// Expressions, each for the beginning of a name.
    expressions: RegexSet,
    /// The places of the expressions in the list.
    places: Vec<usize>,
}

impl Modules {
    /// Reads a list, in which `re:` is before expressions.
    ///
    /// # Errors
    /// If an expression is not valid, or too large.
    pub fn new(list: Vec<String>) -> Result<Self, String> {
        let (mut names, mut expressions, mut places) = (HashMap::new(), Vec::new(), Vec::new());
        for (place, entry) in list.into_iter().enumerate() {
            if let Some(expression) = entry.strip_prefix("re:") {
                expressions.push(format!("^(?:{expression})"));
                places.push(place);
            } else {
                names.entry(entry).or_insert(place);
            }
        }
        let expressions = RegexSetBuilder::new(expressions)
            .size_limit(MAX_EXPRESSION_BYTES)
            .build();
        let expressions = expressions.map_err(|e| {
            let text = e.to_string();
            let last = text.lines().last().unwrap_or_default().trim();
            format!("a name after re: is not supported: {last}")
        })?;
        Ok(Self {
            names,
            expressions,
            places,
        })
    }

    /// The place in the list of what has a matrix with these `names`: a name of it, or of something that it is a part of,
    /// or else the first expression.
    pub fn find(&self, names: &[&str]) -> Option<usize> {
        let named = names.iter().find_map(|name| self.find_name(name));
        named.or_else(|| {
            let expressions = names.iter().filter_map(|name| {
                let matches = self.expressions.matches(name);
                matches.iter().next()
            });
            expressions.min().map(|first| self.places[first])
        })
    }

    fn find_name(&self, name: &str) -> Option<usize> {
        // All runs of its parts, the whole first: a list may be much longer than a name.
        let starts = name.match_indices('.').map(|(at, _)| at + 1);
        let mut starts = std::iter::once(0).chain(starts);
        starts.find_map(|start| {
            let ends = name[start..].match_indices('.').map(|(at, _)| start + at);
            let mut ends = ends.chain([name.len()]).rev();
            ends.find_map(|end| self.names.get(&name[start..end]).copied())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_whole_and_expressions_begin_a_name() {
        let list = ["lm_head", "layers.0.mlp", "re:.*gate$", "re:model.x"];
        let modules = Modules::new(list.map(str::to_owned).to_vec()).unwrap();
        for name in [
            "lm_head",
            "model.layers.0.mlp.up_proj",
            "a.gate",
            "model.x.y",
        ] {
            assert!(modules.find(&[name]).is_some(), "{name}");
        }
        for name in [
            "lm_head2",
            "model.layers.00.mlp.up_proj",
            "a.gate_proj",
            "a.model.x",
        ] {
            assert!(modules.find(&[name]).is_none(), "{name}");
        }
        for bad in ["re:(", "re:(?!x)", "re:((a{1000}){1000}){1000}"] {
            let error = Modules::new(vec![bad.to_owned()]).unwrap_err();
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }

    #[test]
    fn whole_names_come_before_parts_and_these_before_the_first_expression() {
        let list = ["re:.*up", "re:.*", "layers.0", "layers.0.up", "re:b"];
        let modules = Modules::new(list.map(str::to_owned).to_vec()).unwrap();
        for (names, place) in [
            (vec!["layers.0.up"], 3),
            (vec!["layers.0.down"], 2),
            (vec!["layers.1.up"], 0),
            (vec!["layers.1.down"], 1),
            (vec!["b", "layers.1.up"], 0),
        ] {
            assert_eq!(modules.find(&names), Some(place), "{names:?}");
        }
    }
}

//! Models in several GGUF files, which are named `NAME-00001-of-00003.gguf` and so on.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// Maximum number of files of a model: all are open at once.
const MAX_PARTS: usize = 512;

/// The facts in the file name of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartName {
    /// The name before `-00001-of-00003.gguf`.
    stem: String,
    /// Number of the part, from 1.
    pub number: usize,
    /// Number of parts of the model.
    pub count: usize,
}

impl PartName {
    /// Reads the name of a file, which may have folders before it; `None` if it is not that of a part.
    pub fn of(name: &str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            let is_number = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten()
        };
        Some(Self {
            stem: stem.to_owned(),
            number: digits(number)?,
            count: digits(count)?,
        })
    }

    /// The name without its end.
    pub fn stem(&self) -> &str {
        &self.stem
    }

    /// The name of part `number`.
    pub fn part(&self, number: usize) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count)
    }

    /// The names of all parts, the first of which was named.
    ///
    /// # Errors
    /// `Setup`, naming the first, if this is another part, or one that cannot be.
    pub fn all(&self) -> Result<Vec<String>> {
        let (number, count) = (self.number, self.count);
        if count > MAX_PARTS || !(1..=count).contains(&number) {
            return Err(Error::setup(format!(
                "part {number} of {count} is not possible: up to {MAX_PARTS} are supported"
            )));
        }
        if number != 1 {
            return Err(Error::setup(format!(
                "it is part {number} of {count}: name the first, {}",
                self.part(1)
            )));
        }
        Ok((1..=count).map(|number| self.part(number)).collect())
    }
}

/// The files of the model whose first, or only, one is `path`.
///
/// # Errors
/// `Setup`, naming the missing files, or the one to name instead.
pub(super) fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(part) = name.and_then(PartName::of) else {
        return Ok(vec![path.to_owned()]);
    };
    let names = part.all().map_err(|e| Error::in_file(path, e))?;
    let files: Vec<PathBuf> = names.iter().map(|name| path.with_file_name(name)).collect();
    let missing = names.iter().zip(&files).skip(1);
    let missing: Vec<&str> = missing
        .filter(|(_, file)| !file.exists())
        .map(|(name, _)| name.as_str())
        .collect();
    match missing.as_slice() {
        [] => Ok(files),
        [first, others @ ..] => {
            let others = match others.len() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let what = format!("its parts {first}{others} are missing beside it");
            Err(Error::in_file(path, what))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_recognized() {
        let part = PartName::of("sub/m.Q4_K_M-00002-of-00012.gguf").unwrap();
        assert_eq!((part.number, part.count), (2, 12));
        assert_eq!(part.part(1), "sub/m.Q4_K_M-00001-of-00012.gguf");
        let error = part.all().unwrap_err().to_string();
        assert!(error.contains("part 2 of 12: name the first"), "{error}");
        let first = PartName::of("m-00001-of-00002.gguf").unwrap();
        let names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
        assert_eq!(first.all().unwrap(), names);
        for impossible in [
            "m-00000-of-00002.gguf",
            "m-00003-of-00002.gguf",
            "m-00001-of-99999.gguf",
        ] {
            let error = PartName::of(impossible).unwrap().all().unwrap_err();
            assert!(error.to_string().contains("is not possible"), "{error}");
        }
        for other in [
            "m.gguf",
            "m-1-of-2.gguf",
            "m-00001-of-00002.bin",
            "-of-.gguf",
            "é-0000é-of-00002.gguf",
        ] {
            assert_eq!(PartName::of(other), None, "{other}");
        }
    }
}

//! Lists of matrices, as configurations name them.

use regex::{RegexSet, RegexSetBuilder};
use std::collections::HashSet;

/// Maximum bytes of the compiled expressions of a list, which strangers wrote.
const MAX_EXPRESSION_BYTES: usize = 4 << 20;

/// Names of matrices, or of what they are parts of, and expressions for such names.
#[derive(Debug, Clone)]
pub struct Modules {
    names: HashSet<String>,
    /// Expressions, each for the beginning of a name.
    expressions: RegexSet,
}

impl Modules {
    /// Reads a list, in which `re:` is before expressions.
    ///
    /// # Errors
    /// If an expression is not valid, or too large.
    pub fn new(list: Vec<String>) -> Result<Self, String> {
        let expression = |name: &String| {
            let expression = name.strip_prefix("re:")?;
            Some(format!("^(?:{expression})"))
        };
        let expressions = RegexSetBuilder::new(list.iter().filter_map(expression))
            .size_limit(MAX_EXPRESSION_BYTES)
            .build();
        let expressions = expressions.map_err(|e| {
            let text = e.to_string();
            let last = text.lines().last().unwrap_or_default().trim();
            format!("a name after re: is not supported: {last}")
        })?;
        let names = list.into_iter().filter(|name| !name.starts_with("re:"));
        Ok(Self {
            names: names.collect(),
            expressions,
        })
    }

    /// Whether the list has the matrix `name`, or something that the matrix is a part of.
    pub fn has(&self, name: &str) -> bool {
        // All runs of its parts: a list may be much longer than a name.
        let starts = name.match_indices('.').map(|(at, _)| at + 1);
        let mut starts = std::iter::once(0).chain(starts);
        let has = |start: usize| {
            let ends = name[start..].match_indices('.').map(|(at, _)| start + at);
            let mut ends = ends.chain([name.len()]);
            ends.any(|end| self.names.contains(&name[start..end]))
        };
        starts.any(has) || self.expressions.is_match(name)
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
            assert!(modules.has(name), "{name}");
        }
        for name in [
            "lm_head2",
            "model.layers.00.mlp.up_proj",
            "a.gate_proj",
            "a.model.x",
        ] {
            assert!(!modules.has(name), "{name}");
        }
        for bad in ["re:(", "re:(?!x)", "re:((a{1000}){1000}){1000}"] {
            let error = Modules::new(vec![bad.to_owned()]).unwrap_err();
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
}

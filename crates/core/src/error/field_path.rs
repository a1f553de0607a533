//! The path of a field in a request.

use std::fmt;

/// Where a field is in a request, from the outside in: `messages[0].role`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldPath(Vec<Segment>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Segment {
    Key(String),
    Index(usize),
}

/// Stands for any index in the names of [`FieldPath::renamed`].
const ANY_INDEX: &str = "*";

impl FieldPath {
    /// The path of a field of the object at this path.
    pub fn key(&self, name: impl Into<String>) -> Self {
        self.with(Segment::Key(name.into()))
    }

    /// The path of an entry of the list at this path.
    pub fn index(&self, index: usize) -> Self {
        self.with(Segment::Index(index))
    }

    /// The path `rest` in the value at this path.
    pub fn join(&self, rest: Self) -> Self {
        Self(self.0.iter().cloned().chain(rest.0).collect())
    }

    /// Whether it is the path of this field, whose names have dots between them.
    pub fn is(&self, names: &str) -> bool {
        *self == Self::from(names)
    }

    fn with(&self, segment: Segment) -> Self {
        let segments = self.0.iter().cloned();
        Self(segments.chain([segment]).collect())
    }

    /// The path of this field in an API that has other names for fields. `names` has pairs of an old and a new
    /// name. The first pair counts whose old name is the beginning of the path. `*` is any index.
    pub fn renamed(&self, names: &[(&str, &str)]) -> Self {
        let renamed = names.iter().find_map(|(old, new)| {
            let (old, new) = (Self::from(*old), Self::from(*new));
            let rest = self.without(&old)?;
            let mut indices = self.0.iter().filter(|segment| segment.is_index());
            let new = new.0.into_iter().map(|segment| match segment {
                Segment::Key(key) if key == ANY_INDEX => indices.next().cloned(),
                segment => Some(segment),
            });
            let new = new.chain(rest.iter().cloned().map(Some));
            new.collect::<Option<Vec<_>>>().map(Self)
        });
        renamed.unwrap_or_else(|| self.clone())
    }

    /// The rest of the path after `start`; `None` if the path does not begin with `start`.
    fn without(&self, start: &Self) -> Option<&[Segment]> {
        let (head, rest) = self.0.split_at_checked(start.0.len())?;
        let matches = |(own, wanted): (&Segment, &Segment)| {
            own == wanted || own.is_index() && *wanted == Segment::Key(ANY_INDEX.into())
        };
        head.iter().zip(&start.0).all(matches).then_some(rest)
    }
}

impl Segment {
    fn is_index(&self) -> bool {
        matches!(self, Self::Index(_))
    }
}

/// Names of fields, with dots between them.
impl From<&str> for FieldPath {
    fn from(names: &str) -> Self {
        let names = names.split('.').map(|name| Segment::Key(name.into()));
        Self(names.collect())
    }
}

impl From<&Self> for FieldPath {
    fn from(path: &Self) -> Self {
        path.clone()
    }
}

impl From<&serde_path_to_error::Path> for FieldPath {
    fn from(path: &serde_path_to_error::Path) -> Self {
        use serde_path_to_error::Segment as Found;
        let segments = path.iter().filter_map(|segment| match segment {
            Found::Seq { index } => Some(Segment::Index(*index)),
            Found::Map { key } => Some(Segment::Key(key.clone())),
            // The variant of an enum is no place in a text.
            Found::Enum { .. } | Found::Unknown => None,
        });
        Self(segments.collect())
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, segment) in self.0.iter().enumerate() {
            match segment {
                Segment::Index(index) => write!(f, "[{index}]")?,
                Segment::Key(key) if i == 0 => f.write_str(key)?,
                Segment::Key(key) => write!(f, ".{key}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_get_the_names_of_an_api() {
        const NAMES: &[(&str, &str)] = &[
            ("tools.*.function.parameters", "tools.*.input_schema"),
            ("tools.*.function", "tools.*"),
            ("response_format.json_schema", "text.format"),
            ("stop", "stop_sequences"),
        ];
        let tool = FieldPath::from("tools").index(3);
        let function = tool.key("function");
        for (path, expected) in [
            (
                function.key("parameters").key("type"),
                "tools[3].input_schema.type",
            ),
            (function.key("name"), "tools[3].name"),
            (function, "tools[3]"),
            (tool.key("type"), "tools[3].type"),
            (FieldPath::from("tools"), "tools"),
            (
                "response_format.json_schema.name".into(),
                "text.format.name",
            ),
            ("response_format.type".into(), "response_format.type"),
            (FieldPath::from("stop").index(1), "stop_sequences[1]"),
            ("stop_token_ids".into(), "stop_token_ids"),
        ] {
            assert_eq!(path.renamed(NAMES).to_string(), expected);
        }
    }
}

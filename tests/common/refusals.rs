//! Tables of what is refused, as texts.

use serde_json::Value as Json;
use std::fmt::Display;

/// The rows of a table, whose columns have ` | ` between them.
pub fn rows<const N: usize>(table: &str) -> impl Iterator<Item = [&str; N]> {
    table.trim().lines().map(|line| {
        let columns: Vec<&str> = line.trim().split(" | ").collect();
        <[&str; N]>::try_from(columns).unwrap_or_else(|row| panic!("{N} columns: {row:?}"))
    })
}

/// A value that a table has in JSON.
pub fn parsed(text: &str) -> Json {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// Changes a value of a config, as in `key.0.key = [1, 2]`: keys and places in lists, with dots between them, and JSON.
pub fn change(config: &mut Json, change: &str) {
    let (path, value) = change.split_once(" = ").expect("a path and a value");
    let found = (path.split('.')).fold(config, |found, key| match key.parse::<usize>() {
        Ok(place) => &mut found[place],
        Err(_) => &mut found[key],
    });
    *found = parsed(value);
}

/// Sets the keys of `other` in a config.
pub fn merge(config: &mut Json, other: &Json) {
    for (key, value) in other.as_object().expect("an object") {
        config[key] = value.clone();
    }
}

/// Asserts that `read` refuses the keys of each row, an object in JSON, in one line that has the text after them.
pub fn assert_refused<T, E: Display>(table: &str, read: impl Fn(Json) -> Result<T, E>) {
    for [keys, want] in rows::<2>(table) {
        let Err(error) = read(parsed(keys)) else {
            panic!("{keys}: it is taken");
        };
        let error = error.to_string();
        assert!(
            error.contains(want) && error.lines().count() == 1,
            "{keys}: {error}"
        );
    }
}

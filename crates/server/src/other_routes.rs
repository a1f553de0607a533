//! Routes of other servers, and what there is here instead.

/// A line for each kind of routes of others, and what there is here instead.
const OTHER_ROUTES: &str = include_str!("other_routes.txt");

/// The lines: routes, and what there is instead of each.
fn lines() -> impl Iterator<Item = (&'static str, &'static str)> {
    let lines = OTHER_ROUTES.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(": "))
}

/// What there is instead of the route `path` of another server; `None` = no such route is known.
pub(super) fn instead_of(path: &str) -> Option<&'static str> {
    let fits = |known: &str| {
        let rest = path.strip_prefix(known);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let mut lines = lines();
    let (_, instead) = lines.find(|(routes, _)| routes.split(' ').any(fits))?;
    Some(instead)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{paths, routes};
    use axum::http::Uri;

    #[test]
    fn what_is_not_here_is_explained_by_what_is() {
        let ours: Vec<&str> = routes().iter().map(|(_, path, _)| *path).collect();
        let mut count = 0;
        for (routes, instead) in lines() {
            for path in routes.split(' ') {
                assert_eq!(instead_of(path), Some(instead), "{path}");
                let mut uri: Uri = path.parse().expect(path);
                paths::normalize(&mut uri);
                assert!(!ours.contains(&uri.path()), "{path}");
                count += 1;
            }
            let words = instead.split([' ', ',', ';']);
            for named in words.filter(|word| word.starts_with('/')) {
                assert!(ours.contains(&named), "{named}");
            }
        }
        assert!(count > 50, "{count}");
    }

    #[test]
    fn whole_segments_count() {
        assert_eq!(instead_of("/generate"), Some("use /v1/completions"));
        assert_eq!(
            instead_of("/v1/audio/speech"),
            Some("audio is not supported")
        );
        assert_eq!(instead_of("/generated"), None);
        assert_eq!(instead_of("/"), None);
    }
}

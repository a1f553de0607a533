//! Where this program is.

use foretoken::error::{Error, Result};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The path of this program, by which it is found later, too.
///
/// # Errors
/// `Setup`: it is not there any more, or the system does not say where it is.
pub fn path() -> Result<PathBuf> {
    let found = std::env::current_exe().and_then(|program| Ok((program.canonicalize()?, program)));
    let (running, program) =
        found.map_err(|e| Error::setup(format!("the program does not find itself: {e}")))?;
    let name = std::env::args_os().next().unwrap_or_default();
    let path = std::env::var_os("PATH").unwrap_or_default();
    Ok(as_named(Path::new(&name), &path, &running).unwrap_or(program))
}

/// The path by which a command of this `name` finds the program that is `running`, in the folders of `path` if it is no path.
/// Links in it stay: a package manager, or whoever updates, lets them lead to the next version and removes this one. `None` =
/// the name leads elsewhere.
fn as_named(name: &Path, path: &OsStr, running: &Path) -> Option<PathBuf> {
    let named: Vec<PathBuf> = if name.components().count() == 1 {
        let folders = std::env::split_paths(path);
        folders.map(|folder| folder.join(name)).collect()
    } else {
        vec![name.to_owned()]
    };
    let mut named = named
        .into_iter()
        .filter_map(|file| std::path::absolute(file).ok());
    named.find(|file| file.canonicalize().is_ok_and(|file| file == running))
}

// Windows seldom has links.
#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_where_its_name_leads() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        for name in ["v1", "bin", "other"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        for file in ["v1/foretoken", "other/foretoken"] {
            std::fs::write(at(file), "").unwrap();
        }
        std::os::unix::fs::symlink(at("v1/foretoken"), at("bin/foretoken")).unwrap();
        let running = at("v1/foretoken").canonicalize().unwrap();
        let path = std::env::join_paths([at("other"), at("bin")]).unwrap();
        let named = |name: &Path| as_named(name, &path, &running);
        let link = Some(at("bin/foretoken"));
        assert_eq!(named(Path::new("foretoken")), link);
        assert_eq!(named(&at("bin/foretoken")), link);
        // It was started under a name that says nothing.
        for name in ["", "renamed", "other/foretoken"] {
            assert_eq!(named(Path::new(name)), None, "{name}");
        }
        assert_eq!(named(&at("other/foretoken")), None);
    }
}

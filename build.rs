//! Notes the commit of a release in `FORETOKEN_COMMIT`, which reports of `bench` cite, and what `--version` says in
//! `FORETOKEN_VERSION`. A development build notes no commit, since it would have to be built anew after each one.
//! On Windows, it gives the main thread the stack that it has elsewhere.

use std::env;
use std::fs;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=FORETOKEN_COMMIT");
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    // Whoever builds without a repository, as in a container, may say it.
    let named = env::var("FORETOKEN_COMMIT")
        .ok()
        .filter(|name| !name.is_empty());
    let found = if named.is_none() && is_release {
        commit(Path::new(".git"))
    } else {
        None
    };
    if let Some(commit) = &found {
        println!("cargo:rustc-env=FORETOKEN_COMMIT={commit}");
    }
    let version = version(named.or(found).as_deref());
    println!("cargo:rustc-env=FORETOKEN_VERSION={version}");
    stack();
}

/// Windows gives the main thread 1 MiB unless the program says otherwise.
fn stack() {
    const BYTES: u32 = 8 << 20;
    let target = |what: &str| env::var(format!("CARGO_CFG_TARGET_{what}")).unwrap_or_default();
    if target("OS") == "windows" {
        let flag = match target("ENV").as_str() {
            "msvc" => format!("/STACK:{BYTES}"),
            _ => format!("-Wl,--stack,{BYTES}"),
        };
        println!("cargo:rustc-link-arg-bins={flag}");
    }
}

/// The version, and in brackets the commit, if it is known, and the features of this build.
fn version(commit: Option<&str>) -> String {
    let variables = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut features: Vec<_> = variables
        .filter_map(|name| {
            let feature = name.strip_prefix("CARGO_FEATURE_")?;
            Some(feature.to_lowercase().replace('_', "-"))
        })
        .filter(|feature| feature != "default")
        .collect();
    features.sort();
    let features = match features.as_slice() {
        [] => "no features".to_owned(),
        some => format!("features: {}", some.join(", ")),
    };
    let number = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    match commit {
        None => format!("{number} ({features})"),
        Some(commit) => format!("{number} (commit {commit}; {features})"),
    }
}

/// The commit that is checked out, if `git` is the folder of a repository.
fn commit(git: &Path) -> Option<String> {
    let read = |name: &str| {
        let path = git.join(name);
        let text = fs::read_to_string(&path).ok()?;
        println!("cargo:rerun-if-changed={}", path.display());
        Some(text)
    };
    let head = read("HEAD")?;
    // Each commit is noted there, also if the branch has no file yet since its commits were packed.
    let log = git.join("logs/HEAD");
    if log.exists() {
        println!("cargo:rerun-if-changed={}", log.display());
    }
    let commit = match head.trim().strip_prefix("ref: ") {
        None => head.trim().to_owned(),
        Some(branch) => match read(branch) {
            Some(commit) => commit.trim().to_owned(),
            None => {
                let packed = read("packed-refs")?;
                let mut lines = packed.lines().filter_map(|line| line.split_once(' '));
                lines.find(|(_, name)| *name == branch)?.0.to_owned()
            }
        },
    };
    let is_hash = commit.len() >= 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then_some(commit)
}

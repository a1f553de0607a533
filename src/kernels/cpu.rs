//! Which instructions the CPU kernels use.

use crate::error::{Error, Result};
use std::sync::OnceLock;

/// A set of instructions, the better ones last. All give the same bits in products; attention has
/// one order of additions a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Path {
    /// Plain Rust.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 VNNI on vectors of 256 bits, beside the above.
    Avx512Vnni,
}

/// Overrides the choice, for tests and for comparisons: `portable`, `avx2` or `avx512vnni`.
pub const VARIABLE: &str = "FORETOKEN_CPU_KERNELS";

impl Path {
    /// All paths, and how [`VARIABLE`] names them.
    pub const ALL: [(&'static str, Self); 3] = [
        ("portable", Self::Portable),
        ("avx2", Self::Avx2),
        ("avx512vnni", Self::Avx512Vnni),
    ];

    /// Whether this CPU can run it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let vnni = is_x86_feature_detected!("avx512vnni")
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            match self {
                Self::Portable => true,
                Self::Avx2 => avx2,
                Self::Avx512Vnni => avx2 && vnni,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }

    fn best() -> Self {
        let mut paths = Self::ALL.iter().rev().map(|&(_, path)| path);
        paths.find(|p| p.is_available()).unwrap_or(Self::Portable)
    }

    fn choose(wanted: Option<&str>) -> Result<Self> {
        let Some(wanted) = wanted else {
            return Ok(Self::best());
        };
        let known = Self::ALL.iter().find(|(name, _)| *name == wanted);
        match known {
            Some((_, path)) if path.is_available() => Ok(*path),
            Some(_) => Err(Error::setup(format!(
                "{VARIABLE}={wanted}: this CPU does not have these instructions"
            ))),
            None => Err(Error::setup(format!(
                "{VARIABLE}={wanted}: expected portable, avx2 or avx512vnni"
            ))),
        }
    }
}

/// The path of this process: what [`VARIABLE`] asks for, else the best that the CPU has.
///
/// # Errors
/// A setup error where the variable asks for what is not known or not there. (The kernels then use
/// the best path.)
pub fn check() -> Result<Path> {
    Path::choose(std::env::var(VARIABLE).ok().as_deref())
}

/// The path of this process, found once.
pub(super) fn path() -> Path {
    static PATH: OnceLock<Path> = OnceLock::new();
    *PATH.get_or_init(|| check().unwrap_or_else(|_| Path::best()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_obeyed_or_refused() {
        assert_eq!(Path::choose(Some("portable")).unwrap(), Path::Portable);
        assert_eq!(Path::choose(None).unwrap(), Path::best());
        let error = Path::choose(Some("sse9")).unwrap_err().to_string();
        assert!(error.contains("expected portable, avx2"), "{error}");
        for (name, path) in Path::ALL {
            assert_eq!(Path::choose(Some(name)).is_ok(), path.is_available());
        }
    }
}

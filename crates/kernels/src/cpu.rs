//! Selects the instruction set of the CPU kernels.

use std::fmt;
use std::sync::OnceLock;

/// Whether the CPU has something. Only this creates the proof.
trait Detect: Sized {
    fn detect() -> Option<Self>;
}

/// Every CPU has what is common to all.
impl Detect for () {
    fn detect() -> Option<Self> {
        Some(())
    }
}

/// A row for each instruction set, from slowest to fastest: what it proves as well, its name, what it is, on which targets it
/// may be, and whether this CPU has it.
macro_rules! instruction_sets {
    ($($isa:ident($base:ty) $name:literal $what:literal, $target:meta => $is_there:expr;)*) => {
        $(
            #[doc = concat!("Proof that this CPU has ", $what, ". Only detection creates one.")]
            #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
            pub struct $isa($base);

            impl Detect for $isa {
                fn detect() -> Option<Self> {
                    #[cfg($target)]
                    if $is_there {
                        return <$base>::detect().map(Self);
                    }
                    None
                }
            }
        )*

        /// An instruction set that this CPU has; variants are ordered from slowest to fastest. Products and
        /// attention have the same bits with all of them, but for attention over pools in f16 and bf16 with AMX. Where numbers
        /// are bf16, AVX512-BF16 takes those below 1.2e-38 as zeros, and the others do not.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Isa {
            /// Plain Rust.
            Portable,
            $(#[doc = concat!("The CPU has ", $what, ".")] $isa($isa),)*
        }

        impl Isa {
            /// The names that [`VARIABLE`] accepts, from slowest to fastest: those of x86-64, then those of 64-bit ARM.
            pub const NAMES: [&'static str; 11] = ["portable", $($name),*];

            /// The instruction set called `name`, if it exists and this CPU has it.
            pub fn detect(name: &str) -> Option<Self> {
                match name {
                    "portable" => Some(Self::Portable),
                    $($name => $isa::detect().map(Self::$isa),)*
                    _ => None,
                }
            }

            /// Its name in [`Isa::NAMES`].
            pub fn name(self) -> &'static str {
                match self {
                    Self::Portable => "portable",
                    $(Self::$isa(_) => $name,)*
                }
            }
        }
    };
}

instruction_sets! {
    Avx2(()) "avx2" "AVX2, FMA and F16C", target_arch = "x86_64" =>
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    AvxVnni(Avx2) "avxvnni" "AVX-VNNI (on vectors of 256 bits), and everything that [`Avx2`] proves",
        target_arch = "x86_64" => is_x86_feature_detected!("avxvnni");
    Avx512Vnni(Avx2) "avx512vnni" "AVX-512 F, BW, VL and VNNI, and everything that [`Avx2`] proves",
        target_arch = "x86_64" => is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
    Avx512Bf16(Avx512Vnni) "avx512bf16" "AVX512-BF16, and everything that [`Avx512Vnni`] proves",
        target_arch = "x86_64" => is_x86_feature_detected!("avx512bf16");
    // A process must be permitted to use them.
    AmxInt8(Avx512Bf16) "amxint8"
        "AMX's tiles of bytes (`amx_tile`, `amx_int8`), and everything that [`Avx512Bf16`] proves",
        all(target_arch = "x86_64", target_os = "linux") => tiles::has(tiles::INT8) && tiles::are_permitted();
    AmxBf16(AmxInt8) "amxbf16" "AMX's tiles of bf16 (`amx_bf16`), and everything that [`AmxInt8`] proves",
        all(target_arch = "x86_64", target_os = "linux") => tiles::has(tiles::BF16);
    // All CPUs of 64-bit ARM have it.
    Neon(()) "neon" "NEON of 64-bit ARM", target_arch = "aarch64" => std::arch::is_aarch64_feature_detected!("neon");
    Dotprod(Neon) "dotprod" "dot products of bytes (ARMv8.2), and everything that [`Neon`] proves",
        target_arch = "aarch64" => std::arch::is_aarch64_feature_detected!("dotprod");
    I8mm(Dotprod) "i8mm" "matrix products of bytes (ARMv8.6), and everything that [`Dotprod`] proves",
        target_arch = "aarch64" => std::arch::is_aarch64_feature_detected!("i8mm");
    NeonBf16(I8mm) "neonbf16" "products of bf16 (ARMv8.6), and everything that [`I8mm`] proves",
        target_arch = "aarch64" => std::arch::is_aarch64_feature_detected!("bf16");
}

/// The registers of AMX, which a process must ask its kernel for.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tiles {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::sync::OnceLock;

    /// `ARCH_REQ_XCOMP_PERM` of `arch_prctl`, and the state that it asks for: that of the tiles' contents.
    const REQUEST: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;

    /// Bits of what tiles may hold.
    pub const BF16: u32 = 1 << 22;
    pub const INT8: u32 = 1 << 25;

    /// Whether the CPU has `amx_tile`, and these products.
    pub fn has(products: u32) -> bool {
        const TILE: u32 = 1 << 24;
        let wanted = TILE | products;
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & wanted == wanted
    }

    /// Whether the kernel lets this process use tiles.
    pub fn are_permitted() -> bool {
        static PERMITTED: OnceLock<bool> = OnceLock::new();
        *PERMITTED.get_or_init(ask)
    }

    fn ask() -> bool {
        // SAFETY: the call reads two numbers and changes nothing but the process's permission.
        unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) == 0 }
    }
}

/// The environment variable that overrides the choice, for tests and comparisons. Its value is one of
/// [`Isa::NAMES`].
pub const VARIABLE: &str = "FORETOKEN_CPU_KERNELS";

impl Isa {
    /// All instruction sets that this CPU has. A test of `cpu` tells which of [`Isa::NAMES`] are missing.
    pub fn available() -> impl DoubleEndedIterator<Item = Self> {
        Self::NAMES.into_iter().filter_map(Self::detect)
    }

    /// The proof that this CPU has AVX2, if this instruction set includes it.
    pub fn avx2(self) -> Option<Avx2> {
        match self {
            Self::Avx2(proof) | Self::AvxVnni(AvxVnni(proof)) => Some(proof),
            _ => self.avx512().map(|Avx512Vnni(proof)| proof),
        }
    }

    /// The proof that this CPU has AVX512-VNNI, if this instruction set includes it.
    pub fn avx512(self) -> Option<Avx512Vnni> {
        match self {
            Self::Avx512Vnni(proof) => Some(proof),
            _ => self.avx512_bf16().map(|Avx512Bf16(proof)| proof),
        }
    }

    /// The proof that this CPU has AVX512-BF16, if this instruction set includes it.
    pub fn avx512_bf16(self) -> Option<Avx512Bf16> {
        match self {
            Self::Avx512Bf16(proof) => Some(proof),
            _ => self.amx_int8().map(|AmxInt8(proof)| proof),
        }
    }

    /// The proof that this CPU has AMX's tiles of bytes, if this instruction set includes it.
    pub fn amx_int8(self) -> Option<AmxInt8> {
        match self {
            Self::AmxInt8(proof) | Self::AmxBf16(AmxBf16(proof)) => Some(proof),
            _ => None,
        }
    }

    /// The proof that this CPU has NEON, if this instruction set includes it.
    pub fn neon(self) -> Option<Neon> {
        match self {
            Self::Neon(proof) => Some(proof),
            _ => self.dotprod().map(|Dotprod(proof)| proof),
        }
    }

    /// The proof that this CPU has the dot products of ARMv8.2, if this instruction set includes it.
    pub fn dotprod(self) -> Option<Dotprod> {
        match self {
            Self::Dotprod(proof) => Some(proof),
            _ => self.i8mm().map(|I8mm(proof)| proof),
        }
    }

    /// The proof that this CPU has the matrix products of ARMv8.6, if this instruction set includes it.
    pub fn i8mm(self) -> Option<I8mm> {
        match self {
            Self::I8mm(proof) => Some(proof),
            _ => self.neon_bf16().map(|NeonBf16(proof)| proof),
        }
    }

    /// The proof that this CPU has the products of bf16 of ARMv8.6, if this instruction set includes it.
    pub fn neon_bf16(self) -> Option<NeonBf16> {
        match self {
            Self::NeonBf16(proof) => Some(proof),
            _ => None,
        }
    }

    /// The best one at everything. AMX's tiles of bf16 are not: prompts gain, but a single row takes longer with them.
    fn best() -> Self {
        let best = Self::available().rfind(|isa| !matches!(isa, Self::AmxBf16(_)));
        best.unwrap_or(Self::Portable)
    }

    fn choose(wanted: Option<&str>) -> Result<Self, String> {
        let Some(wanted) = wanted else {
            return Ok(Self::best());
        };
        Self::detect(wanted).ok_or_else(|| match Self::NAMES.contains(&wanted) {
            true => format!("{VARIABLE}={wanted}: this CPU does not have these instructions"),
            false => format!(
                "{VARIABLE}={wanted}: expected one of {}",
                Self::NAMES.join(", ")
            ),
        })
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The instruction set of this process: the one that [`VARIABLE`] asks for, otherwise the best one of
/// this CPU.
///
/// # Errors
/// A setup error if the variable names an instruction set that is unknown or that this CPU does not
/// have. (The kernels then use the best one.)
pub fn check() -> Result<Isa, String> {
    Isa::choose(std::env::var(VARIABLE).ok().as_deref())
}

/// The instruction set of this process, determined once.
pub(super) fn isa() -> Isa {
    static ISA: OnceLock<Isa> = OnceLock::new();
    *ISA.get_or_init(|| check().unwrap_or_else(|_| Isa::best()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Tests run on what the CPU has, so that this is told even if they pass: what tests print is not shown.
    #[test]
    fn instruction_sets_that_are_not_tested_are_told() {
        let missing = Isa::NAMES.iter().filter(|name| Isa::detect(name).is_none());
        let missing: Vec<&str> = missing.copied().collect();
        assert_eq!(Isa::available().count() + missing.len(), Isa::NAMES.len());
        if !missing.is_empty() {
            let line = format!("not run here: kernels for {}\n", missing.join(" and "));
            std::io::stderr().write_all(line.as_bytes()).unwrap();
        }
    }

    #[test]
    fn the_variable_is_obeyed_or_refused() {
        assert_eq!(Isa::choose(Some("portable")).unwrap(), Isa::Portable);
        assert_eq!(Isa::choose(None).unwrap(), Isa::best());
        let error = Isa::choose(Some("sse9")).unwrap_err();
        assert!(error.contains("expected one of portable, avx2"), "{error}");
        for name in Isa::NAMES {
            let chosen = Isa::choose(Some(name));
            match Isa::detect(name) {
                Some(isa) => assert_eq!((chosen.unwrap(), isa.name()), (isa, name)),
                None => assert!(chosen.unwrap_err().contains("does not have")),
            }
        }
    }
}

//! Common GPUs, for which `check --gpu` plans without having one.

/// The lowest compute capability that the kernels run on.
const MIN_CAPABILITY: (u32, u32) = (8, 0);

/// What the data sheet of a GPU says.
#[derive(Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The name that people give it.
    pub name: &'static str,
    /// MiB of memory that the driver shows (`nvidia-smi`), or CUDA, where the GPU shares the machine's.
    memory_mib: u64,
    /// Bandwidth of the memory in GB a second.
    bandwidth_gb: u32,
    /// Compute capability.
    pub capability: (u32, u32),
}

const fn gpu(
    name: &'static str,
    memory_mib: u64,
    bandwidth_gb: u32,
    capability: (u32, u32),
) -> Gpu {
    Gpu {
        name,
        memory_mib,
        bandwidth_gb,
        capability,
    }
}

/// For each name, the largest bandwidth of the versions that have it, unless the version is part of the name.
const GPUS: &[Gpu] = &[
    gpu("GB300", 284_208, 8000, (10, 3)),
    gpu("B300", 275_040, 8000, (10, 3)),
    gpu("GB200", 189_471, 8000, (10, 0)),
    gpu("B200", 183_359, 8000, (10, 0)),
    gpu("GH200", 97_871, 4000, (9, 0)),
    gpu("GH200 144GB", 146_831, 4900, (9, 0)),
    gpu("H200", 143_771, 4800, (9, 0)),
    gpu("H200 NVL", 143_771, 4800, (9, 0)),
    gpu("H100", 81_559, 3350, (9, 0)),
    gpu("H100 PCIe", 81_559, 2039, (9, 0)),
    gpu("H100 NVL", 95_830, 3938, (9, 0)),
    gpu("H20", 97_871, 4000, (9, 0)),
    gpu("A100 40GB", 40_960, 1555, (8, 0)),
    gpu("A100 80GB", 81_920, 2039, (8, 0)),
    gpu("A100 80GB PCIe", 81_920, 1935, (8, 0)),
    gpu("A30", 24_576, 933, (8, 0)),
    gpu("A10", 23_028, 600, (8, 6)),
    gpu("A10G", 23_028, 600, (8, 6)),
    gpu("A40", 46_068, 696, (8, 6)),
    gpu("L4", 23_034, 300, (8, 9)),
    gpu("L40", 46_068, 864, (8, 9)),
    gpu("L40S", 46_068, 864, (8, 9)),
    gpu("RTX A4000", 16_376, 448, (8, 6)),
    gpu("RTX A5000", 24_564, 768, (8, 6)),
    gpu("RTX A6000", 49_140, 768, (8, 6)),
    gpu("RTX 2000 Ada", 16_380, 224, (8, 9)),
    gpu("RTX 4000 Ada", 20_475, 360, (8, 9)),
    gpu("RTX 4500 Ada", 24_570, 432, (8, 9)),
    gpu("RTX 5000 Ada", 32_760, 576, (8, 9)),
    gpu("RTX 6000 Ada", 49_140, 960, (8, 9)),
    gpu("RTX PRO 2000", 16_311, 288, (12, 0)),
    gpu("RTX PRO 4500", 32_623, 896, (12, 0)),
    gpu("RTX PRO 5000", 48_935, 1344, (12, 0)),
    gpu("RTX PRO 6000", 97_887, 1792, (12, 0)),
    gpu("RTX 3060", 12_288, 360, (8, 6)),
    gpu("RTX 3070", 8192, 448, (8, 6)),
    gpu("RTX 3080", 10_240, 760, (8, 6)),
    gpu("RTX 3080 Ti", 12_288, 912, (8, 6)),
    gpu("RTX 3090", 24_576, 936, (8, 6)),
    gpu("RTX 3090 Ti", 24_564, 1008, (8, 6)),
    gpu("RTX 4060", 8188, 272, (8, 9)),
    gpu("RTX 4060 Ti", 16_380, 288, (8, 9)),
    gpu("RTX 4060 Ti 8GB", 8188, 288, (8, 9)),
    gpu("RTX 4070", 12_282, 504, (8, 9)),
    gpu("RTX 4070 Super", 12_282, 504, (8, 9)),
    gpu("RTX 4070 Ti", 12_282, 504, (8, 9)),
    gpu("RTX 4070 Ti Super", 16_376, 672, (8, 9)),
    gpu("RTX 4080", 16_376, 717, (8, 9)),
    gpu("RTX 4080 Super", 16_376, 736, (8, 9)),
    gpu("RTX 4090", 24_564, 1008, (8, 9)),
    gpu("RTX 5050", 8151, 320, (12, 0)),
    gpu("RTX 5060", 8151, 448, (12, 0)),
    gpu("RTX 5060 Ti", 16_311, 448, (12, 0)),
    gpu("RTX 5060 Ti 8GB", 8151, 448, (12, 0)),
    gpu("RTX 5070", 12_227, 672, (12, 0)),
    gpu("RTX 5070 Ti", 16_303, 896, (12, 0)),
    gpu("RTX 5080", 16_303, 960, (12, 0)),
    gpu("RTX 5090", 32_607, 1792, (12, 0)),
    gpu("DGX Spark", 124_610, 273, (12, 1)),
    // What the driver calls that of a DGX Spark.
    gpu("GB10", 124_610, 273, (12, 1)),
    gpu("Jetson Thor", 125_748, 273, (11, 0)),
    gpu("Jetson AGX Orin 64GB", 62_827, 204, (8, 7)),
    gpu("T4", 15_360, 320, (7, 5)),
    gpu("V100", 32_768, 900, (7, 0)),
    gpu("RTX 2080 Ti", 11_264, 616, (7, 5)),
];

/// Words of names that distinguish no GPUs here: those of makers, of kinds of memory, of sockets and of machines, and the
/// memory of the CPU beside a GH200.
const NOISE: &[&str] = &[
    "nvidia",
    "geforce",
    "tesla",
    "quadro",
    "rtx",
    "gb",
    "hbm2",
    "hbm2e",
    "hbm3",
    "hbm3e",
    "sxm",
    "sxm2",
    "sxm4",
    "sxm5",
    "sxm6",
    "ac",
    "dgx",
    "jetson",
    "agx",
    "120gb",
    "480gb",
    "generation",
    "blackwell",
    "workstation",
    "server",
    "edition",
    "max",
    "q",
];

impl Gpu {
    /// The GPU of this name, in any case and with or without what [`NOISE`] has: `rtx 4090`, `4090`, `NVIDIA H100 80GB HBM3`.
    ///
    /// # Errors
    /// A message that lists the known names, the most similar first.
    pub fn parse(name: &str) -> Result<&'static Self, String> {
        let wanted = words(name);
        let is_meant = |gpu: &&Self| {
            let own = words(gpu.name);
            // The size may be added where it distinguishes nothing.
            let size = (gpu.memory_mib as f64 / 1024.).round().to_string();
            own == wanted || format!("{own}{size}") == wanted
        };
        GPUS.iter().find(is_meant).ok_or_else(|| {
            // Errors have no room for all of them, so the most similar come first.
            let mut names: Vec<&str> = GPUS.iter().map(|gpu| gpu.name).collect();
            let likeness = |name: &str| strsim::jaro_winkler(&wanted, &words(name));
            names.sort_by(|a, b| likeness(b).total_cmp(&likeness(a)));
            format!("unknown GPU: known are {}", names.join(", "))
        })
    }

    /// Checks that the kernels run on it.
    ///
    /// # Errors
    /// A message that says what would.
    pub fn check(&self) -> Result<(), String> {
        if self.capability >= MIN_CAPABILITY {
            return Ok(());
        }
        let ((major, minor), (min_major, min_minor)) = (self.capability, MIN_CAPABILITY);
        Err(format!(
            "{} has compute capability {major}.{minor}, and the kernels need {min_major}.{min_minor} or higher, as an A100, L4 or RTX 3090 has",
            self.name
        ))
    }

    /// Bytes of memory.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib << 20
    }

    /// Bytes a second that are taken to arrive from the host's memory: 80% of 16 lanes of PCIe 5 or 4, as the generation has.
    pub fn host_bandwidth(&self) -> f64 {
        let lanes = if self.capability >= (9, 0) {
            63e9
        } else {
            31.5e9
        };
        0.8 * lanes
    }

    /// Bytes a second that the memory delivers, according to the data sheet.
    pub fn bandwidth(&self) -> f64 {
        f64::from(self.bandwidth_gb) * 1e9
    }
}

/// The words of a name that distinguish it, in one.
fn words(name: &str) -> String {
    let lower = name.to_ascii_lowercase();
    let words = lower.split(|c: char| !c.is_ascii_alphanumeric());
    let words = words.filter(|word| !NOISE.contains(word)).map(|word| {
        let word = word.strip_prefix("rtx").unwrap_or(word);
        let is_size = |digits: &&str| digits.bytes().all(|b| b.is_ascii_digit());
        let size = |unit: &str| word.strip_suffix(unit).filter(is_size);
        size("gb").or_else(|| size("g")).unwrap_or(word)
    });
    words.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_people_and_drivers_write_them() {
        for (written, name) in [
            ("h100", "H100"),
            ("NVIDIA H100 80GB HBM3", "H100"),
            ("NVIDIA H100 PCIe", "H100 PCIe"),
            ("NVIDIA H200", "H200"),
            ("a100-80gb", "A100 80GB"),
            ("A100 40 GB", "A100 40GB"),
            ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
            ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
            ("Tesla T4", "T4"),
            ("l40s", "L40S"),
            ("rtx4090", "RTX 4090"),
            ("4090", "RTX 4090"),
            ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
            ("rtx_6000_ada", "RTX 6000 Ada"),
            ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
            ("rtx-pro-6000", "RTX PRO 6000"),
            (
                "NVIDIA RTX PRO 6000 Blackwell Server Edition",
                "RTX PRO 6000",
            ),
            ("NVIDIA RTX A6000", "RTX A6000"),
            ("NVIDIA A10G", "A10G"),
            ("NVIDIA B300 SXM6 AC", "B300"),
            ("NVIDIA GH200 480GB", "GH200"),
            ("gh200 96gb", "GH200"),
            ("NVIDIA GH200 144G HBM3e", "GH200 144GB"),
            ("rtx 5060 ti 16gb", "RTX 5060 Ti"),
            ("5060ti-8gb", "RTX 5060 Ti 8GB"),
            ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super"),
            ("NVIDIA RTX PRO 5000 Blackwell", "RTX PRO 5000"),
            ("NVIDIA GB10", "GB10"),
            ("spark", "DGX Spark"),
            ("NVIDIA Thor", "Jetson Thor"),
            ("Jetson AGX Thor", "Jetson Thor"),
        ] {
            assert_eq!(Gpu::parse(written).unwrap().name, name, "{written}");
        }
    }

    #[test]
    fn no_two_names_are_the_same() {
        for gpu in GPUS {
            assert_eq!(Gpu::parse(gpu.name), Ok(gpu));
        }
        for unknown in ["", "gpu", "A100", "h1000", "rtx"] {
            let error = Gpu::parse(unknown).unwrap_err();
            assert!(error.contains("H100 PCIe"), "{unknown}: {error}");
        }
        let error = Gpu::parse("h1000").unwrap_err();
        assert!(
            error.starts_with("unknown GPU: known are H100, "),
            "{error}"
        );
    }

    #[test]
    fn older_gpus_are_refused() {
        for gpu in GPUS {
            let is_old = ["T4", "V100", "RTX 2080 Ti"].contains(&gpu.name);
            assert_eq!(gpu.check().is_err(), is_old, "{}", gpu.name);
        }
        let error = Gpu::parse("t4").unwrap().check().unwrap_err();
        assert!(error.starts_with("T4 has compute capability 7.5, and"));
    }
}

//! Which instruction sets the kernels may use on this machine.

use std::sync::OnceLock;

use crate::error::KernelError;

/// What `Isa::restrict` chose.
static RESTRICTED: OnceLock<Isa> = OnceLock::new();

/// A family of instructions that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// As `Avx512Vnni`, with AMX's tiles of bytes where rows are many. Behind it among those available: to be asked for,
    /// as VNNI was quicker where both were measured.
    Amx,
    /// As `Avx512`, with VNNI's products of bytes.
    Avx512Vnni,
    /// AVX-512 F, BW, VL, DQ with FMA and F16C.
    Avx512,
    /// As `Avx2`, with VNNI's products of bytes.
    AvxVnni,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// As `Neon`, with the dot product instructions (`sdot`) for bytes.
    NeonDot,
    /// What every 64-bit Arm has.
    Neon,
    /// What the compiler makes of plain Rust.
    Portable,
}

impl Isa {
    pub fn name(self) -> &'static str {
        match self {
            Isa::Amx => "amx",
            Isa::Avx512Vnni => "avx512vnni",
            Isa::Avx512 => "avx512",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx2 => "avx2",
            Isa::NeonDot => "neondot",
            Isa::Neon => "neon",
            Isa::Portable => "portable",
        }
    }

    /// Those that run here, best first.
    pub fn available() -> &'static [Isa] {
        static FOUND: OnceLock<Vec<Isa>> = OnceLock::new();
        FOUND.get_or_init(|| {
            let mut found = vec![];
            #[cfg(target_arch = "x86_64")]
            {
                let avx2 = is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c");
                let avx512 = is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq");
                let vnni = avx2 && avx512 && is_x86_feature_detected!("avx512vnni");
                if vnni {
                    found.push(Isa::Avx512Vnni);
                }
                if vnni && crate::simd::amx::is_available() {
                    found.push(Isa::Amx);
                }
                if avx2 && avx512 {
                    found.push(Isa::Avx512);
                }
                if avx2 && is_x86_feature_detected!("avxvnni") {
                    found.push(Isa::AvxVnni);
                }
                if avx2 {
                    found.push(Isa::Avx2);
                }
            }
            #[cfg(target_arch = "aarch64")]
            {
                if std::arch::is_aarch64_feature_detected!("dotprod") {
                    found.push(Isa::NeonDot);
                }
                found.push(Isa::Neon);
            }
            found.push(Isa::Portable);
            found
        })
    }

    /// This one if it runs here, else the best.
    #[must_use]
    pub fn or_best(self) -> Isa {
        if Isa::available().contains(&self) {
            self
        } else {
            Isa::best()
        }
    }

    /// The best that runs here, or what `restrict` chose.
    pub fn best() -> Isa {
        *RESTRICTED.get().unwrap_or(&Isa::available()[0])
    }

    /// Have the whole process use one of those that run here, as on a machine that has no better: for tests of the others.
    /// Once, before the first kernel runs.
    ///
    /// # Errors
    /// It does not run here, or another one was chosen.
    pub fn restrict(name: &str) -> Result<(), KernelError> {
        let known = Isa::available().iter().find(|isa| isa.name() == name);
        match known {
            Some(&isa) if *RESTRICTED.get_or_init(|| isa) == isa => Ok(()),
            _ => Err(KernelError::Isa(name.to_owned())),
        }
    }
}

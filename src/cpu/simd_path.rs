//! The names of the vector instruction sets, and which of them this processor has.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use crate::error::DeviceError;

/// A set of vector instructions, in ascending order of width.
///
/// Any value may be named anywhere; code runs with the best detected path at or below it, so
/// instructions that the processor lacks are never reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SimdPath {
    /// The baseline of the build target.
    Scalar,
    /// AVX2 and FMA: 8 lanes.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: 16 lanes.
    Avx512,
}

impl SimdPath {
    /// Every path, ascending.
    pub const ALL: [SimdPath; 3] = [SimdPath::Scalar, SimdPath::Avx2, SimdPath::Avx512];

    /// The widest path that this processor has.
    pub fn detect() -> Self {
        static DETECTED: OnceLock<SimdPath> = OnceLock::new();
        *DETECTED.get_or_init(probe)
    }

    /// The paths that this processor has, ascending.
    pub fn available() -> Vec<Self> {
        let all = Self::ALL.into_iter();
        all.filter(|&p| p <= Self::detect()).collect()
    }

    /// This path, or the widest detected one where this one was not detected.
    pub fn usable(self) -> Self {
        self.min(Self::detect())
    }

    /// The path's name, as a command line takes it.
    pub fn name(self) -> &'static str {
        match self {
            SimdPath::Scalar => "scalar",
            SimdPath::Avx2 => "avx2",
            SimdPath::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for SimdPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SimdPath {
    type Err = DeviceError;

    /// Reads a path's name.
    ///
    /// # Errors
    /// [`DeviceError::UnknownSimdPath`] for a name that no path has, and
    /// [`DeviceError::SimdPathUnavailable`] for a path that this processor lacks.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || DeviceError::UnknownSimdPath { found: text.into() };
        let path = Self::ALL.into_iter().find(|p| p.name() == text);
        only_up_to(path.ok_or_else(unknown)?, Self::detect())
    }
}

/// `wanted` when it is at or below `detected`.
fn only_up_to(wanted: SimdPath, detected: SimdPath) -> Result<SimdPath, DeviceError> {
    if wanted <= detected {
        return Ok(wanted);
    }
    Err(DeviceError::SimdPathUnavailable {
        wanted: wanted.name(),
        detected: detected.name(),
    })
}

#[cfg(target_arch = "x86_64")]
fn probe() -> SimdPath {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => SimdPath::Avx512,
        (true, false) => SimdPath::Avx2,
        (false, _) => SimdPath::Scalar,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn probe() -> SimdPath {
    SimdPath::Scalar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_reads_back_and_a_wrong_one_is_refused() {
        for path in SimdPath::available() {
            assert_eq!(path.name().parse(), Ok(path));
        }
        assert_eq!(
            "sse9".parse::<SimdPath>(),
            Err(DeviceError::UnknownSimdPath {
                found: "sse9".into()
            })
        );
    }

    #[test]
    fn a_path_above_the_detected_one_is_refused() {
        assert_eq!(
            only_up_to(SimdPath::Avx512, SimdPath::Avx2),
            Err(DeviceError::SimdPathUnavailable {
                wanted: "avx512",
                detected: "avx2"
            })
        );
        assert_eq!(
            only_up_to(SimdPath::Avx2, SimdPath::Avx512),
            Ok(SimdPath::Avx2)
        );
    }
}

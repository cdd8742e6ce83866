//! `bitstep bless`.

use std::path::PathBuf;

use clap::Args;

use super::Outcome;
use super::device::DeviceArguments;
use super::verify::extent;
use crate::cpu::CpuBackend;
use crate::cpu::context::CpuContext;
use crate::cpu::simd::SimdPath;
use crate::error::{DeviceError, ExitCode};
use crate::golden::Verdict;
use crate::golden::bless::{Blessed, bless, check_allowed};
use crate::io::Recipe;

/// Arguments of `bitstep bless`.
#[derive(Args, Debug)]
pub struct Bless {
    /// The recipe; its golden stands beside it, with the ending .golden
    recipe: PathBuf,
    /// Why these bits are right; kept in the golden
    #[arg(long, value_name = "TEXT")]
    because: String,
    #[command(flatten)]
    device: DeviceArguments,
}

impl Bless {
    /// Runs the recipe in two ways and writes its golden when they agree.
    pub fn run(self) -> Outcome {
        check_allowed(std::env::var_os("CI").as_deref(), &self.because)?;
        let recipe = Recipe::from_path(&self.recipe)?;
        let path = self.recipe.with_extension("golden");
        let first = self.device.open_cpu()?;
        let second = another_way(first.context())?;
        let ways = [way(&first), way(&second)];
        let blessed = bless(&recipe, &path, &self.because, (first, second))?;
        let name = path.display();
        let ways = format!("{} and {}", ways[0], ways[1]);
        match blessed {
            Blessed::Written(golden) => {
                say!("{name}: written ({})", extent(&golden));
                say!("  the same bits by {ways}");
            }
            Blessed::Unchanged(golden) => {
                say!("{name}: identical, nothing changed ({})", extent(&golden));
                say!("  because  {}", golden.because);
            }
            Blessed::Replaced {
                golden,
                difference,
                bits,
            } => {
                say!("{name}: replaced ({})", extent(&golden));
                say!("  the former golden {}", difference.to_string().trim_end());
                match bits {
                    Verdict::Identical => say!("  every bit that it covers stayed the same"),
                    Verdict::Differs(bits) if bits != difference => {
                        say!("  without the header it {}", bits.to_string().trim_end());
                    }
                    Verdict::Differs(_) => {}
                }
                say!("  because  {}", golden.because);
                say!("  the same bits by {ways}");
            }
            Blessed::NotRepeatable(difference) => {
                say!("{name}: not blessed: {ways} give different bits");
                say!("  {}", difference.to_string().trim_end());
                return Ok(ExitCode::Differs);
            }
        }
        Ok(ExitCode::Done)
    }
}

fn way(backend: &CpuBackend) -> String {
    let (path, threads) = (backend.context().path(), backend.context().threads());
    let plural = if threads == 1 { "" } else { "s" };
    format!("{path} on {threads} thread{plural}")
}

/// Another number of threads, and another vector path where the processor has one.
fn another_way(first: &CpuContext) -> Result<CpuBackend, DeviceError> {
    let mut vectors = SimdPath::available().into_iter();
    let other = vectors.rfind(|&p| p != SimdPath::Scalar && p != first.path());
    let threads = if first.threads() == 1 { 2 } else { 1 };
    let context = CpuContext::new(other.unwrap_or(first.path()), threads)?;
    Ok(CpuBackend::new(context))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_way_is_never_the_first() {
        for path in SimdPath::available() {
            for threads in [1, 2, 3] {
                let first = CpuContext::new(path, threads).unwrap();
                let second = another_way(&first).unwrap();
                assert_ne!(second.context().threads(), threads);
            }
        }
    }
}

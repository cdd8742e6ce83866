//! `bitstep verify`.

use std::path::{Path, PathBuf};

use clap::Args;

use super::Outcome;
use super::device::DeviceArguments;
use super::form::FormArguments;
use crate::any_device::AnyDevice;
use crate::cuda::probe::HOPPER;
use crate::engine::session::Session;
use crate::error::{Error, ExitCode, GoldenError};
use crate::golden::flip::Flip;
use crate::golden::record::Disturb;
use crate::golden::verify::{recipe_beside, verify};
use crate::golden::{GoldenFile, Verdict};
use crate::io::Recipe;
use crate::shape::Math;

/// The domains whose bits this build produces.
pub const PROVABLE_DOMAINS: &str = "f32, tf32.sm90, bf16.sm90, f16.sm90";

/// Arguments of `bitstep verify`.
#[derive(Args, Debug)]
pub struct Verify {
    /// Golden files; the recipe of each stands beside it, with the ending .toml. What a run gave
    /// instead of a golden is left beside it, with the ending .golden.new
    #[arg(required = true, value_name = "GOLDEN")]
    goldens: Vec<PathBuf>,
    #[command(flatten)]
    device: DeviceArguments,
    #[command(flatten)]
    form: FormArguments,
    /// Flip one bit of one parameter before a step, to see that the check trips; writes no file
    #[arg(long, value_name = "STEP:TENSOR:INDEX:BIT")]
    flip: Option<Flip>,
    /// Say in full what each golden covers and what it does not
    #[arg(long)]
    verbose: bool,
}

impl Verify {
    /// Verifies each golden; one that cannot be verified does not stop the others.
    pub fn run(self) -> Outcome {
        let backend = self.device.open()?;
        let (mut differs, mut first_error) = (false, None);
        for path in &self.goldens {
            match self.one(path, backend.clone()) {
                Ok(ExitCode::Done) => {}
                Ok(_) => differs = true,
                Err(error) if self.goldens.len() == 1 => return Err(error),
                Err(error) => {
                    super::output::note(format_args!("error: {error}"));
                    first_error = first_error.or(Some(error.exit_code()));
                }
            }
        }
        Ok(match differs {
            true => ExitCode::Differs,
            false => first_error.unwrap_or(ExitCode::Done),
        })
    }

    fn one(&self, path: &Path, backend: AnyDevice) -> Outcome {
        let golden = GoldenFile::read(path)?;
        check_provable(path, &golden)?;
        if let Some(note) = unproven(&golden.domain, &backend) {
            super::output::note(format_args!("{}: {note}", path.display()));
        }
        let recipe = self.form.apply(Recipe::from_path(&recipe_beside(path)?)?)?;
        let recipe = recipe.to_trace();
        let flip = self.flip.as_ref();
        if let Some(flip) = flip {
            flip.check_step(golden.steps.len())?;
        }
        let mut disturb = |step: u64, session: &mut Session<AnyDevice>| match flip {
            Some(flip) => flip.apply(step, session),
            None => Ok(()),
        };
        let disturb: Option<Disturb<AnyDevice>> = match flip {
            Some(_) => Some(&mut disturb),
            None => None,
        };
        let verified = verify(&golden, &recipe, backend, disturb)?;
        let name = path.display();
        match verified.verdict {
            Verdict::Identical => {
                // What this run compared: in another form of the step it has no traces.
                say!("{name}: identical ({})", extent(&verified.fresh));
                if self.verbose {
                    print_cover(&golden);
                }
                Ok(ExitCode::Done)
            }
            Verdict::Differs(difference) => {
                say!("{name}: {}", difference.to_string().trim_end());
                if self.verbose {
                    print_cover(&golden);
                }
                match &self.flip {
                    Some(flip) => say!(
                        "  flipped  bit {} of {}[{}] before step {}, as asked; the check tripped",
                        flip.bit,
                        flip.tensor,
                        flip.index,
                        flip.step
                    ),
                    None => leave_fresh(path, &verified.fresh)?,
                }
                Ok(ExitCode::Differs)
            }
        }
    }
}

/// What a golden holds, in a few words.
pub fn extent(golden: &GoldenFile) -> String {
    let root = golden.steps.last().map(|s| s.root.to_hex().to_string());
    let root = root.unwrap_or_default();
    let start = root.get(..12).unwrap_or_default();
    let (steps, tensors, ops) = (golden.steps.len(), golden.tensors.len(), golden.ops.len());
    format!(
        "{steps} steps, root {start}…, covers loss, norm and root of every step, {tensors} tensors after the last, {ops} op outputs"
    )
}

fn check_provable(path: &Path, golden: &GoldenFile) -> Result<(), GoldenError> {
    match Math::of_domain(&golden.domain) {
        Some(_) => Ok(()),
        None => Err(GoldenError::Unprovable {
            path: path.display().to_string(),
            expected: PROVABLE_DOMAINS,
            found: golden.domain.clone(),
        }),
    }
}

/// What to say where a device has computed a domain that was never proven on its architecture.
fn unproven(domain: &str, backend: &AnyDevice) -> Option<String> {
    let AnyDevice::Cuda(cuda) = backend else {
        return None;
    };
    let info = &cuda.device().info;
    unproven_on(domain, info.capability).map(|why| format!("{} {why}", info.label()))
}

fn unproven_on(domain: &str, capability: (i32, i32)) -> Option<String> {
    let narrow = Math::of_domain(domain).is_some_and(|math| !math.is_f32());
    let (major, minor) = capability;
    (narrow && capability != HOPPER).then(|| {
        format!(
            "has compute capability {major}.{minor}, on which {domain} is not proven: a difference may be the device's arithmetic"
        )
    })
}

fn print_cover(golden: &GoldenFile) {
    if let Some(last) = golden.steps.last() {
        say!("  root     {}", last.root);
    }
    say!("  domain   {}, contract {}", golden.domain, golden.contract);
    say!("  because  {}", golden.because);
    for line in &golden.covers {
        say!("  covers   {line}");
    }
    for line in &golden.excludes {
        say!("  excludes {line}");
    }
}

/// Writes what the run gave beside the golden and says what to do with it.
fn leave_fresh(path: &Path, fresh: &GoldenFile) -> Result<(), Error> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let beside = PathBuf::from(name);
    fresh.write(&beside)?;
    let (path, recipe) = (path.display(), path.with_extension("toml"));
    say!("  wrote    {} with what this run gave", beside.display());
    say!(
        "  next     if the change is meant: bitstep bless {} --because \"...\"; to compare: bitstep diff {path} {path}.new",
        recipe.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_another_architecture_is_named_as_unproven() {
        let note = unproven_on("bf16.sm90", (8, 0)).expect("another architecture");
        assert!(note.contains("8.0") && note.contains("bf16.sm90"), "{note}");
        assert_eq!(unproven_on("bf16.sm90", HOPPER), None);
        assert_eq!(unproven_on("f32", (8, 0)), None);
    }

    #[test]
    fn a_domain_that_this_build_cannot_produce_is_named() {
        let hash = blake3::hash(b"").to_string();
        let mut golden = GoldenFile::empty("bf16.sm80", hash.clone(), hash);
        let refused = check_provable(Path::new("x.golden"), &golden);
        let error = Error::from(refused.unwrap_err());
        assert_eq!(error.exit_code(), ExitCode::Device);
        assert!(error.to_string().contains("bf16.sm80"), "{error}");
        for math in Math::ALL {
            golden.domain = math.domain().into();
            assert!(check_provable(Path::new("x.golden"), &golden).is_ok());
        }
    }
}

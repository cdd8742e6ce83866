//! `bitstep train`.

use std::path::PathBuf;

use clap::Args;

use super::Outcome;
use super::device::DeviceArguments;
use crate::engine::run::Run;
use crate::error::ExitCode;
use crate::io::Recipe;

/// Arguments of `bitstep train`.
#[derive(Args, Debug)]
pub struct Train {
    /// The recipe, a TOML file
    recipe: PathBuf,
    #[command(flatten)]
    device: DeviceArguments,
}

impl Train {
    /// Trains.
    pub fn run(self) -> Outcome {
        let recipe = Recipe::from_path(&self.recipe)?;
        let steps = recipe.steps;
        let mut run = Run::open(recipe, self.device.open()?)?;
        let start = std::time::Instant::now();
        for step in 0..steps {
            let report = run.step(None)?;
            if step % 50 == 0 {
                println!(
                    "{step} loss {} norm {} {:?}",
                    report.loss,
                    report.grad_norm,
                    start.elapsed()
                );
            }
        }
        println!("root {}", run.trainer.session_mut().root()?);
        Ok(ExitCode::Done)
    }
}

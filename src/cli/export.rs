//! `bitstep export`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Outcome, output};
use crate::error::{CheckpointError, ExitCode};
use crate::io::merge::Merge;
use crate::io::{AdapterFolder, ModelFolder, Recipe};
use crate::model::lora::Base;
use crate::num::nf4::Quantisation;
use crate::report::run_folder::{ADAPTER, RECIPE, check_empty};

/// How the projections of the base were stored while the adapters were trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StoredBase {
    Plain,
    Nf4,
    Nf4Double,
}

/// Arguments of `bitstep export`.
#[derive(Args, Debug)]
pub struct Export {
    /// The folder of a run that trained adapters, or a PEFT adapter folder
    #[arg(value_name = "RUN|ADAPTER")]
    source: PathBuf,
    /// The folder to write; absent or empty
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// Adds the adapters to the weights of their base, so that a whole model folder is written
    #[arg(long, required = true)]
    merge: bool,
    /// The folder of the base [default: the run's, or the one that the adapter names]
    #[arg(long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// How the projections of the base were stored while training [default: the run's, else plain]
    #[arg(long, value_name = "FORM")]
    base: Option<StoredBase>,
}

impl Export {
    /// Writes the merged folder.
    pub fn run(self) -> Outcome {
        let recipe = self.source.join(RECIPE);
        let run = match recipe.is_file() {
            true => Some(Recipe::from_path(&recipe)?),
            false => None,
        };
        let folder = match &run {
            Some(_) => self.source.join(ADAPTER),
            None => self.source.clone(),
        };
        let adapter = AdapterFolder::open(&folder)?;
        let base = ModelFolder::open(&self.base_folder(run.as_ref(), &adapter)?)?;
        let stored = match (self.base, &run) {
            (Some(StoredBase::Plain), _) => Base::Plain,
            (Some(StoredBase::Nf4), _) => Base::Nf4(Quantisation::Once),
            (Some(StoredBase::Nf4Double), _) => Base::Nf4(Quantisation::Double),
            (None, Some(run)) => run.lora.config().map_or(Base::Plain, |lora| lora.base),
            (None, None) => Base::Plain,
        };
        check_empty(&self.out)?;
        let merge = Merge {
            base: &base,
            stored,
            adapter: &adapter,
        };
        merge.write(&self.out)?;
        output::line(format_args!("written to {}", self.out.display()));
        Ok(ExitCode::Done)
    }

    fn base_folder(
        &self,
        run: Option<&Recipe>,
        adapter: &AdapterFolder,
    ) -> Result<PathBuf, CheckpointError> {
        let of_run = || run.and_then(Recipe::model_folder);
        let named = || adapter.base().map(PathBuf::from);
        let found = self.model.clone().or_else(of_run).or_else(named);
        found.ok_or_else(|| CheckpointError::NoBase {
            folder: self.source.display().to_string(),
        })
    }
}

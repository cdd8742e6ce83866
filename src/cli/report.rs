//! `bitstep report`.

use std::path::{Path, PathBuf};

use clap::Args;

use super::{Outcome, output};
use crate::error::{ExitCode, RunError};
use crate::io::atomic::write_whole;
use crate::report::RunHistory;
use crate::report::page;

/// Arguments of `bitstep report`.
#[derive(Args, Debug)]
pub struct Report {
    /// Folders of runs, as train --out leaves them; the first two are held against each other
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// The page; report.html in the first run's folder unless written otherwise
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Also writes each chart as an SVG file into this folder
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
}

impl Report {
    /// Reads the runs, writes the page and says where they part.
    pub fn run(self) -> Outcome {
        let runs: Result<Vec<RunHistory>, RunError> = self
            .runs
            .iter()
            .map(|folder| RunHistory::read(folder))
            .collect();
        let runs = runs?;
        let report = page::Report::new(&runs);
        let out = match (&self.out, self.runs.first()) {
            (Some(out), _) => out.clone(),
            (None, Some(first)) => first.join("report.html"),
            (None, None) => PathBuf::from("report.html"),
        };
        write(&out, &report.html())?;
        output::line(format_args!("page        {}", out.display()));
        if let Some(folder) = &self.svg {
            let made = std::fs::create_dir_all(folder);
            made.map_err(|source| failed(folder, source))?;
            let files = report.files();
            for (name, svg) in &files {
                write(&folder.join(name), svg)?;
            }
            let (count, folder) = (files.len(), folder.display());
            output::line(format_args!("charts      {count} in {folder}"));
        }
        if let Some(parting) = &report.parting {
            output::line(format_args!("runs        {parting}"));
        }
        Ok(ExitCode::Done)
    }
}

fn write(path: &Path, text: &str) -> Result<(), RunError> {
    write_whole(path, text.as_bytes()).map_err(|source| failed(path, source))
}

fn failed(path: &Path, source: std::io::Error) -> RunError {
    RunError::Write {
        path: path.display().to_string(),
        source,
    }
}

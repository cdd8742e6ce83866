//! Adapters merged into their base: one model folder that needs neither.

use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::model_folder::{ModelFolder, companion_files, write_model_folder};
use super::nf4_folder::companions;
use super::peft::AdapterFolder;
use crate::error::{CheckpointError, ConfigError};
use crate::model::decoder::Decoder;
use crate::model::lora::{Base, LoraConfig, PEFT_PREFIX, Projection};
use crate::model::params::ParamSpec;
use crate::model::{AnyConfig, Model};
use crate::num::nf4::{BLOCK, Packed, dequantise_block};

/// What is merged: a base, how its projections were stored while the adapters were trained, and the adapters.
#[derive(Clone, Copy, Debug)]
pub struct Merge<'a> {
    pub base: &'a ModelFolder,
    pub stored: Base,
    pub adapter: &'a AdapterFolder,
}

impl Merge<'_> {
    /// Writes a whole model folder in f32: each adapted projection is `W + scale · B A`, computed in f64 and
    /// rounded once; everything else is the base's, or the adapter's where it holds a whole tensor. With
    /// [`Base::Nf4`], and where the base is quantised already, `W` is the value that its codes stand for.
    ///
    /// # Errors
    /// [`CheckpointError`]: adapters beside a family that has none, a tensor that is missing, has another
    /// shape or has no place in the model; files that cannot be read or written.
    pub fn write(&self, folder: &Path) -> Result<(), CheckpointError> {
        let specs = self.check()?;
        let mut values = Vec::with_capacity(specs.len());
        for spec in &specs {
            values.push(self.merged(spec)?);
        }
        let tensors = specs.iter().zip(&values);
        let tensors = tensors.map(|(s, v)| (s.name.as_str(), s.shape.dims(), v.as_slice()));
        let files: Vec<PathBuf> = companion_files(self.base.path());
        write_model_folder(
            folder,
            self.base.config(),
            self.base.json(),
            tensors,
            &files,
        )
    }

    /// The tensors of the model, once every tensor of both folders is known to have its place.
    fn check(&self) -> Result<Vec<ParamSpec>, CheckpointError> {
        let AnyConfig::Decoder(config) = self.base.config() else {
            return Err(CheckpointError::Config(ConfigError::Conflict {
                file: self.base.path().display().to_string(),
                key: "lora.rank",
                beside: "Mamba, whose projections have no adapters",
            }));
        };
        let lora = LoraConfig {
            base: self.stored,
            ..self.adapter.config().clone()
        };
        let adapted = Decoder::with_adapters(config.clone(), lora).parameters();
        let (adapters, specs): (Vec<ParamSpec>, Vec<ParamSpec>) = adapted
            .into_iter()
            .flat_map(|group| group.tensors)
            .partition(|spec| spec.name.starts_with(PEFT_PREFIX));
        let mut base: Vec<String> = Vec::new();
        let mut beside: Vec<String> = adapters.iter().map(|a| a.name.clone()).collect();
        for spec in &specs {
            base.push(spec.name.clone());
            base.extend(companions(&spec.name));
            beside.push(replaced(&spec.name));
        }
        let names = |all: &[String], check: &dyn Fn(&[&str]) -> Result<(), CheckpointError>| {
            check(&all.iter().map(String::as_str).collect::<Vec<_>>())
        };
        names(&base, &|used| self.base.check_all_used(used))?;
        names(&beside, &|used| self.adapter.check_all_used(used))?;
        Ok(specs)
    }

    /// The values of a tensor of the merged model.
    fn merged(&self, spec: &ParamSpec) -> Result<Vec<f32>, CheckpointError> {
        let dims = spec.shape.dims();
        let whole = replaced(&spec.name);
        if self.adapter.has(&whole) {
            return self.adapter.read_f32(&whole, dims);
        }
        let projection = projection_of(&spec.name);
        let mut values = match self.base.read_nf4(&spec.name, dims)? {
            Some(packed) => numbers(&packed, spec.shape.elements()),
            None => self.base.read_f32(&spec.name, dims)?,
        };
        let Some((module, projection)) = projection else {
            return Ok(values);
        };
        if let Base::Nf4(how) = self.stored {
            values = numbers(&how.pack(&values), values.len());
        }
        let config = self.adapter.config();
        if let ([n_out, n_in], true) = (dims, config.targets.contains(&projection)) {
            let of = |which: &str, shape: [usize; 2]| {
                let name = format!("{PEFT_PREFIX}{module}.{which}.weight");
                self.adapter.read_f32(&name, &shape)
            };
            let a = of("lora_A", [config.rank, *n_in])?;
            let b = of("lora_B", [*n_out, config.rank])?;
            add(&mut values, (&a, &b), config);
        }
        Ok(values)
    }
}

/// The name under which an adapter folder holds a whole tensor of the model.
fn replaced(name: &str) -> String {
    format!("{PEFT_PREFIX}{name}")
}

/// The module and the projection whose weight has this name.
fn projection_of(name: &str) -> Option<(&str, Projection)> {
    let module = name.strip_suffix(".weight")?;
    let (_, last) = module.rsplit_once('.')?;
    Some((module, Projection::of_module(last)?))
}

/// What codes and block maxima stand for.
fn numbers(packed: &Packed, elements: usize) -> Vec<f32> {
    let mut values = vec![0.0; elements];
    let blocks = values.par_chunks_mut(BLOCK);
    let codes = packed.bytes.par_chunks(BLOCK / 2).zip(&packed.maxima);
    blocks
        .zip(codes)
        .for_each(|(block, (codes, &maximum))| dequantise_block(codes, maximum, block));
    values
}

/// `weight += scale · b a`, row by row, each element rounded once.
fn add(weight: &mut [f32], (a, b): (&[f32], &[f32]), config: &LoraConfig) {
    let (rank, scale) = (config.rank, f64::from(config.scale()));
    let n_in = a.len() / rank;
    if n_in == 0 {
        return;
    }
    let rows = weight.par_chunks_mut(n_in).zip(b.par_chunks(rank));
    rows.for_each_init(
        || vec![0.0_f64; n_in],
        |sums, (row, b)| {
            sums.fill(0.0);
            for (a, &b) in a.chunks(n_in).zip(b) {
                let terms = sums.iter_mut().zip(a);
                terms.for_each(|(sum, &a)| *sum += f64::from(a) * f64::from(b));
            }
            for (w, sum) in row.iter_mut().zip(sums) {
                *w = (f64::from(*w) + scale * *sum) as f32;
            }
        },
    );
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;

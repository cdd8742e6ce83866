//! Initial parameters, from Philox or from a folder's tensors.

use crate::error::CheckpointError;
use crate::io::model_folder::ModelFolder;
use crate::io::peft::AdapterFolder;
use crate::model::lora::PEFT_PREFIX;
use crate::model::params::Init;
use crate::num::nf4::Packed;
use crate::num::normal::fill_normal;
use crate::num::philox::{Philox, Purpose};
use crate::num::uniform::fill_uniform;
use crate::plan::{Param, Plan};

/// Where initial parameters come from.
pub trait ParamSource {
    /// What can go wrong.
    type Error;

    /// The values of parameter `index` of the plan, row-major.
    ///
    /// # Errors
    /// A tensor that is missing or has another shape.
    fn values(&self, plan: &Plan, index: usize) -> Result<Vec<f32>, Self::Error>;

    /// Codes and block maxima of parameter `index`, which is stored as NF4; `None` when they are made
    /// from its values.
    ///
    /// # Errors
    /// As [`ParamSource::values`].
    fn packed(&self, _plan: &Plan, _index: usize) -> Result<Option<Packed>, Self::Error> {
        Ok(None)
    }
}

/// Fresh parameters: a function of the seed and the parameter's place in parameter order.
#[derive(Clone, Copy, Debug)]
pub struct FreshInit {
    pub seed: u64,
}

impl ParamSource for FreshInit {
    type Error = std::convert::Infallible;

    fn values(&self, plan: &Plan, index: usize) -> Result<Vec<f32>, Self::Error> {
        let param: &Param = &plan.params[index];
        let shape = plan.shape_of(param);
        let elements = shape.elements();
        Ok(match param.init {
            Init::Ones => vec![1.0; elements],
            Init::Zeros => vec![0.0; elements],
            Init::Uniform { bound } => {
                let mut values = vec![0.0; elements];
                let stream = Philox::new(self.seed, Purpose::Init, index as u32);
                fill_uniform(&mut values, stream, bound);
                values
            }
            Init::Normal { std } => {
                let mut values = vec![0.0; elements];
                let stream = Philox::new(self.seed, Purpose::Init, index as u32);
                fill_normal(&mut values, stream, std);
                values
            }
            Init::LogOfColumn => {
                let columns = shape.dims().last().copied().unwrap_or(1).max(1);
                let log = |i| libm::log((i % columns + 1) as f64) as f32;
                (0..elements).map(log).collect()
            }
            Init::StepBias { low, high } => {
                let stream = Philox::new(self.seed, Purpose::Init, index as u32);
                let span = (libm::log(low), libm::log(high));
                (0..elements)
                    .map(|i| step_bias(stream, i as u64, span))
                    .collect()
            }
        })
    }
}

/// Bias number `i` whose time step is `exp` of a number between `low` and `high`.
fn step_bias(stream: Philox, i: u64, (low, high): (f64, f64)) -> f32 {
    let word = stream.block(i / 4)[(i % 4) as usize];
    let share = (f64::from(word) + 0.5) / 4_294_967_296.0;
    let step = libm::exp(share * (high - low) + low);
    (step + libm::log(-libm::expm1(-step))) as f32
}

impl ParamSource for ModelFolder {
    type Error = CheckpointError;

    fn values(&self, plan: &Plan, index: usize) -> Result<Vec<f32>, Self::Error> {
        let param = &plan.params[index];
        self.read_f32(&param.name, plan.shape_of(param).dims())
    }

    fn packed(&self, plan: &Plan, index: usize) -> Result<Option<Packed>, Self::Error> {
        let param = &plan.params[index];
        self.read_nf4(&param.name, plan.shape_of(param).dims())
    }
}

/// Where the adapters beside a base come from.
#[derive(Clone, Copy, Debug)]
pub enum Adapters<'a> {
    Folder(&'a AdapterFolder),
    Fresh(FreshInit),
}

/// A base from its folder and the adapters beside it.
#[derive(Clone, Copy, Debug)]
pub struct Adapted<'a> {
    pub base: &'a ModelFolder,
    pub adapters: Adapters<'a>,
}

impl ParamSource for Adapted<'_> {
    type Error = CheckpointError;

    fn values(&self, plan: &Plan, index: usize) -> Result<Vec<f32>, Self::Error> {
        let param = &plan.params[index];
        if !param.name.starts_with(PEFT_PREFIX) {
            let whole = format!("{PEFT_PREFIX}{}", param.name);
            return match self.adapters {
                Adapters::Folder(folder) if folder.has(&whole) => {
                    folder.read_f32(&whole, plan.shape_of(param).dims())
                }
                _ => self.base.values(plan, index),
            };
        }
        match self.adapters {
            Adapters::Folder(folder) => folder.read_f32(&param.name, plan.shape_of(param).dims()),
            Adapters::Fresh(fresh) => match fresh.values(plan, index) {
                Ok(values) => Ok(values),
                Err(never) => match never {},
            },
        }
    }

    fn packed(&self, plan: &Plan, index: usize) -> Result<Option<Packed>, Self::Error> {
        self.base.packed(plan, index)
    }
}

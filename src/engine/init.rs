//! Initial parameters, from Philox or from a folder's tensors.

use crate::error::CheckpointError;
use crate::io::model_folder::ModelFolder;
use crate::model::params::Init;
use crate::num::normal::fill_normal;
use crate::num::philox::{Philox, Purpose};
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
        let shape = &plan.slots.spec(param.slot).shape;
        let elements = shape.elements();
        Ok(match param.init {
            Init::Ones => vec![1.0; elements],
            Init::Zeros => vec![0.0; elements],
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
        let shape = plan.slots.spec(param.slot).shape.dims();
        self.read_f32(&param.name, shape)
    }
}

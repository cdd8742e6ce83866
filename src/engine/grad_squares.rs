//! How large each parameter's gradient was in the step just taken.

use super::session::Session;
use crate::backend::Backend;
use crate::error::DeviceError;
use crate::num::lanes::square_sum_f64;

impl<B: Backend> Session<B> {
    /// The sum of squares of each parameter's gradient, in parameter order and in f64, as the last step
    /// has left them: before the clip and without the loss scale. Zero for a frozen parameter. Each
    /// gradient is copied to the host; nothing changes.
    ///
    /// # Errors
    /// A device fault.
    pub fn grad_squares(&mut self) -> Result<Vec<f64>, DeviceError> {
        let scale = match f32::from_bits(self.core_mut().report()?.loss_scale) {
            0.0 => 1.0,
            scale => f64::from(scale),
        };
        let plan = self.plan().clone();
        let grads = plan.params.iter().map(|p| p.state.map(|state| state.grad));
        let squares = grads.map(|grad| match grad {
            None => Ok(0.0),
            Some(slot) => Ok(square_sum_f64(&self.read_slot(slot)?) / (scale * scale)),
        });
        squares.collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::cpu::CpuBackend;
    use crate::cpu::context::CpuContext;
    use crate::cpu::simd::SimdPath;
    use crate::engine::run::Run;
    use crate::io::Recipe;

    #[test]
    fn the_squares_of_all_gradients_are_the_square_of_the_norm_with_and_without_a_loss_scale() {
        let text = "name = \"r\"\nsteps = 9\n[model]\nfamily = \"qwen3\"\nvocab_size = 64\nd_model = 16\n\
                    n_layers = 2\nn_heads = 2\nd_ff = 24\n[data]\nbatch = 2\nseq_len = 24\n\
                    [optimizer]\nlr = 1e-2\n[precision]\ndomain = \"f32\"\n";
        for domain in ["f32", "f16.sm90"] {
            let mut recipe = Recipe::from_toml(text, "r").unwrap();
            recipe.set(&format!("precision.domain={domain}")).unwrap();
            let cpu = CpuBackend::new(CpuContext::new(SimdPath::detect(), 1).unwrap());
            let mut run = Run::open(recipe, cpu).unwrap();
            for step in 0..6 {
                let report = run.step(None).unwrap();
                let session = run.trainer.session_mut();
                let before = session.root().unwrap();
                let squares = session.grad_squares().unwrap();
                assert_eq!(squares.len(), session.plan().params.len());
                let norm = squares.iter().sum::<f64>().sqrt();
                let found = f64::from(report.grad_norm);
                assert!(
                    (norm / found - 1.0).abs() < 1e-6,
                    "{domain}, step {step}: {norm}, expected {found}"
                );
                assert_eq!(session.root().unwrap(), before);
            }
        }
    }
}

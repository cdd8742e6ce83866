//! The gradient of a bias on the CPU.

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::{Chains, add_to, expect_len, token_sums};
use super::simd::{Task, dispatch};
use crate::error::DeviceError;
use crate::op::bias::BiasGrad;

struct BiasChains<'a> {
    dy: &'a [f32],
    width: usize,
    chains: Chains<'a>,
}

impl Task for BiasChains<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Chains {
            tokens,
            columns,
            acc,
        } = self.chains;
        for t in tokens {
            add_to(acc, &self.dy[t * self.width..][columns.clone()]);
        }
    }
}

/// `dbias`: the column sums of `dy`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn grad(
    context: &CpuContext,
    op: &BiasGrad,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let dy: &[f32] = operands.read(0)?;
    let dbias: &mut [f32] = operands.write(0)?;
    let width = op.n_out;
    expect_len("dy", op.sum.tokens * width, dy.len())?;
    expect_len("dbias", width, dbias.len())?;
    let path = context.path();
    token_sums(context, &op.sum, dbias, |chains| {
        dispatch(path, BiasChains { dy, width, chains });
    });
    Ok(())
}

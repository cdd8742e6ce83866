//! Rows of weighted cross-entropy whose logits are stored in bf16 or f16, widened.

use super::simd::Task;
use crate::num::element::{Bf16, Element, F16};
use crate::num::lanes::lane_max;
use crate::num::logits::{LOGIT_FACTOR, LOGIT_TILE, LogitRow, References, lift};
use crate::num::softmax::score_weight;
use crate::shape::DType;

/// Loss, hit and statistics of a row.
pub(super) struct NarrowLoss<'a> {
    pub logits: &'a [f32],
    pub target: usize,
    pub weight: f32,
}

impl Task for NarrowLoss<'_> {
    type Out = (f32, u32, LogitRow);

    #[inline(always)]
    fn run(self) -> Self::Out {
        let row = LogitRow::of(self.logits);
        let x = self.logits[self.target];
        let loss = row.surprise(x) * self.weight;
        (loss, u32::from(x == lane_max(self.logits)), row)
    }
}

/// The gradient of a row, in place.
pub(super) struct NarrowGrad<'a> {
    pub logits: &'a mut [f32],
    pub target: usize,
    pub row: LogitRow,
    pub factor: f32,
    /// The loss scale; 1 where there is none.
    pub scale: f32,
    pub storage: DType,
}

impl Task for NarrowGrad<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        match self.storage {
            DType::F16 => self.store::<F16>(),
            _ => self.store::<Bf16>(),
        }
    }
}

impl NarrowGrad<'_> {
    #[inline(always)]
    fn store<E: Element>(self) {
        let lift = lift(self.storage);
        let row = self.row;
        let factor = row.factor(self.factor, self.scale / lift);
        let x = self.logits[self.target];
        let target = match row.is_ordinary() {
            true => ((row.probability(x) - 1.0) * self.factor) * self.scale,
            false => f32::NAN,
        };
        let mut references = References::new();
        for tile in self.logits.chunks_mut(LOGIT_TILE) {
            let reference = references.take(tile, &mut []);
            let factor = factor * row.tile_factor(reference);
            for x in tile {
                let weight = score_weight(*x, LOGIT_FACTOR, reference) * lift;
                *x = E::from_f32(weight).to_f32() * factor;
            }
        }
        self.logits[self.target] = target;
    }
}

//! One flipped bit of one parameter: shows that a check of goldens can fail.

use std::str::FromStr;

use crate::backend::Backend;
use crate::engine::session::Session;
use crate::error::{GoldenError, StepError};

/// Which bit is flipped, and before which step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flip {
    pub step: u64,
    /// The parameter's name.
    pub tensor: String,
    /// The element, row-major.
    pub index: usize,
    /// 0 for the lowest bit of the f32 to 31 for its sign.
    pub bit: u32,
}

impl FromStr for Flip {
    type Err = GoldenError;

    /// Reads `STEP:TENSOR:INDEX:BIT`.
    ///
    /// # Errors
    /// [`GoldenError::FlipText`].
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| GoldenError::FlipText { found: text.into() })
    }
}

fn parse(text: &str) -> Option<Flip> {
    let words: Vec<&str> = text.split(':').collect();
    let &[step, tensor, index, bit] = words.as_slice() else {
        return None;
    };
    Some(Flip {
        step: step.parse().ok()?,
        tensor: tensor.to_owned(),
        index: index.parse().ok()?,
        bit: bit.parse().ok().filter(|&bit| bit < 32)?,
    })
}

impl Flip {
    /// Checks that the flip's step is one of the `steps` that a golden covers.
    ///
    /// # Errors
    /// [`GoldenError::FlipStep`].
    pub fn check_step(&self, steps: usize) -> Result<(), GoldenError> {
        let last = (steps as u64).saturating_sub(1);
        match self.step <= last {
            true => Ok(()),
            false => Err(GoldenError::FlipStep {
                last,
                found: self.step,
            }),
        }
    }

    /// Flips the bit when `step` is the flip's.
    ///
    /// # Errors
    /// A name that no parameter has, an index it does not have, a device fault.
    pub fn apply<B: Backend>(&self, step: u64, session: &mut Session<B>) -> Result<(), StepError> {
        if step != self.step {
            return Ok(());
        }
        let mut values = session.read_param(&self.tensor)?;
        let elements = values.len();
        let Some(value) = values.get_mut(self.index) else {
            return Err(StepError::ElementIndex {
                name: self.tensor.clone(),
                elements,
                found: self.index,
            });
        };
        *value = f32::from_bits(value.to_bits() ^ (1 << self.bit));
        session.write_param(&self.tensor, &values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flip_is_read_from_its_text() {
        let flip: Flip = "3:model.norm.weight:5:31".parse().unwrap();
        assert_eq!((flip.step, flip.index, flip.bit), (3, 5, 31));
        assert_eq!(flip.tensor, "model.norm.weight");
        for wrong in ["", "3:w:5", "3:w:5:32", "3:w:-1:0", "x:w:5:0", "3:w:5:0:1"] {
            let refused = wrong.parse::<Flip>();
            assert!(matches!(refused, Err(GoldenError::FlipText { found }) if found == wrong));
        }
    }

    #[test]
    fn a_flip_after_the_last_step_is_refused() {
        let flip: Flip = "20:w:0:0".parse().unwrap();
        assert!(flip.check_step(21).is_ok());
        assert!(matches!(
            flip.check_step(20),
            Err(GoldenError::FlipStep {
                last: 19,
                found: 20
            })
        ));
    }
}

//! Weights that bitsandbytes has quantised to NF4, as model folders hold them.
//!
//! Beside the codes of `NAME` stand `NAME.absmax`, `NAME.quant_map` and the state as JSON. Under double
//! quantisation the maxima are codes of eight bits themselves, in blocks with maxima of their own.

use serde::Deserialize;

use super::model_folder::ModelFolder;
use super::tensors::StoredType;
use super::tensors_header::json_error;
use crate::error::CheckpointError;
use crate::num::nf4::{BLOCK, CODE, Packed, blocks, packed_bytes};
use crate::num::nf4_double::restored;

/// What follows a weight's name in the names of the tensors beside it.
const COMPANIONS: [&str; 5] = [
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    STATE,
];
const STATE: &str = ".quant_state.bitsandbytes__nf4";

/// The names of the tensors that may stand beside a quantised weight.
pub fn companions(name: &str) -> impl Iterator<Item = String> {
    COMPANIONS
        .iter()
        .map(move |suffix| format!("{name}{suffix}"))
}

/// The state that bitsandbytes keeps of a weight; what is not listed decides no value.
#[derive(Debug, Deserialize)]
struct QuantState {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

impl ModelFolder {
    /// The codes and block maxima of a weight of the given shape; `None` when the folder holds it as
    /// numbers. Maxima that are quantised themselves become `code · maximum + offset`, each operation
    /// rounded to f32.
    ///
    /// # Errors
    /// [`CheckpointError`]: a tensor beside it that is missing, such as its maxima, or of another
    /// shape; [`CheckpointError::Quantisation`] when it is not NF4 in blocks of 64.
    pub fn read_nf4(&self, name: &str, shape: &[usize]) -> Result<Option<Packed>, CheckpointError> {
        if self.entry(name)?.dtype != StoredType::U8 {
            return Ok(None);
        }
        let elements = shape.iter().product();
        let state = self.quant_state(name, shape)?;
        let map = self.read_f32(&format!("{name}.quant_map"), &[CODE.len()])?;
        if map != CODE {
            return Err(refused(name, "quant_map", "the values of NF4", "others"));
        }
        let bytes = self.read_u8(name, &[packed_bytes(elements), 1])?;
        let maxima = match state.nested_blocksize {
            None => self.read_f32(&format!("{name}.absmax"), &[blocks(elements)])?,
            Some(block) => self.nested_maxima(name, blocks(elements), (block, &state))?,
        };
        Ok(Some(Packed { bytes, maxima }))
    }

    fn quant_state(&self, name: &str, shape: &[usize]) -> Result<QuantState, CheckpointError> {
        let tensor = format!("{name}{STATE}");
        let dims = self.entry(&tensor)?.shape.dims().to_vec();
        let json = self.read_u8(&tensor, &dims)?;
        let state: QuantState =
            serde_json::from_slice(&json).map_err(|e| json_error(&tensor, &e))?;
        if state.quant_type != "nf4" {
            return Err(refused(name, "quant_type", "nf4", &state.quant_type));
        }
        if state.blocksize != BLOCK {
            let found = state.blocksize.to_string();
            return Err(refused(name, "blocksize", "64", &found));
        }
        if state.shape != shape {
            let found = format!("{:?}", state.shape);
            return Err(refused(name, "shape", "the model's", &found));
        }
        Ok(state)
    }

    fn nested_maxima(
        &self,
        name: &str,
        count: usize,
        (block, state): (usize, &QuantState),
    ) -> Result<Vec<f32>, CheckpointError> {
        let offset = match (state.nested_offset, block) {
            (_, 0) => return Err(refused(name, "nested_blocksize", "at least 1", "0")),
            (None, _) => return Err(refused(name, "nested_offset", "a number", "nothing")),
            (Some(offset), _) => offset as f32,
        };
        let codes = self.read_u8(&format!("{name}.absmax"), &[count])?;
        let mut map = [0.0; 256];
        map.copy_from_slice(&self.read_f32(&format!("{name}.nested_quant_map"), &[256])?);
        let outer = [count.div_ceil(block)];
        let outer = self.read_f32(&format!("{name}.nested_absmax"), &outer)?;
        Ok(restored((&codes, &map), (&outer, block), offset))
    }
}

fn refused(
    tensor: &str,
    field: &'static str,
    expected: &'static str,
    found: &str,
) -> CheckpointError {
    CheckpointError::Quantisation {
        tensor: tensor.to_owned(),
        field,
        expected,
        found: found.to_owned(),
    }
}

#[cfg(test)]
#[path = "nf4_folder_tests.rs"]
mod tests;

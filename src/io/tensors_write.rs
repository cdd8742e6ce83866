//! Writing safetensors: the same tensors always give the same bytes.

use std::path::Path;

use super::atomic::write_atomic;
use super::tensors_header::{METADATA, StoredType};
use crate::error::CheckpointError;
use crate::shape::Shape;

/// Values turned into bytes at a time.
const CHUNK_VALUES: usize = 1 << 18;

/// A tensor to be written: its name, its dimensions and its values, row-major.
pub type F32Tensor<'a> = (&'a str, &'a [usize], &'a [f32]);

/// Writes f32 tensors in the order of their names, with the metadata that transformers expects.
/// The file is replaced whole or not at all, and its bytes depend on the tensors alone, not on
/// the order they are given in.
///
/// # Errors
/// [`CheckpointError`]: two tensors of one name, values that do not fill their shape, or a file
/// that cannot be written.
pub fn write_f32_tensors<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = F32Tensor<'a>>,
) -> Result<(), CheckpointError> {
    let mut tensors: Vec<F32Tensor<'a>> = tensors.into_iter().collect();
    tensors.sort_by_key(|(name, ..)| *name);
    let metadata = format!("\"{METADATA}\":{{\"format\":\"pt\"}}");
    let entries = tensors.iter().map(|(name, dims, values)| {
        let bytes = 4 * values.len();
        (*name, StoredType::F32, *dims, bytes)
    });
    let header = header_text(path, Some(metadata), entries)?;
    write_atomic(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        let mut bytes = vec![0; 4 * CHUNK_VALUES];
        for (.., values) in &tensors {
            for part in values.chunks(CHUNK_VALUES) {
                let bytes = &mut bytes[..4 * part.len()];
                for (to, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(part) {
                    *to = value.to_le_bytes();
                }
                out.write_all(bytes)?;
            }
        }
        Ok(())
    })
}

/// A tensor as a header states it: its name, its type, its dimensions and the number of its bytes.
pub(super) type HeaderEntry<'a> = (&'a str, StoredType, &'a [usize], usize);

/// The header of sorted tensors behind what stands before them, padded with spaces so that the data
/// starts at a multiple of eight bytes.
pub(super) fn header_text<'a>(
    path: &Path,
    first: Option<String>,
    tensors: impl IntoIterator<Item = HeaderEntry<'a>>,
) -> Result<String, CheckpointError> {
    let mut entries = Vec::from_iter(first);
    let mut start = 0;
    let mut before = METADATA;
    for (name, dtype, dims, bytes) in tensors {
        let file = path.display().to_string();
        let tensor = name.to_string();
        if name == METADATA || name == before {
            return Err(CheckpointError::DuplicateTensor { file, tensor });
        }
        let expected_values = match dims.contains(&0) {
            true => 0,
            false => dims.iter().fold(1u64, |n, d| n.saturating_mul(*d as u64)),
        };
        let shape = Shape::new(dims);
        if expected_values.saturating_mul(dtype.size()) != bytes as u64 {
            return Err(CheckpointError::ValueCount {
                file,
                tensor,
                shape,
                expected_values,
                found_values: bytes as u64 / dtype.size(),
            });
        }
        let end = start + bytes;
        // A JSON string of its own escapes whatever the name holds.
        let quoted = serde_json::Value::from(name);
        let dtype = dtype.name();
        entries.push(format!(
            "{quoted}:{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{start},{end}]}}"
        ));
        start = end;
        before = name;
    }
    let mut text = format!("{{{}}}", entries.join(","));
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    Ok(text)
}

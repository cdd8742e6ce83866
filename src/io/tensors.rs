//! Reading safetensors, one tensor at a time, so that a large file is never held whole.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use half::{bf16, f16};

use super::tensors_header::{self, HEADER_LIMIT_BYTES, Header};
pub use super::tensors_header::{StoredType, TensorEntry};
use crate::error::CheckpointError;
use crate::shape::Shape;

/// Bytes read at a time; a multiple of every element size.
const CHUNK_BYTES: usize = 1 << 20;

/// An open safetensors file whose header has been checked.
#[derive(Debug)]
pub struct TensorFile {
    path: String,
    file: File,
    data_start: u64,
    header: Header,
}

impl TensorFile {
    /// Opens a file and checks its header: names are unique, and the tensors' bytes cover the
    /// data exactly.
    ///
    /// # Errors
    /// [`CheckpointError`] names the file, the tensor, and what was expected and found.
    pub fn open(path: &Path) -> Result<TensorFile, CheckpointError> {
        let name = path.display().to_string();
        let read_error = |source| CheckpointError::Read {
            path: name.clone(),
            source,
        };
        let file = File::open(path).map_err(read_error)?;
        let file_bytes = file.metadata().map_err(read_error)?.len();
        if file_bytes < 8 {
            return Err(CheckpointError::TruncatedHeader {
                file: name,
                expected_bytes: 8,
                found_bytes: file_bytes,
            });
        }
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(read_error)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > file_bytes - 8 {
            return Err(CheckpointError::HeaderBeyondFile {
                file: name,
                header_bytes,
                found_bytes: file_bytes - 8,
            });
        }
        if header_bytes > HEADER_LIMIT_BYTES {
            return Err(CheckpointError::HeaderTooLarge {
                file: name,
                header_bytes,
                limit_bytes: HEADER_LIMIT_BYTES,
            });
        }
        // The limit keeps the length far below what a usize holds.
        let mut bytes = vec![0; header_bytes as usize];
        file.read_exact_at(&mut bytes, 8).map_err(read_error)?;
        let data_start = 8 + header_bytes;
        let header = tensors_header::parse(&bytes, file_bytes - data_start, &name)?;
        Ok(TensorFile {
            path: name,
            file,
            data_start,
            header,
        })
    }

    /// The path as it was given.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// The text about the file that its writer left.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Type, shape and place of a tensor.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`].
    pub fn entry(&self, name: &str) -> Result<&TensorEntry, CheckpointError> {
        self.header
            .tensors
            .get(name)
            .ok_or_else(|| CheckpointError::MissingTensor {
                file: self.path.clone(),
                tensor: name.to_string(),
            })
    }

    /// A tensor as f32, row-major: f32 as it is, bf16 and f16 widened exactly, f64 rounded to
    /// nearest even.
    ///
    /// # Errors
    /// [`CheckpointError`]: missing, of another shape, of an integer type, or unreadable.
    pub fn read_f32(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        let entry = self.shaped(name, expected)?;
        match entry.dtype {
            StoredType::F32 => self.values(entry, f32::from_le_bytes),
            StoredType::Bf16 => self.values(entry, |b| bf16::from_le_bytes(b).to_f32()),
            StoredType::F16 => self.values(entry, |b| f16::from_le_bytes(b).to_f32()),
            StoredType::F64 => self.values(entry, |b| f64::from_le_bytes(b) as f32),
            found => Err(self.wrong_dtype(name, "F32, BF16, F16 or F64", found)),
        }
    }

    /// A tensor as f64, row-major; narrower floats are widened exactly.
    ///
    /// # Errors
    /// As [`TensorFile::read_f32`].
    pub fn read_f64(&self, name: &str, expected: &[usize]) -> Result<Vec<f64>, CheckpointError> {
        let entry = self.shaped(name, expected)?;
        match entry.dtype {
            StoredType::F64 => self.values(entry, f64::from_le_bytes),
            StoredType::F32 => self.values(entry, |b| f64::from(f32::from_le_bytes(b))),
            StoredType::Bf16 => self.values(entry, |b| bf16::from_le_bytes(b).to_f64()),
            StoredType::F16 => self.values(entry, |b| f16::from_le_bytes(b).to_f64()),
            found => Err(self.wrong_dtype(name, "F64, F32, BF16 or F16", found)),
        }
    }

    /// A tensor of I32, row-major.
    ///
    /// # Errors
    /// [`CheckpointError`]: missing, of another shape or type, or unreadable.
    pub fn read_i32(&self, name: &str, expected: &[usize]) -> Result<Vec<i32>, CheckpointError> {
        let entry = self.shaped(name, expected)?;
        match entry.dtype {
            StoredType::I32 => self.values(entry, i32::from_le_bytes),
            found => Err(self.wrong_dtype(name, "I32", found)),
        }
    }

    /// A tensor of I64, or of I32 widened, row-major.
    ///
    /// # Errors
    /// As [`TensorFile::read_i32`].
    pub fn read_i64(&self, name: &str, expected: &[usize]) -> Result<Vec<i64>, CheckpointError> {
        let entry = self.shaped(name, expected)?;
        match entry.dtype {
            StoredType::I64 => self.values(entry, i64::from_le_bytes),
            StoredType::I32 => self.values(entry, |b| i64::from(i32::from_le_bytes(b))),
            found => Err(self.wrong_dtype(name, "I64 or I32", found)),
        }
    }

    /// A tensor of U8, row-major.
    ///
    /// # Errors
    /// As [`TensorFile::read_i32`].
    pub fn read_u8(&self, name: &str, expected: &[usize]) -> Result<Vec<u8>, CheckpointError> {
        let entry = self.shaped(name, expected)?;
        match entry.dtype {
            StoredType::U8 => self.values(entry, u8::from_le_bytes),
            found => Err(self.wrong_dtype(name, "U8", found)),
        }
    }

    /// The bytes of a tensor as the file holds them.
    ///
    /// # Errors
    /// [`CheckpointError`]: missing, or unreadable.
    pub fn read_bytes(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        self.values(self.entry(name)?, |[byte]: [u8; 1]| byte)
    }

    /// The entry of a tensor of the expected shape.
    fn shaped(&self, name: &str, expected: &[usize]) -> Result<&TensorEntry, CheckpointError> {
        let entry = self.entry(name)?;
        if entry.shape.dims() == expected {
            return Ok(entry);
        }
        Err(CheckpointError::WrongShape {
            file: self.path.clone(),
            tensor: name.to_string(),
            expected: Shape::new(expected),
            found: entry.shape.clone(),
        })
    }

    fn wrong_dtype(
        &self,
        name: &str,
        expected: &'static str,
        found: StoredType,
    ) -> CheckpointError {
        CheckpointError::WrongDtype {
            file: self.path.clone(),
            tensor: name.to_string(),
            expected,
            found: found.name(),
        }
    }

    /// Reads a tensor's elements of `W` bytes, a chunk at a time.
    fn values<const W: usize, T>(
        &self,
        entry: &TensorEntry,
        convert: impl Fn([u8; W]) -> T,
    ) -> Result<Vec<T>, CheckpointError> {
        let bytes = (entry.end - entry.start) as usize;
        let mut values = Vec::with_capacity(bytes / W);
        let mut chunk = vec![0; bytes.min(CHUNK_BYTES)];
        let mut done = 0;
        while done < bytes {
            let part = &mut chunk[..(bytes - done).min(CHUNK_BYTES)];
            let at = self.data_start + entry.start + done as u64;
            self.file
                .read_exact_at(part, at)
                .map_err(|source| CheckpointError::Read {
                    path: self.path.clone(),
                    source,
                })?;
            values.extend(part.as_chunks::<W>().0.iter().map(|b| convert(*b)));
            done += part.len();
        }
        Ok(values)
    }
}

#[cfg(test)]
#[path = "tensors_tests.rs"]
mod tests;

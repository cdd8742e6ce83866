//! The header of a safetensors file, read strictly: the tensors' bytes cover the data exactly,
//! each byte once.
//!
//! Source: the format's definition at <https://huggingface.co/docs/safetensors>. A file is eight
//! bytes of little-endian header length, the header (JSON from names to dtype, shape and byte
//! range) and the data.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use crate::error::CheckpointError;
use crate::shape::Shape;

/// The name that holds text about the file instead of a tensor.
pub(super) const METADATA: &str = "__metadata__";

/// The longest header read, the limit that the format's own library sets.
pub(super) const HEADER_LIMIT_BYTES: u64 = 100_000_000;

/// The element types the format defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum StoredType {
    Bool,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    I16,
    U16,
    F16,
    Bf16,
    I32,
    U32,
    F32,
    I64,
    U64,
    F64,
}

impl StoredType {
    const ALL: [StoredType; 15] = [
        StoredType::Bool,
        StoredType::U8,
        StoredType::I8,
        StoredType::F8E5M2,
        StoredType::F8E4M3,
        StoredType::I16,
        StoredType::U16,
        StoredType::F16,
        StoredType::Bf16,
        StoredType::I32,
        StoredType::U32,
        StoredType::F32,
        StoredType::I64,
        StoredType::U64,
        StoredType::F64,
    ];

    /// The name in a header.
    pub const fn name(self) -> &'static str {
        match self {
            StoredType::Bool => "BOOL",
            StoredType::U8 => "U8",
            StoredType::I8 => "I8",
            StoredType::F8E5M2 => "F8_E5M2",
            StoredType::F8E4M3 => "F8_E4M3",
            StoredType::I16 => "I16",
            StoredType::U16 => "U16",
            StoredType::F16 => "F16",
            StoredType::Bf16 => "BF16",
            StoredType::I32 => "I32",
            StoredType::U32 => "U32",
            StoredType::F32 => "F32",
            StoredType::I64 => "I64",
            StoredType::U64 => "U64",
            StoredType::F64 => "F64",
        }
    }

    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            StoredType::Bool
            | StoredType::U8
            | StoredType::I8
            | StoredType::F8E5M2
            | StoredType::F8E4M3 => 1,
            StoredType::I16 | StoredType::U16 | StoredType::F16 | StoredType::Bf16 => 2,
            StoredType::I32 | StoredType::U32 | StoredType::F32 => 4,
            StoredType::I64 | StoredType::U64 | StoredType::F64 => 8,
        }
    }
}

/// Where one tensor stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// How its elements are stored.
    pub dtype: StoredType,
    /// Its dimensions, outermost first.
    pub shape: Shape,
    /// Its first byte, counted from the start of the data.
    pub start: u64,
    /// The byte after its last, counted from the start of the data.
    pub end: u64,
}

/// A tensor as the header writes it.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// The header as written: every name, also one that stands there twice.
#[derive(Default)]
struct RawHeader {
    entries: Vec<(String, RawEntry)>,
    metadata: Vec<BTreeMap<String, String>>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader::default();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        header.metadata.push(map.next_value()?);
                    } else {
                        header.entries.push((name, map.next_value()?));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Names)
    }
}

/// The tensors of a file by name, and its metadata.
#[derive(Debug)]
pub(super) struct Header {
    pub tensors: BTreeMap<String, TensorEntry>,
    pub metadata: BTreeMap<String, String>,
}

/// A JSON fault with its place.
pub(super) fn json_error(file: &str, error: &serde_json::Error) -> CheckpointError {
    CheckpointError::Json {
        file: file.to_string(),
        line: error.line(),
        column: error.column(),
        message: error.to_string(),
    }
}

/// Reads a header of a file whose data has `data_bytes` bytes.
pub(super) fn parse(bytes: &[u8], data_bytes: u64, file: &str) -> Result<Header, CheckpointError> {
    if bytes.first() != Some(&b'{') {
        return Err(CheckpointError::Json {
            file: file.to_string(),
            line: 1,
            column: 1,
            message: "a header starts with `{`".to_string(),
        });
    }
    let mut raw: RawHeader = serde_json::from_slice(bytes).map_err(|e| json_error(file, &e))?;
    let duplicate = |tensor: &str| CheckpointError::DuplicateTensor {
        file: file.to_string(),
        tensor: tensor.to_string(),
    };
    if raw.metadata.len() > 1 {
        return Err(duplicate(METADATA));
    }
    let mut tensors = BTreeMap::new();
    for (name, entry) in raw.entries {
        let entry = check_entry(&name, entry, data_bytes, file)?;
        if tensors.contains_key(&name) {
            return Err(duplicate(&name));
        }
        tensors.insert(name, entry);
    }
    check_cover(&tensors, data_bytes, file)?;
    Ok(Header {
        tensors,
        metadata: raw.metadata.pop().unwrap_or_default(),
    })
}

/// Checks one tensor by itself.
fn check_entry(
    name: &str,
    raw: RawEntry,
    data_bytes: u64,
    file: &str,
) -> Result<TensorEntry, CheckpointError> {
    let (file, tensor) = (file.to_string(), name.to_string());
    let known = StoredType::ALL.into_iter().find(|t| t.name() == raw.dtype);
    let Some(dtype) = known else {
        return Err(CheckpointError::UnknownDtype {
            file,
            tensor,
            found: raw.dtype,
        });
    };
    let [start, end] = raw.data_offsets;
    if start > end {
        return Err(CheckpointError::ReversedOffsets {
            file,
            tensor,
            start,
            end,
        });
    }
    if end > data_bytes {
        return Err(CheckpointError::OutOfBounds {
            file,
            tensor,
            end,
            data_bytes,
        });
    }
    let expected_bytes = byte_length(&raw.shape, dtype);
    if expected_bytes != end - start {
        return Err(CheckpointError::ByteLength {
            file,
            tensor,
            shape: Shape::new(raw.shape),
            dtype: dtype.name(),
            expected_bytes,
            found_bytes: end - start,
        });
    }
    Ok(TensorEntry {
        dtype,
        shape: Shape::new(raw.shape),
        start,
        end,
    })
}

/// Bytes of a shape, saturating; a dimension of zero gives zero however large the others are.
fn byte_length(shape: &[usize], dtype: StoredType) -> u64 {
    if shape.contains(&0) {
        return 0;
    }
    shape
        .iter()
        .fold(dtype.size(), |bytes, d| bytes.saturating_mul(*d as u64))
}

/// Checks that the tensors, in the order of their bytes, cover the data exactly.
fn check_cover(
    tensors: &BTreeMap<String, TensorEntry>,
    data_bytes: u64,
    file: &str,
) -> Result<(), CheckpointError> {
    let mut ordered: Vec<(&String, &TensorEntry)> = tensors.iter().collect();
    ordered.sort_by_key(|(_, entry)| (entry.start, entry.end));
    let mut covered = 0;
    for (name, entry) in ordered {
        let (file, tensor) = (file.to_string(), name.clone());
        let (expected_start, found_start) = (covered, entry.start);
        if found_start < expected_start {
            return Err(CheckpointError::Overlap {
                file,
                tensor,
                expected_start,
                found_start,
            });
        }
        if found_start > expected_start {
            return Err(CheckpointError::Gap {
                file,
                tensor,
                expected_start,
                found_start,
            });
        }
        covered = entry.end;
    }
    if covered != data_bytes {
        return Err(CheckpointError::TrailingBytes {
            file: file.to_string(),
            expected_bytes: covered,
            found_bytes: data_bytes,
        });
    }
    Ok(())
}

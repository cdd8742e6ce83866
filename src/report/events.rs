//! TensorBoard event files: scalars of a run as TensorBoard's own readers take them.
//!
//! A file is a sequence of records: the length of the data as eight little-endian bytes, the masked
//! CRC-32C of those, the data, its masked CRC-32C. The data is a protobuf `Event`. Sources:
//! `tensorflow/core/lib/io/record_writer.h`, `tensorflow/core/util/event.proto`,
//! `tensorflow/core/framework/summary.proto`.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use super::MetricsLine;
use crate::error::RunError;

/// Names tried for a file before giving up: so many processes would have to begin in one second.
const NAMES: u32 = 100;

/// Writes one event file.
#[derive(Debug)]
pub struct EventsWriter {
    path: PathBuf,
    file: BufWriter<File>,
}

impl EventsWriter {
    /// Creates a file in `folder`, which is made when it is absent. The file tells readers to forget
    /// what earlier files say of step `first` and later ones. `wall_s` is the time since the beginning
    /// of 1970, in seconds.
    ///
    /// # Errors
    /// [`RunError::Write`] names the file.
    pub fn create(folder: &Path, first: u64, wall_s: f64) -> Result<Self, RunError> {
        let failed = |path: &Path, source| RunError::Write {
            path: path.display().to_string(),
            source,
        };
        std::fs::create_dir_all(folder).map_err(|e| failed(folder, e))?;
        let mut number = 0;
        let (path, file) = loop {
            let name = format!("events.out.tfevents.{:010}.bitstep.{number}", wall_s as u64);
            let path = folder.join(name);
            match File::create_new(&path) {
                Ok(file) => break (path, file),
                Err(e) if e.kind() == ErrorKind::AlreadyExists && number < NAMES => number += 1,
                Err(e) => return Err(failed(&path, e)),
            }
        };
        let mut writer = EventsWriter {
            path,
            file: BufWriter::new(file),
        };
        let mut version = event(0, wall_s);
        put_bytes(&mut version, 3, b"brain.Event:2");
        writer.record(&version)?;
        let mut start = event(first, wall_s);
        // SessionLog { status: START }.
        put_bytes(&mut start, 7, &[1 << 3, 1]);
        writer.record(&start)?;
        writer.flush()?;
        Ok(writer)
    }

    /// Appends the scalars of a line; the numbers that are not finite are left out.
    ///
    /// # Errors
    /// [`RunError::Write`] names the file.
    pub fn write(&mut self, line: &MetricsLine, wall_s: f64) -> Result<(), RunError> {
        let mut summary = Vec::new();
        for (tag, value) in scalars(line) {
            let mut of = Vec::new();
            put_bytes(&mut of, 1, tag.as_bytes());
            put_key(&mut of, 2, FIXED32);
            of.extend(value.to_le_bytes());
            put_bytes(&mut summary, 1, &of);
        }
        let mut step = event(line.step, wall_s);
        put_bytes(&mut step, 5, &summary);
        self.record(&step)
    }

    /// Hands everything written so far to the operating system.
    ///
    /// # Errors
    /// [`RunError::Write`] names the file.
    pub fn flush(&mut self) -> Result<(), RunError> {
        let flushed = self.file.flush();
        flushed.map_err(|source| self.failed(source))
    }

    fn record(&mut self, data: &[u8]) -> Result<(), RunError> {
        let length = (data.len() as u64).to_le_bytes();
        let head = masked_crc(&length).to_le_bytes();
        let tail = masked_crc(data).to_le_bytes();
        let parts = [length.as_slice(), &head, data, &tail].concat();
        let written = self.file.write_all(&parts);
        written.map_err(|source| self.failed(source))
    }

    fn failed(&self, source: std::io::Error) -> RunError {
        RunError::Write {
            path: self.path.display().to_string(),
            source,
        }
    }
}

/// The scalars of a line, by the tags under which TensorBoard shows them.
fn scalars(line: &MetricsLine) -> Vec<(String, f32)> {
    let mut all = vec![
        ("train/loss".to_owned(), line.loss),
        ("train/grad_norm".to_owned(), line.grad_norm),
        ("train/learning_rate".to_owned(), line.lr as f32),
        ("train/tokens_per_s".to_owned(), line.tokens_per_s as f32),
    ];
    if let Some(found) = &line.validation {
        all.extend([
            ("validation/loss".to_owned(), found.loss as f32),
            ("validation/perplexity".to_owned(), found.perplexity as f32),
            ("validation/accuracy".to_owned(), found.accuracy as f32),
        ]);
    }
    let groups = line.group_norms.iter().flat_map(|norms| &norms.0);
    all.extend(groups.map(|(name, norm)| {
        let tag = format!("grad_norm/{}", name.replace(' ', "_"));
        (tag, *norm as f32)
    }));
    all.retain(|(_, value)| value.is_finite());
    all
}

/// An `Event` with its first two fields: time and step.
fn event(step: u64, wall_s: f64) -> Vec<u8> {
    let mut data = Vec::new();
    put_key(&mut data, 1, FIXED64);
    data.extend(wall_s.to_le_bytes());
    put_key(&mut data, 2, VARINT);
    put_varint(&mut data, step);
    data
}

/// Wire types of protobuf.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const BYTES: u64 = 2;
const FIXED32: u64 = 5;

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 128 {
        out.push(value as u8 | 128);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_key(out: &mut Vec<u8>, field: u64, wire: u64) {
    put_varint(out, field << 3 | wire);
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_key(out, field, BYTES);
    put_varint(out, bytes.len() as u64);
    out.extend(bytes);
}

/// The CRC-32C of some bytes, rotated and shifted as records keep it.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), reflected polynomial 0x82f63b78, as RFC 3720 defines it.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = crc_table();
    let next = |crc: u32, &byte: &u8| TABLE[((crc ^ u32::from(byte)) & 255) as usize] ^ (crc >> 8);
    !bytes.iter().fold(!0, next)
}

const fn crc_table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let (mut crc, mut bit) = (index as u32, 0);
        while bit < 8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_its_standard() {
        // The vectors of RFC 3720, B.4, and the usual check value.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[255; 32]), 0x62a8_ab43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&rising), 0x46dd_794e);
    }

    #[test]
    fn numbers_take_as_many_bytes_as_they_need() {
        let bytes = |value| {
            let mut out = Vec::new();
            put_varint(&mut out, value);
            out
        };
        assert_eq!(bytes(0), [0]);
        assert_eq!(bytes(127), [127]);
        assert_eq!(bytes(300), [0xac, 2]);
        assert_eq!(bytes(u64::MAX).len(), 10);
    }

    #[test]
    fn a_second_file_of_the_same_second_has_a_name_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let first = EventsWriter::create(folder.path(), 0, 17.5).unwrap();
        let second = EventsWriter::create(folder.path(), 3, 17.9).unwrap();
        assert_ne!(first.path, second.path);
        let bytes = std::fs::read(&first.path).unwrap();
        // The version, whole: length, its checksum, time 17.5, step 0, the text.
        assert_eq!(bytes[..8], 26u64.to_le_bytes());
        assert_eq!(bytes[12], 1 << 3 | 1);
        assert_eq!(bytes[13..21], 17.5f64.to_le_bytes());
        assert_eq!(bytes[21..25], [2 << 3, 0, 3 << 3 | 2, 13]);
        assert_eq!(&bytes[25..38], b"brain.Event:2");
        assert_eq!(bytes[38..42], masked_crc(&bytes[12..38]).to_le_bytes());
    }
}

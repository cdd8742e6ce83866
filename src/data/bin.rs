//! Files of tokens: nanoGPT's without a header, llm.c's with one.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::DataError;

/// How a token file is laid out; every number is little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenFormat {
    /// nanoGPT's: unsigned 16-bit tokens and nothing else.
    U16,
    /// Unsigned 32-bit tokens and nothing else.
    U32,
    /// llm.c's: 256 32-bit integers, of which the first three are the magic number, the version and
    /// the number of tokens, then the tokens. Magic 20240520 with version 1 has 16-bit tokens
    /// (GPT-2), magic 20240801 with version 7 has 32-bit tokens (Llama 3).
    LlmC,
}

const HEADER_BYTES: u64 = 1024;
const MAGIC_16: i32 = 20_240_520;
const MAGIC_32: i32 = 20_240_801;
const VERSION_16: i32 = 1;
const VERSION_32: i32 = 7;

/// An open token file. Tokens are read where they are asked for, so the file may be larger than
/// memory.
#[derive(Debug)]
pub struct BinFile {
    path: String,
    file: File,
    first_byte: u64,
    width: u64,
    tokens: u64,
}

impl BinFile {
    /// Opens the file at `path` and checks its length and header.
    ///
    /// # Errors
    /// [`DataError::Read`] when the system refuses; [`DataError::TokenFileLength`] when a file
    /// without a header is not a whole number of tokens; [`DataError::Truncated`],
    /// [`DataError::Magic`], [`DataError::Version`] or [`DataError::TokenCount`] for a header that
    /// is cut, unknown, or at odds with the length of the file.
    pub fn open(path: &Path, format: TokenFormat) -> Result<Self, DataError> {
        let name = path.display().to_string();
        let read_error = |source| DataError::Read {
            path: name.clone(),
            source,
        };
        let file = File::open(path).map_err(read_error)?;
        let metadata = file.metadata().map_err(read_error)?;
        if metadata.is_dir() {
            return Err(read_error(io::ErrorKind::IsADirectory.into()));
        }
        let bytes = metadata.len();
        let mut opened = BinFile {
            path: name,
            file,
            first_byte: 0,
            width: match format {
                TokenFormat::U16 => 2,
                TokenFormat::U32 | TokenFormat::LlmC => 4,
            },
            tokens: 0,
        };
        if format == TokenFormat::LlmC {
            opened.read_header(bytes)?;
            return Ok(opened);
        }
        opened.tokens = bytes / opened.width;
        let whole = opened.tokens * opened.width;
        if whole != bytes {
            return Err(DataError::TokenFileLength {
                path: opened.path,
                offset: whole,
                expected: opened.width,
                found: bytes,
            });
        }
        Ok(opened)
    }

    /// What messages call this file.
    pub fn name(&self) -> &str {
        &self.path
    }

    /// The number of tokens in the file.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Tokens `start..start + count`.
    ///
    /// # Errors
    /// [`DataError::TokenInFile`] for the first token at or above `vocab_size`;
    /// [`DataError::Truncated`] when the file ends before the tokens do; [`DataError::Read`] when
    /// the system refuses.
    pub fn read(&self, start: u64, count: usize, vocab_size: usize) -> Result<Vec<u32>, DataError> {
        let offset = start
            .saturating_mul(self.width)
            .saturating_add(self.first_byte);
        let expected = (count as u64).saturating_mul(self.width);
        if start.saturating_add(count as u64) > self.tokens {
            let end = self.first_byte + self.tokens * self.width;
            return Err(DataError::Truncated {
                path: self.path.clone(),
                offset,
                expected,
                found: end.saturating_sub(offset),
            });
        }
        let bytes = self.read_bytes(offset, expected as usize)?;
        let tokens: Vec<u32> = match self.width {
            2 => pieces::<2>(&bytes)
                .map(|b| u16::from_le_bytes(b).into())
                .collect(),
            _ => pieces::<4>(&bytes).map(u32::from_le_bytes).collect(),
        };
        match tokens.iter().position(|&t| t as usize >= vocab_size) {
            None => Ok(tokens),
            Some(i) => Err(DataError::TokenInFile {
                path: self.path.clone(),
                offset: offset + i as u64 * self.width,
                vocab_size,
                found: tokens[i],
            }),
        }
    }

    fn read_header(&mut self, bytes: u64) -> Result<(), DataError> {
        let path = || self.path.clone();
        if bytes < HEADER_BYTES {
            return Err(DataError::Truncated {
                path: path(),
                offset: 0,
                expected: HEADER_BYTES,
                found: bytes,
            });
        }
        let header = self.read_bytes(0, HEADER_BYTES as usize)?;
        let mut numbers = pieces::<4>(&header).map(i32::from_le_bytes);
        let mut next = || numbers.next().unwrap_or(0);
        let (magic, version, count) = (next(), next(), next());
        let (expected, width) = match magic {
            MAGIC_16 => (VERSION_16, 2),
            MAGIC_32 => (VERSION_32, 4),
            found => {
                return Err(DataError::Magic {
                    path: path(),
                    offset: 0,
                    expected: [MAGIC_16, MAGIC_32],
                    found,
                });
            }
        };
        if version != expected {
            return Err(DataError::Version {
                path: path(),
                offset: 4,
                expected,
                found: version,
            });
        }
        let held = bytes - HEADER_BYTES;
        let stated = u64::try_from(count).ok().filter(|n| n * width == held);
        let Some(tokens) = stated else {
            return Err(DataError::TokenCount {
                path: path(),
                offset: 8,
                bytes: held,
                width,
                found: count,
            });
        };
        (self.first_byte, self.width, self.tokens) = (HEADER_BYTES, width, tokens);
        Ok(())
    }

    fn read_bytes(&self, offset: u64, count: usize) -> Result<Vec<u8>, DataError> {
        let mut bytes = vec![0; count];
        let read = self.file.read_exact_at(&mut bytes, offset);
        match read {
            Ok(()) => Ok(bytes),
            // The file has become shorter since it was opened.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let length = self.file.metadata().map_or(offset, |data| data.len());
                Err(DataError::Truncated {
                    path: self.path.clone(),
                    offset,
                    expected: count as u64,
                    found: length.saturating_sub(offset),
                })
            }
            Err(source) => Err(DataError::Read {
                path: self.path.clone(),
                source,
            }),
        }
    }
}

/// The bytes in pieces of `N`.
fn pieces<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn open(bytes: &[u8], format: TokenFormat) -> Result<BinFile, DataError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        BinFile::open(file.path(), format)
    }

    fn llm_c(magic: i32, version: i32, count: i32, tokens: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = [magic, version, count].map(i32::to_le_bytes).concat();
        bytes.resize(1024, 0);
        bytes.extend(tokens);
        bytes
    }

    #[test]
    fn every_format_is_read_in_place() {
        let short: Vec<u8> = [1u16, 2, 50_256, 4].map(u16::to_le_bytes).concat();
        let long: Vec<u8> = [1u32, 2, 50_256, 4].map(u32::to_le_bytes).concat();
        let files = [
            (TokenFormat::U16, short.clone()),
            (TokenFormat::U32, long.clone()),
            (TokenFormat::LlmC, llm_c(20_240_520, 1, 4, &short)),
            (TokenFormat::LlmC, llm_c(20_240_801, 7, 4, &long)),
        ];
        for (format, bytes) in files {
            let file = open(&bytes, format).unwrap();
            assert_eq!(file.tokens(), 4);
            assert_eq!(file.read(0, 4, 50_257).unwrap(), [1, 2, 50_256, 4]);
            assert_eq!(file.read(1, 2, 50_257).unwrap(), [2, 50_256]);
        }
    }

    #[test]
    fn an_odd_length_is_refused() {
        for (format, width) in [(TokenFormat::U16, 2), (TokenFormat::U32, 4)] {
            match open(&[0; 7], format) {
                Err(DataError::TokenFileLength {
                    offset,
                    expected,
                    found: 7,
                    ..
                }) => assert_eq!((offset, expected), (7 / width * width, width)),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_cut_header_is_refused() {
        for length in [0, 12, 1023] {
            let bytes = &llm_c(20_240_520, 1, 0, &[])[..length];
            match open(bytes, TokenFormat::LlmC) {
                Err(DataError::Truncated {
                    offset: 0,
                    expected: 1024,
                    found,
                    ..
                }) => assert_eq!(found, length as u64),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn an_unknown_magic_or_version_is_refused() {
        assert!(matches!(
            open(&llm_c(20_240_521, 1, 0, &[]), TokenFormat::LlmC),
            Err(DataError::Magic {
                offset: 0,
                found: 20_240_521,
                ..
            })
        ));
        for (magic, version, wanted) in [(20_240_520, 7, 1), (20_240_801, 1, 7)] {
            match open(&llm_c(magic, version, 0, &[]), TokenFormat::LlmC) {
                Err(DataError::Version {
                    offset: 4,
                    expected,
                    found,
                    ..
                }) => assert_eq!((expected, found), (wanted, version)),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_count_at_odds_with_the_length_is_refused() {
        for count in [-1, 0, 2, 4, i32::MAX, i32::MIN] {
            match open(&llm_c(20_240_520, 1, count, &[0; 6]), TokenFormat::LlmC) {
                Err(DataError::TokenCount {
                    offset: 8,
                    bytes: 6,
                    width: 2,
                    found,
                    ..
                }) => assert_eq!(found, count),
                other => panic!("{other:?}"),
            }
        }
        // A whole number of tokens and a byte.
        assert!(matches!(
            open(&llm_c(20_240_520, 1, 3, &[0; 7]), TokenFormat::LlmC),
            Err(DataError::TokenCount { bytes: 7, .. })
        ));
    }

    #[test]
    fn a_token_at_the_vocabulary_size_is_refused_with_its_byte() {
        let tokens: Vec<u8> = [1u16, 2, 300, 4].map(u16::to_le_bytes).concat();
        let file = open(&llm_c(20_240_520, 1, 4, &tokens), TokenFormat::LlmC).unwrap();
        file.read(1, 3, 301).unwrap();
        assert!(matches!(
            file.read(1, 3, 300),
            Err(DataError::TokenInFile {
                offset: 1028,
                vocab_size: 300,
                found: 300,
                ..
            })
        ));
        // What is not read is not judged.
        assert_eq!(file.read(0, 2, 300).unwrap(), [1, 2]);
    }

    #[test]
    fn reading_past_the_end_is_refused() {
        let file = open(&[0; 8], TokenFormat::U16).unwrap();
        assert!(matches!(
            file.read(3, 2, 10),
            Err(DataError::Truncated {
                offset: 6,
                expected: 4,
                found: 2,
                ..
            })
        ));
        assert!(matches!(
            file.read(u64::MAX, usize::MAX, 10),
            Err(DataError::Truncated { found: 0, .. })
        ));
    }

    #[test]
    fn a_file_cut_after_opening_is_refused_not_read_stale() {
        let named = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(named.path(), [0; 8]).unwrap();
        let file = BinFile::open(named.path(), TokenFormat::U16).unwrap();
        std::fs::write(named.path(), [0; 5]).unwrap();
        assert!(matches!(
            file.read(1, 3, 10),
            Err(DataError::Truncated {
                offset: 2,
                expected: 6,
                found: 3,
                ..
            })
        ));
    }

    #[test]
    fn a_missing_file_and_a_folder_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing.bin");
        for (path, format) in [
            (missing.as_path(), TokenFormat::U16),
            (folder.path(), TokenFormat::LlmC),
        ] {
            match BinFile::open(path, format) {
                Err(DataError::Read { path: name, .. }) => {
                    assert_eq!(name, path.to_str().unwrap());
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn read_all(bytes: &[u8], format: TokenFormat) {
        if let Ok(file) = open(bytes, format) {
            let read = file.read(0, file.tokens() as usize, 1000);
            assert!(read.is_ok() || matches!(read, Err(DataError::TokenInFile { .. })));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..1200)) {
            for format in [TokenFormat::U16, TokenFormat::U32, TokenFormat::LlmC] {
                read_all(&bytes, format);
            }
        }

        #[test]
        fn random_headers_never_panic(
            magic in prop::sample::select(vec![20_240_520, 20_240_801, 0]),
            version in 0..9,
            count in prop_oneof![any::<i32>(), 0..40],
            tokens in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            read_all(&llm_c(magic, version, count, &tokens), TokenFormat::LlmC);
        }
    }
}

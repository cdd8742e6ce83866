//! Tests of reading and writing safetensors, and of every fault a file can have.

use std::collections::BTreeMap;
use std::path::PathBuf;

use proptest::prelude::*;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use super::super::tensors_write::write_f32_tensors;
use super::*;

/// A file of a header and data, in a folder that lives as long as the test.
struct Written {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

fn written(bytes: &[u8]) -> Written {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("t.safetensors");
    std::fs::write(&path, bytes).expect("writes");
    Written {
        _folder: folder,
        path,
    }
}

fn file_bytes(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// The error of opening a file with this header and this much data.
fn fault(header: &str, data_bytes: usize) -> CheckpointError {
    let file = written(&file_bytes(header, &vec![0; data_bytes]));
    TensorFile::open(&file.path).expect_err(header)
}

/// Asserts that an error is of a variant and that its text has the facts.
macro_rules! assert_fault {
    ($error:expr, $variant:ident, $($fact:expr),*) => {{
        let error = $error;
        assert!(matches!(error, CheckpointError::$variant { .. }), "{error:?}");
        let text = error.to_string();
        $(assert!(text.contains($fact), "{text} lacks {}", $fact);)*
    }};
}

const TWO: &str = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}"#;

#[test]
fn a_right_file_opens() {
    let file = written(&file_bytes(TWO, &[1; 11]));
    let tensors = TensorFile::open(&file.path).expect("right");
    assert_eq!(tensors.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(tensors.read_u8("b", &[3]).expect("reads"), [1, 1, 1]);
    assert!(tensors.metadata().is_empty());
}

#[test]
fn a_truncated_or_oversized_header_is_named() {
    let short = written(&[1, 2, 3]);
    let error = TensorFile::open(&short.path).expect_err("3 bytes");
    assert_fault!(error, TruncatedHeader, "at least 8", "found 3");
    let empty = written(&[]);
    let error = TensorFile::open(&empty.path).expect_err("empty");
    assert_fault!(error, TruncatedHeader, "found 0");
    let mut bytes = file_bytes(TWO, &[0; 11]);
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let beyond = written(&bytes);
    let error = TensorFile::open(&beyond.path).expect_err("beyond");
    assert_fault!(error, HeaderBeyondFile, "18446744073709551615");
    let path = beyond.path.as_path();
    let huge = std::fs::File::create(path).expect("creates");
    std::os::unix::fs::FileExt::write_all_at(&huge, &200_000_000u64.to_le_bytes(), 0)
        .expect("writes");
    huge.set_len(300_000_000).expect("a sparse file");
    let error = TensorFile::open(path).expect_err("huge");
    assert_fault!(error, HeaderTooLarge, "200000000", "100000000");
}

#[test]
fn a_header_that_is_not_the_json_it_has_to_be_is_named() {
    for header in [
        "",
        " {}",
        "[]",
        "{",
        r#"{"a":3}"#,
        r#"{"a":{"dtype":"F32","shape":[2]}}"#,
        r#"{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}}"#,
        r#"{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
        r#"{"__metadata__":{"k":1}}"#,
        "{} x",
    ] {
        assert_fault!(fault(header, 8), Json, "t.safetensors:1:");
    }
}

#[test]
fn one_name_for_two_tensors_is_named() {
    let entry = r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
    let header = format!("{{{entry},{entry}}}");
    assert_fault!(fault(&header, 4), DuplicateTensor, "`a`");
    let header = r#"{"__metadata__":{},"__metadata__":{}}"#;
    assert_fault!(fault(header, 0), DuplicateTensor, "__metadata__");
}

#[test]
fn faults_of_one_tensor_name_it() {
    let one = |dtype: &str, shape: &str, offsets: &str| {
        let header =
            format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#);
        fault(&header, 8)
    };
    assert_fault!(one("F33", "[2]", "[0,8]"), UnknownDtype, "`w`", "F33");
    assert_fault!(one("F32", "[2]", "[8,0]"), ReversedOffsets, "`w`", "8", "0");
    assert_fault!(one("F32", "[4]", "[0,16]"), OutOfBounds, "`w`", "16", "8");
    let wrong = one("F32", "[3]", "[0,8]");
    assert_fault!(wrong, ByteLength, "`w`", "[3]", "F32", "12", "found 8");
    let max = usize::MAX;
    let overflow = one("F32", &format!("[{max},{max}]"), "[0,8]");
    assert_fault!(overflow, ByteLength, "18446744073709551615");
    assert_fault!(
        one("F32", "[1]", "[0,4]"),
        TrailingBytes,
        "take 4",
        "found 8"
    );
}

#[test]
fn overlapping_and_gapped_tensors_are_named() {
    let two = |first: &str, second: &str| {
        let header = format!(
            r#"{{"x":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"y":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        );
        fault(&header, 9)
    };
    assert_fault!(two("[0,4]", "[3,7]"), Overlap, "`y`", "byte 4", "found 3");
    assert_fault!(two("[0,4]", "[5,9]"), Gap, "`y`", "byte 4", "found 5");
    assert_fault!(two("[1,5]", "[5,9]"), Gap, "`x`", "byte 0", "found 1");
    assert_fault!(two("[0,4]", "[4,8]"), TrailingBytes, "8", "9");
}

#[test]
fn wrong_names_shapes_and_types_are_named() {
    let file = written(&file_bytes(TWO, &[0; 11]));
    let tensors = TensorFile::open(&file.path).expect("right");
    let missing = tensors.read_f32("c", &[2]).expect_err("missing");
    assert_fault!(missing, MissingTensor, "t.safetensors", "`c`");
    let shape = tensors.read_f32("a", &[1, 2]).expect_err("shape");
    assert_fault!(
        shape,
        WrongShape,
        "`a`",
        "expected shape [1,2]",
        "found [2]"
    );
    let kinds = [
        tensors.read_f32("b", &[3]).err(),
        tensors.read_f64("b", &[3]).err(),
        tensors.read_i32("b", &[3]).err(),
        tensors.read_i64("b", &[3]).err(),
    ];
    for kind in kinds {
        assert_fault!(kind.expect("b is U8"), WrongDtype, "`b`", "found U8");
    }
    let bytes = tensors.read_u8("a", &[2]).expect_err("a is F32");
    assert_fault!(bytes, WrongDtype, "expected U8", "found F32");
}

#[test]
fn a_file_cut_after_it_was_opened_is_a_read_error() {
    let file = written(&file_bytes(TWO, &[0; 11]));
    let tensors = TensorFile::open(&file.path).expect("right");
    let handle = std::fs::OpenOptions::new().write(true).open(&file.path);
    let cut = file_bytes(TWO, &[]).len() as u64 + 3;
    handle.expect("opens").set_len(cut).expect("cuts");
    let error = tensors.read_f32("a", &[2]).expect_err("cut");
    assert_fault!(error, Read, "t.safetensors");
    let absent = TensorFile::open(std::path::Path::new("no/such")).expect_err("absent");
    assert_fault!(absent, Read, "no/such");
}

/// One tensor of each readable type, written by the format's own library.
fn foreign() -> Vec<u8> {
    let f16_bits: [u16; 4] = [0x3c00, 0x0001, 0xfbff, 0x7c00];
    let bf16_bits: [u16; 4] = [0x3f80, 0x0001, 0xff7f, 0xff80];
    let le16 = |bits: [u16; 4]| bits.iter().flat_map(|b| b.to_le_bytes()).collect();
    let f64s = [1.0f64, 1.0 + 2f64.powi(-24), -1e300, 0.1];
    let parts: Vec<(&str, Dtype, Vec<u8>)> = vec![
        ("f16", Dtype::F16, le16(f16_bits)),
        ("bf16", Dtype::BF16, le16(bf16_bits)),
        (
            "f64",
            Dtype::F64,
            f64s.iter().flat_map(|x| x.to_le_bytes()).collect(),
        ),
        (
            "i32",
            Dtype::I32,
            [-1i32, 2, i32::MIN, 4]
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect(),
        ),
        (
            "i64",
            Dtype::I64,
            [-1i64, 2, i64::MIN, 4]
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect(),
        ),
    ];
    let views = parts.iter().map(|(name, dtype, bytes)| {
        let view = TensorView::new(*dtype, vec![2, 2], bytes).expect("right");
        (name.to_string(), view)
    });
    serialize(views, None).expect("serializes")
}

#[test]
fn every_type_is_read_with_its_exact_values() {
    let file = written(&foreign());
    let tensors = TensorFile::open(&file.path).expect("right");
    let f32s = |name| tensors.read_f32(name, &[2, 2]).expect("reads");
    assert_eq!(f32s("f16"), [1.0, 2f32.powi(-24), -65504.0, f32::INFINITY]);
    let tiny = f32::from_bits(1 << 16);
    assert_eq!(
        f32s("bf16"),
        [1.0, tiny, f32::from_bits(0xff7f_0000), f32::NEG_INFINITY]
    );
    // Half-way between two f32 rounds to the even one; beyond the range it is infinite.
    assert_eq!(f32s("f64"), [1.0, 1.0, f32::NEG_INFINITY, 0.1]);
    let f64s = |name| tensors.read_f64(name, &[2, 2]).expect("reads");
    assert_eq!(f64s("f64"), [1.0, 1.0 + 2f64.powi(-24), -1e300, 0.1]);
    assert_eq!(f64s("f16")[1], 2f64.powi(-24));
    assert_eq!(f64s("bf16")[1], f64::from(tiny));
    let i32s = tensors.read_i32("i32", &[2, 2]).expect("reads");
    assert_eq!(i32s, [-1, 2, i32::MIN, 4]);
    let i64s = |name| tensors.read_i64(name, &[2, 2]).expect("reads");
    assert_eq!(i64s("i64"), [-1, 2, i64::MIN, 4]);
    assert_eq!(i64s("i32"), [-1, 2, i64::from(i32::MIN), 4]);
}

#[test]
fn written_tensors_read_back_here_and_in_the_formats_own_library() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("w.safetensors");
    let odd = "a \"quoted\"\n\u{1}name";
    // More than one chunk, and not a multiple of it.
    let long: Vec<f32> = (0..CHUNK_BYTES / 4 + 5).map(|i| i as f32).collect();
    let nan = [f32::from_bits(0x7fc0_1234), -0.0, f32::MIN_POSITIVE / 2.0];
    let shape = [long.len()];
    let tensors: Vec<(&str, &[usize], &[f32])> = vec![
        ("long", &shape, &long),
        (odd, &[3, 1], &nan),
        ("empty", &[0, usize::MAX, 7], &[]),
        ("scalar", &[], &[2.5]),
    ];
    write_f32_tensors(&path, tensors.clone()).expect("writes");
    let bytes = std::fs::read(&path).expect("reads");
    let file = TensorFile::open(&path).expect("its own file is right");
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (name, shape, values) in &tensors {
        let read = file.read_f32(name, shape).expect("reads");
        assert_eq!(bits(&read), bits(values), "{name}");
    }
    assert_eq!(
        file.metadata().get("format").map(String::as_str),
        Some("pt")
    );
    let theirs = SafeTensors::deserialize(&bytes).expect("right for them");
    assert_eq!(
        theirs.tensor("long").expect("there").data().len(),
        4 * long.len()
    );
    assert_eq!(theirs.tensor(odd).expect("there").shape(), [3, 1]);
    assert_eq!(file.data_start % 8, 0);

    write_f32_tensors(&path, tensors.into_iter().rev()).expect("writes");
    assert_eq!(
        std::fs::read(&path).expect("reads"),
        bytes,
        "order changes nothing"
    );
}

#[test]
fn tensors_that_cannot_be_written_leave_the_former_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("w.safetensors");
    write_f32_tensors(&path, [("a", &[1][..], &[1.0][..])]).expect("writes");
    let before = std::fs::read(&path).expect("reads");
    let twice = [("a", &[1][..], &[1.0][..]), ("a", &[1][..], &[2.0][..])];
    let error = write_f32_tensors(&path, twice).expect_err("twice");
    assert_fault!(error, DuplicateTensor, "`a`");
    let reserved = [("__metadata__", &[1][..], &[1.0][..])];
    let error = write_f32_tensors(&path, reserved).expect_err("reserved");
    assert_fault!(error, DuplicateTensor, "__metadata__");
    let short = [("a", &[2, 2][..], &[1.0][..])];
    let error = write_f32_tensors(&path, short).expect_err("short");
    assert_fault!(error, ValueCount, "`a`", "[2,2]", "expected 4", "found 1");
    let nowhere = folder.path().join("no/such/w.safetensors");
    let error = write_f32_tensors(&nowhere, []).expect_err("nowhere");
    assert_fault!(error, Write, "no/such/w.safetensors");
    assert_eq!(std::fs::read(&path).expect("reads"), before);
}

/// Opens a file and reads all of it in every way; nothing may panic.
fn read_everything(bytes: &[u8]) {
    let file = written(bytes);
    let Ok(tensors) = TensorFile::open(&file.path) else {
        return;
    };
    let entries: BTreeMap<_, _> = tensors.header.tensors.clone();
    for (name, entry) in &entries {
        let dims = entry.shape.dims();
        let _ = tensors.read_f32(name, dims);
        let _ = tensors.read_f64(name, dims);
        let _ = tensors.read_i32(name, dims);
        let _ = tensors.read_i64(name, dims);
        let _ = tensors.read_u8(name, dims);
    }
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        read_everything(&bytes);
        let header = String::from_utf8_lossy(&bytes);
        read_everything(&file_bytes(&header, &bytes));
    }

    #[test]
    fn mutated_files_never_panic(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        cuts in any::<bool>(),
    ) {
        let mut bytes = foreign();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if cuts {
            bytes.truncate(cut.index(bytes.len()));
        }
        read_everything(&bytes);
    }

    #[test]
    fn any_cut_of_a_right_file_is_an_error(cut in any::<prop::sample::Index>()) {
        let bytes = foreign();
        let file = written(&bytes[..cut.index(bytes.len())]);
        prop_assert!(TensorFile::open(&file.path).is_err());
    }
}

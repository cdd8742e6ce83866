//! Tests of quantised folders, made from the recorded bytes and maxima of bitsandbytes.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};

use super::*;
use crate::io::TensorFile;
use crate::num::nf4::{dequantise_block, quantise};
use crate::num::nf4_double::{DYNAMIC, Nested};

const NAME: &str = "model.layers.0.mlp.down_proj.weight";
const SHAPE: [usize; 2] = [64, 128];

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn fixture() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qlora-nf4-all")
}

fn floats(values: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

/// One weight as bitsandbytes saves it, and what it stands for.
fn recorded() -> (Tensors, Packed) {
    let record = TensorFile::open(&fixture().join("nf4.safetensors")).unwrap();
    let bytes = record.read_u8("model.layers.0.mlp.down_proj.nf4", &[4096]);
    let maxima = record.read_f32("model.layers.0.mlp.down_proj.absmax", &[128]);
    let packed = Packed {
        bytes: bytes.unwrap(),
        maxima: maxima.unwrap(),
    };
    let state = json!({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": SHAPE});
    let mut tensors = Tensors::new();
    let mut add = |suffix: &str, dtype, shape: &[usize], bytes| {
        tensors.insert(format!("{NAME}{suffix}"), (dtype, shape.to_vec(), bytes));
    };
    add("", Dtype::U8, &[4096, 1], packed.bytes.clone());
    add(".absmax", Dtype::F32, &[128], floats(&packed.maxima));
    add(".quant_map", Dtype::F32, &[16], floats(&CODE));
    put_state(&mut tensors, &state);
    (tensors, packed)
}

fn put_state(tensors: &mut Tensors, state: &Value) {
    let text = state.to_string().into_bytes();
    let entry = (Dtype::U8, vec![text.len()], text);
    tensors.insert(format!("{NAME}{STATE}"), entry);
}

fn read(tensors: &Tensors) -> Result<Option<Packed>, CheckpointError> {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture().join("base/config.json");
    std::fs::copy(config, folder.path().join("config.json")).unwrap();
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        (name.clone(), view)
    });
    let file = serialize(views.collect::<Vec<_>>(), None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    ModelFolder::open(folder.path())
        .unwrap()
        .read_nf4(NAME, &SHAPE)
}

#[test]
fn quantised_weights_are_read_as_they_are() {
    let (mut tensors, packed) = recorded();
    assert_eq!(read(&tensors).unwrap(), Some(packed));
    let names: Vec<String> = companions(NAME).collect();
    assert!(tensors.keys().all(|k| k == NAME || names.contains(k)));
    let numbers = (Dtype::F32, SHAPE.to_vec(), vec![0; 64 * 128 * 4]);
    tensors.insert(NAME.to_owned(), numbers);
    assert_eq!(read(&tensors).unwrap(), None);
}

#[test]
fn maxima_that_are_quantised_themselves_are_restored() {
    let (mut tensors, packed) = recorded();
    let map: Vec<f32> = (0..256).map(|i| (i as f32 - 128.0) / 128.0).collect();
    let codes: Vec<u8> = (0..128).map(|i| (i * 7 % 256) as u8).collect();
    let outer: Vec<f32> = vec![0.5, 0.25];
    let expected = |i: usize| map[usize::from(codes[i])] * outer[i / 64] + 0.125;
    let mut add = |suffix: &str, dtype, shape: usize, bytes| {
        tensors.insert(format!("{NAME}{suffix}"), (dtype, vec![shape], bytes));
    };
    add(".absmax", Dtype::U8, 128, codes.clone());
    add(".nested_quant_map", Dtype::F32, 256, floats(&map));
    add(".nested_absmax", Dtype::F32, 2, floats(&outer));
    let mut state = json!({"quant_type": "nf4", "blocksize": 64, "shape": SHAPE,
        "nested_blocksize": 64, "nested_offset": 0.125});
    put_state(&mut tensors, &state);
    let found = read(&tensors).unwrap().unwrap();
    assert_eq!(found.bytes, packed.bytes);
    assert_eq!(found.maxima, (0..128).map(expected).collect::<Vec<f32>>());
    for (field, value) in [
        ("nested_blocksize", json!(0)),
        ("nested_offset", json!(null)),
    ] {
        let before = state[field].clone();
        state[field] = value;
        put_state(&mut tensors, &state);
        let refused = read(&tensors).unwrap_err();
        assert!(matches!(refused, CheckpointError::Quantisation { field: f, .. } if f == field));
        state[field] = before;
    }
}

#[test]
fn a_missing_tensor_or_another_quantisation_is_refused_by_name() {
    for suffix in [".absmax", ".quant_map", STATE] {
        let (mut tensors, _) = recorded();
        let name = format!("{NAME}{suffix}");
        tensors.remove(&name);
        let refused = read(&tensors).unwrap_err();
        assert!(
            matches!(&refused, CheckpointError::MissingTensor { tensor, .. } if *tensor == name),
            "{refused}"
        );
    }
    let states = [
        ("quant_type", json!("fp4")),
        ("blocksize", json!(128)),
        ("shape", json!([128, 64])),
    ];
    for (field, value) in states {
        let (mut tensors, _) = recorded();
        let mut state = json!({"quant_type": "nf4", "blocksize": 64, "shape": SHAPE});
        state[field] = value;
        put_state(&mut tensors, &state);
        let refused = read(&tensors).unwrap_err();
        assert!(matches!(refused, CheckpointError::Quantisation { field: f, .. } if f == field));
    }
    let (mut tensors, _) = recorded();
    let map = (Dtype::F32, vec![16], floats(&[0.0; 16]));
    tensors.insert(format!("{NAME}.quant_map"), map);
    let refused = read(&tensors).unwrap_err();
    let field = "quant_map";
    assert!(matches!(refused, CheckpointError::Quantisation { field: f, .. } if f == field));
}

/// What benches/record_nf4.py has recorded.
fn doubled() -> TensorFile {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/nf4-double");
    TensorFile::open(&folder.join("double.safetensors")).expect("the record")
}

/// The weights of that script, by their index.
fn weights(elements: u32) -> Vec<f32> {
    let weight = |i: u32| {
        let mut h = i.wrapping_mul(2_654_435_761);
        h ^= h >> 15;
        h = h.wrapping_mul(2_246_822_519);
        h ^= h >> 13;
        let unit = ((h >> 8) as i32 - (1 << 23)) as f32 * 2.0_f32.powi(-23);
        unit * ((i / 64 % 7 + 1) as f32 * 0.01)
    };
    (0..elements).map(weight).collect()
}

#[test]
fn the_dynamic_code_is_that_of_the_record() {
    let map = doubled().read_f32("map", &[256]).expect("256 values");
    assert_eq!(map, *DYNAMIC);
    assert!(DYNAMIC.is_sorted_by(|a, b| a < b));
}

#[test]
fn codes_maxima_mean_and_values_are_those_of_the_record() {
    let record = doubled();
    let sizes = [("small", 7 * 33), ("tail", 40 * 421), ("long", 20_001 * 64)];
    for (name, elements) in sizes {
        let weights = weights(elements);
        let packed = quantise(&weights);
        let nested = Nested::of(&packed.maxima);
        let maxima = nested.restored();
        let (count, last) = (maxima.len(), 100);
        let floats = |key: &str, n: usize| {
            let values = record.read_f32(&format!("{name}.{key}"), &[n]);
            values.expect("recorded values")
        };
        let bytes = |key: &str, n: usize| {
            let bytes = record.read_u8(&format!("{name}.{key}"), &[n]);
            bytes.expect("recorded bytes")
        };
        assert_eq!(floats("offset", 1), [nested.offset], "{name}");
        assert_eq!(floats("nested_absmax", nested.maxima.len()), nested.maxima);
        assert_eq!(bytes("absmax", count), nested.codes, "{name}");
        assert_eq!(floats("restored", count.min(512)), maxima[..count.min(512)]);
        if name != "long" {
            assert_eq!(bytes("codes", packed.bytes.len()), packed.bytes, "{name}");
        }
        let mut values = vec![0.0; weights.len()];
        let blocks = values.chunks_mut(BLOCK).zip(packed.bytes.chunks(BLOCK / 2));
        for ((block, bytes), &maximum) in blocks.zip(&maxima) {
            dequantise_block(bytes, maximum, block);
        }
        assert_eq!(
            floats("last", last),
            values[values.len() - last..],
            "{name}"
        );
        // One maximum of another size is another mean: the record is not met by chance.
        let mut other = packed.maxima.clone();
        other[count / 2] *= 1.5;
        assert_ne!(Nested::of(&other).offset, nested.offset, "{name}");
    }
}

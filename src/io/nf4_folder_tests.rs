//! Tests of quantised folders, made from the recorded bytes and maxima of bitsandbytes.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};

use super::*;
use crate::io::TensorFile;

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

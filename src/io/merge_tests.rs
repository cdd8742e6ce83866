//! Tests of merging: values, and what does not fit.

use super::*;
use crate::io::tensors_write::write_f32_tensors;
use crate::num::nf4::Quantisation;

fn fixture(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("tests/fixtures").join(name)
}

fn open(record: &str) -> (ModelFolder, AdapterFolder) {
    let folder = fixture(record);
    (
        ModelFolder::open(&folder.join("base")).expect("a base"),
        AdapterFolder::open(&folder.join("adapter")).expect("an adapter"),
    )
}

fn merged(record: &str, stored: Base) -> (tempfile::TempDir, ModelFolder) {
    let (base, adapter) = open(record);
    let folder = tempfile::tempdir().expect("a folder");
    let merge = Merge {
        base: &base,
        stored,
        adapter: &adapter,
    };
    merge.write(folder.path()).expect("merges");
    let merged = ModelFolder::open(folder.path()).expect("a model folder");
    (folder, merged)
}

#[test]
fn adapted_projections_have_the_product_of_their_adapters_and_others_keep_their_bits() {
    let (base, adapter) = open("lora-qv");
    let (_folder, merged) = merged("lora-qv", Base::Plain);
    for name in ["q_proj", "k_proj", "v_proj"] {
        let tensor = format!("model.layers.1.self_attn.{name}.weight");
        let dims = merged.entry(&tensor).expect("there").shape.dims().to_vec();
        let before = base.read_f32(&tensor, &dims).expect("a base tensor");
        let after = merged.read_f32(&tensor, &dims).expect("a merged tensor");
        let module = format!("{PEFT_PREFIX}model.layers.1.self_attn.{name}");
        if name == "k_proj" {
            assert_eq!(before, after);
            continue;
        }
        let rank = adapter.config().rank;
        let a = adapter.read_f32(&format!("{module}.lora_A.weight"), &[rank, dims[1]]);
        let b = adapter.read_f32(&format!("{module}.lora_B.weight"), &[dims[0], rank]);
        let (a, b) = (a.expect("A"), b.expect("B"));
        assert_ne!(before, after);
        for (at, (w, found)) in before.iter().zip(&after).enumerate() {
            let (o, i) = (at / dims[1], at % dims[1]);
            let term = |k: usize| f64::from(b[o * rank + k]) * f64::from(a[k * dims[1] + i]);
            let sum: f64 = (0..rank).map(term).sum();
            let exact = f64::from(*w) + f64::from(adapter.config().scale()) * sum;
            assert_eq!(*found, exact as f32, "{tensor} {at}");
        }
    }
}

#[test]
fn a_quantised_base_is_merged_as_what_its_codes_stand_for() {
    let (base, _) = open("qlora-nf4-all");
    let record = crate::io::TensorFile::open(&fixture("qlora-nf4-all/nf4.safetensors"));
    let record = record.expect("the record opens");
    let (_folder, merged) = merged("qlora-nf4-all", Base::Nf4(Quantisation::Once));
    let (name, dims) = ("model.layers.0.mlp.up_proj", [128, 64]);
    let numbers = record
        .read_f32(&format!("{name}.dequant"), &dims)
        .expect("numbers");
    let plain = base
        .read_f32(&format!("{name}.weight"), &dims)
        .expect("a tensor");
    let after = merged
        .read_f32(&format!("{name}.weight"), &dims)
        .expect("a tensor");
    let distance = |from: &[f32]| {
        let pairs = after.iter().zip(from);
        pairs.fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()))
    };
    // The adapters are small beside what quantising has changed.
    assert!(distance(&numbers) > 0.0);
    assert_ne!(distance(&numbers), distance(&plain));
    assert!(merged.json().get("quantization_config").is_none());
    // Maxima that are quantised themselves are other ones.
    let (_folder, doubled) = self::merged("qlora-nf4-all", Base::Nf4(Quantisation::Double));
    let doubled = doubled.read_f32(&format!("{name}.weight"), &dims);
    assert_ne!(doubled.expect("a tensor"), after);
}

#[test]
fn what_does_not_fit_the_base_is_refused() {
    let (base, _) = open("lora-qv");
    let refused = |change: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().expect("a folder");
        let from = fixture("lora-qv/adapter");
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            std::fs::copy(from.join(file), folder.path().join(file)).expect("a copy");
        }
        change(folder.path());
        let adapter = AdapterFolder::open(folder.path()).expect("opens");
        let merge = Merge {
            base: &base,
            stored: Base::Plain,
            adapter: &adapter,
        };
        let out = tempfile::tempdir().expect("a folder");
        merge.write(&out.path().join("out")).expect_err("refused")
    };
    let only = |name: &str, dims: [usize; 2]| {
        let name = format!("{PEFT_PREFIX}model.layers.{name}.weight");
        move |folder: &Path| {
            let values = vec![0.0; dims[0] * dims[1]];
            let tensor = (name.as_str(), &dims[..], values.as_slice());
            write_f32_tensors(&folder.join("adapter_model.safetensors"), [tensor])
                .expect("written");
        }
    };
    let other = refused(&only("9.self_attn.q_proj.lora_A", [8, 64]));
    assert!(
        matches!(&other, CheckpointError::UnexpectedTensors { tensors, .. } if tensors.len() == 1),
        "{other}"
    );
    let wrong = refused(&only("0.self_attn.q_proj.lora_A", [8, 63]));
    assert!(
        matches!(wrong, CheckpointError::WrongShape { .. }),
        "{wrong}"
    );
    let missing = refused(&only("0.self_attn.q_proj.lora_A", [8, 64]));
    assert!(
        matches!(missing, CheckpointError::MissingTensor { .. }),
        "{missing}"
    );
}

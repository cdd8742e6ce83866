use super::*;
use crate::shape::Shape;

fn fixture(name: &str) -> std::path::PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("tests/fixtures").join(name).join("adapter")
}

/// The configuration of a fixture after a change of its JSON.
fn changed(change: impl Fn(&mut Value)) -> Result<LoraConfig, CheckpointError> {
    let text = std::fs::read(fixture("lora-qv").join(CONFIG)).unwrap();
    let mut json: Value = serde_json::from_slice(&text).unwrap();
    change(&mut json);
    config_of(serde_json::from_value(json).unwrap(), CONFIG)
}

#[test]
fn folders_that_peft_wrote_are_read() {
    use Projection::{Query, Value};
    let folder = AdapterFolder::open(&fixture("lora-qv")).unwrap();
    let config = folder.config();
    assert_eq!((config.rank, config.scale()), (8, 2.0));
    assert_eq!(config.targets, [Query, Value]);
    let all = AdapterFolder::open(&fixture("qlora-nf4-all")).unwrap();
    assert_eq!(all.config().targets, Projection::ALL);
    let name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight";
    assert_eq!(folder.read_f32(name, &[64, 8]).unwrap().len(), 512);
    let refused = folder.read_f32(name, &[64, 4]).unwrap_err();
    let found = Shape::from([64, 8]);
    assert!(matches!(refused, CheckpointError::WrongShape { found: f, .. } if f == found));
    let refused = folder.read_f32("model.other", &[1]).unwrap_err();
    assert!(matches!(refused, CheckpointError::MissingTensor { .. }));
}

#[test]
fn an_adapter_for_another_base_is_refused_by_its_tensors() {
    let folder = AdapterFolder::open(&fixture("lora-qv")).unwrap();
    let names: Vec<&str> = folder.tensors.names().collect();
    assert!(folder.check_all_used(&names).is_ok());
    let refused = folder.check_all_used(&names[1..]).unwrap_err();
    assert!(matches!(
        refused,
        CheckpointError::UnexpectedTensors { tensors, .. } if tensors == [names[0]]
    ));
}

#[test]
fn another_rank_or_alpha_than_the_recipes_is_refused() {
    let folder = AdapterFolder::open(&fixture("lora-qv")).unwrap();
    let mut wanted = folder.config().clone();
    assert!(folder.check_scale(&wanted).is_ok());
    wanted.alpha = 8.0;
    let refused = folder.check_scale(&wanted).unwrap_err();
    assert!(matches!(refused, CheckpointError::Adapter { key, .. } if key == "lora_alpha"));
    wanted.rank = 4;
    let refused = folder.check_scale(&wanted).unwrap_err();
    assert!(matches!(refused, CheckpointError::Adapter { key, .. } if key == "r"));
}

#[test]
fn what_would_be_another_function_is_refused_by_its_key() {
    assert!(changed(|_| {}).is_ok());
    let cases: [(&str, Value); 8] = [
        ("peft_type", "LOHA".into()),
        ("r", 0.into()),
        ("use_dora", true.into()),
        ("rank_pattern", json!({"q_proj": 4})),
        ("modules_to_save", json!(["norm", "lm_head"])),
        ("bias", "all".into()),
        ("target_modules", "all-linear".into()),
        ("target_modules", json!(["q_proj", "lm_head"])),
    ];
    for (name, value) in cases {
        let refused = changed(|json| json[name] = value.clone()).unwrap_err();
        assert!(
            matches!(&refused, CheckpointError::Adapter { key, .. } if key == name),
            "{name}: {refused}"
        );
    }
}

#[test]
fn a_folder_comes_back_as_it_was_written() {
    let config = changed(|_| {}).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let values = [1.0, -2.5];
    let tensor: F32Tensor<'_> = ("a.lora_A.weight", &[1, 2], &values);
    write_adapter_folder(folder.path(), &config, Some("base"), [tensor]).unwrap();
    let back = AdapterFolder::open(folder.path()).unwrap();
    assert_eq!(back.config(), &config);
    assert_eq!(back.read_f32("a.lora_A.weight", &[1, 2]).unwrap(), values);
    assert_eq!(
        (back.base(), back.config().norms),
        (Some("base"), Norms::Frozen)
    );
    assert!(back.has("a.lora_A.weight") && !back.has("a.lora_B.weight"));
    let config = LoraConfig {
        norms: Norms::Trained,
        ..config
    };
    write_adapter_folder(folder.path(), &config, None, [tensor]).unwrap();
    let back = AdapterFolder::open(folder.path()).unwrap();
    assert_eq!((back.base(), back.config().norms), (None, Norms::Trained));
}

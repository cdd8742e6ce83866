//! Tests of model folders: transformers' own, shards, ties, and folders written back.

use serde_json::json;

use super::*;
use crate::error::ConfigError;
use crate::model::ModelConfig;

/// The embedding of a Llama, to which a tied head is equal.
const EMBEDDING: &str = "model.embed_tokens.weight";

type Owned = (String, Vec<usize>, Vec<f32>);

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn views(tensors: &[Owned]) -> impl Iterator<Item = F32Tensor<'_>> {
    tensors
        .iter()
        .map(|(name, shape, values)| (name.as_str(), shape.as_slice(), values.as_slice()))
}

fn all_tensors(folder: &ModelFolder) -> Vec<Owned> {
    folder
        .names()
        .map(|name| {
            let shape = folder.entry(name).expect("there").shape.dims().to_vec();
            let values = folder.read_f32(name, &shape).expect("reads");
            (name.to_string(), shape, values)
        })
        .collect()
}

const CONFIG: &str = r#"{"model_type":"llama","hidden_size":2,"num_attention_heads":1,
    "vocab_size":3,"num_hidden_layers":1,"intermediate_size":4,"tie_word_embeddings":true}"#;

/// A folder with a tied configuration and no weights.
fn bare() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("config.json"), CONFIG).expect("writes");
    folder
}

fn tensor(name: &str, shape: &[usize], first: f32) -> Owned {
    let n: usize = shape.iter().product();
    let values = (0..n).map(|i| first + i as f32).collect();
    (name.to_string(), shape.to_vec(), values)
}

fn write(path: PathBuf, tensors: &[Owned]) {
    write_f32_tensors(&path, views(tensors)).expect("writes");
}

#[test]
fn folders_of_transformers_open_and_every_tensor_reads() {
    for (name, family, tensors) in [
        ("llama-gqa", "llama", 21),
        ("llama-tied", "llama", 20),
        ("qwen2-bias", "qwen2", 26),
        ("qwen3-qknorm", "qwen3", 25),
        ("mamba", "mamba", 22),
    ] {
        let folder = ModelFolder::open(&fixture(name)).expect(name);
        assert_eq!(folder.config().family(), family);
        assert_eq!(folder.config().n_layers(), 2);
        assert_eq!(all_tensors(&folder).len(), tensors, "{name}");
        let record = TensorFile::open(&fixture(name).join("reference.safetensors")).expect(name);
        assert_eq!(
            record.read_i32("targets", &[3, 3, 24]).expect(name).len(),
            216
        );
        let logits = record.read_f64("logits", &[3, 24, 160]).expect(name);
        assert!(logits.iter().all(|x| x.is_finite()));
    }
    let qwen3 = ModelFolder::open(&fixture("qwen3-qknorm")).expect("right");
    let AnyConfig::Decoder(config) = qwen3.config() else {
        panic!("a decoder")
    };
    assert_eq!((config.head_dim, config.rope_theta), (32, 1e6));
}

#[test]
fn a_folder_written_back_holds_the_same_model() {
    for name in ["llama-gqa", "llama-tied", "qwen2-bias", "qwen3-qknorm"] {
        let from = ModelFolder::open(&fixture(name)).expect(name);
        let tensors = all_tensors(&from);
        let out = tempfile::tempdir().expect("a folder");
        let target = out.path().join("new/model");
        write_model_folder(&target, from.config(), from.json(), views(&tensors), &[])
            .expect("writes");
        let back = ModelFolder::open(&target).expect("right");
        assert_eq!(back.config(), from.config());
        assert_eq!(all_tensors(&back), tensors);
        assert_eq!(back.json()["eos_token_id"], from.json()["eos_token_id"]);
    }
}

#[test]
fn shards_read_as_one_folder() {
    let folder = bare();
    let parts = [tensor("a", &[2], 0.0), tensor("b", &[3], 5.0)];
    write(folder.path().join("m-1.safetensors"), &parts[..1]);
    write(folder.path().join("m-2.safetensors"), &parts[1..]);
    let index = |map: serde_json::Value| {
        let text = json!({"metadata": {"total_size": 20}, "weight_map": map}).to_string();
        std::fs::write(folder.path().join(INDEX), text).expect("writes");
        ModelFolder::open(folder.path())
    };
    let right = index(json!({"a": "m-1.safetensors", "b": "m-2.safetensors"})).expect("right");
    assert_eq!(right.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(right.read_f32("b", &[3]).expect("reads"), [5.0, 6.0, 7.0]);
    let missing = right.read_f32("c", &[1]).expect_err("missing");
    assert!(missing.to_string().contains(INDEX), "{missing}");

    let stray = index(json!({"a": "m-1.safetensors"})).expect("a part of the shards");
    assert_eq!(stray.names().count(), 1);
    let moved = index(json!({"a": "m-1.safetensors", "b": "m-1.safetensors"}));
    assert!(matches!(moved, Err(CheckpointError::MissingTensor { .. })));
    let both = [tensor("a", &[2], 0.0), tensor("b", &[3], 5.0)];
    write(folder.path().join("m-2.safetensors"), &both);
    let twice = index(json!({"a": "m-1.safetensors", "b": "m-2.safetensors"}));
    match twice {
        Err(CheckpointError::NotInIndex { tensor, shard, .. }) => {
            assert_eq!((tensor.as_str(), shard.as_str()), ("a", "m-2.safetensors"));
        }
        other => panic!("{other:?}"),
    }
    for outside in [
        "../m.safetensors",
        "/m.safetensors",
        "x/m.safetensors",
        "..",
        "",
    ] {
        let error = index(json!({"a": outside})).expect_err(outside);
        assert!(
            matches!(error, CheckpointError::ShardName { .. }),
            "{error}"
        );
    }
    let absent = index(json!({"a": "m-3.safetensors"}));
    assert!(matches!(absent, Err(CheckpointError::Read { .. })));
    let not_an_index = index(json!(3));
    assert!(matches!(not_an_index, Err(CheckpointError::Json { .. })));
}

#[test]
fn a_folder_without_configuration_or_weights_is_named() {
    let folder = bare();
    let error = ModelFolder::open(folder.path()).expect_err("no weights");
    assert!(
        matches!(error, CheckpointError::NoWeights { .. }),
        "{error}"
    );
    std::fs::remove_file(folder.path().join("config.json")).expect("removes");
    let error = ModelFolder::open(folder.path()).expect_err("no configuration");
    let config = matches!(error, CheckpointError::Config(ConfigError::Read { .. }));
    assert!(config, "{error}");
    assert_eq!(error.exit_code().code(), 4);
}

#[test]
fn tensors_without_a_place_are_listed() {
    let folder = bare();
    let tensors = [
        tensor(EMBEDDING, &[3, 2], 1.0),
        tensor("model.layers.0.self_attn.rotary_emb.inv_freq", &[1], 1.0),
        tensor("x", &[1], 0.0),
        tensor("y", &[1], 0.0),
    ];
    write(folder.path().join(WEIGHTS), &tensors);
    let open = ModelFolder::open(folder.path()).expect("right");
    assert!(open.check_all_used(&[EMBEDDING, "x", "y"]).is_ok());
    match open.check_all_used(&[EMBEDDING]) {
        Err(CheckpointError::UnexpectedTensors { tensors, .. }) => assert_eq!(tensors, ["x", "y"]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_saved_tied_head_must_be_the_embedding() {
    let folder = bare();
    let mut tensors = [tensor(EMBEDDING, &[3, 2], 1.0), tensor(HEAD, &[3, 2], 1.0)];
    write(folder.path().join(WEIGHTS), &tensors);
    let open = ModelFolder::open(folder.path()).expect("right");
    assert!(open.check_all_used(&[EMBEDDING]).is_ok());
    tensors[1].2[4] = 9.0;
    write(folder.path().join(WEIGHTS), &tensors);
    let open = ModelFolder::open(folder.path()).expect("right");
    let error = open.check_all_used(&[EMBEDDING]).expect_err("differs");
    let text = error.to_string();
    let expected = "differs at element 4: expected 5.0 (0x40a00000), found 9.0 (0x41100000)";
    assert!(text.ends_with(expected), "{text}");

    let untied = CONFIG.replace("true", "false");
    std::fs::write(folder.path().join("config.json"), untied).expect("writes");
    let open = ModelFolder::open(folder.path()).expect("right");
    let error = open.check_all_used(&[EMBEDDING]).expect_err("not tied");
    assert!(matches!(error, CheckpointError::UnexpectedTensors { .. }));
}

#[test]
fn a_tied_head_is_written_once_and_never_lost() {
    let folder = bare();
    let (config, extra) = model_json::read(folder.path()).expect("right");
    let out = folder.path().join("out");
    let save = |tensors: &[Owned]| write_model_folder(&out, &config, &extra, views(tensors), &[]);
    let embedding = tensor(EMBEDDING, &[3, 2], 1.0);
    save(&[embedding.clone(), tensor(HEAD, &[3, 2], 1.0)]).expect("writes");
    let names: Vec<String> = ModelFolder::open(&out)
        .expect("right")
        .names()
        .map(str::to_string)
        .collect();
    assert_eq!(names, [EMBEDDING]);
    let error = save(&[embedding.clone(), tensor(HEAD, &[3, 2], 2.0)]).expect_err("differs");
    assert!(matches!(
        error,
        CheckpointError::TiedDiffers { index: 0, .. }
    ));
    let error = save(&[embedding, tensor(HEAD, &[2, 2], 1.0)]).expect_err("smaller");
    assert!(matches!(error, CheckpointError::WrongShape { .. }));
    let error = save(&[tensor(HEAD, &[3, 2], 1.0)]).expect_err("alone");
    assert!(matches!(error, CheckpointError::MissingTensor { .. }));
}

#[test]
fn tokenizer_files_are_copied_and_cannot_replace_the_model() {
    let folder = bare();
    let (config, extra) = model_json::read(folder.path()).expect("right");
    let out = folder.path().join("out");
    let tokenizer = folder.path().join("tokenizer.json");
    std::fs::write(&tokenizer, "{\"t\":1}").expect("writes");
    let save = |files: &[PathBuf]| write_model_folder(&out, &config, &extra, [], files);
    save(&[tokenizer]).expect("writes");
    let copied = out.join("tokenizer.json");
    assert_eq!(std::fs::read(&copied).expect("reads"), b"{\"t\":1}");
    // A folder saved over itself copies its tokenizer onto itself.
    save(std::slice::from_ref(&copied)).expect("writes");
    assert_eq!(std::fs::read(&copied).expect("reads"), b"{\"t\":1}");
    for name in ["config.json", WEIGHTS, INDEX, "/"] {
        let error = save(&[PathBuf::from(name)]).expect_err(name);
        assert!(
            matches!(error, CheckpointError::TokenizerName { .. }),
            "{error}"
        );
    }
    let absent = save(&[folder.path().join("absent.json")]).expect_err("absent");
    assert!(matches!(absent, CheckpointError::Read { .. }));
}

#[test]
fn a_wrong_configuration_is_not_written() {
    let folder = bare();
    let (config, extra) = model_json::read(folder.path()).expect("right");
    let AnyConfig::Decoder(config) = config else {
        panic!("a decoder")
    };
    let n_kv_heads = 0;
    let config = AnyConfig::Decoder(ModelConfig {
        n_kv_heads,
        ..config
    });
    let out = folder.path().join("out");
    let error = write_model_folder(&out, &config, &extra, [], &[]).expect_err("no heads");
    assert!(matches!(error, CheckpointError::Config(_)));
    assert!(!out.exists());
}

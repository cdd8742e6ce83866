//! Tests of recipes: canonical text, defaults, overrides and every error.

use proptest::prelude::*;

use super::super::recipe::{ModelSection, Recipe, TokenDtype};
use super::*;

const SMALL: &str = r#"
name = "small"
steps = 40
[model]
family = "qwen3"
vocab_size = 32
d_model = 16
n_layers = 2
n_heads = 4
d_ff = 24
[data]
batch = 8
seq_len = 12
[optimizer]
lr = 1
"#;

pub(super) fn read(text: &str) -> Result<Recipe, ConfigError> {
    Recipe::from_toml(text, "r.toml")
}

pub(super) fn small() -> Recipe {
    read(SMALL).expect("the small recipe is right")
}

/// The error of the small recipe under one override.
pub(super) fn refused(text: &str) -> ConfigError {
    let mut recipe = small();
    let error = recipe.set(text).expect_err(text);
    assert_eq!(recipe, small(), "a refused override changes nothing");
    error
}

#[test]
fn the_canonical_text_states_every_value() {
    let expected = r#"name = "small"
seed = 0
steps = 40
warmup_steps = 3

[model]
family = "qwen3"
vocab_size = 32
d_model = 16
n_layers = 2
n_heads = 4
n_kv_heads = 4
head_dim = 4
d_ff = 24
rope_theta = 10000.0
rms_norm_eps = 0.00001
tie_embeddings = false
max_seq_len = 12
init_std = 0.02

[data]
source = "sums"
tokenizer = "bytes"
batch = 8
seq_len = 12
grain = 8
validation = 0.0

[optimizer]
lr = 1.0
beta1 = 0.9
beta2 = 0.95
eps = 0.00000001
weight_decay = 0.1
clip_norm = 1.0

[schedule]
kind = "constant"
warmup = 0
floor = 0.1

[precision]
domain = "f32"

[checkpoint]
save_model = true

[golden]
steps = 20
trace_steps = 1
"#;
    let text = small().to_toml().expect("writes");
    // The exact spelling of small numbers is the TOML writer's; their values are compared.
    let lines = |t: &str| -> Vec<String> {
        t.lines()
            .map(|l| match l.split_once(" = ") {
                Some((k, v)) if v.parse::<f64>().is_ok() => {
                    format!("{k} = {:?}", v.parse::<f64>().expect("a number"))
                }
                _ => l.to_string(),
            })
            .collect()
    };
    assert_eq!(lines(&text), lines(expected));
}

#[test]
fn the_canonical_text_is_a_fixed_point_with_one_hash() {
    let recipe = small();
    let text = recipe.to_toml().expect("writes");
    let again = read(&text).expect("its own text is right");
    assert_eq!(recipe, again);
    assert_eq!(text, again.to_toml().expect("writes"));
    assert_eq!(
        recipe.hash().expect("hashes"),
        blake3::hash(text.as_bytes()).to_hex().to_string()
    );
    let spelled = SMALL.replace("lr = 1", "lr = 1.0 # as a number\nclip_norm = 1");
    assert_eq!(
        recipe.hash().ok(),
        read(&spelled).expect("right").hash().ok()
    );
    let other = SMALL.replace("lr = 1", "lr = 1.5");
    assert_ne!(recipe.hash().ok(), read(&other).expect("right").hash().ok());
}

#[test]
fn a_digest_stands_in_the_text_only_where_it_is_asked_for() {
    let plain = small();
    let mut asked = small();
    assert_eq!(plain.digest.every, None);
    assert!(!plain.to_toml().expect("writes").contains("digest"));
    asked.set("digest.every=5").expect("an integer");
    assert_eq!(asked.digest.every, Some(5));
    let text = asked.to_toml().expect("writes");
    assert!(text.ends_with("[digest]\nevery = 5\n"), "{text}");
    assert_eq!(read(&text).expect("its own text is right"), asked);
    assert_ne!(plain.hash().ok(), asked.hash().ok());
    assert!(asked.set("digest.every=0").is_err());
    let empty = read(&format!("{SMALL}\n[digest]\n")).expect("right");
    assert_eq!(empty.hash().ok(), plain.hash().ok());
}

#[test]
fn checkpoints_stand_in_the_text_only_where_they_are_asked_for() {
    let plain = small();
    let text = plain.to_toml().expect("writes");
    assert!(
        text.contains("[checkpoint]\nsave_model = true\n\n"),
        "{text}"
    );
    for key in ["every", "keep_last", "keep_every"] {
        let mut asked = small();
        asked
            .set(&format!("checkpoint.{key}=3"))
            .expect("an integer");
        let text = asked.to_toml().expect("writes");
        assert!(
            text.contains(&format!("save_model = true\n{key} = 3\n")),
            "{text}"
        );
        assert_eq!(read(&text).expect("its own text is right"), asked);
        assert_ne!(plain.hash().ok(), asked.hash().ok());
        assert!(asked.set(&format!("checkpoint.{key}=0")).is_err());
    }
}

#[test]
fn overrides_take_effect_and_defaults_follow_them() {
    let mut recipe = small();
    recipe.set("optimizer.lr=3e-4").expect("a number");
    recipe.set("data.batch = 16").expect("an integer");
    recipe.set("schedule.kind=cosine").expect("plain text");
    recipe.set("name=\"quoted\"").expect("quoted text");
    recipe
        .set("optimizer.spike_norm=8")
        .expect("an integer as a number");
    assert_eq!(recipe.optimizer.lr, 3e-4);
    assert_eq!((recipe.data.batch, recipe.data.grain), (16, 16));
    assert_eq!(recipe.name, "quoted");
    assert_eq!(recipe.optimizer.spike_norm, Some(8.0));
}

#[test]
fn overrides_that_depend_on_each_other_change_together() {
    let mut recipe = small();
    assert!(recipe.set("golden.trace_steps=90").is_err());
    recipe
        .set_all([
            "golden.trace_steps=90",
            "golden.steps=100",
            "golden.steps=120",
        ])
        .expect("the outcome fits");
    assert_eq!((recipe.golden.trace_steps, recipe.golden.steps), (90, 120));
    assert!(
        recipe
            .set_all(["golden.steps=200", "golden.trace_steps=300"])
            .is_err()
    );
    assert_eq!(
        recipe.golden.steps, 120,
        "none is applied when the outcome does not fit"
    );
}

#[test]
fn an_override_keeps_what_was_changed_in_memory() {
    let mut recipe = small();
    recipe.seed = 77;
    recipe.set("steps=41").expect("right");
    assert_eq!((recipe.seed, recipe.steps), (77, 41));
}

#[test]
fn a_recipe_changed_in_memory_is_checked_again() {
    let mut recipe = small();
    assert!(recipe.validate().is_ok());
    recipe.data.grain = 3;
    let error = recipe.validate().expect_err("3 does not divide 8");
    assert_eq!(
        error.to_string(),
        "r.toml: `data.grain`: expected a divisor of data.batch = 8, found 3"
    );
}

#[test]
fn a_seed_beyond_the_integers_of_toml_cannot_be_written() {
    let mut recipe = small();
    recipe.seed = u64::MAX;
    assert!(matches!(
        recipe.to_toml(),
        Err(ConfigError::Unwritable { .. })
    ));
    assert!(matches!(recipe.hash(), Err(ConfigError::Unwritable { .. })));
    assert!(matches!(
        recipe.validate(),
        Err(ConfigError::Unwritable { .. })
    ));
}

#[test]
fn a_syntax_error_names_file_line_and_column() {
    let error = read("name = \"a\"\nsteps = = 3\n").expect_err("not TOML");
    match error {
        ConfigError::Syntax {
            file, line, column, ..
        } => assert_eq!((file.as_str(), line, column), ("r.toml", 2, 9)),
        other => panic!("{other:?}"),
    }
    let twice = read("name = \"a\"\nname = \"b\"\n").expect_err("twice");
    assert!(matches!(twice, ConfigError::Syntax { line: 2, .. }));
}

#[test]
fn an_unknown_key_names_the_nearest() {
    let text = |t: &str| read(t).expect_err(t).to_string();
    assert_eq!(
        text(&SMALL.replace("lr = 1", "learning_rate = 1")),
        "r.toml: unknown key `optimizer.learning_rate`; the nearest known one is `optimizer.lr`"
    );
    assert_eq!(
        text(&SMALL.replace("[optimizer]", "[optimiser]")),
        "r.toml: unknown key `optimiser`; the nearest known one is `optimizer`"
    );
    assert_eq!(
        refused("lr=1").to_string(),
        "r.toml: unknown key `lr`; the nearest known one is `optimizer.lr`"
    );
}

#[test]
fn values_out_of_range_name_key_expected_and_found() {
    let cases = [
        ("optimizer.lr=-1", "optimizer.lr"),
        ("optimizer.lr=inf", "optimizer.lr"),
        ("optimizer.lr=1e39", "optimizer.lr"),
        ("optimizer.lr=nan", "optimizer.lr"),
        ("optimizer.lr=fast", "optimizer.lr"),
        ("optimizer.beta1=1", "optimizer.beta1"),
        ("optimizer.beta2=-0.1", "optimizer.beta2"),
        ("optimizer.eps=0", "optimizer.eps"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay"),
        ("optimizer.clip_norm=-1", "optimizer.clip_norm"),
        ("optimizer.spike_norm=0", "optimizer.spike_norm"),
        ("seed=-1", "seed"),
        ("steps=0", "steps"),
        ("steps=1.5", "steps"),
        ("warmup_steps=1", "warmup_steps"),
        ("name=../up", "name"),
        ("name=.hidden", "name"),
        ("name=\"\"", "name"),
        ("model.family=gpt", "model.family"),
        ("model.n_kv_heads=3", "model.n_kv_heads"),
        ("model.head_dim=5", "model.head_dim"),
        ("model.n_heads=3", "model.d_model"),
        ("model.vocab_size=0", "model.vocab_size"),
        ("model.rope_theta=0", "model.rope_theta"),
        ("model.rms_norm_eps=0", "model.rms_norm_eps"),
        ("model.init_std=-1", "model.init_std"),
        ("model.tie_embeddings=1", "model.tie_embeddings"),
        ("model.max_seq_len=11", "data.seq_len"),
        ("data.source=web", "data.source"),
        ("data.batch=0", "data.batch"),
        ("data.seq_len=[1]", "data.seq_len"),
        ("data.grain=3", "data.grain"),
        ("data.piece_tokens=0", "data.piece_tokens"),
        ("data.validation=0.6", "data.validation"),
        ("data.tokenizer=\"\"", "data.tokenizer"),
        ("schedule.kind=step", "schedule.kind"),
        ("schedule.warmup=-1", "schedule.warmup"),
        ("schedule.floor=1.5", "schedule.floor"),
        ("precision.domain=f64", "precision.domain"),
        ("checkpoint.save_model=yes", "checkpoint.save_model"),
        ("golden.steps=0", "golden.steps"),
        ("golden.trace_steps=21", "golden.trace_steps"),
    ];
    for (text, expected) in cases {
        match refused(text) {
            ConfigError::Value { key, .. } => assert_eq!(key, expected, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    assert_eq!(
        refused("optimizer.beta1=1").to_string(),
        "r.toml: `optimizer.beta1`: expected a finite number of at least 0 and below 1, found 1"
    );
    assert_eq!(
        refused("schedule.kind=step").to_string(),
        "r.toml: `schedule.kind`: expected one of \"constant\", \"cosine\", \"linear\", found \"step\""
    );
}

#[test]
fn a_section_that_is_a_value_is_refused() {
    let text = SMALL.replace("steps = 40", "steps = 40\ngolden = 3");
    let error = read(&text).expect_err("golden is a section");
    assert_eq!(
        error.to_string(),
        "r.toml: `golden`: expected a section, found 3"
    );
}

#[test]
fn every_domain_can_be_named_in_full_and_in_short() {
    for math in Math::ALL {
        let written = format!("precision = {:?}\n{SMALL}", math.name());
        let short = read(&written).expect("a short form");
        assert_eq!(short.precision.domain, math.domain());
        let mut recipe = read(SMALL).expect("right");
        let full = format!("precision.domain={}", math.domain());
        for text in [format!("precision={}", math.name()), full] {
            recipe.set(&text).expect("a domain");
            assert_eq!(recipe.hash().expect("text"), short.hash().expect("text"));
            assert_eq!(recipe.precision.math(), math);
        }
        let interval = math.scales_loss().then_some(2000);
        assert_eq!(recipe.precision.growth_interval, interval);
    }
}

#[test]
fn a_growth_interval_without_a_loss_scale_is_refused() {
    let error = refused("precision.growth_interval=5");
    assert!(matches!(
        error,
        ConfigError::Conflict {
            key: "precision.growth_interval",
            ..
        }
    ));
    let mut recipe = read(SMALL).expect("right");
    let both = ["precision=f16", "precision.growth_interval=5"];
    recipe.set_all(both).expect("f16 has a loss scale");
    assert_eq!(recipe.precision.growth_interval, Some(5));
    let error = refused("precision=f8").to_string();
    assert!(error.contains("`precision.domain`"), "{error}");
}

#[test]
fn keys_without_a_default_must_be_there() {
    let required = KEYS
        .iter()
        .filter(|k| matches!(k.absent, Absent::Required) && k.full != "model.family");
    for spec in required {
        let (section, name) = spec.split();
        let mut table = parse(SMALL, "r.toml").expect("TOML");
        let keys = match section {
            "" => &mut table,
            section => table[section].as_table_mut().expect("a section"),
        };
        keys.remove(name).expect("the small recipe writes it");
        let text = toml::to_string(&table).expect("writes");
        match read(&text) {
            Err(ConfigError::MissingKey { key, .. }) => assert_eq!(key, spec.full),
            other => panic!("{}: {other:?}", spec.full),
        }
    }
    let none = read(&SMALL.replace("family = \"qwen3\"", "")).expect_err("no family");
    assert_eq!(
        none.to_string(),
        "r.toml: [model] needs either `path` (a model folder) or `family`"
    );
    assert!(matches!(
        read("name = \"a\""),
        Err(ConfigError::NoModel { .. })
    ));
}

#[test]
fn keys_that_exclude_each_other_are_refused() {
    for (text, key) in [
        ("model.path=base", "model.family"),
        ("data.path=x", "data.path"),
        ("data.token_dtype=u16", "data.token_dtype"),
    ] {
        match refused(text) {
            ConfigError::Conflict { key: found, .. } => assert_eq!(found, key),
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn file_sources_need_a_path_and_bin_has_a_dtype() {
    let missing = refused("data.source=bin");
    assert!(matches!(
        missing,
        ConfigError::MissingKey {
            key: "data.path",
            ..
        }
    ));
    let bin = SMALL.replace("[data]", "[data]\nsource = \"bin\"\npath = \"t.bin\"");
    let recipe = read(&bin).expect("right");
    assert_eq!(recipe.data.token_dtype, Some(TokenDtype::U16));
}

#[test]
fn an_override_without_a_value_is_refused() {
    for text in ["optimizer.lr", "=3", ""] {
        assert!(matches!(refused(text), ConfigError::Override { .. }));
    }
}

#[test]
fn a_value_that_would_write_a_second_key_is_text() {
    let error = refused("optimizer.lr=1\nbeta1 = 0.5");
    assert!(matches!(
        error,
        ConfigError::Value {
            found: Found::Text(_),
            ..
        }
    ));
}

#[test]
fn paths_start_from_the_recipe_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("r.toml");
    let start = SMALL.find("[model]").expect("a model");
    let end = SMALL.find("[data]").expect("data");
    let text = format!(
        "{}[model]\npath = \"base\"\n{}",
        &SMALL[..start],
        &SMALL[end..]
    );
    std::fs::write(&path, text).expect("writes");
    let recipe = Recipe::from_path(&path).expect("right");
    assert!(matches!(recipe.model, ModelSection::Folder(_)));
    assert_eq!(recipe.model_folder(), Some(folder.path().join("base")));
    assert!(matches!(
        recipe.model_config(),
        Err(ConfigError::Read { .. })
    ));
    let mut moved = recipe.clone();
    moved.set("steps=3").expect("right");
    assert_eq!(moved.model_folder(), recipe.model_folder());
    let canonical = recipe.to_toml().expect("writes");
    assert_eq!(read(&canonical).expect("right"), recipe);
    assert!(small().model_config().is_ok());
}

#[test]
fn an_absent_file_is_a_read_error() {
    let error = Recipe::from_path(std::path::Path::new("no/such.toml")).expect_err("absent");
    assert!(matches!(error, ConfigError::Read { .. }));
}

proptest! {
    #[test]
    fn no_text_panics(text in ".{0,200}", at in 0usize..400, cut in 0usize..8) {
        let _ = read(&text);
        let mut recipe = small();
        let _ = recipe.set(&text);
        let chars: Vec<char> = SMALL.chars().collect();
        let at = at.min(chars.len());
        let mutated: String = chars[..at]
            .iter()
            .copied()
            .chain(text.chars().take(3))
            .chain(chars.iter().copied().skip(at + cut))
            .collect();
        let _ = read(&mutated);
    }
}

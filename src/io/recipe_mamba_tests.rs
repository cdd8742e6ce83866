//! Tests of recipes of Mamba: its sizes, its defaults, and the keys that families do not share.

use super::*;
use crate::model::mamba_config::Decay;

const TEXT: &str = r#"
name = "m"
steps = 1
[model]
family = "mamba"
vocab_size = 9
d_model = 40
n_layers = 2
[data]
batch = 2
seq_len = 70
[optimizer]
lr = 1e-3
"#;

fn read() -> Recipe {
    Recipe::from_toml(TEXT, "m.toml").expect("a recipe")
}

fn mamba(recipe: &Recipe) -> crate::model::MambaConfig {
    match recipe.model_config() {
        Ok(AnyConfig::Mamba(config)) => config,
        other => panic!("expected a mamba, found {other:?}"),
    }
}

#[test]
fn sizes_that_are_not_written_follow_from_others() {
    let recipe = read();
    let config = mamba(&recipe);
    assert_eq!((config.d_inner(), config.d_state), (80, 16));
    assert_eq!((config.d_conv, config.dt_rank), (4, 3));
    let text = recipe.to_toml().expect("a text");
    let again = Recipe::from_toml(&text, "m.toml").expect("a recipe");
    assert_eq!(again, recipe);
    assert_eq!(
        again.hash().expect("a hash"),
        recipe.hash().expect("a hash")
    );
    assert!(recipe.check_positions().is_ok(), "every length fits");
}

#[test]
fn keys_of_another_family_are_refused() {
    let refused = |set: &str| match read().set(set) {
        Err(ConfigError::Conflict { key, .. } | ConfigError::Value { key, .. }) => key,
        other => panic!("expected a refusal of {set}, found {other:?}"),
    };
    assert_eq!(refused("model.n_heads=4"), "model.n_heads");
    assert_eq!(refused("model.max_seq_len=64"), "model.max_seq_len");
    assert_eq!(refused("model.d_state=65"), "model.d_state");
    assert_eq!(refused("model.d_conv=1"), "model.d_conv");
    let mut llama = read();
    let sizes = ["model.family=llama", "model.n_heads=4", "model.d_ff=8"];
    llama.set_all(sizes).expect("a llama");
    let error = llama.set("model.d_state=4").expect_err("no states");
    assert!(matches!(
        error,
        ConfigError::Conflict {
            key: "model.d_state",
            ..
        }
    ));
}

#[test]
fn the_optimizer_says_what_decays() {
    let mut recipe = read();
    assert_eq!(mamba(&recipe).decay, Decay::Reference);
    assert!(!recipe.to_toml().expect("a text").contains("decay = \""));
    recipe.set("optimizer.decay=matrices").expect("offered");
    assert_eq!(mamba(&recipe).decay, Decay::Matrices);
    assert!(recipe.set("optimizer.decay=all").is_err());
}

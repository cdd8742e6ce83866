//! Tests of recipes with adapters: their canonical text, and keys that do not fit.

use super::tests::{read, refused, small};
use super::*;
use crate::model::lora::{Base, Projection};
use crate::num::nf4::Quantisation;

#[test]
fn adapters_stand_in_the_text_only_where_there_are_some() {
    let mut recipe = small();
    assert!(recipe.lora.config().is_none());
    assert!(!recipe.to_toml().expect("writes").contains("lora"));
    recipe.set("lora.rank=4").expect("an integer");
    let lora = recipe.lora.config().expect("adapters");
    assert_eq!((lora.rank, lora.alpha, lora.scale()), (4, 4.0, 1.0));
    assert_eq!(lora.targets, Projection::ALL);
    recipe
        .set_all(["lora.alpha=8", "lora.targets=up, q", "lora.base=nf4"])
        .expect("right");
    let text = recipe.to_toml().expect("writes");
    let section =
        "[lora]\nrank = 4\nalpha = 8.0\ntargets = \"q,up\"\nnorms = \"frozen\"\nbase = \"nf4\"\n";
    assert!(text.contains(section), "{text}");
    assert_eq!(read(&text).expect("its own text is right"), recipe);
    let mut other = small();
    other
        .set_all([
            "lora.rank=4",
            "lora.alpha=8",
            "lora.targets=q,up",
            "lora.base=nf4",
        ])
        .expect("right");
    assert_eq!(other.hash().ok(), recipe.hash().ok());
    let bases = [
        ("nf4", Base::Nf4(Quantisation::Once)),
        ("nf4-double", Base::Nf4(Quantisation::Double)),
    ];
    for (written, base) in bases {
        other.set(&format!("lora.base={written}")).expect("a base");
        assert_eq!(other.lora.config().expect("adapters").base, base);
    }
    let text = other.set("lora.base=fp4").unwrap_err().to_string();
    assert!(text.contains("nf4-double"), "{text}");
}

#[test]
fn adapters_without_a_rank_or_on_what_is_no_projection_are_refused() {
    assert!(matches!(
        refused("lora.alpha=8"),
        ConfigError::MissingKey {
            key: "lora.rank",
            ..
        }
    ));
    let mut recipe = small();
    recipe.set("lora.rank=4").expect("an integer");
    let fresh = recipe.set("lora.adapter=there");
    assert!(
        matches!(
            fresh,
            Err(ConfigError::Conflict {
                key: "lora.adapter",
                ..
            })
        ),
        "{fresh:?}"
    );
    for targets in ["q,x", "q,q", ""] {
        let error = recipe.set(&format!("lora.targets={targets}"));
        assert!(
            matches!(
                &error,
                Err(ConfigError::Value {
                    key: "lora.targets",
                    ..
                })
            ),
            "{targets}: {error:?}"
        );
    }
    let text = recipe.set("lora.targets=lm_head").unwrap_err().to_string();
    assert!(
        text.contains("some of q, k, v, o, gate, up, down"),
        "{text}"
    );
}

//! The keys of a recipe that say how a step is carried out. They decide memory and time, and no bit.

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::recipe::Recipe;
use crate::error::{ConfigError, Expected, Found};
use crate::plan::Recompute;

/// `[memory]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemorySection {
    /// So many layers at a time keep only what goes into them, and backward computes their activations anew; 0 keeps
    /// all activations. 1 where the base is frozen, 0 elsewhere and then absent. Decides no bit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompute: Option<usize>,
    /// The arena takes at most so many bytes: backward computes anew what costs the least time for each byte, until it
    /// fits. In place of the key above. Decides no bit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arena_bytes: Option<usize>,
}

impl MemorySection {
    pub(super) fn is_absent(&self) -> bool {
        self.recompute.is_none() && self.arena_bytes.is_none()
    }

    /// Which activations are computed anew.
    pub fn form(&self) -> Recompute {
        match self.arena_bytes {
            Some(arena_bytes) => Recompute::Within { arena_bytes },
            None => self.recompute.filter(|&layers| layers > 0).into(),
        }
    }
}

/// Layers at a time of a frozen base: what is trained beside it is small, so that activations are nearly all of what
/// a step adds to the weights.
const FROZEN_RECOMPUTE: i64 = 1;

const ARENA_BYTES: &str = "arena_bytes";

/// Fills in recomputation: of a frozen base, unless it or a budget is written. 0 says nothing where all activations are
/// kept anyway.
pub(super) fn derive_memory(full: &mut Table, file: &str) -> Result<(), ConfigError> {
    let frozen = full
        .get("lora")
        .is_some_and(|lora| lora.get("rank").is_some());
    let Some(Value::Table(memory)) = full.get_mut("memory") else {
        return Ok(());
    };
    let written = memory.get("recompute").and_then(Value::as_integer);
    match (frozen, written) {
        (_, None) if memory.contains_key(ARENA_BYTES) => {}
        (_, Some(_)) if memory.contains_key(ARENA_BYTES) => {
            return Err(ConfigError::Conflict {
                file: file.to_owned(),
                key: "memory.arena_bytes",
                beside: "memory.recompute",
            });
        }
        (true, None) => {
            memory.insert("recompute".to_owned(), Value::Integer(FROZEN_RECOMPUTE));
        }
        (false, Some(0)) => {
            memory.remove("recompute");
        }
        _ => {}
    }
    Ok(())
}

impl Recipe {
    /// The recipe without the keys that decide only how a step is carried out: what defines the bits. Goldens and
    /// checkpoints hold its hash, so they hold for every such form.
    pub fn defining(&self) -> Recipe {
        let mut recipe = self.clone();
        recipe.data.micro_batch = None;
        recipe.memory = MemorySection::default();
        recipe
    }

    /// The recipe with all activations kept unless its text or an option says otherwise: what goldens are recorded
    /// and verified with, for their traces are of the calls of the defining form.
    pub fn to_trace(&self) -> Recipe {
        let mut recipe = self.clone();
        if !self.writes_memory() {
            recipe.memory = MemorySection::default();
        }
        recipe
    }

    /// Whether the text or an option says something of recomputation.
    fn writes_memory(&self) -> bool {
        let memory = self.origin.written.get("memory").and_then(Value::as_table);
        memory.is_some_and(|keys| keys.contains_key("recompute") || keys.contains_key(ARENA_BYTES))
    }

    /// Sets a key of `[memory]`, as [`Recipe::set`] does, in place of all that is said there.
    ///
    /// # Errors
    /// As [`Recipe::set`].
    pub fn set_memory(&mut self, text: &str) -> Result<(), ConfigError> {
        let mut recipe = self.clone();
        if self.writes_memory() {
            recipe.memory = MemorySection::default();
        }
        recipe.set(text)?;
        *self = recipe;
        Ok(())
    }
}

/// A canonical text without the keys of [`Recipe::defining`]; a text that is no TOML as it is.
pub fn defining_text(text: &str) -> String {
    let Ok(mut table) = text.parse::<Table>() else {
        return text.to_owned();
    };
    if let Some(data) = table.get_mut("data").and_then(Value::as_table_mut) {
        data.remove("micro_batch");
    }
    table.remove("memory");
    table.to_string()
}

/// Checks that a micro-batch divides the batch in whole grains.
pub(super) fn check_micro_batch(recipe: &Recipe, file: &str) -> Result<(), ConfigError> {
    let data = &recipe.data;
    let Some(micro) = data.micro_batch else {
        return Ok(());
    };
    let number = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let expected = match (
        data.batch.is_multiple_of(micro),
        micro.is_multiple_of(data.grain),
    ) {
        (true, true) => return Ok(()),
        (false, _) => Expected::DivisorOf {
            key: "data.batch",
            value: number(data.batch),
        },
        (true, false) => Expected::MultipleOf {
            key: "data.grain",
            value: number(data.grain),
        },
    };
    Err(ConfigError::Value {
        file: file.to_owned(),
        key: "data.micro_batch",
        expected,
        found: Found::Integer(i64::try_from(micro).unwrap_or(i64::MAX)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "name = \"r\"\nsteps = 3\n[model]\nfamily = \"llama\"\nvocab_size = 64\nd_model = 16\n\
                        n_layers = 1\nn_heads = 2\nd_ff = 32\n[data]\nbatch = 12\nseq_len = 24\ngrain = 2\n\
                        [optimizer]\nlr = 1e-2\n";

    #[test]
    fn a_form_is_no_part_of_what_defines_the_bits() {
        let plain = Recipe::from_toml(TEXT, "r.toml").unwrap();
        let mut form = plain.clone();
        form.set_all(["data.micro_batch=4", "memory.recompute=2"])
            .unwrap();
        assert_eq!(form.data.micro_batch, Some(4));
        assert_eq!(form.memory.recompute, Some(2));
        assert_ne!(form.hash().unwrap(), plain.hash().unwrap());
        assert_eq!(form.defining(), plain);
        assert_eq!(form.defining().hash().unwrap(), plain.hash().unwrap());
        let texts = [&plain, &form].map(|r| defining_text(&r.to_toml().unwrap()));
        assert_eq!(texts[0], texts[1]);
        let mut other = plain.clone();
        other.set("data.grain=3").unwrap();
        assert_ne!(defining_text(&other.to_toml().unwrap()), texts[0]);
        assert!(
            !plain.to_toml().unwrap().contains("memory"),
            "absent, as before"
        );
    }

    #[test]
    fn frozen_bases_are_recomputed_unless_the_recipe_says_otherwise() {
        let plain = Recipe::from_toml(TEXT, "r.toml").unwrap();
        assert_eq!(plain.memory.form(), Recompute::Nothing);
        let mut zero = plain.clone();
        zero.set("memory.recompute=0").unwrap();
        assert_eq!(zero.to_toml().unwrap(), plain.to_toml().unwrap());

        let mut frozen = plain.clone();
        frozen.set("lora.rank=4").unwrap();
        assert_eq!(frozen.memory.form(), Recompute::Layers(1));
        let text = frozen.to_toml().unwrap();
        assert!(text.contains("[memory]\nrecompute = 1\n"), "{text}");
        assert_eq!(Recipe::from_toml(&text, "r.toml").unwrap(), frozen);
        let hash = frozen.defining().hash().unwrap();
        assert!(!frozen.defining().to_toml().unwrap().contains("memory"));
        for (layers, found) in [(0, Recompute::Nothing), (3, Recompute::Layers(3))] {
            let mut written = frozen.clone();
            written.set(&format!("memory.recompute={layers}")).unwrap();
            assert_eq!(written.memory.form(), found);
            let again = Recipe::from_toml(&written.to_toml().unwrap(), "r.toml").unwrap();
            assert_eq!(again, written, "0 is said where it is not the default");
            assert_eq!(written.defining().hash().unwrap(), hash);
            assert_eq!(written.to_trace(), written);
        }
        assert_eq!(frozen.to_trace(), frozen.defining());
        frozen.set("memory.recompute=1").unwrap();
        assert_eq!(frozen.to_trace().memory.recompute, Some(1), "as asked");
    }

    #[test]
    fn a_budget_stands_in_place_of_recomputed_layers() {
        let plain = Recipe::from_toml(TEXT, "r.toml").unwrap();
        let within = Recompute::Within {
            arena_bytes: 70_000,
        };
        for base in ["", "[lora]\nrank = 4\n"] {
            let text = format!("{TEXT}{base}");
            let unset = Recipe::from_toml(&text, "r.toml").unwrap();
            let mut recipe = unset.clone();
            recipe.set("memory.arena_bytes=70000").unwrap();
            assert_eq!(recipe.memory.form(), within, "no layers by default");
            let written = recipe.to_toml().unwrap();
            assert!(
                written.contains("[memory]\narena_bytes = 70000\n"),
                "{written}"
            );
            assert_eq!(Recipe::from_toml(&written, "r.toml").unwrap(), recipe);
            assert_eq!(recipe.defining(), unset.defining());
            assert_eq!(recipe.to_trace(), recipe, "as asked");

            let refused = recipe.clone().set("memory.recompute=1").unwrap_err();
            let text = refused.to_string();
            for word in ["memory.arena_bytes", "memory.recompute"] {
                assert!(text.contains(word), "{text}");
            }
            let mut other = recipe.clone();
            other.set_memory("memory.recompute=2").unwrap();
            assert_eq!(other.memory.form(), Recompute::Layers(2));
            assert_eq!(other.to_trace(), other);
            other.set_memory("memory.arena_bytes=70000").unwrap();
            assert_eq!(other, recipe);
            assert!(other.set_memory("memory.arena_bytes=0").is_err());
            assert_eq!(other, recipe, "refused and unchanged");
        }
        let both = format!("{TEXT}[memory]\nrecompute = 0\narena_bytes = 9\n");
        assert!(Recipe::from_toml(&both, "r.toml").is_err());
        assert!(!plain.to_toml().unwrap().contains("memory"));
    }

    #[test]
    fn a_micro_batch_divides_the_batch_in_whole_grains() {
        let mut recipe = Recipe::from_toml(TEXT, "r.toml").unwrap();
        for (micro, part) in [
            (5, "a divisor of data.batch"),
            (3, "a multiple of data.grain"),
            (24, "a divisor of data.batch"),
        ] {
            let refused = recipe
                .set(&format!("data.micro_batch={micro}"))
                .unwrap_err();
            let text = refused.to_string();
            assert!(
                text.contains("data.micro_batch") && text.contains(part),
                "{text}"
            );
        }
        for micro in [2, 4, 6, 12] {
            recipe.set(&format!("data.micro_batch={micro}")).unwrap();
        }
        for wrong in ["data.micro_batch=0", "memory.recompute=-1"] {
            assert!(recipe.set(wrong).is_err(), "{wrong}");
        }
    }
}

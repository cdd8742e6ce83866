//! The table of a recipe's keys: where each stands, what it accepts and what it is when absent.

use std::ops::Bound;

use crate::error::Expected;
use crate::shape::Math;

/// What a key is when the recipe does not write it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Absent {
    /// An error.
    Required,
    /// Simply absent.
    Stays,
    /// Computed from other keys.
    Derived,
    /// This text.
    Text(&'static str),
    /// This integer.
    Integer(i64),
    /// This number.
    Number(f64),
    /// This flag.
    Flag(bool),
}

/// One key of a recipe.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeySpec {
    /// The full name, `section.key`, or the key alone at the top level.
    pub full: &'static str,
    /// What it accepts.
    pub expected: Expected,
    /// What it is when absent.
    pub absent: Absent,
}

impl KeySpec {
    /// The section, empty at the top level, and the key within it.
    pub(super) fn split(&self) -> (&'static str, &'static str) {
        self.full.split_once('.').unwrap_or(("", self.full))
    }
}

/// The sections, in the order the canonical text has them.
pub(super) const SECTIONS: [&str; 12] = [
    "model",
    "lora",
    "data",
    "optimizer",
    "schedule",
    "precision",
    "memory",
    "checkpoint",
    "golden",
    "digest",
    "evaluation",
    "metrics",
];

/// The domains this version offers.
pub(super) const DOMAINS: [&str; 4] = {
    let [a, b, c, d] = Math::ALL;
    [a.domain(), b.domain(), c.domain(), d.domain()]
};

/// The greatest value of a size; the product of two sizes still fits 64 bits.
const SIZE_MAX: i64 = i32::MAX as i64;

const SIZE: Expected = Expected::Integer {
    min: 1,
    max: SIZE_MAX,
};

const fn number(low: Bound<f64>, high: Bound<f64>) -> Expected {
    Expected::Number { low, high }
}

const NOT_NEGATIVE: Expected = number(Bound::Included(0.0), Bound::Unbounded);
const POSITIVE: Expected = number(Bound::Excluded(0.0), Bound::Unbounded);
const BETA: Expected = number(Bound::Included(0.0), Bound::Excluded(1.0));

const fn at_least(min: i64) -> Expected {
    Expected::Integer { min, max: i64::MAX }
}

const fn key(full: &'static str, expected: Expected, absent: Absent) -> KeySpec {
    KeySpec {
        full,
        expected,
        absent,
    }
}

/// Every key.
pub(super) const KEYS: [KeySpec; 66] = {
    use Absent::{Derived, Flag, Integer, Number, Required, Stays, Text};
    [
        key("name", Expected::Name, Required),
        key("seed", at_least(0), Integer(0)),
        key("steps", at_least(1), Required),
        key(
            "warmup_steps",
            Expected::Integer {
                min: 2,
                max: u32::MAX as i64,
            },
            Integer(3),
        ),
        key("model.path", Expected::Text, Stays),
        key("model.family", Expected::OneOf(&FAMILIES), Required),
        key("model.vocab_size", SIZE, Required),
        key("model.d_model", SIZE, Required),
        key("model.n_layers", SIZE, Required),
        key("model.n_heads", SIZE, Required),
        key("model.n_kv_heads", SIZE, Derived),
        key("model.head_dim", SIZE, Derived),
        key("model.d_ff", SIZE, Required),
        key("model.expand", SIZE, Integer(2)),
        key("model.d_state", SIZE, Integer(16)),
        key("model.d_conv", SIZE, Integer(4)),
        key("model.dt_rank", SIZE, Derived),
        key("model.rope_theta", POSITIVE, Number(10_000.0)),
        key("model.rms_norm_eps", POSITIVE, Number(1e-5)),
        key("model.tie_embeddings", Expected::Flag, Flag(false)),
        key("model.max_seq_len", SIZE, Derived),
        key("model.init_std", NOT_NEGATIVE, Number(0.02)),
        key("lora.rank", SIZE, Stays),
        key("lora.alpha", POSITIVE, Derived),
        key("lora.targets", Expected::ListOf(&PROJECTIONS), Derived),
        key(
            "lora.norms",
            Expected::OneOf(&["frozen", "trained"]),
            Derived,
        ),
        key("lora.adapter", Expected::Text, Stays),
        key(
            "lora.base",
            Expected::OneOf(&["plain", "nf4", "nf4-double"]),
            Derived,
        ),
        key("data.source", Expected::OneOf(&SOURCES), Text("sums")),
        key("data.path", Expected::Text, Stays),
        key("data.tokenizer", Expected::Text, Text("bytes")),
        key("data.token_dtype", Expected::OneOf(&["u16", "u32"]), Stays),
        key("data.batch", SIZE, Required),
        key("data.micro_batch", SIZE, Stays),
        key("data.seq_len", SIZE, Required),
        key("data.grain", SIZE, Derived),
        key("data.piece_tokens", SIZE, Stays),
        key(
            "data.validation",
            number(Bound::Included(0.0), Bound::Included(0.5)),
            Number(0.0),
        ),
        key(
            "data.windows",
            Expected::OneOf(&["shuffled", "consecutive"]),
            Stays,
        ),
        key("optimizer.lr", NOT_NEGATIVE, Required),
        key("optimizer.beta1", BETA, Number(0.9)),
        key("optimizer.beta2", BETA, Number(0.95)),
        key("optimizer.eps", POSITIVE, Number(1e-8)),
        key("optimizer.weight_decay", NOT_NEGATIVE, Number(0.1)),
        key("optimizer.clip_norm", NOT_NEGATIVE, Number(1.0)),
        key("optimizer.spike_norm", POSITIVE, Stays),
        key("optimizer.decay", Expected::OneOf(&DECAYS), Stays),
        key(
            "schedule.kind",
            Expected::OneOf(&["constant", "cosine", "linear"]),
            Text("constant"),
        ),
        key("schedule.warmup", at_least(0), Integer(0)),
        key(
            "schedule.floor",
            number(Bound::Included(0.0), Bound::Included(1.0)),
            Number(0.1),
        ),
        key("precision.domain", Expected::OneOf(&DOMAINS), Text("f32")),
        key(
            "precision.growth_interval",
            Expected::Integer {
                min: 1,
                max: u32::MAX as i64,
            },
            Stays,
        ),
        key(
            "memory.recompute",
            Expected::Integer {
                min: 0,
                max: SIZE_MAX,
            },
            Derived,
        ),
        key("memory.arena_bytes", at_least(1), Stays),
        key("checkpoint.save_model", Expected::Flag, Flag(true)),
        key("checkpoint.every", at_least(1), Stays),
        key("checkpoint.keep_last", at_least(1), Stays),
        key("checkpoint.keep_every", at_least(1), Stays),
        key("checkpoint.keep_best", Expected::Flag, Stays),
        key("golden.steps", at_least(1), Integer(20)),
        key("golden.trace_steps", at_least(0), Integer(1)),
        key("digest.every", at_least(1), Stays),
        key("evaluation.every", at_least(1), Stays),
        key("evaluation.batches", at_least(1), Stays),
        key("metrics.group_norms_every", at_least(1), Stays),
        key("metrics.tensorboard", Expected::Flag, Stays),
    ]
};

/// The model families a recipe can name.
pub(super) const FAMILIES: [&str; 4] = ["llama", "qwen2", "qwen3", "mamba"];

/// The keys of a model that only decoders have, and those that only Mamba has.
const DECODER_KEYS: [&str; 6] = [
    "model.n_heads",
    "model.n_kv_heads",
    "model.head_dim",
    "model.d_ff",
    "model.rope_theta",
    "model.max_seq_len",
];
const MAMBA_KEYS: [&str; 4] = [
    "model.expand",
    "model.d_state",
    "model.d_conv",
    "model.dt_rank",
];

/// Whether a family has a key; every one has the keys outside `[model]`.
pub(super) fn family_has(family: &str, key: &str) -> bool {
    match family {
        "mamba" => !DECODER_KEYS.contains(&key),
        _ => !MAMBA_KEYS.contains(&key),
    }
}

/// To which tensors weight decay can apply.
const DECAYS: [&str; 2] = ["reference", "matrices"];

/// The projections on which a recipe can put adapters, by their short names.
pub(super) const PROJECTIONS: [&str; 7] = ["q", "k", "v", "o", "gate", "up", "down"];

/// The data sources a recipe can name.
const SOURCES: [&str; 4] = ["sums", "text", "bin", "llmc"];

/// Whether a key takes a number, so that an integer written there is read as one.
pub(super) fn takes_number(expected: &Expected) -> bool {
    matches!(expected, Expected::Number { .. })
}

/// The known name nearest to `full`: a key of that very name in another section first, then
/// the most similar name (Jaro-Winkler) among the keys and the sections.
pub(super) fn nearest(full: &str) -> &'static str {
    let last = full.rsplit('.').next().unwrap_or(full);
    if let Some(spec) = KEYS.iter().find(|k| k.split().1 == last) {
        return spec.full;
    }
    let names = KEYS.iter().map(|k| k.full).chain(SECTIONS);
    let mut best = ("name", -1.0);
    for name in names {
        let own_last = name.rsplit('.').next().unwrap_or(name);
        // The last part weighs as much as the whole, so that a slip in it is found across sections.
        let score = strsim::jaro_winkler(full, name) + strsim::jaro_winkler(last, own_last);
        if score > best.1 {
            best = (name, score);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_find_their_key() {
        assert_eq!(nearest("optimizer.learn_rate"), "optimizer.lr");
        assert_eq!(nearest("optimizer.beta_1"), "optimizer.beta1");
        assert_eq!(nearest("lr"), "optimizer.lr");
        assert_eq!(nearest("optimiser"), "optimizer");
        assert_eq!(nearest("modle.d_model"), "model.d_model");
        assert_eq!(nearest("stesp"), "steps");
        assert_eq!(nearest("data.sequence_len"), "data.seq_len");
        assert_eq!(nearest("golden.trace_step"), "golden.trace_steps");
    }

    #[test]
    fn every_key_stands_in_a_known_section_once() {
        let mut seen = std::collections::BTreeSet::new();
        for spec in &KEYS {
            let section = spec.split().0;
            assert!(section.is_empty() || SECTIONS.contains(&section));
            assert!(seen.insert(spec.full), "{} stands twice", spec.full);
        }
    }
}

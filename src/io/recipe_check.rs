//! From a recipe's text to a checked recipe: unknown keys, kinds and ranges, defaults, relations.

use toml::{Table, Value};

use super::recipe::{DataSource, ModelSection, Origin, Recipe};
use super::recipe_form::{check_micro_batch, derive_memory};
use super::recipe_keys::{
    Absent, KEYS, KeySpec, PROJECTIONS, SECTIONS, family_has, nearest, takes_number,
};
use super::recipe_record;
use crate::error::{ConfigError, Expected, Found};
use crate::model::AnyConfig;
use crate::plan::GROWTH_INTERVAL;
use crate::shape::Math;

/// The section of the numeric domain, and the key that its short form stands for.
const PRECISION: &str = "precision";
const PRECISION_DOMAIN: &str = "precision.domain";

/// Parses TOML; a fault carries the file, the line and the column, both from 1.
pub(super) fn parse(text: &str, file: &str) -> Result<Table, ConfigError> {
    let parsed = text.parse::<Table>().map_err(|error| {
        let at = error.span().map_or(0, |span| span.start).min(text.len());
        let before = text.get(..at).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        ConfigError::Syntax {
            file: file.to_string(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            message: error.message().to_string(),
        }
    });
    parsed.map(|mut table| {
        expand_precision(&mut table);
        table
    })
}

/// The short form `precision = "bf16"` stands for the section with the domain of that name.
fn expand_precision(table: &mut Table) {
    let Some(Value::String(short)) = table.get(PRECISION) else {
        return;
    };
    let mut section = Table::new();
    section.insert("domain".to_string(), Value::String(domain_of(short)));
    table.insert(PRECISION.to_string(), Value::Table(section));
}

/// The domain that a short name stands for; any other text is itself.
fn domain_of(short: &str) -> String {
    let named = Math::ALL.into_iter().find(|math| math.name() == short);
    named.map_or_else(|| short.to_string(), |math| math.domain().to_string())
}

/// Writes the override `key=value` into a table of written keys.
pub(super) fn put(table: &mut Table, text: &str, file: &str) -> Result<(), ConfigError> {
    let malformed = || ConfigError::Override {
        text: text.to_string(),
    };
    let (key, value) = text.split_once('=').ok_or_else(malformed)?;
    let (key, value) = (key.trim(), value.trim());
    if key.is_empty() {
        return Err(malformed());
    }
    let (key, value) = match key {
        PRECISION => (PRECISION_DOMAIN, domain_of(value.trim_matches('"'))),
        key => (key, value.to_string()),
    };
    let spec = KEYS
        .iter()
        .find(|spec| spec.full == key)
        .ok_or_else(|| unknown(key, file))?;
    let (section, name) = spec.split();
    let value = override_value(&value);
    if section.is_empty() {
        table.insert(name.to_string(), value);
    } else if let Value::Table(keys) = table
        .entry(section)
        .or_insert_with(|| Value::Table(Table::new()))
    {
        keys.insert(name.to_string(), value);
    }
    Ok(())
}

/// The value of an override: TOML when it is exactly one TOML value, the text itself otherwise.
fn override_value(text: &str) -> Value {
    let parsed = format!("value = {text}").parse::<Table>();
    match parsed {
        Ok(mut table) if table.len() == 1 => table
            .remove("value")
            .unwrap_or_else(|| Value::String(text.to_string())),
        _ => Value::String(text.to_string()),
    }
}

/// Checks what was written, fills in every default and builds the recipe.
pub(super) fn build(origin: Origin) -> Result<Recipe, ConfigError> {
    let file = origin.file.as_str();
    reject_unknown(&origin.written, file)?;
    let mut full = Table::new();
    for section in SECTIONS {
        full.insert(section.to_string(), Value::Table(Table::new()));
    }
    let from_folder = model_is_a_folder(&origin.written, file)?;
    let family = family(&origin.written);
    for spec in &KEYS {
        if spec.full.starts_with("model.") && from_folder != (spec.full == "model.path") {
            continue;
        }
        if !family_has(family, spec.full) {
            refuse_written(spec, &origin.written, file)?;
            continue;
        }
        if let Some(value) = settle(spec, &origin.written, file)? {
            insert(&mut full, spec, value);
        }
    }
    if !from_folder {
        derive_model(&mut full, file)?;
    }
    derive_lora(&mut full, file)?;
    derive_memory(&mut full, file)?;
    derive_data(&mut full);
    derive_precision(&mut full);
    let mut recipe: Recipe = full.try_into().map_err(|e| ConfigError::Unwritable {
        file: file.to_string(),
        message: e.to_string(),
    })?;
    check_relations(&recipe, file)?;
    recipe.origin = origin;
    Ok(recipe)
}

/// The family that `[model]` names, as it is written.
fn family(written: &Table) -> &str {
    let model = written.get("model").and_then(Value::as_table);
    let family = model.and_then(|m| m.get("family"));
    family.and_then(Value::as_str).unwrap_or_default()
}

/// Refuses a key that the model's family does not have.
fn refuse_written(spec: &KeySpec, written: &Table, file: &str) -> Result<(), ConfigError> {
    let (section, name) = spec.split();
    let section = written.get(section).and_then(Value::as_table);
    match section.is_some_and(|section| section.contains_key(name)) {
        true => Err(ConfigError::Conflict {
            file: file.to_string(),
            key: spec.full,
            beside: "a model.family that does not have it",
        }),
        false => Ok(()),
    }
}

fn unknown(key: &str, file: &str) -> ConfigError {
    ConfigError::UnknownKey {
        file: file.to_string(),
        key: key.to_string(),
        nearest: nearest(key),
    }
}

/// Refuses keys and sections that do not exist, and sections that are not tables.
fn reject_unknown(written: &Table, file: &str) -> Result<(), ConfigError> {
    for (name, value) in written {
        let Some(section) = SECTIONS.iter().find(|s| *s == name) else {
            if KEYS.iter().any(|spec| spec.full == name) {
                continue;
            }
            return Err(unknown(name, file));
        };
        let Value::Table(keys) = value else {
            return Err(ConfigError::Value {
                file: file.to_string(),
                key: section,
                expected: Expected::Section,
                found: Found::from(value),
            });
        };
        for key in keys.keys() {
            let full = format!("{section}.{key}");
            if !KEYS.iter().any(|spec| spec.full == full) {
                return Err(unknown(&full, file));
            }
        }
    }
    Ok(())
}

/// Whether `[model]` names a folder; sizes beside a folder are refused, since the folder's own
/// configuration states them.
fn model_is_a_folder(written: &Table, file: &str) -> Result<bool, ConfigError> {
    let model = written.get("model").and_then(Value::as_table);
    let has = |key: &str| model.is_some_and(|m| m.contains_key(key));
    if !has("path") {
        return match has("family") {
            true => Ok(false),
            false => Err(ConfigError::NoModel {
                file: file.to_string(),
            }),
        };
    }
    for spec in &KEYS {
        let (section, name) = spec.split();
        if section == "model" && name != "path" && has(name) {
            return Err(ConfigError::Conflict {
                file: file.to_string(),
                key: spec.full,
                beside: "model.path",
            });
        }
    }
    Ok(true)
}

/// The value of one key, checked, or its default; `None` when it stays absent or is derived later.
fn settle(spec: &KeySpec, written: &Table, file: &str) -> Result<Option<Value>, ConfigError> {
    let (section, name) = spec.split();
    let value = match section {
        "" => written.get(name),
        section => written.get(section).and_then(|s| s.get(name)),
    };
    if let Some(value) = value {
        return check(spec, value, file).map(Some);
    }
    match spec.absent {
        Absent::Required => Err(ConfigError::MissingKey {
            file: file.to_string(),
            key: spec.full,
            expected: spec.expected,
        }),
        Absent::Stays | Absent::Derived => Ok(None),
        Absent::Text(x) => Ok(Some(Value::String(x.to_string()))),
        Absent::Integer(x) => Ok(Some(Value::Integer(x))),
        Absent::Number(x) => Ok(Some(Value::Float(x))),
        Absent::Flag(x) => Ok(Some(Value::Boolean(x))),
    }
}

/// Checks one value against what its key accepts; integers become numbers where numbers stand.
fn check(spec: &KeySpec, value: &Value, file: &str) -> Result<Value, ConfigError> {
    let value = match value {
        Value::Integer(x) if takes_number(&spec.expected) => Value::Float(*x as f64),
        // Adding zero turns -0 into 0, so that both have one canonical text.
        Value::Float(x) => Value::Float(x + 0.0),
        other => other.clone(),
    };
    let fits = match (&spec.expected, &value) {
        (Expected::Text, Value::String(x)) => !x.is_empty(),
        (Expected::Name, Value::String(x)) => is_name(x),
        (Expected::Flag, Value::Boolean(_)) => true,
        (Expected::Integer { min, max }, Value::Integer(x)) => min <= x && x <= max,
        (Expected::Number { low, high }, Value::Float(x)) => {
            // The engine computes in f32, so a number must be finite there too.
            (*x as f32).is_finite() && std::ops::RangeBounds::contains(&(*low, *high), x)
        }
        (Expected::OneOf(words), Value::String(x)) => words.contains(&x.as_str()),
        (Expected::ListOf(words), Value::String(x)) => is_list(x, words),
        _ => false,
    };
    if fits {
        return Ok(value);
    }
    Err(ConfigError::Value {
        file: file.to_string(),
        key: spec.full,
        expected: spec.expected,
        found: Found::from(&value),
    })
}

/// Whether a text can name a file on every system.
fn is_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty() && !text.starts_with('.') && text.chars().all(plain)
}

/// Whether a text lists some of `words`, each once.
fn is_list(text: &str, words: &[&str]) -> bool {
    let named: Vec<&str> = text.split(',').map(str::trim).collect();
    let once = |word: &&str| named.iter().filter(|n| *n == word).count() == 1;
    named.iter().all(|n| words.contains(n) && once(n))
}

fn insert(full: &mut Table, spec: &KeySpec, value: Value) {
    let (section, name) = spec.split();
    match full.get_mut(section) {
        Some(Value::Table(keys)) => keys.insert(name.to_string(), value),
        _ => full.insert(name.to_string(), value),
    };
}

/// An integer already settled in a section.
fn integer(full: &Table, section: &str, name: &str) -> Option<i64> {
    full.get(section)?.get(name)?.as_integer()
}

/// Sets a key of a section unless it is there.
fn set_default(full: &mut Table, section: &str, name: &str, value: Option<Value>) {
    if let (Some(Value::Table(keys)), Some(value)) = (full.get_mut(section), value) {
        keys.entry(name).or_insert(value);
    }
}

/// Fills in the sizes of a fresh model that follow from others.
fn derive_model(full: &mut Table, file: &str) -> Result<(), ConfigError> {
    if family(full) == "mamba" {
        let rank = integer(full, "model", "d_model").map(|d| d.max(1).unsigned_abs().div_ceil(16));
        let rank = rank.and_then(|rank| i64::try_from(rank).ok());
        set_default(full, "model", "dt_rank", rank.map(Value::Integer));
        return Ok(());
    }
    let heads = integer(full, "model", "n_heads");
    let width = integer(full, "model", "d_model");
    if let (None, Some(heads), Some(width)) = (integer(full, "model", "head_dim"), heads, width) {
        if width % heads != 0 {
            return Err(ConfigError::Value {
                file: file.to_string(),
                key: "model.d_model",
                expected: Expected::MultipleOf {
                    key: "model.n_heads",
                    value: heads.unsigned_abs(),
                },
                found: Found::Integer(width),
            });
        }
        let head_dim = Some(Value::Integer(width / heads));
        set_default(full, "model", "head_dim", head_dim);
    }
    set_default(full, "model", "n_kv_heads", heads.map(Value::Integer));
    let seq_len = integer(full, "data", "seq_len").map(Value::Integer);
    set_default(full, "model", "max_seq_len", seq_len);
    Ok(())
}

/// Fills in what adapters need where there are some; their keys mean nothing without a rank.
fn derive_lora(full: &mut Table, file: &str) -> Result<(), ConfigError> {
    let Some(rank) = integer(full, "lora", "rank") else {
        let keys = full.get("lora").and_then(Value::as_table);
        return match keys.is_some_and(|keys| !keys.is_empty()) {
            false => Ok(()),
            true => Err(ConfigError::MissingKey {
                file: file.to_string(),
                key: "lora.rank",
                expected: Expected::Integer {
                    min: 1,
                    max: i64::from(i32::MAX),
                },
            }),
        };
    };
    let text = |x: &str| Some(Value::String(x.to_string()));
    set_default(full, "lora", "alpha", Some(Value::Float(rank as f64)));
    set_default(full, "lora", "norms", text("frozen"));
    set_default(full, "lora", "base", text("plain"));
    // One canonical text for one set of projections: their own order, without blanks.
    let written = full.get("lora").and_then(|l| l.get("targets"));
    let written = written.and_then(Value::as_str).map(str::to_string);
    let named = |p: &&&str| match &written {
        None => true,
        Some(list) => list.split(',').any(|n| n.trim() == **p),
    };
    let targets: Vec<&str> = PROJECTIONS.iter().filter(named).copied().collect();
    if let Some(Value::Table(lora)) = full.get_mut("lora") {
        lora.insert("targets".to_string(), Value::String(targets.join(",")));
    }
    Ok(())
}

/// Fills in the data keys that follow from others.
fn derive_data(full: &mut Table) {
    let batch = integer(full, "data", "batch").map(Value::Integer);
    set_default(full, "data", "grain", batch);
    let source = full.get("data").and_then(|d| d.get("source"));
    if source.and_then(Value::as_str) == Some("bin") {
        let dtype = Some(Value::String("u16".to_string()));
        set_default(full, "data", "token_dtype", dtype);
    }
}

/// Fills in what a loss scale needs where there is one.
fn derive_precision(full: &mut Table) {
    let domain = full.get(PRECISION).and_then(|p| p.get("domain"));
    let math = domain.and_then(Value::as_str).and_then(Math::of_domain);
    if math.is_some_and(Math::scales_loss) {
        let interval = Some(Value::Integer(i64::from(GROWTH_INTERVAL)));
        set_default(full, PRECISION, "growth_interval", interval);
    }
}

/// The most tokens of a step: a larger number is a mistake that would fill the memory before it is seen.
const TOKENS_MAX: usize = 1 << 26;

/// Checks what holds between keys.
fn check_relations(recipe: &Recipe, file: &str) -> Result<(), ConfigError> {
    let fault = |key, expected, found: u64| {
        Err(ConfigError::Value {
            file: file.to_string(),
            key,
            expected,
            found: Found::Integer(i64::try_from(found).unwrap_or(i64::MAX)),
        })
    };
    let data = &recipe.data;
    if let ModelSection::Fresh(config) = &recipe.model {
        config.validate_recipe(file)?;
        if let AnyConfig::Decoder(config) = config
            && data.seq_len > config.max_seq_len
        {
            let (key, value) = ("model.max_seq_len", config.max_seq_len as u64);
            let expected = Expected::AtMost { key, value };
            return fault("data.seq_len", expected, data.seq_len as u64);
        }
    }
    let tokens = data.batch.saturating_mul(data.seq_len);
    if tokens > TOKENS_MAX {
        let expected = Expected::AtMost {
            key: "tokens of a step (data.batch x data.seq_len)",
            value: TOKENS_MAX as u64,
        };
        return fault("data.batch", expected, tokens as u64);
    }
    if !data.batch.is_multiple_of(data.grain) {
        let (key, value) = ("data.batch", data.batch as u64);
        let expected = Expected::DivisorOf { key, value };
        return fault("data.grain", expected, data.grain as u64);
    }
    check_micro_batch(recipe, file)?;
    if recipe.golden.trace_steps > recipe.golden.steps {
        let (key, value) = ("golden.steps", recipe.golden.steps);
        let expected = Expected::AtMost { key, value };
        return fault("golden.trace_steps", expected, recipe.golden.trace_steps);
    }
    let precision = &recipe.precision;
    if precision.growth_interval.is_some() && !precision.math().scales_loss() {
        return Err(ConfigError::Conflict {
            file: file.to_string(),
            key: "precision.growth_interval",
            beside: "a precision.domain other than \"f16.sm90\"",
        });
    }
    recipe_record::check(recipe, file)?;
    if recipe.lora.adapter.is_some() && recipe.model_folder().is_none() {
        return Err(ConfigError::Conflict {
            file: file.to_string(),
            key: "lora.adapter",
            beside: "a fresh model, which no adapter was trained for",
        });
    }
    check_source(recipe, file)
}

/// A file source needs a path, and keys of another source have no meaning.
fn check_source(recipe: &Recipe, file: &str) -> Result<(), ConfigError> {
    let data = &recipe.data;
    let file = file.to_string();
    let conflict = |key, beside| ConfigError::Conflict {
        file: file.clone(),
        key,
        beside,
    };
    match (data.source, &data.path) {
        (DataSource::Sums, Some(_)) => {
            return Err(conflict("data.path", "data.source = \"sums\""));
        }
        (DataSource::Text | DataSource::Bin | DataSource::Llmc, None) => {
            return Err(ConfigError::MissingKey {
                file,
                key: "data.path",
                expected: Expected::Text,
            });
        }
        _ => {}
    }
    if data.source != DataSource::Bin && data.token_dtype.is_some() {
        return Err(conflict(
            "data.token_dtype",
            "a data.source other than \"bin\"",
        ));
    }
    Ok(())
}

#[cfg(test)]
#[path = "recipe_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "recipe_mamba_tests.rs"]
mod mamba_tests;

#[cfg(test)]
#[path = "recipe_lora_tests.rs"]
mod lora_tests;

//! Tests of `config.json`: both rotary spellings, defaults, refusals and writing back.

use proptest::prelude::*;

use super::*;

fn read_any(text: &str) -> Result<Parsed, ConfigError> {
    parse(text.as_bytes(), "config.json")
}

/// A decoder's configuration and the keys of its file.
fn read(text: &str) -> Result<(ModelConfig, Map<String, Value>), ConfigError> {
    match read_any(text)? {
        (AnyConfig::Decoder(config), map) => Ok((config, map)),
        (other, _) => panic!("expected a decoder, found {}", other.family()),
    }
}

fn write(config: &ModelConfig, extra: &Map<String, Value>) -> String {
    super::write(&config.clone().into(), extra)
}

/// A small Llama with further keys.
fn llama(more: &str) -> String {
    format!(
        r#"{{"model_type":"llama","hidden_size":64,"num_attention_heads":4,"vocab_size":160,
        "num_hidden_layers":2,"intermediate_size":176{}{more}}}"#,
        if more.is_empty() { "" } else { "," }
    )
}

fn config(text: &str) -> ModelConfig {
    read(text).unwrap_or_else(|e| panic!("{text}: {e}")).0
}

fn refused(more: &str) -> ConfigError {
    read(&llama(more)).expect_err(more)
}

#[test]
fn absent_keys_have_the_defaults_of_transformers() {
    let bare = |family: &str| config(&format!(r#"{{"model_type":"{family}"}}"#));
    let expected = |family, vocab_size, d_ff, max_seq_len| ModelConfig {
        family,
        vocab_size,
        d_model: 4096,
        n_layers: 32,
        n_heads: 32,
        n_kv_heads: 32,
        head_dim: 128,
        d_ff,
        rope_theta: 10_000.0,
        rms_norm_eps: 1e-6,
        tie_embeddings: false,
        max_seq_len,
        init_std: 0.02,
    };
    assert_eq!(
        bare("llama"),
        expected(Family::Llama, 32_000, 11_008, 2_048)
    );
    assert_eq!(
        bare("qwen2"),
        expected(Family::Qwen2, 151_936, 22_016, 32_768)
    );
    assert_eq!(
        bare("qwen3"),
        expected(Family::Qwen3, 151_936, 22_016, 32_768)
    );
    let small = config(&llama(""));
    assert_eq!((small.n_kv_heads, small.head_dim), (4, 16));
    let heads = |family: &str, kv: &str| {
        let text = format!(r#"{{"model_type":"{family}","num_attention_heads":64{kv}}}"#);
        let c = config(&text);
        (c.n_kv_heads, c.head_dim)
    };
    assert_eq!(heads("llama", ""), (64, 64));
    assert_eq!(heads("qwen2", ""), (32, 64));
    assert_eq!(heads("qwen3", ""), (32, 128));
    assert_eq!(heads("qwen3", r#","num_key_value_heads":null"#), (64, 128));
    assert_eq!(heads("qwen2", r#","head_dim":null"#), (32, 64));
}

#[test]
fn both_spellings_of_the_rotary_base_are_read() {
    let theta = |more: &str| config(&llama(more)).rope_theta;
    assert_eq!(theta(r#""rope_theta":5e5"#), 5e5);
    assert_eq!(theta(r#""rope_theta":500000,"rope_scaling":null"#), 5e5);
    let new = r#""rope_parameters":{"rope_theta":1000000.0,"rope_type":"default"}"#;
    assert_eq!(theta(new), 1e6);
    assert_eq!(theta(&format!(r#"{new},"rope_theta":1000000"#)), 1e6);
    assert_eq!(theta(r#""rope_scaling":{"type":"default"}"#), 1e4);
    let error = refused(&format!(r#"{new},"rope_theta":10000"#));
    assert_eq!(
        error.to_string(),
        "config.json: `rope_parameters.rope_theta`: expected the value of rope_theta = 10000, found 1000000"
    );
}

#[test]
fn what_is_not_offered_is_refused_by_name() {
    let cases = [
        (r#""hidden_act":"gelu""#, "hidden_act"),
        (r#""attention_bias":true"#, "attention_bias"),
        (r#""mlp_bias":true"#, "mlp_bias"),
        (r#""attention_dropout":0.1"#, "attention_dropout"),
        (r#""quantization_config":{}"#, "quantization_config"),
        (
            r#""rope_scaling":{"rope_type":"llama3","factor":8}"#,
            "rope_scaling.rope_type",
        ),
        (
            r#""rope_scaling":{"type":"linear","factor":2}"#,
            "rope_scaling.rope_type",
        ),
        (
            r#""rope_parameters":{"rope_type":"yarn"}"#,
            "rope_parameters.rope_type",
        ),
        (
            r#""rope_parameters":{"partial_rotary_factor":0.5}"#,
            "rope_parameters.partial_rotary_factor",
        ),
        (r#""partial_rotary_factor":0.5"#, "partial_rotary_factor"),
        (
            r#""layer_types":["full_attention","sliding_attention"]"#,
            "layer_types",
        ),
        (
            r#""use_sliding_window":true,"sliding_window":8,"max_window_layers":1"#,
            "use_sliding_window",
        ),
    ];
    for (more, expected) in cases {
        match refused(more) {
            ConfigError::Unsupported { key, .. } => assert_eq!(key, expected, "{more}"),
            other => panic!("{more}: {other:?}"),
        }
    }
    assert_eq!(
        refused(r#""rope_scaling":{"rope_type":"llama3"}"#).to_string(),
        "config.json: `rope_scaling.rope_type` = \"llama3\" is not offered: this version offers \"default\" only"
    );
}

#[test]
fn keys_that_change_nothing_are_accepted() {
    for more in [
        r#""use_sliding_window":false,"sliding_window":8,"max_window_layers":0"#,
        r#""use_sliding_window":true,"sliding_window":null,"max_window_layers":0"#,
        r#""use_sliding_window":true,"sliding_window":8,"max_window_layers":2"#,
        r#""use_sliding_window":true,"sliding_window":8"#,
        r#""layer_types":["full_attention","full_attention"]"#,
        r#""torch_dtype":"bfloat16","hidden_act":"silu","attention_dropout":0"#,
        r#""tie_word_embeddings":null,"partial_rotary_factor":1.0"#,
    ] {
        assert!(read(&llama(more)).is_ok(), "{more}");
    }
    let qwen2 = r#"{"model_type":"qwen2","attention_bias":true}"#;
    assert!(config(qwen2).attention_bias());
}

#[test]
fn wrong_values_are_refused_by_their_name_in_the_file() {
    let cases = [
        (r#""num_key_value_heads":3"#, "num_key_value_heads"),
        (r#""num_key_value_heads":"4""#, "num_key_value_heads"),
        (r#""head_dim":5"#, "head_dim"),
        (r#""head_dim":-2"#, "head_dim"),
        (r#""max_position_embeddings":0"#, "max_position_embeddings"),
        (
            r#""max_position_embeddings":1.5"#,
            "max_position_embeddings",
        ),
        (r#""rms_norm_eps":0"#, "rms_norm_eps"),
        (r#""rms_norm_eps":"small""#, "rms_norm_eps"),
        (r#""initializer_range":-1"#, "initializer_range"),
        (r#""rope_theta":-1"#, "rope_theta"),
        (
            r#""rope_theta":null,"rope_parameters":{"rope_theta":"x"}"#,
            "rope_parameters.rope_theta",
        ),
        (r#""rope_parameters":3"#, "rope_parameters"),
        (r#""tie_word_embeddings":1"#, "tie_word_embeddings"),
        (r#""layer_types":3"#, "layer_types"),
    ];
    for (more, expected) in cases {
        match refused(more) {
            ConfigError::Value { key, .. } => assert_eq!(key, expected, "{more}"),
            other => panic!("{more}: {other:?}"),
        }
    }
    let heads = |n: usize| {
        let text = llama("").replace(
            r#""num_attention_heads":4"#,
            &format!(r#""num_attention_heads":{n}"#),
        );
        read(&text).expect_err("wrong heads").to_string()
    };
    assert_eq!(
        heads(3),
        "config.json: `hidden_size`: expected a multiple of num_attention_heads = 3, found 64"
    );
    assert_eq!(
        heads(0),
        "config.json: `num_attention_heads`: expected an integer from 1 to 2147483647, found 0"
    );
}

#[test]
fn the_family_must_be_a_known_one() {
    let error = read(r#"{"model_type":"gpt2"}"#).expect_err("unknown");
    assert_eq!(
        error.to_string(),
        "config.json: `model_type`: expected one of \"llama\", \"qwen2\", \"qwen3\", \"mamba\", found \"gpt2\""
    );
    let error = read("{}").expect_err("absent");
    assert!(matches!(
        error,
        ConfigError::MissingKey {
            key: "model_type",
            ..
        }
    ));
}

#[test]
fn a_syntax_error_has_its_place() {
    let error = read("{\n \"a\": ,\n}").expect_err("not JSON");
    assert!(
        matches!(error, ConfigError::Syntax { line: 2, .. }),
        "{error}"
    );
}

#[test]
fn what_is_written_reads_back_and_keeps_the_other_keys() {
    let text = llama(
        r#""bos_token_id":1,"eos_token_id":[2,3],"dtype":"bfloat16","rope_scaling":null,
        "rope_parameters":{"rope_theta":7e5,"own":1},"tie_word_embeddings":true"#,
    );
    let (config, map) = read(&text).expect("right");
    let written = write(&config, &map);
    let (again, keys) = read(&written).expect("right");
    assert_eq!(again, config);
    assert_eq!(keys["eos_token_id"], json!([2, 3]));
    assert_eq!(keys["bos_token_id"], json!(1));
    assert_eq!(
        (&keys["dtype"], &keys["torch_dtype"]),
        (&json!("float32"), &json!("float32"))
    );
    assert_eq!(keys["rope_theta"], json!(7e5));
    let rope = json!({"own": 1, "rope_theta": 7e5, "rope_type": "default"});
    assert_eq!(keys["rope_parameters"], rope);
    assert_eq!(keys["architectures"], json!(["LlamaForCausalLM"]));
    assert_eq!(
        write(&again, &keys),
        written,
        "writing twice changes nothing"
    );
    let changed = ModelConfig {
        n_layers: 5,
        ..config
    };
    assert_eq!(self::config(&write(&changed, &map)), changed);
}

/// Fast readers of JSON numbers miss the nearest f64 of this one by a bit.
#[test]
fn numbers_keep_their_last_bit() {
    let (config, map) = read(&llama(r#""rope_theta":901000000007140032"#)).expect("right");
    let again = self::config(&write(&config, &map));
    assert_eq!(again.rope_theta.to_bits(), config.rope_theta.to_bits());
}

proptest! {
    #[test]
    fn no_text_panics(text in ".{0,100}", key in 0usize..16, value in "-?[0-9]{1,22}|null|true|\"x\"|\\[\\]|\\{\\}|1e300|-0.5") {
        let _ = read(&text);
        let mamba = [
            "vocab_size", "hidden_size", "num_hidden_layers", "expand", "state_size", "conv_kernel",
            "time_step_rank", "layer_norm_epsilon", "initializer_range", "use_bias", "use_conv_bias",
            "hidden_act", "tie_word_embeddings", "quantization_config", "residual_in_fp32", "dtype",
        ];
        let text = format!(r#"{{"model_type":"mamba","{}":{value}}}"#, mamba[key]);
        if let Ok((config, map)) = read_any(&text) {
            prop_assert!(config.validate().is_ok());
            let written = super::write(&config, &map);
            prop_assert_eq!(read_any(&written).expect("right").0, config);
        }
        let keys = [
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "intermediate_size", "rope_theta",
            "rms_norm_eps", "max_position_embeddings", "initializer_range", "rope_parameters",
            "rope_scaling", "layer_types", "max_window_layers", "tie_word_embeddings",
        ];
        for family in ["llama", "qwen2", "qwen3"] {
            let text = format!(r#"{{"model_type":"{family}","{}":{value}}}"#, keys[key]);
            if let Ok((config, map)) = read(&text) {
                prop_assert!(config.validate().is_ok());
                prop_assert_eq!(read(&write(&config, &map)).expect("right").0, config);
            }
        }
    }
}

fn mamba(more: &str) -> Result<Parsed, ConfigError> {
    read_any(&format!(
        r#"{{"model_type":"mamba","hidden_size":48{more}}}"#
    ))
}

#[test]
fn a_mamba_file_has_the_defaults_of_transformers_and_reads_back() {
    let (config, map) = mamba(r#","time_step_rank":"auto","own":7"#).expect("right");
    let AnyConfig::Mamba(mamba) = &config else {
        panic!("a mamba")
    };
    assert_eq!((mamba.vocab_size, mamba.n_layers), (50_280, 32));
    assert_eq!((mamba.d_inner(), mamba.d_state, mamba.d_conv), (96, 16, 4));
    assert_eq!((mamba.dt_rank, mamba.tie_embeddings), (3, true));
    let written = super::write(&config, &map);
    let (again, keys) = read_any(&written).expect("right");
    assert_eq!(again, config);
    assert_eq!(
        (&keys["own"], &keys["time_step_rank"]),
        (&json!(7), &json!(3))
    );
    assert_eq!(super::write(&again, &keys), written);
}

#[test]
fn what_a_mamba_file_asks_for_and_is_not_offered_is_refused() {
    let key = |more: &str| match mamba(more) {
        Err(ConfigError::Unsupported { key, .. } | ConfigError::Value { key, .. }) => key,
        other => panic!("expected a refusal of {more}, found {other:?}"),
    };
    assert_eq!(key(r#","use_bias":true"#), "use_bias");
    assert_eq!(key(r#","use_conv_bias":false"#), "use_conv_bias");
    assert_eq!(key(r#","hidden_act":"gelu""#), "hidden_act");
    assert_eq!(key(r#","quantization_config":{}"#), "quantization_config");
    assert_eq!(key(r#","time_step_rank":"x""#), "time_step_rank");
    assert_eq!(key(r#","state_size":65"#), "state_size");
    assert_eq!(key(r#","conv_kernel":1"#), "conv_kernel");
}

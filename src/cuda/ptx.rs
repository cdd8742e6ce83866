//! The committed PTX, by file stem. A test holds the list equal to the folder.

macro_rules! ptx {
    ($($stem:literal),+ $(,)?) => {
        &[$(($stem, include_str!(concat!("../../ptx/", $stem, ".ptx")))),+]
    };
}

/// `(stem, text)` of every file.
pub const PTX: &[(&str, &str)] = ptx![
    "adamw_f32",
    "attention_delta_f32",
    "attention_f32",
    "attention_grad_key_value_f32",
    "attention_grad_query_f32",
    "bias_grad_f32",
    "clip_f32",
    "cross_entropy_f32",
    "digest_blake3",
    "embed_f32",
    "embed_grad_f32",
    "grad_squares_f32",
    "loss_sum_f32",
    "matmul_f32",
    "matmul_grad_input_f32",
    "matmul_grad_weight_f32",
    "probe_mma",
    "probe_wgmma_sm90a",
    "qk_norm_rope_f32",
    "qk_norm_rope_grad_f32",
    "rms_norm_f32",
    "rms_norm_grad_f32",
    "rope_f32",
    "rope_grad_f32",
    "swiglu_f32",
    "swiglu_grad_f32",
    "tree_add_f32",
];

//! The committed PTX, by file stem. A test holds the list equal to the folder.
//!
//! A file has kernels for several sizes, of which a run needs one or two, and a driver compiles a whole
//! file at once. So each kernel is handed to the driver alone, with what its file declares beside it.

macro_rules! ptx {
    ($($stem:literal),+ $(,)?) => {
        &[$(($stem, include_str!(concat!("../../ptx/", $stem, ".ptx")))),+]
    };
}

/// `(stem, text)` of every file.
pub const PTX: &[(&str, &str)] = ptx![
    "adamw_bf16",
    "adamw_f16",
    "adamw_f32",
    "attention_bf16",
    "attention_bf16_sm90a",
    "attention_delta_bf16",
    "attention_delta_f16",
    "attention_delta_f32",
    "attention_f16",
    "attention_f16_sm90a",
    "attention_f32",
    "attention_grad_key_value_bf16",
    "attention_grad_key_value_bf16_sm90a",
    "attention_grad_key_value_f16",
    "attention_grad_key_value_f16_sm90a",
    "attention_grad_key_value_f32",
    "attention_grad_key_value_tf32",
    "attention_grad_query_bf16",
    "attention_grad_query_bf16_sm90a",
    "attention_grad_query_f16",
    "attention_grad_query_f16_sm90a",
    "attention_grad_query_f32",
    "attention_grad_query_kept_bf16_sm90a",
    "attention_grad_query_kept_f16_sm90a",
    "attention_grad_query_tf32",
    "attention_grads_bf16",
    "attention_grads_f16",
    "attention_grads_tf32",
    "attention_tf32",
    "attention_turned_bf16",
    "attention_turned_f16",
    "attention_turned_tf32",
    "bias_grad_bf16",
    "bias_grad_f16",
    "bias_grad_f32",
    "carry_state_f32",
    "clip_f16",
    "clip_f32",
    "conv1d_bf16",
    "conv1d_f16",
    "conv1d_f32",
    "conv1d_grad_bf16",
    "conv1d_grad_f16",
    "conv1d_grad_f32",
    "copy_f32",
    "cross_entropy_bf16",
    "cross_entropy_f16",
    "cross_entropy_f32",
    "digest_blake3",
    "embed_f32",
    "embed_frozen_bf16",
    "embed_frozen_f16",
    "embed_grad_f32",
    "fill_neutral_f32",
    "grad_squares_f32",
    "lora_down_grad_input_bf16",
    "lora_down_grad_input_f16",
    "lora_down_grad_input_f32",
    "lora_down_grad_input_tf32",
    "lora_up_bf16",
    "lora_up_f16",
    "lora_up_f32",
    "lora_up_grad_input_bf16",
    "lora_up_grad_input_f16",
    "lora_up_grad_input_f32",
    "lora_up_grad_input_tf32",
    "lora_up_grad_weight_bf16",
    "lora_up_grad_weight_f16",
    "lora_up_grad_weight_f32",
    "lora_up_grad_weight_tf32",
    "lora_up_grad_weight_thin_bf16",
    "lora_up_grad_weight_thin_f16",
    "lora_up_swiglu_bf16",
    "lora_up_swiglu_f16",
    "lora_up_tf32",
    "loss_sum_f32",
    "matmul_bf16",
    "matmul_bf16_sm90a",
    "matmul_f16",
    "matmul_f16_sm90a",
    "matmul_f32",
    "matmul_grad_input_bf16",
    "matmul_grad_input_bf16_sm90a",
    "matmul_grad_input_f16",
    "matmul_grad_input_f16_sm90a",
    "matmul_grad_input_f32",
    "matmul_grad_input_tf32",
    "matmul_grad_weight_bf16",
    "matmul_grad_weight_f16",
    "matmul_grad_weight_f32",
    "matmul_grad_weight_tf32",
    "matmul_grads_bf16",
    "matmul_grads_f16",
    "matmul_grads_f32",
    "matmul_grads_tf32",
    "matmul_tf32",
    "nf4_dequantise_bf16",
    "nf4_dequantise_f16",
    "nf4_dequantise_f32",
    "probe_mma",
    "probe_wgmma_sm90a",
    "qk_norm_rope_bf16",
    "qk_norm_rope_f16",
    "qk_norm_rope_f32",
    "qk_norm_rope_grad_bf16",
    "qk_norm_rope_grad_f16",
    "qk_norm_rope_grad_f32",
    "rms_norm_bf16",
    "rms_norm_f16",
    "rms_norm_f32",
    "rms_norm_grad_bf16",
    "rms_norm_grad_f16",
    "rms_norm_grad_f32",
    "rms_norm_grad_folds_f32",
    "rope_bf16",
    "rope_f16",
    "rope_f32",
    "rope_grad_bf16",
    "rope_grad_f16",
    "rope_grad_f32",
    "scan_bf16",
    "scan_f16",
    "scan_f32",
    "scan_grad_bf16",
    "scan_grad_f16",
    "scan_grad_f32",
    "split_columns_bf16",
    "split_columns_f16",
    "split_columns_f32",
    "split_columns_grad_bf16",
    "split_columns_grad_f16",
    "split_columns_grad_f32",
    "step_end_f32",
    "swiglu_bf16",
    "swiglu_f16",
    "swiglu_f32",
    "swiglu_grad_bf16",
    "swiglu_grad_f16",
    "swiglu_grad_f32",
    "tree_add_f32",
];

/// What stands before a kernel's name.
const KERNEL: &str = "\n.visible .entry ";

/// Where the text of a kernel ends: after the line of the brace that closes its body, which may hold braces
/// of vectors and of inline instructions.
fn end_of(kernel: &str) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, c) in kernel.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return Some((at + "}\n".len()).min(kernel.len())),
            '}' => depth = depth.checked_sub(1)?,
            _ => {}
        }
    }
    None
}

/// The names of the kernels of a file, in its order.
pub fn kernels(text: &str) -> impl Iterator<Item = &str> {
    let parts = text.split(KERNEL).skip(1);
    parts.map(|part| part.split('(').next().unwrap_or(part))
}

/// A file's text with the kernel `entry` and without its others; `None` where it has no such kernel.
pub fn alone(text: &str, entry: &str) -> Option<String> {
    let mut parts = text.split(KERNEL);
    let mut kept = parts.next()?.to_owned();
    let mut found = false;
    for part in parts {
        let end = end_of(part)?;
        if part.split('(').next() == Some(entry) {
            found = true;
            kept += KERNEL;
            kept += &part[..end];
        }
        // A newline was split off before each kernel.
        kept += &part[end..];
    }
    found.then_some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kernel_stands_alone_with_the_declarations_of_its_file() {
        for (stem, text) in PTX {
            let whole: Vec<&str> = kernels(text).collect();
            assert!(!whole.is_empty(), "{stem}");
            for &entry in &whole {
                let alone = alone(text, entry).expect("a kernel of this file");
                assert_eq!(kernels(&alone).collect::<Vec<_>>(), [entry]);
                let declared = |text: &str| {
                    let outside = text.lines().filter(|l| l.starts_with('.'));
                    let declared = [".version", ".target", ".address", ".global", ".shared"];
                    let kept = outside.filter(|l| declared.iter().any(|d| l.starts_with(d)));
                    kept.map(str::to_owned).collect::<Vec<_>>()
                };
                assert_eq!(declared(&alone), declared(text), "{entry}");
                let body = |text: &str| {
                    let start = text.find(&format!("{KERNEL}{entry}(")).unwrap();
                    let end = start + end_of(&text[start..]).unwrap();
                    text[start..end].to_owned()
                };
                assert_eq!(body(&alone), body(text), "{entry}");
            }
            let bodies = whole.iter().map(|e| alone(text, e).unwrap().len());
            // The kernels with the rest of their file once each are the file and the rest again.
            let rest = text.len()
                - whole
                    .iter()
                    .map(|e| text.len() - without(text, e).len())
                    .sum::<usize>();
            let total = bodies.sum::<usize>();
            assert_eq!(total, text.len() + rest * (whole.len() - 1), "{stem}");
        }
    }

    /// A file's text without one kernel.
    fn without(text: &str, entry: &str) -> String {
        let start = text.find(&format!("{KERNEL}{entry}(")).unwrap();
        let end = start + end_of(&text[start..]).unwrap();
        format!("{}{}", &text[..start], &text[end..])
    }

    #[test]
    fn kernels_share_no_variable_of_their_file() {
        // Kernels that are loaded alone have a copy each of what their file declares: only what is never
        // written may be used.
        let mut declared = 0;
        for (stem, text) in PTX {
            let globals = text.lines().filter(|l| l.contains(".global .align"));
            for line in globals {
                let name = line.split('=').next().unwrap_or(line).trim_end();
                let name = name.split_whitespace().next_back().unwrap_or(name);
                let name = name.trim_end_matches(';').split('[').next().unwrap_or(name);
                let word = |c: char| !(c.is_alphanumeric() || "_$".contains(c));
                let uses = text.lines().filter(|l| l.split(word).any(|w| w == name));
                for user in uses.filter(|l| !l.contains(".global .align")) {
                    assert!(user.trim().starts_with("ld."), "{stem}: {user}");
                }
                declared += 1;
            }
        }
        assert!(declared > 0);
    }

    #[test]
    fn a_kernel_ends_where_its_own_brace_closes() {
        let one = |name: &str| {
            format!("{KERNEL}{name}()\n{{\n\tld {{a, b}};\n{{\n.reg p;\n}}\n\tret;\n}}\n")
        };
        let text = format!(".target\n{}{}", one("a"), one("b"));
        assert_eq!(alone(&text, "a"), Some(format!(".target\n{}", one("a"))));
        assert_eq!(alone(&text, "b"), Some(format!(".target\n{}", one("b"))));
        assert_eq!(alone(&format!("{KERNEL}a()\n{{"), "a"), None);
    }

    #[test]
    fn a_kernel_that_is_not_there_is_none() {
        assert_eq!(alone(PTX[0].1, "nothing"), None);
        assert_eq!(alone("", "nothing"), None);
    }
}

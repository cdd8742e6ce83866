//! `bitstep diff --devices A,B RECIPE`.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::device::{DeviceArguments, DevicePair};
use super::recipe_options::RecipeArguments;
use super::{Outcome, form, output};
use crate::backend::Backend;
use crate::engine::lockstep::{Compared, Divergence, Lockstep};
use crate::error::ExitCode;

/// The options of `bitstep diff` that belong to the comparison of devices.
#[derive(Args, Debug)]
pub struct DeviceOptions {
    /// Run a recipe on two devices op by op and stop at the first output that differs: two of cpu,
    /// cpu:scalar, cpu:avx2, cpu:avx512 and cuda:N, such as cpu,cuda:0
    #[arg(long, value_name = "A,B")]
    devices: Option<String>,
    /// Whole steps to compare; the first also times the products that a GPU may use from the second on
    #[arg(long, conflicts_with = "right", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    steps: u64,
    /// Changes a key of the recipe, such as data.batch=8; may be repeated
    #[arg(long = "set", conflicts_with = "right", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Threads of a CPU [default: all cores]
    #[arg(long, conflicts_with = "right", value_name = "N")]
    threads: Option<usize>,
    /// Matrix products on a GPU: own kernels, or auto for the fastest admitted
    #[arg(
        long,
        conflicts_with = "right",
        default_value = "auto",
        value_name = "CHOICE"
    )]
    gemm: String,
    /// Print one line of JSON
    #[arg(long, conflicts_with = "right")]
    json: bool,
}

impl DeviceOptions {
    /// Runs the recipe on both devices and prints the first difference.
    ///
    /// # Errors
    /// A device or a recipe that cannot be opened; a fault on the way.
    pub fn run(self, recipe: PathBuf) -> Outcome {
        let pair: DevicePair = self.devices.unwrap_or_default().parse()?;
        let recipe = RecipeArguments {
            recipe,
            set: self.set,
        };
        let recipe = form::in_one_pass(recipe.open(None)?);
        let [left, right] = pair.open(&DeviceArguments {
            device: "cpu".into(),
            threads: self.threads,
            simd: None,
            gemm: self.gemm,
        })?;
        let devices = [left.info(), right.info()].map(|info| info.description);
        if !self.json {
            say!("left  {}\nright {}", devices[0], devices[1]);
        }
        let name = recipe.name.clone();
        let compared = Lockstep::open(recipe, left, right)?.run(self.steps, |report| {
            output::note(format_args!("step {}: identical", report.step));
        })?;
        match (self.json, &compared.divergence) {
            (true, _) => say!("{}", json(&name, &devices, &compared)),
            (false, None) => say!(
                "identical: every output of {} calls in {} steps, {}",
                compared.calls,
                compared.steps,
                output::bytes(compared.bytes)
            ),
            (false, Some(found)) => say!("{}", text(found)),
        }
        Ok(match compared.divergence {
            None => ExitCode::Done,
            Some(_) => ExitCode::Differs,
        })
    }
}

/// A difference for people, a line for each fact.
fn text(found: &Divergence) -> String {
    let mut lines = vec![format!("differs at step {}", found.step)];
    match &found.call {
        None => lines.push(
            "  op       none: the state differs, and no call of this step has written it so".into(),
        ),
        Some(call) => {
            lines.push(format!("  op       {} (call {})", call.stem, call.index));
            let [left, right] = &call.kernels;
            lines.push(format!("  kernel   left {left}"));
            lines.push(format!("           right {right}"));
            if let Some(operand) = &call.changed_operand {
                lines.push(format!(
                    "  note     its operand {operand} differs already: something outside the ops' \
                     outputs wrote it"
                ));
            }
        }
    }
    let (differing, elements) = found.differing;
    lines.push(format!(
        "  tensor   {} ({}), {differing} of {elements} elements differ",
        found.tensor, found.dtype
    ));
    let part = found.part.as_ref();
    let part = part.map(|(name, index)| format!(" (element {index} of {name})"));
    lines.push(format!(
        "  index    {}{}",
        found.index,
        part.unwrap_or_default()
    ));
    for ((side, hex), decimal) in ["left ", "right"]
        .iter()
        .zip(found.hex())
        .zip(found.decimal())
    {
        lines.push(format!("  {side}    {hex} ({decimal})"));
    }
    lines.join("\n")
}

fn json(recipe: &str, devices: &[String; 2], compared: &Compared) -> serde_json::Value {
    let difference = compared.divergence.as_ref().map(|found| {
        json!({
            "step": found.step,
            "call": found.call.as_ref().map(|c| c.index),
            "op": found.call.as_ref().map(|c| c.stem),
            "kernels": found.call.as_ref().map(|c| &c.kernels),
            "changed_operand": found.call.as_ref().and_then(|c| c.changed_operand.as_ref()),
            "tensor": found.tensor,
            "dtype": found.dtype.name(),
            "index": found.index,
            "part": found.part.as_ref().map(|(name, _)| name),
            "part_index": found.part.as_ref().map(|(_, index)| index),
            "differing": found.differing.0,
            "elements": found.differing.1,
            "bits": found.hex(),
            "values": found.decimal(),
        })
    });
    json!({
        "recipe": recipe,
        "devices": devices,
        "identical": difference.is_none(),
        "steps": compared.steps,
        "calls": compared.calls,
        "bytes": compared.bytes,
        "difference": difference,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::lockstep::CallPlace;
    use crate::shape::DType;

    fn found(call: Option<CallPlace>) -> Divergence {
        Divergence {
            step: 3,
            call,
            tensor: "params".into(),
            dtype: DType::F32,
            index: 70,
            differing: (2, 100),
            part: Some(("norm.weight".into(), 6)),
            bits: [0x3f80_0000, 0x3f80_0001],
        }
    }

    fn call() -> CallPlace {
        CallPlace {
            index: 12,
            stem: "adamw",
            kernels: ["cpu::adamw.scalar".into(), "adamw_f32".into()],
            changed_operand: Some("grads".into()),
        }
    }

    #[test]
    fn a_difference_is_told_with_op_kernels_tensor_index_and_both_values() {
        assert_eq!(
            text(&found(Some(call()))),
            "differs at step 3\n\
             \x20 op       adamw (call 12)\n\
             \x20 kernel   left cpu::adamw.scalar\n\
             \x20          right adamw_f32\n\
             \x20 note     its operand grads differs already: something outside the ops' outputs wrote it\n\
             \x20 tensor   params (f32), 2 of 100 elements differ\n\
             \x20 index    70 (element 6 of norm.weight)\n\
             \x20 left     3f800000 (1e0)\n\
             \x20 right    3f800001 (1.0000001e0)"
        );
        assert!(text(&found(None)).contains("op       none"));
    }

    #[test]
    fn the_line_of_json_has_what_the_text_has() {
        let compared = Compared {
            steps: 3,
            calls: 12,
            bytes: 400,
            divergence: Some(found(Some(call()))),
        };
        let devices = ["CPU".to_owned(), "GPU".to_owned()];
        let line = json("tiny", &devices, &compared);
        assert_eq!(line["identical"], false);
        let difference = &line["difference"];
        assert_eq!(
            (&difference["op"], &difference["call"]),
            (&json!("adamw"), &json!(12))
        );
        assert_eq!(difference["bits"], json!(["3f800000", "3f800001"]));
        assert_eq!(difference["values"], json!(["1e0", "1.0000001e0"]));
        assert_eq!(difference["part"], "norm.weight");
    }
}

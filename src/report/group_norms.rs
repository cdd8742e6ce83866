//! Gradient norms of groups of parameters: embedding, each layer, final norm, head.

use serde::{Serialize, Serializer};

use crate::plan::Plan;

/// The norm of each group, in the order of the parameters; an object in JSON.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupNorms(pub Vec<(String, f64)>);

impl GroupNorms {
    /// The norms of a plan's groups from the sum of squares of each parameter's gradient.
    pub fn of(plan: &Plan, squares: &[f64]) -> Self {
        let trained = plan.params.iter().zip(squares);
        let trained = trained.filter(|(param, _)| param.state.is_some());
        let mut groups: Vec<(String, f64)> = Vec::new();
        for (param, squares) in trained {
            let name = group(&param.name);
            match groups.iter_mut().find(|(of, _)| *of == name) {
                Some((_, sum)) => *sum += squares,
                None => groups.push((name, *squares)),
            }
        }
        let norms = groups.into_iter().map(|(name, sum)| (name, sum.sqrt()));
        GroupNorms(norms.collect())
    }
}

impl Serialize for GroupNorms {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, norm)| (name, norm)))
    }
}

/// The group of a parameter by its name, as Hugging Face folders name it.
fn group(param: &str) -> String {
    let parts: Vec<&str> = param.split('.').collect();
    let number = parts
        .windows(2)
        .find(|pair| pair[0] == "layers" && pair[1].parse::<usize>().is_ok());
    let name = match number {
        Some(pair) => return format!("layer {}", pair[1]),
        None if param.contains("embed") => "embedding",
        None if param.contains("lm_head") => "head",
        None if param.contains("norm") => "final norm",
        None => "other",
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::run::plan_of;
    use crate::io::Recipe;

    fn plan(model: &str) -> Plan {
        let text = format!(
            "name = \"r\"\nsteps = 1\n[model]\n{model}\nvocab_size = 64\nd_model = 16\nn_layers = 2\n\
             [data]\nbatch = 2\nseq_len = 8\n[optimizer]\nlr = 1.0\n"
        );
        plan_of(&Recipe::from_toml(&text, "r").unwrap()).unwrap()
    }

    #[test]
    fn every_parameter_of_every_family_falls_into_a_named_group() {
        for model in [
            "family = \"llama\"\nn_heads = 2\nd_ff = 24",
            "family = \"qwen2\"\nn_heads = 2\nd_ff = 24\ntie_embeddings = true",
            "family = \"qwen3\"\nn_heads = 2\nd_ff = 24",
            "family = \"mamba\"",
        ] {
            let plan = plan(model);
            let norms = GroupNorms::of(&plan, &vec![4.0; plan.params.len()]).0;
            let mut names: Vec<&str> = norms.iter().map(|(name, _)| name.as_str()).collect();
            names.retain(|name| *name != "head");
            names.sort_unstable();
            assert_eq!(names, ["embedding", "final norm", "layer 0", "layer 1"]);
            let squares: f64 = norms.iter().map(|(_, norm)| norm * norm).sum();
            let all = 4.0 * plan.params.len() as f64;
            assert!((squares - all).abs() < 1e-9 * all, "{model}");
        }
    }

    #[test]
    fn the_norms_are_an_object_in_the_order_of_the_groups() {
        let norms = GroupNorms(vec![("layer 10".to_owned(), 0.5), ("head".to_owned(), 2.0)]);
        let text = serde_json::to_string(&norms).unwrap();
        assert_eq!(text, r#"{"layer 10":0.5,"head":2.0}"#);
    }
}

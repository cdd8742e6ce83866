//! The option of commands that plan a model without a recipe.

use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::shape::Math;

/// How products are computed.
#[derive(Args, Clone, Debug)]
pub struct PrecisionArgument {
    /// How products are computed and activations stored, as precision.domain of a recipe
    #[arg(
        long,
        value_name = "P",
        default_value = Math::F32.name(),
        value_parser = PossibleValuesParser::new(Math::ALL.map(Math::name))
    )]
    precision: String,
}

impl PrecisionArgument {
    /// The kind that was named.
    pub fn math(&self) -> Math {
        let named = Math::ALL.into_iter().find(|m| m.name() == self.precision);
        named.unwrap_or_default()
    }
}

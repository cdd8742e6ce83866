//! Training data: sources of token sequences, their order, and the batches made of them.
//!
//! A batch is a pure function of the configuration and the number of the step, so any step can be
//! reached at once, and neither threads nor the steps taken before change it.

mod batch;
mod bin;
mod loader;
mod permutation;
mod source;
mod sums;
mod text;
mod tokenizer;
mod validation;
mod windows;

pub use batch::{Batch, IGNORE};
pub use bin::{BinFile, TokenFormat};
pub use loader::{DataLoader, LoaderConfig};
pub use permutation::Permutation;
pub use source::{DataConfig, Source, SourceKind, TokenStream};
pub use sums::Sums;
pub use text::TextTokens;
pub use tokenizer::Tokenizer;
pub use validation::ValidationBatches;
pub use windows::WindowOrder;

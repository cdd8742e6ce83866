//! What a run leaves for people: metrics, a folder of results, the score on the sums held out.

pub mod checkpoints;
pub mod metrics;
pub mod run_folder;
pub mod sums;

pub use checkpoints::CheckpointWriter;
pub use metrics::{MetricsLine, MetricsWriter, Phase};
pub use run_folder::RunFolder;
pub use sums::SumsScore;

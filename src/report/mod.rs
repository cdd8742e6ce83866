//! What a run leaves for people: metrics, a folder of results, the score on the sums held out, a page.

pub mod checkpoints;
pub mod events;
pub mod facts;
pub mod group_norms;
pub mod history;
pub mod metrics;
pub mod page;
pub mod recorder;
pub mod run_folder;
pub mod sums;

pub use checkpoints::CheckpointWriter;
pub use events::EventsWriter;
pub use facts::{RunFacts, RunOutcome};
pub use group_norms::GroupNorms;
pub use history::RunHistory;
pub use metrics::{MetricsLine, MetricsWriter, Phase};
pub use recorder::Recorder;
pub use run_folder::{Begins, RunFolder};
pub use sums::SumsScore;

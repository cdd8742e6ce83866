//! The engine: the life of a step from eager warm-up to proven replay.
//!
//! It owns every decision (when to record, what a proof compares, what a commit moves); a backend
//! only runs what it is given. Nothing here names a model or a device.

pub mod backbone;
pub mod checkpoint;
mod checkpoint_window;
pub mod generate;
mod grad_squares;
pub mod guard;
pub mod halves;
pub mod hyper;
pub mod init;
mod inputs;
pub mod lockstep;
mod packed;
mod programs;
pub mod prove;
pub mod recurrent;
mod root;
pub mod run;
pub mod schedule;
pub mod session;
mod session_passes;
pub mod snapshot;
pub mod state;
pub mod step;
pub mod trainer;
pub mod window;

pub use hyper::Hyper;
pub use schedule::{Schedule, ScheduleKind};
pub use session::Session;
pub use state::{Captured, Engine, Recorded, Refused, Replaying, Warmup};
pub use step::StepReport;
pub use trainer::Trainer;

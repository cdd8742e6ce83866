//! Signals that end a run: the first is heard after the step, the second ends the process at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Whether the run was asked to end.
pub struct EndRequest(Arc<AtomicBool>);

impl EndRequest {
    /// Listens for interrupt and termination. Where the system refuses, they end the process as they
    /// do without this, and checkpoints stand as after any other end.
    pub fn listen() -> Self {
        let heard = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // The end at once comes first: it looks at the flag before the other sets it.
            let at_once = flag::register_conditional_shutdown(signal, 128 + signal, heard.clone());
            if at_once.is_ok() {
                let _ = flag::register(signal, heard.clone());
            }
        }
        EndRequest(heard)
    }

    /// Whether one of the signals has come.
    pub fn heard(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_is_heard_and_does_not_end_the_process() {
        let request = EndRequest::listen();
        assert!(!request.heard());
        signal_hook::low_level::raise(SIGTERM).expect("raises");
        assert!(request.heard());
    }
}

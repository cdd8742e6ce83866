//! The states are a closed set.

use bitstep::engine::state::State;

struct AlwaysReady;

impl State for AlwaysReady {
    const NAME: &'static str = "ready";
}

fn main() {}

//! Capture follows record.

use bitstep::backend::Backend;
use bitstep::engine::{Engine, Warmup};

fn misuse<B: Backend>(engine: Engine<B, Warmup>) {
    let _ = engine.capture();
}

fn main() {}

//! A transition takes the engine: the state it was in is gone.

use bitstep::backend::Backend;
use bitstep::data::Batch;
use bitstep::engine::{Engine, Hyper, Warmup};

fn misuse<B: Backend>(mut engine: Engine<B, Warmup>, batch: &Batch, hyper: &Hyper) {
    let _recorded = engine.record();
    let _ = engine.step(batch, hyper);
}

fn main() {}

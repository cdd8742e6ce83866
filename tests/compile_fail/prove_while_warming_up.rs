//! Without a graph there is nothing to prove.

use bitstep::backend::Backend;
use bitstep::data::Batch;
use bitstep::engine::{Engine, Hyper, Warmup};

fn misuse<B: Backend>(engine: Engine<B, Warmup>, batch: &Batch, hyper: &Hyper) {
    let _ = engine.prove(batch, hyper);
}

fn main() {}

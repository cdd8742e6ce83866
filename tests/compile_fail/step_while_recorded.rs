//! Between record and proof there is no step.

use bitstep::backend::Backend;
use bitstep::data::Batch;
use bitstep::engine::{Engine, Hyper, Recorded};

fn misuse<B: Backend>(mut engine: Engine<B, Recorded>, batch: &Batch, hyper: &Hyper) {
    let _ = engine.step(batch, hyper);
}

fn main() {}

//! A captured graph that nothing has proven cannot step.

use bitstep::backend::Backend;
use bitstep::data::Batch;
use bitstep::engine::{Captured, Engine, Hyper};

fn misuse<B: Backend>(mut engine: Engine<B, Captured<B>>, batch: &Batch, hyper: &Hyper) {
    let _ = engine.step(batch, hyper);
}

fn main() {}

//! A refused transition gives back the one engine there is.

use bitstep::backend::Backend;
use bitstep::engine::{Engine, Refused, Warmup};

fn misuse<B: Backend>(refused: Refused<B, Warmup>) -> [Engine<B, Warmup>; 2] {
    [refused.engine.clone(), refused.engine]
}

fn main() {}

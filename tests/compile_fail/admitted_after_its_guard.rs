//! A permission does not outlive the guard that gave it.

use bitstep::backend::ArenaId;
use bitstep::engine::Hyper;
use bitstep::engine::guard::{Admitted, Facts, Guard};
use bitstep::layout::Layout;

fn misuse<'g>(facts: Facts, layout: &Layout, manifest: blake3::Hash) -> Option<Admitted<'g>> {
    let guard = Guard::new(facts);
    guard.admit(ArenaId(0), layout, manifest, &Hyper::default()).ok()
}

fn main() {}

//! A state cannot be made, only reached.

use bitstep::engine::Recorded;

fn main() {
    let _ = Recorded(());
}

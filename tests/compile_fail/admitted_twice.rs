//! A permission serves one launch.

use bitstep::engine::guard::Admitted;

fn launch(_: Admitted) {}

fn misuse(admitted: Admitted) {
    launch(admitted);
    launch(admitted);
}

fn main() {}

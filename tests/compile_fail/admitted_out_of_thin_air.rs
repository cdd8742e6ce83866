//! Only a guard gives permission to replay.

use std::marker::PhantomData;

use bitstep::engine::guard::Admitted;

fn main() {
    let _ = Admitted { guard: PhantomData };
}

//! Keeps what may spoil a capture away from it.
//!
//! A capture is thread-local, so other threads may call the driver meanwhile. But a call that waits for the
//! whole context, as freeing memory or unloading a module does, can invalidate a capture that is open in
//! another thread. Captures are short, so such calls wait for them, and they for such calls.

use std::cell::Cell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Held whole by a capture, shared by the calls that must not stand beside one. It guards no data, so one
/// that a panic has poisoned is as good as another.
static CAPTURES: RwLock<()> = RwLock::new(());

thread_local! {
    /// Whether this thread holds `CAPTURES` already: what it calls within is in its own order.
    static HELD: Cell<bool> = const { Cell::new(false) };
}

/// While it lives no call that could invalidate a capture runs in another thread.
pub(super) struct Capturing {
    _alone: RwLockWriteGuard<'static, ()>,
}

/// While it lives no other thread captures.
pub(super) struct Aside {
    _shared: Option<RwLockReadGuard<'static, ()>>,
}

/// Waits until nothing else runs that a capture does not bear.
pub(super) fn capturing() -> Capturing {
    let alone = CAPTURES.write().unwrap_or_else(PoisonError::into_inner);
    HELD.set(true);
    Capturing { _alone: alone }
}

/// Waits until no other thread captures.
pub(super) fn aside() -> Aside {
    let shared = match HELD.get() {
        true => None,
        false => {
            let shared = CAPTURES.read().unwrap_or_else(PoisonError::into_inner);
            HELD.set(true);
            Some(shared)
        }
    };
    Aside { _shared: shared }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        HELD.set(false);
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if self._shared.is_some() {
            HELD.set(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_stands_beside_no_capture_waits_for_it() {
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let capture = capturing();
            let other = threads.spawn(|| {
                let _aside = aside();
                done.store(true, Ordering::SeqCst);
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!done.load(Ordering::SeqCst), "it ran beside a capture");
            drop(capture);
            other.join().expect("it goes on");
        });
        assert!(done.load(Ordering::SeqCst));
    }

    #[test]
    fn a_thread_never_waits_for_itself() {
        let capture = capturing();
        drop(aside());
        drop(aside());
        assert!(HELD.get(), "the capture is still open");
        drop(capture);
        let outer = aside();
        drop(aside());
        assert!(HELD.get(), "the outer call has not ended");
        drop(outer);
        assert!(!HELD.get());
    }
}

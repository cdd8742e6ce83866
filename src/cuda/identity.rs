//! What a graph belongs to, as numbers that a check before a replay only compares.

use crate::backend::ArenaId;
use crate::error::GuardError;

/// The arena, the modules and the stream of a captured graph. A graph keeps all three alive, so no
/// number of a living graph is ever given to something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub arena: ArenaId,
    /// The loaded modules, hence the handles of all kernels and the PTX they were compiled from.
    pub modules: u64,
    /// The driver's handle of the stream.
    pub stream: u64,
}

impl Identity {
    /// Compares what a graph was captured with and what it would run with `now`.
    ///
    /// # Errors
    /// The first of the three that is another one.
    pub fn check(&self, now: &Identity) -> Result<(), GuardError> {
        if self.arena != now.arena {
            return Err(GuardError::Arena {
                expected: self.arena.0,
                found: now.arena.0,
            });
        }
        if self.modules != now.modules {
            return Err(GuardError::Modules {
                expected: self.modules,
                found: now.modules,
            });
        }
        if self.stream != now.stream {
            return Err(GuardError::Stream {
                expected: self.stream,
                found: now.stream,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_arena_other_modules_and_another_stream_are_refused() {
        let then = Identity {
            arena: ArenaId(1),
            modules: 2,
            stream: 3,
        };
        assert_eq!(then.check(&then), Ok(()));
        let arena = ArenaId(9);
        assert_eq!(
            then.check(&Identity { arena, ..then }),
            Err(GuardError::Arena {
                expected: 1,
                found: 9
            })
        );
        assert_eq!(
            then.check(&Identity { modules: 9, ..then }),
            Err(GuardError::Modules {
                expected: 2,
                found: 9
            })
        );
        assert_eq!(
            then.check(&Identity { stream: 9, ..then }),
            Err(GuardError::Stream {
                expected: 3,
                found: 9
            })
        );
    }
}

//! What every CPU kernel runs with: a SIMD path and a pool of threads.

use std::sync::Arc;

use crate::cpu::simd::SimdPath;
use crate::error::DeviceError;

/// The SIMD path and the threads of the CPU backend. Neither decides a bit of any result.
#[derive(Clone, Debug)]
pub struct CpuContext {
    path: SimdPath,
    threads: usize,
    pool: Arc<rayon::ThreadPool>,
}

/// The most threads of a pool: far more than cores help, and few enough to start at once.
pub const MOST_THREADS: usize = 1024;

impl CpuContext {
    /// A context of `threads` threads on `path`, or on the best path below it that was detected.
    ///
    /// # Errors
    /// [`DeviceError::ThreadPool`] when `threads` is zero or above [`MOST_THREADS`], or the pool cannot
    /// be started.
    pub fn new(path: SimdPath, threads: usize) -> Result<Self, DeviceError> {
        let failed = |text: String| DeviceError::ThreadPool { threads, text };
        if threads == 0 {
            return Err(failed("at least one thread is needed".into()));
        }
        if threads > MOST_THREADS {
            return Err(failed(format!("at most {MOST_THREADS} threads are used")));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("cpu-{i}"))
            .build()
            .map_err(|e| failed(e.to_string()))?;
        Ok(CpuContext {
            path: path.usable(),
            threads,
            pool: Arc::new(pool),
        })
    }

    /// The SIMD path; always one that was detected.
    pub fn path(&self) -> SimdPath {
        self.path
    }

    /// How many threads share the work; at least one.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `work` on the pool, or right here when the pool has one thread.
    ///
    /// A caller that starts many kernels runs all of them inside one such call: entering the pool
    /// from outside costs a hand-over between threads, entering it from inside costs nothing.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        if self.threads == 1 {
            work()
        } else {
            self.pool.install(work)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_without_threads_is_refused() {
        let refused = CpuContext::new(SimdPath::Scalar, 0).err();
        assert!(matches!(
            refused,
            Some(DeviceError::ThreadPool { threads: 0, .. })
        ));
    }

    #[test]
    fn a_pool_of_countless_threads_is_refused() {
        let refused = CpuContext::new(SimdPath::Scalar, MOST_THREADS + 1).err();
        assert!(matches!(
            refused,
            Some(DeviceError::ThreadPool { threads: 1025, .. })
        ));
    }

    #[test]
    fn work_runs_on_as_many_threads_as_asked() {
        let context = CpuContext::new(SimdPath::Avx512, 3).unwrap();
        assert_eq!(context.threads(), 3);
        assert_eq!(context.run(rayon::current_num_threads), 3);
        assert!(context.path() <= SimdPath::detect());
    }
}

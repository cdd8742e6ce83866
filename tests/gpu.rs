//! Where the suites get a GPU from, and how they say that there is none.

use bitstep::cuda::CudaBackend;
use bitstep::cuda::products::GemmChoice;

/// The first CUDA device with the engine's own products; `None`, said loudly, where there is none.
///
/// With `REQUIRE_CUDA=1` a machine without a usable device fails the test instead.
pub fn backend() -> Option<CudaBackend> {
    open(GemmChoice::Own)
}

/// As [`backend`], with products as `choice` says.
pub fn open(choice: GemmChoice) -> Option<CudaBackend> {
    match CudaBackend::open(0, choice) {
        Ok(cuda) => Some(cuda),
        Err(reason) => {
            let required = std::env::var_os("REQUIRE_CUDA").is_some_and(|v| v == "1");
            assert!(!required, "REQUIRE_CUDA=1, but {reason}");
            eprintln!("skipped on a GPU: {reason}");
            None
        }
    }
}

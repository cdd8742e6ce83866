//! Looks for CUDA without needing it.
//!
//! The bindings load the driver at the first call and panic when there is none. So the library is
//! first looked for where the loader would look, and no call is made unless it is there; a library
//! that is there and still does not load is caught as well.

use std::fs;
use std::path::{Path, PathBuf};

use cudarc::driver::{CudaContext, DriverError};

/// Folders that every loader searches, besides its cache.
const LOADER_FOLDERS: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// What was found of CUDA.
pub struct Cuda {
    /// Each library's name and where it is.
    pub libraries: Vec<(&'static str, Option<PathBuf>)>,
    /// The kernel driver's version.
    pub driver: Option<String>,
    /// The GPUs, or why none can be asked.
    pub gpus: Result<Vec<Gpu>, String>,
}

/// One GPU, or why it could not be asked.
pub type Gpu = Result<GpuFacts, String>;

/// What a GPU says about itself.
pub struct GpuFacts {
    pub name: String,
    pub compute_capability: (i32, i32),
    pub memory_bytes: usize,
}

/// Looks for driver, libraries and GPUs.
pub fn probe() -> Cuda {
    let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let folders = loader_folders();
    let libraries: Vec<_> = ["libcuda", "libcublasLt"]
        .into_iter()
        .map(|name| (name, find(name, &folders, &cache)))
        .collect();
    let gpus = match &libraries[0].1 {
        None => Err("there is no CUDA driver library (libcuda)".to_owned()),
        Some(path) => quietly(gpus).unwrap_or_else(|| {
            let path = path.display();
            Err(format!("{path} is there and cannot be used"))
        }),
    };
    Cuda {
        libraries,
        driver: driver_version(),
        gpus,
    }
}

fn loader_folders() -> Vec<PathBuf> {
    let set = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let fixed = LOADER_FOLDERS.iter().map(PathBuf::from);
    std::env::split_paths(&set).chain(fixed).collect()
}

/// The first `NAME.so` or `NAME.so.*` in the folders, else one that the loader's cache names.
fn find(name: &str, folders: &[PathBuf], cache: &[u8]) -> Option<PathBuf> {
    let stem = format!("{name}.so");
    let is_it = |file: &str| {
        file.strip_prefix(&stem)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let in_folder = |folder: &PathBuf| {
        let entries = fs::read_dir(folder).ok()?.flatten();
        let mut files: Vec<PathBuf> = entries
            .filter(|e| e.file_name().to_str().is_some_and(is_it))
            .map(|e| e.path())
            .collect();
        files.sort();
        files.into_iter().next()
    };
    let in_cache = || {
        let texts = cache
            .split(|&b| b == 0)
            .filter_map(|t| str::from_utf8(t).ok());
        let paths = texts.filter(|t| t.starts_with('/')).map(Path::new);
        let file = |p: &Path| p.file_name().and_then(|f| f.to_str()).is_some_and(is_it);
        let mut named = paths.filter(|p| file(p));
        named.find(|p| p.exists()).map(Path::to_path_buf)
    };
    folders.iter().find_map(in_folder).or_else(in_cache)
}

fn driver_version() -> Option<String> {
    let text = fs::read_to_string("/sys/module/nvidia/version").ok();
    let version = text.map(|t| t.trim().to_owned());
    version.or_else(|| {
        let text = fs::read_to_string("/proc/driver/nvidia/version").ok()?;
        let mut words = text.split_whitespace();
        let number = |w: &&str| w.contains('.') && w.starts_with(|c: char| c.is_ascii_digit());
        words.find(number).map(str::to_owned)
    })
}

fn gpus() -> Result<Vec<Gpu>, String> {
    let count = CudaContext::device_count().map_err(driver_text)?;
    Ok((0..count.max(0) as usize).map(gpu).collect())
}

fn gpu(ordinal: usize) -> Gpu {
    let facts = || {
        let context = CudaContext::new(ordinal)?;
        Ok::<_, DriverError>(GpuFacts {
            name: context.name()?,
            compute_capability: context.compute_capability()?,
            memory_bytes: context.total_mem()?,
        })
    };
    facts().map_err(driver_text)
}

/// The driver's own words.
fn driver_text(error: DriverError) -> String {
    let text = error
        .error_string()
        .map(|t| t.to_string_lossy().into_owned());
    format!(
        "the driver says: {}",
        text.unwrap_or_else(|_| format!("{error:?}"))
    )
}

/// Runs `work`; `None` when it panics. Nothing is printed for such a panic.
fn quietly<T>(work: impl FnOnce() -> T + std::panic::UnwindSafe) -> Option<T> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let done = std::panic::catch_unwind(work);
    std::panic::set_hook(hook);
    done.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_by_its_whole_name_in_folders_and_cache() {
        let folder = tempfile::tempdir().unwrap();
        let here = |name: &str| folder.path().join(name);
        for name in ["libcudart.so.13", "libcuda.so.1", "libcuda.sock"] {
            fs::write(here(name), b"").unwrap();
        }
        let folders = [folder.path().to_path_buf()];
        assert_eq!(find("libcuda", &folders, &[]), Some(here("libcuda.so.1")));
        assert_eq!(find("libcublasLt", &folders, &[]), None);
        let cached = format!("libcuda.so.1\0{}\0tail", here("libcuda.so.1").display());
        assert_eq!(
            find("libcuda", &[], cached.as_bytes()),
            Some(here("libcuda.so.1"))
        );
        let stale = b"/nowhere/libcuda.so.1\0";
        assert_eq!(find("libcuda", &[], stale), None);
    }

    #[test]
    fn a_panic_of_the_bindings_is_an_answer() {
        assert_eq!(quietly(|| 3), Some(3));
        assert!(quietly(|| panic!("no library")).map(|()| 0).is_none());
    }
}

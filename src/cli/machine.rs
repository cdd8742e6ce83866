//! What the machine is, as the operating system tells it; shown to people, decides nothing.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// The processor's model name.
pub fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = ["model name", "Model", "Processor"];
    let name = named.into_iter().find_map(|key| field(&text, key));
    name.unwrap_or_else(|| format!("unknown {} processor", std::env::consts::ARCH))
}

/// The time since the beginning of 1970, in seconds; zero where the clock stands before it.
pub fn wall_s() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// How many threads this process may run at once.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Total and available memory in bytes, where the system tells them.
pub fn memory_bytes() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = |key| {
        let value = field(&text, key)?;
        let kib: u64 = value.strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    };
    Some((bytes("MemTotal")?, bytes("MemAvailable")?))
}

/// The version of NVIDIA's kernel driver, where one is loaded.
pub fn nvidia_driver() -> Option<String> {
    let text = fs::read_to_string("/sys/module/nvidia/version").ok();
    let version = text.map(|t| t.trim().to_owned());
    version.or_else(|| {
        let text = fs::read_to_string("/proc/driver/nvidia/version").ok()?;
        version_in(&text)
    })
}

/// The first word that reads as a version.
fn version_in(text: &str) -> Option<String> {
    let mut words = text.split_whitespace();
    let number = |w: &&str| w.contains('.') && w.starts_with(|c: char| c.is_ascii_digit());
    words.find(number).map(str::to_owned)
}

/// The value of the first `key : value` line.
fn field(text: &str, key: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "model\t\t: 85\nmodel name\t: Some CPU @ 2 GHz\nMemTotal:  16 kB\n";
        assert_eq!(
            field(text, "model name").as_deref(),
            Some("Some CPU @ 2 GHz")
        );
        assert_eq!(field(text, "MemTotal").as_deref(), Some("16 kB"));
        assert_eq!(field(text, "Mem"), None);
    }

    #[test]
    fn a_version_is_the_first_word_of_numbers_and_dots() {
        let text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n";
        assert_eq!(version_in(text).as_deref(), Some("550.54.15"));
        assert_eq!(version_in("NVRM version: none"), None);
    }
}

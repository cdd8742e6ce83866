//! What `bitstep bench` has measured, as a table for people and as one line of JSON.

use std::sync::Arc;

use serde_json::{Value, json};

use super::machine;
use super::roofline::{HEADING, Limits, Row, limit_ms, rows_by_op, rows_by_size};
use crate::any_device::AnyDevice;
use crate::backend::{ArenaBytes, Backend};
use crate::layout::PlacedCall;
use crate::plan::{Plan, ProgramKind};

/// What was measured, and of what.
pub struct Measured {
    pub recipe: String,
    pub warmup_steps: u32,
    pub backend: AnyDevice,
    pub plan: Arc<Plan>,
    pub manifest: blake3::Hash,
    pub calls: Vec<PlacedCall>,
    /// Milliseconds of each step, from the batch to the report that was read.
    pub replayed_ms: Vec<f64>,
    pub eager_ms: Vec<f64>,
    /// Milliseconds from the start of the process to the end of the first replay.
    pub first_replay_ms: f64,
    /// Microseconds of the checks before a replay.
    pub guard_us: f64,
    pub digested: Digested,
    /// What only a device with a clock of its own can say.
    pub on_device: Option<OnDevice>,
    pub limits: Limits,
    /// Milliseconds of each call, where a profile was asked for.
    pub call_ms: Option<Vec<f64>>,
}

/// Digests of all parameters together.
pub struct Digested {
    pub bytes: usize,
    /// Milliseconds of the fastest.
    pub ms: f64,
}

/// What a device says of its graph of the step.
pub struct OnDevice {
    /// Milliseconds of the graph alone, by the device's clock.
    pub graph_ms: Vec<f64>,
    pub nodes: usize,
    pub memory: ArenaBytes,
}

/// The value below which a share `at` of the times lie; 0 for no times.
fn percentile(times: &[f64], at: f64) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (at * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}

/// Puts median, 95th percentile and best of `times` into `line` under names that start with `name`.
fn put_times(line: &mut Value, name: &str, times: &[f64]) {
    for (suffix, at) in [("p50", 0.5), ("p95", 0.95), ("best", 0.0)] {
        line[format!("{name}_ms_{suffix}")] = json!(percentile(times, at));
    }
}

impl Digested {
    fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / (self.ms / 1e3).max(1e-9) / 1e9
    }
}

impl Measured {
    fn median_ms(&self) -> f64 {
        percentile(&self.replayed_ms, 0.5)
    }

    /// Floating-point operations a second of a replayed step.
    fn flop_rate(&self) -> f64 {
        self.plan.flops(ProgramKind::Step) as f64 / (self.median_ms() / 1e3)
    }

    fn tokens_per_s(&self) -> f64 {
        self.plan.tokens() as f64 / (self.median_ms() / 1e3)
    }

    /// The least milliseconds of the step's calls, one after another, and its share of a replayed step.
    fn roofline(&self) -> (f64, f64) {
        let limit = limit_ms(&self.calls, self.limits);
        (limit, limit / self.median_ms())
    }

    fn guard_share(&self) -> f64 {
        self.guard_us / 1e3 / self.median_ms()
    }

    /// All of it as one JSON object.
    pub fn json(&self) -> Value {
        let (limit, of_limit) = self.roofline();
        let (plan, info) = (&self.plan, self.backend.info());
        let cpu = self.backend.cpu().map(|cpu| cpu.context());
        let mut line = json!({
            "recipe": self.recipe,
            "machine": machine::processor(),
            "device": info.description,
            "device_id": info.device,
            "threads": cpu.map(|c| c.threads()),
            "simd": cpu.map(|c| c.path().name()),
            "manifest": self.manifest.to_hex().to_string(),
            "steps": self.replayed_ms.len(),
            "tokens_per_step": plan.tokens(),
            "parameters": plan.parameter_count(),
            "first_replay_ms": self.first_replay_ms,
            "tokens_per_s": self.tokens_per_s(),
            "flop_per_step": plan.flops(ProgramKind::Step),
            "flop_per_s": self.flop_rate(),
            "tflop_per_s": self.flop_rate() / 1e12,
            "peak_flop_per_s": self.limits.flop,
            "peak_source": self.limits.flop_source,
            "share_of_peak": self.flop_rate() / self.limits.flop,
            "bandwidth_bytes_per_s": self.limits.bytes,
            "bandwidth_source": "measured, copy within the device's memory, bytes read and written",
            "roofline_ms": limit,
            "share_of_roofline": of_limit,
            "arena_bytes": plan.layout.arena_bytes(),
            "digest_gb_per_s": self.digested.gb_per_s(),
            "digest_ms": self.digested.ms,
            "guard_us": self.guard_us,
            "guard_share": self.guard_share(),
        });
        put_times(&mut line, "replayed", &self.replayed_ms);
        put_times(&mut line, "eager", &self.eager_ms);
        if let Some(found) = &self.on_device {
            put_times(&mut line, "graph", &found.graph_ms);
            line["graph_nodes"] = json!(found.nodes);
            line["workspace_bytes"] = json!(found.memory.workspace);
            line["device_bytes"] = json!(found.memory.planned + found.memory.workspace);
        }
        if let Some((sizes, ops)) = self.profile() {
            let all: f64 = ops.iter().map(|row| row.ms).sum();
            let rows = |rows: &[Row]| rows.iter().map(|r| r.json(all)).collect::<Vec<_>>();
            line["profile"] = json!(rows(&ops));
            line["profile_by_size"] = json!(rows(&sizes));
        }
        line
    }

    /// The rows by size and those by op, where a profile was asked for.
    fn profile(&self) -> Option<(Vec<Row>, Vec<Row>)> {
        let ms = self.call_ms.as_ref()?;
        let sizes = rows_by_size(&self.calls, ms, self.limits);
        let ops = rows_by_op(&sizes);
        Some((sizes, ops))
    }

    /// Prints all of it for people.
    pub fn print(&self) {
        self.print_run();
        self.print_times();
        self.print_rates();
        if let Some((sizes, ops)) = self.profile() {
            let all: f64 = ops.iter().map(|row| row.ms).sum();
            let by = match self.backend.has_clock() {
                true => "by the device's clock, each op's calls back to back",
                false => "eager, by the clock of the caller",
            };
            say!("where a step's time goes ({by}):");
            say!("  {HEADING}");
            ops.iter().for_each(|row| say!("  {}", row.line(all)));
            say!("  {:<26} {:>5} {all:>9.4}", "all", self.calls.len());
            say!("by sizes:");
            say!("  {HEADING}  sizes");
            sizes.iter().for_each(|row| say!("  {}", row.line(all)));
        }
    }

    fn print_run(&self) {
        say!(
            "{}: {} tokens a step, {} parameters, {} timed steps of each kind",
            self.recipe,
            self.plan.tokens(),
            self.plan.parameter_count(),
            self.replayed_ms.len()
        );
        say!("  machine        {}", machine::processor());
        say!("  device         {}", self.backend.info().description);
        say!("  manifest       {}", self.manifest);
    }

    fn print_times(&self) {
        let of_device: &[f64] = match &self.on_device {
            Some(found) => &found.graph_ms,
            None => &[],
        };
        let kinds = [
            ("replayed", self.replayed_ms.as_slice()),
            ("graph alone", of_device),
            ("eager", &self.eager_ms),
        ];
        for (name, times) in kinds.into_iter().filter(|(_, times)| !times.is_empty()) {
            say!(
                "  {name:<14} {:.3} ms median, {:.3} ms p95, {:.3} ms best",
                percentile(times, 0.5),
                percentile(times, 0.95),
                percentile(times, 0.0)
            );
        }
        say!(
            "  first replay   {:.0} ms after the process started (plan, {} eager steps, capture, proof)",
            self.first_replay_ms,
            self.warmup_steps
        );
        say!("  tokens         {:.0} a second", self.tokens_per_s());
    }

    fn print_rates(&self) {
        let (limit, of_limit) = self.roofline();
        say!(
            "  arithmetic     {:.1} GFLOP/s, {:.1} % of the peak, {:.1} GFLOP/s ({})",
            self.flop_rate() / 1e9,
            100.0 * self.flop_rate() / self.limits.flop,
            self.limits.flop / 1e9,
            self.limits.flop_source
        );
        say!(
            "  bandwidth      {:.1} GB/s, measured by a copy, read and written",
            self.limits.bytes / 1e9
        );
        say!(
            "  roofline       {limit:.3} ms at least, {:.1} % of a replayed step",
            100.0 * of_limit
        );
        say!("  arena          {} bytes", self.plan.layout.arena_bytes());
        if let Some(found) = &self.on_device {
            say!(
                "  workspace      {} bytes, {} bytes on the device in all",
                found.memory.workspace,
                found.memory.planned + found.memory.workspace
            );
            say!("  graph          {} nodes", found.nodes);
        }
        say!(
            "  digest         {:.2} GB/s over the parameters, {:.3} ms",
            self.digested.gb_per_s(),
            self.digested.ms
        );
        say!(
            "  guard          {:.2} µs a replay, {:.3} % of it",
            self.guard_us,
            100.0 * self.guard_share()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_occurred() {
        let times = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(percentile(&times, 0.5), 2.0);
        assert_eq!(percentile(&times, 0.95), 4.0);
        assert_eq!(percentile(&times, 0.0), 1.0);
        assert_eq!(percentile(&[7.0], 0.5), 7.0);
        assert_eq!(percentile(&[], 0.5), 0.0);
    }

    #[test]
    fn a_digest_s_rate_is_its_bytes_by_its_time() {
        let digested = Digested {
            bytes: 3_000_000,
            ms: 1.5,
        };
        assert_eq!(digested.gb_per_s(), 2.0);
    }
}

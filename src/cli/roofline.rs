//! What each op of a step costs beside the least that the device could need for it.
//!
//! An op moves its operands and does its arithmetic; the device does neither faster than its bandwidth
//! and its peak. The longer of the two times is the op's limit. An op whose operands are still in the
//! device's cache can be faster than a limit that counts memory.

use serde_json::{Value, json};

use crate::layout::PlacedCall;
use crate::op::{Op, Operand};

/// What the device can do at most in a second.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Floating-point operations of products, a multiply-add counted as two.
    pub flop: f64,
    /// Where that number comes from.
    pub flop_source: &'static str,
    /// Bytes read and written.
    pub bytes: f64,
}

impl Limits {
    /// The least milliseconds for so many operations and bytes.
    fn ms(&self, flop: u64, bytes: u64) -> f64 {
        (flop as f64 / self.flop).max(bytes as f64 / self.bytes) * 1e3
    }
}

/// Calls of one op, or of one op with the same sizes, added up over a step.
#[derive(Clone, Debug)]
pub struct Row {
    pub op: &'static str,
    /// Shapes of the largest operand read and the largest written; empty where sizes are added up.
    pub sizes: String,
    pub calls: usize,
    pub ms: f64,
    pub flop: u64,
    pub bytes: u64,
    /// The least milliseconds these calls could take.
    pub limit_ms: f64,
}

/// The calls of a step, one row for each op and sizes, the slowest first; `ms` is the time of each call.
pub fn rows_by_size(calls: &[PlacedCall], ms: &[f64], limits: Limits) -> Vec<Row> {
    let rows = calls.iter().zip(ms).map(|(call, &ms)| {
        let rule = call.call.op.rule();
        let (flop, bytes) = (rule.flops(), rule.bytes());
        Row {
            op: rule.stem(),
            sizes: sizes(&call.call.op),
            calls: 1,
            ms,
            flop,
            bytes,
            limit_ms: limits.ms(flop, bytes),
        }
    });
    gathered(rows)
}

/// One row for each op, the slowest first.
pub fn rows_by_op(rows: &[Row]) -> Vec<Row> {
    gathered(rows.iter().map(|row| Row {
        sizes: String::new(),
        ..row.clone()
    }))
}

/// The least milliseconds that all calls of a step could take, one after another.
pub fn limit_ms(calls: &[PlacedCall], limits: Limits) -> f64 {
    let rules = calls.iter().map(|call| call.call.op.rule());
    rules.map(|r| limits.ms(r.flops(), r.bytes())).sum()
}

fn sizes(op: &Op) -> String {
    let signature = op.rule().signature();
    let shape = |operands: &[Operand]| {
        let largest = operands.iter().max_by_key(|o| o.shape.elements());
        largest.map_or(String::new(), |o| o.shape.to_string())
    };
    // An op that reads only what it writes has these shapes on both sides.
    let reads = match signature.reads.is_empty() {
        true => &signature.writes,
        false => &signature.reads,
    };
    format!("{} -> {}", shape(reads), shape(&signature.writes))
}

fn gathered(rows: impl Iterator<Item = Row>) -> Vec<Row> {
    let mut gathered: Vec<Row> = Vec::new();
    for row in rows {
        let same = |r: &&mut Row| r.op == row.op && r.sizes == row.sizes;
        match gathered.iter_mut().find(same) {
            Some(found) => {
                found.calls += row.calls;
                found.ms += row.ms;
                found.flop += row.flop;
                found.bytes += row.bytes;
                found.limit_ms += row.limit_ms;
            }
            None => gathered.push(row),
        }
    }
    gathered.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    gathered
}

/// `amount` a second over `ms`, in units of `unit`.
fn rate(amount: u64, ms: f64, unit: f64) -> f64 {
    amount as f64 / (ms / 1e3).max(1e-12) / unit
}

impl Row {
    /// The row as JSON; `all_ms` is the time of all rows.
    pub fn json(&self, all_ms: f64) -> Value {
        let mut value = json!({
            "op": self.op,
            "calls": self.calls,
            "ms": self.ms,
            "share": self.ms / all_ms.max(1e-12),
            "flop": self.flop,
            "bytes": self.bytes,
            "tflop_per_s": rate(self.flop, self.ms, 1e12),
            "gb_per_s": rate(self.bytes, self.ms, 1e9),
            "limit_ms": self.limit_ms,
            "share_of_limit": self.limit_ms / self.ms.max(1e-12),
        });
        if !self.sizes.is_empty() {
            value["sizes"] = json!(self.sizes);
        }
        value
    }

    /// The row as a line under [`HEADING`], its sizes in columns at its end.
    pub fn line(&self, all_ms: f64) -> String {
        let tflops = match self.flop {
            0 => "-".into(),
            flop => format!("{:.2}", rate(flop, self.ms, 1e12)),
        };
        let line = format!(
            "{:<26} {:>5} {:>9.4} {:>6.1}% {:>10.1} {tflops:>8} {:>9.4} {:>6.1}%  {}",
            self.op,
            self.calls,
            self.ms,
            100.0 * self.ms / all_ms.max(1e-12),
            rate(self.bytes, self.ms, 1e9),
            self.limit_ms,
            100.0 * self.limit_ms / self.ms.max(1e-12),
            self.sizes
        );
        line.trim_end().to_owned()
    }
}

/// What the columns of [`Row::line`] are: calls and milliseconds a step, rates, the limit and its share.
pub const HEADING: &str =
    "op                         calls        ms   share       GB/s  TFLOP/s  limit ms  of it";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Region;
    use crate::op::OpCall;
    use crate::op::matmul::Matmul;
    use crate::op::swiglu::{Output, SwiGluGrad};
    use crate::op::tree_add::TreeAdd;

    const LIMITS: Limits = Limits {
        flop: 1e9,
        flop_source: "given",
        bytes: 1e6,
    };

    fn placed(op: impl Into<Op>) -> PlacedCall {
        let call = OpCall {
            op: op.into(),
            reads: Vec::new(),
            writes: Vec::new(),
        };
        PlacedCall {
            call,
            reads: Vec::<Region>::new(),
            writes: Vec::new(),
        }
    }

    fn product(n_out: usize) -> PlacedCall {
        placed(Matmul {
            math: crate::shape::Math::F32,
            rows: 1000,
            n_in: 1000,
            n_out,
            bias: false,
        })
    }

    fn merge() -> PlacedCall {
        placed(TreeAdd { elements: 1000 })
    }

    #[test]
    fn a_limit_is_the_longer_of_arithmetic_and_traffic() {
        assert_eq!(limit_ms(&[merge()], LIMITS), 12.0, "12,000 bytes at 1 MB/s");
        let arithmetic = Limits {
            bytes: 1e12,
            ..LIMITS
        };
        let limit = limit_ms(&[product(1000)], arithmetic);
        assert_eq!(limit, 2000.0, "2 GFLOP at 1 GFLOP/s");
        assert_eq!(limit_ms(&[merge(), merge()], LIMITS), 24.0);
    }

    #[test]
    fn rows_add_up_and_the_slowest_is_first() {
        let calls = [merge(), product(1), product(2), product(1)];
        let rows = rows_by_size(&calls, &[1.0, 2.0, 3.0, 4.0], LIMITS);
        let seen: Vec<_> = rows.iter().map(|r| (r.op, r.calls, r.ms)).collect();
        assert_eq!(
            seen,
            [("matmul", 2, 6.0), ("matmul", 1, 3.0), ("tree_add", 1, 1.0)]
        );
        let ops = rows_by_op(&rows);
        let seen: Vec<_> = ops.iter().map(|r| (r.op, r.calls, r.ms)).collect();
        assert_eq!(seen, [("matmul", 3, 9.0), ("tree_add", 1, 1.0)]);
        assert_eq!(ops[0].flop, 2 * 1000 * 1000 * 4);
        let limits: f64 = ops.iter().map(|r| r.limit_ms).sum();
        assert!((limits / limit_ms(&calls, LIMITS) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn an_op_that_reads_what_it_writes_has_sizes_on_both_sides() {
        let op = SwiGluGrad {
            math: crate::shape::Math::F32,
            rows: 4,
            d_ff: 3,
            output: Output::Restored,
        };
        assert_eq!(sizes(&op.into()), "[4,6] -> [4,6]");
    }

    #[test]
    fn a_line_stands_under_its_heading() {
        let rows = rows_by_size(&[merge(), product(7)], &[24.0, 8.0], LIMITS);
        let line = rows[0].line(32.0);
        assert!(line.contains("75.0%") && line.contains(" 50.0%"), "{line}");
        let end = HEADING.find("calls").map(|at| at + "calls".len());
        assert_eq!(
            line.get(..end.unwrap()).map(|t| t.ends_with(" 1")),
            Some(true)
        );
        assert_eq!(rows[0].json(32.0)["share_of_limit"], 0.5);
        assert_eq!(rows[1].json(32.0)["share"], 0.25);
        assert_eq!(rows[1].sizes, "[1000,1000] -> [1000,7]");
    }
}

//! The manifest: the calls of a step, the layout, the contract and the domain, as text with a hash.
//!
//! Two runs with one manifest hash computed the same thing. How it was computed (kernels, grids,
//! algorithms) is the execution section, which stands outside the hash.

use std::fmt::Write as _;

use crate::layout::Layout;
use crate::num;
use crate::op::{OpCall, Slot};
use crate::program::SlotTable;

/// The version of the text form.
pub const SCHEMA: u32 = 1;

/// The text form of a step and its hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    text: String,
    hash: blake3::Hash,
}

impl Manifest {
    /// The manifest of `calls` over `slots` placed by `layout` in the numeric domain `domain`.
    pub fn of(slots: &SlotTable, layout: &Layout, calls: &[OpCall], domain: &str) -> Self {
        let mut text = String::new();
        let _ = writeln!(text, "schema {SCHEMA}");
        let _ = writeln!(text, "contract {}", num::VERSION);
        let _ = writeln!(text, "domain {domain}");
        let _ = writeln!(text, "arena {} bytes", layout.arena_bytes());
        let _ = writeln!(text, "slots");
        for (slot, def) in slots.iter() {
            let spec = &def.spec;
            let region = layout.region(slot);
            let _ = writeln!(
                text,
                "  {} {} {}{} {} @{}",
                slot.0, spec.name, spec.dtype, spec.shape, spec.role, region.offset
            );
        }
        let _ = writeln!(text, "calls");
        write_calls(&mut text, calls);
        let hash = blake3::hash(text.as_bytes());
        Manifest { text, hash }
    }

    /// The manifest with further programs over the same slots behind it, each under its name; the same where
    /// there are none.
    pub fn with_programs(mut self, programs: &[(String, &[OpCall])]) -> Self {
        for (name, calls) in programs {
            let _ = writeln!(self.text, "program {name}");
            write_calls(&mut self.text, calls);
        }
        self.hash = blake3::hash(self.text.as_bytes());
        self
    }

    /// The text form; the same for the same step on every machine.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// BLAKE3 of the text form.
    pub fn hash(&self) -> blake3::Hash {
        self.hash
    }

    /// The first lines in which two manifests' texts differ, as (line number from 1, left, right).
    pub fn diff<'a>(left: &'a str, right: &'a str, most: usize) -> Vec<(usize, &'a str, &'a str)> {
        let (mut a, mut b) = (left.lines(), right.lines());
        let mut differences = Vec::new();
        let mut number = 0;
        while differences.len() < most {
            number += 1;
            match (a.next(), b.next()) {
                (None, None) => break,
                (x, y) if x == y => {}
                (x, y) => differences.push((number, x.unwrap_or("(end)"), y.unwrap_or("(end)"))),
            }
        }
        differences
    }
}

fn write_calls(text: &mut String, calls: &[OpCall]) {
    for (index, call) in calls.iter().enumerate() {
        let _ = writeln!(
            text,
            "  {index} {} {} -> {}",
            call.op,
            slot_list(&call.reads),
            slot_list(&call.writes)
        );
    }
}

fn slot_list(slots: &[Slot]) -> String {
    let list: Vec<String> = slots.iter().map(|s| format!("%{}", s.0)).collect();
    format!("({})", list.join(" "))
}

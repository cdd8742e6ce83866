//! What stands on the page beside the charts: key numbers, memory by role, digests.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::axis::{bytes, short};
use super::chart::escape;
use super::figures::{colour, tokens_per_s};
use crate::report::RunHistory;

/// Rows of the table of digests that are shown at first and at last; those between are left out.
const DIGESTS_AT_AN_END: usize = 200;

/// The facts whose values are long.
const DEVICE: &str = "Device";
const ROOT: &str = "Root";

/// A key number: what it is, its value, and what is worth knowing beside it.
struct Fact {
    what: &'static str,
    value: String,
    beside: String,
}

fn fact(what: &'static str, value: String, beside: impl Into<String>) -> Fact {
    Fact {
        what,
        value,
        beside: beside.into(),
    }
}

/// The key numbers: tiles for one run, a table for several.
pub fn facts(runs: &[RunHistory], names: &[String]) -> String {
    if let [run] = runs {
        let tiles = of_run(run).into_iter().map(|fact| {
            let class = match fact.what {
                DEVICE | ROOT => " class=\"wide\"",
                _ => "",
            };
            format!(
                "<div{class}><dt>{}</dt><dd>{} <small>{}</small></dd></div>\n",
                fact.what,
                escape(&fact.value),
                escape(&fact.beside)
            )
        });
        return format!("<dl class=\"facts\">\n{}</dl>\n", tiles.collect::<String>());
    }
    let columns: Vec<Vec<Fact>> = runs.iter().map(of_run).collect();
    let mut whats: Vec<&str> = Vec::new();
    for fact in columns.iter().flatten() {
        if !whats.contains(&fact.what) {
            whats.push(fact.what);
        }
    }
    let mut out = "<div class=\"scroll\"><table class=\"facts\">\n<tr><td></td>".to_owned();
    for (index, name) in names.iter().enumerate() {
        let (colour, name) = (colour(index), escape(name));
        let _ = write!(out, "<th><i style=\"background:{colour}\"></i>{name}</th>");
    }
    out += "</tr>\n";
    for what in whats {
        let _ = write!(out, "<tr><th>{what}</th>");
        for facts in &columns {
            match facts.iter().find(|fact| fact.what == what) {
                None => out += "<td></td>",
                Some(fact) => {
                    let (value, beside) = (escape(&fact.value), escape(&fact.beside));
                    let _ = write!(out, "<td>{value} <small>{beside}</small></td>");
                }
            }
        }
        out += "</tr>\n";
    }
    out + "</table></div>\n"
}

fn of_run(run: &RunHistory) -> Vec<Fact> {
    let mut all = Vec::new();
    if let Some(last) = run.steps.last() {
        let taken = last.step + 1;
        let of = run
            .facts
            .as_ref()
            .map(|facts| format!("of {}", facts.steps));
        all.push(fact("Steps", taken.to_string(), of.unwrap_or_default()));
        let loss = last
            .loss
            .map_or("not finite".to_owned(), |loss| format!("{loss:.4}"));
        all.push(fact("Last loss", loss, format!("bits {}", last.loss_bits)));
    }
    if let Some((steps, best)) = run.best() {
        let text = |value: Option<f64>| value.map_or_else(String::new, |v| format!("{v:.4}"));
        let beside = format!(
            "perplexity {}, {:.1} % right, after {steps} steps",
            text(best.perplexity),
            100.0 * best.accuracy
        );
        all.push(fact("Best validation loss", text(best.loss), beside));
    }
    if let Some(rate) = tokens_per_s(run) {
        let beside = "tokens/s, median of replayed steps";
        all.push(fact("Speed", short(rate), beside));
        if let Some(facts) = &run.facts {
            let value = format!("{:.1} %", 100.0 * facts.utilisation(rate));
            let peak = format!("of {}FLOP/s", unit(facts.peak_flop_per_s));
            all.push(fact("MFU", value, peak));
        }
    }
    if let Some(facts) = &run.facts {
        let total = (facts.arena_bytes + facts.workspace_bytes) as f64;
        let workspace = match facts.workspace_bytes {
            0 => "all of it planned".to_owned(),
            workspace => format!("{} of it workspace", bytes(workspace as f64)),
        };
        all.push(fact("Memory", bytes(total), workspace));
        let tokens = format!("{} tokens a step", facts.tokens_per_step);
        all.push(fact("Parameters", short(facts.parameters as f64), tokens));
        let device = format!("{}: {}", facts.device, facts.description);
        let contract = format!("{}, contract {}", facts.domain, facts.contract);
        all.push(fact(DEVICE, device, contract));
    }
    let dropped = run.steps.iter().filter(|s| !s.applied).count();
    if dropped > 0 {
        all.push(fact("Dropped steps", dropped.to_string(), ""));
    }
    if let Some((steps, root)) = run.roots().into_iter().next_back() {
        all.push(fact(ROOT, root.to_owned(), format!("after {steps} steps")));
    }
    all
}

/// A number with its suffix set apart, as a unit follows it.
fn unit(value: f64) -> String {
    let text = short(value);
    match text.char_indices().next_back() {
        Some((at, suffix)) if suffix.is_alphabetic() => format!("{}\u{a0}{suffix}", &text[..at]),
        _ => format!("{text}\u{a0}"),
    }
}

/// The memory of each run by role, as bars.
pub fn memory(runs: &[RunHistory], names: &[String]) -> String {
    let mut out = String::new();
    let mut shown: Vec<&crate::report::RunFacts> = Vec::new();
    for (run, name) in runs.iter().zip(names) {
        let Some(facts) = &run.facts else {
            continue;
        };
        // Runs of one plan have one table.
        if shown.iter().any(|other| other.memory == facts.memory) {
            continue;
        }
        shown.push(facts);
        let mut rows: Vec<(&str, f64)> = facts
            .memory
            .iter()
            .map(|of| (of.role.as_str(), of.bytes as f64))
            .collect();
        rows.push(("workspace", facts.workspace_bytes as f64));
        rows.retain(|(_, bytes)| *bytes > 0.0);
        let greatest = rows.iter().map(|row| row.1).fold(0.0, f64::max);
        let facts_of = runs.iter().filter_map(|run| run.facts.as_ref());
        let of = match facts_of.clone().all(|other| other.memory == facts.memory) {
            true => String::new(),
            false => format!(", {}", escape(name)),
        };
        let _ = writeln!(
            out,
            "<figure><figcaption>Memory by role{of} <span>arena of {}; activations and scratch share room</span>\
             </figcaption>\n<table class=\"bars\">",
            bytes(facts.arena_bytes as f64)
        );
        for (role, count) in rows {
            let _ = writeln!(
                out,
                "<tr><th>{}</th><td><b style=\"width:{:.1}%\"></b></td><td>{}</td></tr>",
                escape(role),
                100.0 * (count / greatest.max(1.0)),
                bytes(count)
            );
        }
        out += "</table></figure>\n";
    }
    out
}

/// The roots of the runs, a row for each number of steps; the first row whose roots differ is marked.
pub fn digests(runs: &[RunHistory], names: &[String]) -> String {
    let mut rows: BTreeMap<u64, Vec<Option<&str>>> = BTreeMap::new();
    for (index, run) in runs.iter().enumerate() {
        for (steps, root) in run.roots() {
            rows.entry(steps).or_insert_with(|| vec![None; runs.len()])[index] = Some(root);
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let differs = |roots: &[Option<&str>]| {
        let mut present = roots.iter().flatten();
        let first = present.next();
        present.any(|root| Some(root) != first)
    };
    let first_other = rows
        .iter()
        .find(|(_, roots)| differs(roots))
        .map(|(steps, _)| *steps);
    let mut out = format!(
        "<details open><summary>Digests <span>the root over all parameters, {} recorded</span></summary>\n\
         <div class=\"scroll tall\"><table class=\"digests\"><tr><th>steps</th>",
        rows.len()
    );
    for name in names.iter().filter(|_| names.len() > 1) {
        let _ = write!(out, "<th>{}</th>", escape(name));
    }
    out += if names.len() > 1 {
        "</tr>\n"
    } else {
        "<th>root</th></tr>\n"
    };
    let last_of_first = DIGESTS_AT_AN_END;
    let first_of_last = rows.len().saturating_sub(DIGESTS_AT_AN_END);
    let mut left_out = 0;
    for (index, (steps, roots)) in rows.iter().enumerate() {
        let marked = first_other == Some(*steps);
        if index >= last_of_first && index < first_of_last && !marked {
            left_out += 1;
            continue;
        }
        let class = if marked { " class=\"parted\"" } else { "" };
        let _ = write!(out, "<tr{class}><th>{steps}</th>");
        for root in roots {
            let root = escape(root.unwrap_or(""));
            let _ = write!(out, "<td><code>{root}</code></td>");
        }
        out += "</tr>\n";
    }
    out += "</table></div>";
    if left_out > 0 {
        let _ = write!(
            out,
            "<p><small>{left_out} rows in the middle are left out.</small></p>"
        );
    }
    out + "</details>\n"
}

//! One page that shows runs: a single HTML file that reads nothing else.

mod axis;
mod chart;
mod curves;
mod figures;
mod tables;

use std::fmt::Write as _;

use self::chart::{Chart, escape};
use super::history::{Parting, RunHistory, parting};

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("page.js");

/// Runs, named and held against each other.
#[derive(Debug)]
pub struct Report<'a> {
    runs: &'a [RunHistory],
    names: Vec<String>,
    /// Where the first two runs part; `None` for one run.
    pub parting: Option<Parting>,
    charts: Vec<Chart>,
}

impl<'a> Report<'a> {
    /// The report of some runs.
    pub fn new(runs: &'a [RunHistory]) -> Self {
        let names = names(runs);
        let parting = match runs {
            [left, right, ..] => Some(parting(left, right)),
            _ => None,
        };
        let charts = figures::charts(runs, &names, parting.as_ref());
        Report {
            runs,
            names,
            parting,
            charts,
        }
    }

    /// The whole page.
    pub fn html(&self) -> String {
        let title = escape(&self.names.join(" · "));
        let mut out = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{title} – bitstep</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
             <header><h1>{}</h1><button id=\"theme\" type=\"button\" hidden>Dark</button></header>\n<main>\n",
            self.heading()
        );
        out += &self.verdict();
        out += &tables::facts(self.runs, &self.names);
        out += "<section class=\"charts\">\n";
        for (name, chart) in self.named_charts() {
            let (Some(svg), Some(data)) = (chart.svg(), chart.data()) else {
                continue;
            };
            // The text of a script element ends at the first `</`.
            let data = data.to_string().replace("</", "<\\/");
            let _ = writeln!(
                out,
                "<figure id=\"{name}\"><figcaption>{} <span>{}</span></figcaption>\n{svg}\
                 <script type=\"application/json\">{data}</script></figure>",
                escape(&chart.title),
                escape(&chart.unit)
            );
        }
        out += &tables::memory(self.runs, &self.names);
        out += "</section>\n";
        out += &tables::digests(self.runs, &self.names);
        let _ = write!(
            out,
            "</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"
        );
        out
    }

    /// Each chart as an SVG file of its own: its name and its text.
    pub fn files(&self) -> Vec<(String, String)> {
        let charts = self.named_charts().into_iter();
        let file = |(name, chart): (String, &Chart)| {
            let text = chart.file(STYLE)?;
            Some((format!("{name}.svg"), text))
        };
        charts.filter_map(file).collect()
    }

    /// The charts by names that each has alone.
    fn named_charts(&self) -> Vec<(String, &Chart)> {
        let mut named: Vec<(String, &Chart)> = Vec::new();
        for chart in &self.charts {
            let same = named.iter().filter(|(_, other)| other.id == chart.id);
            let name = match same.count() {
                0 => chart.id.to_owned(),
                n => format!("{}-{}", chart.id, n + 1),
            };
            named.push((name, chart));
        }
        named
    }

    fn heading(&self) -> String {
        let name = |(index, name): (usize, &String)| {
            let colour = figures::colour(index);
            let name = escape(name);
            let facts = self.runs.first().and_then(|run| run.facts.as_ref());
            match (self.names.len(), facts) {
                (1, Some(facts)) => format!("{name} <small>{}</small>", escape(&facts.name)),
                (1, None) => name,
                _ => format!("<i style=\"background:{colour}\"></i>{name}"),
            }
        };
        let names = self.names.iter().enumerate().map(name);
        names.collect::<Vec<_>>().join(" <small>and</small> ")
    }

    /// Whether the first two runs are the same.
    fn verdict(&self) -> String {
        let Some(parting) = &self.parting else {
            return String::new();
        };
        let same = parting.loss.is_none() && parting.root.is_none();
        let class = if same { "same" } else { "parted" };
        let mut text = escape(&first_upper(&parting.to_string()));
        if let Some((_, left, right)) = &parting.root {
            let _ = write!(
                text,
                "<br><code>{}</code><br><code>{}</code>",
                escape(left),
                escape(right)
            );
        }
        if parting.roots == 0 {
            text += "<br>No root was recorded by both: <code>digest.every</code> records them.";
        }
        format!("<p class=\"verdict {class}\">{text}</p>\n")
    }
}

fn first_upper(text: &str) -> String {
    let mut characters = text.chars();
    match characters.next() {
        None => String::new(),
        Some(first) => first.to_uppercase().chain(characters).collect(),
    }
}

/// The name of each run: the last part of its folder, with the one before where two are the same.
fn names(runs: &[RunHistory]) -> Vec<String> {
    let parts = |run: &RunHistory, count: usize| {
        let folder = std::path::absolute(&run.folder).unwrap_or_else(|_| run.folder.clone());
        let parts: Vec<String> = folder
            .components()
            .map(|part| part.as_os_str().to_string_lossy().into_owned())
            .collect();
        parts[parts.len().saturating_sub(count)..].join("/")
    };
    let name = |run: &RunHistory| {
        let short = parts(run, 1);
        let same = runs.iter().filter(|other| parts(other, 1) == short).count();
        match same {
            1 => short,
            _ => parts(run, 2),
        }
    };
    runs.iter().map(name).collect()
}

#[cfg(test)]
#[path = "../page_tests.rs"]
mod tests;

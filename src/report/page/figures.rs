//! The charts of some runs.

use super::axis::{LARGEST, Scale};
use super::chart::{Chart, Curve, Drawn, Mark, SecondAxis};
use super::curves::median;
use crate::report::RunHistory;
use crate::report::history::{Parting, RecordedStep};

/// The colours of runs, in order; the style sheet gives the values.
const RUN_COLOURS: [&str; 6] = [
    "var(--run0)",
    "var(--run1)",
    "var(--run2)",
    "var(--run3)",
    "var(--run4)",
    "var(--run5)",
];

/// Colours from the first layer to the last; legible on light and on dark.
const DEPTH: [[f64; 3]; 4] = [
    [74.0, 120.0, 210.0],
    [38.0, 160.0, 150.0],
    [214.0, 158.0, 46.0],
    [205.0, 85.0, 62.0],
];

/// Layers that the legend names.
const NAMED_LAYERS: usize = 6;

/// How many times the greatest norm of a chart has to be the least for a logarithmic axis.
const WIDE: f64 = 30.0;

/// The colour of a run.
pub fn colour(run: usize) -> &'static str {
    RUN_COLOURS[run % RUN_COLOURS.len()]
}

/// Every chart that the runs have numbers for. `names` are those of the runs.
pub fn charts(runs: &[RunHistory], names: &[String], parting: Option<&Parting>) -> Vec<Chart> {
    let drawn = Runs { runs, names };
    let mut charts = vec![
        drawn.loss(parting),
        drawn.chart(("learning-rate", "Learning rate", ""), Drawn::Line, |s| {
            s.lr
        }),
        drawn.norm(),
    ];
    match runs {
        [run] => charts.push(group_norms(run)),
        runs => charts.extend(runs.iter().zip(names).map(|(run, name)| Chart {
            title: format!("Gradient norm by group, {name}"),
            ..group_norms(run)
        })),
    }
    charts.push(drawn.accuracy());
    charts.push(drawn.speed());
    charts.retain(Chart::has_values);
    charts
}

/// Runs to be drawn together.
struct Runs<'a> {
    runs: &'a [RunHistory],
    names: &'a [String],
}

impl Runs<'_> {
    /// A chart of one number a step.
    fn chart(
        &self,
        (id, title, unit): (&'static str, &str, &str),
        drawn: Drawn,
        value: impl Fn(&RecordedStep) -> Option<f64>,
    ) -> Chart {
        let curves = self.runs.iter().zip(self.names).enumerate();
        let curve = |(index, (run, name)): (usize, (&RunHistory, &String))| Curve {
            name: name.clone(),
            colour: colour(index).to_owned(),
            drawn,
            points: points(run, &value),
            named: true,
            dashed: false,
        };
        Chart {
            id,
            title: title.to_owned(),
            unit: unit.to_owned(),
            scale: Scale::Linear,
            curves: curves.map(curve).collect(),
            levels: Vec::new(),
            moments: Vec::new(),
            second: None,
        }
    }

    /// The loss in training and on the data set aside.
    fn loss(&self, parting: Option<&Parting>) -> Chart {
        let mut chart = self.chart(("loss", "Loss", "nats per token"), Drawn::Noisy, |s| s.loss);
        let aside = |s: &RecordedStep| s.validation.and_then(|found| found.loss);
        let lone = self.runs.len() == 1;
        for (index, (run, name)) in self.runs.iter().zip(self.names).enumerate() {
            let points = points(run, aside);
            if points.is_empty() {
                continue;
            }
            let (name, colour) = match lone {
                true => ("validation".to_owned(), "var(--second)".to_owned()),
                false => (format!("{name}, validation"), colour(index).to_owned()),
            };
            if lone {
                chart.curves[0].name = "training".to_owned();
            }
            chart.curves.push(Curve {
                name,
                colour,
                drawn: Drawn::Dots,
                points,
                named: true,
                dashed: !lone,
            });
        }
        if let Some((steps, ..)) = parting.and_then(|parting| parting.root.as_ref()) {
            chart.moments.push(Mark {
                at: (steps - 1) as f64,
                text: format!("roots part after {steps} steps"),
            });
        } else if let Some(step) = parting.and_then(|parting| parting.loss) {
            chart.moments.push(Mark {
                at: step as f64,
                text: format!("losses part at step {step}"),
            });
        }
        chart
    }

    fn norm(&self) -> Chart {
        let about = ("grad-norm", "Gradient norm", "before the clip");
        let chart = self.chart(about, Drawn::Noisy, |s| s.grad_norm);
        wide_enough(chart)
    }

    fn accuracy(&self) -> Chart {
        let about = ("accuracy", "Accuracy on the data set aside", "% of tokens");
        self.chart(about, Drawn::Dots, |s| {
            s.validation.map(|v| 100.0 * v.accuracy)
        })
    }

    /// Tokens a second, and the share of the peak beside them where it is one factor for all runs.
    fn speed(&self) -> Chart {
        let about = ("tokens-per-s", "Speed", "tokens/s");
        let mut chart = self.chart(about, Drawn::Noisy, |s| Some(s.tokens_per_s));
        let factors = self
            .runs
            .iter()
            .map(|run| run.facts.as_ref().map(|f| f.utilisation(100.0)));
        let factors: Option<Vec<f64>> = factors.collect();
        if let Some([first, rest @ ..]) = factors.as_deref()
            && (1.0 / LARGEST..=LARGEST).contains(first)
            && rest.iter().all(|f| (f / first - 1.0).abs() < 0.02)
        {
            chart.unit += "; right: MFU";
            chart.second = Some(SecondAxis {
                unit: "%".to_owned(),
                factor: *first,
            });
        }
        chart
    }
}

/// The gradient norm of each group of a run: layers by depth from blue to red.
fn group_norms(run: &RunHistory) -> Chart {
    let mut names: Vec<&String> = Vec::new();
    for name in run.steps.iter().flat_map(|step| step.group_norms.keys()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.sort_by_key(|name| order(name));
    let layers = names.iter().filter_map(|name| layer(name)).max();
    let layers = layers.map_or(0, |last| last.saturating_add(1));
    let curves = names.into_iter().map(|name| {
        let number = layer(name);
        let named = number.is_none_or(|number| {
            let every = layers.div_ceil(NAMED_LAYERS).max(1);
            number.is_multiple_of(every) || Some(number) == layers.checked_sub(1)
        });
        Curve {
            name: name.clone(),
            colour: match (number, name.as_str()) {
                (Some(number), _) => depth_colour(number, layers),
                (None, "embedding") => "var(--group0)".to_owned(),
                (None, "head") => "var(--group1)".to_owned(),
                (None, _) => "var(--group2)".to_owned(),
            },
            drawn: Drawn::Line,
            points: points(run, |s| s.group_norms.get(name).copied().flatten()),
            named,
            dashed: false,
        }
    });
    let chart = Chart {
        id: "group-norms",
        title: "Gradient norm by group".to_owned(),
        unit: "before the clip".to_owned(),
        scale: Scale::Linear,
        curves: curves.collect(),
        levels: Vec::new(),
        moments: Vec::new(),
        second: None,
    };
    wide_enough(chart)
}

/// The number of a layer's group.
fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("layer ")?.parse().ok()
}

/// Groups as data runs through them.
fn order(name: &str) -> (u8, usize) {
    match (name, layer(name)) {
        (_, Some(number)) => (1, number),
        ("embedding", _) => (0, 0),
        ("final norm", _) => (2, 0),
        ("head", _) => (3, 0),
        _ => (4, 0),
    }
}

fn depth_colour(layer: usize, layers: usize) -> String {
    let along = layer as f64 / (layers.max(2) - 1) as f64 * (DEPTH.len() - 1) as f64;
    let stop = (along.floor() as usize).min(DEPTH.len() - 2);
    let part = along - stop as f64;
    let mix = |i: usize| DEPTH[stop][i] + part * (DEPTH[stop + 1][i] - DEPTH[stop][i]);
    let [r, g, b] = [mix(0), mix(1), mix(2)].map(|v| v.round() as u8);
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// Gives a chart a logarithmic axis where its values, the rarest apart, are far from each other.
fn wide_enough(mut chart: Chart) -> Chart {
    let mut values: Vec<f64> = chart
        .curves
        .iter()
        .flat_map(|c| &c.points)
        .map(|p| p.1)
        .collect();
    values.retain(|v| *v > 0.0);
    values.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| values.get((share * values.len() as f64) as usize);
    if let (Some(low), Some(high)) = (at(0.01), values.last())
        && high / low > WIDE
    {
        chart.scale = Scale::Log;
        chart.unit += ", logarithmic";
        for curve in &mut chart.curves {
            curve.points.retain(|p| p.1 >= 1.0 / LARGEST);
        }
    }
    chart
}

fn points(run: &RunHistory, value: impl Fn(&RecordedStep) -> Option<f64>) -> Vec<(f64, f64)> {
    let steps = run.steps.iter();
    steps
        .filter_map(|step| Some((step.step as f64, value(step)?)))
        .filter(|point| point.1.abs() <= LARGEST)
        .collect()
}

/// The middle rate of a run's replayed steps in tokens a second; of all its steps where none was.
pub fn tokens_per_s(run: &RunHistory) -> Option<f64> {
    let replayed = run.steps.iter().filter(|s| s.phase == "replayed");
    let replayed = median(replayed.map(|s| s.tokens_per_s));
    replayed.or_else(|| median(run.steps.iter().map(|s| s.tokens_per_s)))
}

//! One chart as SVG: axes, grid, curves, legend. Colours are names that a style sheet gives values to.

use std::fmt::Write as _;

use super::axis::{Axis, Scale};
use super::curves::{buckets, smoothed};

/// The size of a chart in its own units.
const WIDTH: f64 = 640.0;
const PLOT_LEFT: f64 = 62.0;
const PLOT_RIGHT: f64 = 16.0;
/// Room on the right for a second axis.
const SECOND_AXIS: f64 = 46.0;
const PLOT_TOP: f64 = 14.0;
const PLOT_HEIGHT: f64 = 220.0;
const BELOW_PLOT: f64 = 48.0;
const LEGEND_ROW: f64 = 20.0;
/// Room for the heading of a chart that is a file of its own.
const HEADING: f64 = 32.0;
/// Width of a character of the legend, on average.
const LEGEND_CHARACTER: f64 = 6.6;

/// How a curve is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawn {
    /// Every value faintly and the moving mean over it.
    Noisy,
    /// A line.
    Line,
    /// A line with a dot at each value, for few values.
    Dots,
}

/// One curve.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    pub name: String,
    /// A colour, `#rrggbb` or `var(--name)`.
    pub colour: String,
    pub drawn: Drawn,
    /// Steps and values; values that are not finite are gaps.
    pub points: Vec<(f64, f64)>,
    /// Whether the legend names it.
    pub named: bool,
    /// Whether its line is broken, to tell it from another of the same colour.
    pub dashed: bool,
}

impl Curve {
    fn class(&self) -> &'static str {
        match self.dashed {
            true => "curve dashed",
            false => "curve",
        }
    }
}

/// A line across a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Mark {
    pub at: f64,
    pub text: String,
}

/// A second axis, whose values are those of the first times a factor.
#[derive(Clone, Debug, PartialEq)]
pub struct SecondAxis {
    pub unit: String,
    pub factor: f64,
}

/// A chart over the steps of runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// A short name, from which files are named.
    pub id: &'static str,
    pub title: String,
    pub unit: String,
    pub scale: Scale,
    pub curves: Vec<Curve>,
    /// Dashed lines at values, such as a limit.
    pub levels: Vec<Mark>,
    /// Dashed lines at steps.
    pub moments: Vec<Mark>,
    pub second: Option<SecondAxis>,
}

/// The two axes of a chart and where they lie.
struct Frame {
    x: Axis,
    y: Axis,
    right: f64,
}

impl Frame {
    fn x(&self, value: f64) -> f64 {
        PLOT_LEFT + self.x.place(value) * (self.right - PLOT_LEFT)
    }

    fn y(&self, value: f64) -> f64 {
        PLOT_TOP + (1.0 - self.y.place(value)) * PLOT_HEIGHT
    }

    fn bottom() -> f64 {
        PLOT_TOP + PLOT_HEIGHT
    }
}

impl Chart {
    /// The chart as part of a page, which gives it its heading; `None` when it has nothing to show.
    pub fn svg(&self) -> Option<String> {
        self.drawn(0.0, "")
    }

    /// Whether it has something to show.
    pub fn has_values(&self) -> bool {
        self.frame().is_some()
    }

    /// The chart as a file of its own, with a style sheet and its heading.
    pub fn file(&self, style: &str) -> Option<String> {
        let (title, unit) = (escape(&self.title), escape(&self.unit));
        let head = format!(
            "<style>{style}</style>\
             <rect class=\"paper\" y=\"-{HEADING}\" width=\"100%\" height=\"100%\"/>\
             <text class=\"title\" x=\"12\" y=\"-10\">{title} <tspan>{unit}</tspan></text>"
        );
        self.drawn(HEADING, &head)
    }

    /// The chart with `above` units of room for what `head` draws there.
    fn drawn(&self, above: f64, head: &str) -> Option<String> {
        let frame = self.frame()?;
        let rows = self.legend_rows();
        let height = Frame::bottom() + BELOW_PLOT + rows.len() as f64 * LEGEND_ROW;
        let title = escape(&format!("{}, {}", self.title, self.unit));
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 -{above} {WIDTH} {:.0}\" role=\"img\" \
             aria-label=\"{title}\" class=\"chart\">{head}<title>{title}</title>\n",
            height + above
        );
        self.axes(&frame, &mut out);
        for curve in &self.curves {
            draw(curve, &frame, &mut out);
        }
        self.marks(&frame, &mut out);
        for (row, names) in rows.iter().enumerate() {
            let y = Frame::bottom() + BELOW_PLOT + (row as f64 + 0.3) * LEGEND_ROW;
            let mut x = PLOT_LEFT;
            for curve in names {
                let (colour, name) = (&curve.colour, escape(&curve.name));
                let line = y - 4.0;
                let _ = writeln!(
                    out,
                    "<path class=\"{}\" style=\"stroke:{colour}\" d=\"M{x:.1} {line:.1}h16\"/>\
                     <text class=\"legend\" x=\"{:.1}\" y=\"{y:.1}\">{name}</text>",
                    curve.class(),
                    x + 22.0
                );
                x += legend_width(curve);
            }
        }
        out += "</svg>\n";
        Some(out)
    }

    /// What a page needs to name the values under a pointer: the plot's edges, the steps at them and the
    /// points that are drawn.
    pub fn data(&self) -> Option<serde_json::Value> {
        let frame = self.frame()?;
        let curves = self.curves.iter().map(|curve| {
            let points = buckets(&curve.points);
            let points: Vec<[f64; 2]> = points.iter().map(|b| [b.x, b.mean]).collect();
            serde_json::json!({"name": curve.name, "colour": curve.colour, "points": points})
        });
        Some(serde_json::json!({
            "left": PLOT_LEFT, "right": frame.right, "top": PLOT_TOP, "bottom": Frame::bottom(),
            "low": frame.x.low, "high": frame.x.high, "width": WIDTH,
            "curves": curves.collect::<Vec<_>>(),
        }))
    }

    fn frame(&self) -> Option<Frame> {
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let values = points().map(|p| p.1);
        let levels = self.levels.iter().map(|level| level.at);
        let y = Axis::around(values.chain(levels), self.scale)?;
        let (low, high) = points().fold((f64::INFINITY, 0.0f64), |(low, high), p| {
            (low.min(p.0), high.max(p.0))
        });
        let x = Axis {
            scale: Scale::Linear,
            low,
            high: high.max(low + 1.0),
        };
        let second = match self.second {
            Some(_) => SECOND_AXIS,
            None => 0.0,
        };
        let right = WIDTH - PLOT_RIGHT - second;
        Some(Frame { x, y, right })
    }

    fn axes(&self, frame: &Frame, out: &mut String) {
        let (left, right, bottom) = (PLOT_LEFT, frame.right, Frame::bottom());
        for (value, text) in frame.y.ticks(5) {
            let y = frame.y(value);
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{left} {y:.1}H{right}\"/>\
                 <text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{text}</text>",
                left - 8.0,
                y + 4.0
            );
        }
        for (value, text) in frame.x.ticks(6) {
            let x = frame.x(value);
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{x:.1} {bottom}v5\"/>\
                 <text class=\"tick\" text-anchor=\"middle\" x=\"{x:.1}\" y=\"{}\">{text}</text>",
                bottom + 19.0
            );
        }
        if let Some(second) = &self.second {
            let axis = Axis {
                low: frame.y.low * second.factor,
                high: frame.y.high * second.factor,
                ..frame.y
            };
            for (value, text) in axis.ticks(5) {
                let y = frame.y(value / second.factor);
                let unit = escape(&second.unit);
                let _ = writeln!(
                    out,
                    "<path class=\"grid\" d=\"M{right} {y:.1}h5\"/>\
                     <text class=\"tick\" x=\"{}\" y=\"{:.1}\">{text}{unit}</text>",
                    right + 9.0,
                    y + 4.0
                );
            }
        }
        let _ = writeln!(
            out,
            "<path class=\"axis\" d=\"M{left} {bottom}H{right}\"/>\
             <text class=\"tick\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{}\">step</text>",
            (left + right) / 2.0,
            bottom + 35.0
        );
    }

    fn marks(&self, frame: &Frame, out: &mut String) {
        let (left, right, bottom) = (PLOT_LEFT, frame.right, Frame::bottom());
        for level in &self.levels {
            let (y, text) = (frame.y(level.at), escape(&level.text));
            let _ = writeln!(
                out,
                "<path class=\"mark\" d=\"M{left} {y:.1}H{right}\"/>\
                 <text class=\"note\" text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{text}</text>",
                right - 4.0,
                y - 5.0
            );
        }
        for moment in &self.moments {
            let (x, text) = (frame.x(moment.at), escape(&moment.text));
            let (anchor, at) = match x > (left + right) / 2.0 {
                true => ("end", x - 5.0),
                false => ("start", x + 5.0),
            };
            let _ = writeln!(
                out,
                "<path class=\"mark\" d=\"M{x:.1} {PLOT_TOP}V{bottom}\"/>\
                 <text class=\"note\" text-anchor=\"{anchor}\" x=\"{at:.1}\" y=\"{}\">{text}</text>",
                PLOT_TOP + 11.0
            );
        }
    }

    /// The curves that the legend names, in rows; one curve needs no legend.
    fn legend_rows(&self) -> Vec<Vec<&Curve>> {
        let named: Vec<&Curve> = self.curves.iter().filter(|curve| curve.named).collect();
        let mut rows: Vec<Vec<&Curve>> = Vec::new();
        let mut used = f64::INFINITY;
        for curve in named.iter().filter(|_| named.len() > 1) {
            let width = legend_width(curve);
            if used + width > WIDTH - PLOT_LEFT {
                rows.push(Vec::new());
                used = 0.0;
            }
            used += width;
            if let Some(row) = rows.last_mut() {
                row.push(curve);
            }
        }
        rows
    }
}

fn legend_width(curve: &Curve) -> f64 {
    40.0 + LEGEND_CHARACTER * curve.name.chars().count() as f64
}

fn draw(curve: &Curve, frame: &Frame, out: &mut String) {
    let colour = &curve.colour;
    let all = buckets(&curve.points);
    let place = |x: f64, y: f64| (frame.x(x), frame.y(y));
    let line: Vec<(f64, f64)> = all.iter().map(|b| place(b.x, b.mean)).collect();
    let mean = match curve.drawn {
        Drawn::Noisy => smoothed(&curve.points),
        Drawn::Line | Drawn::Dots => None,
    };
    let thinned = all.len() < curve.points.iter().filter(|p| p.1.is_finite()).count();
    if thinned {
        let above = all.iter().map(|b| place(b.x, b.high));
        let below = all.iter().rev().map(|b| place(b.x, b.low));
        let path = path(above.chain(below));
        let _ = writeln!(
            out,
            "<path class=\"band\" style=\"fill:{colour}\" d=\"{path}Z\"/>"
        );
    }
    if let Some(mean) = mean {
        if !thinned {
            let faint = path(line.into_iter());
            let _ = writeln!(
                out,
                "<path class=\"faint\" style=\"stroke:{colour}\" d=\"{faint}\"/>"
            );
        }
        let mean = path(buckets(&mean).iter().map(|b| place(b.x, b.mean)));
        let _ = writeln!(
            out,
            "<path class=\"curve\" style=\"stroke:{colour}\" d=\"{mean}\"/>"
        );
        return;
    }
    let _ = writeln!(
        out,
        "<path class=\"{}\" style=\"stroke:{colour}\" d=\"{}\"/>",
        curve.class(),
        path(line.iter().copied())
    );
    if curve.drawn == Drawn::Dots || line.len() == 1 {
        for (x, y) in line {
            let _ = writeln!(
                out,
                "<circle style=\"fill:{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"/>"
            );
        }
    }
}

fn path(points: impl Iterator<Item = (f64, f64)>) -> String {
    let mut text = String::new();
    for (index, (x, y)) in points.enumerate() {
        let letter = if index == 0 { 'M' } else { 'L' };
        let _ = write!(text, "{letter}{x:.1} {y:.1}");
    }
    text
}

/// Text as HTML and SVG hold it.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
    }
    out
}

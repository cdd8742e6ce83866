//! Axes: where their ticks stand and how numbers are written.

/// How values are placed along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    Linear,
    /// By the logarithm; every value is greater than 0.
    Log,
}

/// Values of greater size than this, or on a logarithmic axis of less than its inverse, are not drawn.
pub const LARGEST: f64 = 1e100;

/// An axis from `low` to `high`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    pub scale: Scale,
    pub low: f64,
    pub high: f64,
}

impl Axis {
    /// The axis of some values with room at both ends; a single value stands in the middle. `None` when
    /// no value can be placed.
    pub fn around(values: impl Iterator<Item = f64>, scale: Scale) -> Option<Axis> {
        let placed = |v: &f64| match scale {
            Scale::Linear => v.abs() <= LARGEST,
            Scale::Log => (1.0 / LARGEST..=LARGEST).contains(v),
        };
        let (low, high) = values
            .filter(placed)
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| {
                (low.min(v), high.max(v))
            });
        if low > high {
            return None;
        }
        let (low, high) = match scale {
            Scale::Linear => {
                let room = match high > low {
                    true => 0.06 * (high - low),
                    false => (0.1 * high.abs()).max(1e-9),
                };
                // Zero is a natural end for what is never below it.
                let below = match low >= 0.0 && low < 0.35 * high {
                    true => 0.0,
                    false => low - room,
                };
                (below, high + room)
            }
            Scale::Log => {
                let room = (high / low).powf(0.06).max(1.2);
                (low / room, high * room)
            }
        };
        Some(Axis { scale, low, high })
    }

    /// Where a value stands, 0 at the low end and 1 at the high one.
    pub fn place(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        }
    }

    /// Round values inside the axis, about `wanted` of them, with their text.
    pub fn ticks(&self, wanted: usize) -> Vec<(f64, String)> {
        match self.scale {
            Scale::Linear => self.linear_ticks(wanted),
            Scale::Log => self.log_ticks(wanted),
        }
    }

    fn linear_ticks(&self, wanted: usize) -> Vec<(f64, String)> {
        let step = round_step(self.high - self.low, wanted);
        let first = (self.low / step - 1e-9).ceil() as i64;
        let last = (self.high / step + 1e-9).floor() as i64;
        let values: Vec<f64> = (first..=last).map(|i| i as f64 * step).collect();
        let size = values.iter().fold(step, |size, v| size.max(v.abs()));
        let text = |value: f64| (value, tick_text(value, step, size));
        values.into_iter().map(text).collect()
    }

    /// Powers of ten; with 2 and 5 times them where there are few.
    fn log_ticks(&self, wanted: usize) -> Vec<(f64, String)> {
        let first = self.low.log10().floor() as i32;
        let last = self.high.log10().ceil() as i32;
        let of = |digits: &[f64], every: i32| -> Vec<f64> {
            let powers = (first..=last).filter(|p| p % every == 0);
            let values = powers.flat_map(|p| digits.iter().map(move |d| d * 10f64.powi(p)));
            let inside = values.filter(|v| (self.low..=self.high).contains(v));
            inside.collect()
        };
        let powers = of(&[1.0], 1).len();
        let values = match powers {
            0..=2 => of(&[1.0, 2.0, 5.0], 1),
            _ => of(&[1.0], powers.div_ceil(wanted.max(1)).max(1) as i32),
        };
        values.into_iter().map(|v| (v, short(v))).collect()
    }
}

/// The one of 1, 2, 2.5 and 5 times a power of ten that cuts `range` into nearest to `wanted` parts.
fn round_step(range: f64, wanted: usize) -> f64 {
    let exact = range.max(1e-300) / wanted.max(1) as f64;
    let power = 10f64.powf(exact.log10().floor());
    let off = |factor: &f64| (factor * power / exact).ln().abs();
    let factors = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter();
    let nearest = factors.min_by(|a, b| off(a).total_cmp(&off(b)));
    nearest.unwrap_or(1.0) * power
}

/// The text of a tick: as many digits as its neighbours need to be told apart, in the unit of the
/// greatest, which is `size`.
fn tick_text(value: f64, step: f64, size: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    for (unit, suffix) in [(1e9, "G"), (1e6, "M"), (1e3, "k")] {
        if size >= 10.0 * unit || (size >= unit && step >= unit / 10.0) {
            return format!("{}{suffix}", decimal(value / unit, step / unit));
        }
    }
    match size < 1e-3 {
        true => scientific(value),
        false => decimal(value, step),
    }
}

/// A number with the decimals of `step`.
fn decimal(value: f64, step: f64) -> String {
    let places = (0..9).find(|&places| {
        let scaled = step * 10f64.powi(places);
        (scaled - scaled.round()).abs() < 1e-6 * scaled
    });
    let places = places.unwrap_or(9) as usize;
    let text = format!("{value:.places$}");
    // Minus zero is a trace of rounding.
    match text
        .trim_start_matches('-')
        .trim_matches(['0', '.'])
        .is_empty()
    {
        true => "0".to_owned(),
        false => text,
    }
}

fn scientific(value: f64) -> String {
    let text = format!("{value:.1e}");
    text.replace(".0e", "e").replace("e-", "e\u{2212}")
}

/// A number in few characters, for people: three digits and a suffix, or a power of ten.
pub fn short(value: f64) -> String {
    let size = value.abs();
    for (unit, suffix) in [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")] {
        if size >= unit {
            return format!("{}{suffix}", digits(value / unit));
        }
    }
    match size {
        0.0 => "0".to_owned(),
        s if s < 1e-3 => scientific(value),
        _ => digits(value),
    }
}

/// Three significant digits, without zeros at the end of a fraction.
fn digits(value: f64) -> String {
    let places = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        v if v >= 0.1 => 3,
        _ => 4,
    };
    let text = format!("{value:.places$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A number of bytes in binary units.
pub fn bytes(count: f64) -> String {
    let units = [
        (1u64 << 40, "TiB"),
        (1 << 30, "GiB"),
        (1 << 20, "MiB"),
        (1 << 10, "KiB"),
    ];
    for (unit, name) in units {
        if count >= unit as f64 {
            return format!("{}\u{a0}{name}", digits(count / unit as f64));
        }
    }
    format!("{count:.0}\u{a0}B")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(low: f64, high: f64, scale: Scale) -> Vec<String> {
        let ticks = Axis { scale, low, high }.ticks(5);
        ticks.into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn ticks_are_round_and_told_apart() {
        let linear = |low, high| texts(low, high, Scale::Linear).join(" ");
        assert_eq!(linear(0.0, 1.06), "0 0.2 0.4 0.6 0.8 1.0");
        assert_eq!(linear(2.31, 2.36), "2.31 2.32 2.33 2.34 2.35 2.36");
        assert_eq!(linear(0.0, 900.0), "0 200 400 600 800");
        assert_eq!(linear(0.0, 53_000.0), "0 10k 20k 30k 40k 50k");
        assert_eq!(linear(0.0, 2.1e-3), "0 0.0005 0.0010 0.0015 0.0020");
        assert_eq!(
            linear(0.0, 2.1e-4),
            "0 5e\u{2212}5 1e\u{2212}4 1.5e\u{2212}4 2e\u{2212}4"
        );
        assert_eq!(linear(-1.0, 1.0), "-1.0 -0.5 0 0.5 1.0");
    }

    #[test]
    fn a_logarithmic_axis_has_powers_of_ten() {
        let few = ["0.05", "0.1", "0.2", "0.5", "1", "2"];
        assert_eq!(texts(0.05, 3.0, Scale::Log), few);
        assert_eq!(texts(0.3, 3.0, Scale::Log), ["0.5", "1", "2"]);
        let wide = texts(1e-9, 1e9, Scale::Log);
        assert!(wide.len() <= 6, "{wide:?}");
    }

    #[test]
    fn every_value_of_an_axis_lies_inside_it() {
        for scale in [Scale::Linear, Scale::Log] {
            for values in [
                vec![1.0, 9.0],
                vec![4.0],
                vec![0.5, 0.50001],
                vec![1e-12, 1e12],
            ] {
                let axis = Axis::around(values.iter().copied(), scale).unwrap();
                for value in values {
                    let place = axis.place(value);
                    assert!((0.0..=1.0).contains(&place), "{scale:?} {value}: {place}");
                }
            }
        }
        let none = [f64::NAN, -1.0, 0.0];
        assert_eq!(Axis::around(none.into_iter(), Scale::Log), None);
        let zero = Axis::around([0.0].into_iter(), Scale::Linear).unwrap();
        assert!(zero.high > zero.low);
    }

    #[test]
    fn numbers_are_short() {
        let found: Vec<String> = [0.0, 53_120.0, 1.5e12, 2.3818, 0.031_24, 2e-4, 994.0, 100.0]
            .into_iter()
            .map(short)
            .collect();
        let expected = [
            "0",
            "53.1k",
            "1.5T",
            "2.38",
            "0.0312",
            "2e\u{2212}4",
            "994",
            "100",
        ];
        assert_eq!(found, expected);
        assert_eq!(bytes(1_351_680.0), "1.29\u{a0}MiB");
        assert_eq!(bytes(17.0), "17\u{a0}B");
    }
}

//! How far each function is from the exact value, at most.

/// The largest error of a function over all 2^32 inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accuracy {
    /// The function's name.
    pub name: &'static str,
    /// The error in units in the last place of the correctly rounded result, subnormal results included.
    pub ulps: f64,
}

/// Measured over all inputs against binary64 and rounded up to three decimals. Entries only ever
/// decrease.
pub const ACCURACY: &[Accuracy] = &[
    entry("exp", 0.891),
    entry("log", 0.804),
    entry("sigmoid", 0.771),
    entry("softplus", 0.890),
    entry("sin", 0.939),
    entry("cos", 0.949),
    entry("decay", 0.800),
    entry("weight", 42.831),
    entry("narrow_sigmoid", 99.937),
];

const fn entry(name: &'static str, ulps: f64) -> Accuracy {
    Accuracy { name, ulps }
}

#[cfg(test)]
mod tests {
    use super::super as ours;
    use super::ACCURACY;
    use rayon::prelude::*;
    use std::f32::consts;

    /// A function of the contract and the same in binary64.
    struct Case {
        name: &'static str,
        ours: fn(f32) -> f32,
        exact: fn(f64) -> f64,
    }

    fn case(name: &'static str, ours: fn(f32) -> f32, exact: fn(f64) -> f64) -> Case {
        Case { name, ours, exact }
    }

    fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + libm::exp(-x))
    }

    fn softplus(x: f64) -> f64 {
        let ramp = if x > 0.0 { x } else { 0.0 };
        ramp + libm::log1p(libm::exp(-libm::fabs(x)))
    }

    /// On its domain; a NaN, which it passes over, is left out.
    fn decay(x: f32) -> f32 {
        let y = ours::decay(-x.abs());
        if x.is_nan() { super::super::NAN } else { y }
    }

    fn decay_exact(x: f64) -> f64 {
        let z = -libm::fabs(x);
        libm::exp2(if z < -125.0 { -125.0 } else { z })
    }

    fn weight(x: f64) -> f64 {
        let x = if x > 0.0 { x.min(1.0) } else { 0.0 };
        if x <= 127.0 / 128.0 {
            libm::exp2(1.0 - 128.0 * x)
        } else {
            (libm::exp2(128.0 * (1.0 - x)) - 1.0) * f64::from(f32::MIN_POSITIVE)
        }
    }

    /// A NaN, which it passes over, is left out.
    fn narrow_sigmoid(x: f32) -> f32 {
        let y = ours::narrow_sigmoid(x);
        if x.is_nan() { super::super::NAN } else { y }
    }

    /// Its `e^-|x|` ends as weights do.
    fn narrow_sigmoid_exact(x: f64) -> f64 {
        let w = weight((libm::fabs(x) * std::f64::consts::LOG2_E + 1.0) / 128.0);
        let top = if x < 0.0 { w } else { 1.0 };
        let y = top / (1.0 + w);
        if x.is_nan() { x } else { y }
    }

    fn cases() -> [Case; 9] {
        [
            case("exp", ours::exp, libm::exp),
            case("log", ours::log, libm::log),
            case("sigmoid", ours::sigmoid, sigmoid),
            case("softplus", ours::softplus, softplus),
            case("sin", ours::sin, libm::sin),
            case("cos", ours::cos, libm::cos),
            case("decay", decay, decay_exact),
            case("weight", ours::weight, weight),
            case("narrow_sigmoid", narrow_sigmoid, narrow_sigmoid_exact),
        ]
    }

    /// The error in ulps; infinite where the kind of the result, the sign of a zero or the bits of a NaN
    /// are wrong.
    fn error(got: f32, exact: f64) -> f64 {
        let rounded = exact as f32;
        let right = if exact.is_nan() {
            got.to_bits() == 0x7fc0_0000
        } else if rounded.is_infinite() || !got.is_finite() {
            got == rounded
        } else {
            got != 0.0 || got.is_sign_negative() == exact.is_sign_negative()
        };
        if !right {
            return f64::INFINITY;
        }
        if !rounded.is_finite() {
            return 0.0;
        }
        // One over the ulp, 2^(150 - exponent).
        let exponent = u64::from(rounded.to_bits() >> 23 & 255).max(1);
        (f64::from(got) - exact).abs() * f64::from_bits((1023 + 150 - exponent) << 52)
    }

    impl Case {
        /// The largest error over bit patterns, and where it is.
        fn worst(&self, inputs: impl Iterator<Item = u32>) -> (f64, u32) {
            inputs.fold((0.0, 0), |worst, bits| {
                let x = f32::from_bits(bits);
                let e = error((self.ours)(x), (self.exact)(f64::from(x)));
                if e > worst.0 { (e, bits) } else { worst }
            })
        }

        fn listed(&self) -> f64 {
            let entry = ACCURACY.iter().find(|a| a.name == self.name);
            entry.map_or(0.0, |a| a.ulps)
        }

        fn check(&self, (ulps, bits): (f64, u32)) {
            let (name, listed) = (self.name, self.listed());
            println!("{name}: {ulps:.6} ulp at {bits:08x}, listed {listed}");
            assert!(ulps <= listed, "{name} is {ulps} ulp off at {bits:08x}");
        }

        fn exhaustive(&self) {
            const CHUNK: u64 = 1 << 22;
            let worst = (0..(1_u64 << 32) / CHUNK)
                .into_par_iter()
                .map(|c| self.worst((c * CHUNK..(c + 1) * CHUNK).map(|b| b as u32)))
                .reduce(|| (0.0, 0), |a, b| if b.0 > a.0 { b } else { a });
            self.check(worst);
        }
    }

    /// The 2,001 bit patterns, of each sign, around every place where a function changes its way.
    fn edges() -> impl Iterator<Item = u32> + Clone {
        const EDGES: [f32; 31] = [
            0.0,
            1.0 / 256.0,
            0.984_375,
            0.992_187_5,
            0.996_093_75,
            1e-45,
            f32::MIN_POSITIVE,
            1e-20,
            5.96e-8,
            0.346_573_6,
            0.4,
            0.5,
            consts::LN_2,
            0.7,
            consts::FRAC_PI_4,
            1.0,
            1.039_720_8,
            1.4,
            consts::FRAC_PI_2,
            consts::PI,
            16.635_532,
            20.0,
            60.0,
            87.336_54,
            88.722_84,
            89.0,
            103.278_93,
            103.972_08,
            104.0,
            f32::MAX,
            f32::NAN,
        ];
        EDGES.into_iter().flat_map(|x| {
            let around = (0..=2000_u32).map(move |d| (x.to_bits() + d).wrapping_sub(1000));
            around.flat_map(|b| [b, b ^ 0x8000_0000])
        })
    }

    #[test]
    fn every_function_is_within_its_listed_error_on_a_stride_and_at_the_edges() {
        let specials = [
            0x7f80_0000,
            0xff80_0000,
            0x7f80_0001,
            0xffff_ffff,
            0x7fff_ffff,
        ];
        cases().par_iter().for_each(|case| {
            let strided = (0..1_u64 << 32).step_by(4093).map(|b| b as u32);
            case.check(case.worst(strided.chain(edges()).chain(specials)));
        });
    }

    #[test]
    fn the_table_lists_every_function_and_nothing_above_one_ulp_but_what_is_narrowed() {
        assert_eq!(ACCURACY.len(), cases().len());
        for case in cases() {
            let listed = case.listed();
            // Both are rounded to 8 or 11 bits, the sigmoid after a product: 2^6 ulps are 2^-18 of one.
            let most = match case.name {
                "weight" => 64.0,
                "narrow_sigmoid" => 128.0,
                _ => 1.0,
            };
            assert!((0.5..=most).contains(&listed), "{}: {listed}", case.name);
        }
    }

    #[test]
    fn sine_and_cosine_are_the_parts_of_the_pair() {
        for bits in edges() {
            let x = f32::from_bits(bits);
            let (s, c) = ours::sin_cos(x);
            let (sine, cosine) = (ours::sin(x), ours::cos(x));
            assert_eq!(
                (s.to_bits(), c.to_bits()),
                (sine.to_bits(), cosine.to_bits())
            );
        }
    }

    #[test]
    fn the_measure_sees_wrong_results() {
        let over = |f: fn(f32) -> f32| case("exp", f, libm::exp).worst(edges()).0;
        assert!(over(|x| ours::exp(x).next_up().next_up()) > 1.0);
        assert!(over(|x| if x > 88.7 { f32::MAX } else { ours::exp(x) }) > 1.0);
        assert!(over(|x| if x.is_nan() { x } else { ours::exp(x) }) > 1.0);
        assert!(over(|x| if x < -103.97 { -0.0 } else { ours::exp(x) }) > 1.0);
        // The plain formula, whose denominator's rounding costs up to a whole ulp more.
        let plain = case("sigmoid", |x| 1.0 / (1.0 + ours::exp(-x)), sigmoid);
        let strided = (0..1_u64 << 32).step_by(4093).map(|b| b as u32);
        assert!(plain.worst(strided).0 > 1.0);
        let weights = |f: fn(f32) -> f32| case("weight", f, weight).worst(edges()).0;
        assert!(weights(|x| ours::weight(x) * (1.0 + 1e-5)) > 64.0);
        assert!(weights(|x| if x < 1.0 { ours::weight(x) } else { 1e-40 }) > 64.0);
        assert!(weights(|x| if x.is_nan() { x } else { ours::weight(x) }) > 64.0);
        let sigmoids = |f| {
            case("narrow_sigmoid", f, narrow_sigmoid_exact)
                .worst(edges())
                .0
        };
        assert!(sigmoids(|x| narrow_sigmoid(x) * (1.0 + 1e-5)) > 128.0);
        assert!(sigmoids(|x| narrow_sigmoid(if x > -80.0 { x } else { -80.0 })) > 128.0);
    }

    macro_rules! exhaustive {
        ($($test:ident: $index:literal;)*) => {$(
            #[test]
            #[ignore = "full run over all 2^32 inputs; cargo test --release -- --ignored exhaustive"]
            fn $test() {
                cases()[$index].exhaustive();
            }
        )*};
    }

    exhaustive! {
        exhaustive_exp: 0;
        exhaustive_log: 1;
        exhaustive_sigmoid: 2;
        exhaustive_softplus: 3;
        exhaustive_sin: 4;
        exhaustive_cos: 5;
        exhaustive_decay: 6;
        exhaustive_weight: 7;
        exhaustive_narrow_sigmoid: 8;
    }
}

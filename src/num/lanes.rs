//! Placeholder for the lane reductions until the num branch lands.
pub const LANES: usize = 256;
#[inline(always)]
pub fn lane_reduce(n: usize, f: impl Fn(usize, f32) -> f32) -> f32 {
    let mut acc = [0.0f32; LANES];
    for i in 0..n {
        acc[i % LANES] = f(i, acc[i % LANES]);
    }
    let mut w = LANES / 2;
    while w > 0 {
        for l in 0..w {
            acc[l] += acc[l + w];
        }
        w /= 2;
    }
    acc[0]
}
#[inline(always)]
pub fn lane_sum(r: &[f32]) -> f32 {
    lane_reduce(r.len(), |i, a| a + r[i])
}
#[inline(always)]
pub fn lane_sum_of_squares(r: &[f32]) -> f32 {
    lane_reduce(r.len(), |i, a| r[i].mul_add(r[i], a))
}
#[inline(always)]
pub fn lane_dot(x: &[f32], y: &[f32]) -> f32 {
    lane_reduce(x.len(), |i, a| x[i].mul_add(y[i], a))
}
#[inline(always)]
pub fn lane_max(r: &[f32]) -> f32 {
    r.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x))
}
pub fn square_sum_f64(r: &[f32]) -> f64 {
    let mut acc = [0.0f64; LANES];
    for (i, &x) in r.iter().enumerate() {
        acc[i % LANES] = (x as f64).mul_add(x as f64, acc[i % LANES]);
    }
    let mut w = LANES / 2;
    while w > 0 {
        for l in 0..w {
            acc[l] += acc[l + w];
        }
        w /= 2;
    }
    acc[0]
}

//! Attention of the tensor-core domains against its formulas, element by element, and beside f32.

use bitstep::num::softmax::{NO_REFERENCE, raise, row_statistic, score_factor, score_weight};
use bitstep::num::tensor_step::Kind;
use bitstep::op::attention::{
    Attention, AttentionDelta, AttentionGradKeyValue, AttentionGradQuery, AttentionShape, KEY_TILE,
    score_scale,
};
use bitstep::op::rope::Heads;
use bitstep::shape::{DType, Math};

use super::reference::lanes;
use super::runner::{Case, Numbers, Values, assert_bits, run};
use super::tensor::{KINDS, chain, relative_difference};

fn shape(
    batch: usize,
    seq_len: usize,
    [n_heads, n_kv_heads, head_dim]: [usize; 3],
) -> AttentionShape {
    AttentionShape {
        batch,
        seq_len,
        heads: Heads {
            n_heads,
            n_kv_heads,
            head_dim,
        },
    }
}

/// The columns of a head.
#[derive(Clone, Copy)]
enum Part {
    Query,
    Key,
    Value,
}

/// The operands of one shape as numbers, and where heads lie in them.
struct Plain<'a> {
    shape: AttentionShape,
    kind: Kind,
    qkv: &'a [f32],
    dout: &'a [f32],
}

impl Plain<'_> {
    /// A head of a row of `qkv`: the query's, or its key's or value's.
    fn part(&self, part: Part, token: usize, head: usize) -> &[f32] {
        let heads = &self.shape.heads;
        let shared = heads.n_heads + head / heads.group();
        let column = match part {
            Part::Query => head,
            Part::Key => shared,
            Part::Value => shared + heads.n_kv_heads,
        };
        &self.qkv[token * heads.columns() + column * heads.head_dim..][..heads.head_dim]
    }

    fn dout(&self, token: usize, head: usize) -> &[f32] {
        let d = self.shape.heads.head_dim;
        &self.dout[(token * self.shape.heads.n_heads + head) * d..][..d]
    }

    fn dot(&self, from: f32, a: &[f32], b: &[f32]) -> f32 {
        chain(self.kind, from, a.iter().copied().zip(b.iter().copied()))
    }

    fn score(&self, query: usize, key: usize, head: usize) -> f32 {
        self.dot(
            0.0,
            self.part(Part::Query, query, head),
            self.part(Part::Key, key, head),
        )
    }

    fn factor(&self) -> f32 {
        score_factor(self.shape.heads.head_dim)
    }

    /// `o` and the rows' statistic in f32.
    fn forward(&self) -> [Vec<f32>; 2] {
        let (seq_len, heads) = (self.shape.seq_len, self.shape.heads);
        let (mut o, mut lse) = (Vec::new(), Vec::new());
        for token in 0..self.shape.rows() {
            let (first, i) = (token / seq_len * seq_len, token % seq_len);
            for head in 0..heads.n_heads {
                let (mut reference, mut sums) = (NO_REFERENCE, [0.0_f32; 4]);
                let mut acc = vec![0.0_f32; heads.head_dim];
                for tile in (0..=i).step_by(KEY_TILE) {
                    let end = (tile + KEY_TILE).min(seq_len);
                    let visible = tile..end.min(i + 1);
                    let score = |j| self.score(token, first + j, head);
                    let greater = |m: f32, s: f32| if m.is_nan() || s <= m { m } else { s };
                    let top = visible.clone().map(score).fold(f32::NEG_INFINITY, greater);
                    let rescale = raise(&mut reference, top, self.factor());
                    let rescaled =
                        |sum: f32| rescale.map_or(sum, |r| sum.mul_add(r.factor, r.addend));
                    // Hidden keys of the tile are zeros in its chain.
                    let weight = |j| score_weight(score(j), self.factor(), reference);
                    let p: Vec<f32> = (tile..end)
                        .map(|j| if j <= i { weight(j) } else { 0.0 })
                        .collect();
                    sums = sums.map(rescaled);
                    for (j, p) in p[..visible.len()].iter().enumerate() {
                        sums[j / 2 % 4] += p;
                    }
                    for (d, acc) in acc.iter_mut().enumerate() {
                        let value = |j: usize| self.part(Part::Value, first + j, head)[d];
                        let pairs = (tile..end).map(|j| (p[j - tile], value(j)));
                        *acc = chain(self.kind, rescaled(*acc), pairs);
                    }
                }
                let sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
                o.extend(acc.iter().map(|a| a * (1.0 / sum)));
                lse.push(row_statistic(reference, sum));
            }
        }
        [o, lse]
    }

    /// `p` and `ds` of a pair; zeros for a hidden one.
    fn pair(&self, (i, j, head): (usize, usize, usize), lse: &[f32], delta: &[f32]) -> [f32; 2] {
        if j > i {
            return [0.0; 2];
        }
        let row = i * self.shape.heads.n_heads + head;
        let p = score_weight(self.score(i, j, head), self.factor(), lse[row]);
        let value = self.part(Part::Value, j, head);
        [p, self.dot(-delta[row], self.dout(i, head), value) * p]
    }

    /// `dqkv` in f32, every column.
    fn grad(&self, lse: &[f32], delta: &[f32]) -> Vec<f32> {
        let (seq_len, heads) = (self.shape.seq_len, self.shape.heads);
        let (d, scale) = (heads.head_dim, score_scale(heads.head_dim));
        let mut dqkv = vec![0.0_f32; self.qkv.len()];
        for token in 0..self.shape.rows() {
            let (first, at) = (token / seq_len * seq_len, token % seq_len);
            let end = first + (at / KEY_TILE * KEY_TILE + KEY_TILE).min(seq_len);
            let start = first + at / KEY_TILE * KEY_TILE;
            for head in 0..heads.n_heads {
                let ds: Vec<f32> = (first..end)
                    .map(|j| self.pair((token, j, head), lse, delta)[1])
                    .collect();
                for c in 0..d {
                    let pairs =
                        (first..end).map(|j| (ds[j - first], self.part(Part::Key, j, head)[c]));
                    let dq = chain(self.kind, 0.0, pairs);
                    dqkv[token * heads.columns() + head * d + c] = dq * scale;
                }
                let pairs: Vec<[f32; 2]> = (start..first + seq_len)
                    .map(|i| self.pair((i, token, head), lse, delta))
                    .collect();
                let shared = heads.n_heads + head / heads.group();
                for c in 0..d {
                    let key = token * heads.columns() + shared * d + c;
                    let value = key + heads.n_kv_heads * d;
                    let queries = start..first + seq_len;
                    let p = |i: usize| pairs[i - start][0];
                    let ds = |i: usize| pairs[i - start][1];
                    let dk = queries
                        .clone()
                        .map(|i| (ds(i), self.part(Part::Query, i, head)[c]));
                    dqkv[key] = chain(self.kind, dqkv[key], dk);
                    let dv = queries.map(|i| (p(i), self.dout(i, head)[c]));
                    dqkv[value] = chain(self.kind, dqkv[value], dv);
                }
            }
            let keys = token * heads.columns() + heads.query_columns();
            for dk in &mut dqkv[keys..][..heads.n_kv_heads * d] {
                *dk *= scale;
            }
        }
        dqkv
    }
}

/// Numbers as the storage of `math` holds them.
fn stored(math: Math, numbers: &[f32]) -> (Values, Vec<f32>) {
    let values = Values::stored(math.storage(), numbers);
    let wide = values.widened().f32s().to_vec();
    (values, wide)
}

fn check((math, kind): (Math, Kind), shape: AttentionShape, seed: u64) {
    let storage = math.storage();
    let case = Case::random(Attention { shape, math }, seed);
    let (qkv, wide_qkv) = stored(math, case.reads[0].widened().f32s());
    let mut plain = Plain {
        shape,
        kind,
        qkv: &wide_qkv,
        dout: &[],
    };
    let [o, lse] = plain.forward();
    let (o, wide_o) = stored(math, &o);
    assert_bits(&case, &[o.clone(), Values::F32(lse.clone())]);

    let case = Case::random(AttentionDelta { shape, math }, seed).with("o", o);
    let (dout, wide_dout) = (case.reads[0].clone(), case.reads[0].widened());
    plain.dout = wide_dout.f32s();
    let d = shape.heads.head_dim;
    let rows = plain.dout.chunks(d).zip(wide_o.chunks(d));
    let delta: Vec<f32> = rows
        .map(|(dout, o)| lanes(d, |i, acc| dout[i].mul_add(o[i], acc)))
        .collect();
    assert_bits(&case, &[Values::F32(delta.clone())]);

    let inputs = |case: Case| {
        case.with("qkv", qkv.clone())
            .with("dout", dout.clone())
            .with("lse", Values::F32(lse.clone()))
            .with("delta", Values::F32(delta.clone()))
    };
    let grad = plain.grad(&lse, &delta);
    let columns = shape.heads.columns();
    let is_query = |i: usize| i % columns < shape.heads.query_columns();
    let mixed = |before: &Values, written: &dyn Fn(usize) -> bool| {
        let before = before.widened();
        let element = |i: usize| {
            if written(i) {
                grad[i]
            } else {
                before.f32s()[i]
            }
        };
        Values::stored(storage, &(0..grad.len()).map(element).collect::<Vec<f32>>())
    };
    let case = inputs(Case::random(AttentionGradQuery { shape, math }, seed));
    let expected = mixed(&case.writes[0], &is_query);
    assert_bits(&case, &[expected]);
    let case = inputs(Case::random(AttentionGradKeyValue { shape, math }, seed));
    let expected = mixed(&case.writes[0], &|i| !is_query(i));
    assert_bits(&case, &[expected]);
}

#[test]
fn the_bits_are_those_of_the_formulas() {
    let shapes = [
        shape(1, 1, [1, 1, 2]),
        shape(2, 3, [4, 2, 16]),
        shape(2, 33, [4, 4, 6]),
        shape(1, 64, [2, 1, 32]),
        shape(2, 65, [2, 1, 18]),
        shape(1, 130, [2, 1, 10]),
    ];
    for (math, kind, _) in KINDS {
        for (seed, shape) in (1..).zip(shapes) {
            check((math, kind), shape, seed);
        }
    }
}

/// `o` and `dqkv` by the ops themselves.
fn attention(shape: AttentionShape, math: Math, [qkv, dout]: [&Values; 2]) -> [Values; 2] {
    let of = |values: &Values| Values::stored(math.storage(), values.f32s());
    let forward = Case::random(Attention { shape, math }, 0).with("qkv", of(qkv));
    let [o, lse]: [Values; 2] = run(&forward).try_into().expect("two outputs");
    let delta = Case::random(AttentionDelta { shape, math }, 0)
        .with("dout", of(dout))
        .with("o", o.clone());
    let delta = run(&delta).remove(0);
    let inputs = |case: Case| {
        case.with("qkv", of(qkv))
            .with("dout", of(dout))
            .with("lse", lse.clone())
            .with("delta", delta.clone())
    };
    let query = inputs(Case::random(AttentionGradQuery { shape, math }, 0));
    let dqkv = run(&query).remove(0);
    let rest = inputs(Case::random(AttentionGradKeyValue { shape, math }, 0)).with("dqkv", dqkv);
    [o, run(&rest).remove(0)]
}

/// Operands, probabilities, their gradients and results are rounded: eight roundings of the largest
/// element bound the difference, and less than a hundredth of one would mean that nothing was rounded.
#[test]
fn results_are_those_of_f32_within_the_rounding_of_the_storage() {
    let shape = shape(2, 70, [4, 2, 12]);
    let mut numbers = Numbers::new(31);
    let qkv = numbers.ordinary(shape.rows() * shape.heads.columns());
    let dout = numbers.ordinary(shape.rows() * shape.heads.query_columns());
    let exact = attention(shape, Math::F32, [&qkv, &dout]);
    assert_eq!(exact[0].dtype(), DType::F32);
    for (math, _, rounding) in KINDS {
        let found = attention(shape, math, [&qkv, &dout]);
        for (found, exact) in found.iter().zip(&exact) {
            let difference = relative_difference(found, exact);
            let range = 0.01 * rounding..=8.0 * rounding;
            assert!(range.contains(&difference), "{math}: {difference:e}");
        }
    }
}

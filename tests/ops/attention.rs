//! Attention against its formulas, element by element, and against finite differences; the mask.

use bitstep::error::DeviceError;
use bitstep::num;
use bitstep::op::attention::{
    Attention, AttentionDelta, AttentionGradKeyValue, AttentionGradQuery, AttentionShape, KEY_TILE,
    score_scale,
};
use bitstep::op::rope::Heads;
use bitstep::shape::Math;

use super::runner::{Case, Numbers, Values, assert_bits, devices, first_difference};

fn shape(batch: usize, seq_len: usize, heads: [usize; 3]) -> AttentionShape {
    let [n_heads, n_kv_heads, head_dim] = heads;
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

/// The formulas for one shape: `query`, `key` and `value` are the first element of a head of a row.
struct Plain<'a> {
    shape: AttentionShape,
    qkv: &'a [f32],
}

impl Plain<'_> {
    fn query(&self, token: usize, head: usize) -> usize {
        token * self.shape.heads.columns() + head * self.shape.heads.head_dim
    }

    fn key(&self, token: usize, head: usize) -> usize {
        let heads = &self.shape.heads;
        self.query(token, heads.n_heads + head / heads.group())
    }

    fn value(&self, token: usize, head: usize) -> usize {
        self.key(token, head) + self.shape.heads.n_kv_heads * self.shape.heads.head_dim
    }

    fn output(&self, token: usize, head: usize) -> usize {
        (token * self.shape.heads.n_heads + head) * self.shape.heads.head_dim
    }

    fn dot(&self, a: &[f32], b: &[f32]) -> f32 {
        let pairs = a.iter().zip(b).take(self.shape.heads.head_dim);
        pairs.fold(0.0, |acc, (a, b)| a.mul_add(*b, acc))
    }

    fn score(&self, query: usize, key: usize, head: usize) -> f32 {
        let q = &self.qkv[self.query(query, head)..];
        let k = &self.qkv[self.key(key, head)..];
        self.dot(q, k) * score_scale(self.shape.heads.head_dim)
    }

    /// Every (first token of the sequence, position, head).
    fn places(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let (seq_len, n_heads) = (self.shape.seq_len, self.shape.heads.n_heads);
        (0..self.shape.rows())
            .flat_map(move |t| (0..n_heads).map(move |h| (t / seq_len * seq_len, t % seq_len, h)))
    }

    fn forward(&self) -> [Vec<f32>; 2] {
        let mut o = vec![0.0; self.shape.rows() * self.shape.heads.query_columns()];
        let mut lse = vec![0.0; self.shape.rows() * self.shape.heads.n_heads];
        for (first, i, head) in self.places() {
            let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0_f32);
            let mut acc = vec![0.0_f32; self.shape.heads.head_dim];
            for tile in (0..=i).step_by(KEY_TILE) {
                let keys = tile..(tile + KEY_TILE).min(i + 1);
                let score = |j| self.score(first + i, first + j, head);
                let greater = |m: f32, s: f32| if s > m { s } else { m };
                let top = keys.clone().map(score).fold(max, greater);
                let factor = num::exp(max - top);
                sum *= factor;
                acc.iter_mut().for_each(|a| *a *= factor);
                for j in keys {
                    let p = num::exp(score(j) - top);
                    sum += p;
                    let value = &self.qkv[self.value(first + j, head)..];
                    for (a, v) in acc.iter_mut().zip(value) {
                        *a = p.mul_add(*v, *a);
                    }
                }
                max = top;
            }
            let at = self.output(first + i, head);
            for (o, a) in o[at..].iter_mut().zip(acc) {
                *o = a * (1.0 / sum);
            }
            lse[(first + i) * self.shape.heads.n_heads + head] = max + num::log(sum);
        }
        [o, lse]
    }

    fn delta(&self, dout: &[f32], o: &[f32]) -> Vec<f32> {
        let rows = dout
            .chunks(self.shape.heads.head_dim)
            .zip(o.chunks(self.shape.heads.head_dim));
        rows.map(|(dout, o)| {
            let mut lanes = [0.0_f32; 256];
            for (d, (x, y)) in dout.iter().zip(o).enumerate() {
                lanes[d % 256] = x.mul_add(*y, lanes[d % 256]);
            }
            for half in [128, 64, 32, 16, 8, 4, 2, 1] {
                for l in 0..half {
                    lanes[l] += lanes[l + half];
                }
            }
            lanes[0]
        })
        .collect()
    }

    /// `dqkv`, every column.
    fn grad(&self, dout: &[f32], lse: &[f32], delta: &[f32]) -> Vec<f32> {
        let (seq_len, heads) = (self.shape.seq_len, self.shape.heads);
        let scale = score_scale(heads.head_dim);
        let mut dqkv = vec![0.0_f32; self.qkv.len()];
        let add = |dqkv: &mut [f32], to: usize, weight: f32, from: &[f32]| {
            for d in 0..heads.head_dim {
                dqkv[to + d] = weight.mul_add(from[d], dqkv[to + d]);
            }
        };
        for sequence in 0..self.shape.batch {
            for head in 0..heads.n_heads {
                // Queries ascending for each key, and keys ascending for each query.
                for i in (0..seq_len).map(|i| sequence * seq_len + i) {
                    let row = i * heads.n_heads + head;
                    let dout = &dout[self.output(i, head)..];
                    for j in sequence * seq_len..=i {
                        let p = num::exp(self.score(i, j, head) - lse[row]);
                        let dp = self.dot(dout, &self.qkv[self.value(j, head)..]);
                        let ds = p * (dp - delta[row]);
                        let (query, key) = (self.query(i, head), self.key(j, head));
                        add(&mut dqkv, query, ds, &self.qkv[key..]);
                        add(&mut dqkv, key, ds, &self.qkv[query..]);
                        add(&mut dqkv, self.value(j, head), p, dout);
                    }
                }
            }
        }
        let rotated = heads.rotated() * heads.head_dim;
        for row in dqkv.chunks_mut(heads.columns()) {
            row[..rotated].iter_mut().for_each(|x| *x *= scale);
        }
        dqkv
    }
}

/// The output and `lse` of a device for given `qkv`.
fn forward_case(shape: AttentionShape, qkv: &[f32]) -> Case {
    Case::random(
        Attention {
            math: Math::F32,
            shape,
        },
        0,
    )
    .with("qkv", Values::F32(qkv.to_vec()))
}

/// Compares all four ops with the formulas, on every device.
fn check(shape: AttentionShape, qkv: Vec<f32>, seed: u64) {
    let plain = Plain { shape, qkv: &qkv };
    let [o, lse] = plain.forward();
    let expected = [Values::F32(o.clone()), Values::F32(lse.clone())];
    assert_bits(&forward_case(shape, &qkv), &expected);

    let case = Case::random(
        AttentionDelta {
            math: Math::F32,
            shape,
        },
        seed,
    )
    .with("o", Values::F32(o.clone()));
    let dout = case.reads[0].f32s().to_vec();
    let delta = plain.delta(&dout, &o);
    assert_bits(&case, &[Values::F32(delta.clone())]);

    let inputs = |case: Case| {
        case.with("qkv", Values::F32(qkv.clone()))
            .with("dout", Values::F32(dout.clone()))
            .with("lse", Values::F32(lse.clone()))
            .with("delta", Values::F32(delta.clone()))
    };
    let grad = plain.grad(&dout, &lse, &delta);
    let columns = shape.heads.columns();
    let is_query = |i: usize| i % columns < shape.heads.query_columns();
    let case = inputs(Case::random(
        AttentionGradQuery {
            math: Math::F32,
            shape,
        },
        seed,
    ));
    let before = case.writes[0].f32s();
    let expected = (0..grad.len()).map(|i| if is_query(i) { grad[i] } else { before[i] });
    assert_bits(&case, &[Values::F32(expected.collect())]);

    let case = inputs(Case::random(
        AttentionGradKeyValue {
            math: Math::F32,
            shape,
        },
        seed,
    ));
    let before = case.writes[0].f32s();
    let expected = (0..grad.len()).map(|i| if is_query(i) { before[i] } else { grad[i] });
    assert_bits(&case, &[Values::F32(expected.collect())]);

    // The columns that a pass writes are never read: with poison there, the bits are the same.
    let poisoned = Values::F32(vec![f32::NAN; grad.len()]);
    let case = case.with("dqkv", poisoned);
    let expected = (0..grad.len()).map(|i| if is_query(i) { f32::NAN } else { grad[i] });
    assert_bits(&case, &[Values::F32(expected.collect())]);
}

fn awkward(shape: &AttentionShape, seed: u64) -> Vec<f32> {
    let mut numbers = Numbers::new(seed);
    let n = shape.rows() * shape.heads.columns();
    (0..n).map(|_| numbers.awkward()).collect()
}

#[test]
fn the_bits_are_those_of_the_formulas() {
    let shapes = [
        shape(1, 1, [1, 1, 2]),
        shape(3, 1, [8, 1, 64]),
        shape(2, 2, [4, 2, 16]),
        shape(3, 31, [3, 1, 32]),
        shape(2, 33, [4, 4, 6]),
        shape(1, 64, [2, 1, 64]),
        shape(3, 65, [2, 2, 2]),
        shape(1, 65, [3, 3, 96]),
        shape(2, 65, [8, 1, 16]),
        shape(1, 130, [2, 1, 128]),
        shape(3, 130, [2, 1, 16]),
        shape(1, 130, [1, 1, 250]),
        shape(1, 130, [1, 1, 256]),
        shape(1, 200, [3, 1, 64]),
        shape(2, 200, [2, 2, 32]),
        shape(1, 200, [6, 2, 18]),
    ];
    for (seed, shape) in (1..).zip(shapes) {
        check(shape, awkward(&shape, seed), seed);
    }
}

#[test]
fn infinite_scores_and_values_follow_the_formulas() {
    let shape = shape(1, 70, [2, 1, 16]);
    for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX] {
        for place in [3, 40, 66] {
            let mut qkv = awkward(&shape, 7);
            // One element of the key and one of the value at this position.
            qkv[place * shape.heads.columns() + 2 * 16 + 5] = value;
            qkv[place * shape.heads.columns() + 3 * 16 + 9] = value;
            check(shape, qkv, 8);
        }
    }
}

/// Replaces the key and value heads from `position` on in the only sequence.
fn with_changed_keys(shape: &AttentionShape, qkv: &[f32], position: usize, x: f32) -> Vec<f32> {
    let (columns, queries) = (shape.heads.columns(), shape.heads.query_columns());
    let mut changed = qkv.to_vec();
    for row in changed.chunks_mut(columns).skip(position) {
        row[queries..].fill(x);
    }
    changed
}

#[test]
fn no_query_sees_a_later_key_or_value() {
    let every_length = (1..=130).flat_map(|n| [(n, n / 2), (n, n - 1), (n, n * 7 / 11)]);
    let every_position = (0..130).map(|position| (130, position));
    let long = [(1000, 2), (1000, 500), (1000, 999)];
    for (seq_len, position) in every_length.chain(every_position).chain(long) {
        let shape = shape(1, seq_len, [2, 1, 16]);
        let qkv = awkward(&shape, seq_len as u64);
        let columns = shape.heads.query_columns();
        // The widest path with each number of threads; the bits of the paths are compared above.
        for device in devices().iter().rev().take(3) {
            let before = device.run(&forward_case(shape, &qkv)).expect("runs");
            for x in [1e4, f32::NAN] {
                let changed = with_changed_keys(&shape, &qkv, position, x);
                let after = device.run(&forward_case(shape, &changed)).expect("runs");
                for (before, (after, stride)) in before.iter().zip(after.iter().zip([columns, 2])) {
                    let rows = |v: &Values| Values::F32(v.f32s()[..position * stride].to_vec());
                    let difference = first_difference(&rows(after), &rows(before));
                    assert_eq!(difference, None, "{seq_len} from {position}: {x}");
                }
                let own = |v: &[Values]| v[0].f32s()[position * columns];
                let seen = own(&after).is_nan() && !own(&before).is_nan();
                assert!(seen || !x.is_nan(), "{position} of {seq_len} sees itself");
            }
        }
    }
}

/// `Σ dout · o` in f64, straight from softmax's definition.
fn objective(shape: &AttentionShape, qkv: &[f64], dout: &[f32]) -> f64 {
    let heads = &shape.heads;
    let plain = Plain {
        shape: *shape,
        qkv: &[],
    };
    let dot = |a: usize, b: usize| {
        (0..heads.head_dim)
            .map(|d| qkv[a + d] * qkv[b + d])
            .sum::<f64>()
    };
    let mut total = 0.0;
    for (first, i, head) in plain.places() {
        let i = first + i;
        let weight = |j| {
            let score = dot(plain.query(i, head), plain.key(j, head));
            (score / (heads.head_dim as f64).sqrt()).exp()
        };
        let sum: f64 = (first..=i).map(weight).sum();
        for j in first..=i {
            let value = &qkv[plain.value(j, head)..];
            let dout = dout[plain.output(i, head)..].iter().zip(value);
            let product: f64 = dout
                .take(heads.head_dim)
                .map(|(d, v)| f64::from(*d) * v)
                .sum();
            total += weight(j) / sum * product;
        }
    }
    total
}

/// The gradient by the ops themselves, all columns.
fn gradient(shape: AttentionShape, qkv: &[f32], dout: &[f32]) -> Vec<f32> {
    let run = |case: &Case| devices()[0].run(case).expect("runs");
    let [o, lse] = run(&forward_case(shape, qkv))
        .try_into()
        .expect("two operands");
    let dout = Values::F32(dout.to_vec());
    let case = Case::random(
        AttentionDelta {
            math: Math::F32,
            shape,
        },
        0,
    );
    let delta = run(&case.with("dout", dout.clone()).with("o", o)).remove(0);
    let inputs = |case: Case| {
        case.with("qkv", Values::F32(qkv.to_vec()))
            .with("dout", dout.clone())
            .with("lse", lse.clone())
            .with("delta", delta.clone())
    };
    let query = inputs(Case::random(
        AttentionGradQuery {
            math: Math::F32,
            shape,
        },
        0,
    ));
    let dqkv = run(&query).remove(0);
    let rest = inputs(Case::random(
        AttentionGradKeyValue {
            math: Math::F32,
            shape,
        },
        0,
    ))
    .with("dqkv", dqkv);
    run(&rest).remove(0).f32s().to_vec()
}

#[test]
fn the_gradients_are_those_of_finite_differences() {
    for (seed, shape) in [(1, shape(2, 5, [4, 2, 4])), (2, shape(1, 67, [2, 1, 2]))] {
        let mut numbers = Numbers::new(seed);
        let qkv = numbers.ordinary(shape.rows() * shape.heads.columns());
        let dout = numbers.ordinary(shape.rows() * shape.heads.query_columns());
        let (qkv, dout) = (qkv.f32s(), dout.f32s());
        let found = gradient(shape, qkv, dout);
        let mut wide: Vec<f64> = qkv.iter().map(|&x| f64::from(x)).collect();
        for i in 0..wide.len() {
            let (x, h) = (wide[i], 1e-4);
            let mut at = |x| {
                wide[i] = x;
                objective(&shape, &wide, dout)
            };
            let expected = (at(x + h) - at(x - h)) / (2.0 * h);
            at(x);
            let error = (f64::from(found[i]) - expected).abs();
            assert!(error < 2e-6, "{i}: {} instead of {expected}", found[i]);
        }
    }
}

#[test]
fn operands_of_another_size_are_refused() {
    let shape = shape(2, 3, [4, 2, 4]);
    let cases = [
        (
            Case::random(
                Attention {
                    math: Math::F32,
                    shape,
                },
                1,
            ),
            ["qkv", "o", "lse"].as_slice(),
        ),
        (
            Case::random(
                AttentionDelta {
                    math: Math::F32,
                    shape,
                },
                1,
            ),
            &["dout", "o", "delta"],
        ),
        (
            Case::random(
                AttentionGradQuery {
                    math: Math::F32,
                    shape,
                },
                1,
            ),
            &["qkv", "dout", "lse", "delta", "dqkv"],
        ),
        (
            Case::random(
                AttentionGradKeyValue {
                    math: Math::F32,
                    shape,
                },
                1,
            ),
            &["qkv", "dout", "lse", "delta", "dqkv"],
        ),
    ];
    for (case, operands) in &cases {
        for operand in operands.iter().copied() {
            for n in [1, 23, 1000] {
                let refused = devices()[0].run(&case.clone().resized(operand, n)).err();
                let expected = matches!(
                    refused,
                    Some(DeviceError::OperandSize { operand: name, found, .. })
                        if name == operand && found == n
                );
                assert!(expected, "{operand} of {n}: {refused:?}");
            }
        }
    }
}

#[test]
fn heads_that_cannot_be_shared_are_refused() {
    let mut broken = shape(1, 2, [3, 2, 4]);
    for (n_heads, n_kv_heads, head_dim) in [(3, 2, 4), (2, 0, 4), (0, 1, 4), (2, 1, 0)] {
        broken.heads = Heads {
            n_heads,
            n_kv_heads,
            head_dim,
        };
        // No operand is empty, so that only the heads are at fault.
        let case = ["qkv", "o", "lse"].into_iter().fold(
            Case::random(
                Attention {
                    math: Math::F32,
                    shape: broken,
                },
                1,
            ),
            |case, operand| case.resized(operand, 8),
        );
        let refused = devices()[0].run(&case).err();
        let expected = matches!(
            refused,
            Some(DeviceError::OperandSize { operand, .. }) if operand.starts_with("heads: ")
        );
        assert!(expected, "{refused:?}");
    }
}

//! Which provider serves each matrix product: the engine's own kernel, or an admitted library algorithm.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::gemm::{ALIGNMENT, Algorithm, Lt, LtShape};
use crate::error::DeviceError;
use crate::layout::{PlacedCall, Region};
use crate::op::matmul::MatmulGradWeight;
use crate::op::{Op, Store};
use crate::shape::{DType, Math};

/// Which providers may serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmChoice {
    /// The engine's own kernels alone.
    Own,
    /// The fastest of the engine's kernels and the library's admitted algorithms.
    Auto,
}

impl FromStr for GemmChoice {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        match text {
            "own" => Ok(GemmChoice::Own),
            "auto" => Ok(GemmChoice::Auto),
            found => Err(DeviceError::UnknownGemm {
                found: found.to_owned(),
            }),
        }
    }
}

/// What serves one product.
#[derive(Clone)]
pub enum Provider {
    Own,
    Library(Algorithm),
}

impl Provider {
    /// The provider as the execution section lists it.
    pub fn describe(&self) -> String {
        match self {
            Provider::Own => "own".into(),
            Provider::Library(algorithm) => algorithm.describe(),
        }
    }
}

/// A product the library can compute: its shape, operands, and whether its output is a batch of pieces
/// that the engine folds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LibraryProduct {
    pub shape: LtShape,
    pub a: Region,
    pub b: Region,
    pub bias: Option<Region>,
    /// Where the product goes; `None` for pieces, which go to the workspace.
    pub d: Option<Region>,
}

/// The pinned providers of one backend.
pub struct Products {
    pub choice: GemmChoice,
    pub lt: Option<Lt>,
    pinned: Mutex<Pinned>,
}

/// The table of pinned providers, and the hash over it, which changes when the table does.
struct Pinned {
    table: BTreeMap<String, Provider>,
    fingerprint: blake3::Hash,
}

impl Pinned {
    /// A hash over the providers of the keys that `covers` admits.
    fn hash(&self, covers: impl Fn(&str) -> bool) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for (key, provider) in self.table.iter().filter(|(key, _)| covers(key)) {
            hasher.update(key.as_bytes());
            hasher.update(provider.describe().as_bytes());
        }
        hasher.finalize()
    }
}

impl Default for Pinned {
    fn default() -> Self {
        Pinned {
            table: BTreeMap::new(),
            fingerprint: blake3::Hasher::new().finalize(),
        }
    }
}

impl Products {
    /// Nothing pinned yet.
    pub fn new(choice: GemmChoice, lt: Option<Lt>) -> Self {
        Products {
            choice,
            lt,
            pinned: Mutex::default(),
        }
    }

    fn locked(&self) -> MutexGuard<'_, Pinned> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a product is pinned under: its op and the alignment of its operands.
    pub fn key(call: &PlacedCall) -> String {
        let aligned = if is_aligned(call) {
            "aligned"
        } else {
            "unaligned"
        };
        format!("{} {aligned}", call.call.op)
    }

    /// Whether a call adds its product to what its output holds.
    pub fn adds(call: &PlacedCall) -> bool {
        match &call.call.op {
            Op::MatmulGradWeight(op) => op.store == Store::Add,
            Op::LoraDownGradInput(op) => op.store == Store::Add,
            _ => false,
        }
    }

    /// The provider pinned for a call.
    pub fn pinned(&self, call: &PlacedCall) -> Option<Provider> {
        self.locked().table.get(&Self::key(call)).cloned()
    }

    /// Pins a provider for a call.
    pub fn pin(&self, call: &PlacedCall, provider: Provider) {
        let mut pinned = self.locked();
        pinned.table.insert(Self::key(call), provider);
        pinned.fingerprint = pinned.hash(|_| true);
    }

    /// A hash over everything pinned. It is kept up to date by [`Products::pin`], so asking for it costs
    /// nothing.
    pub fn fingerprint(&self) -> blake3::Hash {
        self.locked().fingerprint
    }

    /// A hash over what is pinned for some calls, by their sorted keys; part of a graph's identity.
    pub fn fingerprint_of(&self, keys: &[String]) -> blake3::Hash {
        let covered = |key: &str| keys.binary_search_by(|k| k.as_str().cmp(key)).is_ok();
        self.locked().hash(covered)
    }
}

/// Whether every operand starts at a multiple of 16 bytes.
fn is_aligned(call: &PlacedCall) -> bool {
    let mut regions = call.reads.iter().chain(&call.writes);
    regions.all(|region| region.offset.is_multiple_of(16))
}

/// Bytes that the library may take the operands' addresses to be a multiple of. Products of 16 bits may read
/// a tensor's copy, which lies at half the offset of the tensor itself.
fn alignment(call: &PlacedCall, math: Math) -> u32 {
    match (is_aligned(call), math) {
        (true, Math::F32) => ALIGNMENT,
        (true, _) => 16,
        (false, _) => math.storage().size() as u32,
    }
}

/// The library's form of a product; `None` where it has none with the contract's bits: pieces of
/// different lengths.
///
/// The library is column-major, so a row-major matrix is its own transpose there: the weight or the
/// layer's input comes first, and the output's columns are its rows.
pub fn library_product(call: &PlacedCall) -> Option<LibraryProduct> {
    let (a, b) = (*call.reads.get(1)?, *call.reads.first()?);
    let math = call.call.op.rule().math();
    let mut bias = None;
    let mut d = Some(*call.writes.first()?);
    let mut shape = match &call.call.op {
        Op::Matmul(op) => {
            bias = if op.bias {
                Some(*call.reads.get(2)?)
            } else {
                None
            };
            LtShape {
                transpose_a: true,
                bias: op.bias,
                ..plain(
                    math,
                    [op.n_out, op.rows, op.n_in],
                    [op.n_in, op.n_in, op.n_out],
                )
            }
        }
        Op::MatmulGradInput(op) => plain(
            math,
            [op.n_in, op.rows, op.n_out],
            [op.n_in, op.n_out, op.n_in],
        ),
        Op::MatmulGradWeight(op) => {
            let shape = weight_gradient(op)?;
            d = d.filter(|_| shape.batch == 1);
            shape
        }
        Op::LoraDown(op) => LtShape {
            transpose_a: true,
            ..plain(
                math,
                [op.ranks, op.rows, op.n_in],
                [op.n_in, op.n_in, op.ranks],
            )
        },
        Op::LoraDownGradInput(op) => LtShape {
            add: op.store == Store::Add,
            ..plain(
                math,
                [op.n_in, op.rows, op.ranks],
                [op.n_in, op.ranks, op.n_in],
            )
        },
        _ => return None,
    };
    shape.alignment = alignment(call, math);
    Some(LibraryProduct {
        shape,
        a,
        b,
        bias,
        d,
    })
}

/// The library's form of a weight gradient: a batch of pieces, where all have one length.
fn weight_gradient(op: &MatmulGradWeight) -> Option<LtShape> {
    let sum = op.sum;
    let even = sum.tokens.is_multiple_of(sum.grain) && sum.grain.is_multiple_of(sum.piece);
    if !even {
        return None;
    }
    let batch = sum.tokens / sum.piece;
    Some(LtShape {
        transpose_b: true,
        output: DType::F32,
        // What folds pieces adds their sum.
        add: op.store == Store::Add && batch == 1,
        batch,
        strides: [
            sum.piece * op.n_in,
            sum.piece * op.n_out,
            op.n_in * op.n_out,
        ],
        ..plain(
            op.math,
            [op.n_in, op.n_out, sum.piece],
            [op.n_in, op.n_out, op.n_in],
        )
    })
}

/// One product of sizes m, n, k with the leading dimensions of A, B and D, nothing transposed, everything
/// stored as the domain stores activations.
fn plain(math: Math, [m, n, k]: [usize; 3], [lda, ldb, ldd]: [usize; 3]) -> LtShape {
    LtShape {
        m,
        n,
        k,
        transpose_a: false,
        transpose_b: false,
        lda,
        ldb,
        ldd,
        bias: false,
        math,
        output: math.storage(),
        add: false,
        alignment: ALIGNMENT,
        batch: 1,
        strides: [0; 3],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::tree::TokenSum;
    use crate::op::matmul::{Matmul, MatmulGradInput};
    use crate::op::{OpCall, Slot};

    fn product(rows: usize) -> PlacedCall {
        let region = Region {
            offset: 0,
            bytes: 0,
        };
        PlacedCall {
            call: OpCall {
                op: Matmul {
                    math: crate::shape::Math::F32,
                    rows,
                    n_in: 4,
                    n_out: 4,
                    bias: false,
                }
                .into(),
                reads: vec![Slot(0), Slot(1)],
                writes: vec![Slot(2)],
            },
            reads: vec![region; 2],
            writes: vec![region],
        }
    }

    fn shape_of(op: impl Into<Op>, offset: usize) -> LtShape {
        let region = Region { offset, bytes: 0 };
        let call = PlacedCall {
            call: OpCall {
                op: op.into(),
                reads: Vec::new(),
                writes: Vec::new(),
            },
            reads: vec![region; 3],
            writes: vec![region],
        };
        library_product(&call).expect("a form").shape
    }

    #[test]
    fn outputs_are_stored_as_the_domain_says_and_weight_gradients_in_f32() {
        for math in Math::ALL {
            let forward = Matmul {
                math,
                rows: 64,
                n_in: 32,
                n_out: 16,
                bias: true,
            };
            let shape = shape_of(forward, 0);
            assert_eq!((shape.math, shape.output), (math, math.storage()));
            assert!(shape.bias);
            let weight = MatmulGradWeight {
                math,
                n_in: 32,
                n_out: 16,
                sum: TokenSum {
                    tokens: 64,
                    grain: 64,
                    piece: 16,
                },
                store: Store::Assign,
            };
            let shape = shape_of(weight.clone(), 0);
            assert_eq!((shape.math, shape.output), (math, DType::F32));
            assert_eq!((shape.batch, shape.k), (4, 16));
            // Pieces are added when they are folded; one piece is added by the library.
            for (piece, added) in [(16, false), (64, true)] {
                let mut adding = weight.clone();
                (adding.store, adding.sum.piece) = (Store::Add, piece);
                assert_eq!(shape_of(adding, 0).add, added);
            }
        }
    }

    #[test]
    fn the_library_is_told_how_operands_are_aligned() {
        let at = |math, offset| {
            let op = MatmulGradInput {
                math,
                rows: 8,
                n_in: 8,
                n_out: 8,
            };
            shape_of(op, offset).alignment
        };
        assert_eq!(at(Math::F32, 256), 256);
        assert_eq!(at(Math::F32, 4), 4);
        assert_eq!(at(Math::Tf32, 256), 16);
        assert_eq!(at(Math::Bf16, 128), 16);
        assert_eq!(at(Math::F16, 8), 2);
    }

    #[test]
    fn the_fingerprint_follows_what_is_pinned() {
        let products = Products::new(GemmChoice::Auto, None);
        let other = Products::new(GemmChoice::Auto, None);
        let [none, one] = [0, 1].map(|rows| {
            let before = products.fingerprint();
            products.pin(&product(1 + rows), Provider::Own);
            assert_ne!(products.fingerprint(), before, "{rows}");
            before
        });
        assert_eq!(none, other.fingerprint());
        other.pin(&product(1), Provider::Own);
        assert_eq!(one, other.fingerprint());
    }

    #[test]
    fn a_graph_depends_on_its_own_products_alone() {
        let products = Products::new(GemmChoice::Auto, None);
        products.pin(&product(1), Provider::Own);
        let keys = [Products::key(&product(1)), Products::key(&product(2))];
        let before = products.fingerprint_of(&keys);
        products.pin(&product(3), Provider::Own);
        assert_eq!(products.fingerprint_of(&keys), before);
        products.pin(&product(2), Provider::Own);
        assert_ne!(products.fingerprint_of(&keys), before);
    }
}

//! Which provider serves each matrix product: the engine's own kernel, or an admitted library algorithm.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::gemm::{Algorithm, Lt, LtShape};
use crate::error::DeviceError;
use crate::layout::{PlacedCall, Region};
use crate::op::{Op, Store};

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
    pinned: Mutex<BTreeMap<String, Provider>>,
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

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Provider>> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a product is pinned under: its op and the alignment of its operands.
    pub fn key(call: &PlacedCall) -> String {
        let aligned = call
            .reads
            .iter()
            .chain(&call.writes)
            .all(|r| r.offset % 16 == 0);
        format!(
            "{} {}",
            call.call.op,
            if aligned { "aligned" } else { "unaligned" }
        )
    }

    /// The provider pinned for a call.
    pub fn pinned(&self, call: &PlacedCall) -> Option<Provider> {
        self.table().get(&Self::key(call)).cloned()
    }

    /// Pins a provider for a call.
    pub fn pin(&self, call: &PlacedCall, provider: Provider) {
        self.table().insert(Self::key(call), provider);
    }

    /// A hash over everything pinned; part of a graph's identity.
    pub fn fingerprint(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for (key, provider) in self.table().iter() {
            hasher.update(key.as_bytes());
            hasher.update(provider.describe().as_bytes());
        }
        hasher.finalize()
    }
}

/// The library's form of a product; `None` where it has none with the contract's bits: a sum that adds
/// to its output, or pieces of different lengths.
///
/// The library is column-major, so a row-major matrix is its own transpose there: the weight or the
/// layer's input comes first, and the output's columns are its rows.
pub fn library_product(call: &PlacedCall) -> Option<LibraryProduct> {
    let (a, b) = (*call.reads.get(1)?, *call.reads.first()?);
    let mut bias = None;
    let mut d = Some(*call.writes.first()?);
    let shape = match &call.call.op {
        Op::Matmul(op) => {
            bias = if op.bias {
                Some(*call.reads.get(2)?)
            } else {
                None
            };
            LtShape {
                transpose_a: true,
                bias: op.bias,
                ..plain([op.n_out, op.rows, op.n_in], [op.n_in, op.n_in, op.n_out])
            }
        }
        Op::MatmulGradInput(op) => {
            plain([op.n_in, op.rows, op.n_out], [op.n_in, op.n_out, op.n_in])
        }
        Op::MatmulGradWeight(op) => {
            let sum = op.sum;
            let even = sum.tokens.is_multiple_of(sum.grain) && sum.grain.is_multiple_of(sum.piece);
            if op.store == Store::Add || !even {
                return None;
            }
            let batch = sum.tokens / sum.piece;
            d = d.filter(|_| batch == 1);
            LtShape {
                transpose_b: true,
                batch,
                strides: [
                    sum.piece * op.n_in,
                    sum.piece * op.n_out,
                    op.n_in * op.n_out,
                ],
                ..plain([op.n_in, op.n_out, sum.piece], [op.n_in, op.n_out, op.n_in])
            }
        }
        _ => return None,
    };
    Some(LibraryProduct {
        shape,
        a,
        b,
        bias,
        d,
    })
}

/// One product of sizes m, n, k with the leading dimensions of A, B and D, nothing transposed.
fn plain([m, n, k]: [usize; 3], [lda, ldb, ldd]: [usize; 3]) -> LtShape {
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
        batch: 1,
        strides: [0; 3],
    }
}

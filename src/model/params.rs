//! The parameters of a model: named tensors in groups whose members lie side by side.
//!
//! A group is one matrix to the program (the query, key and value projections are one product) and
//! several tensors to everyone else: files, digests, reports.

use crate::num::nf4::Quantisation;
use crate::shape::Shape;

/// How a parameter starts when it is not read from a folder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal numbers with mean 0 and this standard deviation, from Philox.
    Normal {
        std: f32,
    },
    /// Uniform numbers in `[-bound, bound)`, from Philox.
    Uniform {
        bound: f32,
    },
    Ones,
    Zeros,
    /// `log(i + 1)` in column `i`, of the `libm` crate in f64, rounded once.
    LogOfColumn,
    /// `x` such that `softplus(x)` is between `low` and `high`, uniformly in its logarithm: with a uniform
    /// `r` from Philox, `step = exp(r · (log high - log low) + log low)` and `x = step + log(-expm1(-step))`,
    /// of the `libm` crate in f64, rounded once.
    StepBias {
        low: f64,
        high: f64,
    },
}

/// Whether a group is trained and whether weight decay applies to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Training {
    /// Trained, with weight decay: tensors of two or more dimensions.
    Decayed,
    /// Trained, without weight decay.
    Undecayed,
    /// Never changed.
    Frozen,
    /// Never changed and read by products alone, so it is stored as they read it.
    FrozenProduct,
    /// Never changed, and stored as NF4.
    Packed(Quantisation),
}

/// What reads a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// Products, in their own storage, among others perhaps.
    Products,
    /// Other ops alone, which read it as f32: norms, biases, an embedding that is no head.
    Others,
}

/// One named tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    pub name: String,
    pub shape: Shape,
    pub init: Init,
}

/// Tensors that lie side by side, in order, without padding between them.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamGroup {
    /// The name under which the program finds the whole group.
    pub name: String,
    pub tensors: Vec<ParamSpec>,
    pub training: Training,
    pub reader: Reader,
}

impl Training {
    fn of(matrix: bool) -> Self {
        if matrix {
            Training::Decayed
        } else {
            Training::Undecayed
        }
    }
}

impl Reader {
    fn of(matrix: bool) -> Self {
        if matrix {
            Reader::Products
        } else {
            Reader::Others
        }
    }
}

impl ParamGroup {
    /// A group of one tensor, named after it.
    pub fn single(name: impl Into<String>, shape: impl Into<Shape>, init: Init) -> Self {
        let (name, shape) = (name.into(), shape.into());
        let matrix = shape.dims().len() >= 2;
        ParamGroup {
            tensors: vec![ParamSpec {
                name: name.clone(),
                shape,
                init,
            }],
            name,
            training: Training::of(matrix),
            reader: Reader::of(matrix),
        }
    }

    /// Several tensors as one; their outermost dimensions are concatenated.
    pub fn fused(name: impl Into<String>, tensors: Vec<ParamSpec>) -> Self {
        let matrices = tensors.iter().all(|t| t.shape.dims().len() >= 2);
        ParamGroup {
            name: name.into(),
            tensors,
            training: Training::of(matrices),
            reader: Reader::of(matrices),
        }
    }

    /// The group, which no product reads.
    pub fn outside_products(mut self) -> Self {
        self.reader = Reader::Others;
        self
    }

    /// Elements of all tensors.
    pub fn elements(&self) -> usize {
        self.tensors.iter().map(|t| t.shape.elements()).sum()
    }

    /// The shape of the whole group.
    pub fn shape(&self) -> Shape {
        let rows = self
            .tensors
            .iter()
            .map(|t| t.shape.dims().first().copied().unwrap_or(1))
            .sum();
        let mut dims = vec![rows];
        if let Some(first) = self.tensors.first() {
            dims.extend(first.shape.dims().iter().skip(1));
        }
        Shape::new(dims)
    }
}

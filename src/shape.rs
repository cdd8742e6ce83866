//! Element types, shapes and the description of one tensor.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE-754 binary32.
    F32,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// IEEE-754 binary16.
    F16,
    /// IEEE-754 binary64; used for the squares of the gradient norm.
    F64,
    /// Signed 32-bit integer; token ids and targets.
    I32,
    /// Unsigned 32-bit integer; counters and flags.
    U32,
    /// One byte; packed 4-bit weights.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::U8 => 1,
        }
    }

    /// The lower-case name used in manifests and recipes.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::F64 => "f64",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How the products of a program are computed, and with it how its activations are stored: the numeric
/// domain, as an attribute of ops.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Math {
    /// Chains of fused multiply-adds in binary32.
    #[default]
    F32,
    /// Chains of tensor-core steps over operands rounded to tf32; everything is stored in binary32.
    Tf32,
    /// Chains of tensor-core steps over operands stored as bf16.
    Bf16,
    /// Chains of tensor-core steps over operands stored as f16, with a loss scale.
    F16,
}

impl Math {
    /// Every kind.
    pub const ALL: [Math; 4] = [Math::F32, Math::Tf32, Math::Bf16, Math::F16];

    /// What the operands of products, and the activations between them, are stored as.
    pub const fn storage(self) -> DType {
        match self {
            Math::F32 | Math::Tf32 => DType::F32,
            Math::Bf16 => DType::Bf16,
            Math::F16 => DType::F16,
        }
    }

    /// Whether this is plain binary32.
    pub const fn is_f32(&self) -> bool {
        matches!(self, Math::F32)
    }

    /// Whether gradients carry a loss scale.
    pub const fn scales_loss(self) -> bool {
        matches!(self, Math::F16)
    }

    /// The name of its numeric domain.
    pub const fn domain(self) -> &'static str {
        match self {
            Math::F32 => "f32",
            Math::Tf32 => "tf32.sm90",
            Math::Bf16 => "bf16.sm90",
            Math::F16 => "f16.sm90",
        }
    }

    /// The kind whose domain has this name.
    pub fn of_domain(name: &str) -> Option<Math> {
        Math::ALL.into_iter().find(|math| math.domain() == name)
    }

    /// The lower-case name used in manifests and recipes.
    pub const fn name(self) -> &'static str {
        match self {
            Math::F32 => "f32",
            Math::Tf32 => "tf32",
            Math::Bf16 => "bf16",
            Math::F16 => "f16",
        }
    }
}

impl fmt::Display for Math {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The dimensions of a tensor, outermost first, row-major.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Shape(Vec<usize>);

impl Shape {
    /// A shape from its dimensions.
    pub fn new(dims: impl Into<Vec<usize>>) -> Self {
        Shape(dims.into())
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// The number of elements; 1 for a scalar.
    pub fn elements(&self) -> usize {
        self.0.iter().product()
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape(dims.to_vec())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[")?;
        for (i, d) in self.0.iter().enumerate() {
            if i > 0 {
                write!(f, ",")?;
            }
            write!(f, "{d}")?;
        }
        write!(f, "]")
    }
}

/// What a tensor is for. The role decides who may write it and how long it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A weight the optimizer changes.
    Param,
    /// A weight nothing changes: the base under an adapter.
    Frozen,
    /// The gradient of the loss with respect to a parameter.
    Grad,
    /// A partial sum of gradients or losses while passes are accumulated.
    Window,
    /// AdamW's running mean of the gradient.
    Moment1,
    /// AdamW's running mean of the squared gradient.
    Moment2,
    /// State that a step hands to the next one, apart from weights.
    Carried,
    /// Computed from parameters or from the configuration, never trained: rotary tables.
    Derived,
    /// What the caller writes before each step: token ids, targets, weights.
    Input,
    /// The per-step values, written before each step.
    Scalars,
    /// What the step reports: loss, gradient norm, flags.
    Report,
    /// Made by forward, read by backward.
    Activation,
    /// Lives inside one call or between neighbouring calls.
    Scratch,
}

impl Role {
    /// Every role, in the order reports list them.
    pub const ALL: [Role; 13] = [
        Role::Param,
        Role::Frozen,
        Role::Grad,
        Role::Window,
        Role::Moment1,
        Role::Moment2,
        Role::Carried,
        Role::Derived,
        Role::Input,
        Role::Scalars,
        Role::Report,
        Role::Activation,
        Role::Scratch,
    ];

    /// The lower-case name used in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Param => "param",
            Role::Frozen => "frozen",
            Role::Grad => "grad",
            Role::Window => "window",
            Role::Moment1 => "moment1",
            Role::Moment2 => "moment2",
            Role::Carried => "carried",
            Role::Derived => "derived",
            Role::Input => "input",
            Role::Scalars => "scalars",
            Role::Report => "report",
            Role::Activation => "activation",
            Role::Scratch => "scratch",
        }
    }

    /// Whether the bytes must survive from one step to the next.
    pub const fn persistent(self) -> bool {
        !matches!(self, Role::Activation | Role::Scratch)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One tensor of the step: its name, shape, element type and role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    pub name: String,
    pub shape: Shape,
    pub dtype: DType,
    pub role: Role,
}

impl TensorSpec {
    /// A tensor description.
    pub fn new(name: impl Into<String>, shape: impl Into<Shape>, dtype: DType, role: Role) -> Self {
        TensorSpec {
            name: name.into(),
            shape: shape.into(),
            dtype,
            role,
        }
    }

    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.size()
    }
}

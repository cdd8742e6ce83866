//! Runs one op with given operands on every backend and compares bits.
//!
//! A [`Case`] is an op and the contents of its operands; [`assert_bits`] runs it on every entry of
//! [`devices`]. Operands that an op writes without reading hold NaN (all ones for integers) before
//! the call, so a place that the op forgets shows.

use std::sync::OnceLock;

use bitstep::backend::Backend;
use bitstep::cpu::CpuBackend;
use bitstep::cpu::context::CpuContext;
use bitstep::cpu::simd::SimdPath;
use bitstep::error::DeviceError;
use bitstep::layout::{Layout, PlacedCall, Region};
use bitstep::op::clip::LossScaling;
use bitstep::op::{Access, Op, OpCall, Operand, Slot};
use bitstep::program::SlotTable;
use bitstep::shape::{DType, Math, Role, TensorSpec};

/// The contents of one operand.
#[derive(Clone, Debug)]
pub enum Values {
    F32(Vec<f32>),
    F64(Vec<f64>),
    I32(Vec<i32>),
    U32(Vec<u32>),
    /// Bits.
    Bf16(Vec<u16>),
    /// Bits.
    F16(Vec<u16>),
    U8(Vec<u8>),
}

impl Values {
    /// Numbers stored as `dtype`, each rounded once.
    pub fn stored(dtype: DType, numbers: &[f32]) -> Self {
        let bf16 = |&x: &f32| half::bf16::from_f32(x).to_bits();
        let f16 = |&x: &f32| half::f16::from_f32(x).to_bits();
        match dtype {
            DType::F32 => Values::F32(numbers.to_vec()),
            DType::Bf16 => Values::Bf16(numbers.iter().map(bf16).collect()),
            DType::F16 => Values::F16(numbers.iter().map(f16).collect()),
            other => panic!("no numbers are stored as {other}"),
        }
    }

    /// Narrow numbers as f32; other values as they are.
    pub fn widened(&self) -> Self {
        let bf16 = |&b: &u16| half::bf16::from_bits(b).to_f32();
        let f16 = |&b: &u16| half::f16::from_bits(b).to_f32();
        match self {
            Values::Bf16(v) => Values::F32(v.iter().map(bf16).collect()),
            Values::F16(v) => Values::F32(v.iter().map(f16).collect()),
            other => other.clone(),
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Values::F32(_) => DType::F32,
            Values::F64(_) => DType::F64,
            Values::I32(_) => DType::I32,
            Values::U32(_) => DType::U32,
            Values::Bf16(_) => DType::Bf16,
            Values::F16(_) => DType::F16,
            Values::U8(_) => DType::U8,
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.bytes().len() / self.dtype().size()
    }

    /// The bytes as the arena holds them.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Values::F32(v) => bytemuck::cast_slice(v),
            Values::F64(v) => bytemuck::cast_slice(v),
            Values::I32(v) => bytemuck::cast_slice(v),
            Values::U32(v) => bytemuck::cast_slice(v),
            Values::Bf16(v) | Values::F16(v) => bytemuck::cast_slice(v),
            Values::U8(v) => v,
        }
    }

    /// The elements of an f32 operand.
    pub fn f32s(&self) -> &[f32] {
        match self {
            Values::F32(v) => v,
            other => panic!("expected f32, found {}", other.dtype()),
        }
    }

    /// The elements of an i32 operand.
    pub fn i32s(&self) -> &[i32] {
        match self {
            Values::I32(v) => v,
            other => panic!("expected i32, found {}", other.dtype()),
        }
    }

    fn from_bytes(dtype: DType, bytes: &[u8]) -> Self {
        match dtype {
            DType::F32 => Values::F32(elements(bytes)),
            DType::F64 => Values::F64(elements(bytes)),
            DType::I32 => Values::I32(elements(bytes)),
            DType::U32 => Values::U32(elements(bytes)),
            DType::Bf16 => Values::Bf16(elements(bytes)),
            DType::F16 => Values::F16(elements(bytes)),
            DType::U8 => Values::U8(bytes.to_vec()),
        }
    }

    fn random(numbers: &mut Numbers, dtype: DType, n: usize) -> Self {
        match dtype {
            DType::F32 => Values::F32((0..n).map(|_| numbers.awkward()).collect()),
            DType::Bf16 | DType::F16 => {
                let wide: Vec<f32> = (0..n).map(|_| numbers.awkward()).collect();
                Values::stored(dtype, &wide)
            }
            DType::F64 => Values::F64((0..n).map(|_| numbers.uniform(0.0, 2.0)).collect()),
            DType::I32 => Values::I32((0..n).map(|_| numbers.below(2) as i32).collect()),
            DType::U32 => Values::U32((0..n).map(|_| numbers.below(2) as u32).collect()),
            DType::U8 => Values::U8((0..n).map(|_| numbers.below(256) as u8).collect()),
        }
    }

    fn poison(dtype: DType, n: usize) -> Self {
        match dtype {
            DType::F32 => Values::F32(vec![f32::NAN; n]),
            DType::F64 => Values::F64(vec![f64::NAN; n]),
            DType::I32 => Values::I32(vec![-1; n]),
            DType::U32 => Values::U32(vec![u32::MAX; n]),
            DType::Bf16 | DType::F16 => Values::stored(dtype, &vec![f32::NAN; n]),
            DType::U8 => Values::U8(vec![u8::MAX; n]),
        }
    }
}

fn elements<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    let parts = bytes.chunks_exact(size_of::<T>());
    parts.map(bytemuck::pod_read_unaligned).collect()
}

/// Seeded random numbers (SplitMix64), apart from the crate's own.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Numbers(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A whole number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A number between `low` and `high`.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Mostly of ordinary size; sometimes a zero of either sign, a large, a tiny or a subnormal number.
    pub fn awkward(&mut self) -> f32 {
        let x = self.uniform(-2.0, 2.0) as f32;
        match self.below(64) {
            0 => 0.0 * x,
            1 => x * 1e4,
            2 => x * 1e-30,
            3 => x * 1e-39,
            _ => x,
        }
    }

    /// `n` numbers between -1 and 1.
    pub fn ordinary(&mut self, n: usize) -> Values {
        Values::F32((0..n).map(|_| self.uniform(-1.0, 1.0) as f32).collect())
    }

    /// `n` whole numbers below `limit`.
    pub fn ids(&mut self, n: usize, limit: usize) -> Values {
        Values::I32((0..n).map(|_| self.below(limit) as i32).collect())
    }
}

/// An op and what its operands hold before the call.
#[derive(Clone, Debug)]
pub struct Case {
    pub op: Op,
    pub reads: Vec<Values>,
    pub writes: Vec<Values>,
}

impl Case {
    /// Read and updated operands hold random values, written ones poison.
    pub fn random(op: impl Into<Op>, seed: u64) -> Self {
        let op = op.into();
        let signature = op.rule().signature();
        let mut numbers = Numbers::new(seed);
        let mut fill = |operand: &Operand| {
            let n = operand.shape.elements();
            match operand.access {
                Access::Write => Values::poison(operand.dtype, n),
                _ => Values::random(&mut numbers, operand.dtype, n),
            }
        };
        Case {
            reads: signature.reads.iter().map(&mut fill).collect(),
            writes: signature.writes.iter().map(&mut fill).collect(),
            op,
        }
    }

    /// The same case computed as `math` says: numbers are rounded to the storages that it asks for, and
    /// operands that f32 does not have are random.
    pub fn in_math(&self, math: Math) -> Self {
        let signature = self.op.rule().signature();
        let operands = signature.reads.iter().chain(&signature.writes);
        let mut case = Case::random(with_math(&self.op, math), 77);
        for (operand, values) in operands.zip(self.reads.iter().chain(&self.writes)) {
            let place = case.place(operand.name);
            *place = match values {
                Values::F32(numbers) => Values::stored(place.dtype(), numbers),
                other => other.clone(),
            };
        }
        if math.scales_loss() {
            let scale = 2048.0_f32.to_bits();
            match case.op {
                Op::AdamW(_) => {
                    let Values::U32(report) = case.place("report") else {
                        panic!("the report is u32")
                    };
                    report[5] = scale;
                }
                Op::Clip(_) => *case.place("loss_scale") = Values::U32(vec![scale, 6, 1, 0]),
                Op::CrossEntropy(_) if case.reads.len() == 4 && case.writes.len() == 3 => {
                    *case.place("loss_scale") = Values::U32(vec![scale, 6, 1, 0]);
                }
                _ => {}
            }
        }
        case
    }

    /// The same case with its narrow operands as f32.
    pub fn widened(&self) -> Self {
        Case {
            op: self.op.clone(),
            reads: self.reads.iter().map(Values::widened).collect(),
            writes: self.writes.iter().map(Values::widened).collect(),
        }
    }

    /// The same case with other contents of the operand that the op's signature calls `operand`.
    pub fn with(mut self, operand: &str, values: Values) -> Self {
        let place = self.place(operand);
        assert_eq!((values.len(), values.dtype()), (place.len(), place.dtype()));
        *place = values;
        self
    }

    /// The same case with `n` elements in an operand, whatever the op asks for.
    pub fn resized(mut self, operand: &str, n: usize) -> Self {
        let place = self.place(operand);
        *place = Values::poison(place.dtype(), n);
        self
    }

    fn place(&mut self, operand: &str) -> &mut Values {
        let signature = self.op.rule().signature();
        let named = |o: &Operand| o.name == operand;
        if let Some(i) = signature.reads.iter().position(named) {
            return &mut self.reads[i];
        }
        let write = signature.writes.iter().position(named);
        &mut self.writes[write.unwrap_or_else(|| panic!("{} has no {operand}", self.op))]
    }
}

/// The op computed as `math` says; one that has no products and no narrow operands stays as it is.
pub fn with_math(op: &Op, math: Math) -> Op {
    let mut op = op.clone();
    match &mut op {
        Op::Matmul(op) => op.math = math,
        Op::MatmulGradInput(op) => op.math = math,
        Op::MatmulGradWeight(op) => op.math = math,
        Op::BiasGrad(op) => op.math = math,
        Op::RmsNorm(op) => op.math = math,
        Op::RmsNormGrad(op) => {
            op.math = math;
            op.delta_grad = math.storage() != DType::F32;
        }
        Op::Rope(op) => op.math = math,
        Op::RopeGrad(op) => op.math = math,
        Op::QkNormRope(op) => op.math = math,
        Op::QkNormRopeGrad(op) => op.math = math,
        Op::Attention(op) => op.math = math,
        Op::AttentionDelta(op) => op.math = math,
        Op::AttentionGradQuery(op) => op.math = math,
        Op::AttentionGradKeyValue(op) => op.math = math,
        Op::SwiGlu(op) => op.math = math,
        Op::SwiGluGrad(op) => op.math = math,
        Op::Conv1d(op) => op.math = math,
        Op::Conv1dGrad(op) => op.math = math,
        Op::SplitColumns(op) => op.math = math,
        Op::SplitColumnsGrad(op) => op.math = math,
        Op::Scan(op) => op.math = math,
        Op::ScanGrad(op) => op.math = math,
        Op::CrossEntropy(op) => op.math = math,
        Op::AdamW(op) => op.math = math,
        Op::EmbedFrozen(op) => op.math = math,
        Op::Dequantise(op) => op.math = math,
        Op::LoraDown(op) => op.math = math,
        Op::LoraDownGradInput(op) => op.math = math,
        Op::LoraUp(op) => op.math = math,
        Op::LoraUpGradInput(op) => op.math = math,
        Op::LoraUpGradWeight(op) => op.math = math,
        Op::Clip(op) => {
            op.loss_scaling = math
                .scales_loss()
                .then_some(LossScaling { growth_interval: 7 });
        }
        _ => {}
    }
    op
}

/// Something that runs a case and gives what the written operands then hold.
pub trait Device: Send + Sync {
    /// What it is, for messages.
    fn name(&self) -> String;

    /// Runs the case once in an arena of its own.
    fn run(&self, case: &Case) -> Result<Vec<Values>, DeviceError>;
}

/// Bytes of the guard after each operand; nothing may write there.
const GUARD: usize = 256;

impl<B: Backend + Send + Sync> Device for B {
    fn name(&self) -> String {
        self.info().description
    }

    fn run(&self, case: &Case) -> Result<Vec<Values>, DeviceError> {
        let mut slots = SlotTable::default();
        let mut guards = Vec::new();
        let mut add = |values: &Values| {
            let shape = [values.len()];
            let slot = slots.add(TensorSpec::new("x", shape, values.dtype(), Role::Carried));
            let guard = TensorSpec::new("guard", [GUARD], DType::U8, Role::Carried);
            guards.push((slot, slots.add(guard)));
            slot
        };
        let call = OpCall {
            op: case.op.clone(),
            reads: case.reads.iter().map(&mut add).collect::<Vec<Slot>>(),
            writes: case.writes.iter().map(&mut add).collect(),
        };
        let layout = Layout::plan(&slots, &[]);
        let [placed]: [PlacedCall; 1] = layout.place(&[call]).try_into().expect("one call");
        let mut arena = self.allocate(&layout, std::slice::from_ref(&placed))?;
        let regions = placed.reads.iter().chain(&placed.writes);
        for (&region, values) in regions.zip(case.reads.iter().chain(&case.writes)) {
            self.write(&mut arena, region, values.bytes())?;
        }
        self.launch(&mut arena, &placed)?;
        let bytes = |region: Region| {
            let mut bytes = vec![1; region.bytes];
            self.read(&arena, region, &mut bytes).map(|()| bytes)
        };
        for (&region, values) in placed.reads.iter().zip(&case.reads) {
            let same = bytes(region)? == values.bytes();
            assert!(same, "{} changed what it reads, {}", self.name(), case.op);
        }
        for (slot, guard) in guards {
            let offset = layout.region(slot).end();
            let after = Region {
                offset,
                bytes: layout.region(guard).end() - offset,
            };
            let clean = bytes(after)?.iter().all(|&b| b == 0);
            assert!(clean, "{} wrote out of bounds, {}", self.name(), case.op);
        }
        let outputs = placed.writes.iter().zip(&case.writes);
        outputs
            .map(|(&region, before)| Ok(Values::from_bytes(before.dtype(), &bytes(region)?)))
            .collect()
    }
}

/// Every backend at hand: the CPU on each of its SIMD paths with 1, 2 and 7 threads.
pub fn devices() -> &'static [Box<dyn Device>] {
    static DEVICES: OnceLock<Vec<Box<dyn Device>>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let mut devices: Vec<Box<dyn Device>> = Vec::new();
        for path in SimdPath::available() {
            for threads in [1, 2, 7] {
                let context = CpuContext::new(path, threads).expect("a thread pool");
                devices.push(Box::new(CpuBackend::new(context)));
            }
        }
        devices.extend(crate::gpu::backend().map(|cuda| Box::new(cuda) as Box<dyn Device>));
        devices
    })
}

/// What the first device gives.
pub fn run(case: &Case) -> Vec<Values> {
    devices()[0].run(case).expect("the case runs")
}

/// The first element whose bits differ, two NaNs being equal: its index and both values.
pub fn first_difference(found: &Values, expected: &Values) -> Option<String> {
    let size = found.dtype().size();
    if (found.len(), found.dtype()) != (expected.len(), expected.dtype()) {
        return Some(format!("{} instead of {}", found.len(), expected.len()));
    }
    let is_nan = |values: &Values, i: usize| match values {
        Values::F32(v) => v[i].is_nan(),
        Values::F64(v) => v[i].is_nan(),
        Values::Bf16(v) => half::bf16::from_bits(v[i]).is_nan(),
        Values::F16(v) => half::f16::from_bits(v[i]).is_nan(),
        _ => false,
    };
    let show = |values: &Values, i: usize| match values {
        Values::F32(v) => format!("{:e} ({:08x})", v[i], v[i].to_bits()),
        Values::F64(v) => format!("{:e} ({:016x})", v[i], v[i].to_bits()),
        Values::I32(v) => v[i].to_string(),
        Values::U32(v) => v[i].to_string(),
        Values::Bf16(v) => format!("{:e} ({:04x})", half::bf16::from_bits(v[i]).to_f32(), v[i]),
        Values::U8(v) => v[i].to_string(),
        Values::F16(v) => format!("{:e} ({:04x})", half::f16::from_bits(v[i]).to_f32(), v[i]),
    };
    let pairs = found
        .bytes()
        .chunks(size)
        .zip(expected.bytes().chunks(size));
    for (i, (a, b)) in pairs.enumerate() {
        if a != b && !(is_nan(found, i) && is_nan(expected, i)) {
            let (a, b) = (show(found, i), show(expected, i));
            return Some(format!("element {i}: {a} instead of {b}"));
        }
    }
    None
}

/// Runs the case on every device and compares the bits of every written operand with `expected`.
pub fn assert_bits(case: &Case, expected: &[Values]) {
    assert_bits_on(devices().iter().map(|d| d.as_ref()), case, expected);
}

/// As [`assert_bits`] on some devices, of which there has to be one.
pub fn assert_bits_on(
    devices: impl Iterator<Item = &'static dyn Device>,
    case: &Case,
    expected: &[Values],
) {
    let signature = case.op.rule().signature();
    let mut ran = 0;
    for device in devices {
        ran += 1;
        let found = device.run(case).expect("the case runs");
        assert_eq!(found.len(), expected.len(), "{}", case.op);
        for ((operand, found), expected) in signature.writes.iter().zip(&found).zip(expected) {
            if let Some(difference) = first_difference(found, expected) {
                let (op, on) = (&case.op, device.name());
                panic!("{op}, {}, on {on}: {difference}", operand.name);
            }
        }
    }
    assert!(ran > 0, "a comparison on no device compares nothing");
}

#[test]
fn a_difference_of_one_bit_is_found() {
    let a = Values::F32(vec![1.0, f32::NAN, 0.0]);
    let same = Values::F32(vec![1.0, f32::from_bits(0xffc0_0001), 0.0]);
    assert_eq!(first_difference(&a, &same), None);
    let sign = Values::F32(vec![1.0, f32::NAN, -0.0]);
    let text = first_difference(&a, &sign).expect("zeros of different sign");
    assert!(text.starts_with("element 2"), "{text}");
    let shorter = Values::F32(vec![1.0]);
    assert!(first_difference(&a, &shorter).is_some());
    let number = Values::F32(vec![1.0, 0.0, 0.0]);
    assert!(first_difference(&a, &number).is_some());
}

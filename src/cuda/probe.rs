//! Compares a device's tensor-core instructions with the contract's step, bit for bit.
//!
//! The same cases always: random numbers at several spreads, and everything at the ends of the formats. The
//! report says which domains hold on the device, and, where one does not, which other model of the step
//! gives the device's bits.

use std::fmt;
use std::sync::Arc;

use rayon::prelude::*;

use super::arena::CudaArena;
use super::call::{Arg, KernelLaunch};
use super::device::Device;
use super::launch;
use super::module::Modules;
use super::probe_cases::{Category, Tiles};
use crate::error::DeviceError;
use crate::layout::Region;
use crate::num::tensor_model::{
    Floor, HugeProduct, Overflow, Rounding, StepModel, Subnormals, ZeroProduct, ZeroSum,
};
use crate::num::tensor_step::Kind;

/// Tiles of 64 × 64 outputs of each category.
const TILES: usize = 6;

/// Mismatches that a report shows of each category.
const SHOWN: usize = 3;

/// NaN patterns that a report shows of each category.
const PATTERNS: usize = 4;

/// An instruction that makes the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// `mma.sync`, of every device from compute capability 8.0 on.
    Mma,
    /// `wgmma.mma_async`, of compute capability 9.0 alone.
    Wgmma,
}

impl Instruction {
    fn entry(self, kind: Kind) -> &'static str {
        match (self, kind) {
            (Instruction::Mma, Kind::Bf16) => "probe_mma_bf16",
            (Instruction::Mma, Kind::F16) => "probe_mma_f16",
            (Instruction::Mma, Kind::Tf32) => "probe_mma_tf32",
            (Instruction::Wgmma, Kind::Bf16) => "probe_wgmma_sm90a_bf16",
            (Instruction::Wgmma, Kind::F16) => "probe_wgmma_sm90a_f16",
            (Instruction::Wgmma, Kind::Tf32) => "probe_wgmma_sm90a_tf32",
        }
    }
}

/// The contract's model and others, each with what is different in it.
pub fn models() -> [(&'static str, StepModel); 18] {
    let with = |change: fn(&mut StepModel)| {
        let mut model = StepModel::HOPPER;
        change(&mut model);
        model
    };
    [
        ("the contract", StepModel::HOPPER),
        ("24 bits", with(|m| m.fraction_bits = 24)),
        ("26 bits", with(|m| m.fraction_bits = 26)),
        ("27 bits", with(|m| m.fraction_bits = 27)),
        ("8 products fused", with(|m| m.fused = 8)),
        ("4 products fused", with(|m| m.fused = 4)),
        (
            "24 bits, 8 products fused",
            with(|m| (m.fraction_bits, m.fused) = (24, 8)),
        ),
        (
            "zero products align",
            with(|m| m.zero_product = ZeroProduct::Aligns),
        ),
        (
            "no least exponent of alignment",
            with(|m| m.floor = Floor::None),
        ),
        (
            "an accumulator of zero at -126",
            with(|m| m.floor = Floor::OfZero(-126)),
        ),
        (
            "subnormal factors are zero",
            with(|m| m.factors = Subnormals::Flushed),
        ),
        (
            "subnormal factors are normalised",
            with(|m| m.factors = Subnormals::Normalised),
        ),
        (
            "subnormal accumulators are zero",
            with(|m| m.accumulator = Subnormals::Flushed),
        ),
        (
            "subnormal results are zero",
            with(|m| m.results = Subnormals::Flushed),
        ),
        (
            "overflow gives the largest number",
            with(|m| m.overflow = Overflow::Largest),
        ),
        (
            "products beyond 2^128 are infinite",
            with(|m| m.huge_product = HugeProduct::Infinite),
        ),
        (
            "zeros of negative sign add to one",
            with(|m| m.zero_sum = ZeroSum::NegativeOfNegatives),
        ),
        (
            "the sum is rounded to nearest",
            with(|m| m.rounding = Rounding::NearestEven),
        ),
    ]
}

/// One output whose bits are not the contract's.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    pub index: usize,
    pub acc: f32,
    pub a: Vec<f32>,
    pub b: Vec<f32>,
    pub expected: f32,
    pub found: f32,
}

/// One category's comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct CategoryReport {
    pub category: Category,
    pub outputs: usize,
    /// Outputs that each of [`models`] gives exactly, any NaN being equal to any other.
    pub equal: Vec<usize>,
    /// The first outputs that differ from the contract.
    pub mismatches: Vec<Mismatch>,
    /// The first NaN patterns that the device gave.
    pub nans: Vec<u32>,
}

impl CategoryReport {
    /// Whether the contract's model gives every output.
    pub fn holds(&self) -> bool {
        self.equal.first() == Some(&self.outputs)
    }
}

/// One instruction and kind over all categories.
#[derive(Clone, Debug, PartialEq)]
pub struct Section {
    pub instruction: Instruction,
    pub kind: Kind,
    pub categories: Vec<CategoryReport>,
}

impl Section {
    /// Whether the contract's model gives every output of every category.
    pub fn holds(&self) -> bool {
        self.categories.iter().all(CategoryReport::holds)
    }

    /// The models that give every output of every category.
    pub fn matching(&self) -> Vec<&'static str> {
        let all = |i: usize| self.categories.iter().all(|c| c.equal[i] == c.outputs);
        let models = models().into_iter().enumerate();
        models
            .filter(|(i, _)| all(*i))
            .map(|(_, (name, _))| name)
            .collect()
    }
}

/// The compute capability whose tensor cores the contract describes.
pub const HOPPER: (i32, i32) = (9, 0);

/// What a device's instructions give.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeReport {
    /// The device's name and compute capability.
    pub device: String,
    pub capability: (i32, i32),
    pub sections: Vec<Section>,
}

impl ProbeReport {
    /// Whether the kind's domain is proven on this device: it is of compute capability 9.0, and both
    /// instructions give the contract's bits in every category.
    pub fn proven(&self, kind: Kind) -> bool {
        let mut of_kind = self.sections.iter().filter(|s| s.kind == kind);
        let both = of_kind.clone().count() == 2;
        self.capability == HOPPER && both && of_kind.all(Section::holds)
    }
}

/// Compares device `ordinal` with the contract.
///
/// # Errors
/// What opening the device, its memory or a launch fails with.
pub fn probe(ordinal: usize) -> Result<ProbeReport, DeviceError> {
    let device = Device::open(ordinal)?;
    let modules = Modules::new(device.clone());
    let info = &device.info;
    let (major, minor) = info.capability;
    let mut report = ProbeReport {
        device: format!("{} (compute capability {major}.{minor})", info.name),
        capability: info.capability,
        sections: Vec::new(),
    };
    let instructions: &[Instruction] = match info.capability {
        HOPPER => &[Instruction::Mma, Instruction::Wgmma],
        _ => &[Instruction::Mma],
    };
    for &instruction in instructions {
        for kind in Kind::ALL {
            let section = section(instruction, kind, TILES, |tiles| {
                let launch = plan(instruction, tiles);
                on_device(&device, &modules, tiles, &launch)
            })?;
            report.sections.push(section);
        }
    }
    Ok(report)
}

/// The section that `run` gives over `count` tiles a category; it maps cases to their outputs.
fn section(
    instruction: Instruction,
    kind: Kind,
    count: usize,
    run: impl Fn(&Tiles) -> Result<Vec<f32>, DeviceError>,
) -> Result<Section, DeviceError> {
    let mut outputs = Vec::new();
    for category in Category::ALL {
        let tiles = Tiles::generate(kind, category, count);
        let found = run(&tiles)?;
        outputs.push((tiles, found));
    }
    let compared = outputs
        .par_iter()
        .map(|(tiles, found)| compare(tiles, found));
    Ok(Section {
        instruction,
        kind,
        categories: compared.collect(),
    })
}

/// Regions of the operands in the probe's arena, and the launch.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeLaunch {
    /// A, B, C and D, one after the other.
    pub regions: [Region; 4],
    pub launch: KernelLaunch,
}

/// The launch that computes the tiles.
pub fn plan(instruction: Instruction, tiles: &Tiles) -> ProbeLaunch {
    let element = if tiles.kind == Kind::Tf32 { 4 } else { 2 };
    let sizes = [
        tiles.a.len() * element,
        tiles.b.len() * element,
        tiles.c.len() * 4,
        tiles.c.len() * 4,
    ];
    let mut offset = 0;
    let regions = sizes.map(|bytes| {
        let region = Region { offset, bytes };
        offset = region.end().next_multiple_of(256);
        region
    });
    let mut args: Vec<Arg> = regions.iter().map(|&r| Arg::Region(r)).collect();
    args.push(Arg::U32(tiles.steps as u32));
    ProbeLaunch {
        regions,
        launch: KernelLaunch {
            entry: instruction.entry(tiles.kind),
            grid: [tiles.count as u32, 1, 1],
            block: [128, 1, 1],
            shared_bytes: 0,
            args,
        },
    }
}

fn on_device(
    device: &Arc<Device>,
    modules: &Modules,
    tiles: &Tiles,
    plan: &ProbeLaunch,
) -> Result<Vec<f32>, DeviceError> {
    let [a, b, c, d] = plan.regions;
    let arena = CudaArena::zeroed(device, d.end(), Default::default())?;
    arena.write(a, bytemuck::cast_slice(&tiles.words(&tiles.a)))?;
    arena.write(b, bytemuck::cast_slice(&tiles.words(&tiles.b)))?;
    arena.write(c, bytemuck::cast_slice(&tiles.c))?;
    launch::launch(device, modules, &arena, &plan.launch)?;
    let mut found = vec![0.0_f32; tiles.c.len()];
    arena.read(d, bytemuck::cast_slice_mut(&mut found))?;
    Ok(found)
}

/// The chain of a case by a model.
fn by_model(model: &StepModel, kind: Kind, (acc, a, b): (f32, &[f32], &[f32])) -> f32 {
    let steps = a.chunks(kind.k()).zip(b.chunks(kind.k()));
    steps.fold(acc, |acc, (a, b)| model.step(kind, acc, a, b))
}

fn same(x: f32, y: f32) -> bool {
    x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan())
}

/// Compares the outputs of a category with every model.
fn compare(tiles: &Tiles, found: &[f32]) -> CategoryReport {
    let models = models();
    let mut report = CategoryReport {
        category: tiles.category,
        outputs: found.len(),
        equal: vec![0; models.len()],
        mismatches: Vec::new(),
        nans: Vec::new(),
    };
    for (index, &found) in found.iter().enumerate() {
        let (acc, a, b) = tiles.case(index);
        let mut expected = None;
        for (equal, (_, model)) in report.equal.iter_mut().zip(&models) {
            let given = by_model(model, tiles.kind, (acc, a, b));
            *equal += usize::from(same(given, found));
            expected.get_or_insert(given);
        }
        let expected = expected.unwrap_or(found);
        if !same(expected, found) && report.mismatches.len() < SHOWN {
            report.mismatches.push(Mismatch {
                index,
                acc,
                a: a.to_vec(),
                b: b.to_vec(),
                expected,
                found,
            });
        }
        let pattern = found.to_bits();
        if found.is_nan() && report.nans.len() < PATTERNS && !report.nans.contains(&pattern) {
            report.nans.push(pattern);
        }
    }
    report
}

impl fmt::Display for ProbeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tensor-core step of {}", self.device)?;
        for kind in Kind::ALL {
            let word = if self.proven(kind) {
                "proven"
            } else {
                "not proven"
            };
            writeln!(f, "domain {}.sm90: {word}", kind.name())?;
        }
        self.sections.iter().try_for_each(|s| write!(f, "{s}"))
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let matching = match self.matching() {
            none if none.is_empty() => "no model".to_owned(),
            some => some.join("; "),
        };
        let (instruction, kind) = (self.instruction, self.kind.name());
        writeln!(
            f,
            "\n{instruction:?} {kind}: every category is given by: {matching}"
        )?;
        self.categories.iter().try_for_each(|c| write!(f, "{c}"))
    }
}

impl fmt::Display for CategoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (category, outputs) = (self.category, self.outputs);
        let equal = self.equal.first().copied().unwrap_or(0);
        writeln!(f, "  {category:?}: {equal} of {outputs}")?;
        if !self.nans.is_empty() {
            writeln!(f, "    NaN patterns {:08x?}", self.nans)?;
        }
        if self.holds() {
            return Ok(());
        }
        for ((name, _), equal) in models().iter().zip(&self.equal) {
            writeln!(f, "    {equal:>8} {name}")?;
        }
        for m in &self.mismatches {
            let hex = |x: &[f32]| {
                x.iter()
                    .map(|x| format!("{:08x}", x.to_bits()))
                    .collect::<Vec<_>>()
                    .join(" ")
            };
            writeln!(
                f,
                "    output {}: expected {:08x}, found {:08x}",
                m.index,
                m.expected.to_bits(),
                m.found.to_bits()
            )?;
            writeln!(f, "      acc {:08x}", m.acc.to_bits())?;
            writeln!(f, "      a {}", hex(&m.a))?;
            writeln!(f, "      b {}", hex(&m.b))?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;

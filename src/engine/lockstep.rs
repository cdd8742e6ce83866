//! Two devices in step: each call runs on both, and what it wrote is compared before the next one.
//!
//! Both sides start from the same bytes, and a call goes on only when all that it wrote is equal, so up
//! to the first difference both arenas hold the same planned bytes. The call named is therefore the
//! first that computed something else from the same operands, unless its own operands were changed
//! behind the program's back, which is looked at and told.

use super::run::Run;
use super::session::Session;
use super::step::{Core, StepReport};
use crate::backend::Backend;
use crate::error::{DeviceError, Error, StepError};
use crate::io::Recipe;
use crate::layout::Region;
use crate::op::{Access, Slot};
use crate::plan::ProgramKind;
use crate::program::SlotTable;
use crate::shape::{DType, Role};

/// One recipe on two devices.
pub struct Lockstep<A: Backend, B: Backend> {
    left: Run<A>,
    right: Run<B>,
}

/// What was compared, up to the end or to the first difference.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// Whole steps that were equal.
    pub steps: u64,
    /// Calls whose outputs were equal.
    pub calls: usize,
    /// Bytes of the outputs that were equal, of one side.
    pub bytes: usize,
    pub divergence: Option<Divergence>,
}

/// The first difference of two devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Divergence {
    /// The step, from 0.
    pub step: u64,
    /// The call that wrote the tensor; `None` for state that differs without a call having written it.
    pub call: Option<CallPlace>,
    pub tensor: String,
    pub dtype: DType,
    /// The first element that differs, row-major.
    pub index: usize,
    /// How many elements differ, and how many there are.
    pub differing: (usize, usize),
    /// The parameter, gradient or moment that the element belongs to, and its index there, where the
    /// tensor is an arena of many.
    pub part: Option<(String, usize)>,
    /// The element's bits, left and right, in the lowest bits of each.
    pub bits: [u64; 2],
}

/// The call whose output differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallPlace {
    pub index: usize,
    pub stem: &'static str,
    /// The kernels or routines that served it, left and right.
    pub kernels: [String; 2],
    /// The first operand that differs already: something outside the ops' outputs wrote it.
    pub changed_operand: Option<String>,
}

impl Divergence {
    fn same_element(&self, other: &Divergence) -> bool {
        let element = |d: &Divergence| (d.tensor.clone(), d.index, d.bits);
        element(self) == element(other)
    }

    /// The element's bits in hexadecimal, left and right.
    pub fn hex(&self) -> [String; 2] {
        let digits = 2 * self.dtype.size();
        self.bits.map(|bits| format!("{bits:0digits$x}"))
    }

    /// The element's values in decimal, left and right; the shortest text that reads back as the value.
    pub fn decimal(&self) -> [String; 2] {
        self.bits.map(|bits| match self.dtype {
            DType::F64 => format!("{:e}", f64::from_bits(bits)),
            DType::F32 => format!("{:e}", f32::from_bits(bits as u32)),
            DType::Bf16 => format!("{:e}", half::bf16::from_bits(bits as u16).to_f32()),
            DType::F16 => format!("{:e}", half::f16::from_bits(bits as u16).to_f32()),
            DType::I32 => (bits as u32).cast_signed().to_string(),
            DType::U32 | DType::U8 => bits.to_string(),
        })
    }
}

impl<A: Backend, B: Backend> Lockstep<A, B> {
    /// Opens the recipe's run on both backends.
    ///
    /// # Errors
    /// As [`Run::open`].
    pub fn open(recipe: Recipe, left: A, right: B) -> Result<Self, Error> {
        Ok(Lockstep {
            left: Run::open(recipe.clone(), left)?,
            right: Run::open(recipe, right)?,
        })
    }

    /// Takes `steps` eager steps on both sides, with the batches and rates of the recipe's run, and
    /// stops at the first difference; `each` is told of every step that was equal. A run that has
    /// diverged cannot go on, so this takes it.
    ///
    /// # Errors
    /// Data that cannot be read; a fault of either device.
    pub fn run(mut self, steps: u64, mut each: impl FnMut(&StepReport)) -> Result<Compared, Error> {
        let mut compared = Compared {
            steps: 0,
            calls: 0,
            bytes: 0,
            divergence: None,
        };
        for step in 0..steps {
            match self.step(step, &mut compared)? {
                Ok(report) => each(&report),
                Err(divergence) => {
                    compared.divergence = Some(divergence);
                    break;
                }
            }
            compared.steps += 1;
        }
        Ok(compared)
    }

    fn step(
        &mut self,
        step: u64,
        compared: &mut Compared,
    ) -> Result<Result<StepReport, Divergence>, Error> {
        let batch = self.left.loader.batch_at(step)?;
        let mut hyper = *self.left.trainer.hyper_mut();
        hyper.lr = self.left.schedule.lr(step);
        let mut sides = Sides {
            left: warm(self.left.trainer.session_mut())?,
            right: warm(self.right.trainer.session_mut())?,
            step,
            pending: None,
        };
        let scalars = sides.left.validate(&batch, &hyper)?;
        sides.left.write_inputs(&batch, scalars)?;
        let scalars = sides.right.validate(&batch, &hyper)?;
        sides.right.write_inputs(&batch, scalars)?;
        // What no call writes is equal from the first step on; later the inputs alone are new.
        let written = match step {
            0 => sides.state(|_| true),
            _ => sides.state(|role| matches!(role, Role::Input | Role::Scalars)),
        };
        if let Some(found) = sides.compare(&written)? {
            return Ok(Err(found));
        }
        let calls = sides.left.plan.calls(ProgramKind::Step).len();
        for index in 0..calls {
            if let Some(found) = sides.call(index)? {
                return Ok(Err(found));
            }
            compared.calls += 1;
            let writes = &sides.left.calls(ProgramKind::Step)[index].writes;
            compared.bytes += writes.iter().map(|r| r.bytes).sum::<usize>();
        }
        // A stray write into state that no later call of this step has read is found here.
        if let Some(found) = sides.compare(&sides.state(|_| true))? {
            return Ok(Err(found));
        }
        sides
            .right
            .commit(batch.active_targets(), &hyper)
            .map_err(Error::from)?;
        Ok(Ok(sides.left.commit(batch.active_targets(), &hyper)?))
    }
}

/// The engine of a session that steps eagerly.
fn warm<B: Backend>(session: &mut Session<B>) -> Result<&mut Core<B>, StepError> {
    match session {
        Session::Warmup(engine) => Ok(&mut engine.core),
        other => Err(StepError::NotSteppable {
            state: other.state_name(),
        }),
    }
}

/// Both engines within a step. Their plans are those of one recipe.
struct Sides<'a, A: Backend, B: Backend> {
    left: &'a mut Core<A>,
    right: &'a mut Core<B>,
    step: u64,
    /// A difference in a tensor that the next call completes, and that is a difference only if it is
    /// still there then.
    pending: Option<Divergence>,
}

impl<A: Backend, B: Backend> Sides<'_, A, B> {
    /// The slots of their own that survive a step and whose role is wanted.
    fn state(&self, wanted: impl Fn(Role) -> bool) -> Vec<Slot> {
        let slots = self.left.plan.slots.iter();
        let state = slots.filter(|(_, def)| {
            let role = def.spec.role;
            def.view.is_none() && role.persistent() && wanted(role)
        });
        state.map(|(slot, _)| slot).collect()
    }

    /// Runs one call on both sides and compares what it wrote.
    fn call(&mut self, index: usize) -> Result<Option<Divergence>, DeviceError> {
        // Asked before the launch: a backend may choose a kernel while it runs the call, and what the
        // call leaves is what the kernel named before has computed.
        let kernels = [self.left.kernel(index), self.right.kernel(index)];
        self.left.launch(index)?;
        self.right.launch(index)?;
        let call = self.left.calls(ProgramKind::Step)[index].call.clone();
        let operands = call.op.rule().signature().writes;
        let partial = |at: usize| operands[at].access == Access::Partial;
        let writes = call.writes.iter().enumerate();
        let (partly, whole): (Vec<_>, Vec<_>) = writes.partition(|(at, _)| partial(*at));
        let slots = |of: Vec<(usize, &Slot)>| of.into_iter().map(|(_, &slot)| slot).collect();
        let (partly, whole): (Vec<Slot>, Vec<Slot>) = (slots(partly), slots(whole));
        let place = CallPlace {
            index,
            stem: call.op.rule().stem(),
            kernels,
            changed_operand: None,
        };
        let before = self.pending.take();
        if let Some(mut found) = self.compare(&whole)? {
            if let Some(before) = before.filter(|b| b.same_element(&found)) {
                return Ok(Some(before));
            }
            found.call = Some(self.with_operand(place, &call.reads)?);
            return Ok(Some(found));
        }
        if let Some(mut found) = self.compare(&partly)? {
            found.call = Some(self.with_operand(place, &call.reads)?);
            self.pending = Some(found);
        }
        Ok(None)
    }

    /// The place with the operand among `reads` that differs already, where one does.
    fn with_operand(&mut self, place: CallPlace, reads: &[Slot]) -> Result<CallPlace, DeviceError> {
        let changed = self.compare(reads)?;
        Ok(CallPlace {
            changed_operand: changed.map(|c| c.tensor),
            ..place
        })
    }

    /// The first difference among slots: digests of all of them, bytes of the first that differs.
    fn compare(&mut self, slots: &[Slot]) -> Result<Option<Divergence>, DeviceError> {
        let (a, b) = (self.left.digests(slots)?, self.right.digests(slots)?);
        let Some(at) = a.iter().zip(&b).position(|(a, b)| a != b) else {
            return Ok(None);
        };
        let slot = slots[at];
        let table = &self.left.plan.slots;
        let (tensor, dtype) = (table.spec(slot).name.clone(), table.spec(slot).dtype);
        let region = self.left.plan.layout.region(slot);
        let (a, b) = (self.left.bytes(region)?, self.right.bytes(region)?);
        let size = dtype.size();
        let elements = a.chunks(size).zip(b.chunks(size)).enumerate();
        let mut differing = elements.filter(|(_, (a, b))| a != b);
        let Some((index, (left, right))) = differing.next() else {
            return Err(DeviceError::Digest {
                tensor,
                left: self.left.backend.info().device,
                right: self.right.backend.info().device,
            });
        };
        Ok(Some(Divergence {
            step: self.step,
            call: None,
            tensor,
            dtype,
            index,
            differing: (1 + differing.count(), a.len() / size),
            part: part_of(&self.left.plan.slots, slot, index),
            bits: [word(left), word(right)],
        }))
    }
}

impl<B: Backend> Core<B> {
    fn kernel(&self, index: usize) -> String {
        let call = std::slice::from_ref(&self.calls(ProgramKind::Step)[index]);
        let executions = self.backend.executions(call).into_iter();
        executions.map(|e| e.kernel).collect()
    }

    fn launch(&mut self, index: usize) -> Result<(), DeviceError> {
        let call = self.calls(ProgramKind::Step)[index].clone();
        let launched = self.backend.launch(&mut self.arena, &call);
        self.guarded(launched)
    }

    fn bytes(&mut self, region: Region) -> Result<Vec<u8>, DeviceError> {
        let mut bytes = vec![0; region.bytes];
        let read = self.backend.read(&self.arena, region, &mut bytes);
        self.guarded(read).map(|()| bytes)
    }
}

/// Little-endian bytes of one element as a number.
fn word(bytes: &[u8]) -> u64 {
    let bytes = bytes.iter().rev();
    bytes.fold(0, |word, &byte| word << 8 | u64::from(byte))
}

/// The smallest named part of an arena of parameters, gradients or moments that holds an element, and
/// the element's index in it.
fn part_of(slots: &SlotTable, slot: Slot, index: usize) -> Option<(String, usize)> {
    let role = slots.spec(slot).role;
    let arena = matches!(
        role,
        Role::Param | Role::Frozen | Role::Grad | Role::Moment1 | Role::Moment2
    );
    let (root, range) = slots.root(slot);
    let element = range.start + index;
    let parts = slots.iter().filter_map(|(part, def)| {
        let (owner, covers) = slots.root(part);
        let fits = part != slot && owner == root && covers.contains(&element);
        let within = fits && covers.start >= range.start && covers.end <= range.end;
        within.then(|| (covers.len(), def.spec.name.clone(), element - covers.start))
    });
    let smallest = parts.min_by_key(|(length, _, _)| *length);
    smallest
        .filter(|_| arena)
        .map(|(_, name, index)| (name, index))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divergence(dtype: DType, bits: [u64; 2]) -> Divergence {
        Divergence {
            step: 0,
            call: None,
            tensor: "t".into(),
            dtype,
            index: 0,
            differing: (1, 1),
            part: None,
            bits,
        }
    }

    #[test]
    fn an_element_is_shown_in_hexadecimal_and_decimal() {
        let cases = [
            (DType::F32, 0x3f80_0001, "3f800001", "1.0000001e0"),
            (DType::F32, 0xff80_0000, "ff800000", "-inf"),
            (DType::F64, 0x3ff0_0000_0000_0000, "3ff0000000000000", "1e0"),
            (DType::Bf16, 0xbf80, "bf80", "-1e0"),
            (DType::F16, 0x3c00, "3c00", "1e0"),
            (DType::I32, 0xffff_ff9c, "ffffff9c", "-100"),
            (DType::U32, 7, "00000007", "7"),
            (DType::U8, 0xa0, "a0", "160"),
        ];
        for (dtype, bits, hex, decimal) in cases {
            let found = divergence(dtype, [bits, 0]);
            assert_eq!((&*found.hex()[0], &*found.decimal()[0]), (hex, decimal));
        }
        assert_eq!(word(&[1, 0, 0x80, 0x3f]), 0x3f80_0001);
    }
}

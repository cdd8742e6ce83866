//! The CPU's arena: one allocation, from which a call borrows its operands as disjoint slices.

use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::{Pod, Zeroable};

use crate::backend::ArenaId;
use crate::error::DeviceError;
use crate::layout::{PlacedCall, Region};

/// One cache line; the arena is made of them so that every slot is aligned for every element type.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// The memory of one plan.
pub struct CpuArena {
    id: ArenaId,
    lines: Vec<Line>,
    bytes: usize,
}

impl CpuArena {
    /// An arena of zeros.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the allocation is refused.
    pub fn zeroed(bytes: usize) -> Result<Self, DeviceError> {
        let count = bytes.div_ceil(64);
        let mut lines: Vec<Line> = Vec::new();
        lines
            .try_reserve_exact(count)
            .map_err(|_| DeviceError::OutOfMemory {
                needed_bytes: bytes,
            })?;
        lines.resize(count, Line::zeroed());
        Ok(CpuArena {
            id: ArenaId(NEXT_ID.fetch_add(1, Ordering::Relaxed)),
            lines,
            bytes,
        })
    }

    /// The arena's identity.
    pub fn id(&self) -> ArenaId {
        self.id
    }

    /// Bytes that the arena holds.
    pub fn total_bytes(&self) -> usize {
        self.bytes
    }

    /// Checks that a region lies inside.
    ///
    /// # Errors
    /// [`DeviceError::OutOfArena`] when it does not.
    pub fn check(&self, region: Region) -> Result<(), DeviceError> {
        match region.end() <= self.bytes {
            true => Ok(()),
            false => Err(DeviceError::OutOfArena {
                offset: region.offset,
                end: region.end(),
                arena_bytes: self.bytes,
            }),
        }
    }

    /// The bytes of a region.
    pub fn bytes(&self, region: Region) -> Result<&[u8], DeviceError> {
        self.check(region)?;
        let all: &[u8] = bytemuck::cast_slice(&self.lines);
        Ok(&all[region.offset..region.end()])
    }

    /// The bytes of a region, to write.
    pub fn bytes_mut(&mut self, region: Region) -> Result<&mut [u8], DeviceError> {
        self.check(region)?;
        let all: &mut [u8] = bytemuck::cast_slice_mut(&mut self.lines);
        Ok(&mut all[region.offset..region.end()])
    }

    /// The operands of a call as slices that never alias a written one.
    ///
    /// # Errors
    /// A region outside the arena; a written region that overlaps another operand.
    pub fn borrow(&mut self, call: &PlacedCall) -> Result<Operands<'_>, DeviceError> {
        let stem = call.call.op.rule().stem();
        for &region in call.reads.iter().chain(&call.writes) {
            self.check(region)?;
        }
        // Overlapping reads are one shared span; a write is a span of its own.
        let mut spans: Vec<(Region, Option<usize>)> = merge_reads(&call.reads)
            .into_iter()
            .map(|r| (r, None))
            .chain(call.writes.iter().enumerate().map(|(i, &r)| (r, Some(i))))
            .filter(|(r, _)| r.bytes > 0)
            .collect();
        spans.sort_by_key(|(region, _)| region.offset);
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut self.lines);
        let mut taken = 0;
        let mut shared: Vec<(Region, &[u8])> = Vec::new();
        let mut writes: Vec<Option<&mut [u8]>> = call.writes.iter().map(|_| None).collect();
        for (region, write) in spans {
            if region.offset < taken {
                return Err(DeviceError::Overlap {
                    offset: region.offset,
                });
            }
            let (_, tail) = rest.split_at_mut(region.offset - taken);
            let (span, tail) = tail.split_at_mut(region.bytes);
            match write {
                Some(index) => writes[index] = Some(span),
                None => shared.push((region, span)),
            }
            rest = tail;
            taken = region.end();
        }
        for (write, region) in writes.iter_mut().zip(&call.writes) {
            if region.bytes == 0 {
                *write = Some(&mut []);
            }
        }
        let reads = call.reads.iter().map(|&r| slice_of(&shared, r)).collect();
        Ok(Operands {
            stem,
            reads,
            writes,
        })
    }
}

fn merge_reads(reads: &[Region]) -> Vec<Region> {
    let mut sorted = reads.to_vec();
    sorted.sort();
    let mut merged: Vec<Region> = Vec::new();
    for region in sorted {
        match merged.last_mut() {
            Some(last) if region.offset < last.end() => {
                last.bytes = last.end().max(region.end()) - last.offset;
            }
            _ => merged.push(region),
        }
    }
    merged
}

fn slice_of<'a>(shared: &[(Region, &'a [u8])], region: Region) -> &'a [u8] {
    shared
        .iter()
        .find(|(span, _)| span.offset <= region.offset && region.end() <= span.end())
        .map_or(&[], |(span, bytes)| {
            let start = region.offset - span.offset;
            &bytes[start..start + region.bytes]
        })
}

/// The operands of one call, in the order of its op's signature.
pub struct Operands<'a> {
    stem: &'static str,
    reads: Vec<&'a [u8]>,
    writes: Vec<Option<&'a mut [u8]>>,
}

impl<'a> Operands<'a> {
    /// Operands of the op called `stem`, none of them there yet.
    #[cfg(test)]
    pub(super) fn of(stem: &'static str) -> Self {
        Operands {
            stem,
            reads: Vec::new(),
            writes: Vec::new(),
        }
    }

    /// Operands of the same op, none of them there yet.
    pub(super) fn like<'b>(&self) -> Operands<'b> {
        Operands {
            stem: self.stem,
            reads: Vec::new(),
            writes: Vec::new(),
        }
    }

    /// Adds the next read operand.
    pub(super) fn push_read(&mut self, bytes: &'a [u8]) {
        self.reads.push(bytes);
    }

    /// Adds the next written operand.
    pub(super) fn push_write(&mut self, bytes: &'a mut [u8]) {
        self.writes.push(Some(bytes));
    }

    /// Read operand `index` as elements of type `T`.
    ///
    /// # Errors
    /// An operand that is not there, or whose place does not fit `T`.
    pub fn read<T: Pod>(&self, index: usize) -> Result<&'a [T], DeviceError> {
        let op = self.stem;
        let bytes: &'a [u8] = self
            .reads
            .get(index)
            .copied()
            .ok_or(DeviceError::OperandMissing { op, index })?;
        if bytes.is_empty() {
            return Ok(&[]);
        }
        bytemuck::try_cast_slice(bytes).map_err(|_| DeviceError::OperandAlignment { op, index })
    }

    /// Written operand `index` as elements of type `T`; each can be taken once.
    ///
    /// # Errors
    /// An operand that is not there or was taken, or whose place does not fit `T`.
    pub fn write<T: Pod>(&mut self, index: usize) -> Result<&'a mut [T], DeviceError> {
        let op = self.stem;
        let bytes = self
            .writes
            .get_mut(index)
            .and_then(Option::take)
            .ok_or(DeviceError::OperandMissing { op, index })?;
        if bytes.is_empty() {
            return Ok(&mut []);
        }
        bytemuck::try_cast_slice_mut(bytes).map_err(|_| DeviceError::OperandAlignment { op, index })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::tree_add::TreeAdd;
    use crate::op::{OpCall, Slot};

    fn call(read: Region, write: Region) -> PlacedCall {
        PlacedCall {
            call: OpCall {
                op: TreeAdd { elements: 4 }.into(),
                reads: vec![Slot(0)],
                writes: vec![Slot(1)],
            },
            reads: vec![read],
            writes: vec![write],
        }
    }

    fn region(offset: usize, bytes: usize) -> Region {
        Region { offset, bytes }
    }

    #[test]
    fn operands_are_the_bytes_of_their_regions() {
        let mut arena = CpuArena::zeroed(64).unwrap();
        arena
            .bytes_mut(region(0, 4))
            .unwrap()
            .copy_from_slice(&7u32.to_le_bytes());
        let mut operands = arena.borrow(&call(region(0, 16), region(16, 16))).unwrap();
        let left: &mut [u32] = operands.write(0).unwrap();
        left[3] = operands.read::<u32>(0).unwrap()[0];
        let taken_twice = operands.write::<u32>(0).err();
        assert!(matches!(
            taken_twice,
            Some(DeviceError::OperandMissing { index: 0, .. })
        ));
        let missing = operands.read::<u32>(1).err();
        assert!(matches!(
            missing,
            Some(DeviceError::OperandMissing { index: 1, .. })
        ));
        assert_eq!(arena.bytes(region(28, 4)).unwrap(), 7u32.to_le_bytes());
    }

    #[test]
    fn a_written_region_may_not_overlap_and_must_lie_inside() {
        let mut arena = CpuArena::zeroed(64).unwrap();
        let overlap = arena.borrow(&call(region(0, 16), region(8, 16))).err();
        assert_eq!(overlap, Some(DeviceError::Overlap { offset: 8 }));
        let outside = arena.borrow(&call(region(0, 16), region(60, 16))).err();
        let arena_bytes = 64;
        assert_eq!(
            outside,
            Some(DeviceError::OutOfArena {
                offset: 60,
                end: 76,
                arena_bytes
            })
        );
    }

    #[test]
    fn a_place_that_does_not_fit_the_element_type_is_an_error() {
        let mut arena = CpuArena::zeroed(64).unwrap();
        let operands = arena.borrow(&call(region(2, 4), region(16, 16))).unwrap();
        let read = operands.read::<f32>(0).err();
        assert!(matches!(
            read,
            Some(DeviceError::OperandAlignment { index: 0, .. })
        ));
    }

    #[test]
    fn an_arena_that_does_not_fit_is_refused() {
        let refused = CpuArena::zeroed(usize::MAX / 2).err();
        assert!(matches!(refused, Some(DeviceError::OutOfMemory { .. })));
    }
}

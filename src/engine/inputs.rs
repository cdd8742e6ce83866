//! The inputs of a step as one image on the host.
//!
//! Token ids, targets, weights and scalars lie side by side in the arena, so one copy brings all of them.
//! The image is made once; a step only overwrites it.

use std::ops::Range;

use crate::backend::same_length;
use crate::data::Batch;
use crate::error::DeviceError;
use crate::layout::{Layout, Region};
use crate::op::Slot;
use crate::op::step_values::StepScalars;

/// The bytes of the inputs, in as few stretches of the arena as they lie in.
pub struct InputImage {
    stretches: Vec<(Region, Vec<u8>)>,
    /// The stretch and the range in it of ids, targets, weights and scalars.
    places: [(usize, Range<usize>); 4],
}

impl InputImage {
    /// The image of ids, targets, weights and scalars. What lies between two inputs of one stretch is padding that
    /// belongs to no slot and is zero, there as here.
    pub fn of(layout: &Layout, slots: [Slot; 4]) -> Self {
        let regions = slots.map(|slot| layout.region(slot));
        let mut order = regions;
        order.sort();
        let mut stretches: Vec<Region> = Vec::new();
        for region in order {
            match stretches.last_mut() {
                Some(last) if is_padding(layout, last.end()..region.offset) => {
                    last.bytes = region.end() - last.offset;
                }
                _ => stretches.push(region),
            }
        }
        let places = regions.map(|region| {
            let holds = |s: &Region| s.offset <= region.offset && region.end() <= s.end();
            let index = stretches.iter().position(holds).unwrap_or(0);
            let start = region.offset - stretches[index].offset;
            (index, start..start + region.bytes)
        });
        let images = stretches.into_iter().map(|s| (s, vec![0; s.bytes]));
        InputImage {
            stretches: images.collect(),
            places,
        }
    }

    /// Overwrites the image with a batch and its scalars.
    ///
    /// # Errors
    /// [`DeviceError::TransferSize`] for a batch of another size; a batch that was validated fits.
    pub fn set(&mut self, batch: &Batch, scalars: &StepScalars) -> Result<(), DeviceError> {
        let fields: [&[u8]; 4] = [
            bytemuck::cast_slice(&batch.input_ids),
            bytemuck::cast_slice(&batch.targets),
            bytemuck::cast_slice(&batch.weights),
            bytemuck::bytes_of(scalars),
        ];
        for ((stretch, range), field) in self.places.iter().zip(fields) {
            let (offset, bytes) = (range.start, range.len());
            same_length(Region { offset, bytes }, field.len())?;
            self.stretches[*stretch].1[range.clone()].copy_from_slice(field);
        }
        Ok(())
    }

    /// What to write, and where.
    pub fn stretches(&self) -> impl Iterator<Item = (Region, &[u8])> {
        let stretches = self.stretches.iter();
        stretches.map(|(region, bytes)| (*region, bytes.as_slice()))
    }
}

/// Whether no slot has a byte in a range.
fn is_padding(layout: &Layout, range: Range<usize>) -> bool {
    let touches = |r: &Region| r.bytes > 0 && r.offset < range.end && range.start < r.end();
    range.is_empty() || !layout.regions().iter().any(touches)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::SlotTable;
    use crate::shape::{DType, Role, TensorSpec};

    const ROLES: [(&str, Role); 4] = [
        ("input_ids", Role::Input),
        ("targets", Role::Input),
        ("weights", Role::Input),
        ("scalars", Role::Scalars),
    ];

    /// Inputs of 2 x 5 tokens, with a weight between the second and the third where `apart` says so.
    fn planned(apart: &[usize]) -> (Layout, [Slot; 4]) {
        let mut slots = SlotTable::default();
        let mut made = Vec::new();
        for (index, (name, role)) in ROLES.into_iter().enumerate() {
            if apart.contains(&index) {
                slots.add(TensorSpec::new("w", [3], DType::F32, Role::Param));
            }
            let elements = if index == 3 { 8 } else { 10 };
            made.push(slots.add(TensorSpec::new(name, [elements], DType::I32, role)));
        }
        let made = [made[0], made[1], made[2], made[3]];
        (Layout::plan(&slots, &[]), made)
    }

    fn batch() -> Batch {
        Batch {
            batch: 2,
            seq_len: 5,
            input_ids: (1..11).collect(),
            targets: (11..21).collect(),
            weights: vec![0.5; 10],
            normaliser: None,
        }
    }

    #[test]
    fn inputs_that_lie_side_by_side_are_one_stretch_and_others_are_not() {
        let scalars: StepScalars = bytemuck::Zeroable::zeroed();
        let scalars = StepScalars {
            lr: 0.25,
            ..scalars
        };
        for (apart, count) in [(vec![], 1), (vec![2], 2), (vec![1, 2, 3], 4)] {
            let (layout, inputs) = planned(&apart);
            let mut image = InputImage::of(&layout, inputs);
            image.set(&batch(), &scalars).unwrap();
            assert_eq!(image.stretches().count(), count);
            let mut arena = vec![0u8; layout.arena_bytes()];
            for (region, bytes) in image.stretches() {
                arena[region.offset..region.end()].copy_from_slice(bytes);
            }
            let mut expected = vec![0u8; layout.arena_bytes()];
            let mut put = |slot, bytes: &[u8]| {
                let region = layout.region(slot);
                expected[region.offset..region.end()].copy_from_slice(bytes);
            };
            put(inputs[0], bytemuck::cast_slice(&batch().input_ids));
            put(inputs[1], bytemuck::cast_slice(&batch().targets));
            put(inputs[2], bytemuck::cast_slice(&batch().weights));
            put(inputs[3], bytemuck::bytes_of(&scalars));
            assert_eq!(arena, expected);
        }
    }

    #[test]
    fn a_batch_of_another_size_is_refused() {
        let (layout, inputs) = planned(&[]);
        let mut image = InputImage::of(&layout, inputs);
        let mut long = batch();
        long.targets.push(1);
        let refused = image.set(&long, &bytemuck::Zeroable::zeroed());
        assert!(matches!(
            refused,
            Err(DeviceError::TransferSize {
                expected: 40,
                found: 44
            })
        ));
    }
}

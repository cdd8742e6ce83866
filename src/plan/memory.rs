//! What a plan needs of a device's memory, held against what the device has, before anything is
//! allocated.

use crate::error::DeviceError;
use crate::layout::Layout;

/// What is said to lower when the tensors that survive a step alone are too large.
const LOWER_MODEL: &str = "the model's size (model.n_layers, model.d_model or model.vocab_size)";

/// What is said to lower when the tensors that live inside a step are too large.
const LOWER_BATCH: &str = "data.batch or data.seq_len";

/// The memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub free_bytes: usize,
    pub total_bytes: usize,
}

/// What a plan needs on a device: the arena of its layout and the workspace behind it.
#[derive(Clone, Copy, Debug)]
pub struct MemoryNeed<'a> {
    pub layout: &'a Layout,
    /// What the device's kernels need besides the arena, in bytes.
    pub workspace_bytes: usize,
}

impl MemoryNeed<'_> {
    /// Arena and workspace together, in bytes.
    pub fn bytes(&self) -> usize {
        self.layout
            .arena_bytes()
            .saturating_add(self.workspace_bytes)
    }

    /// The arena by role, then workspace and total, and what of it is free on `device`; a line each.
    pub fn table(&self, device: &str, room: Option<Room>) -> String {
        let mut text = self.layout.describe();
        let mut row = |name: &str, bytes: usize| text += &format!("{name:<12} {bytes:>14} bytes\n");
        row("workspace", self.workspace_bytes);
        row("total", self.bytes());
        if let Some(room) = room {
            let (free, total) = (room.free_bytes, room.total_bytes);
            text += &format!("{device:<12} {free:>14} bytes free of {total}\n");
        }
        text
    }

    /// Checks that everything fits into what is free.
    ///
    /// # Errors
    /// [`DeviceError::PlanTooLarge`] with the numbers and what to lower: the model where its state
    /// alone is too large, else the batch.
    pub fn check(&self, device: &str, room: Room) -> Result<(), DeviceError> {
        if self.bytes() <= room.free_bytes {
            return Ok(());
        }
        let state_bytes = self.layout.persistent_bytes();
        let fixed = state_bytes.saturating_add(self.workspace_bytes);
        Err(DeviceError::PlanTooLarge {
            device: device.to_owned(),
            needed_bytes: self.bytes(),
            state_bytes,
            local_bytes: self.layout.arena_bytes() - state_bytes,
            workspace_bytes: self.workspace_bytes,
            free_bytes: room.free_bytes,
            total_bytes: room.total_bytes,
            lower: match fixed > room.free_bytes {
                true => LOWER_MODEL,
                false => LOWER_BATCH,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::tree_add::TreeAdd;
    use crate::op::{Op, OpCall};
    use crate::program::SlotTable;
    use crate::shape::{DType, Role, TensorSpec};

    /// 4096 bytes of parameters and 1024 of an activation.
    fn layout() -> Layout {
        let mut slots = SlotTable::default();
        let mut add =
            |elements: usize, role| slots.add(TensorSpec::new("t", [elements], DType::F32, role));
        let (param, local) = (add(1024, Role::Param), add(256, Role::Activation));
        let call = OpCall {
            op: Op::TreeAdd(TreeAdd { elements: 256 }),
            reads: vec![param],
            writes: vec![local],
        };
        Layout::plan(&slots, &[&[call]])
    }

    fn room(free_bytes: usize) -> Room {
        Room {
            free_bytes,
            total_bytes: 10_000,
        }
    }

    #[test]
    fn a_plan_fits_up_to_the_last_byte_and_not_beyond() {
        let layout = layout();
        let need = MemoryNeed {
            layout: &layout,
            workspace_bytes: 512,
        };
        assert_eq!(need.bytes(), 4096 + 1024 + 512);
        assert_eq!(need.check("cuda:3", room(5632)), Ok(()));
        assert_eq!(
            need.check("cuda:3", room(5631)),
            Err(DeviceError::PlanTooLarge {
                device: "cuda:3".into(),
                needed_bytes: 5632,
                state_bytes: 4096,
                local_bytes: 1024,
                workspace_bytes: 512,
                free_bytes: 5631,
                total_bytes: 10_000,
                lower: LOWER_BATCH,
            })
        );
    }

    #[test]
    fn what_to_lower_is_what_is_too_large() {
        let layout = layout();
        let need = MemoryNeed {
            layout: &layout,
            workspace_bytes: 512,
        };
        let lower = |free| match need.check("cpu", room(free)) {
            Err(DeviceError::PlanTooLarge { lower, .. }) => lower,
            other => panic!("expected a refusal, found {other:?}"),
        };
        assert_eq!(lower(4608), LOWER_BATCH);
        assert_eq!(lower(4607), LOWER_MODEL);
    }

    #[test]
    fn the_table_ends_with_what_is_needed_and_what_is_free() {
        let layout = layout();
        let need = MemoryNeed {
            layout: &layout,
            workspace_bytes: 512,
        };
        let table = need.table("cuda:0", Some(room(9_000)));
        let lines: Vec<Vec<&str>> = table
            .lines()
            .map(|l| l.split_whitespace().collect())
            .collect();
        assert_eq!(lines[0], ["param", "4096", "bytes"]);
        let last = &lines[lines.len() - 4..];
        assert_eq!(last[0], ["arena", "5120", "bytes"]);
        assert_eq!(last[1], ["workspace", "512", "bytes"]);
        assert_eq!(last[2], ["total", "5632", "bytes"]);
        assert_eq!(last[3], ["cuda:0", "9000", "bytes", "free", "of", "10000"]);
    }
}

//! Calls over round places, for tests of what launches serve.

use crate::layout::{PlacedCall, Region};
use crate::op::attention::AttentionShape;
use crate::op::lora::Part;
use crate::op::rope::Heads;
use crate::op::{Op, OpCall};

/// A region of 1 MiB that starts at this multiple of it.
pub fn region(at: usize) -> Region {
    Region {
        offset: at << 20,
        bytes: 1 << 20,
    }
}

/// A call over such regions, without slots.
pub fn placed(op: impl Into<Op>, reads: &[usize], write: usize) -> PlacedCall {
    PlacedCall {
        reads: reads.iter().map(|&at| region(at)).collect(),
        writes: vec![region(write)],
        call: OpCall {
            op: op.into(),
            reads: Vec::new(),
            writes: Vec::new(),
        },
    }
}

/// Parts of so many columns, one behind the other.
pub fn parts(columns: &[usize]) -> Vec<Part> {
    let mut first = 0;
    let part = |&columns: &usize| {
        first += columns;
        Part {
            first: first - columns,
            columns,
        }
    };
    columns.iter().map(part).collect()
}

/// Attention of four heads, two of keys and values.
pub fn shape(batch: usize, seq_len: usize, head_dim: usize) -> AttentionShape {
    AttentionShape {
        batch,
        seq_len,
        heads: Heads {
            n_heads: 4,
            n_kv_heads: 2,
            head_dim,
        },
    }
}

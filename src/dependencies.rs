//! Which calls of a program must wait for which: what lets a device run independent calls at one time.
//!
//! A call waits for the calls before it that wrote what it reads or writes, or read what it writes. The
//! order of the program decides who waits for whom, so the bits are those of the calls one after another.

use crate::layout::{PlacedCall, Region};
use crate::op::Access;

/// For each call the earlier calls that it must wait for directly, ascending; those that it waits for
/// anyway, through others, are left out. `workspace` names the workspace a call uses, if any: two calls
/// with one workspace never run together.
pub fn dependencies(
    calls: &[PlacedCall],
    workspace: impl Fn(&PlacedCall) -> Option<usize>,
) -> Vec<Vec<usize>> {
    let touched: Vec<Touched> = calls.iter().map(|c| Touched::by(c, workspace(c))).collect();
    // Every call before a call that it waits for, directly or not.
    let mut before: Vec<Vec<bool>> = Vec::with_capacity(calls.len());
    let mut direct = Vec::with_capacity(calls.len());
    for (index, call) in touched.iter().enumerate() {
        let mut known = vec![false; index];
        let mut waits = Vec::new();
        for earlier in (0..index).rev() {
            if known[earlier] || !call.must_follow(&touched[earlier]) {
                continue;
            }
            waits.push(earlier);
            known[earlier] = true;
            for (at, &reached) in before[earlier].iter().enumerate() {
                known[at] |= reached;
            }
        }
        waits.reverse();
        direct.push(waits);
        before.push(known);
    }
    direct
}

/// What a call touches.
struct Touched {
    reads: Vec<Region>,
    writes: Vec<(Region, Access)>,
    workspace: Option<usize>,
}

impl Touched {
    fn by(call: &PlacedCall, workspace: Option<usize>) -> Self {
        let signature = call.call.op.rule().signature();
        let accesses = signature.writes.iter().map(|operand| operand.access);
        Touched {
            reads: call.reads.clone(),
            writes: call.writes.iter().copied().zip(accesses).collect(),
            workspace,
        }
    }

    fn must_follow(&self, earlier: &Touched) -> bool {
        let shared = |reads: &[Region], writes: &[(Region, Access)]| {
            reads.iter().any(|a| writes.iter().any(|(b, _)| meet(a, b)))
        };
        let both_write = || {
            let mut pairs = self
                .writes
                .iter()
                .flat_map(|a| earlier.writes.iter().map(move |b| (a, b)));
            pairs.any(|((a, how_a), (b, how_b))| {
                // Calls that each write a part of one tensor write different parts of it.
                let parts = (*how_a, *how_b) == (Access::Partial, Access::Partial) && a == b;
                !parts && meet(a, b)
            })
        };
        let one_workspace = self.workspace.is_some() && self.workspace == earlier.workspace;
        let reads_written = shared(&self.reads, &earlier.writes);
        one_workspace || reads_written || shared(&earlier.reads, &self.writes) || both_write()
    }
}

fn meet(a: &Region, b: &Region) -> bool {
    a.offset < b.end() && b.offset < a.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::{Family, ModelConfig};
    use crate::model::decoder::Decoder;
    use crate::op::tree_add::TreeAdd;
    use crate::op::{Op, OpCall};
    use crate::plan::{Plan, PlanConfig, ProgramKind};

    /// A call that reads `from` and updates `to`, four bytes each.
    fn call(from: usize, to: usize) -> PlacedCall {
        let region = |offset| Region { offset, bytes: 4 };
        PlacedCall {
            call: OpCall {
                op: TreeAdd { elements: 1 }.into(),
                reads: Vec::new(),
                writes: Vec::new(),
            },
            reads: vec![region(from)],
            writes: vec![region(to)],
        }
    }

    fn plain(calls: &[PlacedCall]) -> Vec<Vec<usize>> {
        dependencies(calls, |_| None)
    }

    #[test]
    fn a_call_waits_for_what_it_reads_and_for_readers_of_what_it_writes() {
        assert_eq!(plain(&[call(0, 4), call(4, 8)]), [vec![], vec![0]]);
        assert_eq!(plain(&[call(0, 4), call(8, 0)]), [vec![], vec![0]]);
        assert_eq!(plain(&[call(0, 4), call(8, 4)]), [vec![], vec![0]]);
    }

    #[test]
    fn calls_that_share_only_what_they_read_do_not_wait() {
        assert_eq!(
            plain(&[call(0, 4), call(0, 8)]),
            [vec![], Vec::<usize>::new()]
        );
    }

    #[test]
    fn what_is_waited_for_through_another_is_left_out() {
        let chain = [call(0, 4), call(4, 8), call(4, 8)];
        assert_eq!(plain(&chain), [vec![], vec![0], vec![1]]);
    }

    #[test]
    fn calls_of_one_workspace_wait_for_each_other() {
        let calls = [call(0, 4), call(0, 8), call(0, 12)];
        let found = dependencies(&calls, |c| (c.writes[0].offset != 8).then_some(0));
        assert_eq!(found, [vec![], vec![], vec![0]]);
    }

    fn step() -> Vec<PlacedCall> {
        let model = Decoder::new(ModelConfig {
            family: Family::Llama,
            vocab_size: 64,
            d_model: 32,
            n_layers: 2,
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 16,
            d_ff: 48,
            rope_theta: 1e4,
            rms_norm_eps: 1e-5,
            tie_embeddings: false,
            max_seq_len: 16,
            init_std: 0.02,
        });
        let plan = Plan::build(&model, PlanConfig::of(2, 16)).unwrap();
        plan.layout.place(plan.calls(ProgramKind::Step))
    }

    #[test]
    fn the_gradients_of_queries_and_of_keys_do_not_wait_for_each_other() {
        let calls = step();
        let found = plain(&calls);
        let at = |wanted: fn(&Op) -> bool| calls.iter().position(|c| wanted(&c.call.op)).unwrap();
        let queries = at(|op| matches!(op, Op::AttentionGradQuery(_)));
        let keys = at(|op| matches!(op, Op::AttentionGradKeyValue(_)));
        assert!(!found[keys.max(queries)].contains(&keys.min(queries)));
    }

    #[test]
    fn adamw_waits_for_every_call_before_it() {
        let calls = step();
        let found = plain(&calls);
        let mut reached = vec![false; calls.len()];
        let mut open = vec![calls.len() - 1];
        while let Some(call) = open.pop() {
            if !std::mem::replace(&mut reached[call], true) {
                open.extend(&found[call]);
            }
        }
        assert!(matches!(calls.last().unwrap().call.op, Op::AdamW(_)));
        assert!(reached.iter().all(|&r| r), "{reached:?}");
    }
}

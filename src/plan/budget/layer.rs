//! What of one layer can be computed again, and what each choice keeps and costs.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::grad::recompute::Again;
use crate::grad::schedule::{self, Written};
use crate::op::{OpCall, Slot};
use crate::plan::cost;
use crate::program::SlotTable;
use crate::shape::Role;

/// A set of a layer's step-local tensors, a bit each.
type Tensors = u128;

/// The most choices of one layer that are weighed.
const MOST_CHOICES: usize = 1 << 16;

/// A layer as far as recomputation is concerned: two that are equal have the same options.
#[derive(Debug, PartialEq)]
pub(super) struct Layer {
    /// Bytes of each tensor.
    bytes: Vec<usize>,
    /// Activations that no call outside the layer writes.
    own: Tensors,
    /// What backward reads of them where nothing is computed again.
    held: Tensors,
    /// What no layer writes and backward reads anyway: it costs nothing to read it once more.
    free: Tensors,
    units: Vec<Calls>,
    /// Units that write a tensor in common stand again together.
    groups: Vec<Vec<usize>>,
}

/// A unit of a layer.
#[derive(Debug, PartialEq)]
struct Calls {
    /// As it stands in forward.
    called: Form,
    from_own_output: Option<Form>,
    /// What is written after it.
    changed: Tensors,
}

/// What calls find and write, and how long they take.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Form {
    needs: Tensors,
    writes: Tensors,
    seconds: f64,
}

/// A choice of what is computed again.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LayerOption {
    /// Of each unit.
    pub again: Vec<Again>,
    /// Bytes of what forward keeps for backward.
    pub kept_bytes: usize,
    /// Estimated time of the calls that stand again.
    pub seconds: f64,
}

/// The bits of step-local tensors, by their roots.
struct Names<'a> {
    slots: &'a SlotTable,
    roots: Vec<Slot>,
}

impl Names<'_> {
    /// The local ones of these roots as bits. Those beyond the last bit are left out: the layer is then given no
    /// options.
    fn bits(&mut self, roots: &BTreeSet<Slot>) -> Tensors {
        let mut bits = 0;
        for &root in roots {
            if self.slots.spec(root).role.persistent() {
                continue;
            }
            let known = self.roots.iter().position(|&r| r == root);
            let at = known.unwrap_or_else(|| {
                self.roots.push(root);
                self.roots.len() - 1
            });
            bits |= bit(at);
        }
        bits
    }

    fn form(&mut self, calls: &[OpCall]) -> Form {
        let needs = schedule::needs(self.slots, calls);
        let writes = schedule::writes(self.slots, calls);
        Form {
            needs: self.bits(&needs),
            writes: self.bits(&writes),
            seconds: calls.iter().map(|call| cost::seconds(&call.op)).sum(),
        }
    }
}

fn bit(at: usize) -> Tensors {
    1_u128.checked_shl(at as u32).unwrap_or(0)
}

impl Layer {
    /// The layer that stands at `range` in a body of which `layers` are all layers; backward reads `held` of what
    /// forward leaves.
    pub fn of(
        (slots, written): (&SlotTable, &Written),
        (body, layers, range): (&[OpCall], &Range<usize>, &Range<usize>),
        held: &BTreeSet<Slot>,
    ) -> Self {
        let mut names = Names {
            slots,
            roots: Vec::new(),
        };
        let calls = &body[range.clone()];
        let mut units = Vec::new();
        for bounds in schedule::unit_bounds(slots, calls) {
            let unit = &calls[bounds.clone()];
            let own = unit.last().and_then(|call| {
                let again = call.op.rule().again_from_output(call)?;
                Some(names.form(&[again]))
            });
            units.push((names.form(unit), own, range.start + bounds.end));
        }
        // From here on no tensor gets a new bit.
        let roots = std::mem::take(&mut names.roots);
        let those = |wanted: &dyn Fn(Slot) -> bool| {
            let found = roots.iter().enumerate().filter(|(_, root)| wanted(**root));
            found.fold(0, |bits, (at, _)| bits | bit(at))
        };
        let all = units
            .iter()
            .fold(0, |all, (called, ..)| all | called.writes);
        let activation = |root| slots.spec(root).role == Role::Activation;
        let own = all & those(&|root| activation(root) && !written.outside(root, range));
        let held = those(&|root| held.contains(&root));
        let inside =
            those(&|root| written.from(root, layers.start) && !written.from(root, layers.end));
        let units = units.into_iter().map(|(called, own, end)| Calls {
            called,
            from_own_output: own,
            changed: those(&|root| written.from(root, end)),
        });
        let mut layer = Layer {
            bytes: roots.iter().map(|&r| slots.spec(r).bytes()).collect(),
            own,
            held: held & own,
            free: held & !inside,
            units: units.collect(),
            groups: Vec::new(),
        };
        layer.groups = layer.groups_of();
        layer
    }

    /// Units in groups, of those from whose tensors something that backward reads follows.
    fn groups_of(&self) -> Vec<Vec<usize>> {
        let mut useful = self.held;
        for unit in self.units.iter().rev() {
            if unit.called.writes & useful != 0 {
                useful |= unit.called.needs;
            }
        }
        let mut groups: Vec<(Tensors, Vec<usize>)> = Vec::new();
        for (index, unit) in self.units.iter().enumerate() {
            let mut writes = unit.called.writes & self.own;
            if writes & useful == 0 {
                continue;
            }
            let mut members = vec![index];
            groups.retain(|(others, group)| {
                let apart = others & writes == 0;
                if !apart {
                    writes |= others;
                    members.extend(group);
                }
                apart
            });
            members.sort();
            groups.push((writes, members));
        }
        let mut groups: Vec<Vec<usize>> = groups.into_iter().map(|(_, group)| group).collect();
        groups.sort();
        groups
    }

    /// The choices that no mixture of two others beats: from that which keeps all on, each keeping less than the one
    /// before at more time, and a dearer byte.
    pub fn options(&self) -> Vec<LayerOption> {
        let nothing = vec![Again::Kept; self.units.len()];
        let Some(first) = self.option(&nothing) else {
            return Vec::new();
        };
        let all = match self.bytes.len() <= Tensors::BITS as usize {
            true => self.choices(),
            false => Vec::new(),
        };
        let mut hull = vec![first];
        loop {
            let last = &hull[hull.len() - 1];
            let price = |option: &LayerOption| {
                let saved = last.kept_bytes - option.kept_bytes;
                (option.seconds - last.seconds) / saved as f64
            };
            let less = all.iter().filter(|o| o.kept_bytes < last.kept_bytes);
            let next = less.min_by(|a, b| {
                let prices = price(a).total_cmp(&price(b));
                prices.then(a.kept_bytes.cmp(&b.kept_bytes))
            });
            match next {
                Some(next) => hull.push(next.clone()),
                None => return hull,
            }
        }
    }

    /// Every choice that can be made.
    fn choices(&self) -> Vec<LayerOption> {
        let mut choices = vec![vec![Again::Kept; self.units.len()]];
        for group in &self.groups {
            let mut ways = vec![Again::Called];
            if let [unit] = group[..]
                && self.units[unit].from_own_output.is_some()
            {
                ways.push(Again::FromOwnOutput);
            }
            if choices.len() * (1 + ways.len()) > MOST_CHOICES {
                break;
            }
            for index in 0..choices.len() {
                for &way in &ways {
                    let mut more = choices[index].clone();
                    group.iter().for_each(|&unit| more[unit] = way);
                    choices.push(more);
                }
            }
        }
        let options = choices.iter().filter_map(|again| self.option(again));
        options.collect()
    }

    /// What a choice keeps and costs; `None` where a call would find other bits than it found in forward.
    fn option(&self, again: &[Again]) -> Option<LayerOption> {
        let form = |index: usize| match again[index] {
            Again::Kept => None,
            Again::Called => Some(self.units[index].called),
            Again::FromOwnOutput => self.units[index].from_own_output,
        };
        let forms: Vec<Option<Form>> = (0..self.units.len()).map(form).collect();
        let twins = forms.iter().flatten();
        let twins = twins.fold(0, |all, form| all | form.writes) & self.own;
        let mut wanted = self.held;
        let (mut seconds, mut read) = (0.0, vec![false; forms.len()]);
        for (index, form) in forms.iter().enumerate().rev() {
            match form {
                Some(form) if form.writes & twins & wanted != 0 => {
                    if form.needs & !twins & self.units[index].changed != 0 {
                        return None;
                    }
                    wanted |= form.needs;
                    seconds += form.seconds;
                    read[index] = true;
                }
                _ => {}
            }
        }
        // What nothing reads is kept as well, which asks for no memory; but what stands again together stays so.
        let mut chosen = vec![Again::Kept; again.len()];
        for group in &self.groups {
            if group.iter().any(|&unit| read[unit]) {
                group.iter().for_each(|&unit| chosen[unit] = again[unit]);
            }
        }
        // What another layer writes counts, though it may be kept there: it may be computed again there as well.
        let kept = wanted & !twins & !self.free;
        let bytes = self.bytes.iter().enumerate();
        let bytes = bytes.filter(|(at, _)| kept & bit(*at) != 0);
        Some(LayerOption {
            again: chosen,
            kept_bytes: bytes.map(|(_, bytes)| bytes).sum(),
            seconds,
        })
    }
}

//! The lanes of a graph: calls whose order matters keep it, whatever lane is ahead.

use bitstep::cuda::lanes::{Lane, Unit, units};
use bitstep::cuda::together::groups;
use bitstep::layout::PlacedCall;

use crate::ptx::{DEVICE, plans};

/// For each unit the units that have surely ended when it starts.
fn ended_before(units: &[Unit]) -> Vec<Vec<bool>> {
    let mut ended: Vec<Vec<bool>> = Vec::new();
    for unit in units {
        let mut own = vec![false; units.len()];
        for &earlier in &unit.after {
            own[earlier] = true;
            for (mine, &theirs) in own.iter_mut().zip(&ended[earlier]) {
                *mine |= theirs;
            }
        }
        ended.push(own);
    }
    ended
}

/// The first two units whose order matters and is not kept.
fn unordered(calls: &[PlacedCall], units: &[Unit]) -> Option<(usize, usize)> {
    let ended = ended_before(units);
    let of = |unit: &Unit| calls[unit.first..][..unit.calls].iter();
    let bytes = |unit: &Unit, written: bool| -> Vec<(usize, usize)> {
        let touched =
            of(unit).flat_map(|c| c.writes.iter().chain(c.reads.iter().filter(|_| !written)));
        touched.map(|r| (r.offset, r.end())).collect()
    };
    let meet = |a: &[(usize, usize)], b: &[(usize, usize)]| {
        a.iter().any(|a| b.iter().any(|b| a.0 < b.1 && b.0 < a.1))
    };
    let facts: Vec<_> = units
        .iter()
        .map(|u| (bytes(u, true), bytes(u, false)))
        .collect();
    let in_program = |early: usize, late: usize| units[early].first < units[late].first;
    for late in 0..units.len() {
        for early in (0..units.len()).filter(|&early| in_program(early, late)) {
            let (a, b) = (&facts[early], &facts[late]);
            let matters = meet(&a.0, &b.1) || meet(&b.0, &a.1);
            if matters && !ended[late][early] {
                return Some((early, late));
            }
        }
    }
    None
}

#[test]
fn calls_whose_order_matters_keep_it() {
    let (mut beside, mut crossings) = (0, 0);
    for plan in plans() {
        for (_, calls) in plan.programs().iter() {
            let calls = plan.layout.place(calls);
            let made = units(&calls, &groups(&calls, &DEVICE));
            let covered: usize = made.iter().map(|unit| unit.calls).sum();
            assert_eq!(covered, calls.len());
            assert_eq!(unordered(&calls, &made), None);
            beside += made.iter().filter(|unit| unit.lane == Lane::Side).count();
            // A wait for the other lane that is left out is found.
            for at in 0..made.len() {
                let lane = made[at].lane;
                let crossing = |unit: &Unit| {
                    let places = unit.after.iter();
                    places.copied().position(|other| made[other].lane != lane)
                };
                if let Some(gone) = crossing(&made[at]) {
                    let mut broken = made.clone();
                    broken[at].after.remove(gone);
                    assert!(
                        unordered(&calls, &broken).is_some(),
                        "unit {at} waits for nothing"
                    );
                    crossings += 1;
                }
            }
        }
    }
    assert!(
        beside > 100 && crossings > 100,
        "only {beside} units stand in the side lane, with {crossings} waits between the lanes"
    );
}

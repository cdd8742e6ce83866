use super::common::*;
use bitstep::engine::Hyper;
use bitstep::plan::PlanConfig;

#[test]
fn debug() {
    for (b, t) in [(1, 4), (8, 32), (3, 24), (2, 70), (32, 32)] {
        let p = plan(PlanConfig::of(b, t));
        let mut tr = trainer(&p, Hyper::default(), 2);
        for s in 0..4 {
            println!("{b} {t} {s} {:?}", tr.step(&batch(&p, s)).map(|r| r.loss));
        }
    }
}

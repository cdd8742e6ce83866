//! The probe against devices that follow another model: each has to be seen, and to be named.

use super::*;

/// The section of a device that follows `model`.
fn followed(model: StepModel, kind: Kind) -> Section {
    let run = |tiles: &Tiles| {
        let outputs = 0..tiles.c.len();
        Ok(outputs
            .map(|i| by_model(&model, kind, tiles.case(i)))
            .collect())
    };
    section(Instruction::Mma, kind, 1, run).expect("no device is asked")
}

/// What cannot show for a kind: f16 products are never near the ends of binary32, and tf32 steps are short.
fn shows(kind: Kind, name: &str) -> bool {
    match kind {
        Kind::F16 => !["least exponent", "overflow", "2^128"]
            .iter()
            .any(|w| name.contains(w)),
        Kind::Tf32 => !name.contains("fused"),
        Kind::Bf16 => true,
    }
}

#[test]
fn a_device_of_another_model_is_seen_and_named() {
    for (i, (name, model)) in models().into_iter().enumerate().skip(1) {
        // Each model for one kind, and each kind with a third of the models.
        let kind = match Kind::ALL[i % 3] {
            kind if shows(kind, name) => kind,
            _ => Kind::Bf16,
        };
        let section = followed(model, kind);
        assert!(!section.holds(), "{kind:?}: {name} is not seen");
        assert_eq!(section.matching(), [name], "{kind:?}");
        let text = section.to_string();
        assert!(text.contains(name) && text.contains("expected"), "{text}");
    }
}

#[test]
fn a_device_that_follows_the_contract_is_proven() {
    let sections = |instruction| {
        Kind::ALL.map(|kind| Section {
            instruction,
            ..followed(StepModel::HOPPER, kind)
        })
    };
    let mut report = ProbeReport {
        device: "a device".into(),
        capability: (9, 0),
        sections: sections(Instruction::Mma).to_vec(),
    };
    assert!(!report.proven(Kind::Bf16), "one instruction was not asked");
    report.sections.extend(sections(Instruction::Wgmma));
    assert!(Kind::ALL.iter().all(|&kind| report.proven(kind)));
    assert!(report.to_string().contains("domain f16.sm90: proven"));
    report.capability = (8, 0);
    assert!(!report.proven(Kind::Bf16), "another architecture");
    report.capability = (9, 0);
    report.sections[0].categories[0].equal[0] -= 1;
    assert!(!report.proven(Kind::Bf16) && report.proven(Kind::F16));
    assert!(report.to_string().contains("domain bf16.sm90: not proven"));
}

#[test]
fn nan_patterns_are_told_and_equal_each_other() {
    let tiles = Tiles::generate(Kind::Tf32, Category::Nans, 1);
    let found = (0..tiles.c.len()).map(|i| {
        let x = by_model(&StepModel::HOPPER, Kind::Tf32, tiles.case(i));
        if x.is_nan() {
            f32::from_bits(0x7fff_ffff)
        } else {
            x
        }
    });
    let report = compare(&tiles, &found.collect::<Vec<f32>>());
    assert!(report.holds());
    assert_eq!(report.nans, [0x7fff_ffff]);
}

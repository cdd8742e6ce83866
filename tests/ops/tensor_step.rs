//! The device's tensor-core instructions against the contract's step.

use bitstep::cuda::device;
use bitstep::cuda::probe::probe;
use bitstep::error::DeviceError;
use bitstep::num::tensor_step::Kind;

/// Writes the whole report to the file that `BITSTEP_PROBE_REPORT` names, if it names one.
#[test]
fn the_devices_instructions_follow_the_contracts_step() {
    let report = match probe(0) {
        Ok(report) => report,
        Err(reason) => {
            let required = std::env::var_os("REQUIRE_CUDA").is_some_and(|v| v == "1");
            assert!(!required, "REQUIRE_CUDA=1, but {reason}");
            eprintln!("skipped on a GPU: {reason}");
            return;
        }
    };
    if let Some(path) = std::env::var_os("BITSTEP_PROBE_REPORT") {
        std::fs::write(path, report.to_string()).expect("the report is written");
    }
    eprintln!("{report}");
    if report.capability != (9, 0) {
        eprintln!("skipped: the domains are those of compute capability 9.0");
        return;
    }
    for kind in Kind::ALL {
        assert!(
            report.proven(kind),
            "{} is not proven:\n{report}",
            kind.name()
        );
    }
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let error = probe(1000).expect_err("no machine has so many devices");
    let without = device::probe().is_err();
    let expected = matches!(error, DeviceError::NoDevice { wanted: 1000, .. });
    assert!(expected || without, "{error}");
}

use super::*;

fn line(step: u64, bits: &str, more: &str) -> String {
    format!(
        "{{\"step\":{step},\"loss\":1.5,\"loss_bits\":\"{bits}\",\"grad_norm\":null,\"lr\":0.1,\"applied\":true,\
         \"tokens_per_s\":10.0,\"phase\":\"eager\",\"elapsed_s\":1.0{more}}}\n"
    )
}

fn run(lines: &[String]) -> (tempfile::TempDir, Result<RunHistory, RunError>) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(METRICS), lines.concat()).unwrap();
    let history = RunHistory::read(folder.path());
    (folder, history)
}

fn validated(step: u64, loss: &str) -> String {
    let more = format!(
        ",\"validation\":{{\"loss\":{loss},\"perplexity\":1.0,\"accuracy\":0.5,\"scored\":4}}"
    );
    line(step, "00", &more)
}

#[test]
fn lines_are_read_and_one_that_was_cut_off_is_passed_over() {
    let cut = line(2, "cc", "");
    let lines = [line(0, "aa", ""), line(1, "bb", ""), cut[..20].to_owned()];
    let (_folder, history) = run(&lines);
    let history = history.unwrap();
    assert_eq!(history.steps.len(), 2);
    assert_eq!(history.steps[1].loss_bits, "bb");
    assert_eq!((&history.facts, &history.outcome), (&None, &None));
}

#[test]
fn a_line_that_is_none_is_named_with_its_place() {
    for (lines, place, part) in [
        (
            vec![line(0, "a", ""), "{}\n".to_owned()],
            2,
            "missing field",
        ),
        (
            vec![line(4, "a", ""), line(4, "a", "")],
            2,
            "a step after 4, found 4",
        ),
        (
            vec![line(1 << 53, "a", "")],
            1,
            "a step below 9007199254740992",
        ),
        (
            vec!["\u{0}\n".to_owned(), line(0, "a", "")],
            1,
            "expected value",
        ),
    ] {
        match run(&lines).1 {
            Err(RunError::History { line, message, .. }) => {
                assert_eq!(line, place);
                assert!(message.contains(part), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(run(&[]).1, Err(RunError::NoSteps { .. })));
}

#[test]
fn the_best_evaluation_is_the_first_with_the_lowest_finite_loss() {
    let losses = ["3.0", "2.0", "null", "2.0", "2.5"];
    let lines: Vec<String> = losses
        .iter()
        .zip(0..)
        .map(|(loss, i)| validated(i, loss))
        .collect();
    let (steps, found) = run(&lines).1.unwrap().best().unwrap();
    assert_eq!((steps, found.loss), (2, Some(2.0)));
    assert_eq!(run(&[line(0, "a", "")]).1.unwrap().best(), None);
}

#[test]
fn the_place_where_two_runs_part_is_found_by_losses_and_by_roots() {
    let root = |name: &str| format!(",\"root\":\"{name}\"");
    let of = |bits: [&str; 4], roots: [&str; 2]| {
        let lines = [
            line(0, bits[0], ""),
            line(1, bits[1], &root(roots[0])),
            line(2, bits[2], ""),
            line(3, bits[3], &root(roots[1])),
        ];
        run(&lines).1.unwrap()
    };
    let whole = of(["a", "b", "c", "d"], ["r", "s"]);
    let same = parting(&whole, &whole.clone());
    assert_eq!((same.loss, &same.root), (None, &None));
    assert_eq!((same.steps, same.roots), (4, 2));
    assert!(
        same.to_string()
            .starts_with("identical: the loss bits of 4 steps and 2 roots")
    );
    let late = parting(&whole, &of(["a", "b", "c", "x"], ["r", "t"]));
    assert_eq!(late.loss, Some(3));
    assert_eq!(late.root, Some((4, "s".to_owned(), "t".to_owned())));
    assert_eq!(
        late.to_string(),
        "the roots part after 4 steps, the losses at step 3"
    );
    let weights = parting(&whole, &of(["a", "b", "c", "d"], ["x", "s"]));
    assert_eq!(weights.loss, None);
    assert_eq!(weights.root.map(|(steps, ..)| steps), Some(2));
}

#[test]
fn an_outcome_of_another_number_of_steps_is_not_this_ones() {
    let (folder, _) = run(&[line(0, "a", ""), line(1, "b", "")]);
    let write = |steps: u64| {
        let text = format!("{{\"ended\":\"until\",\"steps\":{steps},\"root\":\"r\"}}");
        std::fs::write(folder.path().join(OUTCOME), text).unwrap();
        RunHistory::read(folder.path()).unwrap()
    };
    assert_eq!(write(2).roots().get(&2), Some(&"r"));
    assert_eq!(write(1).outcome, None);
    std::fs::write(folder.path().join(OUTCOME), "{\n").unwrap();
    let failed = RunHistory::read(folder.path()).unwrap_err();
    assert!(matches!(failed, RunError::History { .. }), "{failed}");
    assert_eq!(failed.exit_code().code(), 4);
}

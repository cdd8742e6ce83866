use super::*;
use crate::report::facts::{RoleBytes, RunFacts, RunOutcome};
use crate::report::history::{RecordedStep, RecordedValidation};

fn step(step: u64) -> RecordedStep {
    let x = step as f64;
    RecordedStep {
        step,
        loss: Some(4.0 / (1.0 + 0.1 * x)),
        loss_bits: format!("{step:08x}"),
        grad_norm: Some(1.0 + (x * 0.7).sin().abs()),
        lr: Some(1e-3),
        applied: true,
        tokens_per_s: 5e4,
        phase: "replayed".to_owned(),
        root: (step % 10 == 9).then(|| format!("root{step}")),
        validation: (step % 20 == 19).then_some(RecordedValidation {
            loss: Some(2.0),
            perplexity: Some(7.389),
            accuracy: 0.5,
        }),
        group_norms: [("layer 0", 0.5), ("layer 10", 0.1), ("head", 90.0)]
            .map(|(name, norm)| (name.to_owned(), Some(norm)))
            .into(),
    }
}

fn run(name: &str) -> RunHistory {
    RunHistory {
        folder: name.into(),
        steps: (0..100).map(step).collect(),
        facts: Some(RunFacts {
            name: "n".to_owned(),
            device: "cpu".to_owned(),
            description: "<a & b>".to_owned(),
            domain: "f32".to_owned(),
            contract: 1,
            manifest: "m".to_owned(),
            steps: 100,
            parameters: 410_240,
            tokens_per_step: 1000,
            model_flop_per_step: 2_000_000_000,
            peak_flop_per_s: 4e11,
            peak_source: "given".to_owned(),
            memory: vec![RoleBytes {
                role: "param".to_owned(),
                bytes: 1 << 20,
            }],
            arena_bytes: 3 << 20,
            workspace_bytes: 1 << 20,
        }),
        outcome: Some(RunOutcome {
            ended: "finished".to_owned(),
            steps: 100,
            root: "root99".to_owned(),
        }),
    }
}

/// Every element that is opened is closed, in order.
fn assert_balanced(html: &str) {
    const VOID: [&str; 4] = ["meta", "br", "!doctype", "?xml"];
    let mut open: Vec<&str> = Vec::new();
    let mut rest = html;
    while let Some(start) = rest.find('<') {
        rest = &rest[start + 1..];
        let end = rest.find('>').expect("a tag ends");
        let tag = &rest[..end];
        let name = tag.trim_start_matches('/');
        let name = name.split([' ', '/', '\n']).next().unwrap_or("");
        rest = &rest[end + 1..];
        if let Some(closing) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(closing), "in {tag}");
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
            if ["script", "style"].contains(&name) {
                rest = &rest[rest.find(&format!("</{name}")).expect("it ends")..];
            }
        }
    }
    assert!(open.is_empty(), "{open:?} stay open");
}

#[test]
fn a_page_is_whole_and_reads_nothing_else() {
    let runs = [run("a"), run("b")];
    for runs in [&runs[..1], &runs[..]] {
        let html = Report::new(runs).html();
        assert_balanced(&html);
        for outside in [
            "src=", "href=", "url(", "@import", "fetch(", "http://", "https://",
        ] {
            let allowed = html.replace("http://www.w3.org/2000/svg", "");
            assert!(!allowed.contains(outside), "{outside}");
        }
        assert!(html.contains("&lt;a &amp; b&gt;") && !html.contains("<a & b>"));
    }
}

#[test]
fn a_run_has_a_chart_for_each_number_it_recorded() {
    let whole = run("a");
    let ids = |run: &RunHistory| {
        let runs = [run.clone()];
        let files = Report::new(&runs).files();
        files.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
    };
    let all = [
        "loss.svg",
        "learning-rate.svg",
        "grad-norm.svg",
        "group-norms.svg",
        "accuracy.svg",
        "tokens-per-s.svg",
    ];
    assert_eq!(ids(&whole), all);
    let mut bare = whole.clone();
    for step in &mut bare.steps {
        step.validation = None;
        step.group_norms.clear();
    }
    bare.facts = None;
    assert_eq!(ids(&bare), [all[0], all[1], all[2], all[5]]);
    let html = Report::new(&[whole]).html();
    // 2 GFLOP for 1,000 tokens at 50,000 tokens a second are a quarter of 400 GFLOP/s.
    assert!(
        html.contains("<dt>MFU</dt><dd>25.0 % <small>of 400\u{a0}GFLOP/s"),
        "{html}"
    );
    assert!(html.contains("1\u{a0}MiB of it workspace"));
}

#[test]
fn two_runs_show_where_they_part() {
    let (left, mut right) = (run("x/run"), run("y/run"));
    let same = Report::new(&[left.clone(), right.clone()]).html();
    assert!(same.contains("verdict same") && same.contains("x/run") && same.contains("y/run"));
    assert!(!same.contains("<tr class=\"parted\">"));
    right.steps[49].root = Some("other".to_owned());
    right.steps[57].loss_bits = "ffffffff".to_owned();
    let runs = [left, right];
    let report = Report::new(&runs);
    let html = report.html();
    assert!(html.contains("verdict parted"));
    assert!(html.contains("The roots part after 50 steps, the losses at step 57"));
    assert!(
        html.contains(
            "<tr class=\"parted\"><th>50</th><td><code>root49</code></td><td><code>other"
        )
    );
    let (_, loss) = &report.files()[0];
    assert!(loss.contains("roots part after 50 steps</text>"));
    assert!(loss.contains(">Loss <tspan>nats per token</tspan></text>"));
}

#[test]
fn values_that_are_not_finite_leave_a_gap_and_a_run_of_one_step_is_drawn() {
    let mut odd = run("a");
    for step in &mut odd.steps {
        step.loss = None;
        step.grad_norm = Some(f64::INFINITY);
    }
    odd.steps[3].loss = Some(2.0);
    let html = Report::new(&[odd]).html();
    assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");
    let mut one = run("b");
    one.steps.truncate(1);
    one.outcome = None;
    let html = Report::new(&[one]).html();
    assert_balanced(&html);
    assert!(!html.contains("NaN"), "{html}");
    assert!(html.contains("<circle"));
}

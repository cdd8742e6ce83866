"""Losses in tf32, bf16 and f16 beside those in f32, step by step.

    python benches/loss_curves.py FOLDER --train BITSTEP [--harmless [KEY=VALUE ...]] [--domains NAME ...]
        [--recipe benches/recipes/text.toml] [--text FILE] [--steps N] [--device cuda:0]
    python benches/loss_curves.py FOLDER [--limit 0.01] [--window N]

The first trains the recipe in each precision, from one seed and with the same batches, into the folders f32, tf32, bf16 and
f16 of FOLDER, on FILE or else on the text of this repository: its documents and sources. With `--harmless` it also trains
in f32 with one key of the recipe changed, a run for each KEY=VALUE: what such a run deviates by is no fault of a precision.
The keys unless others are named are another order of the sums over tokens, and weights that begin a unit in the last
place, or a two-thousandth, larger.

Both then compare the losses of every step in the folders' `metrics.jsonl`, and the means of N consecutive steps (20 unless
`--window` says otherwise), with those of f32, and print for each run the largest and the mean deviation of both, and the
mean with its sign. The exit code is 1 where a precision deviates by more than the limit at a single step, whatever the
harmless runs do.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REFERENCE = "f32"
DOMAINS = {"tf32": "tf32.sm90", "bf16": "bf16.sm90", "f16": "f16.sm90"}
TEXTS = ("*.md", "src/**/*.md", "src/**/*.rs", "tests/**/*.rs", "ptx/*.cuh", "ptx/*.cu", "benches/*.py", "benches/*.rs")
# The standard deviation of fresh weights is 0.02: the next binary32, and a two-thousandth more.
HARMLESS = ("data.piece_tokens=64", "model.init_std=0.0200000014", "model.init_std=0.02001")


def text_of_repository():
    files = {file for pattern in TEXTS for file in HERE.parent.glob(pattern)}
    return b"".join(file.read_bytes() for file in sorted(files))


def trained(arguments):
    arguments.folder.mkdir(parents=True)
    text = arguments.folder / "text.txt"
    text.write_bytes(arguments.text.read_bytes() if arguments.text else text_of_repository())
    print(f"{text.stat().st_size} bytes of text", flush=True)
    runs = [(REFERENCE, "f32", [])] + [(name, DOMAINS[name], []) for name in arguments.domains]
    runs += [(f"{REFERENCE} {change}", "f32", ["--set", change]) for change in arguments.harmless or []]
    for name, domain, changes in runs:
        recipe = arguments.folder / f"{name}.toml"
        written = arguments.recipe.read_text()
        for key, value in (("path", text.resolve()), ("domain", domain)):
            written, found = re.subn(rf'(?m)^{key} = ".*"$', lambda _: f"{key} = {json.dumps(str(value))}", written)
            if found != 1:
                sys.exit(f"{arguments.recipe}: expected one line `{key} = TEXT`, found {found}")
        recipe.write_text(written)
        command = [arguments.train, "train", recipe, "--out", arguments.folder / name, "--device", arguments.device, "--quiet"]
        command += changes + ["--set", "checkpoint.save_model=false"]
        command += ["--steps", arguments.steps] if arguments.steps else []
        ran = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if ran.returncode != 0:
            sys.exit(f"{name}: exit code {ran.returncode}: {ran.stderr.strip()[-2000:]}")


def losses(folder, name):
    """The losses of a run's steps, each step once and none left out; how many steps were not applied."""
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    numbers = [line["step"] for line in steps]
    if not steps or numbers != list(range(numbers[0], numbers[0] + len(steps))):
        sys.exit(f"{name}: expected one line of every step, found steps {numbers[:3]} ... {numbers[-3:]}")
    found = [line["loss"] for line in steps]
    if not all(isinstance(loss, (int, float)) and math.isfinite(loss) for loss in found):
        sys.exit(f"{name}: a loss is no finite number")
    return numbers, found, sum(not line["applied"] for line in steps)


def mean(values):
    return sum(values) / len(values)


def means(values, window):
    return [mean(values[i : i + window]) for i in range(len(values) - window + 1)]


def deviations(values, reference):
    return [(a - b) / b for a, b in zip(values, reference, strict=True)]


def largest(values):
    return max(map(abs, values))


def deviation(folder, name, numbers, reference, window):
    """Prints a run's line; its largest deviations, of single steps and of means."""
    others, found, left_out = losses(folder, name)
    if others != numbers:
        sys.exit(f"{name}: expected the steps {numbers[0]} to {numbers[-1]} of f32, found {others[0]} to {others[-1]}")
    single = deviations(found, reference)
    smooth = deviations(means(found, window), means(reference, window))
    step = numbers[max(range(len(single)), key=lambda i: abs(single[i]))]
    print(
        f"{name}: loss {found[-1]:.6f}, {left_out} steps not applied; single steps: largest {largest(single):.3%} (step {step}), mean"
        f" {mean(list(map(abs, single))):.3%}, with its sign {mean(single):+.3%}; means of {window} steps: largest {largest(smooth):.3%}, mean"
        f" {mean(list(map(abs, smooth))):.3%}"
    )
    return largest(single), largest(smooth)


def compared(folder, window, limit):
    """Prints a line for each run, and what holds; whether all precisions keep within the limit at every step."""
    numbers, reference, _ = losses(folder, REFERENCE)
    if window > len(reference):
        sys.exit(f"a window of {window} of {len(reference)} steps")
    print(f"{REFERENCE}: {len(reference)} steps, loss {reference[0]:.6f} to {reference[-1]:.6f}")
    harmless = sorted(path.parent.name for path in folder.glob(f"{REFERENCE} */metrics.jsonl"))
    precisions = [name for name in DOMAINS if (folder / name).exists()]
    if not precisions + harmless:
        sys.exit(f"{folder}: nothing to compare with {REFERENCE}")
    found = {name: deviation(folder, name, numbers, reference, window) for name in harmless + precisions}
    for i, what in enumerate(("single steps", f"means of {window} steps")):
        if precisions:
            words = (f"{name} {'within' if found[name][i] <= limit else 'beyond'}" for name in precisions)
            print(f"{what}, limit {limit:.3%}: {', '.join(words)}")
        if not harmless:
            continue
        most = max(found[name][i] for name in harmless)
        each = (f"{found[name][i]:.3%} ({name.removeprefix(REFERENCE).strip()})" for name in harmless)
        print(f"{what}, runs in f32 that differ harmlessly: largest {', '.join(each)}, {'within' if most <= limit else 'beyond'} {limit:.3%}")
        for name in precisions:
            beside = "no more than the widest of these" if found[name][i] <= most else "more than any of these"
            print(f"{what}: {name} deviates by {beside} ({found[name][i] / most if most else math.inf:.2f} times)")
    return all(found[name][0] <= limit for name in precisions)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=Path, metavar="BITSTEP", help="the built program; FOLDER is new then")
    parser.add_argument("--harmless", nargs="*", metavar="KEY=VALUE", help="runs in f32 with these keys changed, too")
    parser.add_argument("--domains", nargs="*", choices=list(DOMAINS), default=list(DOMAINS))
    parser.add_argument("--recipe", type=Path, default=HERE / "recipes/text.toml")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--limit", type=float, default=0.01)
    parser.add_argument("--window", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.window < 1:
        parser.error("--window: expected at least 1")
    if arguments.harmless == []:
        arguments.harmless = HARMLESS
    if arguments.train:
        trained(arguments)
    elif arguments.harmless:
        parser.error("--harmless: runs are made with --train alone")
    sys.exit(0 if compared(arguments.folder, arguments.window, arguments.limit) else 1)


if __name__ == "__main__":
    main()

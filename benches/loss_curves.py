"""Losses in tf32, bf16 and f16 beside those in f32, step by step.

    python benches/loss_curves.py FOLDER --train BITSTEP [--recipe benches/recipes/text.toml] [--text FILE] [--steps N]
        [--device cuda:0]
    python benches/loss_curves.py FOLDER [--limit 0.01] [--window N]

The first trains the recipe in each precision, from one seed and with the same batches, into the folders f32, tf32, bf16 and
f16 of FOLDER, on FILE or else on the text of this repository: its documents and sources. Both then compare the losses of
every step in the folders' `metrics.jsonl`, with `--window N` the means of N consecutive steps, and print for each
precision the largest and the mean deviation from f32. The exit code is 1 where a deviation exceeds the limit.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOMAINS = {"f32": "f32", "tf32": "tf32.sm90", "bf16": "bf16.sm90", "f16": "f16.sm90"}
TEXTS = ("*.md", "src/**/*.md", "src/**/*.rs", "tests/**/*.rs", "ptx/*.cuh", "ptx/*.cu", "benches/*.py", "benches/*.rs")


def text_of_repository():
    files = {file for pattern in TEXTS for file in HERE.parent.glob(pattern)}
    return b"".join(file.read_bytes() for file in sorted(files))


def trained(arguments):
    arguments.folder.mkdir(parents=True)
    text = arguments.folder / "text.txt"
    text.write_bytes(arguments.text.read_bytes() if arguments.text else text_of_repository())
    print(f"{text.stat().st_size} bytes of text", flush=True)
    for name, domain in DOMAINS.items():
        recipe = arguments.folder / f"{name}.toml"
        written = arguments.recipe.read_text()
        for key, value in (("path", text.resolve()), ("domain", domain)):
            written, found = re.subn(rf'(?m)^{key} = ".*"$', lambda _: f"{key} = {json.dumps(str(value))}", written)
            if found != 1:
                sys.exit(f"{arguments.recipe}: expected one line `{key} = TEXT`, found {found}")
        recipe.write_text(written)
        command = [arguments.train, "train", recipe, "--out", arguments.folder / name, "--device", arguments.device, "--quiet"]
        command += ["--set", "checkpoint.save_model=false"] + (["--steps", arguments.steps] if arguments.steps else [])
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


def means(values, window):
    return [sum(values[i : i + window]) / window for i in range(len(values) - window + 1)]


def deviations(values, reference):
    return [abs(a - b) / b for a, b in zip(values, reference, strict=True)]


def compared(folder, window, limit):
    """Prints a line for each precision; whether all keep within the limit."""
    numbers, reference, _ = losses(folder, "f32")
    if window > len(reference):
        sys.exit(f"a window of {window} of {len(reference)} steps")
    print(f"f32: {len(reference)} steps, loss {reference[0]:.6f} to {reference[-1]:.6f}")
    within = True
    for name in list(DOMAINS)[1:]:
        others, found, left_out = losses(folder, name)
        if others != numbers:
            sys.exit(f"{name}: expected the steps {numbers[0]} to {numbers[-1]} of f32, found {others[0]} to {others[-1]}")
        single = deviations(found, reference)
        of_means = deviations(means(found, window), means(reference, window))
        largest = max(of_means)
        verdict = "within" if largest <= limit else "beyond"
        within &= largest <= limit
        step = numbers[single.index(max(single))]
        print(
            f"{name}: loss {found[-1]:.6f}, {left_out} steps not applied; of single steps largest {max(single):.3%} (step {step}),"
            f" mean {sum(single) / len(single):.3%}; of means of {window} steps largest {largest:.3%}: {verdict} {limit:.3%}"
        )
    return within


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=Path, metavar="BITSTEP", help="the built program; FOLDER is new then")
    parser.add_argument("--recipe", type=Path, default=HERE / "recipes/text.toml")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--limit", type=float, default=0.01)
    parser.add_argument("--window", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.window < 1:
        parser.error("--window: expected at least 1")
    if arguments.train:
        trained(arguments)
    sys.exit(0 if compared(arguments.folder, arguments.window, arguments.limit) else 1)


if __name__ == "__main__":
    main()

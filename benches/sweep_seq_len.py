"""How the time of a Mamba step grows with its sequence: bitstep's layers alone, from 512 to 32768 positions.

    python benches/sweep_seq_len.py BITSTEP --out FILE.jsonl --plot FILE.svg [--recipe benches/recipes/mamba-lm-bf16.toml]
        [--batch N] [--layers N] [--lengths N ...] [--device cuda:0] [--steps N] [--most-growth 0.1]

BITSTEP is the built program. FILE.jsonl gets each raw line; FILE.svg shows milliseconds over positions, both axes by powers
of two, beside the line of a time that is proportional to the longest sequence's. The time is the graph's by the device's
clock where the device has one, else the caller's. Few steps are enough, as they spread little. The shortest and the longest
sequence come first, so that a run that is cut short has measured the whole range. The exit code is 1 where the longest
sequence's time a position exceeds the least of all by more than the share `--most-growth`: the cost is not linear then.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT, MARGIN = 640, 420, 60


def recipe_of(arguments, seq_len, folder):
    text = arguments.recipe.read_text()
    for key, value in (("batch", arguments.batch), ("seq_len", seq_len), ("n_layers", arguments.layers)):
        text, found = re.subn(rf"(?m)^{key} = \d+$", f"{key} = {value}", text)
        if found != 1:
            sys.exit(f"{arguments.recipe}: expected one line `{key} = N`, found {found}")
    path = Path(folder) / f"{seq_len}.toml"
    path.write_text(text)
    return path


def measured(arguments, seq_len, folder):
    command = [arguments.bitstep, "bench", recipe_of(arguments, seq_len, folder), "--backbone", "--json"]
    command += ["--device", arguments.device, "--steps", arguments.steps]
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(f"{seq_len} positions: exit code {ran.returncode}: {ran.stderr.strip()[-2000:]}")
    line = json.loads(ran.stdout.splitlines()[-1]) | {"seq_len": seq_len, "batch": arguments.batch}
    with arguments.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line["graph_ms_p50"] if "graph_ms_p50" in line else line["replayed_ms_p50"]


def plot(points, title):
    """An SVG of the points, and of the line through the last on which the time is proportional to the length."""
    logs = [(math.log2(n), math.log2(ms)) for n, ms in points]
    left, right = logs[0][0], max(logs[-1][0], logs[0][0] + 1)
    straight = [(x, logs[-1][1] + x - logs[-1][0]) for x, _ in logs]
    heights = [y for _, y in logs + straight]
    low, high = math.floor(min(heights)), math.ceil(max(heights) + 0.01)

    def place(x, y):
        across = MARGIN + (x - left) / (right - left) * (WIDTH - 2 * MARGIN)
        return across, HEIGHT - MARGIN - (y - low) / (high - low) * (HEIGHT - 2 * MARGIN)

    def path(line):
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">']
    parts += [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', f'<text x="{MARGIN}" y="24">{title}</text>']
    for y in range(low, high + 1):
        at = place(left, y)[1]
        parts.append(f'<text x="{MARGIN - 8}" y="{at + 4:.1f}" text-anchor="end">{2.0**y:g}</text>')
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{at:.1f}" y2="{at:.1f}" stroke="#eee"/>')
    parts += [f'<polyline points="{path(straight)}" fill="none" stroke="#999" stroke-dasharray="4"/>']
    parts += [f'<polyline points="{path(logs)}" fill="none" stroke="#06c" stroke-width="2"/>']
    for (n, ms), point in zip(points, logs):
        x, y = place(*point)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#06c"/>')
        parts.append(f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{ms:.3g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{n}</text>')
    middle = WIDTH / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 16}" text-anchor="middle">positions; dashed: proportional to the longest</text>')
    parts.append(f'<text x="16" y="{MARGIN - 16}">ms a step</text></svg>')
    return "\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bitstep", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=HERE / "recipes/mamba-lm-bf16.toml")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512 << i for i in range(7)])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--most-growth", type=float, default=0.1)
    arguments = parser.parse_args()
    lengths, points = sorted(set(arguments.lengths)), []
    with tempfile.TemporaryDirectory() as folder:
        name = arguments.recipe.stem
        title = f"{name}, {arguments.layers} layers, batch {arguments.batch}: milliseconds a step"
        for seq_len in dict.fromkeys([lengths[0], lengths[-1]] + lengths):
            clock = time.monotonic()
            ms = measured(arguments, seq_len, folder)
            points.append((seq_len, ms))
            took = time.monotonic() - clock
            print(f"{seq_len:>6} positions  {ms:>10.3f} ms  {1e3 * ms / seq_len:>8.3f} us a position  ({took:.0f} s)", flush=True)
            # After each length, so that a run that is cut short leaves the plot of what it has measured.
            arguments.plot.write_text(plot(sorted(points), title))
    a_position = {seq_len: ms / seq_len for seq_len, ms in points}
    growth = a_position[lengths[-1]] / min(a_position.values()) - 1
    print(f"time a position at {lengths[-1]} over the least: {growth:+.1%}, at most {arguments.most_growth:+.1%}")
    sys.exit(0 if growth <= arguments.most_growth else 1)


if __name__ == "__main__":
    main()

"""Measures steps here and in PyTorch on one GPU, one right after the other, and prints the ratios.

    python benches/compare_gpu.py BITSTEP --out FILE [--sizes tiny gpt2 qwen06 mamba-rl mamba-lm]
        [--dtypes f32 tf32 bf16 bf16-pure] [--modes compiled graph eager] [--gemm auto|own]
        [--steps N] [--profile] [--together SECONDS]

BITSTEP is the built program. FILE gets every raw JSON line, one a measurement, each with the command it
came from; lines are appended. A size and type that bitstep has no recipe for (`SIZE.toml` for f32,
`SIZE-DTYPE.toml` for others, in benches/recipes) is measured in PyTorch alone. A ratio below 1 means that
bitstep takes less. The exit code is 1 when a measurement failed.

With --together all peers compile side by side and are timed one after another, the first so many seconds
after the start, each in a window of its own; bitstep is timed after them. That takes a fraction of the time,
but their times to the first step mean nothing then and are left out.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Seconds in which a peer that waits for its turn is timed.
WINDOW = 8
COLUMNS = "{:<7} {:<9} {:<24} {:>10} {:>10} {:>8} {:>12} {:>7} {:>7} {:>7}"


def measured(command, out, limit):
    """Runs a command that prints one line of JSON; the line, or None and the reason on standard error."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        failure = None if ran.returncode == 0 else f"exit code {ran.returncode}: {ran.stderr.strip()[-2000:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        ran, failure = None, str(error)
    line = None
    if failure is None:
        try:
            (text,) = ran.stdout.splitlines()
            line = json.loads(text)
        except ValueError:
            failure = f"expected one line of JSON, found {ran.stdout[:200]!r}"
    words = [Path(word).name if "/" in word else word for word in map(str, command)]
    record = {"command": " ".join(words), "result": line, "error": failure}
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    if failure is not None:
        print(f"failed: {record['command']}: {failure}", file=sys.stderr)
    return line


def recipe_of(size, dtype):
    name = size if dtype == "f32" else f"{size}-{dtype.removesuffix('-pure')}"
    path = HERE / "recipes" / f"{name}.toml"
    return path if path.exists() else None


def ours(arguments, size, dtype):
    command = [arguments.bitstep, "bench", recipe_of(size, dtype), "--device", "cuda:0"]
    command += ["--gemm", arguments.gemm, "--steps", str(arguments.steps), "--json"]
    command += ["--profile"] if arguments.profile else []
    # The peer of Mamba is its layers alone.
    command += ["--backbone"] if size.startswith("mamba") else []
    return measured([str(word) for word in command], arguments.out, arguments.limit)


def peer(arguments, size, dtype, mode, start_at=None):
    command = [sys.executable, HERE / "peer_pytorch.py", "--size", size, "--device", "cuda"]
    command += ["--dtype", dtype, "--mode", mode, "--steps", arguments.steps, "--json"]
    command += [] if start_at is None else ["--start-at", start_at]
    return measured([str(word) for word in command], arguments.out, arguments.limit)


def peers_together(arguments):
    """The lines of all peers, which wait for their turn to be timed."""
    cases = [(s, d, m) for s in arguments.sizes for d in arguments.dtypes for m in arguments.modes]
    first = time.time() + arguments.together
    with ThreadPoolExecutor(max_workers=len(cases)) as pool:
        turns = {case: pool.submit(peer, arguments, *case, first + WINDOW * i) for i, case in enumerate(cases)}
    return {case: turn.result() for case, turn in turns.items()}


def ratio(a, b):
    return f"{a / b:.3f}" if a is not None and b else "-"


def number(value, scale=1.0, digits=3):
    return "-" if value is None else f"{value / scale:.{digits}f}"


def row(size, dtype, name, figures, base):
    """A line of the table; ratios are of `base`, bitstep's figures, to these."""
    ms, wall, memory, first = figures
    ratios = [ratio(base[i], figures[i]) if base else "-" for i in (0, 1, 2)]
    cells = [number(ms), number(wall), number(memory, 1e9, 2), number(first, 1, 0)]
    print(COLUMNS.format(size, dtype, name, *cells, *ratios))


def compare(arguments, size, dtype, peers):
    """Measures one size and type; whether everything that was asked for could be measured. `peers` are the
    lines there are already."""
    base, done = None, True
    if recipe_of(size, dtype) is None:
        print(f"{size:<7} {dtype:<9} bitstep has no recipe for it")
    else:
        line = ours(arguments, size, dtype)
        done = line is not None
        if line:
            keys = ("graph_ms_p50", "replayed_ms_p50", "device_bytes", "first_replay_ms")
            base = [line.get(key) for key in keys]
            row(size, dtype, "bitstep, replayed", base, None)
            eager = [None, line.get("eager_ms_p50"), None, None]
            row(size, dtype, "bitstep, eager", eager, None)
    for mode in arguments.modes:
        known = (size, dtype, mode) in peers
        line = peers[size, dtype, mode] if known else peer(arguments, size, dtype, mode)
        done = done and line is not None
        if line:
            keys = ("ms_p50", "wall_ms_p50", "max_allocated_bytes", "first_step_ms")
            figures = [line.get(f"{mode}_{key}") for key in keys]
            figures[3] = None if known else figures[3]
            row(size, dtype, f"PyTorch {line['torch'].split('+')[0]}, {mode}", figures, base)
    return done


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bitstep", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "gpt2"])
    parser.add_argument("--dtypes", nargs="+", default=["f32"])
    parser.add_argument("--modes", nargs="+", default=["compiled"])
    parser.add_argument("--gemm", default="auto")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--limit", type=float, default=600, help="seconds for one measurement")
    parser.add_argument("--together", type=float, metavar="SECONDS", help="compile all peers side by side")
    parser.add_argument("--profile", action="store_true", help="keep bitstep's profile in the raw lines")
    return parser.parse_args()


def main():
    arguments = read_arguments()
    heads = ("ms", "wall ms", "GB", "first ms", "ms /", "wall /", "GB /")
    print("ms: the step on the device; wall ms: with new tokens copied in and the loss read back; GB: the")
    print("device's memory held by the step; first ms: process start to the first such step; /: bitstep to this")
    print(COLUMNS.format("size", "dtype", "", *heads), flush=True)
    peers = peers_together(arguments) if arguments.together else {}
    done = [compare(arguments, size, dtype, peers) for size in arguments.sizes for dtype in arguments.dtypes]
    print(f"raw output: {arguments.out}")
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()

#!/bin/sh
# Measures the step `tiny` here and in PyTorch, one after the other, and prints the ratio.
#
#   benches/compare_cpu.sh [THREADS]      PYTHON names a Python that has PyTorch (default: python3)
#
# The raw output is kept in benches/results/. Run it on a quiet machine: a ratio holds for the two
# measurements of one run.
set -eu
cd "$(dirname "$0")/.."
threads=${1:-$(nproc)}
python=${PYTHON:-python3}
results=benches/results
stamp=$(date -u +%Y%m%dT%H%M%SZ)
mkdir -p "$results"
cargo build --release --quiet
ours="$results/tiny-cpu-$stamp-bitstep.json"
peer="$results/tiny-cpu-$stamp-pytorch.json"
target/release/bitstep bench benches/recipes/tiny.toml --steps 100 --threads "$threads" --json >"$ours"
"$python" benches/peer_pytorch.py --mode eager compiled --steps 100 --threads "$threads" --json >"$peer"
"$python" - "$ours" "$peer" <<'PYTHON'
import json
import sys

ours, peer = (json.load(open(path)) for path in sys.argv[1:3])
print(f"machine            {ours['machine']}, {ours['threads']} threads")
print(f"bitstep, replayed  {ours['replayed_ms_p50']:8.2f} ms a step")
print(f"bitstep, eager     {ours['eager_ms_p50']:8.2f} ms a step")
for name in ("eager", "compiled"):
    ms = peer[f"{name}_ms_p50"]
    if ms is None:
        print(f"PyTorch, {name:9} not measured: {peer[f'{name}_error']}")
        continue
    print(f"PyTorch, {name:9} {ms:8.2f} ms a step: bitstep takes {ours['replayed_ms_p50'] / ms:.2f} of it")
PYTHON
echo "raw output: $ours $peer"

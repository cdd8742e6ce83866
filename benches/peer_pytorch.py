"""A whole training step in PyTorch, timed: forward, backward, clipping by the global norm 1.0, fused AdamW.

    python benches/peer_pytorch.py --size tiny|gpt2|qwen06|mamba-rl|mamba-lm --device cpu|cuda --dtype DTYPE
        [--mode eager|graph|compiled ...] [--steps N] [--threads N] [--deterministic] [--json]

Modes: `eager`; `graph`, the whole eager step in one CUDA graph, captured after a warm-up on a side
stream; `compiled`, model and loss through torch.compile (default mode, fullgraph), on a GPU with the whole
step in one CUDA graph too. Types: `f32`, `tf32` (f32 with TF32 products), `bf16` (autocast over f32
parameters), `bf16-pure` (parameters and moments in bf16: less memory and traffic, and no f32 masters).

On a GPU `ms` is the time between two events around a step while steps are queued back to back, without
the copy of its tokens; `wall_ms` is the caller's: new tokens from pinned memory, the step, the loss read
back. On a CPU both are the caller's. Tokens, or the features of a Mamba backbone, are random and new at every step. Mamba's
recurrence is a loop over positions, which torch.compile would unroll: it has no `compiled`. One mode a process gives
honest memory and first-step times. Needs PyTorch 2.5 or newer.
"""

import time

START = time.perf_counter()

import argparse  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

from peer_mamba import MAMBA_SIZES, Mamba, MambaSize  # noqa: E402
from peer_model import SIZES as LLAMA_SIZES  # noqa: E402
from peer_model import Llama  # noqa: E402

WARMUP = 5
SIZES = LLAMA_SIZES | MAMBA_SIZES
DTYPES = ("f32", "tf32", "bf16", "bf16-pure")


class Step:
    """One training step over a static batch; `loss` holds the last step's loss."""

    def __init__(self, arguments, mode):
        self.size = SIZES[arguments.size]
        self.device = torch.device(arguments.device)
        self.cuda = self.device.type == "cuda"
        half = arguments.dtype.startswith("bf16")
        torch.manual_seed(1)
        self.model = self.model_of(half).to(self.device)
        if arguments.dtype == "bf16-pure":
            self.model.bfloat16()
        self.autocast = arguments.dtype == "bf16"
        self.forward = torch.compile(self.model, fullgraph=True) if mode == "compiled" else self.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=1e-4,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
            capturable=self.cuda,
        )
        self.rows = self.draw(1)[0]
        self.loss = None

    def model_of(self, half):
        if isinstance(self.size, MambaSize):
            return Mamba(self.size)
        # PyTorch's f32 attention has fused kernels only for as many key heads as query heads; short
        # rows are faster without the copies that it takes to get there.
        repeat_kv = self.cuda and not half and self.size.tokens > 128
        return Llama(self.size, torch.bfloat16 if half else torch.float32, repeat_kv)

    def draw(self, steps):
        """Random tokens, or features, of so many steps, on the device."""
        if isinstance(self.size, MambaSize):
            return torch.randn(steps, self.size.batch, self.size.tokens, self.size.width, device=self.device)
        shape = (steps, self.size.batch, self.size.tokens + 1)
        return torch.randint(self.size.vocab, shape, device=self.device)

    def run(self):
        precision = contextlib.nullcontext()
        if self.autocast:
            # Each weight is cast once a step anyway, and a cache must not outlive a capture.
            precision = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        with precision:
            loss = self.forward(self.rows)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss = loss.detach()

    def eager(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.run()


def captured(step):
    """The step as one CUDA graph; what starts it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            step.eager()
    torch.cuda.current_stream().wait_stream(side)
    # Without gradients at capture, the graph's backward assigns them, in memory of its own.
    step.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph.replay


def preheat(step, launch, arguments):
    """Rests, then takes untimed steps, as `bitstep bench --rest --preheat` does before the steps of each kind."""
    time.sleep(arguments.rest)
    end = time.perf_counter() + arguments.preheat
    while time.perf_counter() < end:
        launch()
        step.loss.item()


def device_times(step, launch, steps):
    """Milliseconds of each step between events, while later steps are already queued."""
    tokens = step.draw(steps)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    launch()
    for rows, (before, after) in zip(tokens, events):
        step.rows.copy_(rows)
        before.record()
        launch()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def wall_times(step, launch, steps):
    """Milliseconds of each step by the caller's clock, its tokens copied in and its loss read."""
    tokens = step.draw(steps).cpu()
    if step.cuda:
        tokens = tokens.pin_memory()
        torch.cuda.synchronize()
    times = []
    for rows in tokens:
        start = time.perf_counter()
        step.rows.copy_(rows, non_blocking=True)
        launch()
        step.loss.item()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def summary(name, times):
    ordered = sorted(times)
    last = len(ordered) - 1
    return {
        f"{name}_p50": statistics.median(ordered),
        f"{name}_p95": ordered[min(last, int(0.95 * len(ordered)))],
        f"{name}_best": ordered[0],
    }


def measure(arguments, mode):
    """What one mode gives."""
    step = Step(arguments, mode)
    launch = step.eager
    if step.cuda and mode != "eager":
        launch = captured(step)
    launch()
    first = step.loss.item()
    first_ms = (time.perf_counter() - START) * 1e3
    for _ in range(WARMUP):
        launch()
    if step.cuda:
        torch.cuda.synchronize()
    time.sleep(max(0.0, arguments.start_at - time.time()))
    preheat(step, launch, arguments)
    wall = wall_times(step, launch, arguments.steps)
    if step.cuda:
        preheat(step, launch, arguments)
    times = device_times(step, launch, arguments.steps) if step.cuda else wall
    last = step.loss.item()
    if not (last == last and abs(last) < 1e4):
        raise RuntimeError(f"the loss went from {first} to {last}: nothing was trained")
    found = summary("ms", times) | summary("wall_ms", wall)
    found |= {"ms": [round(t, 4) for t in times], "error": None}
    found |= {"first_step_ms": first_ms, "loss_first": first, "loss_last": last}
    if step.cuda:
        found["max_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["max_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--mode", nargs="+", choices=("eager", "graph", "compiled"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--start-at", type=float, default=0.0, metavar="SECONDS",
        help="time nothing before this Unix time: peers that compile side by side are timed in turn",
    )
    parser.add_argument("--rest", type=float, default=0.0, metavar="SECONDS", help="no work before the steps of each kind")
    parser.add_argument("--preheat", type=float, default=0.0, metavar="SECONDS", help="untimed steps before them")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.mode is None:
        arguments.mode = ["compiled"] if arguments.device == "cuda" else ["eager", "compiled"]
    if arguments.device == "cpu" and "graph" in arguments.mode:
        parser.error("a CPU has no CUDA graph")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: PyTorch finds no CUDA device")
    if "compiled" in arguments.mode and arguments.size in MAMBA_SIZES:
        parser.error("Mamba's recurrence has no `compiled`; use --mode graph or eager")
    return arguments


def main():
    arguments = read_arguments()
    torch.set_num_threads(arguments.threads)
    torch.backends.cuda.matmul.allow_tf32 = arguments.dtype == "tf32"
    if arguments.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    keys = ("size", "dtype", "threads", "steps", "deterministic")
    result = {"torch": torch.__version__} | {key: getattr(arguments, key) for key in keys}
    cuda = arguments.device == "cuda"
    result["device"] = torch.cuda.get_device_name() if cuda else "CPU"
    failed = False
    for mode in arguments.mode:
        try:
            found = measure(arguments, mode)
        except Exception as error:  # torch.compile fails in many ways where no compiler is installed
            if mode == "eager":
                raise
            text = str(error).strip() or type(error).__name__
            found = {"ms_p50": None, "error": text.splitlines()[0]}
            failed = True
            print(f"{mode} does not work here: {error}", file=sys.stderr)
        result |= {f"{mode}_{key}": value for key, value in found.items()}
    if arguments.json:
        print(json.dumps(result))
    else:
        where = result["device"] if cuda else f"{arguments.threads} threads"
        for mode in arguments.mode:
            ms = result[f"{mode}_ms_p50"]
            text = f"{ms:.3f} ms a step, median" if ms is not None else "not measured"
            print(f"PyTorch {torch.__version__}, {where}, {arguments.size} {arguments.dtype}, {mode}: {text}")
    # A single mode that failed has measured nothing; beside others it is one missing figure.
    sys.exit(1 if failed and len(arguments.mode) == 1 else 0)


if __name__ == "__main__":
    main()

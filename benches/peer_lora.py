"""A whole LoRA training step in PyTorch, timed: adapters on every projection of a frozen Qwen3, in bf16.

    python benches/peer_lora.py --size tiny|qwen06 --device cpu|cuda [--base bf16|nf4] [--double] [--adapters bf16|f32]
        [--by peft|hand] [--mode eager|graph|layers|compiled ...] [--checkpointing] [--steps N] [--limit SECONDS] [--json]

The model is transformers', with random weights; the adapters are PEFT's (`--by hand`: the same product written
out here, for machines without PEFT). `--base nf4` stores the projections by bitsandbytes, with `--double` under double
quantisation; without its package the result says that it is missing. `--adapters f32` keeps adapters and their
moments in f32 and computes under autocast, as PEFT does unless told otherwise; `bf16` keeps them in bf16, which is
faster. Forward, backward, clipping by the global norm 1.0 and fused AdamW are timed as in peer_pytorch.py, whose modes
these are, and `layers`: torch.compile for fixed shapes on each decoder layer and on the head with its loss, so that
one layer's code serves all; `graphs` in the result counts what was compiled. Both are captured as one CUDA graph, or
launched as they are with `--launched`. With `--limit` every mode is a process of its own, which is ended after so many
seconds: its memory is its own, a compiler that does not come to an end costs no other figure, and a compiled step that
cannot be captured is measured again, launched; `captured` is then false in the result.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import torch
from torch import nn

from peer_pytorch import WARMUP, captured, device_times, preheat, summary, wall_times

SIZES = {
    "tiny": dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=16, intermediate_size=128, batch=2, tokens=64),
    "qwen06": dict(vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16,
                   num_key_value_heads=8, head_dim=128, intermediate_size=3072, batch=4, tokens=1024),
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 16, 32
MODES = ("eager", "graph", "layers", "compiled")
COMPILED = ("layers", "compiled")
# Whole sequences behind a causal mask need no tensor; finding that out would stop the device in every step.
CAUSAL = {"full_attention": None}


class Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it: y = base(x) + scale * B(A(x))."""

    def __init__(self, base, dtype):
        super().__init__()
        self.base = base
        device = next(base.parameters()).device
        self.down = nn.Linear(base.in_features, RANK, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(RANK, base.out_features, bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * (ALPHA / RANK)


def projections(model):
    """Each projection's parent, name and layer."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in PROJECTIONS and isinstance(child, nn.Linear):
                yield module, name, child


def quantised(model, double):
    """The model with its projections stored as NF4 by bitsandbytes."""
    import bitsandbytes

    for parent, name, linear in projections(model):
        four = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
            compress_statistics=double,
        )
        weight = linear.weight.data
        four.weight = bitsandbytes.nn.Params4bit(
            weight.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=double
        )
        setattr(parent, name, four.to(weight.device))
    # PEFT has layers of its own for such a base, and takes them where this says so.
    model.is_loaded_in_4bit = True
    return model


def adapted(model, arguments):
    """The model with everything frozen but adapters, and what made them."""
    dtype = torch.bfloat16 if arguments.adapters == "bf16" else torch.float32
    if arguments.by != "hand":
        try:
            import peft
        except ImportError:
            if arguments.by == "peft":
                raise
        else:
            config = peft.LoraConfig(
                r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS), lora_dropout=0.0, task_type="CAUSAL_LM"
            )
            model = peft.get_peft_model(model, config, autocast_adapter_dtype=dtype == torch.float32)
            return model, f"PEFT {peft.__version__}"
    model.requires_grad_(False)
    for parent, name, linear in projections(model):
        setattr(parent, name, Adapted(linear, dtype))
    return model, "by hand"


class Step:
    """One training step over a static batch; `loss` holds the last step's loss."""

    def __init__(self, arguments, mode):
        import transformers

        sizes = dict(SIZES[arguments.size])
        self.shape = sizes.pop("batch"), sizes.pop("tokens") + 1
        self.device = torch.device(arguments.device)
        self.cuda = self.device.type == "cuda"
        torch.manual_seed(1)
        config = transformers.Qwen3Config(
            **sizes, tie_word_embeddings=True, use_cache=False, rms_norm_eps=1e-6, max_position_embeddings=2048,
            rope_theta=1e6, attn_implementation="sdpa",
        )
        with self.device:
            model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
        if arguments.base == "nf4":
            model = quantised(model, arguments.double)
        if arguments.checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        model, self.made_by = adapted(model, arguments)
        self.model = model.train()
        self.vocab = config.vocab_size
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.autocast = arguments.adapters == "f32"
        self.forward = torch.compile(self.loss_of) if mode == "compiled" else self.loss_of
        if mode == "layers":
            self.compile_layers()
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=self.cuda
        )
        self.rows = self.draw(1)[0]
        self.loss = None

    def loss_of(self, rows):
        logits = self.model(input_ids=rows[:, :-1], attention_mask=CAUSAL, use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def compile_layers(self):
        """Compiles each layer in place, and head and loss as one function. All layers run the same code, so the
        first one's is compiled and the others find it."""
        causal = next(m for m in self.model.modules() if type(m).__name__ == "Qwen3ForCausalLM")
        for layer in causal.model.layers:
            layer.compile(dynamic=False)

        def head(hidden, targets):
            return nn.functional.cross_entropy(causal.lm_head(hidden).float().flatten(0, 1), targets)

        head = torch.compile(head, dynamic=False)

        def forward(rows):
            rows_in = rows[:, :-1]
            hidden = causal.model(input_ids=rows_in, attention_mask=CAUSAL, use_cache=False).last_hidden_state
            return head(hidden, rows[:, 1:].flatten())

        self.forward = forward

    def draw(self, steps):
        """Random tokens of so many steps, on the device."""
        return torch.randint(self.vocab, (steps, *self.shape), device=self.device)

    def run(self):
        precision = contextlib.nullcontext()
        if self.autocast:
            precision = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        with precision:
            loss = self.forward(self.rows)
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.loss = loss.detach()

    def eager(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.run()


def measure(arguments, mode):
    """What one mode gives."""
    step = Step(arguments, mode)
    launch, in_graph = step.eager, False
    for _ in range(WARMUP):
        launch()
    if step.cuda and mode != "eager" and not arguments.launched:
        launch, in_graph = captured(step), True
    launch()
    first = step.loss.item()
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
    found |= {"loss_first": first, "loss_last": last, "captured": in_graph, "adapters_by": step.made_by}
    if mode in COMPILED:
        found["graphs"] = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    found["trained_parameters"] = sum(p.numel() for p in step.trained)
    if step.cuda:
        found["max_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["max_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--base", choices=("bf16", "nf4"), default="bf16")
    parser.add_argument("--double", action="store_true", help="double quantisation of an nf4 base")
    parser.add_argument("--adapters", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--by", choices=("auto", "peft", "hand"), default="auto")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["eager"])
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--launched", action="store_true", help="launch compiled steps without a CUDA graph")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--start-at", type=float, default=0.0, metavar="SECONDS", help="time nothing before this Unix time")
    parser.add_argument("--rest", type=float, default=0.0, metavar="SECONDS", help="no work before the steps of each kind")
    parser.add_argument("--preheat", type=float, default=0.0, metavar="SECONDS", help="untimed steps before them")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end a mode that takes longer, each in a process")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.double and arguments.base != "nf4":
        parser.error("--double is for --base nf4")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: PyTorch finds no CUDA device")
    return arguments


class NoGraph(RuntimeError):
    """A compiled step could not be captured as one CUDA graph."""


def apart(arguments, mode):
    """What one mode gives in a process of its own, which is ended with all it has started when its time is up."""
    options = ["--mode", mode, "--json", "--size", arguments.size, "--device", arguments.device, "--base", arguments.base]
    options += ["--adapters", arguments.adapters, "--by", arguments.by, "--steps", str(arguments.steps)]
    options += ["--double"] * arguments.double + ["--checkpointing"] * arguments.checkpointing
    options += ["--launched"] * arguments.launched
    options += ["--start-at", str(arguments.start_at), "--rest", str(arguments.rest), "--preheat", str(arguments.preheat)]
    command = [sys.executable, os.path.abspath(__file__), *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, _ = child.communicate(timeout=arguments.limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise RuntimeError(f"had not ended after {arguments.limit:g} seconds") from None
    try:
        result = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"ended with code {child.returncode} and no result") from None
    if error := result.get(f"{mode}_error"):
        # A capture that failed leaves its process unusable; another one can launch what was compiled.
        again = mode in COMPILED and not arguments.launched and arguments.device == "cuda"
        raise (NoGraph if again else RuntimeError)(f"{mode}: {error}")
    return {key[len(mode) + 1 :]: value for key, value in result.items() if key.startswith(f"{mode}_")}


def main():
    arguments = read_arguments()
    keys = ("size", "base", "double", "adapters", "checkpointing", "steps")
    result = {"torch": torch.__version__} | {key: getattr(arguments, key) for key in keys}
    failed = 0
    started = time.time()
    missing = arguments.base == "nf4" and importlib.util.find_spec("bitsandbytes") is None
    for mode in arguments.mode:
        try:
            if missing:
                raise RuntimeError("bitsandbytes is not installed, which stores a base as NF4: pip install bitsandbytes")
            try:
                found = (apart if arguments.limit else measure)(arguments, mode)
            except NoGraph as error:
                print(error, file=sys.stderr)
                found = apart(argparse.Namespace(**vars(arguments) | {"launched": True}), mode)
        except Exception as error:  # torch.compile fails in many ways where no compiler is installed
            found = {"ms_p50": None, "error": (str(error).strip() or type(error).__name__).splitlines()[0]}
            failed += 1
            print(f"{mode} does not work here: {error}", file=sys.stderr)
        result |= {f"{mode}_{key}": value for key, value in found.items()}
    result["seconds"] = round(time.time() - started, 1)
    if arguments.json:
        print(json.dumps(result))
    else:
        for mode in arguments.mode:
            ms, bytes_ = result[f"{mode}_ms_p50"], result.get(f"{mode}_max_allocated_bytes")
            text = f"{ms:.3f} ms a step, median" if ms is not None else f"not measured: {result[f'{mode}_error']}"
            text += f", {bytes_ / 1e9:.2f} GB" if bytes_ else ""
            print(f"PyTorch {torch.__version__}, {arguments.size}, base {arguments.base}, {mode}: {text}")
    sys.exit(1 if failed == len(arguments.mode) else 0)


if __name__ == "__main__":
    main()

"""The step `tiny` of benches/recipes/tiny.toml in PyTorch on the CPU: eager and with torch.compile.

A step is forward, backward, clipping by the global norm, and AdamW, over random tokens. The model is
plain PyTorch with its fused attention, norm and optimizer, which is faster here than a model library.

    python benches/peer_pytorch.py [--steps N] [--threads N] [--json]

Needs PyTorch 2.5 or newer. Where torch.compile finds no compiler, only the eager step is timed.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, FF, VOCAB, BATCH, TOKENS = 2, 128, 4, 2, 32, 384, 256, 32, 32
WARMUP = 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH, eps=1e-5)
        self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5)
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.o = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, FF, bias=False)
        self.up = nn.Linear(WIDTH, FF, bias=False)
        self.down = nn.Linear(FF, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        h = self.norm1(x)
        batch, tokens, _ = h.shape
        q = rotate(self.q(h).view(batch, tokens, HEADS, HEAD).transpose(1, 2), cos, sin)
        k = rotate(self.k(h).view(batch, tokens, KV_HEADS, HEAD).transpose(1, 2), cos, sin)
        v = self.v(h).view(batch, tokens, KV_HEADS, HEAD).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, tokens, HEADS * HEAD))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        frequency = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        angle = torch.arange(TOKENS)[:, None] * frequency[None, :]
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, dim=-1))
        self.register_buffer("sin", torch.cat([angle.sin()] * 2, dim=-1))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


def measure(steps, compiled):
    """Milliseconds of each of `steps` steps, after a warm-up."""
    torch.manual_seed(1)
    model = Llama()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    times = []
    for step in range(WARMUP + steps):
        ids = torch.randint(VOCAB, (BATCH, TOKENS + 1))
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        logits = forward(ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        if step >= WARMUP:
            times.append((time.perf_counter() - start) * 1e3)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = {"torch": torch.__version__, "threads": arguments.threads, "steps": arguments.steps}
    for name in ("eager", "compiled"):
        result[f"{name}_ms_p50"], result[f"{name}_error"] = None, None
        try:
            times = measure(arguments.steps, compiled=name == "compiled")
            result[f"{name}_ms_p50"] = statistics.median(times)
            result[f"{name}_ms"] = [round(t, 4) for t in times]
        except Exception as error:  # torch.compile fails in many ways where no compiler is installed
            if name == "eager":
                raise
            result[f"{name}_error"] = str(error).splitlines()[0]
            print(f"torch.compile does not work here: {error}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(result))
        return
    for name in ("eager", "compiled"):
        ms = result[f"{name}_ms_p50"]
        text = f"{ms:.2f} ms a step, median" if ms is not None else "not measured"
        print(f"PyTorch {torch.__version__}, {arguments.threads} threads, {name}: {text}")


if __name__ == "__main__":
    main()

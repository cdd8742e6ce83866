"""The sizes that bitstep is measured against, as a plain PyTorch model: RMSNorm, rotary, SwiGLU, untied head.

Fused attention and norm of PyTorch itself, which is faster here than a model library.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

THETA = 10000.0
EPS = 1e-5
INIT_STD = 0.02


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    ff: int
    vocab: int
    batch: int
    tokens: int


SIZES = {
    "tiny": Size(2, 128, 4, 2, 32, 384, 256, 32, 32),
    "gpt2": Size(12, 768, 12, 12, 64, 2048, 50304, 8, 1024),
    "qwen06": Size(28, 1024, 16, 8, 128, 3072, 151936, 4, 1024),
}


class Block(nn.Module):
    def __init__(self, size, repeat_kv):
        super().__init__()
        self.size, self.repeat_kv = size, repeat_kv
        queries, keys = size.heads * size.head, size.kv_heads * size.head
        self.norm1 = nn.RMSNorm(size.width, eps=EPS)
        self.norm2 = nn.RMSNorm(size.width, eps=EPS)
        self.q = nn.Linear(size.width, queries, bias=False)
        self.k = nn.Linear(size.width, keys, bias=False)
        self.v = nn.Linear(size.width, keys, bias=False)
        self.o = nn.Linear(queries, size.width, bias=False)
        self.gate = nn.Linear(size.width, size.ff, bias=False)
        self.up = nn.Linear(size.width, size.ff, bias=False)
        self.down = nn.Linear(size.ff, size.width, bias=False)

    def heads(self, x, count):
        batch, tokens, _ = x.shape
        return x.view(batch, tokens, count, self.size.head).transpose(1, 2)

    def forward(self, x, cos, sin):
        size = self.size
        h = self.norm1(x)
        batch, tokens, _ = h.shape
        q = rotate(self.heads(self.q(h), size.heads), cos, sin)
        k = rotate(self.heads(self.k(h), size.kv_heads), cos, sin)
        v = self.heads(self.v(h), size.kv_heads)
        grouped = size.heads != size.kv_heads
        if grouped and self.repeat_kv:
            group = size.heads // size.kv_heads
            k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
            grouped = False
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(a.transpose(1, 2).reshape(batch, tokens, size.heads * size.head))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Gives the loss of a batch of token rows, each one token longer than the model reads.

    The rotary table has the type that attention computes in, so that no step converts it.
    """

    def __init__(self, size, compute_type=torch.float32, repeat_kv=False):
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(Block(size, repeat_kv) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=EPS)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_STD)
        frequency = THETA ** (-torch.arange(0, size.head, 2) / size.head)
        angle = torch.arange(size.tokens)[:, None] * frequency[None, :]
        for name, table in (("cos", angle.cos()), ("sin", angle.sin())):
            self.register_buffer(name, torch.cat([table] * 2, dim=-1).to(compute_type))

    def forward(self, rows):
        x = self.embed(rows[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).view(-1, self.size.vocab)
        return F.cross_entropy(logits.float(), rows[:, 1:].reshape(-1))


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin

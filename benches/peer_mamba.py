"""The Mamba sizes that bitstep is measured against, in plain PyTorch: the layers alone, features in and out.

The recurrence goes position by position, one fused multiply-add over all channels and states a position, forward
and backward: in a CUDA graph that beats a parallel scan of plain PyTorch, which passes over all states once a doubling.
Everything else is PyTorch's own.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-5
INIT_STD = 0.02


@dataclass(frozen=True)
class MambaSize:
    layers: int
    width: int
    batch: int
    tokens: int
    states: int = 16
    taps: int = 4
    expand: int = 2

    @property
    def inner(self):
        return self.expand * self.width

    @property
    def rank(self):
        return -(-self.width // 16)


MAMBA_SIZES = {
    "mamba-rl": MambaSize(2, 128, 32, 32),
    "mamba-lm": MambaSize(24, 768, 8, 512),
}


class Recurrence(torch.autograd.Function):
    """`h_t = decay_t · h_(t-1) + input_t` along the first dimension, from zero."""

    @staticmethod
    def forward(ctx, decay, inputs):
        states = torch.empty_like(inputs)
        states[0] = inputs[0]
        for t in range(1, len(inputs)):
            torch.addcmul(inputs[t], decay[t], states[t - 1], out=states[t])
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    def backward(ctx, grad):
        decay, states = ctx.saved_tensors
        total = torch.empty_like(grad)
        total[-1] = grad[-1]
        for t in range(len(grad) - 2, -1, -1):
            torch.addcmul(grad[t], decay[t + 1], total[t + 1], out=total[t])
        d_decay = torch.zeros_like(decay)
        torch.mul(total[1:], states[:-1], out=d_decay[1:])
        return d_decay, total


class Mixer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.in_proj = nn.Linear(size.width, 2 * size.inner, bias=False)
        self.conv = nn.Conv1d(size.inner, size.inner, size.taps, groups=size.inner, padding=size.taps - 1)
        self.x_proj = nn.Linear(size.inner, size.rank + 2 * size.states, bias=False)
        self.dt_proj = nn.Linear(size.rank, size.inner)
        states = torch.arange(1, size.states + 1, dtype=torch.float32)
        self.a_log = nn.Parameter(states.log().repeat(size.inner, 1))
        self.skip = nn.Parameter(torch.ones(size.inner))
        self.out_proj = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, h):
        size = self.size
        x, z = self.in_proj(h).chunk(2, dim=-1)
        u = F.silu(self.conv(x.transpose(1, 2))[..., : size.tokens].transpose(1, 2))
        low, b, c = self.x_proj(u).split([size.rank, size.states, size.states], dim=-1)
        delta = F.softplus(self.dt_proj(low).float()).transpose(0, 1)
        # The scan itself is in f32, position first.
        wide, b, c = (t.float().transpose(0, 1) for t in (u, b, c))
        decay = torch.exp(delta.unsqueeze(-1) * -torch.exp(self.a_log))
        states = Recurrence.apply(decay, (delta * wide).unsqueeze(-1) * b.unsqueeze(2))
        y = (states @ c.unsqueeze(-1)).squeeze(-1) + self.skip * wide
        return self.out_proj(y.transpose(0, 1).to(z.dtype) * F.silu(z))


class Mamba(nn.Module):
    """Gives `Σ output · direction` of features; `direction` is the gradient that a caller would supply."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.norms = nn.ModuleList(nn.RMSNorm(size.width, eps=EPS) for _ in range(size.layers))
        self.mixers = nn.ModuleList(Mixer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=EPS)
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=INIT_STD)
        shape = (size.batch, size.tokens, size.width)
        self.register_buffer("direction", torch.randn(shape) / (size.batch * size.tokens * size.width))

    def forward(self, features):
        x = features
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x))
        return (self.norm(x).float() * self.direction).sum()

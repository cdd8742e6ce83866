"""Records training steps in PyTorch, to be held against bitstep: `bitstep parity FOLDER`.

    python benches/record_reference.py OUT --model FOLDER      a Hugging Face model folder
    python benches/record_reference.py OUT --family qwen3      a tiny fresh model: llama, qwen2 or qwen3

Needs torch, transformers and safetensors. The model runs in f64 on the CPU (norms inside transformers
still round to f32). OUT then holds

- `config.json`, `model.safetensors`: the model before the first step, in f32;
- `reference.json`: hyperparameters, and the loss and gradient norm (before clipping) of every step;
- `reference.safetensors`: `input_ids` and `targets` [steps, batch, seq_len] (i32; a target of -100 is
  ignored; `targets[s, b, t]` is what position t predicts), `logits` of step 0 before any update,
  `grad.NAME` of step 0 before clipping, and `after.NAME`, the parameters after the last step.

The tokens are random. To record your own, replace `batches` below.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

IGNORE = -100


def fresh_model(family, tied):
    """A tiny model with every feature of its family; norm weights and biases are not left at 1 and 0."""
    sizes = dict(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    if family == "qwen3":
        sizes["head_dim"] = 32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batches(arguments, vocab_size):
    """Random token ids and the targets aligned with them; a few targets are ignored."""
    shape = (arguments.steps, arguments.batch, arguments.seq_len + 1)
    tokens = torch.randint(vocab_size, shape)
    ids, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].clone()
    targets[torch.rand(targets.shape) < 0.03] = IGNORE
    targets[..., 0] = tokens[..., 1]  # each sequence keeps at least one target
    return ids, targets


def record(model, ids, targets, hyper):
    """Trains over the batches; returns losses, norms and tensors. `model` is in f64 and is changed."""
    named = dict(model.named_parameters())
    decayed = [p for p in named.values() if p.dim() >= 2]
    others = [p for p in named.values() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": hyper["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=hyper["lr"],
        betas=(hyper["beta1"], hyper["beta2"]),
        eps=hyper["eps"],
    )
    losses, norms, tensors = [], [], {}
    for step in range(ids.shape[0]):
        optimizer.zero_grad()
        logits = model(input_ids=ids[step], use_cache=False).logits
        loss = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets[step].reshape(-1), ignore_index=IGNORE
        )
        loss.backward()
        if step == 0:
            tensors["logits"] = logits.detach().clone()
            for name, parameter in named.items():
                tensors[f"grad.{name}"] = parameter.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), hyper["clip_norm"])
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    for name, parameter in named.items():
        tensors[f"after.{name}"] = parameter.detach()
    return losses, norms, tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder to write")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="a Hugging Face model folder")
    source.add_argument("--family", choices=["llama", "qwen2", "qwen3"], help="a tiny fresh model")
    parser.add_argument("--tied", action="store_true", help="tie the head of a fresh model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    else:
        model = fresh_model(arguments.family, arguments.tied)
    model.config._attn_implementation = "eager"
    model.train()
    arguments.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(arguments.out)

    names = ("lr", "beta1", "beta2", "eps", "weight_decay", "clip_norm")
    hyper = {name: getattr(arguments, name) for name in names}
    ids, targets = batches(arguments, model.config.vocab_size)
    losses, norms, tensors = record(model.double(), ids, targets, hyper)
    tensors = {name: value.float().contiguous() for name, value in tensors.items()}
    tensors["input_ids"], tensors["targets"] = ids.int(), targets.int()
    save_file(tensors, arguments.out / "reference.safetensors")
    reference = {
        "note": f"recorded with torch {torch.__version__}",
        "optimizer": "AdamW, decay on tensors of 2 or more dimensions only",
        "hyper": hyper,
        "steps": arguments.steps,
        "batch": arguments.batch,
        "seq_len": arguments.seq_len,
        "ignore_index": IGNORE,
        "loss": losses,
        "grad_norm": norms,
        "trainable": [name for name, _ in model.named_parameters()],
    }
    (arguments.out / "reference.json").write_text(json.dumps(reference, indent=1))
    print(f"{arguments.out}: {arguments.steps} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

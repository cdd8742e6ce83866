"""Holds adapters that bitstep has trained against PEFT itself.

    bitstep train RECIPE --out RUN && bitstep export --merge RUN MERGED
    python benches/check_peft.py RUN/adapter MERGED BASE

PEFT loads the adapters beside their base, transformers loads the merged folder and the base alone, all in f32 on the
CPU. The exit code is 0 when the first two give the same logits, up to a relative error of 1e-5, and the base does not.
For adapters that were trained beside NF4, BASE is a folder of what its codes stand for: the merged folder of adapters
whose B is zero.
"""

import sys

import peft
import torch
import transformers

MOST_ERROR = 1e-5


def model_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main():
    adapter, merged, base = sys.argv[1:4]
    adapted = peft.PeftModel.from_pretrained(model_of(base), adapter).eval()
    whole, alone = model_of(merged).eval(), model_of(base).eval()
    most = min(whole.config.vocab_size, 1000)
    ids = torch.randint(most, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = [model(input_ids=ids).logits.double() for model in (adapted, whole, alone)]
    errors = [float((x - logits[1]).norm() / logits[1].norm()) for x in (logits[0], logits[2])]
    print(f"PEFT {peft.__version__}: relative error of the logits {errors[0]:.2e}; of the base alone {errors[1]:.2e}")
    sys.exit(0 if errors[0] <= MOST_ERROR < errors[1] else 1)


if __name__ == "__main__":
    main()

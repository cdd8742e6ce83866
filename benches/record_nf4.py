"""Records what bitsandbytes makes of weights under NF4 with double quantisation.

    python benches/record_nf4.py tests/fixtures/nf4-double
    python benches/record_nf4.py tests/fixtures/nf4-double --check cuda

The first writes `double.safetensors`, the second counts where a device's own kernels give other bytes. What is
recorded are the package's reference kernels, in PyTorch, on one thread: on a CPU its library looks up eight-bit codes
in a table of 65,536 places, which is not the nearest code for about one maximum in 700, and PyTorch's mean of more than
32,768 maxima depends on its threads. Weights follow from their index alone (`weights_of` here, `weights` in the test
beside src/num/nf4_double.rs), so that only what comes out is stored.
"""

import argparse
import sys
from pathlib import Path

import numpy
import torch

# Elements of each weight: within a block of maxima; a whole one, and a tail whose last block is half full; long sums.
SIZES = {"small": 7 * 33, "tail": 40 * 421, "long": 20_001 * 64}
LAST = 100


def weights_of(elements):
    """Element i: 24 bits of a hash of i, within 0.01 to 0.07 by its block; every operation is exact or rounded once."""
    h = numpy.arange(elements, dtype=numpy.uint32) * numpy.uint32(2654435761)
    h ^= h >> numpy.uint32(15)
    h *= numpy.uint32(2246822519)
    h ^= h >> numpy.uint32(13)
    unit = ((h >> numpy.uint32(8)).astype(numpy.int32) - (1 << 23)).astype(numpy.float32) * numpy.float32(2.0**-23)
    scale = (numpy.arange(elements) // 64 % 7 + 1).astype(numpy.float32) * numpy.float32(0.01)
    return torch.from_numpy(unit * scale)


def quantised(name, device, functional):
    """Every tensor that is recorded of one weight."""
    weight = weights_of(SIZES[name]).to(device)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    restored = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    values = functional.dequantize_4bit(codes, state)
    found = {
        "absmax": state.absmax, "nested_absmax": state.state2.absmax, "offset": state.offset.reshape(1),
        "restored": restored[:512], "last": values.flatten()[-LAST:],
    }
    if name != "long":
        found["codes"] = codes.flatten()
    return {f"{name}.{key}": value.cpu().contiguous() for key, value in found.items()} | {
        "map": state.state2.code.cpu().contiguous()
    }


def without_library():
    """Takes the package's library away, so that its kernels in PyTorch are used."""
    import ctypes

    def refused(path):
        raise OSError(f"{path} is not wanted: the reference kernels are recorded")

    ctypes.cdll.LoadLibrary = refused


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", metavar="DEVICE", help="write nothing; compare this device's kernels")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    from safetensors.torch import load_file, save_file

    if not arguments.check:
        without_library()
    import bitsandbytes
    import bitsandbytes.cextension as library
    import bitsandbytes.functional as functional

    file = arguments.folder / "double.safetensors"
    if arguments.check:
        recorded, differ = load_file(file), 0
        for name in SIZES:
            for key, value in quantised(name, arguments.check, functional).items():
                other = int((recorded[key] != value).sum())
                differ += other
                print(f"{key}: {other} of {value.numel()} differ")
        sys.exit(1 if differ else 0)
    if not isinstance(library.lib, library.ErrorHandlerMockBNBNativeLibrary):
        sys.exit("error: the package has loaded its library all the same")
    tensors = {}
    for name in SIZES:
        tensors |= quantised(name, "cpu", functional)
    made = {"bitsandbytes": bitsandbytes.__version__, "torch": torch.__version__, "kernels": "default"}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata=made)


if __name__ == "__main__":
    main()

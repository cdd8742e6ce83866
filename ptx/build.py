#!/usr/bin/env python3
"""Compiles every ptx/*.cu to the committed ptx/*.ptx and writes ptx/index.json.

    python3 -m venv /tmp/nvrtc && /tmp/nvrtc/bin/pip install \
        nvidia-cuda-nvrtc-cu12==12.4.127 nvidia-cuda-nvcc-cu12==12.9.86
    /tmp/nvrtc/bin/python ptx/build.py            # rebuilds what is here
    /tmp/nvrtc/bin/python ptx/build.py --check    # fails if a rebuild would change a byte

No GPU and no CUDA installation is needed: libnvrtc and ptxas come from the two packages above, whose
versions are part of the result. The index records, for each file, the hashes of source and PTX, the
flags, and for each kernel its parameters, registers, shared memory and spills as ptxas reports them.
"""
import argparse
import ctypes
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading

NVRTC_VERSION = (12, 4)
HERE = pathlib.Path(__file__).resolve().parent
SITE = pathlib.Path(sysconfig.get_paths()["purelib"])
# A file whose name ends in an architecture is compiled for it; all others for compute_80 or newer.
DEFAULT_ARCH = "compute_80"
REPORT_ARCH = {"compute_80": "sm_90", "compute_90": "sm_90", "compute_90a": "sm_90a"}


def load_nvrtc():
    lib = ctypes.CDLL(str(SITE / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != NVRTC_VERSION:
        sys.exit(f"NVRTC: expected {NVRTC_VERSION}, found {(major.value, minor.value)}")
    return lib


def arch_of(path):
    match = re.search(r"_(sm\d+a?)$", path.stem)
    return f"compute_{match.group(1)[2:]}" if match else DEFAULT_ARCH


def flags_of(path):
    return [f"--gpu-architecture={arch_of(path)}", "--std=c++17", "--fmad=false", "--ftz=false",
            "--prec-div=true", "--prec-sqrt=true", "--device-as-default-execution-space"]


def headers_of(path):
    """The headers that a file includes, and those that they include, by name."""
    found, open_files = {}, [path]
    while open_files:
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', open_files.pop().read_text("utf-8"), re.M):
            if name not in found:
                found[name] = HERE / name
                open_files.append(found[name])
    return [found[name] for name in sorted(found)]


def compile_ptx(lib, path):
    # NVRTC sees a file's own headers alone: another one would move its allocations, and with them the result.
    headers = headers_of(path)
    names = [h.name.encode() for h in headers]
    texts = [h.read_bytes() for h in headers]
    strings = ctypes.c_char_p * len(headers)
    program = ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(),
                           len(headers), strings(*texts), strings(*names))
    flags = [f.encode() for f in flags_of(path)]
    status = lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    if status != 0:
        sys.exit(f"{path.name}:\n{log.value.decode()}")
    lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, ptx)
    return ptx.value


def compile_alone(path):
    """Compiles one file in a thread of a process of its own, without address randomisation.

    NVRTC orders some of its work by the addresses of its own objects, so that the same source can give other
    register names. A new thread allocates from a heap of its own, which starts at a multiple of 64 MiB whatever
    the process did before; so the addresses, and with them the bytes of the result, are always the same.
    """
    no_randomize = lambda: ctypes.CDLL(None).personality(0x0040000)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import build; build.compile_here(sys.argv[2])"
    run = subprocess.run(
        [sys.executable, "-c", code, str(HERE), path.name], capture_output=True, check=False,
        preexec_fn=no_randomize, env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"})
    if run.returncode != 0:
        sys.exit(run.stderr.decode())
    return run.stdout


def compile_here(name):
    lib, result, faults = load_nvrtc(), [], []

    def work():
        try:
            result.append(compile_ptx(lib, HERE / name))
        except SystemExit as fault:  # it would end the thread alone, and say nothing
            faults.append(fault.code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not result:
        sys.exit(faults[0] if faults else 1)
    sys.stdout.buffer.write(result[0])


def kernels_of(ptx, path):
    """Each entry's parameter types and what ptxas says of it."""
    ptxas = SITE / "nvidia/cuda_nvcc/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "a.ptx"
        source.write_bytes(ptx)
        report = subprocess.run(
            [str(ptxas), f"-arch={REPORT_ARCH[arch_of(path)]}", "-v", "-o", str(pathlib.Path(folder) / "a.cubin"),
             str(source)], capture_output=True, text=True, check=False)
    if report.returncode != 0:
        sys.exit(f"{path.name}: ptxas:\n{report.stderr}")
    usage = {}
    blocks = re.split(r"Compiling entry function '", report.stderr)[1:]
    for block in blocks:
        name = block.split("'")[0]
        number = lambda pattern: int((re.search(pattern, block) or [0, 0])[1])
        usage[name] = {
            "registers": number(r"Used (\d+) registers"),
            "shared_bytes": number(r"(\d+) bytes smem"),
            "stack_bytes": number(r"(\d+) bytes stack frame"),
            "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        }
    kernels = {}
    text = ptx.decode()
    for name, params in re.findall(r"\.entry (\w+)\(([^)]*)\)", text):
        kernels[name] = {"params": re.findall(r"\.param(?: \.align \d+)? (\.\w+)", params), **usage[name]}
    return kernels


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if anything would change")
    parser.add_argument("names", nargs="*", help="only these .cu files, by name or stem")
    options = parser.parse_args()
    wanted = {pathlib.Path(name).stem for name in options.names}
    unknown = wanted - {path.stem for path in HERE.glob("*.cu")}
    if unknown:
        parser.error(f"no such file: {', '.join(f'{stem}.cu' for stem in sorted(unknown))}")
    load_nvrtc()
    index_path = HERE / "index.json"
    old = json.loads(index_path.read_text()) if index_path.exists() else {}
    index, changed = {}, []
    for path in sorted(HERE.glob("*.cu")):
        if wanted and path.stem not in wanted:
            if path.stem in old:
                index[path.stem] = old[path.stem]
            continue
        ptx = compile_alone(path)
        used = b"".join([path.read_bytes()] + [h.read_bytes() for h in headers_of(path)])
        index[path.stem] = {
            "source_sha256": hashlib.sha256(used).hexdigest(),
            "ptx_sha256": hashlib.sha256(ptx).hexdigest(),
            "flags": flags_of(path),
            "kernels": kernels_of(ptx, path),
        }
        target = path.with_suffix(".ptx")
        if not target.exists() or target.read_bytes() != ptx:
            changed.append(target.name)
            if not options.check:
                target.write_bytes(ptx)
    text = json.dumps(index, indent=1, sort_keys=True) + "\n"
    if not index_path.exists() or index_path.read_text() != text:
        changed.append(index_path.name)
        if not options.check:
            index_path.write_text(text)
    for stem in sorted(index):
        for name, k in index[stem]["kernels"].items():
            print(f"{name:<44} {k['registers']:>4} regs {k['shared_bytes']:>6} B shared {k['spill_bytes']:>4} B spill")
    print("changed:", " ".join(changed) or "nothing")
    if options.check and changed:
        sys.exit(1)


if __name__ == "__main__":
    main()

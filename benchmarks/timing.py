"""What the scripts of this folder share: arguments, checks and the report.

The clock is `cupyflash._cli.measure`, which the command line uses too: candidates take
turns in rotating order; on the GPU each launch stands between two CUDA events, with the
L2 cache flushed before it, a dozen milliseconds a turn and a pause between turns; on
the CPU a turn is one call. The median of the turns is reported.
"""

import argparse
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from cupyflash._cli import measure

RESULTS = Path(__file__).resolve().parent / "results"

# What we compare with: the module, and the package whose version a report carries.
_PACKAGES = {
    "torch": "torch",
    "quack": "quack-kernels",
    "triton": "triton",
    "flash_attn.cute.interface": "flash-attn-4",
    "sklearn.neighbors": "scikit-learn",
    "ot.bregman": "POT",
}
_absent = {}  # packages that were asked for in vain, and why


def arguments(description):
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    parser.add_argument("--turns", type=int, default=5, help="turns of each candidate")
    parser.add_argument(
        "--only", default="", help="only cases whose label contains this text"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    return parser


def backend(args):
    """(numpy or cupy, whether it is the GPU)."""
    if args.cpu or measure.cuda_device_count() == 0:
        return np, False
    import cupy

    return cupy, True


def without(row, call):
    """`call` by the other rows of attention, with plans of their own."""
    from cupyflash._attention.gpu import backward, forward
    from cupyflash._cuda import plan_cache

    changed = []
    for module, name in (
        (forward, "ATTENTION_KERNELS"),
        (backward, "ATTENTION_VJP_KERNELS"),
    ):
        rows = tuple(r for r in getattr(module, name) if r.name != row)
        changed += [(module, name, rows), (module, "_plans", plan_cache.PlanCache())]

    def before():
        kept = [getattr(module, name) for module, name, _ in changed]
        for module, name, value in changed:
            setattr(module, name, value)
        try:
            return call()
        finally:
            for (module, name, _), value in zip(changed, kept, strict=True):
                setattr(module, name, value)

    return before


def add_jobs(parser):
    """--jobs, for `compile_ahead`."""
    parser.add_argument(
        "--jobs", type=int, default=12, help="processes that compile ahead (1: none)"
    )


def compile_ahead(call_each, *lists, jobs):
    """Fill the kernel cache, many kernels at a time: one compiler is slow.

    `call_each` gets, in a process of its own, neighbours of each list.
    """
    chunks = [[x for items in lists for x in part(items, i, jobs)] for i in range(jobs)]
    chunks = [chunk for chunk in chunks if chunk]
    if jobs < 2 or not chunks:
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn) as pool:
        list(pool.map(call_each, chunks))


def part_of_many(text):
    """(i, count) of an option such as --part 1/4."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise argparse.ArgumentTypeError(f"{text} is not like 1/3")
    return index, count


def part(items, i, count):
    """The i-th of `count` parts of a list."""
    return items[len(items) * i // count : len(items) * (i + 1) // count]


def optional(name):
    """A module, or None where it is not installed or does not load."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        _absent[_PACKAGES.get(name, name)] = why
        print(f"without {name}: {why}", file=sys.stderr)
        return None


def to_torch(torch, x):
    """The same memory as a torch tensor; bfloat16 by way of its bits."""
    if x.dtype.name == "bfloat16":
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def from_torch(xp, tensor):
    """The same memory as an array."""
    if str(tensor.dtype) == "torch.bfloat16":
        import ml_dtypes
        import torch

        return xp.from_dlpack(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    return xp.from_dlpack(tensor)


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def blas():
    """The BLAS libraries of this process, and what the environment sets of them.

    A fair run sets nothing: OpenBLAS then takes the kernel made for the processor, as
    it does for a user. OPENBLAS_CORETYPE may make it take a slower one.
    """
    import threadpoolctl

    return {
        "libraries": [
            {key: library.get(key) for key in _BLAS_FACTS}
            for library in threadpoolctl.threadpool_info()
            if library["user_api"] == "blas"
        ],
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("OPENBLAS_", "OMP_", "MKL_"))
        },
    }


_BLAS_FACTS = ("internal_api", "version", "architecture", "num_threads")


def save(path, benchmark, on_gpu, **content):
    """Write the report of one benchmark, with what it depends on."""
    if path is None:
        return
    machine = measure.machine(on_gpu)
    for module, package in _PACKAGES.items():
        if module in sys.modules:
            machine[package] = version(package)
    if "torch" in sys.modules and (cudnn := sys.modules["torch"].backends.cudnn):
        machine["cudnn"] = cudnn.version()
    if not on_gpu:
        machine["blas"] = blas()
    if _absent:
        machine["absent"] = dict(_absent)
    report = {"benchmark": benchmark, "machine": machine, **content}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"Numbers: {path}")

"""Random calls through the compiler's front end: the kernels they choose must compile.

    python tests/support/front_end.py --seconds 600 --seed 7
    python tests/support/front_end.py attention --archs sm_86 --problems 500

The calls of fuzz.py are planned for one architecture each (planned.py). Every kernel
that none chose before goes through the front end alone, which takes a tenth of a second
in place of one. It finds what is wrong with a text that a rare call alone asks for: an
assertion, a tile that no warp fits. Spills and registers are for `compile`.
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
sys.path[:0] = [str(SUPPORT), str(SUPPORT.parents[1])]

import fuzz  # noqa: E402
import fuzz_vjp  # noqa: E402, F401  (adds its operation)
import planned  # noqa: E402

from cupyflash._cli import nvrtc  # noqa: E402
from cupyflash._cuda import source  # noqa: E402
from cupyflash._cuda.device import device_of_arch  # noqa: E402

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
OPTION = "--fdevice-syntax-only"


def unusable():
    """Why this cannot be asked of the compiler here, or nothing."""
    if why := nvrtc.unusable():
        return why
    error = nvrtc.compile_text("", "empty.cu", (OPTION,))[0]
    return f"NVRTC {nvrtc.version()} has no {OPTION}" if OPTION in error else ""


def error_of(variant, device):
    """What the front end says against a kernel, or nothing."""
    options = ["-std=c++17", "--device-as-default-execution-space", OPTION]
    options.append(f"-arch={variant.arch or device.arch}")
    text = variant.prelude + source.load(variant.source, variant.generated)
    return nvrtc.compile_text(text, variant.source, options)[0]


def errors(problems, archs, seen):
    """(problem, architecture, variant, error) of what is wrong.

    `seen` has the kernels that were looked at before, and gets the others.
    """
    for number, problem in enumerate(problems):
        device = device_of_arch(archs[number % len(archs)])
        with planned.device(device), contextlib.suppress(NotImplementedError):
            for variant in planned.plan(problem).variants:
                name = planned.digest_of(variant), variant.generated, device.name
                if name in seen:
                    continue
                seen.add(name)
                if error := error_of(variant, device):
                    yield problem, device.name, variant, error


def draws(operations, seed):
    """Problems of the operations in turn, without values."""
    while True:
        for operation in operations:
            # Nothing is computed: every other call may be large.
            budget = fuzz.LARGE if seed % 2 else fuzz.SMALL
            yield fuzz.draw(operation, seed, budget=budget, values=False)
        seed += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", help=" ".join(fuzz.DRAWS))
    parser.add_argument("--archs", nargs="+", default=ARCHS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=1 << 60)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    if why := unusable():
        print(why)
        return 2
    end, seen, count = time.monotonic() + args.seconds, set(), 0

    def until_the_end():
        nonlocal count
        for problem in draws(args.operations or tuple(fuzz.DRAWS), args.seed):
            if count == args.problems or time.monotonic() > end:
                return
            count += 1
            yield problem

    wrong = 0
    for problem, arch, variant, error in errors(until_the_end(), args.archs, seen):
        wrong += 1
        defines = " ".join(f"{name}={value}" for name, value in variant.defines)
        print(f"{problem}\n{arch} {variant.source} {defines}\n{error}\n", flush=True)
    print(f"{count} calls, {len(seen)} kernels, {wrong} of them wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

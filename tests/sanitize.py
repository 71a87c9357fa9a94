"""One small call of each tier of softmax and type, for compute-sanitizer.

    PYTHONPATH=. compute-sanitizer --tool memcheck python tests/sanitize.py
    PYTHONPATH=. compute-sanitizer --tool racecheck python tests/sanitize.py softmax

Arguments name functions; none is all of them. It checks its results too, and its exit
code is 1 when one is wrong.
"""

import sys

import numpy as np
import oracle
import tiers
from accuracy import finfo, wide
from placing import place

import cupyflash

# Elements of an array: a sanitizer makes kernels slower by a factor of up to 100.
_MOST = 1 << 21


def calls(cupy, functions):
    """(what, tier, result, exact) of one call of each tier, kind and dtype."""
    rng = np.random.default_rng(0)
    for function in functions:
        for dtype in ("float32", "bfloat16", "float64"):
            seen = set()
            for kind in tiers.KINDS:
                found = tiers.thresholds(cupy, function, dtype, kind)
                for tier, n in tiers.one_length_of_each_tier(found).items():
                    shape = tiers.KINDS[kind].shape(n)
                    if (tier, shape[2] == 1) in seen or np.prod(shape) > _MOST:
                        continue
                    seen.add((tier, shape[2] == 1))
                    given = tiers.inputs(rng, function, shape, dtype)
                    for form in ("plain", "shifted"):
                        placed = [place(cupy, x, form) for x in given]
                        result = getattr(cupyflash, function)(*placed, axis=1)
                        exact = getattr(oracle, function)(*given, 1)
                        if function == "logsumexp":
                            exact = exact[0]
                        yield (
                            f"{function} {dtype} {shape} {form}",
                            tier,
                            result,
                            exact,
                        )


def main():
    """Run them; the exit code says whether all were right."""
    import cupy

    failures = 0
    for what, tier, result, exact in calls(cupy, sys.argv[1:] or tiers.FUNCTIONS):
        error = float(
            (np.abs(wide(result) - exact) / np.maximum(1, np.abs(exact))).max()
        )
        is_good = error <= 64 * float(finfo(result.dtype).eps)
        failures += not is_good
        print(f"{tier:32} {what}: {error:.1e}{'' if is_good else ' WRONG'}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

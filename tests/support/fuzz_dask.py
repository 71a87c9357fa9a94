"""More of the random problems of cupyflash.dask than its tests draw.

python tests/support/fuzz_dask.py 500                # 0 to 499 of each kind
python tests/support/fuzz_dask.py 500 --first 7000   # others
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "dask_arrays"))

import test_dask_arrays as problems
import test_points

# A test takes the first of its seeds: how many each has.
KINDS = {
    problems.test_softmax_family: 12,
    problems.test_attention: 8,
    test_points.test_reductions: 8,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    count = options.count
    start, bad = time.monotonic(), 0
    for test, seeds in KINDS.items():
        for first in range(options.first, options.first + count, seeds):
            try:
                test(first)
            except Exception as error:
                bad += 1
                print(f"{test.__name__}[{first}]: {str(error)[:300]}", flush=True)
    seconds = time.monotonic() - start
    print(f"{count} problems of each kind, {bad} bad, {seconds:.0f} s")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

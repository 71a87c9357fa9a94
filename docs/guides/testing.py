"""
What is tested, and how
=======================

A kernel library is worth what survives its users. This page says what was tried, on
which card, for how long, and what it found; the figures are read from
``tests/record/gpu_record.json``, which the tests themselves write, when this page is
built.

.. code-block:: console

   $ python -m cupyflash check            # within a minute: each kernel, its error
   $ make test                            # all that needs no GPU
   $ make gpu-check                       # all that needs one; writes the record
   $ make gpu-proof                       # its part in tests/gpu, described below
   $ make gpu-fuzz                        # 5,000 random problems
   $ make gpu-sanitize                    # compute-sanitizer over every kernel
   $ make gpu-record                      # is the record of these sources?

Parts run alone: ``python -m pytest -m gpu tests/gpu -k laws``. Into the record they go
by ``PYTEST_ARGS="--part 1/4" make gpu-check``, which deals the files by the time they
took; a run of a part of a file stands beside what the file had, and does not make it
up to date. ``RECORD_ARGS=--strict make gpu-record`` fails unless all files, the random
problems and the kernels that were met are of these sources, and nothing failed.

What is compared with what
--------------------------

* **The exact result** comes from ``tests/support/oracle.py``: the formulas in extended
  precision on the host (in float64 where results are float32 or narrower), which share
  no code with the package and are themselves compared with mpmath.
* **The bound** is the promise of :doc:`/guides/precision`, and what the rounding of
  the scores alone brings. No bound is chosen so that a kernel passes.
* **Rows of the kernel tables are parameters of the tests**: a kernel that is added is
  met by all of ``tests/gpu/test_rows.py`` without a change there. Each row runs
  forced, alone, and one test a row asks ``explain`` whether some ordinary call is led
  to it.
* **NaN stands wherever no kernel may look**: between the elements of strided arrays,
  behind masks and lengths, in memory that a result has not been written to yet.
"""

import json
from pathlib import Path

import cupyflash

RECORD = Path(cupyflash.__file__).parent.parent / "tests/record/gpu_record.json"
record = json.loads(RECORD.read_text("utf-8"))


def figures(*names):
    """A line of the record for each file of tests."""
    heads = f"{'cases':>10}{'core s':>10}{'failed':>8}{'skipped':>9}{'not run':>9}"
    print(f"{'':30}{'tests':>8}{heads}")
    for name in names:
        found = record["files"].get(name)
        if found is None:
            print(f"{name:30}{'not in the record yet':>30}")
            continue
        failed = len(found["failures"])
        tests = found["passed"] + failed
        print(
            f"{name:30}{tests:>8}{found.get('cases', tests):>10}"
            f"{found.get('seconds', '-'):>10}{failed:>8}{found['skipped']:>9}"
            f"{found.get('not_run', 0):>9}"
        )


print(f"{record['device']}, {record['date']}, NVRTC {record['nvrtc']}")
print(f"CuPy {record['cupy']}, driver {record['driver']}")
print(f"{record['passed']} passed, {record['failed']} failed")

# %%
# Contract and laws, row by row
# -----------------------------
# Every row in each of its types, in plain, shifted, reversed, padded and transposed
# memory, with no option and with all of them at once. Then what holds without a
# reference: rows sum to one; a shift of the scores changes nothing but ``lse``; the
# order of the keys does not matter; parts of the keys merge to the whole; entries of
# the batch and heads do not know of each other, bit by bit, even if NaN fills the
# others; gradients are linear, and add up to what flows in. The bits are the same in
# 100 runs, with ``out=``, and when a CUDA graph is replayed, also where blocks share a
# row or the keys and where all options meet. And hostile values: NaN, infinities,
# denormals, the largest numbers, scores of 1e30, rows that see nothing, an ``out`` that
# overlaps an input or itself.

figures(
    "gpu/test_rows.py",
    "softmax/test_softmax.py",
    "softmax/gpu/test_on_chip.py",
    "attention/test_attention.py",
)

# %%
# Random problems
# ---------------
# Arguments of every kind from a seed: a test compares what is drawn with the signatures
# of the functions, so that an option that is added has to be drawn. Lengths go to
# 9,000, heads to 640 columns, equal in q and v or not; groups, products of batch, heads
# and queries, and splits of the keys are odd as well as even, parts of the keys empty
# or beyond a window. A test counts each of these in what is drawn.
#
# ``make gpu-fuzz`` draws 5,000. Which row and which kernels a problem would launch is
# asked of the package's own plans, which need no GPU; of twelve structures the one is
# taken whose row and kernels were met least so far, and slow rows get fewer. The
# kernels are compiled on all cores first; then the problems run in processes side by
# side, so that one that ends its process, or hangs, is one bad problem. Every seed has
# other structures; by default it is the time. A failure begins with the line that runs
# its problem again, such as ``python tests/support/fuzz.py attention 1234 --sizes 2
# --budget 20 --xp cupy``. ``make test`` draws other problems each day, on NumPy.

figures("gpu/test_random.py", "support/test_fuzz.py")
if fuzz := record.get("fuzz"):
    print(
        f"\nseed {fuzz['seed']}: {fuzz['passed']} of {fuzz['problems']} passed, "
        f"{len(fuzz['bad'])} bad, {fuzz['not_run']} not run, {fuzz['kernels']} kernels"
    )
    for row, number in fuzz["rows"].items():
        print(f"    {row:28}{number:6}")
    for bad in fuzz["bad"]:
        print(f"    bad: {bad['line']}")

# %%
# Which kernels were met
# ----------------------
# A row is compiled in many variants: a source, and the defines of types, tile and
# options. Each test says which it launched; those of tests that passed and compare
# results with the oracle count, against all that ``python -m cupyflash compile --all``
# lists for the rows by tensor cores, forward and backward, and for what copies, sums
# and merges beside them. ``tests/gpu/test_variants.py`` plans calls of a few sizes for
# each sample that the list is made of, with each row forced, and runs those that launch
# what no call before them did. ``python tests/record/gpu_record.py --unmet`` names the
# rest.

if met := record.get("variants"):
    some, all_ = (sum(row[i] for row in met["rows"].values()) for i in (0, 1))
    print(f"{some} of {all_} kernels, {some / all_:.1%}")
    for row, (some, all_) in met["rows"].items():
        print(f"    {row:28}{some:6} of {all_}")
figures(
    "gpu/test_variants.py", "gpu/test_variants_vjp.py", "gpu/test_variants_vjp_mma.py"
)

# %%
# Sizes
# -----
# More than 2^31 elements in q, k, v, out and in an array of softmax, forward and
# backward; one query before four million keys; more heads and batch entries than a
# grid has blocks along an axis, through the kernels of gradients, too; head dimensions
# of 1 and 512; a zero in every place of a shape, without options and with all.

figures("gpu/test_sizes.py", "cuda/test_gpu.py")

# %%
# Streams, threads, processes
# ---------------------------
# Eight threads, each with a stream and shapes of its own, compared bit for bit with
# the serial results (a case is a call; ``--thread-seconds`` says for how long), through
# each row whose blocks wait for one another or share their memory: a row that is added
# has to be among the calls, or to be named as one that is not;
# captures beside another thread; a first compilation by many threads, and by four
# processes on one empty cache folder; processes that are killed while they compile,
# and the start after it. With two devices, arrays of one while the other is current.

figures("gpu/test_threads.py")

# %%
# Memory
# ------
# The pool before and after 10,000 mixed calls; an allocation that fails, at each
# place of each call in turn, and what it leaves behind; what ``tiled`` takes beside
# its results.

figures("gpu/test_memory.py")

# %%
# Surroundings
# ------------
# A cache folder that is full, read-only, damaged or a file; headers of another CUDA;
# no NVRTC; the cache in memory. These need no GPU (``tests/cuda/test_environment.py``);
# a few run again on one.

figures("cuda/test_compiler.py")

# %%
# compute-sanitizer
# -----------------
# Small calls of each row, of softmax in rows short and long, of attention also with one
# query and its keys in parts (in odd numbers, without a key, beyond a window), with
# numbers that are not finite where no query looks and where one does, and of merging,
# under four tools. An error is what the
# tool says; where it has something to say, or cannot judge a kernel, its words stand
# here, and ``make gpu-sanitize`` fails.

sanitizer = record.get("sanitizer", {"version": "not run", "tools": {}})
print(f"compute-sanitizer {sanitizer['version']}")
for tool, rows in sanitizer["tools"].items():
    errors = sum(facts["errors"] or 0 for facts in rows.values())
    calls = sum(facts["calls"] for facts in rows.values())
    seconds = sum(facts["seconds"] for facts in rows.values())
    print(
        f"{tool:10} {len(rows)} rows, {calls} calls, {errors} errors, {seconds:.0f} s"
    )
    for row, facts in rows.items():
        if said := facts.get("message") or facts.get("ended"):
            print(f"    {row}: {facts['errors']} errors: {said}")

# %%
# Defects that were found
# -----------------------
# By reading, by random problems and by the sanitizers, with the tests that hold them
# down now (``tests/record/defects.tsv``). D: wrong results and crashes, C: promises
# that did not hold.

defects = (RECORD.parent / "defects.tsv").read_text("utf-8").splitlines()[1:]
for name, what, tests in (line.split("\t") for line in defects):
    print(f"{name:4}{what}")
    for test in tests.split():
        print(f"        {test}")

# %%
# What failed
# -----------
# Tests of the record that failed; none of them is hidden by a wider bound.

failed = [name for found in record["files"].values() for name in found["failures"]]
print("\n".join(failed) or "none")

# %%
# Known and open
# --------------
# What was seen and is not mended:
#
# * *Outputs that cancel.* Of bfloat16 values whose weighted mean is near 0 an output
#   was wrong by 1.06e-2 of the largest, where 8e-3 is promised (2 queries, one column):
#   16-bit weights are wrong in proportion to the mean of ``abs(v)``. What holds there,
#   too, stands in :doc:`/guides/precision` and is tested in all rows.
# * *Gradients of float32 in parts* lack digits where all larger weights of a key meet
#   zeros of dout (of q, for dk; of k, for dq): of 32 queries, weights below 2**-20 of
#   the largest lose bits, below 2**-40 all. An element of dv was 0 instead of 9.9e-16,
#   beside others of 0.6 in its row. What mends it costs 1 to 4 % of all calls, which
#   note 0014 tells.
#
# * *Sums of 4,096 to 32,768 terms that are all alike*, to the last bit: 1.5e-5 in
#   float32 and 2.7e-14 in float64, where 2e-6 and 5e-15 are promised; random terms of
#   one sign keep the promise. Longer sums are made in runs and keep it in both cases
#   (:doc:`/guides/precision`), which note 0005 tells.
#
# * *The gradient of a shared bias* in 16 bits: compute-sanitizer runs over its kernel
#   with all options. The form for a bias alone, and those that sum over queries or
#   keys, are compared with the oracle, but were not judged by a tool yet.
#
# * *Gradients beside one that is not finite* may differ in their last bits from those
#   of a call without it, in other entries of the batch, too: tensor-core kernels then
#   make all gradients of the call again by other kernels, which round otherwise. With
#   finite numbers beside them the bits are the same, which is tested in all rows.
#
# Note 0018 has the reproducers of the first two.

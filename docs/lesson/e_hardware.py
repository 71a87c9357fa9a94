"""
5 What the hardware adds
========================

The algorithm of the last page is done. What is left between it and the fastest kernels
is the machine: who multiplies, who fetches and who waits.
"""

# %%
# Matrix products are special
# ---------------------------
# ``online`` and ``tiled`` do the same arithmetic in the same memory. ``tiled`` asks for
# it as products of matrices, and machines are built for those. On a CPU, BLAS takes
# numbers as vectors and keeps them in registers:
import _measured as measured
import matplotlib.pyplot as plt
import numpy as np

import cupyflash

q, k, v, _ = measured.teaching_case(2048)
exact = cupyflash.attention(*(x.astype(np.float64) for x in (q, k, v)))
rows = measured.measure(
    measured.by_method(cupyflash.attention, q, k, v), exact, of_each=False
)
measured.print_rows(rows)
measured.check_claims(rows, plain="safe")
gain = rows["online"]["seconds"] / rows["tiled"]["seconds"]
print(f"tiles and their products: {gain:.0f} times faster than key by key")

# %%
# On a GPU the step is larger still, because it has units that do nothing else. A
# *tensor core* multiplies small matrices of 16-bit numbers and adds in float32. A
# kernel that does not feed them leaves most of the card idle.
#
# The four methods on a card that has them
# ----------------------------------------
# This was measured with the portable ``tiled``, which runs on every card since Turing
# and uses no tensor cores. (Today ``tiled`` uses them where there are some, as the
# `design notes <https://github.com/cupyflash/cupyflash/tree/main/docs/design>`__
# describe.) The products of ``naive`` and ``safe`` are those of cuBLAS, and torch's
# kernels use tensor cores too.

report = measured.result("attention_h200")
case = "4 x 16 heads, 4096 x 4096, D=128 bfloat16"
found = {
    r["provider"]: r
    for r in report["rows"]
    if r["case"] == case and r.get("seconds") is not None
}
print(measured.source(report))
print(case)
for name, r in found.items():
    print(f"  {name:15} {1e3 * r['seconds']:6.2f} ms {r['rate'] / 1e12:5.0f} TFLOP/s")

fig, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
names = list(found)
own = ("naive", "safe", "online", "tiled")
colours = ["tab:blue" if n in own else "tab:gray" for n in names]
ax.barh(names, [found[n]["rate"] / 1e12 for n in names], color=colours)
ax.invert_yaxis()
ax.set(xlabel="TFLOP/s", title=f"{case}\n{report['machine']['gpu']}")

# %%
# Here the portable ``tiled`` is no faster than ``safe``, which writes both matrices to
# memory. What it saves in traffic it spends on arithmetic without tensor cores. Where
# the same idea meets tensor cores, in torch's flash and cudnn, it is more than ten
# times faster than the unfused computation.
#
# Today's ``tiled`` uses tensor cores on this card. Here is the same case with that
# kernel, measured in another run, compared with those in the figure:

now = measured.result("hopper_terms_h200")
print(measured.source(now))
rate = {row["cell"]: row["new"] for row in now["rows"]}["plain 128"]
print(f"tiled by tensor cores: {rate:.0f} TFLOP/s")
for name in ("tiled", "safe", "torch math", "torch cudnn"):
    before = found[name]["rate"] / 1e12
    print(f"  {rate / before:5.1f} times {name}")

# %%
# The claims, case by case
# ------------------------
# "2 to 4 times faster", by the numbers of this card: the portable ``tiled`` against
# ``safe``, and torch's fused kernel against its unfused one.


def ratio(case, slow, fast):
    seconds = {
        r["provider"]: r.get("seconds") for r in report["rows"] if r["case"] == case
    }
    if seconds.get(slow) is None or seconds.get(fast) is None:
        return "-"
    faster = seconds[slow] / seconds[fast]
    verdict = "less" if faster < 2 else "holds" if faster <= 4 else "more"
    return f"{faster:5.1f}  {verdict}"


print(f"{'times faster':48} {'tiled : safe':13} flash : math (torch)")
for case in dict.fromkeys(r["case"] for r in report["rows"]):
    ours = ratio(case, "safe", "tiled")
    theirs = ratio(case, "torch math", "torch flash")
    print(f"{case:48} {ours:13} {theirs}")

# %%
# The claim about speed is a claim about kernels that use the whole card, and about what
# you compare with. The claim about memory needs no special hardware. It is a property
# of the algorithm, and it held on both machines on the last page.
#
# Copies that do not wait, and overlap
# ------------------------------------
# Tensor cores are so fast that everything else has to happen at the same time.
#
# *Asynchronous copies.* A thread that loads a number holds it in a register and waits
# for it. Since Ampere a copy can go from memory to shared memory on its own, and since
# Hopper one thread can ask a separate unit (TMA) for a whole tile. Shared memory then
# holds two or more tiles of K and V: one is in use while the next one arrives. In the
# five steps, *stream* no longer takes time of its own.
#
# *Overlap of product and softmax.* Exponentials are computed by other units than
# products, and at a far lower rate. Two groups of warps take turns: while one computes
# its softmax, the other one's products keep the tensor cores busy. *Rescale* and *fuse*
# then hide behind each other.
#
# *Fewer rescalings.* A correction is only needed when the maximum rises by a lot, since
# any number near it does just as well. Most tiles then skip step 3.
#
# The same in Triton
# ------------------
# Today, most such kernels are written in Triton, where a program handles blocks of
# numbers, and a compiler gives them to threads. `benchmarks/triton_kernels.py
# <https://github.com/cupyflash/cupyflash/tree/main/benchmarks/triton_kernels.py>`__ has
# the online softmax of a row and this page's attention in a hundred lines, and
# ``benchmarks/bench_triton.py`` compares their speed with ours. Read them first: the
# loop over the keys is nearly the mathematics of the last page. Softmax is given as a
# share of the speed of a copy, attention (batch, heads, queries, keys, columns) in
# TFLOP/s:

triton = measured.newest("triton")
print(measured.source(triton))
cases = {}
for row in triton["rows"]:
    value = row["share"] if row["case"].startswith("softmax") else row["rate"] / 1e12
    cases.setdefault(row["case"], {})[row["provider"]] = value
for case, by_provider in cases.items():
    ours, theirs = by_provider["cupyflash"], by_provider["triton"]
    print(f"{case:52}  ours {ours:5.3g}  Triton {theirs:5.3g}")

# %%
# So a hundred lines give between a third and two thirds of our speed in attention, and
# between a quarter and nearly all of it in softmax. The sizes of blocks were tuned for
# this card, and nothing else.
#
# *What Triton shows* is the algorithm: which block is where, what the running maximum
# and sum are corrected by, and where a block ends.
#
# *What it hides* is this page. ``tl.dot`` becomes instructions of tensor cores, loads
# become asynchronous copies some blocks ahead (``num_stages``), and who holds which
# number is the compiler's choice. What a program cannot say, it cannot ask for: the
# roles of warps, whose turn it is, which blocks share a row and how they meet. A CUDA
# kernel says all of that, and is many times as long.
#
# How far these ideas carry has to be measured. The `design notes
# <https://github.com/cupyflash/cupyflash/tree/main/docs/design>`__ say what was tried
# here, and what came of it.

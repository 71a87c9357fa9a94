"""Random problems of cupyflash.distributed, beside the plain functions.

python tests/support/fuzz_ranks.py 500            # problems 0 to 499
python tests/support/fuzz_ranks.py 1 --first 77   # one of them again
"""

import argparse
import sys
import time

import ml_dtypes
import numpy as np
import ranks
from accuracy import to_host

import cupyflash
from cupyflash import distributed

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
# Beside twice the error of the plain function, of the largest entry: parts are rounded
# to 16 bits once more; the bounds of wider results and of wider gradients are promised.
ROUNDINGS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2e-6, "float64": 1e-14}
# Parts of gradients may be larger than their sum.
GRADIENTS = {"float16": 2**-9, "bfloat16": 2**-6, "float32": 1e-5, "float64": 1e-13}


def draw(seed, few=False):
    """(size, arrays q, k, v, dout, dlse, options, zigzag, seed of the parts).

    With `few`, dtypes and head_dims for which a GPU has to compile little.
    """
    rng = np.random.default_rng(seed)
    size = int(rng.choice(ranks.SIZES))
    names = ("bfloat16", "float32") if few else tuple(DTYPES)
    dtype = DTYPES[str(rng.choice(names))]
    batch = tuple(int(n) for n in rng.integers(1, 3, rng.integers(0, 3)))
    kv_heads = int(rng.integers(1, 3))
    heads = kv_heads * int(rng.integers(1, 4))
    longest = int(rng.choice([3, 12, 60, 150]))
    seqlen_q = int(rng.integers(0, longest + 1))
    seqlen_k = seqlen_q if rng.random() < 0.6 else int(rng.integers(0, longest + 1))
    head_dim, head_dim_v = (64, 64) if few else (int(n) for n in rng.integers(1, 17, 2))
    if is_matrix := rng.random() < 0.1:
        batch, heads, kv_heads, lead, lead_kv = (), 1, 1, (), ()
    else:
        of_keys = tuple(n if rng.random() < 0.8 else 1 for n in batch)
        lead, lead_kv = (*batch, heads), (*of_keys, kv_heads)
    q = rng.normal(size=(*lead, seqlen_q, head_dim))
    k = rng.normal(size=(*lead_kv, seqlen_k, head_dim))
    v = rng.normal(size=(*lead_kv, seqlen_k, head_dim_v))
    dout = rng.normal(size=(*lead, seqlen_q, head_dim_v))
    options = {}

    def perhaps(chance, name, value):
        if rng.random() < chance:
            options[name] = value

    perhaps(0.5, "causal", True)
    side = [None, *(int(n) for n in rng.integers(0, longest + 1, 2))]
    perhaps(0.3, "window", (side[rng.integers(3)], side[rng.integers(3)]))
    perhaps(0.2, "softcap", 2.0)
    perhaps(0.3, "scale", float(rng.normal()))
    offsets = rng.integers(-longest, longest + 1, size=batch)
    perhaps(0.3, "query_offset", int(offsets.flat[0]))
    perhaps(0.1, "query_offset", offsets)
    perhaps(0.2, "query_lengths", rng.integers(0, seqlen_q + 1, size=batch))
    perhaps(0.2, "key_lengths", rng.integers(0, seqlen_k + 1, size=batch))
    perhaps(0.2, "sinks", rng.normal(size=heads).astype(dtype))
    perhaps(0.2, "alibi_slopes", rng.random(heads).astype("float32"))
    shape = [int(rng.choice([1, n])) for n in (heads, seqlen_q, seqlen_k)]
    perhaps(0.2, "bias", rng.normal(size=shape).astype(dtype))
    shape = (*batch, int(rng.choice([1, heads])), seqlen_q, seqlen_k)
    perhaps(0.2, "mask", rng.random(shape[-2:] if is_matrix else shape) < 0.7)
    arrays = [x.astype(dtype) for x in (q, k, v, dout)]
    if rng.random() < 0.3 and not is_matrix:
        options["layout"] = "bshd"
        arrays = [np.ascontiguousarray(x.swapaxes(-3, -2)) for x in arrays]
    lse_dtype = np.float64 if dtype is np.float64 else np.float32
    rows = lead if is_matrix else (*batch, heads)
    dlse = rng.normal(size=(*rows, seqlen_q)).astype(lse_dtype)
    dlse = dlse if rng.random() < 0.3 else None
    zigzag = bool(options.get("causal")) if rng.random() < 0.7 else rng.random() < 0.5
    return size, arrays, dlse, options, bool(zigzag), int(rng.integers(1 << 30))


class Parts:
    """How one sequence is dealt to the ranks, and put together again."""

    def __init__(self, comm, total, zigzag, rng):
        self.comm, self.zigzag, self.total = comm, zigzag, total
        self.lengths = ranks.cuts(rng, total, comm.size)

    def cut(self, x, axis):
        if x is None or x.ndim < -axis or x.shape[axis] != self.total:
            return x  # an option that is the same for all queries
        if self.zigzag:
            return distributed.shard(x, self.comm, axis, causal=True)
        first = sum(self.lengths[: self.comm.rank])
        stop = first + self.lengths[self.comm.rank]
        return x[(..., slice(first, stop)) + (slice(None),) * (-1 - axis)]

    def join(self, x, axis):
        return distributed.unshard(x, self.comm, axis, causal=self.zigzag)


def over_ranks(comm, seed, few=False, xp=np):
    """(out, lse, dq, dk, dv) of a problem, put together."""
    _, arrays, dlse, options, zigzag, parts = draw(seed, few)
    q, k, v, dout = map(xp.asarray, arrays)
    dlse = None if dlse is None else xp.asarray(dlse)
    options = {
        n: xp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()
    }
    rng = np.random.default_rng(parts)
    layout = options.get("layout", "bhsd")
    axis = -3 if layout == "bshd" else -2
    queries = Parts(comm, q.shape[axis], zigzag, rng)
    keys = Parts(comm, k.shape[axis], zigzag, rng)
    given = {**options, "zigzag": zigzag}
    for name in ("bias", "mask"):
        if name in options and options[name].shape[-2] != 1:
            given[name] = queries.cut(options[name], -2)
    part = [queries.cut(q, axis), keys.cut(k, axis), keys.cut(v, axis)]
    out, lse = distributed.attention(*part, comm, return_lse=True, **given)
    grads = distributed.attention_vjp(
        queries.cut(dout, axis), *part, out, lse, comm,
        dlse=queries.cut(dlse, -1), deterministic=True, **given,
    )  # fmt: skip
    assert (out.flags.c_contiguous, grads.dk.shape) == (True, part[1].shape)
    found = [
        queries.join(out, axis), queries.join(lse, -1), queries.join(grads.dq, axis),
        keys.join(grads.dk, axis), keys.join(grads.dv, axis),
    ]  # fmt: skip
    return [to_host(x) for x in found]


def on_one(seed, wide=False, few=False):
    """The same by the plain functions; wide: all in float64."""
    _, arrays, dlse, options, _, _ = draw(seed, few)
    if wide:
        arrays = [x.astype(np.float64) for x in arrays]
        dlse = None if dlse is None else dlse.astype(np.float64)
        options = {
            n: x.astype(np.float64) if n in ("bias", "sinks") else x
            for n, x in options.items()
        }
    q, k, v, dout = arrays
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    grads = cupyflash.attention_vjp(dout, q, k, v, out, lse, dlse=dlse, **options)
    return [out, lse, *grads[:3]]


def largest_score(seed, few=False):
    """A bound of what any score is made of: scale times the norms of q and k."""
    _, (q, k, *_), _, options, *_ = draw(seed, few)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    norms = (
        np.linalg.norm(x.astype(np.float64), axis=-1).max(initial=0) for x in (q, k)
    )
    return float(abs(scale) * np.prod(list(norms)))


def solve(comm, seed, few=False, xp=np):
    """What is wrong with a problem over ranks, in words; or None."""
    found, again = (over_ranks(comm, seed, few, xp) for _ in range(2))
    if any(a.tobytes() != b.tobytes() for a, b in zip(found, again, strict=True)):
        return "two runs differ"
    if comm.rank:
        return None
    names = ("out", "lse", "dq", "dk", "dv")
    plain, exact = (on_one(seed, wide, few) for wide in (False, True))
    parts = zip(names, found, plain, exact, strict=True)
    for name, got, plain, exact in parts:
        if (got.shape, got.dtype) != (plain.shape, plain.dtype):
            return f"{name} is {got.dtype} {got.shape}, not {plain.dtype} {plain.shape}"
        dtype = plain.dtype.name
        got, plain = (x.astype(np.float64) for x in (got, plain))
        if not np.array_equal(np.isfinite(got), np.isfinite(exact)):
            return f"{name} has other infinities"
        here = np.isfinite(exact)
        got, plain, exact = got[here], plain[here], exact[here]
        size = np.abs(exact).max(initial=1.0)
        error, its = (np.abs(x - exact).max(initial=0.0) for x in (got, plain))
        promised = GRADIENTS if name[0] == "d" else ROUNDINGS
        # Scores are rounded, so weights are off in proportion (guide: precision).
        unit = 2.0**-51 if dtype == "float64" else 2.0**-22
        bound = 2 * its + (promised[dtype] + unit * largest_score(seed, few)) * size
        if not error <= bound:
            return f"{name} is off by {error:.2e}, allowed {bound:.2e}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    start, bad = time.monotonic(), 0
    with ranks.Ranks() as pool:
        for seed in range(options.first, options.first + options.count):
            found = pool.all(draw(seed)[0], solve, seed)
            for text in filter(None, found):
                bad += 1
                print(f"problem {seed}: {text}", flush=True)
    seconds = time.monotonic() - start
    print(f"{options.count} problems, {bad} bad, {seconds:.0f} s")
    sys.exit(bool(bad))


if __name__ == "__main__":
    import fuzz_ranks  # the module that the processes import

    fuzz_ranks.main()

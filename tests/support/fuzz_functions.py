"""Random score and mask functions beside random options, on NumPy arrays.

``python tests/support/fuzz_functions.py 500 7`` compares 500 problems, from seed 7 on,
with all scores in memory, in each way in which a call can go.
"""

import random
import sys
import warnings

import expressions
import numpy as np

import cupyflash
from cupyflash._attention.cpu import entries, forward

BATCH, HEADS = 3, 4  # those of the arrays of `expressions`
WAYS = ("entries", "again", "tiled", "safe", "online")
# Larger scores lose the digits that are compared.
_LARGEST = 1e6


def problem(seed):
    """(q, k, v, options, functions) of a seed."""
    r, rng = random.Random(seed), np.random.default_rng(seed)
    rows, keys, dim = (r.choice(of) for of in ((1, 2, 5, 33), (1, 3, 17, 40), (1, 4)))
    kv_heads = r.choice([1, 2, 4])
    q = rng.normal(size=(BATCH, HEADS, rows, dim))
    k = rng.normal(size=(BATCH, kv_heads, keys, dim))
    v = rng.normal(size=(BATCH, kv_heads, keys, r.choice([1, 3, 9])))
    window = r.choice([None, 0, 1, 5, 100]), r.choice([None, 0, 2, 100])
    place = r.choice([0, -3, 7, rng.integers(-4, keys + 4, BATCH)])
    options = {
        "causal": True,
        "window": window,
        "query_offset": place,
        "query_lengths": rng.integers(0, rows + 1, BATCH),
        "key_lengths": rng.integers(0, keys + 1, BATCH),
        "softcap": r.choice([0.5, 3.0]),
        "sinks": rng.normal(size=HEADS),
        "alibi_slopes": rng.uniform(0, 0.3, HEADS),
        "bias": rng.normal(size=(HEADS, rows, keys)),
        "scale": r.choice([0.0, -0.3, 2.0]),
    }
    options = {name: x for name, x in options.items() if r.random() < 0.25}
    functions, named = {}, expressions.arrays()
    kind = r.choice(["score", "mask", "both"])
    if kind != "mask":
        text = expressions.Grammar(r.choice).number(r.randrange(4))
        functions |= {"score": expressions.function(text), "score_arrays": named}
    if kind != "score":
        text = expressions.Grammar(r.choice, positions=True).boolean(r.randrange(4))
        if r.random() < 0.5:
            text += " | (doc[b, np.clip(i, 0, 63)] == doc[b, np.clip(j, 0, 63)])"
        mask = expressions.function(text, "b, i, j, *, doc")
        functions |= {"mask": mask, "mask_arrays": {"doc": named["doc"]}}
    return (q, k, v), options, functions


def dense(q, k, v, options, functions):
    """(out, lse) with all scores in memory."""
    group = HEADS // k.shape[1]
    k, v = (x.repeat(group, axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * options.get("scale", q.shape[-1] ** -0.5)
    rows, keys = s.shape[-2:]
    if cap := options.get("softcap"):
        s = cap * np.tanh(s / cap)
    length_q = options.get("query_lengths", np.full(BATCH, rows))
    length_k = options.get("key_lengths", np.full(BATCH, keys))
    first = options.get("query_offset", length_k - length_q)
    first = np.broadcast_to(first, BATCH)[:, None, None, None]
    i, j = np.arange(rows)[:, None] + first, np.arange(keys)
    b = np.arange(BATCH)[:, None, None, None]
    if score := functions.get("score"):
        h = np.arange(HEADS)[:, None, None]
        value = score(s=s, b=b, h=h, i=i, j=j, **functions["score_arrays"])
        s = np.broadcast_to(value, s.shape)
    s = s + options.get("bias", 0)
    if "alibi_slopes" in options:
        s = s - options["alibi_slopes"][:, None, None] * abs(i - j)
    seen = np.broadcast_to(j < length_k[:, None, None, None], s.shape)
    if mask := functions.get("mask"):
        seen = seen & mask(b=b, i=i, j=j, **functions["mask_arrays"])
    if options.get("causal"):
        seen = seen & (j <= i)
    left, right = options.get("window", (None, None))
    if left is not None:
        seen = seen & (i - j <= left)
    if right is not None:
        seen = seen & (j - i <= right)
    s = np.where(seen, s, -np.inf)
    sinks = np.broadcast_to(options.get("sinks", -np.inf), HEADS)[:, None, None]
    sinks = np.broadcast_to(sinks, (*s.shape[:-1], 1))
    whole = np.concatenate([s, sinks], axis=-1)
    m = whole.max(axis=-1, keepdims=True)
    m = np.where(m == -np.inf, 0, m)
    lse = np.log(np.exp(whole - m).sum(axis=-1)) + m[..., 0]
    p = np.exp(s - np.where(lse == -np.inf, 0, lse)[..., None])
    padding = np.arange(rows) >= length_q[:, None, None]
    blind = padding | (s == -np.inf).all(axis=-1)
    out = np.where(blind[..., None], 0, np.where(seen, p, 0) @ v)
    lse = np.where(blind, sinks[..., 0], lse)
    return out, np.where(padding, -np.inf, lse)


def check(seed, way):
    """Compare a problem, as it goes in one of `WAYS`; whether its scores are small."""
    (q, k, v), options, functions = problem(seed)
    call = {**options, **functions}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, expected_lse = dense(q, k, v, options, functions)
    takes = entries.takes
    forward._checked.clear()
    try:
        if way == "tiled":
            entries.takes = lambda problem: False
        method = way if way in ("safe", "online") else "tiled"
        out, lse = cupyflash.attention(q, k, v, **call, method=method, return_lse=True)
        if way == "again":  # with what the first call has left
            cupyflash.attention(q, k, v, **call)
            out = cupyflash.attention(q, k, v, **call)
    finally:
        entries.takes = takes
    assert out.shape == expected.shape
    size = np.max(abs(expected_lse), where=np.isfinite(expected_lse), initial=1)
    if size > _LARGEST:
        return False
    close = {"rtol": 1e-8, "atol": 1e-9 * size, "err_msg": f"seed {seed}, {way}"}
    np.testing.assert_allclose(out, expected, **close)
    np.testing.assert_allclose(lse, expected_lse, **close)
    return True


def main(count, first=0):
    compared = sum(
        check(seed, way) for seed in range(first, first + count) for way in WAYS
    )
    print(f"{count} problems, {compared} results compared, 0 bad")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

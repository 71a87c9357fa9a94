"""What the rows of float64 gradients of few queries and of few keys must keep."""

import numpy as np
from accuracy import max_error, to_host
from placing import place
from test_attention_vjp import agree, gradients, inputs

import cupyflash


def all_options(cupy, rng, q, k, query_lengths):
    """The options together and one by one, for q and k of these shapes: 2 entries."""
    (_, heads, queries, _), keys = q, k[-2]
    options = {
        "bias": rng.normal(size=(heads, queries, keys)),
        "mask": rng.random((queries, keys)) < 0.8,
        "sinks": rng.normal(size=heads),
        "alibi_slopes": rng.random(heads) * 0.1,
        "query_lengths": np.array(query_lengths),
        "key_lengths": np.array([keys - 7, keys]),
        "softcap": 4.0,
        "window": (600, 600),
    }
    arrays = inputs(rng, "float64", q=q, k=k)
    agree(cupy, *arrays, need_dbias=False, **options)
    for name in ("sinks", "query_lengths", "key_lengths", "mask", "alibi_slopes"):
        agree(cupy, *arrays, **{name: options[name]})
    agree(cupy, *arrays, bias=options["bias"], need_dbias=False)
    dlse = rng.normal(size=(2, heads, queries))
    agree(cupy, *arrays, dlse=dlse, causal=True)
    agree(cupy, *arrays, dlse=dlse, sinks=options["sinks"], causal=True)


def what_nobody_sees_leaves_the_bits_as_they_are(cupy, arrays, bad, hidden_rows):
    """`bad` in keys 4 to 8 and in `hidden_rows` of queries, or beyond the lengths."""
    q, k, v, dout = arrays
    queries, keys = q.shape[-2], k.shape[-2]
    mask = np.ones((queries, keys), bool)
    mask[:, 4:9], mask[hidden_rows] = False, False
    clean = gradients(cupy, q, k, v, dout, mask=mask)
    by_length = {"query_lengths": queries - 2, "key_lengths": keys - 3}
    padded = gradients(cupy, q, k, v, dout, **by_length)
    given = [x.copy() for x in (q, k, v, dout)]
    given[1][:, 4:9], given[2][:, 4:9] = bad, bad
    given[0][:, hidden_rows], given[3][:, hidden_rows] = bad, bad
    hidden = gradients(cupy, *given, mask=mask)
    for a, b in zip(clean[:3], hidden[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))
    q[:, -1:], dout[:, -2:], k[:, -2:], v[:, -1:] = bad, bad, bad, bad
    again = gradients(cupy, q, k, v, dout, **by_length)
    for a, b in zip(padded[:3], again[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))


def values_that_are_not_finite(cupy, arrays, row):
    """In a row of each array in turn: of q, k, and the gradient of out."""
    for n, bad in ((0, np.nan), (1, np.inf), (1, np.nan), (3, np.nan)):
        given = [x.copy() for x in arrays]
        given[n][0, row, 5] = bad
        agree(cupy, *given)
        agree(cupy, *given, causal=True)
    arrays[2][0, 3, 5] = np.nan
    host, device = (gradients(xp, *arrays, causal=True) for xp in (np, cupy))
    for a, b in zip(host[:3], device[:3], strict=True):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(to_host(b)))


def lse_of_other_roundings(cupy, arrays, sinks=None, **need):
    """Weights sum to 1 whatever lse was rounded to, unless it knows of more keys."""
    q, k, v, dout = (place(cupy, x) for x in arrays)
    more = {} if sinks is None else {"sinks": place(cupy, sinks)}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **more)

    def call(out, lse):
        found = cupyflash.attention_vjp(dout, q, k, v, out, lse, **more, **need)
        return [x for x in found if x is not None]

    exact = call(out, lse)
    near = call(out, lse * (1 + 4e-16))
    half = call(out, lse + np.log(2))
    for a, b, c in zip(exact, near, half, strict=True):
        largest = np.abs(to_host(a)).max()
        assert max_error(b, to_host(a)) <= 1e-14 * largest
        assert max_error(c, to_host(a) / 2) <= 1e-13 * largest


def the_same_bits_again(cupy, arrays):
    """Of two calls."""
    first, again = (gradients(cupy, *arrays) for _ in range(2))
    for a, b in zip(first[:3], again[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))

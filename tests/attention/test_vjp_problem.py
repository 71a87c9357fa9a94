"""Arguments of attention_vjp: what is refused, and in which words."""

import numpy as np
import pytest
from accuracy import to_host

import cupyflash


def arguments(xp):
    """A small call that is accepted."""
    q, k, v = (
        xp.ones(s, np.float32) for s in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6))
    )
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    return {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse}


def of(shape, dtype=np.float32):
    return lambda xp: xp.ones(shape, dtype)


# (changes to the arguments, error, message)
REFUSALS = {
    "shape of dout": (
        {"dout": of((2, 4, 3, 8))},
        ValueError,
        r"dout must have shape \(2, 4, 3, 6\), got \(2, 4, 3, 8\)",
    ),
    "dtype of dout": (
        {"dout": of((2, 4, 3, 6), np.float64)},
        TypeError,
        "dout must be float32, got float64",
    ),
    "no dout": ({"dout": None}, TypeError, "dout must be an array, got None"),
    "shape of out": (
        {"out": of((4, 3, 6))},
        ValueError,
        r"out must have shape \(2, 4, 3, 6\), got \(4, 3, 6\)",
    ),
    "dtype of out": (
        {"out": of((2, 4, 3, 6), np.float16)},
        TypeError,
        "out must be float32, got float16",
    ),
    "no out": ({"out": None}, TypeError, "out must be an array, got None"),
    "shape of lse": (
        {"lse": of((2, 3, 4))},
        ValueError,
        r"lse must have shape \(2, 4, 3\), got \(2, 3, 4\)",
    ),
    "dtype of lse": (
        {"lse": of((2, 4, 3), np.float64)},
        TypeError,
        "lse must be float32, got float64",
    ),
    "no lse": ({"lse": None}, TypeError, "lse must be an array, got None; attention"),
    "shape of dlse": (
        {"dlse": of((2, 4, 3, 1))},
        ValueError,
        r"dlse must have shape \(2, 4, 3\), got \(2, 4, 3, 1\)",
    ),
    "dtype of dlse": (
        {"dlse": of((2, 4, 3), np.int32)},
        TypeError,
        "dlse must be float32, got int32",
    ),
    "dbias without bias": (
        {"need_dbias": True},
        ValueError,
        "need_dbias=True asks for the gradient of bias=None",
    ),
    "dsinks without sinks": (
        {"need_dsinks": True},
        ValueError,
        "need_dsinks=True asks for the gradient of sinks=None",
    ),
    "flag": (
        {"deterministic": 1},
        TypeError,
        "deterministic must be a bool, got int",
    ),
    "another method": (
        {"method": "safe"},
        NotImplementedError,
        "attention_vjp takes method='auto' or 'tiled', got 'safe'",
    ),
    "method": (
        {"method": "fused"},
        ValueError,
        "method must be one of 'auto', .*, got 'fused'",
    ),
    "dtypes": (
        {"k": of((2, 2, 5, 8), np.float16)},
        TypeError,
        "q, k and v must have the same dtype",
    ),
    "bias": (
        {"bias": of((3, 3)), "need_dbias": True},
        ValueError,
        "bias has shape .* which does not broadcast",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(xp, name):
    changes, error, message = REFUSALS[name]
    given = arguments(xp)
    given |= {n: x(xp) if callable(x) else x for n, x in changes.items()}
    with pytest.raises(error, match=message):
        cupyflash.attention_vjp(**given)


def test_layout_decides_the_shape(xp):
    given = arguments(xp)
    swapped = {n: x.swapaxes(1, 2) for n, x in given.items() if n != "lse"}
    grads = cupyflash.attention_vjp(**swapped, lse=given["lse"], layout="bshd")
    expected = cupyflash.attention_vjp(**given)
    assert grads.dk.shape == (2, 5, 2, 8)
    np.testing.assert_array_equal(
        to_host(grads.dk), to_host(expected.dk).swapaxes(1, 2)
    )


@pytest.mark.gpu
def test_kinds_do_not_mix(cupy):
    given = arguments(cupy)
    given["dout"] = cupy.asnumpy(given["dout"])
    with pytest.raises(TypeError, match=r"q is a CuPy array .* but dout is a NumPy"):
        cupyflash.attention_vjp(**given)

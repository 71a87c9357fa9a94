"""explain: which kernel would run, and why."""

import numpy as np
import pytest
from placing import place

import cupyflash
import cupyflash.points

METHODS = ("auto", "naive", "safe", "online", "tiled")


def q_k_v(xp, rng, dtype=np.float32):
    return tuple(
        place(xp, rng.normal(size=(1, 2, n, 8)).astype(dtype)) for n in (5, 7, 7)
    )


@pytest.mark.parametrize("method", METHODS)
def test_attention(xp, rng, method):
    told = cupyflash.explain(cupyflash.attention, *q_k_v(xp, rng), method=method)
    assert told.function == "attention"
    assert told.backend == xp.__name__
    fused = "tiled" if xp is np else "tiny"
    assert told.kernel == {"auto": fused, "tiled": fused}.get(method, method)
    assert told.problem.seqlen_k == 7
    text = repr(told)
    assert text.startswith(f"attention on {xp.__name__}: {told.kernel}")
    assert len(text.splitlines()) > 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(xp, rng, name, method):
    x = place(xp, rng.normal(size=(4, 50)))
    told = cupyflash.explain(getattr(cupyflash, name), x, -1, method=method)
    assert told.function == name
    assert told.kernel == ("tiled" if method == "auto" else method)
    assert told.problem.row_length == 50


def test_each_launch_is_told_in_one_way():
    launch = {
        "source": "cuda_src/softmax/ladder/tiled.cu",
        "grid": (3,),
        "shared memory": 1024,
    }
    told = cupyflash.explain("softmax", np.ones(3))
    told.details["launches"] = [launch, launch]
    assert repr(told).endswith(
        "\n  launch 2: cuda_src/softmax/ladder/tiled.cu"
        "\n    grid: (3,)\n    shared memory: 1024"
    )


@pytest.mark.gpu
def test_launches(cupy):
    x = cupy.ones((1, 2, 64, 64), np.float32)
    names = ["source", "grid", "block", "shared memory", "defines"]
    for call in (("softmax", x, -1), ("attention", x, x, x)):
        (first, *_) = cupyflash.explain(*call).details["launches"]
        assert list(first) == names
        assert first["source"].startswith(f"cuda_src/{call[0]}/")


def test_the_other_functions(xp, rng):
    x = place(xp, rng.normal(size=(4, 50)))
    for name, args in {
        "logsumexp": (x, 1),
        "softmax_vjp": (x, x, 1),
        "log_softmax_vjp": (x, x, 1),
        "merge_attention_states": (x[..., None], x),
    }.items():
        told = cupyflash.explain(name, *args)
        assert told.function == name
        assert told.backend == xp.__name__
        assert told.kernel


def test_reasons_of_the_kernels_before_it(xp, rng):
    if xp is np:
        pytest.skip("NumPy has one implementation a method")
    x = xp.zeros((1, 1 << 20), np.float32)
    told = cupyflash.explain("softmax", x, -1)
    assert told.kernel != "tiled"
    refused = dict(told.refused)
    before = ["columns", "split_columns", "relay", "short", "span", "tiled"]
    assert list(refused) == before
    assert "1048576" in refused["tiled"]
    assert "1048576" in refused["span"]
    assert "not adjacent in memory" in refused["columns"]
    assert "not tiled: " in repr(told)


def test_nothing_runs(xp, rng):
    out = xp.full((1, 2, 5, 8), 7.0, np.float32)
    cupyflash.explain("attention", *q_k_v(xp, rng), out=out)
    x = xp.full((3,), 7.0)
    cupyflash.explain("softmax", x, out=x)
    assert bool((out == 7).all())
    assert bool((x == 7).all())


def test_empty_problems(xp):
    for shape in ((0,), (3, 0)):
        assert cupyflash.explain("softmax", xp.empty(shape)).backend == xp.__name__
    x = xp.empty((2, 0, 4), np.float32)
    assert cupyflash.explain("attention", x, x, x).backend == xp.__name__


@pytest.mark.parametrize("function", [np.exp, "exp", None, "explain", [1]])
def test_other_functions_are_refused(function):
    with pytest.raises(
        ValueError, match="function must be one of softmax, log_softmax"
    ):
        cupyflash.explain(function, np.ones(3))


def test_a_function_of_a_submodule_is_named_with_it():
    for function in (cupyflash.points.logsumexp, cupyflash.points.GaussianKDE):
        name = f"cupyflash.points.{function.__name__}"
        with pytest.raises(ValueError, match=f"of cupyflash itself, got {name}$"):
            cupyflash.explain(function, np.ones((3, 1)), np.ones((3, 1)))


def test_bad_arguments_raise_as_the_call_does(xp, rng):
    with pytest.raises(ValueError, match="method must be one of"):
        cupyflash.explain("softmax", xp.ones(3), method="quick")
    q, k, v = q_k_v(xp, rng)
    with pytest.raises(TypeError, match="q, k and v must have the same dtype"):
        cupyflash.explain("attention", q, k.astype(np.float64), v)
    with pytest.raises(TypeError, match="unexpected keyword"):
        cupyflash.explain("softmax", xp.ones(3), axes=1)
    with pytest.raises(TypeError, match="missing a required argument"):
        cupyflash.explain("softmax")

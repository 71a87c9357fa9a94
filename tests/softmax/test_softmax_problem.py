"""Arguments of the softmax family: what is refused, in which words."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from accuracy import FLOATS, dtype_of
from placing import place

import cupyflash
from cupyflash._core import arrays
from cupyflash._softmax import problem as softmax_problem

VJPS = (cupyflash.softmax_vjp, cupyflash.log_softmax_vjp)
SOFTMAXES = (cupyflash.softmax, cupyflash.log_softmax)
LOGSUMEXP = (cupyflash.logsumexp,)
UNARY = SOFTMAXES + LOGSUMEXP


def name_of(function):
    return function.__name__


def read_only(xp, shape):
    """An array that may not be written; CuPy has none, so NumPy's alone."""
    x = xp.zeros(shape, np.float32)
    x.flags.writeable = False
    return x


# (functions, arguments made from xp, keywords made from xp, error, message)
REFUSALS = {
    "x of strings": (
        UNARY,
        lambda xp: [np.array(["a"])],
        {},
        TypeError,
        r"(x|a) must hold numbers \(float16, .*\), got <U1",
    ),
    "x of objects": (
        UNARY,
        lambda xp: [np.array([None, 1])],
        {},
        TypeError,
        "must hold numbers .* got object",
    ),
    "no x": (UNARY, lambda xp: [None], {}, TypeError, "must be an array, got None"),
    "no dy": (
        VJPS,
        lambda xp: [xp.ones(3), None],
        {},
        TypeError,
        "dy must be an array, got None",
    ),
    "a masked x": (
        UNARY,
        lambda xp: [np.ma.masked_array([1.0, 2.0], mask=[True, False])],
        {},
        TypeError,
        "is a masked array, whose mask would be lost",
    ),
    "x in extended precision": (
        UNARY,
        lambda xp: [np.ones(2, np.longdouble)],
        {},
        TypeError,
        "has dtype .*; convert it to one of float16",
    ),
    "x in extended precision, complex": (
        UNARY,
        lambda xp: [np.ones(2, np.clongdouble)],
        {},
        TypeError,
        "has dtype .*; convert it to one of complex64, complex128",
    ),
    "axis too large": (
        UNARY,
        lambda xp: [xp.ones((2, 3)), 2],
        {},
        np.exceptions.AxisError,
        "axis: axis 2 is out of bounds for array of dimension 2",
    ),
    "axis too small": (
        UNARY,
        lambda xp: [xp.ones((2, 3)), (0, -3)],
        {},
        np.exceptions.AxisError,
        "out of bounds for array of dimension 2",
    ),
    "axis of a 0-d array": (
        UNARY,
        lambda xp: [xp.ones(()), 1],
        {},
        np.exceptions.AxisError,
        "out of bounds for array of dimension 0",
    ),
    "axis twice": (
        UNARY,
        lambda xp: [xp.ones((2, 3)), (1, -1)],
        {},
        ValueError,
        "repeated axis",
    ),
    "axis of another type": (
        UNARY,
        lambda xp: [xp.ones((2, 3)), 1.0],
        {},
        TypeError,
        "axis must be None, an int or a tuple of ints, got float",
    ),
    "where not bool": (
        UNARY,
        lambda xp: [xp.ones(3)],
        {"where": lambda xp: xp.ones(3)},
        TypeError,
        "where must be bool, got float64",
    ),
    "where of another shape": (
        UNARY,
        lambda xp: [xp.ones((2, 3))],
        {"where": lambda xp: xp.ones(2, bool)},
        ValueError,
        r"where has shape \(2,\), which does not broadcast to \(2, 3\)",
    ),
    "where enlarges x": (
        UNARY,
        lambda xp: [xp.ones(3)],
        {"where": lambda xp: xp.ones((2, 3), bool)},
        ValueError,
        r"where has shape \(2, 3\), which does not broadcast to \(3,\)",
    ),
    "scale is a string": (
        SOFTMAXES,
        lambda xp: [xp.ones(3)],
        {"scale": lambda xp: "1"},
        TypeError,
        "scale must be a real number, got a str",
    ),
    "scale is infinite": (
        SOFTMAXES,
        lambda xp: [xp.ones(3)],
        {"scale": lambda xp: np.inf},
        ValueError,
        "scale must be finite, got inf",
    ),
    "scale is an array": (
        SOFTMAXES,
        lambda xp: [xp.ones(3)],
        {"scale": lambda xp: xp.ones(3)},
        TypeError,
        "scale must be a real number",
    ),
    "dtype is an integer": (
        SOFTMAXES,
        lambda xp: [xp.ones(3)],
        {"dtype": lambda xp: np.int32},
        TypeError,
        "dtype must be one of float16, bfloat16, float32, float64, got int32",
    ),
    "dtype is nonsense": (
        SOFTMAXES,
        lambda xp: [xp.ones(3)],
        {"dtype": lambda xp: "wide"},
        TypeError,
        "dtype must be one of .*, got 'wide'",
    ),
    "dtype of complex": (
        SOFTMAXES,
        lambda xp: [xp.ones(3, complex)],
        {"dtype": lambda xp: np.float32},
        TypeError,
        "dtype must be complex128 for complex x",
    ),
    "dtype of complex is nonsense": (
        SOFTMAXES,
        lambda xp: [xp.ones(3, complex)],
        {"dtype": lambda xp: "wide"},
        TypeError,
        "dtype must be complex128 for complex x, got wide",
    ),
    "unknown method": (
        SOFTMAXES,
        lambda xp: [xp.ones(3)],
        {"method": lambda xp: "quick"},
        ValueError,
        "method must be one of 'auto', 'naive', 'safe', 'online', 'tiled', got 'quick'",
    ),
    "out is a list": (
        UNARY,
        lambda xp: [xp.ones(3)],
        {"out": lambda xp: [0.0, 0.0, 0.0]},
        TypeError,
        "out must be a NumPy or CuPy array, got a list",
    ),
    "out of a vjp is a number": (
        VJPS,
        lambda xp: [xp.ones(()), xp.ones(())],
        {"out": lambda xp: np.float64(0)},
        TypeError,
        "out must be a NumPy or CuPy array, got a float64",
    ),
    "out of another shape": (
        SOFTMAXES,
        lambda xp: [xp.ones((2, 3))],
        {"out": lambda xp: xp.zeros((3, 2))},
        ValueError,
        r"out must have shape \(2, 3\), got \(3, 2\)",
    ),
    "out of integers": (
        SOFTMAXES,
        lambda xp: [xp.ones(3)],
        {"out": lambda xp: xp.zeros(3, np.int32)},
        TypeError,
        "out must be one of float16, .*, got int32",
    ),
    "out against dtype": (
        SOFTMAXES,
        lambda xp: [xp.ones(3)],
        {"out": lambda xp: xp.zeros(3), "dtype": lambda xp: "float32"},
        TypeError,
        "out must be float32, got float64",
    ),
    "out of logsumexp of another shape": (
        LOGSUMEXP,
        lambda xp: [xp.ones((2, 3)), 1],
        {"out": lambda xp: xp.zeros((2, 1))},
        ValueError,
        r"out must have shape \(2,\), got \(2, 1\)",
    ),
    "out of logsumexp of another dtype": (
        LOGSUMEXP,
        lambda xp: [xp.ones((2, 3)), 1],
        {"out": lambda xp: xp.zeros(2, np.float32)},
        TypeError,
        "out must be float64, got float32",
    ),
    "b does not broadcast": (
        LOGSUMEXP,
        lambda xp: [xp.ones((2, 3)), None, xp.ones(2)],
        {},
        ValueError,
        r"b has shape \(2,\), which does not broadcast with a of shape \(2, 3\)",
    ),
    "b of strings": (
        LOGSUMEXP,
        lambda xp: [np.ones(1), None, np.array(["a"])],
        {},
        TypeError,
        "b must hold numbers",
    ),
    "keepdims is a number": (
        LOGSUMEXP,
        lambda xp: [xp.ones(3)],
        {"keepdims": lambda xp: 2},
        TypeError,
        "keepdims must be a bool, got int",
    ),
    "return_sign is a string": (
        LOGSUMEXP,
        lambda xp: [xp.ones(3)],
        {"return_sign": lambda xp: "yes"},
        TypeError,
        "return_sign must be a bool, got str",
    ),
    "y is complex": (
        VJPS,
        lambda xp: [xp.ones(3, complex), xp.ones(3)],
        {},
        TypeError,
        "y must be real, got complex128",
    ),
    "dy is complex": (
        VJPS,
        lambda xp: [xp.ones(3), xp.ones(3, complex)],
        {},
        TypeError,
        "dy must be real, got complex128",
    ),
    "dy of another shape": (
        VJPS,
        lambda xp: [xp.ones(3), xp.ones(4)],
        {},
        ValueError,
        r"dy has shape \(4,\), which does not broadcast to \(3,\)",
    ),
    "dy enlarges y": (
        VJPS,
        lambda xp: [xp.ones(3), xp.ones((2, 3))],
        {},
        ValueError,
        r"dy has shape \(2, 3\), which does not broadcast to \(3,\)",
    ),
    "axis of a vjp": (
        VJPS,
        lambda xp: [xp.ones(3), xp.ones(3), 1],
        {},
        np.exceptions.AxisError,
        "out of bounds",
    ),
    "scale of a vjp": (
        VJPS,
        lambda xp: [xp.ones(3), xp.ones(3)],
        {"scale": lambda xp: None},
        TypeError,
        "scale must be a real number, got a NoneType",
    ),
    "out of a vjp of another shape": (
        VJPS,
        lambda xp: [xp.ones(3), xp.ones(3)],
        {"out": lambda xp: xp.zeros(4)},
        ValueError,
        r"out must have shape \(3,\), got \(4,\)",
    ),
    "out of a vjp of another dtype": (
        VJPS,
        lambda xp: [xp.ones(3), xp.ones(3)],
        {"out": lambda xp: xp.zeros(3, np.float32)},
        TypeError,
        "out must be float64, got float32",
    ),
}
CASES = [
    pytest.param(function, *case[1:], id=f"{name}-{function.__name__}")
    for name, case in REFUSALS.items()
    for function in case[0]
]


@pytest.mark.parametrize(("function", "args", "kwargs", "error", "message"), CASES)
def test_refusals(xp, function, args, kwargs, error, message):
    args = args(xp)
    kwargs = {name: make(xp) for name, make in kwargs.items()}
    out = kwargs.get("out")
    with pytest.raises(error, match=message):
        function(*args, **kwargs)
    if out is not None:
        assert not arrays.adopt(out).any()  # a refused call changes nothing


@pytest.mark.parametrize("function", [*SOFTMAXES, *LOGSUMEXP], ids=name_of)
@pytest.mark.parametrize("axis", [3, "x"])
def test_a_refused_call_leaves_out_alone(xp, function, axis):
    out = xp.full((2, 3), 7.0)
    with pytest.raises((ValueError, TypeError)):
        function(xp.ones((2, 3)), axis, out=out)
    assert bool((out == 7).all())


@pytest.mark.parametrize("function", SOFTMAXES, ids=name_of)
def test_out_must_be_writable(function):
    with pytest.raises(ValueError, match="out is read-only"):
        function(np.ones(3, np.float32), out=read_only(np, 3))


@pytest.mark.parametrize("function", SOFTMAXES, ids=name_of)
def test_out_may_be_x_but_not_overlap_it(xp, function):
    x = xp.arange(6.0)
    before = x.copy()
    for out in (x[::-1], x[1:]):
        source = x if out.size == 6 else x[:-1]
        with pytest.raises(ValueError, match="out shares memory with x"):
            function(source, out=out)
    assert bool((x == before).all())
    assert function(x, out=x) is x


def test_out_may_not_overlap_where(xp):
    where = xp.ones(8, bool)
    with pytest.raises(ValueError, match="out shares memory with where"):
        cupyflash.softmax(xp.ones(1), where=where[:1], out=where.view(np.float64))


def test_out_of_logsumexp_is_no_input(xp):
    a = xp.ones((3, 4))
    for name, kwargs in {"a": {}, "b": {"b": xp.ones(4)}}.items():
        out = a[:, 0] if name == "a" else kwargs["b"][:3]
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            cupyflash.logsumexp(a, 1, out=out, **kwargs)


@pytest.mark.parametrize("function", VJPS, ids=name_of)
def test_out_of_a_vjp_may_be_an_input_but_not_overlap_it(xp, function):
    for name in ("y", "dy"):
        pair = {"y": xp.full(4, 0.25), "dy": xp.arange(4.0)}
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            function(**pair, out=pair[name][::-1])
        expected = function(**pair)
        assert function(**pair, out=pair[name]) is pair[name]
        assert bool((pair[name] == expected).all())
    y, dy = xp.full((1, 4), 0.25), xp.arange(4.0).reshape(1, 4)
    assert function(y, dy, out=dy) is dy  # broadcasting gives axes of 1 no stride


def test_out_is_no_broadcast_view(xp):
    out = xp.lib.stride_tricks.as_strided(xp.zeros(3), (2, 3), (0, 8))
    with pytest.raises(ValueError, match="elements share memory"):
        cupyflash.softmax(xp.ones((2, 3)), out=out)


@pytest.mark.gpu
@pytest.mark.parametrize("function", UNARY, ids=name_of)
def test_kinds_of_array_are_not_mixed(cupy, function):
    host, device = np.ones(3), cupy.ones(3)
    for x, out in ((host, cupy.ones(())), (device, np.ones(()))):
        with pytest.raises(TypeError, match=r"cupy\.asarray\(.*cupy\.asnumpy\("):
            function(x, out=out)
    with pytest.raises(TypeError, match="where is a NumPy array"):
        function(device, where=np.ones(3, bool))


def check(function, *args, **kwargs):
    """The problem of a call of softmax."""
    defaults = dict(axis=None, where=None, scale=1.0, dtype=None, out=None)
    options = {**defaults, "method": "auto", **kwargs}
    return softmax_problem.softmax(function, *args, **options)[0]


@pytest.mark.parametrize(
    ("x", "dtype", "compute", "out"),
    [
        ("float16", None, "float32", "float16"),
        ("bfloat16", None, "float32", "bfloat16"),
        ("float32", None, "float32", "float32"),
        ("float64", None, "float64", "float64"),
        ("float16", "float32", "float32", "float32"),
        ("float32", "bfloat16", "float32", "bfloat16"),
        ("float32", "float64", "float64", "float64"),
        ("float64", "float16", "float64", "float16"),
        ("bool", None, "float64", "float64"),
        ("int8", None, "float64", "float64"),
        ("uint64", None, "float64", "float64"),
        ("int32", "float32", "float64", "float32"),
        ("complex64", None, "complex128", "complex64"),
        ("complex128", None, "complex128", "complex128"),
    ],
)
def test_dtypes(xp, x, dtype, compute, out):
    problem = check("softmax", place(xp, np.ones(3).astype(dtype_of(x))), dtype=dtype)
    assert problem.dtypes["x"] == x
    assert problem.dtypes["out"] == out
    assert problem.compute_dtype == compute
    assert problem.backend == xp.__name__


def test_out_decides_the_dtype(xp):
    out = xp.empty(3, np.float64)
    assert check("softmax", xp.ones(3, np.float32), out=out).dtypes["out"] == "float64"


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        ("float16", "float16", "float16"),
        ("float16", "float32", "float32"),
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float64", "float64"),
        ("float32", "int8", "float64"),
        ("float32", "complex64", "complex64"),
        ("float64", "complex64", "complex128"),
        ("bool", "bool", "float64"),
    ],
)
def test_dtypes_of_logsumexp(a, b, result):
    a, b = (np.ones(2).astype(dtype_of(name)) for name in (a, b))
    problem, _ = softmax_problem.logsumexp(a, None, b, False, False, None, None)
    assert problem.dtypes["out"] == result


def test_shapes_of_logsumexp():
    a, b = np.ones((2, 1, 4)), np.ones((3, 1))
    for keepdims, shape in ((False, (2, 4)), (True, (2, 1, 4))):
        problem, _ = softmax_problem.logsumexp(a, 1, b, keepdims, False, None, None)
        assert problem.shape == (2, 3, 4)
        assert problem.result_shape == shape
        assert problem.row_length == 3
        assert problem.num_rows == 8


LOG2_E = Fraction(
    "1.442695040888963407359924681001892137426645954152985934135449406931109219"
)


@pytest.mark.parametrize(("dtype", "digits"), [("float32", 47), ("float64", 104)])
@pytest.mark.parametrize("scale", [1.0, 0.3, -0.7, 1e-300, 1e30, 2.0**100])
def test_units_of_exponents_have_twice_the_digits(dtype, digits, scale):
    _, factor = softmax_problem.split_scale(scale)
    unit, rest = softmax_problem.exponent_unit(factor, dtype)
    assert np.dtype(dtype).type(unit) == unit
    rest = float(np.dtype(dtype).type(rest))
    exact = Fraction(factor) * LOG2_E
    assert abs(Fraction(unit) * (1 + Fraction(rest)) / exact - 1) < 2.0**-digits


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_units_of_exponents_of_huge_scales_are_finite(dtype):
    unit, rest = softmax_problem.exponent_unit(1.7e308, dtype)
    assert 32 * unit <= np.finfo(dtype).max
    assert abs(rest) < np.finfo(dtype).eps


def test_the_problem_holds_no_arrays():
    problem = check("softmax", np.ones((2, 3)), axis=-1, where=np.ones(3, bool))
    assert problem.axes == (1,)
    assert problem.reduced_shape == (2, 1)
    assert not any(isinstance(v, np.ndarray) for v in vars(problem).values())


def test_operands_are_views(xp):
    x, where = xp.ones((2, 3)), xp.ones((2, 1), bool)
    _, operands = softmax_problem.softmax(
        "softmax", x, -1, where, 1.0, None, None, "auto"
    )
    assert operands.x is x
    assert operands.where.shape == (2, 3)
    assert operands.where.strides == (1, 0)


@pytest.mark.parametrize("name", FLOATS)
def test_lists_and_scalars_are_numpy(name):
    assert check("softmax", [1, 2]).backend == "numpy"
    assert check("softmax", dtype_of(name).type(1)).shape == ()
    assert check("softmax", ml_dtypes.bfloat16(1)).dtypes["x"] == "bfloat16"

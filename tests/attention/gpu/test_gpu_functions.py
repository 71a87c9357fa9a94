"""Score and mask functions on a GPU: plans and texts of kernels, without a GPU."""

from types import SimpleNamespace

import expressions_gpu
import functions_gpu
import numpy as np
import pytest
from function_problems import asked

import cupyflash
from cupyflash import scores
from cupyflash._attention import functions as bound_functions
from cupyflash._attention.gpu import functions as gpu_functions
from cupyflash._attention.gpu.config import defines, without_options
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._cli import nvrtc
from cupyflash._cli.compile_jobs import Job
from cupyflash._cuda import source
from cupyflash._cuda.device import device_of_arch

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100")
SLOPES = np.linspace(0.1, 0.4, 4).astype("float32")


def with_alibi(**options):
    return asked(score=scores.alibi, score_arrays={"slopes": SLOPES}, **options)


def row_named(name):
    return next(row for row in ATTENTION_KERNELS if row.name == name)


# --- the text ------------------------------------------------------------------------


def test_the_text_is_that_of_the_structure_alone():
    texts = {
        asked(score=lambda s, i, j, w=w: s - w * (i - j))[0].generated
        for w in (1, 7, 1 << 19)
    }
    assert len(texts) == 1
    other = asked(score=lambda s, i, j, w=0.5: s - w * (i - j))[0].generated
    assert other not in texts


@pytest.mark.parametrize(
    ("options", "is_short"),
    [
        ({}, True),
        ({"query_offset": 1 << 40}, False),
        ({"query_offset": np.array([0, 5])}, False),
        ({"key_lengths": np.array([5, 512])}, True),
        ({"score": lambda s, i, j: s - i * i * j}, True),
        ({"score": lambda s, i, j: s - i * i * j * j}, False),
        ({"score": lambda s, i, far=1 << 21: s + (i < far)}, False),
        ({"score": lambda s, i, *, t: s + t[i], "score_arrays": {"t": SLOPES}}, True),
        ({"mask": lambda h, i, j: (i - j) % (h - 2) == 0}, True),
        ({"mask": lambda i, j, n=7: i // n == j // n}, True),
        ({"mask": lambda i, j, n=7: i % n * n * n == j}, False),
    ],
)
def test_integers_have_32_bits_where_that_is_proved(options, is_short):
    problem, _ = asked(**{"score": lambda s, i, j: s - abs(i - j), **options})
    assert problem.generated.startswith("#define EXPR_SHORT_INTEGERS") == is_short


def test_kernels_beside_the_scores_have_no_function():
    problem, _ = with_alibi(mask=scores.sliding_window(9))
    plain = without_options(problem)
    assert not plain.has_functions
    assert plain.generated == ""
    names = dict(defines(plain, 1, 128))
    assert not names.keys() & {"SCORE_FUNCTION", "MASK_FUNCTION"}


def test_a_source_without_functions_has_no_text_of_them():
    text = source.load("attention/simt/tiled.cu")
    assert "score_mod_args<T> score;" in text  # behind a switch
    assert "struct score_mod_args" not in text


# --- what a launch is told -----------------------------------------------------------


def test_arguments_are_packed_as_the_text_declares_them():
    table = np.zeros((7, 4, 3), "float32")[::2, ::-1]

    def shifted(s, h, j, *, table, slope, shift=3, gain=0.5):
        return s * gain + table[j, h, 1] * slope[h] + shift

    expression, values = bound_functions.language().lookup(
        shifted, {"table": table, "slope": SLOPES}
    )
    from cupyflash._expr.emit_cuda import arguments, arguments_dtype

    class OnGpu:
        """What is asked of a CuPy array."""

        def __init__(self, x):
            self.data = type("Data", (), {"ptr": x.ctypes.data})
            self.shape, self.strides, self.size = x.shape, x.strides, x.size
            self.itemsize = x.itemsize

    arrays = {"table": table, "slope": SLOPES}
    for accum in ("float32", "float64"):
        dtype = arguments_dtype(expression, accum)
        record = np.zeros((), dtype)
        for name, value in arguments(expression, arrays, values).items():
            record[name] = value
        packed = expression.packer(
            {n: OnGpu(x) for n, x in arrays.items()}, values, accum
        )
        assert len(packed) % 8 == 0
        padded = packed[: dtype.itemsize]
        for name in dtype.names:
            got = np.frombuffer(padded, dtype)[0][name]
            assert np.array_equal(got, record[name]), name


def test_numbers_beyond_a_type():
    expression, values = bound_functions.language().lookup(
        lambda s, big=1e300: s * big, {}
    )
    assert np.frombuffer(expression.packer({}, values, "float32")[:4], "f4") == np.inf
    assert np.frombuffer(expression.packer({}, values, "float64"), "f8") == 1e300
    expression, values = bound_functions.language().lookup(
        lambda s, i, big=1 << 70: s * (i < big), {}
    )
    with pytest.raises(ValueError, match="an integer of more than 64 bits"):
        expression.packer({}, values, "float32")


def test_params_take_functions_at_their_end():
    problem, _ = with_alibi()
    params = gpu_functions.with_functions(b"12345678", problem)
    assert params.reads == ("functions",)
    assert params.bind(0)(b"abcdefgh") == b"12345678abcdefgh"
    assert gpu_functions.with_functions(b"12345678", without_options(problem)) == (
        b"12345678"
    )


# --- kernels -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["tiled", "online", "safe", "naive"])
def test_kernels_compile_with_functions(name, arch):
    if why := nvrtc.unusable():
        pytest.skip(why)
    device = device_of_arch(arch)
    problem, _ = with_alibi(mask=scores.sliding_window(100), softcap=3.0)
    row = row_named(name)
    assert row.unsupported_reason(problem, device) is None
    for config in row.configs(problem, 1, device):
        job = Job("attention", name, row.fast, arch, config.variant)
        finding, _ = nvrtc.find(job)
        assert not finding.error, finding.error
        assert not (row.fast and finding.spill_bytes)


def test_errors_name_the_array():
    q = np.zeros((2, 8, 4))
    with pytest.raises(TypeError, match=r"score_arrays\['w'\] must hold floats"):
        cupyflash.attention(
            q, q, q, score=lambda s, i, *, w: s + w[i],
            score_arrays={"w": np.zeros(3, complex)},
        )  # fmt: skip


# --- on a card -----------------------------------------------------------------------

CALLS = functions_gpu.calls(np.random.default_rng(1))
# The driver has all calls of each row; these meet all that a kernel does.
OF_A_ROW = {
    ("attention", "naive"): ("both",),
    ("attention", "safe"): ("both",),
    ("attention", "online"): ("both", "hidden by the score"),
    ("attention", "tiled"): ("both", "decode", "nothing seen"),
    ("attention", "mma"): ("both", "odd", "hidden by the score"),
    ("attention", "short_f64"): ("few keys",),
    ("attention", "tiled_f64"): ("both", "odd", "hidden by the score"),
    ("attention_vjp", "tiled"): ("both", "bias"),
    ("attention_vjp", "mma"): ("both", "odd"),
    ("attention_vjp", "mma_split"): ("odd", "square"),
    ("attention_vjp", "short_f64"): ("few keys",),
    ("attention_vjp", "sections_f64"): ("wide",),
    ("attention_vjp", "tiled_f64"): ("both", "odd"),
}
ON_CARD = [
    (*row, dtype, name)
    for row, names in OF_A_ROW.items()
    for dtype in functions_gpu.DTYPES[row[0]][row[1]]
    for name in names
]


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "row", "dtype", "name"), ON_CARD)
def test_functions_on_each_row(operation, row, dtype, name):
    """Within twice the error of NumPy in the same dtype, and some roundings."""
    errors = functions_gpu.check(operation, row, dtype, name, CALLS[name])
    assert max(errors) <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_random_functions(seed):
    """`python tests/support/expressions_gpu.py` runs more."""
    assert not expressions_gpu.check(seed, "cupy")


@pytest.mark.gpu
def test_another_number_or_array_compiles_nothing():
    import cupy

    from cupyflash._cuda import compiler

    x = cupy.random.default_rng(0).standard_normal((1, 2, 70, 32), "float32")

    def call(cap, slopes):
        return cupyflash.attention(
            x, x, x, score=lambda s, h, i, j, *, w: cap * np.tanh(s / cap) - w[h] * j,
            score_arrays={"w": slopes},
        )  # fmt: skip

    first = call(2.0, cupy.zeros(2, "float32"))
    count = compiler._load.cache_info().misses
    second = call(3.0, cupy.ones((9, 4), "float32")[::4, 0])
    assert compiler._load.cache_info().misses == count
    assert not cupy.allclose(first, second)


@pytest.mark.gpu
def test_out_and_a_graph():
    """A function's results go into `out`, and are replayed with new numbers."""
    import cupy

    x = cupy.random.default_rng(0).standard_normal((1, 2, 70, 32), "float32")
    w = cupy.asarray([0.1, 0.2], "float32")
    given = {
        "score": lambda s, h, i, j, *, w: s - w[h] * abs(i - j),
        "score_arrays": {"w": w},
        "mask": lambda i, j: i - j < 40,
    }
    out = cupy.empty_like(x)
    expected = cupyflash.attention(x, x, x, **given)
    assert cupyflash.attention(x, x, x, out=out, **given) is out
    assert (out == expected).all()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cupyflash.attention(x, x, x, out=out, **given)
        graph = stream.end_capture()
        w[:] = 0
        graph.launch(stream)
    stream.synchronize()
    expected = cupyflash.attention(x, x, x, mask=given["mask"])  # another kernel
    assert cupy.allclose(out, expected, rtol=0, atol=4e-6)


@pytest.mark.gpu
def test_arrays_of_functions_are_checked():
    import cupy

    x = cupy.zeros((1, 2, 8, 16), "float32")

    def score(s, i, *, w):
        return s + w[i]

    with pytest.raises(TypeError, match="pass both as CuPy arrays"):
        cupyflash.attention(x, x, x, score=score, score_arrays={"w": np.ones(8)})
    with pytest.raises(ValueError, match="no element to read"):
        cupyflash.attention(x, x, x, score=score, score_arrays={"w": cupy.ones(0)})
    out = cupy.empty_like(x)
    w = out.reshape(-1)[:8]
    with pytest.raises(ValueError, match=r"out .* score_arrays\['w'\]"):
        cupyflash.attention(x, x, x, score=score, score_arrays={"w": w}, out=out)


@pytest.mark.gpu
def test_explain_shows_the_functions():
    import cupy

    x = cupy.zeros((1, 2, 8, 16), "float32")
    text = repr(
        cupyflash.explain("attention", x, x, x, score=lambda s, i, j: s - abs(i - j))
    )
    assert "score:" in text
    assert "SCORE_FUNCTION=1" in text


# --- recognition ---------------------------------------------------------------------

GAIN = 0.5


def gained(x):
    return x * GAIN


def like_a_cupy_array(x, device_id=0):
    """What the host asks of a CuPy array."""
    pointer = SimpleNamespace(ptr=x.ctypes.data, device_id=device_id)
    facts = {
        n: getattr(x, n) for n in ("dtype", "shape", "strides", "itemsize", "size")
    }
    return SimpleNamespace(data=pointer, ndim=x.ndim, kept=x, **facts)


def told_anew(q, score=None, score_arrays=None, mask=None, mask_arrays=None, softcap=0):
    """What `of_call` says, which is what it says when it knows no function."""
    call = q, score, score_arrays, mask, mask_arrays, softcap
    found = gpu_functions.of_call(*call)
    assert gpu_functions.of_call(*call) == found
    gpu_functions._known.clear()
    assert gpu_functions.of_call(*call) == found
    return found


def test_a_function_known_from_the_last_call_is_what_it_is_now(monkeypatch):
    q = like_a_cupy_array(np.zeros((2, 8, 4), np.float16))
    double = like_a_cupy_array(np.zeros((2, 8, 4)))
    slope = 0.25

    def score(s, i, j, alpha=2.0, *, beta=3.0, gamma=0.5):
        return s - slope * gained(abs(i - j)) * alpha + beta * s**2 - gamma

    seen = set()

    def is_new(*call, **options):
        found = told_anew(*call, **options)
        assert found not in seen
        seen.add(found)

    is_new(q, score)
    is_new(double, score)
    for slope in (0.5, 0.0, -0.0, 2):  # noqa: B007
        is_new(q, score)
    monkeypatch.setitem(globals(), "GAIN", 0.75)
    is_new(q, score)
    score.__defaults__ = (4.0,)
    is_new(q, score)
    score.__kwdefaults__ = {"gamma": 3.0, "beta": 0.5}
    is_new(q, score)
    score.__kwdefaults__ = {"beta": 3.0, "gamma": 0.25}
    is_new(q, score)
    monkeypatch.setitem(globals(), "gained", lambda x: x + GAIN)
    is_new(q, score)
    score.__code__ = (lambda s, i, j, alpha=0, *, beta=0, gamma=0: s * slope).__code__
    is_new(q, score)

    def capped(s):
        return 2.0 * np.tanh(s / 2.0)

    is_new(q, capped)  # an option
    is_new(q, capped, softcap=3.0)  # beside which it is none
    is_new(q, None, None, lambda i, j: i - j < slope)
    slope = 3
    is_new(q, None, None, lambda i, j: i - j < slope)


def test_the_arrays_of_a_function_are_those_of_the_call():
    q = like_a_cupy_array(np.zeros((2, 8, 4), np.float16))

    def score(s, h, *, w, u):
        return s * w[h] + u[h]

    w = np.zeros((4, 4), np.float32)
    u = like_a_cupy_array(w[0])
    found = [
        told_anew(q, score, {"w": like_a_cupy_array(x), "u": u})
        for x in (w[0], w[1], w[:, 0], w[0, :3], w[0].view(np.int32))
    ]
    other = like_a_cupy_array(w[1])
    found += [told_anew(q, score, {"w": other, "u": u})]
    found += [told_anew(q, score, {"w": u, "u": other})]
    assert len(set(found)) == len(found) - 1  # the same arrays are there twice
    with pytest.raises(ValueError):  # noqa: PT011
        gpu_functions.of_call(
            q, score, {"w": like_a_cupy_array(w[0], device_id=1), "u": u}, None, None, 0
        )
    for wrong in ({"w": u}, {"w": u, "u": u, "v": u}, {"w": u, "x": u}, None):
        with pytest.raises(TypeError):
            gpu_functions.of_call(q, score, wrong, None, None, 0)


def test_known_functions_do_not_pile_up():
    q = like_a_cupy_array(np.zeros((2, 8, 4), np.float16))
    for k in range(300):
        score = expressions_gpu.expressions.function(f"s * {k + 2}", "s")
        gpu_functions.of_call(q, score, None, None, None, 0)
    assert len(gpu_functions._known) <= 256


# --- functions that an option says ---------------------------------------------------


def add_of_pairs(s, b, h, i, j, *, t):
    return t[b, h, i, j] + s


def read_of_heads(h, i, j, *, seen):
    return seen[h, i, j]


def read_of_pairs(i, j, *, seen):
    return seen[i, j]


RNG = np.random.default_rng(5)
SEEN = RNG.random((4, 43, 42)) > 0.3
BIAS = RNG.standard_normal((2, 4, 43, 42)).astype("float32")
ALIBI = {"score": scores.alibi, "score_arrays": {"slopes": SLOPES}}
SAID = {
    "alibi": (ALIBI, {"score": "alibi_slopes"}),
    "alibi and a window": (
        {**ALIBI, "mask": scores.sliding_window(9)},
        {"score": "alibi_slopes", "mask": "window"},
    ),
    "slopes of every second element": (
        {**ALIBI, "score_arrays": {"slopes": np.linspace(0, 1, 9, dtype="f4")[::2]}},
        {"score": "alibi_slopes"},
    ),
    "alibi and documents": (
        {
            **ALIBI,
            "mask": scores.prefix_lm,
            "mask_arrays": {"prefix": np.array([3, 20])},
        },
        {},
    ),
    "a mask": (
        {"mask": read_of_pairs, "mask_arrays": {"seen": SEEN[0]}},
        {"mask": "mask"},
    ),
    "a mask of heads": (
        {"mask": read_of_heads, "mask_arrays": {"seen": SEEN}, "query_offset": 3},
        {"mask": "mask"},
    ),
    "a mask that is too short": (
        {
            "mask": read_of_pairs,
            "mask_arrays": {"seen": SEEN[0, :30]},
            "query_offset": 13,
        },
        {},
    ),
    "bias and mask": (
        {
            "score": add_of_pairs,
            "score_arrays": {"t": BIAS},
            "mask": read_of_heads,
            "mask_arrays": {"seen": SEEN},
        },
        {"score": "bias", "mask": "mask"},
    ),
    "a bias beside a bias": (
        {
            "score": add_of_pairs,
            "score_arrays": {"t": BIAS},
            "bias": BIAS[0, :, :24, :40],
        },
        {},
    ),
}


def moved(cupy, x):
    """Options with their arrays on a GPU."""
    if isinstance(x, dict):
        return {key: moved(cupy, value) for key, value in x.items()}
    return cupy.asarray(x) if isinstance(x, np.ndarray) else x


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAID)
def test_a_function_that_an_option_says(cupy, rng, name):
    options, became = SAID[name]

    q, k, v, dout = (
        rng.standard_normal((2, heads, n, 32)).astype("float32")
        for heads, n in ((4, 24), (2, 40), (2, 40), (4, 24))
    )
    given = [cupy.asarray(x) for x in (q, k, v)]
    told = cupyflash.explain("attention", *given, **moved(cupy, options)).details
    found = {key[:-3]: text for key, text in told.items() if key.endswith("_is")}
    assert found.keys() == became.keys()
    assert all(f"option {became[of]}=" in text for of, text in found.items())
    wide = [x.astype("f8") for x in (q, k, v)]
    for _ in range(2):  # other arrays in the second call, which has the same plan
        on_gpu = moved(cupy, options)
        out, lse = cupyflash.attention(*given, return_lse=True, **on_gpu)
        got = cupyflash.attention_vjp(cupy.asarray(dout), *given, out, lse, **on_gpu)
        if "too short" in name:
            with pytest.raises(IndexError):
                cupyflash.attention(*wide, **options)
            return
        wanted, wanted_lse = cupyflash.attention(*wide, return_lse=True, **options)
        assert abs(out.get() - wanted).max() < 2e-5
        gradients = cupyflash.attention_vjp(
            dout.astype("f8"), *wide, wanted, wanted_lse, **options
        )
        for ours, theirs in zip(got[:3], gradients[:3], strict=True):
            assert abs(ours.get() - theirs).max() < 2e-4
        options = {**options}
        for of in ("score_arrays", "mask_arrays"):
            if of in options:
                options[of] = {n: x[::-1].copy() for n, x in options[of].items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["alibi", "bias and mask"])
def test_arrays_of_a_function_that_an_option_says_have_gradients(cupy, rng, name):
    options, _ = SAID[name]
    q, k, v, dout = (
        rng.standard_normal((2, 4, n, 32)).astype("float32") for n in (24, 40, 40, 24)
    )
    (of,) = options["score_arrays"]

    def gradient(xp, dtype):
        given = [xp.asarray(x, dtype=dtype) for x in (dout, q, k, v)]
        named = {
            key: {n: xp.asarray(x) for n, x in value.items()}
            for key, value in options.items()
            if key.endswith("arrays")
        }
        call = {**options, **named}
        out, lse = cupyflash.attention(*given[1:], return_lse=True, **call)
        found = cupyflash.attention_vjp(*given, out, lse, need_dscore=of, **call)
        return found.dscore[of]

    wanted = gradient(np, "float64")
    got = gradient(cupy, "float32").get()
    assert got.shape == wanted.shape
    assert abs(got - wanted).max() < 2e-4


# --- functions of i - j ---------------------------------------------------------------

TABLE = RNG.standard_normal((32, 4)).astype("float32")
# Not a power of 2, where the logarithms of float32 and float64 could be cut apart.
T5 = {"score": scores.t5_bias(32, 100), "score_arrays": {"table": TABLE}}
OF_DIAGONALS = {
    "T5": T5,
    "T5 and causal": {
        "score": scores.t5_bias(32, 100, bidirectional=False),
        "score_arrays": {"table": TABLE},
        "causal": True,
        "query_offset": 5,
    },
    "T5 and a mask": {
        **T5,
        "mask": scores.prefix_lm,
        "mask_arrays": {"prefix": np.array([3, 20])},
    },
    "T5 and lengths": {**T5, "query_offset": 1, "key_lengths": np.array([100, 170])},
    "one for all heads": {
        "score": lambda s, i, j: s - np.log1p(abs(i - j)),
        "query_offset": -7,
    },
}


@pytest.mark.parametrize(
    ("function", "variables"),
    [
        (lambda s, i, j: s - np.log1p(abs(i - j)), {"d"}),
        (lambda s, h, i, j: np.sqrt(abs(j - i) * h) + s, {"d", "h"}),
        (lambda s, i, j: s + (i - j) // 7, {"d"}),
        (lambda s, i, j: s - 0.5 * abs(i - j), None),  # costs less than to read it
        (lambda s, i, j: s * np.exp(i - j), None),
        (lambda s, i, j: s + np.exp(i - j) * s, None),
        (lambda s, b, i, j: s + np.exp(b * (i - j)), None),
        (lambda s, i, j: s + np.exp(i - j) * j, None),
        (lambda s, i, j: s + np.exp(i + j), None),
        (lambda s, i: s + np.exp(i), None),
    ],
)
def test_what_is_added_on_a_diagonal(function, variables):
    expression, _ = bound_functions.language().lookup(function, {})
    assert expression.sum_of_diagonals == variables


def test_a_table_of_diagonals_needs_a_known_offset_and_enough_scores():
    from cupyflash._attention.gpu import diagonals

    def has_table(**options):
        return diagonals.tabled(*asked(**{**T5, **options})).table is not None

    assert has_table()
    assert has_table(query_offset=3)
    assert not has_table(query_offset=np.array([0, 3]))
    assert not has_table(method="safe")
    assert not has_table(shape=(2, 4, 100, 64))
    assert not has_table(score=scores.alibi, score_arrays={"slopes": SLOPES})


def test_a_table_of_diagonals_compiles_without_spills():
    from cupyflash._attention.gpu import diagonals

    if why := nvrtc.unusable():
        pytest.skip(why)
    row, device = row_named("hopper"), device_of_arch("sm_90a")
    for options in ({}, {"causal": True}, {"window": 700}):
        given, operands = asked("float16", (2, 4, 1024, 128), **T5, **options)
        problem = diagonals.tabled(given, operands)
        configs = [*row.configs(problem, 1, device), diagonals.config(given)]
        for config in configs:
            job = Job("attention", row.name, True, "sm_90a", config.variant)
            found, _ = nvrtc.find(job)
            assert not found.error, found.error
            assert not found.spill_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_DIAGONALS)
def test_a_function_of_diagonals(cupy, rng, name):
    options = OF_DIAGONALS[name]

    q, k, v, dout = (
        rng.standard_normal((2, heads, n, 32)).astype("float32")
        for heads, n in ((4, 150), (2, 170), (2, 170), (4, 150))
    )
    given = [cupy.asarray(x) for x in (q, k, v)]
    told = cupyflash.explain("attention", *given, **moved(cupy, options)).details
    assert "diagonals.cu" in told["launches"][0]["source"]
    wide = [x.astype("f8") for x in (q, k, v)]
    for offset in (options.get("query_offset"), 11):  # where the table starts
        options = {**options, "query_offset": offset}
        on_gpu = moved(cupy, options)
        out, lse = cupyflash.attention(*given, return_lse=True, **on_gpu)
        got = cupyflash.attention_vjp(cupy.asarray(dout), *given, out, lse, **on_gpu)
        wanted, wanted_lse = cupyflash.attention(*wide, return_lse=True, **options)
        assert abs(out.get() - wanted).max() < 2e-5
        gradients = cupyflash.attention_vjp(
            dout.astype("f8"), *wide, wanted, wanted_lse, **options
        )
        for ours, theirs in zip(got[:3], gradients[:3], strict=True):
            assert abs(ours.get() - theirs).max() < 2e-4

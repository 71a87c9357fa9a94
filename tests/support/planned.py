"""What a problem of tests/support/fuzz.py would launch, found without a GPU.

Arrays of CuPy are made up at addresses that are never read, in the memory that the
problem asks for; the package's own plans then choose rows, tiles and launches.
"""

import contextlib
import dataclasses
import hashlib
import math

import fuzz
import numpy as np
import placing
from accuracy import dtype_of

import cupyflash
from cupyflash import _explain
from cupyflash._cuda import device as cuda_device
from cupyflash._cuda import kernel


@dataclasses.dataclass(frozen=True)
class Planned:
    """Rows that are the choice for the calls of a problem, and what they launch."""

    rows: tuple[str, ...]  # "attention/hopper", of each call
    variants: tuple[kernel.Variant, ...]
    num_splits: int = 1  # of the keys
    keys_per_split: int = 0

    @property
    def digests(self):
        """A short name of each variant."""
        return tuple(digest_of(variant) for variant in self.variants)


def digest_of(variant):
    """A short name of a variant: of its source, its entry and its defines."""
    text = repr((variant.source, variant.entry, sorted(variant.defines), variant.arch))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextlib.contextmanager
def device(card=None):
    """Let the package plan for a card, by default a made-up one of sm_90a."""
    import pytest

    from cupyflash._cuda import runtime, tensor_map

    card = card or cuda_device.device_of_arch("sm_90a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "device", lambda device_id: card)
        patch.setattr(tensor_map, "_driver", lambda: None)
        yield card


class _Memory:
    """Addresses one after another, with nothing behind them."""

    def __init__(self):
        import cupy

        self._cuda = cupy.cuda
        self._end = 1 << 40

    def __call__(self, shape, dtype):
        import cupy

        size = math.prod(shape) * dtype.itemsize
        memory = self._cuda.UnownedMemory(self._end, size + 512, None, 0)
        self._end += size // 512 * 512 + 1024
        return cupy.ndarray(shape, dtype, self._cuda.MemoryPointer(memory, 0))


def _made_up(memory, shape, dtype, form):
    """An array that lies as placing.place() would lay it."""
    dtype = np.dtype(dtype)
    return placing._shaped(lambda s: memory(s, dtype), tuple(shape), form)


def plan(problem, row=None):
    """What the calls of a problem launch; NotImplementedError if no row takes it.

    `row` is the name of the one row that the last of them may choose.
    """
    import cupy

    memory = _Memory()
    arrays = {
        name: _made_up(memory, x.shape, x.dtype, problem.forms.get(name, "plain"))
        for name, x in problem.arrays.items()
    }
    for name in problem.notes.get("expanded", ()):
        if name in arrays:
            arrays[name] = cupy.broadcast_to(arrays[name], problem.notes["scores"])
    of_operation = {
        "attention": _plan_attention,
        "attention_vjp": _plan_attention_vjp,
        "softmax": _plan_softmax,
        "merge": _plan_merge,
    }[problem.operation]
    return of_operation(problem, memory, arrays, row)


def _checked(function, *args, **kwargs):
    """(problem, operands) of a call, by the checks of the package."""
    import inspect

    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return _explain._CHECKS[function][0](*call.arguments.values())


@contextlib.contextmanager
def _only(operation, row):
    """Let an operation have one row; all of them without a name."""
    if row is None:
        yield
        return
    import pytest
    import rows

    with pytest.MonkeyPatch.context() as patch:
        rows.force(patch, operation, row)
        yield


def _plan_attention(problem, memory, arrays, row=None, **more):
    from cupyflash._attention.gpu import forward as attention_gpu

    if problem.out_form:
        shape, _ = fuzz.attention_shapes(problem)
        dtype = problem.arrays["q"].dtype
        arrays = arrays | {"out": _made_up(memory, shape, dtype, problem.out_form)}
    with _only("attention", row):
        asked = _checked(cupyflash.attention, **arrays, **problem.options, **more)
        made = attention_gpu.make_plan(*asked)
        if not made.launches:
            return Planned(("attention/empty",), ())
        name = attention_gpu._select(*asked, _device())[0].name
    keys = problem.notes["scores"][-1]
    return Planned(
        (f"attention/{name}",),
        tuple(launch.variant for launch in made.launches),
        num_splits := getattr(made, "num_splits", 1),  # naive and safe have none
        -(-keys // num_splits),
    )


def _device():
    from cupyflash._cuda import runtime

    return runtime.device(0)


def _plan_attention_vjp(problem, memory, arrays, row=None):
    import fuzz_vjp

    from cupyflash._attention.gpu import backward as attention_vjp_gpu

    kept = fuzz_vjp.FORWARD + fuzz_vjp.GPU_ALONE
    options = {n: x for n, x in problem.options.items() if n in kept}
    inputs = {n: x for n, x in arrays.items() if n not in fuzz_vjp.NOT_FORWARD}
    asked = dataclasses.replace(problem, options=options, out_form=None)
    forward = _plan_attention(asked, memory, inputs, return_lse=True)
    shapes = fuzz.attention_shapes(problem)
    dtype = problem.arrays["q"].dtype
    real = np.float64 if dtype == np.float64 else np.float32
    out, lse = (
        _made_up(memory, shape, of, problem.forms.get(name, "plain"))
        for name, shape, of in zip(("out", "lse"), shapes, (dtype, real), strict=True)
    )
    given = dict(arrays)
    first = [given.pop(name) for name in ("dout", "q", "k", "v")]
    with _only("attention_vjp", row):
        asked = _checked(
            cupyflash.attention_vjp, *first, out, lse, **given, **problem.options
        )
        made = attention_vjp_gpu.make_plan(*asked)
        if not made.launches:
            return Planned((*forward.rows, "attention_vjp/empty"), forward.variants)
        name = attention_vjp_gpu._select(*asked, _device())[0].name
    return Planned(
        (*forward.rows, f"attention_vjp/{name}"),
        (*forward.variants, *(launch.variant for launch in made.launches)),
        forward.num_splits,
        forward.keys_per_split,
    )


def _plan_softmax(problem, memory, arrays, row=None):
    from cupyflash._softmax.gpu import plan as softmax_plan

    function = getattr(cupyflash, problem.function)
    names = ("x", "dy", "where", "b")
    given = {name: arrays[name] for name in names if name in arrays}
    first = [given.pop(name) for name in ("x", "dy") if name in given]
    if problem.out_form:
        shape = problem.arrays["x"].shape
        if problem.function == "logsumexp":
            shape = _reduced(shape, problem.options)
        dtype = dtype_of(fuzz._result_dtype(problem))
        given["out"] = _made_up(memory, shape, dtype, problem.out_form)
    asked, operands = _checked(function, *first, **given, **problem.options)
    inputs = softmax_plan.inputs_of(asked, operands)
    with _only("softmax", row):
        made, chosen, _ = softmax_plan.make_plan(asked, inputs, operands.out)
    if chosen is None:
        return Planned(("softmax/empty",), ())
    variants = tuple(launch.variant for launch in made.launches)
    return Planned((f"softmax/{chosen.name}",), variants)


def _reduced(shape, options):
    """The shape of logsumexp."""
    axes = fuzz.oracle._axes(options["axis"], len(shape))
    if options["keepdims"]:
        return tuple(1 if a in axes else n for a, n in enumerate(shape))
    return tuple(n for a, n in enumerate(shape) if a not in axes)


def _plan_merge(problem, memory, arrays, row=None):
    from cupyflash._attention.gpu import combine

    given = dict(arrays)
    if problem.out_form:
        outs, axis = problem.arrays["outs"], problem.options["axis"]
        shape = list(outs.shape)
        del shape[axis % (outs.ndim - 1)]
        given["out"] = _made_up(memory, shape, outs.dtype, problem.out_form)
    asked, operands = _checked(
        cupyflash.merge_attention_states, **given, **problem.options
    )
    if not math.prod(asked.shape):
        return Planned(("attention/empty",), ())
    made = combine._plan_of(asked, operands)
    return Planned(
        ("attention/merge",), tuple(launch.variant for launch in made.launches)
    )

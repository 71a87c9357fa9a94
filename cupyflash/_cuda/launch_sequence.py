"""All launches of a call, as data: what runs, and where each argument comes from.

Arguments are named. A name is a pointer or a number of the call, an array that it
returns, or a part of the memory that it allocates for itself; anything else is passed
unchanged. So a kernel spec lists its launches, and one class runs every call.
"""

import functools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import cupy
import numpy as np

from cupyflash._core import strides
from cupyflash._cuda import graphs, runtime
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.launch import NULL, Launch


class Result(NamedTuple):
    """An array that a call returns, in new memory unless the caller has one."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[int, ...] | None = None  # the axes of `shape` that the array has
    fill: float | None = None  # value of elements that no launch writes

    @property
    def nbytes(self) -> int:
        return num_bytes(self.shape, self.dtype)

    def maker(self) -> Callable[[], Any]:
        """The function that makes it, as fast as possible."""
        new = _new(self.shape, self.dtype)
        return new if self.axes is None else lambda: new().transpose(self.axes)


@functools.cache
def _constructor():
    """CuPy's constructor of arrays without checks of its arguments; None if it changed.

    (what makes an object, what gives it shape, dtype, memory, strides and order.) CuPy
    documents neither, so they are tried once.
    """
    array = cupy.ndarray
    try:
        allocate, initialize = array.__base__.__new__, array._init
        x = allocate(array)
        initialize(x, (2, 3), "f", NULL, None, None)
        is_right = type(x) is array and x.flags.c_contiguous and x.strides == (12, 4)
        return (allocate, initialize) if is_right and x.dtype == "f4" else None
    except (AttributeError, TypeError):
        return None


def _new(shape, dtype):
    """Makes an array in half the time of `cupy.ndarray(shape, dtype)`."""
    array = cupy.ndarray
    if (found := _constructor()) is None:
        return functools.partial(array, shape, dtype)
    allocate, initialize = found
    # CuPy finds a dtype faster by its letter, except those of ml_dtypes.
    letter = dtype.char if dtype.isbuiltin == 1 else dtype

    def new():
        x = allocate(array)
        initialize(x, shape, letter, None, None, None)
        return x

    return new


class Argument(Protocol):
    """Determined at each call, from the arguments before it."""

    def bind(self, place: Callable[[str], int], device_id: int) -> Callable[..., Any]:
        """A function of the values of a call; `place` gives their order."""


class Counter(NamedTuple):
    """A row of zeros for the kernels of the current stream to count in."""

    numbers: int = 2  # of 4 bytes

    def bind(self, place, device_id):
        """See Argument."""
        counters = graphs.counters(device_id, self.numbers)
        return lambda values: counters.of_current_stream()


class PointersAndBytes(NamedTuple):
    """A struct that starts with pointers; the rest of it is the same in each call."""

    names: tuple[str, ...]  # "" is a null pointer
    rest: bytes

    def bind(self, place, device_id):
        """See Argument."""
        pack = struct.Struct(f"{len(self.names)}Q").pack
        places = [place(name) if name else None for name in self.names]

        def packed(values):
            pointers = [0 if n is None else values[n] for n in places]
            return pack(*pointers) + self.rest

        return packed


class At(NamedTuple):
    """An offset in the memory between kernels."""

    name: str
    offset: int  # in bytes


# A kernel, and its arguments.
Step = tuple[LaunchConfig, tuple[Any, ...]]


class Steps(NamedTuple):
    """The launches of a kernel spec in order, and the memory that they share."""

    launches: list[Step]
    scratch: Mapping[str, int] = MappingProxyType({})  # bytes by name
    cleared: int = 0  # bytes at its start that are zeroed first
    zeros: tuple[str, ...] = ()  # results that are zeroed first


# Alignment of sections of the memory between kernels: kernels read 16-byte vectors, and
# TMA writes 128-byte lines.
SECTION_ALIGNMENT = 256


def sections(*sizes: int) -> tuple[tuple[int, ...], int]:
    """(offset of each, total bytes) for arrays that share one allocation.

    `sizes` are in bytes, and need not be multiples of anything.
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
    return tuple(starts), end


def num_bytes(shape: Iterable[int], dtype: Any) -> int:
    """Bytes of a contiguous array."""
    size = np.dtype(dtype).itemsize
    for n in shape:
        size *= n
    return size


def fill(x, value):
    """Fill an array; a new one of zeros without a kernel."""
    if value == 0:
        x.data.memset_async(0, x.nbytes)
    else:
        x.fill(value)


class LaunchSequence:
    """All of a call but its arrays: results, memory between kernels, and launches.

    Parameters
    ----------
    device_id : int
        Where it runs.
    inputs : sequence of str
        Names of the pointers and numbers that a call is made with, in their order.
    results : dict of str to Result or None
        What it returns, in this order; None for what is not asked for, but the first.
    steps : Steps
        The launches. Names are looked up in `inputs`, `results` and `steps.scratch`.
    arrays : sequence, optional
        The arrays of the call that is planned for, in the order of `inputs`; where one
        is None, all calls have none.
    out : array, optional
        The one that the first result is written to.
    in_place : bool
        Whether `out` may be an input itself.
    """

    def __init__(
        self, device_id: int, inputs: Sequence[str],
        results: dict[str, Result | None], steps: Steps, arrays: Sequence[Any] = (),
        out: Any = None, in_place: bool = False,
    ):  # fmt: skip
        self.device_id = device_id
        self.results = results
        self.steps = steps
        variants = [config.variant for config, _ in steps.launches]
        self.launches = tuple(
            Launch(config, device_id, variants) for config, _ in steps.launches
        )
        names = [*inputs, *results, *steps.scratch]
        places: dict[Any, int] = {name: n for n, name in enumerate(names)}
        assert len(places) == len(names), "a name stands for two arrays"
        # Values after those of the inputs and the first result.
        self._template: list[Any] = [0] * (len(names) - len(inputs) - 1)
        self._found: list[tuple[int, Callable[..., Any]]] = []

        starts, self.scratch_bytes = sections(*steps.scratch.values())
        start_of = dict(zip(steps.scratch, starts, strict=True))
        self._sections = [(places[name], start) for name, start in start_of.items()]

        def place(x):
            if x not in places:
                if isinstance(x, str):
                    raise KeyError(f"{x!r} is not one of {', '.join(names)}")
                places[x] = len(inputs) + 1 + len(self._template)
                self._template.append(x)
                if isinstance(x, At):
                    self._sections.append((places[x], start_of[x.name] + x.offset))
                elif hasattr(x, "bind"):
                    self._found.append((places[x], x.bind(place, device_id)))
            return places[x]

        arguments = [[place(x) for x in names] for _, names in steps.launches]
        makers: list[Any] = [None if x is None else x.maker() for x in results.values()]
        self._new_out, *others = makers
        self._absent: list[Any] = [None] * len(others)
        # (which result, its position, what makes it)
        self._others = [(n, len(inputs) + n, new)
                        for n, new in enumerate(others, 1) if new]  # fmt: skip
        self._fills = [
            (n, 0 if name in steps.zeros else x.fill)
            for n, (name, x) in enumerate(results.items())
            if x is not None and (name in steps.zeros or x.fill is not None)
        ]
        fixed = {n: 0 for n, x in enumerate(arrays) if x is None}
        of_call = {n for n, _ in (*self._sections, *self._found)}
        of_call |= {n for _, n, _ in self._others}
        fixed |= {n: x for n, x in enumerate(self._template, len(inputs) + 1)
                  if n not in of_call}  # fmt: skip
        self._calls = [
            launch.picking(places, fixed)
            for launch, places in zip(self.launches, arguments, strict=True)
        ]
        makes_more = self._others or steps.scratch or self._fills
        if len(self._calls) == 1 and not makes_more:
            self.run = self._one_launch(*self._calls)  # type: ignore[method-assign]
        self._too_near = _too_near(arrays, out, in_place)
        # Arrays with pointers this far apart cannot overlap.
        self.reach = max(
            (max(-low, high) for _, low, high, _ in self._too_near), default=0
        )

    def may_overlap(self, out: int, pointers: Sequence[int]) -> bool:
        """Whether the span of `out` overlaps an input's; the checks decide then."""
        for n, low, high, may_be_same in self._too_near:
            distance = pointers[n] - out
            if low < distance < high and (distance or not may_be_same):
                return True
        return False

    def __call__(self, pointers: Sequence[Any], out: Any = None) -> list[Any]:
        """The same as `run`, which Python finds faster."""
        return self.run(pointers, out)

    def run(self, pointers: Sequence[Any], out: Any = None) -> list[Any]:
        """Launch on the current stream; `pointers` in the order of `inputs`."""
        if runtime.current_device() != self.device_id:
            with cupy.cuda.Device(self.device_id):
                return self.run(pointers, out)
        if out is None:
            out = self._new_out()
        results = [out, *self._absent]
        values = [*pointers, out.data.ptr, *self._template]
        # Memory between kernels is freed after the launches: earlier, another thread on
        # the same stream could get it.
        scratch = self._make_more(values, results)
        for place, find in self._found:
            values[place] = find(values)
        for enqueue in self._calls:
            enqueue(values)
        del scratch
        return results

    def _one_launch(self, enqueue):
        """`run` of one launch that makes no array but its result: most calls."""
        device_id, found, absent = self.device_id, self._found, self._absent
        new_out, template = self._new_out, self._template

        def run(pointers, out=None):
            if runtime.current_device() != device_id:
                with cupy.cuda.Device(device_id):
                    return run(pointers, out)
            if out is None:
                out = new_out()
            values = [*pointers, out.data.ptr, *template]
            for place, find in found:
                values[place] = find(values)
            enqueue(values)
            return [out, *absent]

        return run

    def _make_more(self, values, results):
        """Add the other results and the memory between kernels."""
        memory = None
        for n, place, new in self._others:
            x = results[n] = new()
            values[place] = x.data.ptr
        if self.scratch_bytes:
            memory = cupy.cuda.alloc(self.scratch_bytes)
            graphs.keep_if_capturing(memory)
            first = memory.ptr
            for place, start in self._sections:
                values[place] = first + start
            if self.steps.cleared:
                memory.memset_async(0, self.steps.cleared)
        for n, value in self._fills:
            fill(results[n], value)
        return memory


def _too_near(arrays, out, in_place):
    """The distances between the pointers of `out` and an input at which they overlap.

    (position of the input, above, below, whether the two may be the same array)
    """
    if out is None:
        return []
    found = []
    out_first, out_end = strides.address_range(out)
    for n, x in enumerate(arrays):
        if x is not None:
            first, end = strides.address_range(x)
            is_same = in_place and _layout_of(x) == _layout_of(out)
            found.append((n, out_first - end, out_end - first, is_same))
    return found


def _layout_of(x):
    return x.shape, x.strides, x.dtype

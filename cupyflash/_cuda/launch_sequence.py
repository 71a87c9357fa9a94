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
from cupyflash._cuda import graphs, launch, runtime
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
        """The function that makes it."""
        new = functools.partial(cupy.ndarray, self.shape, self.dtype)
        return new if self.axes is None else lambda: new().transpose(self.axes)

    def making(self, name: str, n: int, known: dict[str, Any]) -> list[str]:
        """Lines that make it, in half the time; what they refer to goes to `known`."""
        if self.axes is not None or (found := _constructor()) is None:
            known[f"new{n}"] = self.maker()
            return [f"{name} = new{n}()"]
        known["allocate"], known["initialize"] = found
        # CuPy finds a dtype faster by its letter, except those of ml_dtypes.
        letter = self.dtype.char if self.dtype.isbuiltin == 1 else self.dtype
        known |= {"ndarray": cupy.ndarray, f"shape{n}": self.shape, f"dtype{n}": letter}
        return [
            f"{name} = allocate(ndarray)",
            f"initialize({name}, shape{n}, dtype{n}, None, None, None)",
        ]


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


class Argument(Protocol):
    """Determined at each call, from the arguments before it."""

    @property
    def reads(self) -> Sequence[str]:
        """The names of these arguments."""

    def bind(self, device_id: int) -> Callable[..., Any]:
        """A function of their values."""


class Counter(NamedTuple):
    """A row of zeros for the kernels of the current stream to count in."""

    numbers: int = 2  # of 4 bytes
    reads: tuple[str, ...] = ()

    def bind(self, device_id):
        """See Argument."""
        return graphs.counters(device_id, self.numbers).of_current_stream


class PointersAndBytes(NamedTuple):
    """A struct that starts with pointers; the rest of it is the same in each call."""

    names: tuple[str, ...]  # "" is a null pointer
    rest: bytes

    @property
    def reads(self) -> tuple[str, ...]:
        """See Argument."""
        return tuple(filter(None, self.names))

    def bind(self, device_id):
        """See Argument."""
        pack = struct.Struct("".join("Q" if name else "8x" for name in self.names)).pack
        return lambda *pointers: pack(*pointers) + self.rest


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
        starts, self.scratch_bytes = sections(*steps.scratch.values())
        start_of = dict(zip(steps.scratch, starts, strict=True))
        # By place: offsets in the memory between kernels, functions and what they read,
        # and values that are the same in each call.
        self._sections = {places[name]: start for name, start in start_of.items()}
        self._found: dict[int, tuple[Callable[..., Any], list[int]]] = {}
        self._fixed = {n: 0 for n, x in enumerate(arrays) if x is None}
        self._fixed |= {places[name]: 0 for name, x in results.items() if x is None}

        def place(x):
            if x not in places:
                if isinstance(x, str):
                    raise KeyError(f"{x!r} is not one of {', '.join(names)}")
                reads = [place(name) for name in getattr(x, "reads", ())]
                n = places[x] = len(places)
                if isinstance(x, At):
                    self._sections[n] = start_of[x.name] + x.offset
                elif hasattr(x, "bind"):
                    self._found[n] = x.bind(device_id), reads
                else:
                    self._fixed[n] = x
            return places[x]

        self._arguments = [[place(x) for x in names] for _, names in steps.launches]
        if not self.scratch_bytes:
            self._fixed |= dict.fromkeys(self._sections, 0)
        self._num_inputs = len(inputs)
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

    def __call__(self, pointers: Sequence[Any], out: Any = None) -> tuple[Any, ...]:
        """The results, by launches on the current stream."""
        return self.run(out, *pointers)

    def run(self, out: Any, *pointers: Any) -> tuple[Any, ...]:
        """The same, which Python finds faster; `pointers` in the order of `inputs`."""
        # The first call compiles. The others are a function made for them.
        run = self._function()
        found = run(out, *pointers)
        starters = [launch.starter() for launch in self.launches]
        if None not in starters:
            run = self._function(starters)
        self.run = run  # type: ignore[method-assign]
        return found

    def _function(self, starters=None):
        """A call as a function whose text has a line for each thing to do, and no loop.

        With `starters` it writes all arguments at once and calls these; else it calls
        `Launch.enqueue`.
        """
        # An absent array is null, whatever the call says.
        inputs = _listed(range(self._num_inputs), self._fixed)
        known: dict[str, Any] = {
            "device_id": self.device_id,
            "Device": cupy.cuda.Device,
            "current_device": runtime.current_device,
        }
        lines = [
            "if current_device() != device_id:",
            "    with Device(device_id):",
            f"        return run(out, {inputs})",
        ]
        results = []
        for n, (name, result) in enumerate(self.results.items()):
            results.append("None" if result is None else f"r{n}" if n else "out")
            if result is None:
                continue
            making = result.making(results[n], n, known)
            if n == 0:  # which the caller may give
                making = ["if out is None:", *(f"    {line}" for line in making)]
            lines += making
            lines.append(f"v{self._num_inputs + n} = {results[n]}.data.ptr")
            value = 0 if name in self.steps.zeros else result.fill
            if value is not None:
                known |= {"fill": fill, f"fill{n}": value}
                lines.append(f"fill({results[n]}, fill{n})")
        if self.scratch_bytes:
            # Freed after the launches: earlier, another thread on the same stream could
            # get it.
            known |= {"alloc": cupy.cuda.alloc, "keep": graphs.keep_if_capturing}
            known |= {"size": self.scratch_bytes, "cleared": self.steps.cleared}
            lines += ["scratch = alloc(size)", "keep(scratch)", "start = scratch.ptr"]
            for n, offset in self._sections.items():
                known[f"offset{n}"] = offset
                lines.append(f"v{n} = start + offset{n}")
            if self.steps.cleared:
                lines.append("scratch.memset_async(0, cleared)")
        for n, (find, reads) in self._found.items():
            known[f"find{n}"] = find
            lines.append(f"v{n} = find{n}({_listed(reads)})")
        if starters:
            lines += self._starting(starters, known)
        else:
            known |= {f"v{n}": x for n, x in self._fixed.items()}
            for n, places in enumerate(self._arguments):
                known[f"enqueue{n}"] = self.launches[n].enqueue
                lines.append(f"enqueue{n}({_listed(places)})")
        lines.append(f"return {', '.join(results)},")
        exec(_compiled("\n    ".join((f"def run(out, {inputs}):", *lines))), known)
        return known["run"]

    def _starting(self, starters, known):
        """The lines that write the arguments and start the launches."""
        used = {n for places in self._arguments for n in places}
        varying = sorted(used - self._fixed.keys())
        constant = sorted(used & self._fixed.keys())
        position = {n: at for at, n in enumerate((*varying, *constant))}
        launches = [[position[n] for n in places] for places in self._arguments]
        constants = [self._fixed[n] for n in constant]
        free: list[Any] = []  # that no thread is using
        known |= {
            "current_stream": launch.current_stream,
            "DriverError": launch.DriverError,
            "pop": free.pop,
            "append": free.append,
            "new_memory": lambda *values: launch.argument_memory(
                (*values, *constants), len(values), launches
            ),
        }
        values = _listed(varying)
        addresses = ", ".join(f"a{n}" for n in range(len(launches)))
        lines = [
            "try:",
            "    memory = pop()",
            "except IndexError:",
            f"    memory = new_memory({values})",
            f"write, buffer, first, {addresses} = memory",
            f"write(buffer, first, {values})",
            "stream = current_stream(device_id).ptr",
        ]
        for n, start in enumerate(starters):
            names = [f"start{n}_{at}" for at in range(len(start))]
            known |= dict(zip(names, start, strict=True))
            known[f"again{n}"] = self.launches[n].start_again
            lines += [
                "try:",
                f"    {names[0]}({', '.join((*names[1:], 'stream'))}, a{n}, 0)",
                "except DriverError as error:",
                f"    again{n}(error, stream, a{n})",
            ]
        return [*lines, "append(memory)"]


# Texts differ by how many arrays and launches there are, not by their sizes.
_compiled = functools.lru_cache(maxsize=1024)(
    functools.partial(compile, filename="<a call of cupyflash>", mode="exec")
)


def _listed(places, unused=()):
    """The values of these places, as arguments or parameters."""
    return ", ".join(f"unused{n}" if n in unused else f"v{n}" for n in places)


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

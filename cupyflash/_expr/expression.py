"""What a function computes, and what is derived from it once."""

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyflash._expr import derivatives
from cupyflash._expr.diagonals import by_distance, sum_of_diagonals
from cupyflash._expr.emit_python import python_text
from cupyflash._expr.nodes import Node, order, var


class Expression:
    """What a function computes; its repr is the function as Python.

    Attributes
    ----------
    root : Node
        The result.
    name : str
        Of the function.
    arrays : dict of str to str
        The dtypes of the arrays that it reads, in the order in which it does.
    numbers : tuple of int
        Which of the values closed over are its numbers at run time, in their order.
    key : str
        The same for the same computation, on whatever names, arrays and numbers.
    """

    def __init__(
        self,
        root: Node,
        dtypes: Mapping[str, str],
        name: str = "score",
        number_names: Mapping[int, str] | None = None,
    ):
        self.root, self.name = root, name
        self._dtypes, self.number_names = dtypes, number_names or {}
        nodes = order(root)
        loads = dict.fromkeys(n.value for n in nodes if n.op == "load")
        self.arrays = {array: dtypes[array] for array in loads}
        self.numbers = tuple(dict.fromkeys(n.value for n in nodes if n.op == "param"))
        self.key = self._key(nodes)

    def _key(self, nodes):
        at = {n: place for place, n in enumerate(nodes)}
        arrays, lines = list(self.arrays), []
        for n in nodes:
            value = n.value
            if n.op == "load":
                value = arrays.index(value), self.arrays[value]
            elif n.op == "param":
                value = self.numbers.index(value)
            lines.append(f"{n.op}:{n.dtype}:{value!r}:{[at[a] for a in n.args]}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def is_mask(self) -> bool:
        """Whether the result is a boolean."""
        return self.root.dtype == "bool"

    def of(self, root: Node, name: str) -> "Expression":
        """Another result on the same arrays and numbers."""
        return Expression(root, self._dtypes, name, self.number_names)

    @functools.cached_property
    def derivative(self) -> "Expression":
        """Its derivative by s."""
        root = derivatives.derivative(self.root, var("s"))
        return self.of(root, f"{self.name}_derivative")

    @functools.cached_property
    def option(self) -> Any:
        """The window, or the softcap, that it is; None if it is neither."""
        from cupyflash._expr import recognized

        found = recognized.band if self.is_mask else recognized.softcap
        return found(self.root)

    @functools.cached_property
    def array_option(self) -> Any:
        """The option that does the same with its array; None if there is none."""
        from cupyflash._expr import recognized

        return recognized.array_option(self.root)

    @functools.cached_property
    def sum_of_diagonals(self) -> frozenset[str] | None:
        """For s plus what costs much and depends on i - j and h: see `diagonals`."""
        return None if self.is_mask else sum_of_diagonals(self.root)

    @functools.cached_property
    def packer(self) -> Any:
        """What packs the arguments of its CUDA."""
        from cupyflash._expr.emit_cuda import Packer

        return Packer(self)

    @functools.cached_property
    def reads(self) -> tuple[tuple[str, tuple[Node, ...], Node], ...]:
        """Of each read of floats (array, its index, the derivative of the result)."""
        return tuple(
            (n.value, n.args, derivatives.derivative(self.root, n))
            for n in order(self.root)
            if n.op == "load" and n.dtype == "float"
        )

    @functools.cached_property
    def of_tiles(self) -> tuple[Node, Node, list[tuple[str, list[Node], Node]]]:
        """Result, derivative by s and `reads`, all of them by `by_distance`."""
        roots = [self.root, self.root if self.is_mask else self.derivative.root]
        reads = [] if self.is_mask else self.reads
        for _, index, partial in reads:
            roots += [*index, partial]
        root, slope, *rest = by_distance(roots)
        nodes = iter(rest)
        return (
            root,
            slope,
            [(name, [next(nodes) for _ in at], next(nodes)) for name, at, _ in reads],
        )

    def number_values(self, closed_over: Any) -> list[Any]:
        """The numbers of a call, in their order."""
        return [closed_over[place] for place in self.numbers]

    def __repr__(self) -> str:
        return python_text(self.root, self.name, list(self.arrays), self.number_names)


def dtype_name(array: Any) -> str:
    """Of an array as it is named in a key."""
    return np.dtype(array.dtype).name

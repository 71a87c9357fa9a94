"""Functions that say what an option says, which kernels are faster at.

A mask that is a band of keys round each query is a window; a score that is
``cap * tanh(s / cap)`` is a softcap. A mask that reads an array at ``[i, j]`` is that
array, a score that adds one is a bias, and ``s - slopes[h] * abs(i - j)`` is ALiBi.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from cupyflash._expr.nodes import Node

# Numbers that functions close over are recognised up to here.
_MOST = 1 << 60


class Band:
    """Of a mask ``(i - j <= left) & (j - i <= right)``, however it is written.

    Each bound is (whether it is one to the left, a number, and (place of a number
    closed over, factor) of terms that are added to it).
    """

    def __init__(self, bounds: list[tuple[bool, int, tuple[tuple[int, int], ...]]]):
        self._bounds = bounds

    def of(self, values: Sequence[Any]) -> tuple[int | None, int | None] | None:
        """(left, right) with the numbers of a call; None if one is below 0."""
        found: list[int | None] = [None, None]
        for is_left, bound, terms in self._bounds:
            for place, factor in terms:
                bound += factor * values[place]
            if not 0 <= bound <= _MOST:
                return None
            before = found[not is_left]
            found[not is_left] = bound if before is None else min(before, bound)
        return found[0], found[1]


def band(root: Node) -> Band | None:
    """The band that a mask is, or None."""
    bounds: list[Any] = []
    return Band(bounds) if _find_bounds(root, bounds) else None


def _find_bounds(n, bounds):
    if n.op == "and" and n.dtype == "bool":
        return all(_find_bounds(a, bounds) for a in n.args)
    if n.op not in ("lt", "le") or any(a.dtype != "int" for a in n.args):
        return False
    low, high = n.args
    return all(
        _find_bound(_sum(signed, factor, _sum(high, -1, {})), n.op == "lt", bounds)
        for signed, factor in _sides(low)
    )


def _sides(low):
    """What is to stay below: x, or for abs(x) both x and -x."""
    if low.op == "abs":
        return (low.args[0], 1), (low.args[0], -1)
    return ((low, 1),)


def _find_bound(terms, strict, bounds):
    """Whether ``sum of terms <= 0``, or ``< 0``, bounds i - j or j - i."""
    if terms is None:
        return False
    i, j = terms.pop("i", 0), terms.pop("j", 0)
    if (i, j) not in ((1, -1), (-1, 1)):
        return False
    number = terms.pop(None, 0) + strict
    if any(isinstance(name, str) for name in terms):
        return False
    numbers = tuple((place, -factor) for place, factor in terms.items() if factor)
    bounds.append((i == 1, -number, numbers))
    return True


def _sum(n, factor, terms):
    """Add an integer to {"i", "j", place of a number or None: factor}; None if not."""
    if terms is None:
        return None
    if n.op == "const":
        name, factor = None, factor * n.value
    elif n.op in ("var", "param"):
        name = n.value
    elif n.op == "neg":
        return _sum(n.args[0], -factor, terms)
    elif n.op in ("add", "sub"):
        second = factor if n.op == "add" else -factor
        return _sum(n.args[1], second, _sum(n.args[0], factor, terms))
    else:
        return None
    return {**terms, name: terms.get(name, 0) + factor}


class Softcap:
    """Of a score ``cap * tanh(s / cap)``: its number, or the place of it."""

    def __init__(self, number: Any, place: int | None):
        self._number, self._place = number, place

    def of(self, values: Sequence[Any]) -> float | None:
        """The cap with the numbers of a call; None if it is none for the option."""
        cap = self._number if self._place is None else values[self._place]
        return float(cap) if 1e-30 < cap < 1e30 else None


def softcap(root: Node) -> Softcap | None:
    """The softcap that a score is, or None."""
    for cap, tanh in (root.args, root.args[::-1]) if root.op == "mul" else ():
        if tanh.op != "tanh" or tanh.args[0].op != "div":
            continue
        s, below = tanh.args[0].args
        cap_number = cap.args[0] if cap.op == "float" else cap
        if (s.op, s.value) == ("var", "s") and cap is below:
            if cap_number.op == "const":
                return Softcap(cap_number.value, None)
            if cap_number.op == "param":
                return Softcap(None, cap_number.value)
    return None


class ArrayOption(NamedTuple):
    """Of a function that does with one array what an option does."""

    option: str  # "alibi_slopes", "bias" or "mask"
    array: str  # its name in the function
    axes: str  # the variables of its index, in the order of b, h, i, j


_LEADING = "", "h", "b", "bh"
_OF_PAIRS = frozenset(axes + "ij" for axes in _LEADING)
_OF_HEADS = frozenset({"h", "bh"})


def array_option(root: Node) -> ArrayOption | None:
    """The option that does with an array what a function does, or None."""
    if root.dtype == "bool":
        return _read("mask", root, _OF_PAIRS)
    if root.op not in ("add", "sub"):
        return None
    first, second = root.args
    if root.op == "add" and _is_s(second):
        first, second = second, first
    if not _is_s(first):
        return None
    if root.op == "add" and (bias := _read("bias", second, _OF_PAIRS)):
        return bias
    sign, factors = _product(second)
    if sign != (1 if root.op == "sub" else -1) or len(factors) != 2:
        return None
    for slope, distance in (factors, factors[::-1]):
        if _is_distance(distance):
            return _read("alibi_slopes", slope, _OF_HEADS)
    return None


def _is_s(n):
    return (n.op, n.value) == ("var", "s")


def _read(option, n, known):
    """The option of an array read at the variables themselves; None if it is not."""
    if n.op != "load" or n.dtype != ("bool" if option == "mask" else "float"):
        return None
    axes = "".join(a.value if a.op == "var" else "?" for a in n.args)
    return ArrayOption(option, n.value, axes) if axes in known else None


def _product(n):
    """(sign, factors) of a product of floats."""
    if n.op == "float":  # of an integer
        return _product(n.args[0])
    if n.op == "neg":
        sign, factors = _product(n.args[0])
        return -sign, factors
    if n.op == "mul":
        (sign, factors), (other, more) = map(_product, n.args)
        return sign * other, factors + more
    return 1, [n]


def _is_distance(n):
    """Whether this is the distance between i and j, as an integer or a float."""
    if n.op == "float":
        return _is_distance(n.args[0])
    if n.op not in ("abs", "max"):
        return False
    inner = [a.args[0] if a.op == "float" else a for a in n.args]
    terms = [_sum(a, 1, {}) if a.dtype == "int" else None for a in inner]
    if None in terms:
        return False
    found = [{name: x for name, x in of.items() if x} for of in terms]
    if not all(of in ({"i": 1, "j": -1}, {"i": -1, "j": 1}) for of in found):
        return False
    return n.op == "abs" or found[0] != found[1]

"""The polynomials of 2^(2 x.y) by which smooth tiles become moments."""

import functools
import math
import struct

import numpy as np

DEGREES = (3, 5, 7)
# Relative error of a polynomial: that of the exponential unit.
_ERROR = 1.5e-7
# What one moment costs beside a pair of 256 keys on tensor cores (H200).
_COST_OF_TERM = 0.0026
_COST_OF_TILE = 0.012


@functools.cache
def reach(degree: int) -> float:
    """The largest \\|z\\| up to which a polynomial of this degree gives e^z."""
    low, high = 0.0, 4.0
    for _ in range(40):
        z = (low + high) / 2
        t = np.linspace(-z, z, 1001)
        error = np.abs(_fit(degree, z)(t) / np.exp(t) - 1).max()
        low, high = (z, high) if error < _ERROR else (low, z)
    return low


def _fit(degree, z):
    return np.polynomial.Chebyshev.interpolate(np.exp, degree, domain=[-z, z])


def _exponents(degree, dim):
    """Exponents of the monomials in the order of Horner's rule in series.cu."""
    for i in range(degree, -1, -1):
        for j in range(degree - i if dim > 1 else 0, -1, -1):
            for k in range(degree - i - j if dim > 2 else 0, -1, -1):
                yield i, j, k


def num_terms(degree: int, dim: int) -> int:
    """Monomials of `dim` axes up to a degree."""
    return sum(1 for _ in _exponents(degree, dim))


@functools.cache
def coefficients(degree: int, dim: int) -> tuple[float, ...]:
    """Those of the monomials of 2^(2 x.y)."""
    polynomial = _fit(degree, reach(degree)).convert(kind=np.polynomial.Polynomial)
    found = []
    for powers in _exponents(degree, dim):
        n = sum(powers)
        multinomial = math.factorial(n) / math.prod(map(math.factorial, powers))
        found.append(float(polynomial.coef[n] * (2 * math.log(2)) ** n * multinomial))
    return tuple(found)


def cut(degree: int, scale: float) -> float:
    """Product of squared reaches below which 2 scale x.y ln 2 stays within reach."""
    return (reach(degree) / (2 * math.log(2) * scale)) ** 2


def pack_coefficients(degree: int, dim: int) -> bytes:
    """series_t of series.cu."""
    return np.array(coefficients(degree, dim), np.float32).tobytes()


def pack_degrees(degrees: tuple[int, ...], dim: int, scale: float) -> bytes:
    """degrees_t of choose.cu."""
    n = len(degrees)
    cuts = [min(cut(degree, scale), 1e38) for degree in degrees]
    costs = [_COST_OF_TILE + _COST_OF_TERM * num_terms(d, dim) for d in degrees]
    return struct.pack(f"{n}i{n}f{n}f", *degrees, *cuts, *costs)

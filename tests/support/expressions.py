"""Random score and mask functions, as Python text grown from the grammar.

``python tests/support/expressions.py 2000`` compares as many with a direct call of the
function, its derivatives with differences, and masks of tiles with their elements.
"""

import random
import re
import sys

import numpy as np

from cupyflash._expr.diagonals import by_distance, distances
from cupyflash._expr.emit_numpy import evaluate
from cupyflash._expr.intervals import decide
from cupyflash._expr.lookup import lookup

ROWS, COLUMNS = 6, 9
# As NumPy's: ~True of Python is -2.
NUMBERS = {
    "N0": np.int64(5),
    "N1": np.int64(2),
    "C0": np.float64(0.8),
    "C1": np.float64(-1.7),
}
# Forms with an infinite derivative somewhere.
SINGULAR = re.compile(
    r"np\.sqrt\((?!abs)|np\.log1p|\*\*-1|np\.hypot|np\.arctan2|np\.cbrt|np\.power"
)
TWO_NUMBERS = "minimum maximum fmin fmax logaddexp hypot arctan2 heaviside".split()
SCORE_ARGUMENTS = "s, b, h, i, j, *, w, t, doc"


def arrays():
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=4),
        "t": rng.normal(size=(3, 17)),
        "doc": np.sort(rng.integers(0, 3, (3, 64)), axis=1),
    }


class Grammar:
    """`choose` picks one of a list: that of random.Random, or hypothesis' draw."""

    def __init__(self, choose, positions=False):
        self._choose, self._positions = choose, positions

    def _grow(self, *forms):
        return self._choose(list(forms))()

    def integer(self, depth):
        choose, again = self._choose, lambda: self.integer(depth - 1)
        if depth <= 0:
            leaves = ["i", "j", "(i - j)", "0", "1", "3", "7", "N0", "N1"]
            return choose(leaves if self._positions else [*leaves, "h", "b"])
        forms = [
            lambda: f"({again()} {choose(['+', '-', '*'])} {again()})",
            lambda: f"({again()} // {choose(['3', '4', 'N1', '-5'])})",
            lambda: f"({again()} % {choose(['3', '7', 'N1'])})",
            lambda: f"({again()} >> {choose(['1', '2'])})",
            lambda: f"abs({again()})",
            lambda: f"(-{again()})",
            lambda: f"np.{choose(['minimum', 'maximum'])}({again()}, {again()})",
            lambda: f"np.clip({again()}, -4, {choose(['1', '3', '6'])})",
            lambda: f"np.where({self.boolean(depth - 1)}, {again()}, {again()})",
            lambda: f"np.sign({again()})",
            # NumPy leaves open what NaN and far numbers become.
            lambda: "np.floor(np.where(abs({0}) < 1e6, {0}, 0.0)).astype(int)".format(
                self.number(depth - 1)
            ),
        ]
        if not self._positions:
            forms.append(lambda: f"doc[b, np.clip({again()}, 0, 63)]")
        return self._grow(*forms)

    def number(self, depth):
        choose, again = self._choose, lambda: self.number(depth - 1)
        if depth <= 0:
            if self._positions:
                return choose(["i * 0.5", "j / 3", "C0", "1.5"])
            diagonal = "t[b, np.clip(i - j, -8, 8) + 8]"
            return choose(
                ["s", "s", "s", "w[h]", "C0", "C1", "0.625", "-1.5", diagonal]
            )
        return self._grow(
            lambda: f"({again()} {choose(['+', '-', '*'])} {again()})",
            lambda: f"({again()} / (abs({again()}) + 0.5))",
            lambda: f"np.exp(-abs({again()}))",
            lambda: f"np.exp2(np.minimum({again()}, 3.0))",
            lambda: f"np.log(abs({again()}) + 0.7)",
            lambda: f"np.log1p({again()})",
            lambda: f"np.sqrt({again()})",
            lambda: f"np.sqrt(abs({again()}) + 0.1)",
            lambda: f"np.{choose(['tanh', 'sin', 'cos', 'arctan'])}({again()})",
            lambda: f"np.{choose(['sinh', 'cosh'])}(np.clip({again()}, -2, 2))",
            lambda: f"abs({again()})",
            lambda: f"({again()})**{choose(['2', '3', '-1'])}",
            lambda: f"np.{choose(['floor', 'ceil', 'sign'])}({again()})",
            lambda: f"np.{choose(TWO_NUMBERS)}({again()}, {again()})",
            lambda: f"np.clip({again()}, -1.5, 1.25)",
            lambda: f"np.power(abs({again()}), np.clip({again()}, -2, 2.5))",
            lambda: f"{choose(['2.0', '1.1'])} ** np.clip({again()}, -3, 3)",
            lambda: f"(abs({again()}) + 0.3) ** {choose(['1.5', '-0.5', 'C0', 'C1'])}",
            lambda: f"({again()} {choose(['%', '//'])} {choose(['0.75', 'C1'])})",
            lambda: (
                f"np.{choose(['arcsin', 'arccos', 'arctanh'])}"
                f"(np.clip({again()}, -0.9, 0.9))"
            ),
            lambda: f"np.arccosh(1.1 + abs({again()}))",
            lambda: f"np.log10(abs({again()}) + 0.7)",
            lambda: (
                f"np.{choose(['arcsinh', 'cbrt', 'sinc', 'rint', 'trunc'])}({again()})"
            ),
            lambda: f"np.round({again()}, 1)",
            lambda: (
                f"np.select([{self.boolean(depth - 1)} & (i > -9)], [{again()}], "
                f"{again()})"
            ),
            lambda: f"(-{again()})",
            lambda: f"np.where({self.boolean(depth - 1)}, {again()}, {again()})",
            lambda: f"({again()} * {self.integer(depth - 1)})",
        )

    def boolean(self, depth):
        choose = self._choose
        comparison = choose(["<", "<=", ">", ">=", "==", "!="])
        if depth <= 0:
            return f"({self.integer(0)} {comparison} {self.integer(0)})"

        def again():
            return self.boolean(depth - 1)

        def integer():
            return self.integer(depth - 1)

        def number():
            return self.number(depth - 1)

        return self._grow(
            lambda: f"({integer()} {comparison} {integer()})",
            lambda: f"({number()} {choose(['<', '>'])} {number()})",
            lambda: f"({again()} {choose(['&', '|', '^'])} {again()})",
            lambda: f"np.logical_not({again()})",
            lambda: f"(~({again()} & (i > -9)))",
            lambda: f"np.isfinite({number()})",
            lambda: f"np.logical_or({integer()}, {again()})",
        )


def function(text, arguments=SCORE_ARGUMENTS):
    """The function of a text."""
    scope = {"np": np, **NUMBERS}
    exec(f"def f({arguments}):\n    return {text}", scope)
    return scope["f"]


def variables():
    """A tile of scores and its positions."""
    rng = np.random.default_rng(1)
    return {
        "s": rng.normal(size=(ROWS, COLUMNS)),
        "b": np.int64(1),
        "h": np.int64(2),
        "i": 2 + np.arange(ROWS)[:, None],
        "j": np.arange(COLUMNS)[None],
    }


def differences(values, at, step=1e-5):
    """(derivative, where it can be trusted) by differences of `values(shift)`."""
    with np.errstate(all="ignore"):
        here, *near = (values(shift * step) for shift in (0, 1, -1, 2, -2))
        forward, backward = (near[0] - here) / step, (here - near[1]) / step
        central = (near[0] - near[1]) / (2 * step)
        wide = (near[2] - near[3]) / (4 * step)
        size = 1 + abs(central) + abs(here)
        smooth = abs(forward - backward) < 1e-2 * size
        smooth &= abs(central - wide) < 1e-7 * size
        # Of large values, sin and floor of it, differences say nothing; nor of steps
        # as np.round() makes them, so small that they look like a slope.
        smooth &= np.isfinite(central) & (abs(here) < 1e6) & (abs(central) < 4e3)
    return central, smooth


def check_score(text):
    """Compare one score with a direct call and with differences; what was compared."""
    fn, given, named = function(text), variables(), arrays()
    expression, values = lookup(fn, named)
    with np.errstate(all="ignore"):
        direct = fn(**given, **named)
    roots = [expression.root, expression.derivative.root]
    roots += [x for _, index, partial in expression.reads for x in (*index, partial)]
    ours, slope, *reads = evaluate(roots, given, values, named, np.float64)
    np.testing.assert_allclose(
        *np.broadcast_arrays(ours, direct), rtol=1e-12, atol=1e-14
    )

    # With what depends on i - j alone once a diagonal, every bit is the same.
    diagonals = {**given, "d": distances(2, ROWS, 0, COLUMNS)}
    of_tiles = evaluate(by_distance(roots), diagonals, values, named, np.float64)
    for x, y in zip([ours, slope, *reads], of_tiles, strict=True):
        np.testing.assert_array_equal(*np.broadcast_arrays(x, y), err_msg=text)

    # The text that is shown is the same function.
    again, _ = lookup(function_of_repr(expression), used(expression, named))
    assert again.key == expression.key, repr(expression)

    def shifted(by):
        with np.errstate(all="ignore"):
            return np.broadcast_to(
                fn(**{**given, "s": given["s"] + by}, **named), slope_shape
            )

    slope_shape = np.broadcast_shapes(ours.shape, given["s"].shape)
    expected, smooth = differences(shifted, given["s"])
    slope = np.broadcast_to(slope, slope_shape)
    if SINGULAR.search(text):  # the chain rule has 0 * inf at a root of what is below
        smooth &= ~np.isnan(slope)
    np.testing.assert_allclose(
        slope[smooth], expected[smooth], rtol=1e-4, atol=1e-4, err_msg=text
    )
    compared = int(smooth.sum())

    for name in ("w", "t"):
        total = np.zeros(named[name].shape)
        parts = iter(reads)
        along = np.random.default_rng(2).normal(size=total.shape)
        change = np.zeros(slope_shape)
        for array, index, _ in expression.reads:
            places = tuple(next(parts) for _ in index)
            partial = next(parts)
            if array == name:
                with np.errstate(all="ignore"):
                    change = change + partial * along[places]

        def moved(by, name=name, along=along):
            with np.errstate(all="ignore"):
                other = {**named, name: named[name] + by * along}
                return np.broadcast_to(fn(**given, **other), slope_shape)

        expected, smooth = differences(moved, given["s"])
        change = np.broadcast_to(change, slope_shape)
        if SINGULAR.search(text):
            smooth &= ~np.isnan(change)
        np.testing.assert_allclose(
            change[smooth], expected[smooth], rtol=1e-4, atol=1e-4, err_msg=text
        )
        compared += int(smooth.sum())
    return compared


def used(expression, named):
    return {name: named[name] for name in expression.arrays}


def function_of_repr(expression):
    """The function that an expression's repr shows."""
    scope = {"np": np, **NUMBERS, "C0_": NUMBERS["C0"]}
    exec(repr(expression), scope)
    return scope[expression.name]


def check_mask(text, choose):
    """Compare what a mask is over tiles with its elements; how many were decided."""
    fn = function(text, "i, j")
    expression, values = lookup(fn, mask=True)
    decided = uniform = 0
    for _ in range(4):
        i0, j0 = (choose(list(range(60))) for _ in range(2))
        n = choose([2, 4, 8, 16])
        i, j = i0 + np.arange(n)[:, None], j0 + np.arange(n)[None]
        with np.errstate(all="ignore"):
            seen = np.broadcast_to(fn(i=i, j=j), (n, n))
        truth = True if seen.all() else None if seen.any() else False
        said = decide(
            expression, {"i": (i0, i0 + n - 1), "j": (j0, j0 + n - 1)}, values
        )
        assert said is None or said is truth, (text, i0, j0, n, said, truth)
        uniform += truth is not None
        decided += said is not None
    return decided, uniform


def main(count):
    compared = decided = uniform = bad = 0
    for seed in range(count):
        r = random.Random(seed)
        grammar, positions = Grammar(r.choice), Grammar(r.choice, positions=True)
        try:
            compared += check_score(grammar.number(seed % 4 + 1))
            of_mask = check_mask(positions.boolean(seed % 4), r.choice)
        except AssertionError as error:
            bad += 1
            print(seed, error)
            continue
        decided, uniform = decided + of_mask[0], uniform + of_mask[1]
    print(
        f"{count} scores and masks, {bad} bad; {compared} derivatives; "
        f"{decided} of {uniform} uniform tiles decided"
    )
    return bad


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]))))

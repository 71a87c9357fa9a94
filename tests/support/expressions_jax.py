"""Random score functions: their derivatives beside those of JAX.

``python tests/support/expressions_jax.py 2000 7`` draws 2,000 functions by Hypothesis,
seed 7, and compares value, derivative by the score and gradients of named arrays with
those of ``jax.grad`` in float64, and with differences. It needs JAX.
"""

import sys
import warnings

import expressions
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from cupyflash._expr.emit_numpy import evaluate
from cupyflash._expr.lookup import lookup

jax.config.update("jax_enable_x64", True)
COUNTS = {"functions": 0, "derivatives": 0, "gradients": 0}


@st.composite
def scores(draw):
    grammar = expressions.Grammar(lambda forms: draw(st.sampled_from(forms)))
    return grammar.number(draw(st.integers(1, 4)))


def check(text):
    """Compare one function where it is smooth; at a tie JAX takes a mean."""
    COUNTS["derivatives"] += expressions.check_score(text)
    given, named = expressions.variables(), expressions.arrays()
    fn = expressions.function(text)
    theirs = expressions.function(text)
    theirs.__globals__.update(
        np=jnp, **{n: jnp.asarray(x) for n, x in expressions.NUMBERS.items()}
    )
    shape = given["s"].shape

    def value(s, named):
        positions = {n: jnp.asarray(x) for n, x in given.items() if n != "s"}
        return jnp.broadcast_to(theirs(s=s, **positions, **named), shape)

    def shifted(by):
        return np.broadcast_to(fn(**{**given, "s": given["s"] + by}, **named), shape)

    _, smooth = expressions.differences(shifted, given["s"])
    for name in ("w", "t"):

        def moved(by, name=name):
            other = {**named, name: named[name] + by}
            return np.broadcast_to(fn(**given, **other), shape)

        smooth &= expressions.differences(moved, given["s"])[1]
    arrays = {n: jnp.asarray(x) for n, x in named.items()}
    floats = {n: arrays.pop(n) for n in ("w", "t")}

    def total(s, floats):
        result = value(s, {**floats, **arrays})
        return jnp.where(smooth, result, 0).sum()

    by_s, by_named = jax.grad(total, argnums=(0, 1))(jnp.asarray(given["s"]), floats)

    expression, values = lookup(fn, named)
    roots = [expression.derivative.root]
    roots += [x for _, index, partial in expression.reads for x in (*index, partial)]
    slope, *reads = evaluate(roots, given, values, named, np.float64)
    ours = np.where(smooth, slope, 0)
    # In reverse, NaN comes from branches that are not taken.
    known = np.isfinite(by_s) & np.isfinite(ours)
    close = {"rtol": 1e-8, "atol": 1e-8, "err_msg": text}
    np.testing.assert_allclose(ours[known], by_s[known], **close)
    COUNTS["derivatives"] += int(known.sum())
    parts = iter(reads)
    gradients = {n: np.zeros(x.shape) for n, x in floats.items()}
    for array, index, _ in expression.reads:
        places = tuple(np.broadcast_to(next(parts), shape) for _ in index)
        np.add.at(gradients[array], places, np.where(smooth, next(parts), 0))
    for name, gradient in gradients.items():
        known = np.isfinite(by_named[name]) & np.isfinite(gradient)
        size = 1 + abs(gradient[known]).max(initial=0)
        np.testing.assert_allclose(
            gradient[known] / size, by_named[name][known] / size, **close
        )
        COUNTS["gradients"] += int(known.sum())
    COUNTS["functions"] += 1


def main(count, seed):
    test = hypothesis.given(scores())(check)
    every = hypothesis.settings(
        max_examples=count, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        hypothesis.seed(seed)(every(test))()
    print(", ".join(f"{n} {name}" for name, n in COUNTS.items()), "0 bad", sep=", ")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Derivatives of expressions: symbolic, forward.

Forward, so that where() picks a derivative as it picks a value: reverse would multiply
the adjoint 0 of a branch not taken by its derivative, and 0 * inf is NaN.
"""

from collections.abc import Callable

from cupyflash._expr.nodes import Node, const, is_const, make, order


def _squares(a: Node, b: Node) -> Node:
    return make("add", make("mul", a, a), make("mul", b, b))


def _root_below(x: Node) -> Node:
    return make("div", 1.0, make("sqrt", x))


# Of an operation: its derivatives by its arguments, from the result and the arguments.
# Those that are not here are flat: sign, floor, comparisons.
_PARTIALS: dict[str, Callable[..., list[Node]]] = {
    "neg": lambda y, x: [const(-1.0)],
    "abs": lambda y, x: [make("sign", x)],
    "exp": lambda y, x: [y],
    "exp2": lambda y, x: [make("mul", y, 0.6931471805599453)],
    "expm1": lambda y, x: [make("add", y, 1.0)],
    "log": lambda y, x: [make("div", 1.0, x)],
    "log2": lambda y, x: [make("div", 1.4426950408889634, x)],
    "log1p": lambda y, x: [make("div", 1.0, make("add", x, 1.0))],
    "log10": lambda y, x: [make("div", 0.4342944819032518, x)],
    "sqrt": lambda y, x: [make("div", 0.5, y)],
    "cbrt": lambda y, x: [make("div", 1 / 3, make("mul", y, y))],
    "pow": lambda y, x, n: [
        make("mul", n, make("pow", x, make("sub", n, 1.0))),
        make("where", make("eq", x, 0.0), 0.0, make("mul", y, make("log", x))),
    ],
    "hypot": lambda y, a, b: [make("div", a, y), make("div", b, y)],
    "sin": lambda y, x: [make("cos", x)],
    "cos": lambda y, x: [make("neg", make("sin", x))],
    "tan": lambda y, x: [make("add", make("mul", y, y), 1.0)],
    "arcsin": lambda y, x: [_root_below(make("sub", 1.0, make("mul", x, x)))],
    "arccos": lambda y, x: [
        make("neg", _root_below(make("sub", 1.0, make("mul", x, x))))
    ],
    "arctan": lambda y, x: [make("div", 1.0, make("add", make("mul", x, x), 1.0))],
    "arctan2": lambda y, a, b: [
        make("div", b, _squares(a, b)),
        make("neg", make("div", a, _squares(a, b))),
    ],
    "sinh": lambda y, x: [make("cosh", x)],
    "cosh": lambda y, x: [make("sinh", x)],
    "tanh": lambda y, x: [make("sub", 1.0, make("mul", y, y))],
    "arcsinh": lambda y, x: [_root_below(make("add", make("mul", x, x), 1.0))],
    "arccosh": lambda y, x: [_root_below(make("sub", make("mul", x, x), 1.0))],
    "arctanh": lambda y, x: [make("div", 1.0, make("sub", 1.0, make("mul", x, x)))],
    "mod": lambda y, a, b: [const(1.0), make("neg", make("floordiv", a, b))],
    "add": lambda y, a, b: [const(1.0), const(1.0)],
    "sub": lambda y, a, b: [const(1.0), const(-1.0)],
    "mul": lambda y, a, b: [b, a],
    "div": lambda y, a, b: [make("div", 1.0, b), make("neg", make("div", y, b))],
}


def derivative(root: Node, by: Node) -> Node:
    """The derivative of a float by a variable or by a read of an array.

    Where two arguments of minimum and maximum are equal it is that of the first; of abs
    at 0 it is 0. A 0 is left out, never a factor: it would make NaN of infinity.
    """
    zero = const(0.0)
    of = {by: const(1.0)}
    for n in order(root):
        if n in of or n.dtype != "float" or n.op == "load":
            continue
        if not any(a in of for a in n.args):
            continue
        if n.op in ("where", "min", "max"):
            a, b = n.args[-2:]
            if n.op == "where":
                of_first = n.args[0]
            else:
                of_first = make("le", a, b) if n.op == "min" else make("le", b, a)
            of[n] = make("where", of_first, of.get(a, zero), of.get(b, zero))
        elif n.op in _PARTIALS:
            terms = [
                _times(partial, of[a])
                for partial, a in zip(_PARTIALS[n.op](n, *n.args), n.args, strict=True)
                if a in of
            ]
            of[n] = terms[0] if len(terms) == 1 else make("add", *terms)
    return of.get(root, zero)


def _times(partial: Node, inner: Node) -> Node:
    """A product; a factor goes into a where() of which one branch is 0."""
    if inner.op == "where" and any(is_const(x, 0) for x in inner.args[1:]):
        branches = (x if is_const(x, 0) else _times(partial, x) for x in inner.args[1:])
        return make("where", inner.args[0], *branches)
    return make("mul", partial, inner)

"""An expression as readable Python; traced again, it is the same expression."""

import itertools
import math
from collections.abc import Mapping, Sequence

from cupyflash._expr.nodes import LEAVES, VARIABLES, Node, order
from cupyflash._expr.operations import (
    CALLS,
    COMPARES,
    OF_FLOATS,
    OPERATIONS,
)

_LONGEST = 60  # characters of a line, about


def python_text(
    root: Node, name: str, arrays: Sequence[str], number_names: Mapping[int, str]
) -> str:
    """The text of a function; what is used twice has a name of its own."""
    nodes = order(root)
    uses = dict.fromkeys(nodes, 0)
    for n in nodes:
        for a in n.args:
            uses[a] += 1
    taken = {*VARIABLES, *arrays, "np"}
    fresh = (f"t{k}" for k in itertools.count() if f"t{k}" not in taken)
    numbers = _names_of_numbers(nodes, number_names, taken)
    implied = _implied_casts(nodes)
    text: dict[Node, tuple[str, int]] = {}
    lines = []
    for n in nodes:
        text[n] = text[n.args[0]] if n in implied else _text_of(n, text, numbers)
        shared = uses[n] > 1 and n.op not in LEAVES
        if n is not root and (shared or len(text[n][0]) > _LONGEST):
            variable = next(fresh)
            lines.append(f"    {variable} = {text[n][0]}\n")
            text[n] = variable, CALLS
    variables = [v for v in VARIABLES if v in root.free]
    parameters = ", ".join([*variables, *(["*", *arrays] if arrays else [])])
    body = "".join(lines)
    return f"def {name}({parameters}):\n{body}    return {text[root][0]}"


def python_line(x: Node) -> str:
    """The text of an expression, for a message."""
    text: dict[Node, tuple[str, int]] = {}
    for n in order(x):
        text[n] = ("x", CALLS) if n.op == "param" else _text_of(n, text, {})
    return text[x][0]


def _implied_casts(nodes):
    """Casts to float that promotion makes anyway, wherever their result is used."""
    implied = {n for n in nodes if n.op == "float"}
    for n in nodes:
        if n.op in OF_FLOATS:
            continue
        operands = n.args[1:] if n.op == "where" else n.args
        if not any(a.dtype == "float" and a.op != "float" for a in operands):
            implied.difference_update(n.args)
    return implied - {nodes[-1]}


def _names_of_numbers(nodes, number_names, taken):
    """{place: name} of the numbers, each name for one of them."""
    names: dict[int, str] = {}
    for n in nodes:
        if n.op == "param" and n.value not in names:
            name = number_names.get(n.value, "number")
            while name in taken or name in names.values():
                name += "_"
            names[n.value] = name
    return names


def _text_of(n, text, numbers):
    """(text, how strongly it binds) of a node, from those of its arguments."""
    if n.op == "const":
        return _literal(n.value), CALLS
    if n.op == "var":
        return n.value, CALLS
    if n.op == "param":
        return numbers[n.value], CALLS
    if n.op == "load":
        index = ", ".join(text[a][0] for a in n.args)
        return (f"{n.value}[{index}]" if index else n.value), CALLS
    operation = OPERATIONS[n.op]
    parts = []
    for place, a in enumerate(n.args):
        inner, binding = text[a]
        least = operation.binding + (place > 0 or operation.binding == COMPARES)
        is_call = operation.binding == CALLS and not operation.python.startswith("{")
        parts.append(f"({inner})" if binding < least and not is_call else inner)
    return operation.python.format(*parts), operation.binding


def _literal(value):
    if not isinstance(value, float) or math.isfinite(value):
        return f"({value!r})" if value < 0 else repr(value)
    return "np.nan" if value != value else "np.inf" if value > 0 else "(-np.inf)"

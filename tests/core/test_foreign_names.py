"""Names of other packages: the error says ours, also where an argument is missing."""

import inspect

import numpy as np
import pytest

import cupyflash
import cupyflash.distributed
from cupyflash._core import foreign_names

FUNCTIONS = {name: getattr(cupyflash, name) for name in foreign_names._NAMES}
EVERY = [
    (function, name, ours)
    for function, names in foreign_names._NAMES.items()
    for name, ours in names.items()
]
X = np.ones((2, 3, 4))


@pytest.mark.parametrize(("function", "name", "ours"), EVERY)
def test_each_name_is_told_without_the_other_arguments(function, name, ours):
    with pytest.raises(TypeError) as caught:
        FUNCTIONS[function](**{name: X})
    assert f"argument '{name}'; here it is {ours}" in str(caught.value)


@pytest.mark.parametrize(("function", "name", "ours"), EVERY)
def test_what_is_ours_is_an_argument(function, name, ours):
    """Of "axis=" and "q, the first argument" the first word."""
    parameters = inspect.signature(FUNCTIONS[function]).parameters
    assert name not in parameters
    first = ours.split()[0].partition("=")[0].strip(",;:")
    assert first == "nothing" or first in parameters


@pytest.mark.parametrize("function", FUNCTIONS)
def test_unknown_and_missing_arguments(function):
    call = FUNCTIONS[function]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'$"):
        call(colour=1)
    first = next(iter(inspect.signature(call).parameters))
    first = "q" if function == "attention_vjp" else first
    with pytest.raises(
        TypeError, match=f"^{first} must be an array, got None; it is not optional$"
    ):
        call()


@pytest.mark.parametrize(
    ("function", "name", "meant"),
    [
        ("attention", "casual", "causal"),
        ("attention", "return_lses", "return_lse"),
        ("attention", "key_length", "key_lengths"),
        ("softmax", "axes", "axis"),
        ("logsumexp", "keep_dims", "keepdims"),
    ],
)
def test_a_slip_of_the_pen(function, name, meant):
    with pytest.raises(TypeError, match=f"{name!r}; did you mean {meant}\\?$"):
        FUNCTIONS[function](X, **{name: True})


def test_an_argument_of_the_plain_function_alone():
    call = cupyflash.distributed.attention
    with pytest.raises(TypeError, match=r"only cupyflash.attention\(\) takes it$"):
        call(X, X, X, score=lambda s: s)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_help_shows_needed_arguments_without_a_default(function):
    parameters = inspect.signature(FUNCTIONS[function]).parameters.values()
    needed = {
        "attention": ["q", "k", "v"],
        "attention_vjp": ["dout", "q", "k", "v", "out", "lse"],
        "merge_attention_states": ["outs", "lses"],
        "logsumexp": ["a"],
        "softmax_vjp": ["y", "dy"],
        "log_softmax_vjp": ["y", "dy"],
    }
    assert [p.name for p in parameters if p.default is p.empty] == needed.get(
        function, ["x"]
    )
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters)

"""explain: which kernel would run, and why."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cupyflash._attention import api as attention_api
from cupyflash._attention import problem as attention_problem
from cupyflash._attention import vjp_problem
from cupyflash._core import foreign_names
from cupyflash._softmax import api as softmax_api
from cupyflash._softmax import problem as softmax_problem


@dataclass(frozen=True)
class Explanation:
    """What a call would run; its repr is a short report.

    Attributes
    ----------
    function : str
        Name of the function.
    backend : {"numpy", "cupy"}
        Where it would run.
    kernel : str
        Row of the kernel table, or the method of the NumPy back end.
    problem : object
        The checked problem: shapes, dtypes and options as plain numbers.
    refused : tuple of (str, str)
        Kernels earlier in the table, and why each cannot compute this call. Empty on
        NumPy, where each method has a single implementation.
    details : dict
        Details of the back end: on a GPU the ``"launches"``, each with its source,
        grid, block, cluster size, bytes of shared memory and defines; how the keys are
        split; the block sizes on the CPU.
    """

    function: str
    backend: str
    kernel: str
    problem: Any
    refused: tuple[tuple[str, str], ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    def __repr__(self):
        lines = [f"{self.function} on {self.backend}: {self.kernel}"]
        lines += [f"  not {name}: {why}" for name, why in self.refused]
        for name, value in self.details.items():
            if name != "launches":
                if "\n" in (text := str(value)):
                    lines += [f"  {name}:", textwrap.indent(text, "    ")]
                else:
                    lines.append(f"  {name}: {text}")
                continue
            for number, launch in enumerate(value, 1):
                lines.append(f"  launch {number}: {launch['source']}")
                lines += [f"    {n}: {x}" for n, x in launch.items() if n != "source"]
        return "\n".join(lines)


# Public function -> its check, which takes the same arguments in the same order, and
# the module that selects its back end.
_CHECKS: dict[Any, tuple[Callable[..., Any], Any]] = {
    softmax_api.softmax: (partial(softmax_problem.softmax, "softmax"), softmax_api),
    softmax_api.log_softmax: (
        partial(softmax_problem.softmax, "log_softmax"),
        softmax_api,
    ),
    softmax_api.logsumexp: (softmax_problem.logsumexp, softmax_api),
    softmax_api.softmax_vjp: (partial(softmax_problem.vjp, "softmax_vjp"), softmax_api),
    softmax_api.log_softmax_vjp: (
        partial(softmax_problem.vjp, "log_softmax_vjp"),
        softmax_api,
    ),
    attention_api.attention: (attention_problem.attention, attention_api),
    attention_api.attention_vjp: (
        vjp_problem.attention_vjp,
        attention_api,
    ),
    attention_api.merge_attention_states: (attention_problem.merge, attention_api),
}


def _name(function):
    """A function with its package: cupyflash.points has a logsumexp, too."""
    name = getattr(function, "__qualname__", None)
    package = (getattr(function, "__module__", None) or "").partition("._")[0]
    return f"{package}.{name}" if name and package else repr(function)


def explain(function: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Show which kernel a call would run, and why, without running it.

    Parameters
    ----------
    function : callable or str
        One of the softmax and attention functions of `cupyflash`, or its name. Those of
        its submodules, such as `cupyflash.points`, are not explained.
    *args, **kwargs
        The arguments of the call.

    Returns
    -------
    Explanation
        Its repr is a short report; `kernel`, `refused` and `details` hold the parts.

    Raises
    ------
    ValueError
        If `function` is any other. Also raises whatever the call itself would raise for
        its arguments.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash
    >>> explanation = cupyflash.explain(cupyflash.softmax, np.zeros((2, 3)), axis=-1)
    >>> explanation.backend, explanation.kernel
    ('numpy', 'tiled')
    """
    names = {known.__name__: known for known in _CHECKS}
    function = names.get(function, function) if isinstance(function, str) else function
    try:
        check, module = _CHECKS[function]
    except (KeyError, TypeError):
        raise ValueError(
            f"function must be one of {', '.join(names)} of cupyflash itself, got "
            f"{_name(function)}"
        ) from None
    signature = inspect.signature(function)
    unknown = {n: x for n, x in kwargs.items() if n not in signature.parameters}
    if unknown:
        foreign_names.refuse(function.__name__, unknown)
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    problem, operands = check(*call.arguments.values())
    details = module.backend(problem).describe(problem, operands)
    return Explanation(
        function=function.__name__,
        backend=problem.backend,
        kernel=details.pop("kernel"),
        problem=problem,
        refused=details.pop("refused", ()),
        details=details,
    )

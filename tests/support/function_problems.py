"""Problems on a GPU with score and mask functions, made without one."""

from dataclasses import replace

import numpy as np

from cupyflash._attention import problem as attention_problem


def asked(dtype="float32", shape=(2, 4, 512, 64), method="auto", **options):
    """(problem on a GPU, operands) of a call with these arrays in NumPy."""
    q = np.zeros(shape, "float32" if dtype == "bfloat16" else dtype)
    given = {
        "bias": None, "mask": None, "scale": None, "causal": False,
        "query_offset": None, "window": None, "softcap": 0.0, "sinks": None,
        "alibi_slopes": None, "query_lengths": None, "key_lengths": None,
        "layout": "bhsd", "precision": "float32", "return_lse": True, "out": None,
        "method": method, "score": None, "score_arrays": None, "mask_arrays": None,
    }  # fmt: skip
    assert options.keys() <= given.keys()
    problem, operands = attention_problem.attention(
        q, q, q, *(given | options).values()
    )
    problem = replace(problem, backend="cupy", dtype=dtype)
    return attention_problem.with_cuda(problem, operands.functions), operands

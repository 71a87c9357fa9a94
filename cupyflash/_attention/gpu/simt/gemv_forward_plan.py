"""The launch of attention of few queries."""

import math

from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.plan import pack_params
from cupyflash._cuda.launch_sequence import Counter, Steps


def gemv_steps(row, problem, operands, device) -> Steps:
    """One kernel over q, k and v, with memory between blocks that share entries."""
    params, batch_dims, _ = pack_params(problem, operands)
    (config,) = row.configs(problem, batch_dims, device)
    splits = row.num_splits(problem, device)
    of_splits: tuple[str | int | Counter, ...] = ()
    scratch = {}
    if splits > 1:
        entries = math.prod(problem.batch) * problem.num_heads
        part = row.tuning.layout(problem, device).part_bytes
        scratch["parts"] = splits * entries * part
        of_splits = "parts", Counter(row.num_counters(device)), splits
    arguments = ("q", "k", "v", "out", "lse", *of_splits, *OPTIONS_AND_OFFSET, params)
    return Steps([(config, arguments)], scratch)

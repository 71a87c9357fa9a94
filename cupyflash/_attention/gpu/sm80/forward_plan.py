"""The launches of attention by mma.sync."""

from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.plan import pack_params
from cupyflash._cuda.launch_sequence import Steps


def mma_steps(row, problem, operands, device) -> Steps:
    """The mma kernel; for float32 preceded by one that splits keys and values."""
    params, batch_dims, _ = pack_params(problem, operands)
    main, *prepare = row.configs(problem, batch_dims, device)
    rest = (*OPTIONS_AND_OFFSET, params)
    inputs = ("q", "k", "v", "out", "lse")
    if not prepare:
        return Steps([(main, (0, *inputs, *rest))])
    return Steps(
        [
            (prepare[0], ("split_kv", "k", "v", *rest)),
            (main, ("split_kv", *inputs, *rest)),
        ],
        {"split_kv": row.split_operand_bytes(problem, device)},
    )

"""Requirements of GPU kernels on arrays: contiguous rows, and tensor maps."""

from cupyflash._attention.gpu.sm90.forward_tiles import HOPPER_GROUP_ROWS
from cupyflash._cuda import tensor_map


def unmapped(num_batch_axes, **arrays):
    """Why these arrays cannot all be read through tensor maps, or None."""
    for name, x in arrays.items():
        if reason := tensor_map.unsupported_reason(x.data.ptr, x.shape, x.strides):
            return f"{name} {reason}"
    if (axes := num_batch_axes()) > tensor_map.MAX_BATCH_AXES:
        return f"the batch is {axes} axes that cannot be merged"
    return None


def encoder(problem, fields, name, x, rows):
    """Tensor maps for an operand whose batch axes have been merged."""
    batch, *steps = fields[name]
    shape = (*fields["batch_shape"], *x.shape[-3:])
    strides = tuple(step * x.itemsize for step in (*batch, *steps))
    dtype = getattr(problem, name, problem.dtype)  # bias and mask have their own
    return tensor_map.Encoder(dtype, tensor_map.layout(shape, strides), rows)


def q_encoder(problem, fields, q, pack):
    """The same for q, with groups of `pack` heads next to its columns."""
    rows = HOPPER_GROUP_ROWS
    if pack == 1:
        return encoder(problem, fields, "q", q, rows)
    (batch,), head, row, col = fields["q"]
    shape = (*fields["batch_shape"], problem.num_heads // pack, problem.seqlen_q, pack)
    steps = batch, head * pack, row, head, col
    where = tensor_map.layout(
        (*shape, problem.head_dim), tuple(step * q.itemsize for step in steps)
    )
    return tensor_map.Encoder(problem.dtype, where, pack, rows // pack)

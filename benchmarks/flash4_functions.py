"""The functions of bench_flex.py for FlashAttention-4: score_mod, mask_mod in CuTe DSL.

Importing this needs FlashAttention-4. Its functions get vectors of one to four scores,
and of their batch entry, head, query and key; masks get one of each. Whoever writes a
score also writes how a gradient goes through it.
"""

import math

import cutlass
from cutlass import cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

_BLOCK = 128  # queries, and keys, of a tile that a mask hides or shows


def _read(array, *index):
    """An element of an array, as a vector of one."""
    element = array[index if len(index) > 1 else index[0]]
    return utils.scalar_to_ssa(element, array.element_type)


@cute.jit
def _as_it_is(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return grad


def _alibi(heads):
    """With the usual slopes, which need no array."""
    of_head = -8.0 / heads

    @cute.jit
    def score(s, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        slope = cute.math.exp2((h + 1).to(cutlass.Float32) * of_head)
        return s - slope * abs(q_idx - kv_idx).to(cutlass.Float32)

    return score, _as_it_is


def _softcap(cap):
    return utils.create_softcap_scoremod(cap), utils.create_softcap_scoremod_bwd(cap)


def _t5():
    per_octave = 8 / math.log(16)

    @cute.jit
    def score(s, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        distance = abs(q_idx - kv_idx)
        near = distance.to(cutlass.Float32)
        far = cute.math.log(cute.where(distance < 1, 1.0, near) / 8.0) * per_octave
        far = 8 + far.to(cutlass.Int32)
        far = cute.where(far < 15, far, cute.full_like(far, 15))
        bucket = cute.where(distance < 8, distance, far)
        bucket = cute.where(kv_idx > q_idx, bucket + 16, bucket)
        return s + _read(aux_tensors[0], bucket[0], h[0])

    return score, _as_it_is


def _window(width):
    @cute.jit
    def mask(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return (q_idx - kv_idx <= width) & (kv_idx <= q_idx)

    return mask


@cute.jit
def _document(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    documents = aux_tensors[0]
    return _read(documents, b[0], q_idx[0]) == _read(documents, b[0], kv_idx[0])


@cute.jit
def _prefix(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return (kv_idx <= q_idx) | (kv_idx < _read(aux_tensors[0], b[0]))


@cute.jit
def _array(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return _read(aux_tensors[0], q_idx[0], kv_idx[0]) != 0


def options(name, window):
    """Arguments of both passes for the option that does the same, or nothing."""
    return (
        {"window_size_left": window, "window_size_right": 0} if name == "window" else {}
    )


def score(name, heads, cap, tensors):
    """Of a case that changes scores: arguments of forward, and of backward."""
    function, derivative = {
        "alibi": lambda: _alibi(heads),
        "softcap": lambda: _softcap(cap),
        "t5": _t5,
    }[name]()
    arrays = [] if name == "alibi" else list(tensors.values())
    forward = {"score_mod": function, "aux_tensors": arrays or None}
    return forward, {**forward, "score_mod_bwd": derivative}


def mask(name, window, tensors, block_mask):
    """Of a case that hides scores: arguments of forward, and of backward.

    `block_mask`, of FlexAttention, has blocks of 128 and tells which are full.
    """
    function = {
        "window": lambda: _window(window),
        "document": lambda: _document,
        "prefix": lambda: _prefix,
        "array": lambda: _array,
    }[name]()
    arrays = [x.byte() if name == "array" else x for x in tensors.values()]
    both = {"mask_mod": function, "aux_tensors": arrays or None}

    def with_blocks(*counts_and_indices):
        blocks = BlockSparseTensorsTorch(
            *(x.contiguous() for x in counts_and_indices), block_size=(_BLOCK, _BLOCK)
        )
        return {**both, "block_sparse_tensors": blocks}

    of = block_mask
    return (
        with_blocks(
            of.kv_num_blocks, of.kv_indices, of.full_kv_num_blocks, of.full_kv_indices
        ),
        with_blocks(
            of.q_num_blocks, of.q_indices, of.full_q_num_blocks, of.full_q_indices
        ),
    )

"""Softmax and attention in Triton, the field's usual way to write such kernels.

Triton's programs handle blocks of numbers; its compiler gives them to threads, copies
ahead, and takes the tensor cores for ``tl.dot``. Both kernels hold their algorithm
alone: whole rows of any length, and contiguous arrays.
"""

import torch
import triton
import triton.language as tl

# Numbers of a block of a row: of shorter rows, all.
_MOST_COLUMNS = 8192
# Queries and keys of a block, warps, and blocks that are copied ahead: the compiler's
# user tries some.
_TILES = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in (
        (128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 4),
    )
]  # fmt: skip


@triton.jit
def _softmax_rows(x, out, length, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """Softmax of a row: each place of a block has its own running maximum and sum."""
    start = tl.program_id(0).to(tl.int64) * length
    places = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], float("-inf"), ACC)
    total = tl.zeros([BLOCK], ACC)
    for first in range(0, length, BLOCK):
        at = first + places
        s = tl.load(x + start + at, mask=at < length, other=float("-inf")).to(ACC)
        higher = tl.maximum(m, s)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # inf - inf is NaN
        total = total * tl.exp(m - base) + tl.exp(s - base)
        m = higher
    of_row = tl.max(m, 0)
    total_of_row = tl.sum(total * tl.exp(m - of_row), 0)
    for first in range(0, length, BLOCK):
        at = first + places
        s = tl.load(x + start + at, mask=at < length, other=float("-inf")).to(ACC)
        result = tl.exp(s - of_row) / total_of_row
        tl.store(out + start + at, result.to(out.dtype.element_ty), mask=at < length)


def softmax(x, out=None):
    """Softmax of the last axis of a contiguous tensor."""
    out = torch.empty_like(x) if out is None else out
    length = x.shape[-1]
    block = min(triton.next_power_of_2(length), _MOST_COLUMNS)
    acc = tl.float64 if x.dtype == torch.float64 else tl.float32
    warps = max(1, min(16, block // 256))
    rows = x.numel() // length
    _softmax_rows[(rows,)](x, out, length, ACC=acc, BLOCK=block, num_warps=warps)
    return out


@triton.autotune(_TILES, key=["D", "CAUSAL"])
@triton.jit
def _attention(
    q, k, v, out, lse, scale, seqlen_q, seqlen_k,
    D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """FlashAttention-2: a block of queries, and a loop over blocks of keys."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D)
    of_q = head * seqlen_q * D + rows[:, None] * D + columns[None, :]
    in_q = rows[:, None] < seqlen_q
    queries = tl.load(q + of_q, mask=in_q, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    ahead = seqlen_k - seqlen_q  # the last query sees all keys
    end = seqlen_k
    if CAUSAL:
        end = tl.minimum(seqlen_k, (tl.program_id(0) + 1) * BLOCK_M + ahead)
    for first in range(0, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        of_k = head * seqlen_k * D + keys[None, :] * D + columns[:, None]
        of_v = head * seqlen_k * D + keys[:, None] * D + columns[None, :]
        k_tile = tl.load(k + of_k, mask=keys[None, :] < seqlen_k, other=0.0)
        v_tile = tl.load(v + of_v, mask=keys[:, None] < seqlen_k, other=0.0)
        s = tl.dot(queries, k_tile) * (scale * 1.4426950408889634)
        sees = keys[None, :] < seqlen_k
        if CAUSAL:
            sees = sees & (keys[None, :] <= rows[:, None] + ahead)
        s = tl.where(sees, s, float("-inf"))
        higher = tl.maximum(m, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        m = higher
    result = acc / tl.where(total == 0, 1.0, total)[:, None]  # 0 where no key is seen
    tl.store(out + of_q, result.to(out.dtype.element_ty), mask=in_q)
    logs = (m + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + head * seqlen_q + rows, logs, mask=rows < seqlen_q)


def attention(q, k, v, causal=False):
    """(out, lse) of contiguous (.., heads, rows, 2^n columns) tensors of 16 bits."""
    *batch, seqlen_q, dim = q.shape
    seqlen_k = k.shape[-2]
    out = torch.empty_like(q)
    lse = torch.empty((*batch, seqlen_q), dtype=torch.float32, device=q.device)

    def grid(tile):
        return triton.cdiv(seqlen_q, tile["BLOCK_M"]), q.numel() // (seqlen_q * dim)

    _attention[grid](
        q, k, v, out, lse, dim**-0.5, seqlen_q, seqlen_k, D=dim, CAUSAL=causal
    )
    return out, lse

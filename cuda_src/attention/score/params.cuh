// SPDX-License-Identifier: MIT
// Parameters of all attention kernels: types by -D, numbers in one struct.
#pragma once

#include "attention/score/functions.cuh"
#include "common/strides.cuh"
#include "common/types.cuh"

#if !defined(ELEM_T) || !defined(ACCUM_T) || !defined(BATCH_DIMS) || \
    !defined(NUM_THREADS)
#error "ELEM_T, ACCUM_T, BATCH_DIMS and NUM_THREADS come from the host"
#endif
using elem_t = ELEM_T;    // of q, k, v and out
using accum_t = ACCUM_T;  // of scores, maxima, sums and lse: float or double
constexpr int kBatchDims = BATCH_DIMS;
constexpr int kNumThreads = NUM_THREADS;

using index_t = long long;

// Limit of the distance between a query and the keys. Sums of such a number and a bound
// (left, right) of twice that fit into 64 bits.
constexpr index_t kFar = index_t(1) << 61;

// Strides of one array in elements; 0 for axes that are broadcast or absent. The last
// axis of q, k and v is contiguous.
struct operand_t {
  index_t batch[kBatchDims];
  index_t head, row, col;

  // The matrix of (batch entry, head).
  __device__ index_t offset(const index_t (&batch_index)[kBatchDims],
                            index_t head_index) const {
    index_t sum = head_index * head;
#pragma unroll
    for (int axis = 0; axis < kBatchDims; ++axis)
      sum += batch_index[axis] * batch[axis];
    return sum;
  }
};

// PARAMS of _attention/gpu/params.py is the same struct on the host, field by field.
struct params_t {
  index_t batch_size, num_heads, group_size, seqlen_q, seqlen_k, head_dim, head_dim_v;
  // Query i sees keys [i + offset - left, i + offset + right].
  index_t left, right;
  // 1: add key length - query length of the batch entry to the query offset.
  index_t offset_from_lengths;
  index_t keys_of_part;  // with KEY_PARTS, where splits of the keys are a batch axis
  double scale, softcap;
  index_t batch_shape[kBatchDims];
  operand_t q, k, v, out, bias, mask, sinks, alibi_slopes;
  operand_t query_offsets, query_lengths, key_lengths;
  // With KEY_PARTS, the first batch axis: the offset of head 0 is the index of the
  // split, and `head` the number of heads over all batch entries.
  operand_t part;
#if SCORE_FUNCTION || MASK_FUNCTION
  functions_t<accum_t> functions;  // their arguments, for each call
#endif
};

// The coordinates of a block: tile `tile` of `num_tiles` of a head of a batch entry.
struct tile_coord_t {
  index_t tile, head, kv_head, row_of_heads;  // the last: batch entry and head as one
  index_t batch[kBatchDims];
  bool exists;  // the grid is rounded up

  tile_coord_t() = default;
  __device__ tile_coord_t(const params_t& params, index_t index, index_t num_tiles) {
    row_of_heads = divide(index, num_tiles);
    tile = index - row_of_heads * num_tiles;
    find_head(params);
  }
  // The first tile of a head.
  __device__ tile_coord_t(const params_t& params, index_t row)
      : tile(0), row_of_heads(row) {
    find_head(params);
  }
  // Derives the others from row_of_heads.
  __device__ void find_head(const params_t& params) {
    index_t rest = divide(row_of_heads, params.num_heads);
    head = row_of_heads - rest * params.num_heads;
    kv_head = divide(head, params.group_size);
    exists = rest < params.batch_size;
#pragma unroll
    for (int axis = kBatchDims - 1; axis > 0; --axis) {
      const index_t next = divide(rest, params.batch_shape[axis]);
      batch[axis] = rest - next * params.batch_shape[axis];
      rest = next;
    }
    batch[0] = rest;
  }

  // Element (batch entry, head, 0, 0) of an array with query heads.
  template <typename T> __device__ T* at(T* x, const operand_t& operand) const {
    return x + operand.offset(batch, head);
  }
  // The same for an array of keys or values.
  template <typename T> __device__ T* at_kv(T* x, const operand_t& operand) const {
    return x + operand.offset(batch, kv_head);
  }
};

// The index of this block; two axes, because one axis of the grid may be too short.
__device__ __forceinline__ index_t block_index() {
  return blockIdx.x + index_t(gridDim.x) * blockIdx.y;
}

// SPDX-License-Identifier: MIT
// attention_values: writes the product P v to out, for naive and safe.
//
// Algorithm  out = O where O = P v (matmul before this kernel) is finite. Elsewhere the
//            sum is computed again without hidden keys: in the matmul, 0 times an
//            infinity or NaN of theirs has spoilt it.
// Grid       1-D, one thread per element of out
// Memory     global: O and out once; where recomputed, a row of P and a column of v
// Numbers    sums in accum_t; P and O in elem_t, v and out in VALUE_T
// Limits     none
#include "attention/score/score.cuh"

#ifndef VALUE_T
#error "VALUE_T, the type of v and out, comes from the host"
#endif
using value_t = VALUE_T;

__device__ __forceinline__ accum_t product_of_seen(const elem_t* p, const value_t* v,
                                                   index_t row_stride,
                                                   index_t seqlen_k) {
  accum_t sum = 0;
  for (index_t j = 0; j < seqlen_k; ++j) {
    const accum_t p_j = to<accum_t>(p[j]);
    if (!is_unseen(p_j)) sum += p_j * to<accum_t>(v[j * row_stride]);
    if (is_nan(sum)) break;  // and stays so
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_values(
    const elem_t* __restrict__ p,   // (batch, heads, queries, keys), contiguous
    const elem_t* __restrict__ o,   // (batch, heads, queries, head_dim_v), contiguous
    const value_t* __restrict__ v,  // (batch, kv heads, keys, head_dim_v), any strides
    value_t* __restrict__ out,      // (batch, heads, queries, head_dim_v)
    const __grid_constant__ params_t params) {
  const index_t element = block_index() * kNumThreads + threadIdx.x;
  const index_t row = divide(element, params.head_dim_v);
  const index_t column = element - row * params.head_dim_v;
  const tile_coord_t at(params, row, params.seqlen_q);
  if (!at.exists) return;

  accum_t sum = to<accum_t>(o[element]);
  if (!is_finite(sum)) {
    sum = product_of_seen(p + row * params.seqlen_k,
                          at.at_kv(v, params.v) + column * params.v.col, params.v.row,
                          params.seqlen_k);
  }
  at.at(out, params.out)[at.tile * params.out.row + column * params.out.col] =
      to<value_t>(sum);
}

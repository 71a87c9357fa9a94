// SPDX-License-Identifier: MIT
// attention_vjp_sections_f64_sum: dq of a section from what splits of loops over keys
// have left.
//
// Algorithm  dq = scale factor sum of the splits
// Grid       1-D, one thread per element
// Memory     global: the sums once
// Numbers    float64, in order: the same bits in every run
// Limits     none
#include "attention/fp64/sections.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_vjp_sections_f64_sum(
        const double* __restrict__ sums,     // (split, entry, query, column)
        const accum_t* __restrict__ factor,  // as delta
        grad_t* __restrict__ dq,
        int* __restrict__ found,  // 1: something is not finite
        SCORE_PARAMETERS, const __grid_constant__ grads_t grads,
        const __grid_constant__ grads_t of_dq,
        const __grid_constant__ section_t section) {
  const index_t size = section.num_rows * params.head_dim;
  const index_t num_entries = section.num_entries();
  const index_t n = block_index() * kNumThreads + threadIdx.x;
  const index_t entry = divide(n, size);
  if (entry >= num_entries) return;
  const index_t own = divide(n - entry * size, params.head_dim);
  const index_t d = n - entry * size - own * params.head_dim;
  const tile_coord_t at = entry_of(params, grads, section, entry);
  double sum = 0;
#pragma unroll 8
  for (index_t split = 0; split < section.num_splits; ++split) {
    sum += sums[split * num_entries * size + n];
  }
  const index_t i = section.first_row + own;
  sum *= factor[at.row_of_heads * params.seqlen_q + i] * params.scale;
  if (!is_finite(sum)) *found = 1;
  dq[locate(of_dq.kept, at.row_of_heads).of[1] + i * of_dq.row[0] + d * of_dq.col[0]] =
      sum;
}

// SPDX-License-Identifier: MIT
// attention_vjp_mma_dq: dq from the sums of attention_vjp_mma.
//
// Algorithm  dq = factor * sums, reordered from register layout to rows
// Grid       1-D, one block per block of queries of a slot
// Memory     global: sums and dq once
// Numbers    float, rounded once
// Limits     none
#include "attention/sm80/backward_dq_sums.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_vjp_mma_dq(
    const float* __restrict__ sums,  // backward.cuh
    elem_t* __restrict__ dq,         // (slots / heads, heads, queries, head_dim)
    const index_t num_slots,
    const index_t batch_step,  // strides of dq
    const index_t head_step, const index_t row_step, found_t* __restrict__ found,
    const __grid_constant__ params_t params) {
  const index_t num_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const index_t slot = divide(block_index(), num_blocks);
  const index_t i0 = (block_index() - slot * num_blocks) * kBlockM;
  if (slot >= num_slots) return;
  const index_t entry = divide(slot, params.num_heads);
  elem_t* const target = dq + entry * batch_step +
                         (slot - entry * params.num_heads) * head_step + i0 * row_step;
  const float* const from = sums + block_index() * (kBlockM * kHeadDim);
  const float factor = unfactor_of(factor_of(found), static_cast<float>(params.scale));
  const int num_rows = static_cast<int>(clamp(params.seqlen_q - i0, 0, kBlockM));
  const int dim = static_cast<int>(params.head_dim);
  const bool aligned = has_aligned_rows(target, row_step, dim);
  float nonfinite = 0;
  // A thread takes 8 columns of rows r and r + 8 of a tile: the numbers of four lanes.
  for (int n = threadIdx.x; n < kBlockM * kHeadDim / 16; n += kNumThreads) {
    const int tile = n / 8, r = n % 8;
    float x[2][8];
    load_rows_of_sums(x, from + tile * 128, r);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of_sums(tile) + 8 * half + r, column = column_of_sums(tile);
      if (row >= num_rows || column >= dim) continue;
      elem_t* const to_row = target + row * row_step + column;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        nonfinite = fmaf(x[half][e], 0, nonfinite);
        x[half][e] *= factor;
      }
      if (aligned) {
        const float (&y)[8] = x[half];
        *reinterpret_cast<uint4*>(to_row) =
            make_uint4(pair16_t::from(y[0], y[1]), pair16_t::from(y[2], y[3]),
                       pair16_t::from(y[4], y[5]), pair16_t::from(y[6], y[7]));
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (column + e < dim) to_row[e] = to<elem_t>(x[half][e]);
        }
      }
    }
  }
  if (nonfinite != 0) found->nonfinite = 1;
}

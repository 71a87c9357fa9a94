// SPDX-License-Identifier: MIT
// attention_vjp_mma_split_finish: dq and the statistics of queries, of loops over keys
// that several blocks shared.
//
// Algorithm  dq = factor sum of the splits' dq, where the factor comes from the sum of
//            their totals, as in attention_vjp_mma_split_queries without LOOP_SPLITS
// Grid       a warp per query of an entry, rounded up to whole granules; lanes across
//            head_dim
// Memory     global: the sums of each split once; dq and statistics once
// Numbers    float32, in a fixed order of sums: the same bits in every run
// Limits     as attention_vjp_mma_split_queries
#include "attention/sm80/fp32_backward.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_vjp_mma_split_finish(
        const float* __restrict__ sums,    // (splits, entries, queries, head_dim)
        const float* __restrict__ totals,  // (splits, entries, queries)
        const float* __restrict__ lse,     // (batch, heads, queries)
        const float* __restrict__ delta,   // as lse, contiguous
        float* __restrict__ stats,         // fp32_backward.cuh
        found_t* __restrict__ found, LOOP_PARAMETERS grad_t* __restrict__ dq,
        SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  const index_t rows = (params.seqlen_q + kGranule - 1) / kGranule * kGranule;
  const index_t row = block_index() * kNumWarps + warp_index();
  const index_t kept_index = divide(row, rows);
  if (kept_index >= grads.num_kept || found->nonfinite != 0) return;
  const int i = static_cast<int>(row - kept_index * rows);
  const bool exists = i < params.seqlen_q;

  float factor = 1;
  {
    const tile_coord_t at =
        grads.entry(params, locate(grads.kept, kept_index).of[0], 0);
    float log_sum = infinity<float>(), delta_of = 0;
    if (exists) {
      const index_t among_rows = at.row_of_heads * params.seqlen_q + i;
      log_sum = log_sum_of(at.at(lse, grads.lse)[i * grads.lse.row]);
      delta_of = delta[among_rows];
      float total = 0;
#pragma unroll 1
      for (index_t n = 0; n < num_splits; ++n) {
        total += totals[n * grads.num_kept * params.seqlen_q + among_rows];
      }
      if constexpr (kHasSinks) {
        total += total_of_sink(scores_t(at, SCORE_ARGUMENTS), log_sum);
      }
      factor = factor_of(total, log_sum);
    }
    if (lane_index() == 0) {
      const index_t granule =
          at.row_of_heads * granules_of(params.seqlen_q) + i / kGranule;
      float* const to = stats + granule * (3 * kGranule) + i % kGranule;
      to[0] = log_sum;
      to[kGranule] = delta_of;
      to[2 * kGranule] = factor;
    }
  }
  if (!exists) return;
  const index_t of_split = grads.num_kept * params.seqlen_q * params.head_dim;
  const float* const of_row =
      sums + (kept_index * params.seqlen_q + i) * params.head_dim;
  // Found again: kept across the sums it costs registers.
  grad_t* const out = dq + locate(grads.kept, kept_index).of[1] + i * grads.row[0];
  bool nonfinite = false;
#pragma unroll 1
  for (int d = lane_index(); d < params.head_dim; d += kWarpSize) {
    float sum = 0;
    for (index_t n = 0; n < num_splits; ++n) sum += of_row[n * of_split + d];
    nonfinite |= !is_finite(sum * factor);
    out[d * grads.col[0]] = to<grad_t>(sum * factor);
  }
  if (nonfinite) found->nonfinite = 1;
}

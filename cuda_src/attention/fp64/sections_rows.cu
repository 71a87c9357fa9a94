// SPDX-License-Identifier: MIT
// attention_vjp_sections_f64_rows: factors of the queries of a section, and their terms
// of dsinks, from the totals of P.
//
// Algorithm  backward_row.cuh
// Grid       1-D, one block per entry of the section and kRows queries
// Memory     global: totals once
// Numbers    float64, in a fixed order of sums: the same bits in every run
// Limits     none
#include "attention/fp64/backward_row.cuh"
#include "attention/fp64/sections.cuh"
#include "common/reduce.cuh"

constexpr int kRows = kWarpSize, kSharers = kNumThreads / kRows;

extern "C" __global__ void __launch_bounds__(kNumThreads, 4)
    attention_vjp_sections_f64_rows(
        ROW_PARAMETERS, const double* __restrict__ totals,
        accum_t* __restrict__ factor,      // as delta
        accum_t* __restrict__ sink_terms,  // as delta, or null
        SCORE_PARAMETERS, const __grid_constant__ grads_t grads,
        const __grid_constant__ section_t section) {
  __shared__ double sums[kSharers][kRows];
  const index_t tiles = (section.num_rows + kRows - 1) / kRows;
  const index_t entry = divide(block_index(), tiles);
  if (entry >= section.num_entries()) return;
  const int row = threadIdx.x % kRows, sharer = threadIdx.x / kRows;
  const index_t own = (block_index() - entry * tiles) * kRows + row;
  const index_t i = section.first_row + own;
  const tile_coord_t at = entry_of(params, grads, section, entry);
  const scores_t scores(at, SCORE_ARGUMENTS);
  double sum = 0;
  if (own < section.num_rows) {
    const double* const x = totals + entry * section.num_parts * section.rows + own;
    const index_t i0 = square_of(i);
    const range_t seen = keys_of_square(scores, params, i0);
#pragma unroll 2
    for (index_t part = sharer; part < section.num_parts; part += kSharers) {
      const index_t j0 = square_of(part * section.part_size);
      const bool has =
          meets(seen, j0) || meets(queries_of_square(scores, params, j0), i0);
      sum += has ? x[part * section.rows] : 0;
    }
  }
  sums[sharer][row] = sum;
  __syncthreads();
  if (sharer > 0 || own >= section.num_rows || i >= params.seqlen_q) return;
#pragma unroll
  for (int n = 1; n < kSharers; ++n) sum += sums[n][row];
  const double lse_i = at.at(lse, grads.lse)[i * grads.lse.row];
  const bool counts = scores.is_query(i) && scores.sink() != -infinity<double>();
  const double sink = counts ? exp_diff_exact(scores.sink(), lse_i) : 0;
  const index_t among_rows = at.row_of_heads * params.seqlen_q + i;
  const double own_factor = factor_of(sum + sink, lse_i);
  factor[among_rows] = own_factor;
  if (kHasSinks && sink_terms != nullptr) {
    sink_terms[among_rows] = counts ? -sink * own_factor * delta[among_rows] : 0;
  }
}

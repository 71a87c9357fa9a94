// SPDX-License-Identifier: MIT
// attention_vjp_sections_f64_queries: dq of the queries of a section, in float64.
//
// Algorithm  dq = scale factor dS k
// Grid       1-D, one block per entry of the section, tile of queries and tile of
//            columns, which are fastest; with LOOP_SPLITS several share the keys, and
//            attention_vjp_sections_f64_sum adds what they leave
// Tiles      products.cuh
// Memory     global: dS once per tile of columns, k once per tile of queries, mostly
//            from L2; dq once, and once more for each kRunSteps
// Numbers    float64, in a fixed order of sums: the same bits in every run. If a
//            gradient is not finite, `found` asks for the fallback
// Limits     none
#include "attention/fp64/sections.cuh"
#include "attention/fp64/sections_sums.cuh"
#include "attention/simt/loop_splits.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_sections_f64_queries(
        const elem_t* __restrict__ k, const double* __restrict__ score_grads,
        const accum_t* __restrict__ factor,  // as delta
        grad_t* dq,               // or sums of splits: (split, entry, query, column)
        int* __restrict__ found,  // 1: something is not finite
        SCORE_PARAMETERS, const __grid_constant__ grads_t grads,
        const __grid_constant__ grads_t of_dq,
        const __grid_constant__ section_t section) {
  const index_t tiles_d = (params.head_dim + kBlockN - 1) / kBlockN;
  const index_t tiles_q = (section.num_rows + kBlockM - 1) / kBlockM;
  const index_t num_splits = kSplitsLoop ? section.num_splits : 1;
  const index_t split = split_index(num_splits);
  const index_t work = work_index(num_splits);
  const index_t row_tile = divide(work, tiles_d);
  const index_t entry = divide(row_tile, tiles_q);
  if (entry >= section.num_entries()) return;
  const index_t d0 = (work - row_tile * tiles_d) * kBlockN;
  const index_t i_own = (row_tile - entry * tiles_q) * kBlockM;
  const index_t i0 = section.first_row + i_own;
  const tile_coord_t at = entry_of(params, grads, section, entry);
  index_t first, last;
  {
    const scores_t scores(at, SCORE_ARGUMENTS);
    const range_t keys = keys_of_square(scores, params, square_of(i0));
    const range_t loop = loop_over(keys, 0, params.seqlen_k);
    first = loop.first;
    last = loop.last;
    if constexpr (kSplitsLoop) take_steps(first, last, split, num_splits);
  }
  const int num_steps = static_cast<int>((last - first + kStep - 1) / kStep);
  const int num_keys = static_cast<int>(last - first);
  const int num_cols = static_cast<int>(params.head_dim - d0);
  copies_t<kBlockM, kStep> own;
  copies_t<kStep, kBlockN> rows;
  own.begin(score_grads + section.matrix(entry) + i_own * section.cols + first,
            section.cols);
  rows.begin(at.at_kv(k, params.k) + first * params.k.row + d0, params.k.row);
  const auto fetch = [&](double* stage, int step) {
    own.template copy<true>(stage, section.cols, kStep);
    rows.copy(stage + kSecondAt, params.k.row, kStep * params.k.row,
              num_keys - kStep * step, num_cols);
  };
  ring_t ring;
  ring.begin(num_steps, fetch);
  const int num_own = static_cast<int>(smaller(section.num_rows - i_own, kBlockM));
  const index_t row = kSplitsLoop ? params.head_dim : of_dq.row[0];
  const index_t col = kSplitsLoop ? 1 : of_dq.col[0];
  grad_t* to = dq + d0 * col;
  if constexpr (kSplitsLoop) {
    const index_t num_entries = section.num_entries();
    to += ((split * num_entries + entry) * section.num_rows + i_own) * row;
  } else {
    to += locate(of_dq.kept, at.row_of_heads).of[1] + i0 * row;
  }
  const double* const factor_of = factor + at.row_of_heads * params.seqlen_q + i0;
  bool nonfinite = false;
  int step = 0;
  do {
    sums_t sums;
    clear(sums);
    const int end = min(step + kRunSteps, num_steps);
    multiply<kByRows, kBySlots, false, 0>(sums, ring, step, end, fetch);
    const sums_place_t place = {to, row, col, num_own, num_cols};
    nonfinite |= store_sums(sums, place, step > 0, [&](int i) {
      return kSplitsLoop ? 1 : factor_of[i] * params.scale;
    });
    step = end;
  } while (step < num_steps);
  if (nonfinite) *found = 1;
}

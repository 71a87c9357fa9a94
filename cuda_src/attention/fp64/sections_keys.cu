// SPDX-License-Identifier: MIT
// attention_vjp_sections_f64_keys: dk and dv, or what a section adds to them, in
// float64.
//
// Algorithm  dv += P^T factor dO,  dk += scale dS^T factor q
// Grid       1-D, one block per entry of dk and dv in the section, tile of keys,
//            gradient and tile of columns, which are fastest; with LOOP_SPLITS several
//            share the queries
// Tiles      products.cuh
// Memory     global: P and dS once per tile of columns, q and dO once per tile of keys,
//            mostly from L2; dk and dv once, and once more for each kRunSteps
// Numbers    float64, in a fixed order of sums: the same bits in every run. If a
//            gradient is not finite, `found` asks for the fallback
// Limits     none
#include "attention/fp64/sections.cuh"
#include "attention/fp64/sections_sums.cuh"
#include "attention/simt/loop_splits.cuh"

struct block_t {
  // The gradient that the block writes.
  offsets_t<3> kept;
  grad_t* to;
  index_t row, col;
  double scale;
  int num_rows;
  // For the thread that computes the others; in shared memory, since registers are
  // scarce.
  index_t kept_index, j0, d0, split;
  // Of an entry that it sums.
  int num_queries;
  const double *first, *second, *factor;
};

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_sections_f64_keys(
        const elem_t* __restrict__ q, const elem_t* __restrict__ dout,
        const double* __restrict__ weights, const double* __restrict__ score_grads,
        const accum_t* __restrict__ factor,  // as delta
        grad_t* dk,                          // as k, summed over entries
        grad_t* dv,                          // as v, summed over entries
        int* __restrict__ found,             // 1: something is not finite
        SCORE_PARAMETERS, const __grid_constant__ grads_t grads,
        const __grid_constant__ section_t section) {
  __shared__ block_t block;
  const index_t tiles_dv = (params.head_dim_v + kBlockN - 1) / kBlockN;
  const index_t tiles_d = tiles_dv + (params.head_dim + kBlockN - 1) / kBlockN;
  const index_t tiles_k = (params.seqlen_k + kBlockM - 1) / kBlockM;
  const index_t num_splits = kSplitsLoop ? section.num_splits : 1;
  const index_t split = split_index(num_splits);
  const index_t work = work_index(num_splits);
  const index_t row_tile = divide(work, tiles_d);
  const index_t kept_index = divide(row_tile, tiles_k);
  if (kept_index >= section.num_kept) return;
  const index_t tile_d = work - row_tile * tiles_d;
  const bool is_dv = tile_d < tiles_dv;
  const index_t d0 = (is_dv ? tile_d : tile_d - tiles_dv) * kBlockN;
  const index_t j0 = (row_tile - kept_index * tiles_k) * kBlockM;
  const int dim = static_cast<int>(is_dv ? params.head_dim_v : params.head_dim);
  const int num_cols = dim - static_cast<int>(d0);
  if (threadIdx.x == 0) {
    const offsets_t<3> kept = locate(grads.kept, section.first_kept + kept_index);
    block.kept = kept;
    block.row = is_dv ? grads.row[1] : grads.row[0];
    block.col = is_dv ? grads.col[1] : grads.col[0];
    block.scale = is_dv ? 1 : params.scale;
    block.num_rows = static_cast<int>(smaller(params.seqlen_k - j0, kBlockM));
    block.kept_index = kept_index;
    block.j0 = j0;
    block.d0 = d0;
    block.split = split;
    block.to = is_dv ? dv + kept.of[2] : dk + kept.of[1];
    block.to += j0 * block.row + d0 * block.col;
    if constexpr (kSplitsLoop) {
      block.to += split * grads.num_kept * params.seqlen_k * dim;
    }
  }
  __syncthreads();  // the first part of `block` is complete

  bool nonfinite = false, adds = section.adds;
  int run = 0;  // steps of the sums
  sums_t sums;
  clear(sums);
  const auto store = [&] {
    const sums_place_t place = {block.to, block.row, block.col, block.num_rows,
                                num_cols};
    const double scale = block.scale;
    nonfinite |= store_sums(sums, place, adds, [&](int) { return scale; });
    clear(sums);
    adds = true;
    run = 0;
  };
#pragma unroll 1
  for (index_t summed = 0; summed < section.num_summed; ++summed) {
    if (threadIdx.x == 0) {
      const tile_coord_t at =
          grads.entry(params, block.kept.of[0], section.first_summed + summed);
      const scores_t scores(at, SCORE_ARGUMENTS);
      const range_t seen = queries_of_square(scores, params, square_of(block.j0));
      auto [first, last] =
          loop_over(seen, section.first_row, section.first_row + section.num_rows);
      if constexpr (kSplitsLoop) take_steps(first, last, block.split, num_splits);
      block.num_queries = static_cast<int>(last - first);
      block.first = (is_dv ? weights : score_grads) +
                    section.matrix(block.kept_index * section.num_summed + summed) +
                    (first - section.first_row) * section.cols + block.j0;
      block.second = is_dv ? at.at(dout, grads.dout) + first * grads.dout.row
                           : at.at(q, params.q) + first * params.q.row;
      block.second += block.d0;
      block.factor = factor + at.row_of_heads * params.seqlen_q + first;
    }
    __syncthreads();  // `block` is complete
    const int num_steps = (block.num_queries + kStep - 1) / kStep;
    const index_t row = is_dv ? grads.dout.row : params.q.row;
    copies_t<kStep, kBlockM> first;
    copies_t<kStep, kBlockN> second;
    first.begin(block.first, section.cols);
    second.begin(block.second, row);
    const auto fetch = [&](double* stage, int step) {
      const int from = kStep * step, left = block.num_queries - from;
      first.template copy<true>(stage, section.cols, kStep * section.cols);
      second.copy(stage + kSecondAt, row, kStep * row, left, num_cols);
      const int n = threadIdx.x;
      if (n < kStep) {
        ptx::copy_or_fill<8>(
            static_cast<unsigned>(__cvta_generic_to_shared(stage + kFactorsAt + n)),
            block.factor + (n < left ? from + n : 0), n < left ? 8 : 0);
      }
    };
    ring_t ring;
    ring.begin(num_steps, fetch);
    int step = 0;
#pragma unroll 1
    while (step < num_steps) {
      const int end = min(step + kRunSteps - run, num_steps);
      run += end - step;
      multiply<kBySlots, kBySlots, true, 0>(sums, ring, step, end, fetch);
      step = end;
      if (run == kRunSteps) store();
    }
    ring.end();
  }
  if (run > 0 || !adds) store();
  if (nonfinite) *found = 1;
}

// SPDX-License-Identifier: MIT
// attention_vjp_few_f64_totals: sums of weights of few float64 queries on tensor cores,
// of entries that blocks share, for few_backward.cu.
//
// Algorithm  total = sum exp(s - lse) over the keys of a split, s = score(q k^T)
// Grid       1-D, one block per split of an entry
// Memory     global: q of each split, k once
// Numbers    float64; the same bits in every run
// Limits     as attention_vjp_few_f64
#include "attention/fp64/few_backward.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_few_f64_totals(const elem_t* __restrict__ q,
                                 const elem_t* __restrict__ k,
                                 const accum_t* __restrict__ lse,
                                 accum_t* __restrict__ totals,  // few_backward.cuh
                                 const index_t num_splits, SCORE_PARAMETERS,
                                 const __grid_constant__ few_grads_t grads) {
  __shared__ rows_t rows;
  __shared__ exp2_table_t table;
  __shared__ double of_warps[kWarps][kRows];
  split_t split(num_splits, params.seqlen_k);
  const tile_coord_t at(params, split.entry);
  if (!at.exists) return;
  const scores_t scores(at, SCORE_ARGUMENTS);
  split.last_key = static_cast<int>(scores.keys_of(0, params.seqlen_q).last);
  copy_rows<kRows, kDim>(shared_rows(0), at.at(q, params.q), params.q.row,
                         params.seqlen_q, static_cast<int>(params.head_dim));
  ptx::commit_copy_group();
  if (threadIdx.x < kWarpSize) table.fill(kLog2e);
  if (threadIdx.x < kRows) {
    const bool exists = threadIdx.x < params.seqlen_q;
    rows.lse[threadIdx.x] =
        exists ? at.at(lse, grads.lse)[threadIdx.x * grads.lse.row] : kNoRow;
  }
  ptx::wait_copy_groups<0>();
  __syncthreads();  // q and `rows` are complete

  double sums[kRowTiles][2] = {};
  const exp2_t exp2(table);
  walk_totals(sums, split, at.at_kv(k, params.k), rows, scores,
              scores.mask_bounds(0, 0), params, exp2);
  sum_totals(sums, of_warps);
  if (threadIdx.x < params.seqlen_q) {
    const index_t row = at.row_of_heads * params.seqlen_q + threadIdx.x;
    totals[row * num_splits + split.number] = of_warps[0][threadIdx.x];
  }
}

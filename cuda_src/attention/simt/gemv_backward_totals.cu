// SPDX-License-Identifier: MIT
// attention_vjp_gemv_totals: sums of weights of float32 and float64 entries that blocks
// share, for gemv_backward.cu.
//
// Algorithm  total = sum exp(s - lse) over the keys of a split, s = score(q k^T)
// Grid       1-D, one block per split of an entry
// Memory     global: q of each split, k once
// Numbers    all in accum_t; the same bits in every run
// Limits     as attention_vjp_gemv
#include "attention/simt/gemv_backward.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_gemv_totals(const elem_t* __restrict__ q,
                              const elem_t* __restrict__ k,
                              const accum_t* __restrict__ lse,
                              accum_t* __restrict__ totals,  // gemv_backward.cuh
                              const index_t num_splits, SCORE_PARAMETERS,
                              const __grid_constant__ gemv_grads_t grads) {
  const int warp = warp_of_entry();
  const split_t split(num_splits, params.seqlen_k);
  const tile_coord_t at(params, split.entry);
  if (!at.exists) return;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const matrix_t<const elem_t> rows_q(at.at(q, params.q), params.q.row,
                                      params.head_dim);
  const matrix_t<const elem_t> rows_k(at.at_kv(k, params.k), params.k.row,
                                      params.head_dim);
  const mask_bounds_t bounds = scores.mask_bounds(0, 0);
  const int last = min(static_cast<int>(scores.keys_of(0, kQueries).last), split.last);

  query_t queries[kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    row_t<kPartsK> row;
    row.load(rows_q, i, true);
    row.unpack(queries[i].q);
    queries[i].lse = at.at(lse, grads.lse)[i * grads.lse.row];
    queries[i].delta = 0;
    queries[i].set_factor(0, 1);
  }
  const owned_t owned(queries);
  accum_t own_totals[kOwned] = {}, of_queries[kQueries];
#pragma unroll 1
  for (int first = split.first + warp * kSpan; first < last; first += kStep) {
    keys_t keys;
    keys.load_k(rows_k, scores, first + key_of_warp(), last);
    add_weights(own_totals, keys, first + key_of_warp(), queries, owned,
                static_cast<accum_t>(params.scale), scores, bounds);
  }
  from_owners(of_queries, own_totals);
  __shared__ accum_t of_warps[kWarps][kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    of_warps[warp][i] = over_keys(of_queries[i], add);
  }
  __syncthreads();
  if (threadIdx.x < kQueries) {
    accum_t total = 0;
#pragma unroll
    for (int n = 0; n < kWarps; ++n) total += of_warps[n][threadIdx.x];
    totals[(at.row_of_heads * kQueries + threadIdx.x) * num_splits + split.number] =
        total;
  }
}

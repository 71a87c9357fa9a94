// SPDX-License-Identifier: MIT
// attention_naive: P = softmax(S) by the textbook formula, in place, with S in memory.
//
// Algorithm  S = q k^T (matmul before this kernel), p_ij = exp(s_ij) / sum_j exp(s_ij),
//            and O = P v (matmul after it). No maximum is subtracted, and every step
//            rounds to elem_t: exp overflows, in float16 from 11.09 on. That is the
//            lesson.
// Grid       one block per row of S
// Memory     global: S read and P written in its place, twice
// Numbers    elem_t at each step; lse in accum_t
// Limits     none
#include "attention/score/score.cuh"
#include "common/reduce.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_naive(
    elem_t* __restrict__ scores_to_p,  // (batch, heads, queries, keys), contiguous
    accum_t* __restrict__ lse,         // (batch, heads, queries), or null
    SCORE_PARAMETERS) {
  const tile_coord_t at(params, block_index(), params.seqlen_q);
  if (!at.exists) return;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const index_t i = at.tile;
  const range_t keys = scores.keys_of(i, i + 1);
  elem_t* row = scores_to_p + block_index() * params.seqlen_k;

  accum_t l = 0;
  bool any = false;
  for (index_t j = threadIdx.x; j < params.seqlen_k; j += kNumThreads) {
    const bool inside = keys.first <= j && j < keys.last;
    const accum_t s = inside ? scores(to<accum_t>(row[j]), i, j) : -infinity<accum_t>();
    const accum_t p = step(weight(s, 0));
    any = any || !is_unseen(p);
    l = step(l + p);
    row[j] = to<elem_t>(p);
  }
  l = group_reduce<kNumThreads>(l, [](accum_t a, accum_t b) { return step(a + b); });
  any = __syncthreads_or(any);
  if (kHasSinks && scores.is_query(i)) l = step(l + step(exp_of(scores.sink())));

  for (index_t j = threadIdx.x; j < params.seqlen_k; j += kNumThreads) {
    // A row that sees no key stays 0; one whose exponentials are all 0 becomes 0 / 0.
    if (any) row[j] = to<elem_t>(to<accum_t>(row[j]) / l);
  }
  if (lse != nullptr && threadIdx.x == 0) {
    lse[block_index()] =
        any ? log_of(l) : scores.finish(i, -infinity<accum_t>(), 0).lse;
  }
}

// SPDX-License-Identifier: MIT
// attention_safe: P = softmax(S) with the maximum subtracted, in place, S in memory.
//
// Algorithm  S = q k^T (matmul before this kernel), then three sweeps over each row,
//                m_i = max_j s_ij,  l_i = sum_j exp(s_ij - m_i),
//                p_ij = exp(s_ij - m_i) / l_i,  lse_i = m_i + log l_i,
//            and O = P v (matmul after it).
// Grid       one block per row of S
// Memory     global: S read three times, written twice
// Numbers    elem_t of this kernel is float or double: S and P have at least 32 bits
// Limits     none
#include "attention/score/score.cuh"
#include "common/reduce.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_safe(
    elem_t* __restrict__ scores_to_p,  // (batch, heads, queries, keys), contiguous
    accum_t* __restrict__ lse,         // (batch, heads, queries), or null
    SCORE_PARAMETERS) {
  const tile_coord_t at(params, block_index(), params.seqlen_q);
  if (!at.exists) return;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const index_t i = at.tile;
  const range_t keys = scores.keys_of(i, i + 1);
  elem_t* row = scores_to_p + block_index() * params.seqlen_k;

  accum_t m = -infinity<accum_t>();
  for (index_t j = threadIdx.x; j < params.seqlen_k; j += kNumThreads) {
    const bool inside = keys.first <= j && j < keys.last;
    const accum_t s = inside ? scores(to<accum_t>(row[j]), i, j) : -infinity<accum_t>();
    m = larger(m, s);
    row[j] = to<elem_t>(s);
  }
  m = group_reduce<kNumThreads>(m, [](accum_t a, accum_t b) { return larger(a, b); });

  accum_t l = 0;
  for (index_t j = threadIdx.x; j < params.seqlen_k; j += kNumThreads) {
    l += weight(to<accum_t>(row[j]), m);
  }
  l = group_reduce<kNumThreads>(l, [](accum_t a, accum_t b) { return a + b; });

  const finished_t finished = scores.finish(i, m, l);
  for (index_t j = threadIdx.x; j < params.seqlen_k; j += kNumThreads) {
    row[j] = to<elem_t>(weight(to<accum_t>(row[j]), m) * finished.inverse);
  }
  if (lse != nullptr && threadIdx.x == 0) lse[block_index()] = finished.lse;
}

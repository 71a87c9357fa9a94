// SPDX-License-Identifier: MIT
// attention_vjp_bias: dbias. A block computes one tile of it, from all the scores that
// share it.
//
// Algorithm  dbias = sum of dS = P (dO v^T - delta) over the entries that share the
//            bias, and over queries (SUM_QUERIES) or keys (SUM_KEYS) where all share it
// Grid       1-D, one block per entry of the bias and tile of queries and keys, without
//            the axis that is summed
// Tiles      tile.cuh; queries are owned, keys are looped over
// Memory     global: the inputs of a tile of scores; each element of dbias once
// Numbers    all in accum_t, in a fixed order: the same bits in every run
// Limits     none
#include "attention/simt/tile.cuh"

#if !defined(SUM_QUERIES) || !defined(SUM_KEYS)
#error "SUM_QUERIES and SUM_KEYS come from the host"
#endif
constexpr bool kSumQueries = SUM_QUERIES, kSumKeys = SUM_KEYS;
static_assert(!(kSumQueries && kSumKeys) && !kSingle);

// Adds the tile of dS at (i0, j0).
__device__ __forceinline__ void add_tile(tile_t& sums, const rows_t& q, const rows_t& k,
                                         const rows_t& v, const rows_t& dout,
                                         accum_t* smem_own, accum_t* smem_other,
                                         const scores_t& scores, index_t i0, index_t j0,
                                         const accum_t* lse_rows, index_t lse_stride,
                                         const accum_t* delta_rows) {
  tile_t s, dp;
  dot<false>(dp, dout, smem_own, v, smem_other);
  dot<false>(s, q, smem_own, k, smem_other);
  const mask_bounds_t bounds = scores.mask_bounds(i0, j0);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const index_t i = i0 + smaller(own_row(r), q.num_rows - 1);
    const accum_t lse_i = lse_rows[i * lse_stride], delta_i = delta_rows[i];
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      differentiate<true>(s[r][c], dp[r][c], bounds.sees(own_row(r), other_row(c)),
                          scores, i, j0 + other_row(c), lse_i, delta_i);
      sums[r][c] += dp[r][c];
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_bias(BACKWARD_PARAMETERS, ROW_PARAMETERS,
                       grad_t* __restrict__ dbias,  // as the bias, summed over entries
                       REPAIR_PARAMETERS SCORE_PARAMETERS,
                       const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(16) unsigned char smem[];
  accum_t* const smem_own = reinterpret_cast<accum_t*>(smem);
  accum_t* const smem_other = smem_own + kBlockM * kStride;
  accum_t* const smem_sums = smem_other + kBlockN * kStride;

  if (!REPAIR_IS_ASKED) return;
  const index_t all_row_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const index_t all_key_tiles = (params.seqlen_k + kBlockN - 1) / kBlockN;
  const index_t row_tiles = kSumQueries ? 1 : all_row_tiles;
  const index_t key_tiles = kSumKeys ? 1 : all_key_tiles;
  const index_t kept_index = divide(block_index(), row_tiles * key_tiles);
  if (kept_index >= grads.num_kept) return;
  const index_t tile = block_index() - kept_index * row_tiles * key_tiles;
  const index_t row_tile = divide(tile, key_tiles);
  const index_t first_i = row_tile * kBlockM;
  const index_t first_j = (tile - row_tile * key_tiles) * kBlockN;
  const auto kept = locate(grads.kept, kept_index);

  tile_t sums = {};
  two_level_sum_t<accum_t, tile_t> two_level;
  two_level.begin();
  for (index_t summed = 0; summed < grads.num_summed; ++summed) {
    const tile_coord_t at = grads.entry(params, kept.of[0], summed);
    const scores_t scores(at, SCORE_ARGUMENTS);
    range_t queries = {first_i, first_i + 1};
    if (kSumQueries) queries = scores.queries_of(first_j, first_j + kBlockN);
    for (index_t i0 = queries.first / kBlockM * kBlockM; i0 < queries.last;
         i0 += kBlockM) {
      const index_t num_rows = smaller(kBlockM, params.seqlen_q - i0);
      const rows_t q_rows(at.at(q, params.q) + i0 * params.q.row, params.q.row,
                          num_rows, params.head_dim);
      const rows_t dout_rows(at.at(dout, grads.dout) + i0 * grads.dout.row,
                             grads.dout.row, num_rows, params.head_dim_v);
      range_t keys = scores.keys_of(i0, i0 + num_rows);
      if (!kSumKeys) {
        // This tile, if the queries see any key of it.
        const bool any = keys.first < first_j + kBlockN && first_j < keys.last;
        keys = {first_j, any ? smaller(first_j + kBlockN, keys.last) : first_j};
      }
      for (index_t j0 = keys.first / kBlockN * kBlockN; j0 < keys.last; j0 += kBlockN) {
        const rows_t k_rows(at.at_kv(k, params.k) + j0 * params.k.row, params.k.row,
                            keys.last - j0, params.head_dim);
        const rows_t v_rows(at.at_kv(v, params.v) + j0 * params.v.row, params.v.row,
                            keys.last - j0, params.head_dim_v);
        add_tile(sums, q_rows, k_rows, v_rows, dout_rows, smem_own, smem_other, scores,
                 i0, j0, at.at(lse, grads.lse), grads.lse.row,
                 delta + at.row_of_heads * params.seqlen_q);
        if (kSumKeys && run_ends_before(j0 + kBlockN, keys.last)) two_level.end(sums);
      }
      if (kSumQueries && (i0 / kBlockM + 1) % kRunTiles == 0) two_level.end(sums);
    }
  }
  two_level.finish(sums);

  grad_t* const out = dbias + kept.of[1];
  if (!kSumQueries && !kSumKeys) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const index_t i = first_i + own_row(r), j = first_j + other_row(c);
        if (i < params.seqlen_q && j < params.seqlen_k) {
          out[i * grads.row[0] + j * grads.col[0]] = to<grad_t>(sums[r][c]);
        }
      }
    }
    return;
  }
  // One thread per sum, over the rows or the columns of the tile.
  store_tile(smem_sums, sums);
  __syncthreads();  // the tile is complete
  const index_t first = kSumQueries ? first_j : first_i;
  const index_t length = kSumQueries ? params.seqlen_k : params.seqlen_q;
  const index_t stride = kSumQueries ? grads.col[0] : grads.row[0];
  for (int n = threadIdx.x; n < (kSumQueries ? kBlockN : kBlockM); n += kNumThreads) {
    accum_t total = 0;
    for (int m = 0; m < (kSumQueries ? kBlockM : kBlockN); ++m) {
      total += smem_sums[kSumQueries ? m * kStrideW + n : n * kStrideW + m];
    }
    if (first + n < length) out[(first + n) * stride] = to<grad_t>(total);
  }
}

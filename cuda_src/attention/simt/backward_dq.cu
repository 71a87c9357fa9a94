// SPDX-License-Identifier: MIT
// attention_vjp_queries: dq. A block keeps one tile of queries and loops over the keys.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2) without its atomics:
//            scores are computed here for dq, and again for dk and dv. For each tile of
//            keys:
//                dP = dO v^T,  S = score(q k^T),  P = exp(S - lse)
//                dS = P (dP - delta) score'(q k^T),  dq += scale dS k
// Grid       1-D, one block per tile of queries, chunk of columns and entry of q; last
//            tiles first, since causal ones are longest
// Tiles      tile.cuh; q and dO are owned, k and v are looped over
// Memory     global: q, dO and dq once; k and v once per block, mostly from L2
// Numbers    all in accum_t; dS k of a tile is summed on its own before it is added to
//            dq. A fixed order of sums: the same bits in every run
// Limits     none
#include "attention/simt/tile.cuh"

// If lse comes from a kernel with other rounding errors (see backward_preprocess.cu),
// an additional pass over the keys recomputes it, for the next kernel as well.
#ifdef OWN_LSE
constexpr bool kMakesLse = true;
#define OWN_LSE_PARAMETER accum_t* __restrict__ own_lse, /* as delta */
#else
constexpr bool kMakesLse = false;
#define OWN_LSE_PARAMETER
constexpr accum_t* own_lse = nullptr;
#endif

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_queries(BACKWARD_PARAMETERS, ROW_PARAMETERS,
                          grad_t* __restrict__ dq,  // as q, summed over entries
                          REPAIR_PARAMETERS OWN_LSE_PARAMETER SCORE_PARAMETERS,
                          const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(16) unsigned char smem[];
  accum_t* const smem_q = reinterpret_cast<accum_t*>(smem);
  accum_t* const smem_dout = smem_q + (kSingle ? kBlockM * kStride : 0);
  accum_t* const smem_kv = smem_dout + kBlockM * kStride;
  accum_t* const smem_ds = smem_kv + kBlockN * kStride;

  const index_t num_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const index_t num_chunks = kSingle ? 1 : (params.head_dim + kChunk - 1) / kChunk;
  if (!REPAIR_IS_ASKED) return;
  index_t block = block_index();
  do {
    const index_t from_last = divide(block, grads.num_kept * num_chunks);
    const index_t of_tile = block - from_last * grads.num_kept * num_chunks;
    if (from_last >= num_tiles) return;
    const index_t i0 = (num_tiles - 1 - from_last) * kBlockM;
    const index_t kept_index = divide(of_tile, num_chunks);
    const column_t c0 =
        static_cast<column_t>(of_tile - kept_index * num_chunks) * kChunk;
    const index_t num_rows = smaller(kBlockM, params.seqlen_q - i0);
    const auto kept = locate(grads.kept, kept_index);

    sums_t sums = {};
    two_level_sum_t<accum_t, sums_t> two_level;
    two_level.begin();
    for (index_t summed = 0; summed < grads.num_summed; ++summed) {
      const tile_coord_t at = grads.entry(params, kept.of[0], summed);
      const scores_t scores(at, SCORE_ARGUMENTS);
      const rows_t q_rows(at.at(q, params.q) + i0 * params.q.row, params.q.row,
                          num_rows, params.head_dim);
      const rows_t dout_rows(at.at(dout, grads.dout) + i0 * grads.dout.row,
                             grads.dout.row, num_rows, params.head_dim_v);
      const accum_t* const lse_rows = at.at(lse, grads.lse);
      const accum_t* const delta_rows = delta + at.row_of_heads * params.seqlen_q;
      accum_t row_lse[kRows], row_delta[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const index_t i = smaller(i0 + own_row(r), params.seqlen_q - 1);
        row_lse[r] = lse_rows[i * grads.lse.row];
        row_delta[r] = delta_rows[i];
      }
      __syncthreads();  // all threads have read the tiles of the previous entry
      if (kSingle) {
        load_rows<kBlockM>(smem_q, q_rows, 0);
        load_rows<kBlockM>(smem_dout, dout_rows, 0);
      }

      const range_t keys = scores.keys_of(i0, i0 + num_rows);
      if constexpr (kMakesLse) {
        accum_t total[kRows] = {};
        two_level_sum_t<accum_t, accum_t[kRows]> two_level_total;
        two_level_total.begin();
        for (index_t j0 = keys.first / kBlockN * kBlockN; j0 < keys.last;
             j0 += kBlockN) {
          if (scores.shown(i0, i0 + num_rows, j0, j0 + kBlockN) == kShowsNone) continue;
          const rows_t k_rows(at.at_kv(k, params.k) + j0 * params.k.row, params.k.row,
                              keys.last - j0, params.head_dim);
          tile_t s;
          dot<kSingle>(s, q_rows, smem_q, k_rows, smem_kv);
          const mask_bounds_t bounds = scores.mask_bounds(i0, j0);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kCols; ++c) {
              if (!bounds.sees(own_row(r), other_row(c))) continue;
              const accum_t score = scores(s[r][c], i0 + own_row(r), j0 + other_row(c));
              total[r] += exp_diff(score, row_lse[r]);
            }
          }
          if (run_ends_before(j0 + kBlockN, keys.last)) two_level_total.end(total);
        }
        two_level_total.finish(total);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const accum_t sum = warp_reduce<kColThreads>(
              total[r], [](accum_t a, accum_t b) { return a + b; });
          const accum_t own =
              row_lse[r] + log_of(sum + exp_diff(scores.sink(), row_lse[r]));
          if (is_same_lse(own, row_lse[r])) row_lse[r] = own;
          const index_t i = i0 + own_row(r);
          if (i < params.seqlen_q && thread_col() == 0) {
            own_lse[at.row_of_heads * params.seqlen_q + i] = row_lse[r];
          }
        }
      }
      for (index_t j0 = keys.first / kBlockN * kBlockN; j0 < keys.last; j0 += kBlockN) {
        if (scores.shown(i0, i0 + num_rows, j0, j0 + kBlockN) == kShowsNone) {
          if (run_ends_before(j0 + kBlockN, keys.last)) two_level.end(sums);
          continue;
        }
        const rows_t k_rows(at.at_kv(k, params.k) + j0 * params.k.row, params.k.row,
                            keys.last - j0, params.head_dim);
        const rows_t v_rows(at.at_kv(v, params.v) + j0 * params.v.row, params.v.row,
                            keys.last - j0, params.head_dim_v);
        tile_t s, dp;
        dot<kSingle>(dp, dout_rows, smem_dout, v_rows, smem_kv);
        const accum_t nonfinite = dot<kSingle>(s, q_rows, smem_q, k_rows, smem_kv);
        const mask_bounds_t bounds = scores.mask_bounds(i0, j0);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int c = 0; c < kCols; ++c) {
            differentiate(s[r][c], dp[r][c], bounds.sees(own_row(r), other_row(c)),
                          scores, i0 + own_row(r), j0 + other_row(c), row_lse[r],
                          row_delta[r]);
          }
        }
        store_tile(smem_ds, dp);
        accumulate<kSingle>(sums, smem_ds, k_rows, c0, smem_kv, nonfinite);
        if (run_ends_before(j0 + kBlockN, keys.last)) two_level.end(sums);
      }
    }
    two_level.finish(sums);
    store_sums(dq + kept.of[1] + i0 * grads.row[0], grads.row[0], grads.col[0], sums,
               static_cast<accum_t>(params.scale), num_rows, params.head_dim, c0);
    block += gridDim.x;
  } while (kRepairs);
}

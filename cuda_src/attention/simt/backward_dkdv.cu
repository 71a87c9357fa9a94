// SPDX-License-Identifier: MIT
// attention_vjp_keys: dk and dv. A block keeps one tile of keys and loops over the
// queries of all heads and batch entries that use them.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2). For each tile of
//            queries, with transposed scores:
//                S = score(k q^T),  P = exp(S - lse),  dP = v dO^T
//                dS = P (dP - delta) score'(k q^T),  dv += P dO,  dk += scale dS q
// Grid       1-D, one block per tile of keys, chunk of columns and entry of k and v;
//            first tiles first, since causal ones are longest
// Tiles      tile.cuh; k and v are owned, q and dO are looped over
// Memory     global: k, v, dk and dv once; q and dO once or twice per block, mostly L2
// Numbers    all in accum_t; the products of a tile are summed on their own before they
//            are added to dk and dv. A fixed order of sums: the same bits in every run
// Limits     none
#include "attention/simt/tile.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_keys(BACKWARD_PARAMETERS, ROW_PARAMETERS,
                       grad_t* __restrict__ dk,  // as k, summed over entries
                       grad_t* __restrict__ dv,  // as v, summed over entries
                       REPAIR_PARAMETERS SCORE_PARAMETERS,
                       const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(16) unsigned char smem[];
  accum_t* const smem_k = reinterpret_cast<accum_t*>(smem);
  accum_t* const smem_v = smem_k + (kSingle ? kBlockM * kStride : 0);
  accum_t* const smem_other = smem_v + kBlockM * kStride;
  accum_t* const smem_w = smem_other + kBlockN * kStride;

  const index_t num_tiles = (params.seqlen_k + kBlockM - 1) / kBlockM;
  const index_t widest =
      params.head_dim < params.head_dim_v ? params.head_dim_v : params.head_dim;
  const index_t num_chunks = kSingle ? 1 : (widest + kChunk - 1) / kChunk;
  if (!REPAIR_IS_ASKED) return;
  index_t block = block_index();
  do {
    const index_t tile = divide(block, grads.num_kept * num_chunks);
    const index_t of_tile = block - tile * grads.num_kept * num_chunks;
    if (tile >= num_tiles) return;
    const index_t j0 = tile * kBlockM;
    const index_t kept_index = divide(of_tile, num_chunks);
    const column_t c0 =
        static_cast<column_t>(of_tile - kept_index * num_chunks) * kChunk;
    const index_t num_keys = smaller(kBlockM, params.seqlen_k - j0);
    const auto kept = locate(grads.kept, kept_index);

    sums_t sums_k = {}, sums_v = {};
    two_level_sum_t<accum_t, sums_t> two_level_k, two_level_v;
    two_level_k.begin();
    two_level_v.begin();
    const auto end_run = [&] {
      two_level_k.end(sums_k);
      two_level_v.end(sums_v);
    };
    for (index_t summed = 0; summed < grads.num_summed; ++summed) {
      const tile_coord_t at = grads.entry(params, kept.of[0], summed);
      const scores_t scores(at, SCORE_ARGUMENTS);
      const rows_t k_rows(at.at_kv(k, params.k) + j0 * params.k.row, params.k.row,
                          num_keys, params.head_dim);
      const rows_t v_rows(at.at_kv(v, params.v) + j0 * params.v.row, params.v.row,
                          num_keys, params.head_dim_v);
      const accum_t* const lse_rows = at.at(lse, grads.lse);
      const accum_t* const delta_rows = delta + at.row_of_heads * params.seqlen_q;
      __syncthreads();  // all threads have read the tiles of the previous entry
      if (kSingle) {
        load_rows<kBlockM>(smem_k, k_rows, 0);
        load_rows<kBlockM>(smem_v, v_rows, 0);
      }

      const range_t queries = scores.queries_of(j0, j0 + num_keys);
      for (index_t i0 = queries.first / kBlockN * kBlockN; i0 < queries.last;
           i0 += kBlockN) {
        if (scores.shown(i0, i0 + kBlockN, j0, j0 + num_keys) == kShowsNone) {
          if (run_ends_before(i0 + kBlockN, queries.last)) end_run();
          continue;
        }
        const rows_t q_rows(at.at(q, params.q) + i0 * params.q.row, params.q.row,
                            queries.last - i0, params.head_dim);
        const rows_t dout_rows(at.at(dout, grads.dout) + i0 * grads.dout.row,
                               grads.dout.row, queries.last - i0, params.head_dim_v);
        tile_t s, dp;
        dot<kSingle>(s, k_rows, smem_k, q_rows, smem_other);
        const accum_t nonfinite =
            dot<kSingle>(dp, v_rows, smem_v, dout_rows, smem_other);
        const mask_bounds_t bounds = scores.mask_bounds(i0, j0);
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
          const index_t i = smaller(i0 + other_row(c), params.seqlen_q - 1);
          const accum_t lse_i = lse_rows[i * grads.lse.row], delta_i = delta_rows[i];
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            differentiate(s[r][c], dp[r][c], bounds.sees(other_row(c), own_row(r)),
                          scores, i, j0 + own_row(r), lse_i, delta_i);
          }
        }
        store_tile(smem_w, s);
        accumulate<kSingle>(sums_v, smem_w, dout_rows, c0, smem_other, nonfinite);
        __syncthreads();  // all threads have read P before dS replaces it
        store_tile(smem_w, dp);
        accumulate<false>(sums_k, smem_w, q_rows, c0, smem_other, 0);
        if (run_ends_before(i0 + kBlockN, queries.last)) end_run();
      }
    }
    two_level_k.finish(sums_k);
    two_level_v.finish(sums_v);
    // A fallback may compute only one, where entries share k or v but not both.
    if (!kRepairs || dk != nullptr) {
      store_sums(dk + kept.of[1] + j0 * grads.row[0], grads.row[0], grads.col[0],
                 sums_k, static_cast<accum_t>(params.scale), num_keys, params.head_dim,
                 c0);
    }
    if (!kRepairs || dv != nullptr) {
      store_sums(dv + kept.of[2] + j0 * grads.row[1], grads.row[1], grads.col[1],
                 sums_v, 1, num_keys, params.head_dim_v, c0);
    }
    block += gridDim.x;
  } while (kRepairs);
}

// SPDX-License-Identifier: MIT
// attention_vjp_mma_queries: dq with the same bits in every run, by mma.sync.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), the part of a tile of
//            queries, over tiles of keys from first to last:
//                S = q k^T,  P = exp(scale S - lse),  dP = dO v^T,  dS = P (dP - delta)
//                dq += dS k
//            P and dS are accumulators of one product and, in the same registers, the A
//            operand of the next. attention_vjp_mma, without dq, computes dk and dv
// Grid       1-D, one block per tile of queries of a kept entry; last tiles first,
//            since causal ones are longest
// Tiles      q, dO    kBlockM x kHeadDim   shared, loaded once per entry
//            k, v     kBlockN x kHeadDim   shared, kStages of each
//            S, dP, dq  a warp has 16 queries
// Memory     global: q, dO and dq once; k and v once per tile of queries, mostly L2
// Numbers    S, P, dP, dS and sums in float; dS rounded to elem_t before its product
// Limits     as attention_vjp_mma
#include "attention/sm80/backward_rescan.cuh"
#include "ptx/registers.cuh"

#if !defined(STAGES) || !defined(STATS_M)
#error "STAGES and STATS_M come from the host"
#endif
constexpr int kStages = STAGES;
constexpr int kStatsM = STATS_M;  // kBlockM of attention_vjp_mma_rows
static_assert(kBlockM == 16 * kNumWarps && (kStages == 1 || kStages == 2));
constexpr int kKeyTiles = kBlockN / 8;
constexpr unsigned kBytesN = kBlockN * kHeadDim * 2, kBytesM = kBlockM * kHeadDim * 2;

// What all threads need of an entry; in shared memory for lack of registers.
struct view_t {
  const elem_t *k, *v;  // key 0
  int first, last;      // keys
  int aligned_k, aligned_v;
  seen_t seen;
};

// The first of this lane's two queries, within the tile.
__device__ __forceinline__ int row() { return warp_index() * 16 + lane_index() / 4; }

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_mma_queries(BACKWARD_PARAMETERS,
                              const float* __restrict__ stats,  // backward.cuh
                              found_t* __restrict__ found,
                              grad_t* __restrict__ dq,  // as q, summed over entries
                              SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ __align__(16) unsigned char view_memory[sizeof(view_t)];
  view_t& view = reinterpret_cast<view_t&>(view_memory);
  unsigned char* const smem_q = smem;
  unsigned char* const smem_dout = smem_q + kBytesM;
  unsigned char* const smem_k = smem_dout + kBytesM;
  unsigned char* const smem_v = smem_k + kStages * kBytesN;

  const index_t num_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  __shared__ bad_rows_t bad;
  if (kCareful && found->nonfinite == 0) return;
  const differentiate_t differentiate(params, found);
  index_t number = block_index();
  do {
    const index_t from_last = divide(number, grads.num_kept);
    const index_t kept_index = number - from_last * grads.num_kept;
    if (from_last >= num_tiles) return;
    const int i0 = static_cast<int>(num_tiles - 1 - from_last) * kBlockM;
    const index_t entry = locate(grads.kept, kept_index).of[0];

    frag_t<1, kHeadDim / 8> sums;
    clear(sums);
    for (index_t summed_index = 0; summed_index < grads.num_summed; ++summed_index) {
      const tile_coord_t at = grads.entry(params, entry, summed_index);
      const scores_t scores(at, SCORE_ARGUMENTS);
      const int num_rows =
          static_cast<int>(clamp(scores.num_queries() - i0, 0, index_t(kBlockM)));
      __syncthreads();  // all warps have read the tiles of the previous entry
      if (threadIdx.x == 0) {
        const range_t keys = scores.keys_of(i0, i0 + num_rows);
        view.first = static_cast<int>(keys.first) / kBlockN * kBlockN;
        view.last = static_cast<int>(keys.last);
        if (num_rows == 0 || keys.first >= keys.last) view.first = view.last;
        view.seen = seen_t(scores.mask_bounds(i0, 0));
        view.k = at.at_kv(k, params.k);
        view.v = at.at_kv(v, params.v);
        view.aligned_k = has_aligned_rows(view.k, params.k.row, params.head_dim);
        view.aligned_v = has_aligned_rows(view.v, params.v.row, params.head_dim_v);
      }
      __syncthreads();  // the view is complete
      int j0 = view.first;
      if (j0 >= view.last) continue;
      {
        const elem_t* const q_rows = at.at(q, params.q) + i0 * params.q.row;
        const elem_t* const dout_rows = at.at(dout, grads.dout) + i0 * grads.dout.row;
        load_tile<kBlockM, kHeadDim>(
            smem_q, q_rows, params.q.row, num_rows, static_cast<int>(params.head_dim),
            has_aligned_rows(q_rows, params.q.row, params.head_dim),
            tile_t<kHeadDim>::offset);
        load_tile<kBlockM, kHeadDim>(
            smem_dout, dout_rows, grads.dout.row, num_rows,
            static_cast<int>(params.head_dim_v),
            has_aligned_rows(dout_rows, grads.dout.row, params.head_dim_v),
            tile_t<kHeadDim>::offset);
      }
      float lse[2], delta[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = i0 + row() + 8 * r;
        const index_t num_blocks = (params.seqlen_q + kStatsM - 1) / kStatsM;
        const float* const from =
            stats + (at.row_of_heads * num_blocks + i / kStatsM) * (2 * kStatsM) +
            i % kStatsM;
        const bool exists = i < params.seqlen_q;
        lse[r] = exists ? from[0] : infinity<float>();
        delta[r] = exists ? from[kStatsM] : 0.f;
      }
      auto load_keys = [&](int j) {
        const int num_keys = view.last - j;
        if (num_keys > 0) {
          const unsigned stage = kStages == 2 ? j / kBlockN % 2 : 0;
          load_tile<kBlockN, kHeadDim>(smem_k + stage * kBytesN,
                                       view.k + j * params.k.row, params.k.row,
                                       num_keys, static_cast<int>(params.head_dim),
                                       view.aligned_k, tile_t<kHeadDim>::offset);
          load_tile<kBlockN, kHeadDim>(smem_v + stage * kBytesN,
                                       view.v + j * params.v.row, params.v.row,
                                       num_keys, static_cast<int>(params.head_dim_v),
                                       view.aligned_v, tile_t<kHeadDim>::offset);
        }
        ptx::commit_copies();
      };
      auto shown = [&](int j) {
        return scores.shown(i0, i0 + num_rows, j, j + kBlockN);
      };
      shown_tiles_t<kBlockN> tiles;
      j0 = tiles.next(j0, view.last, shown);
      load_keys(j0);
      const int first = j0;
#pragma unroll 1
      for (; j0 < view.last; j0 += tiles.distance) {
        tiles.step<kStages == 2>(j0, view.last, shown);
        const unsigned stage = kStages == 2 ? j0 / kBlockN % 2 : 0;
        const unsigned stage_k = shared_address(smem_k) + stage * kBytesN;
        const unsigned stage_v = shared_address(smem_v) + stage * kBytesN;
        ptx::wait_copy_groups<0>();
        __syncthreads();  // this tile has arrived; the previous one has been read
        if constexpr (kCareful) {
          if (j0 == (kHasMaskFunction ? first : view.first)) clear_rows(bad.queries);
          clear_rows(bad.keys);
          __syncthreads();  // the rows are cleared
          clean_tile<kBlockM>(smem_q, bad.queries);
          clean_tile<kBlockM>(smem_dout, bad.queries);
          clean_tile<kBlockN>(smem_k + stage * kBytesN, bad.keys);
          clean_tile<kBlockN>(smem_v + stage * kBytesN, bad.keys);
          __syncthreads();  // the tiles are scrubbed
          if (sees_bad_rows(bad, view.seen.at(0, j0), scores, i0, j0)) {
            found->still_nonfinite = 1;
          }
        }
        if constexpr (kStages == 2) load_keys(j0 + tiles.distance);

        frag_t<1, kKeyTiles> s, dp;
        multiply_scores(s, left<kHeadDim>(shared_address(smem_q), warp_index() * 16),
                        right<kHeadDim>(stage_k, 0));
        multiply_scores(dp,
                        left<kHeadDim>(shared_address(smem_dout), warp_index() * 16),
                        right<kHeadDim>(stage_v, 0));
        const int first_row = row(), first_column = lane_index() % 4 * 2;
        const mask_bounds_t bounds = view.seen.at(0, j0);
        auto finish = [&](auto sees) {
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            if constexpr (kHasTerms) ptx::compiler_fence();  // no prefetch
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int i = first_row + e / 2 * 8, j = first_column + 8 * n + e % 2;
              differentiate(s[0][n][e], dp[0][n][e], sees(i, j), scores,
                            index_t(i0 + i), index_t(j0 + j), lse[e / 2], delta[e / 2]);
            }
          }
        };
        if (kHasTwoWays && bounds.sees_all(kBlockM, kBlockN)) {
          finish([](int, int) { return true; });
        } else {
          finish([&](int i, int j) { return bounds.sees(i, j); });
        }
        multiply_sums<kBlockN>(
            sums, [&](unsigned (&x)[1][4], int step) { as_operand(x, dp, step); },
            summed<kHeadDim>(stage_k, 0));
        if constexpr (kStages == 1) {
          __syncthreads();  // all warps have read the tile
          load_keys(j0 + tiles.distance);
        }
      }
    }

    const float unfactor =
        unfactor_of(differentiate.factor, static_cast<float>(params.scale));
    const int num_rows = static_cast<int>(min(params.seqlen_q - i0, index_t(kBlockM)));
    const float nonfinite =
        store_sums(dq + locate(grads.kept, kept_index).of[1] + i0 * grads.row[0],
                   grads.row[0], grads.col[0], sums, unfactor, warp_index() * 16, 0,
                   num_rows, static_cast<int>(params.head_dim));
    if (nonfinite != 0) (kCareful ? found->still_nonfinite : found->nonfinite) = 1;
    number += gridDim.x;
  } while (kCareful);
}

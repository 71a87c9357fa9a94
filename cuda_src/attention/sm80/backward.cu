// SPDX-License-Identifier: MIT
// attention_vjp_mma: dq, dk and dv by warp-level tensor core products (mma.sync).
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2). A block owns a tile of
//            keys and loops over blocks of queries, with transposed scores:
//                S = k q^T,  P = exp(scale S - lse),  dP = v dO^T,  dS = P (dP - delta)
//                dv += P dO,  dk += dS q,  dq += dS^T k
// Grid       1-D, one block per tile of keys of a kept entry. Entries form sections
//            whose queries fit into the L2 cache; first tiles first, since causal ones
//            are longest
// Tiles      k, v     kBlockN x kHeadDim   shared, loaded once
//            q, dO    kBlockM x kHeadDim   shared, kStages of each
//            dS       kBlockN x kBlockM    shared; P too, if kWarpsM > 1
//            S, dP    a warp has 16 kKeyTiles keys and kBlockM / kWarpsM queries
//            dk, dv   a warp has the same keys and kHeadDim / kWarpsM columns. With
//                     kWarpsM = 1, accumulators of P and dS are, in the same registers,
//                     the A operand of the next product
//            dq       a warp has 32 queries and some columns
// Memory     global: k, v, dk and dv once; q and dO once per tile of keys, mostly from
//            L2, by cp.async; dq is added to float sums by red
// Numbers    S, P, dP, dS and sums in float; P and dS rounded to elem_t before
//            products. The order of the sums of dq varies from run to run; dk and dv
//            always have the same bits, and are the only results without kMakesDq
// Limits     head_dim and head_dim_v up to kHeadDim, padded with zeros; fewer than 2^29
//            queries and keys; sm_80 or newer. Infinities and NaN that a query does not
//            see still turn into NaN, as does a dS too large for elem_t:
//            found->nonfinite then asks for another kernel
#include "attention/sm80/backward_rescan.cuh"
#include "attention/sm80/backward_dq_sums.cuh"
#include "ptx/registers.cuh"

#if !defined(WARPS_M) || !defined(STAGES) || !defined(MAKES_DQ)
#error "WARPS_M, STAGES and MAKES_DQ come from the host"
#endif
// Otherwise backward_dq.cu computes dq, with the same bits in every run.
constexpr bool kMakesDq = MAKES_DQ;
constexpr int kWarpsM = WARPS_M, kWarpsN = kNumWarps / kWarpsM;
constexpr int kStages = STAGES;
constexpr bool kSharesP = kWarpsM > 1;
// Whether tiles that the mask function shows whole have code of their own: it takes
// registers, which a score function leaves none of.
constexpr bool kHasShownWay = kHasMaskFunction && !kHasScoreFunction && !kCareful;
static_assert(kSumWarps == kNumWarps && kWarpsM * kWarpsN == kNumWarps);
static_assert(kStages == 1 || kStages == 2);

// Accumulators per warp: 16 keys by 8 queries, and by 8 columns.
constexpr int kKeyTiles = kBlockN / (16 * kWarpsN);
constexpr int kQueryTiles = kBlockM / (8 * kWarpsM);
constexpr int kColTiles = kHeadDim / (8 * kWarpsM);
static_assert(kKeyTiles * 16 * kWarpsN == kBlockN && kQueryTiles % 2 == 0);

constexpr unsigned kBytesN = kBlockN * kHeadDim * 2, kBytesM = kBlockM * kHeadDim * 2;
constexpr unsigned kBytesDs = kBlockN * kBlockM * 2, kBytesStats = 2 * kBlockM * 4;

// SCHEDULE of _attention/gpu/sm80/backward.py is the same struct on the host.
struct schedule_t {
  index_t section;           // kept entries whose q, dO and dq fit into L2 together
  index_t slot[kBatchDims];  // distance in slots of dq between entries of an axis
};

// What all threads need of a block's keys and of an entry; too much for registers.
struct view_t {
  index_t kept, entry;     // the kept entry, and its first entry of all
  int first_key;           // -1: none, the grid is rounded up
  const elem_t *q, *dout;  // query 0
  const float* stats;
  float* sums;
  int first, last;  // queries
  int aligned_q, aligned_dout;
  seen_t seen;

  __device__ __forceinline__ void set_work_tile(index_t number, const grads_t& grads,
                                                const schedule_t& schedule,
                                                const params_t& params) {
    const index_t num_tiles = (params.seqlen_k + kBlockN - 1) / kBlockN;
    const index_t in_section = schedule.section * num_tiles;
    const index_t section = divide(number, in_section);
    const index_t first = section * schedule.section;
    const index_t rest = number - section * in_section;
    const index_t width = min(schedule.section, grads.num_kept - first);
    const index_t tile = width > 0 ? divide(rest, width) : num_tiles;
    first_key = tile < num_tiles ? static_cast<int>(tile) * kBlockN : -1;
    kept = first + rest - tile * width;
    entry = first_key < 0 ? 0 : locate(grads.kept, kept).of[0];
  }
};

// This warp's first key within the tile.
__device__ __forceinline__ int key_0() {
  return warp_index() / kWarpsM * (16 * kKeyTiles);
}
// This warp's part of a block of queries, or of columns.
__device__ __forceinline__ int part() { return warp_index() % kWarpsM; }

// In memory order.
struct smem_t {
  unsigned char *k, *v, *q, *dout, *ds, *p, *stats;

  __device__ __forceinline__ explicit smem_t(unsigned char* smem) {
    k = smem;
    v = k + kBytesN;
    q = v + kBytesN;
    dout = q + kStages * kBytesM;
    ds = dout + kStages * kBytesM;
    p = ds + kBytesDs;
    stats = p + (kSharesP ? kBytesDs : 0);
  }
};

// A tile of keys, and the loop over blocks of queries.
struct backward_t {
  using scores_frag_t = frag_t<kKeyTiles, kQueryTiles>;
  using sums_t = frag_t<kKeyTiles, kColTiles>;
  using tiles_t = shown_tiles_t<kBlockM>;

  const params_t& params;
  const grads_t& grads;
  const smem_t smem;
  view_t& view;
  bad_rows_t& bad;
  found_t* found;
  const differentiate_t differentiate;

  static __device__ __forceinline__ unsigned stage_of(int i) {
    return kStages == 2 ? i / kBlockM % 2 : 0;
  }

  // --- loads -------------------------------------------------------------------------

  // Loads the tile of keys at j0; keys from `num_keys` on are not read.
  __device__ __forceinline__ void load_kv(const elem_t* k, const elem_t* v, int j0,
                                          index_t num_keys) const {
    const int num_rows = static_cast<int>(clamp(num_keys - j0, 0, kBlockN));
    const int dim = static_cast<int>(params.head_dim);
    const int dim_v = static_cast<int>(params.head_dim_v);
    const tile_coord_t at = grads.entry(params, view.entry, 0);
    const elem_t* const k_rows = at.at_kv(k, params.k) + j0 * params.k.row;
    const elem_t* const v_rows = at.at_kv(v, params.v) + j0 * params.v.row;
    load_tile<kBlockN, kHeadDim>(smem.k, k_rows, params.k.row, num_rows, dim,
                                 has_aligned_rows(k_rows, params.k.row, dim),
                                 tile_t<kHeadDim>::offset);
    load_tile<kBlockN, kHeadDim>(smem.v, v_rows, params.v.row, num_rows, dim_v,
                                 has_aligned_rows(v_rows, params.v.row, dim_v),
                                 tile_t<kHeadDim>::offset);
  }

  // One thread stores what all threads need of an entry.
  __device__ __forceinline__ void set_entry(const tile_coord_t& at,
                                            const scores_t& scores, const elem_t* q,
                                            const elem_t* dout, const float* stats,
                                            float* sums_q,
                                            const schedule_t& schedule) const {
    const int j0 = view.first_key;
    const range_t queries =
        scores.queries_of(j0, min(index_t(j0) + kBlockN, params.seqlen_k));
    view.first = static_cast<int>(queries.first) / kBlockM * kBlockM;
    view.last = static_cast<int>(queries.last);
    if (queries.first >= queries.last) view.first = view.last;
    view.seen = seen_t(scores.mask_bounds(0, j0));
    view.q = at.at(q, params.q);
    view.dout = at.at(dout, grads.dout);
    view.aligned_q = has_aligned_rows(view.q, params.q.row, params.head_dim);
    view.aligned_dout = has_aligned_rows(view.dout, grads.dout.row, params.head_dim_v);
    const index_t num_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
    view.stats = stats + at.row_of_heads * num_blocks * (2 * kBlockM);
    index_t slot = at.head;
#pragma unroll
    for (int axis = 0; axis < kBatchDims; ++axis) {
      slot += at.batch[axis] * schedule.slot[axis];
    }
    view.sums = sums_q + slot * num_blocks * (kBlockM * kHeadDim);
  }

  __device__ __forceinline__ void load_q(int i) const {
    if (i >= view.last) return;
    load_tile<kBlockM, kHeadDim>(smem.q + stage_of(i) * kBytesM,
                                 view.q + i * params.q.row, params.q.row, view.last - i,
                                 static_cast<int>(params.head_dim), view.aligned_q,
                                 tile_t<kHeadDim>::offset);
  }
  __device__ __forceinline__ void load_dout(int i) const {
    if (i >= view.last) return;
    const unsigned stage = stage_of(i);
    load_tile<kBlockM, kHeadDim>(smem.dout + stage * kBytesM,
                                 view.dout + i * grads.dout.row, grads.dout.row,
                                 view.last - i, static_cast<int>(params.head_dim_v),
                                 view.aligned_dout, tile_t<kHeadDim>::offset);
    const int n = thread_index() * 16;
    if (n < kBytesStats) {
      ptx::copy_async_or_zero(shared_address(smem.stats) + stage * kBytesStats + n,
                              view.stats + index_t(i / kBlockM) * (2 * kBlockM) + n / 4,
                              16);
    }
  }
  __device__ __forceinline__ void load_block(int i) const {
    load_q(i);
    load_dout(i);
    ptx::commit_copies();
  }

  // Zeroes nonfinite numbers, in the second pass (backward_rescan.cuh).
  __device__ __forceinline__ void clean_block(const scores_t& scores, int i0) const {
    const unsigned stage = stage_of(i0);
    clear_rows(bad.queries);
    __syncthreads();  // the rows are cleared
    clean_tile<kBlockN>(smem.k, bad.keys);
    clean_tile<kBlockN>(smem.v, bad.keys);
    clean_tile<kBlockM>(smem.q + stage * kBytesM, bad.queries);
    clean_tile<kBlockM>(smem.dout + stage * kBytesM, bad.queries);
    __syncthreads();  // the tiles are scrubbed
    if (sees_bad_rows(bad, view.seen.at(i0, 0), scores, i0, view.first_key)) {
      found->still_nonfinite = 1;
    }
  }

  // --- scores ------------------------------------------------------------------------

  // Turns products into P and dS.
  __device__ __forceinline__ void weigh(scores_frag_t& s, scores_frag_t& dp,
                                        const scores_t& scores, const float* lse,
                                        int i0, bool is_shown) const {
    const int row = key_0() + lane_index() / 4;
    const int column = part() * (8 * kQueryTiles) + lane_index() % 4 * 2;
    const mask_bounds_t bounds = view.seen.at(i0, 0);
    const int first_key = kHasTerms ? view.first_key : 0;
    auto finish = [&](auto sees, auto is_shown) {
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n) {
        if constexpr (kHasTerms) ptx::compiler_fence();  // no prefetch
        const float2 lse_n = *reinterpret_cast<const float2*>(lse + column + 8 * n);
        const float2 delta_n =
            *reinterpret_cast<const float2*>(lse + kBlockM + column + 8 * n);
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = column + 8 * n + e % 2, j = row + 16 * m + e / 2 * 8;
            differentiate.operator()<decltype(is_shown)::kValue>(
                s[m][n][e], dp[m][n][e], sees(i, j), scores, index_t(i0 + i),
                index_t(first_key + j), e % 2 ? lse_n.y : lse_n.x,
                e % 2 ? delta_n.y : delta_n.x);
          }
        }
      }
    };
    if (kHasTwoWays && bounds.sees_all(kBlockM, kBlockN)) {
      finish([](int, int) { return true; }, constant_t<false>());
    } else if (kHasShownWay && is_shown) {
      finish([&](int i, int j) { return bounds.sees(i, j); }, constant_t<true>());
    } else {
      finish([&](int i, int j) { return bounds.sees(i, j); }, constant_t<false>());
    }
  }

  // Stores dS, and P where warps share it, for products of other warps.
  __device__ __forceinline__ void share_weights(const scores_frag_t& s,
                                                const scores_frag_t& dp) const {
    const auto ds_rows =
        stored<kBlockM>(lane_index() % 4 * 4, key_0(), part() * kQueryTiles);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const unsigned offset = ds_rows.at(16 * m + 8 * r, n);
          *reinterpret_cast<unsigned*>(smem.ds + offset) =
              pair16_t::from(dp[m][n][2 * r], dp[m][n][2 * r + 1]);
          if constexpr (kSharesP) {
            *reinterpret_cast<unsigned*>(smem.p + offset) =
                pair16_t::from(s[m][n][2 * r], s[m][n][2 * r + 1]);
          }
        }
      }
    }
    __syncthreads();  // P and dS are complete
  }

  // --- gradients ---------------------------------------------------------------------

  // dv += P dO, dk += dS q for the block at i0. With one stage, the next loads replace
  // what was read last while products continue.
  __device__ __forceinline__ void add_dk_dv(sums_t& sums_k, sums_t& sums_v,
                                            const scores_frag_t& s,
                                            const scores_frag_t& dp, int i0,
                                            const tiles_t& tiles) const {
    const unsigned stage_q = shared_address(smem.q) + stage_of(i0) * kBytesM;
    const unsigned stage_dout = shared_address(smem.dout) + stage_of(i0) * kBytesM;
    auto load_next = [&](auto load) {
      if constexpr (kStages == 1) {
        __syncthreads();  // all warps have read the old contents
        load(i0 + tiles.distance);
        ptx::commit_copies();
      }
    };
    auto next_q = [&](int i) { load_q(i); };
    auto next_dout = [&](int i) { load_dout(i); };
    const auto dout_sums = summed<kHeadDim>(stage_dout, 0, part() * kColTiles);
    const auto q_sums = summed<kHeadDim>(stage_q, 0, part() * kColTiles);
    if constexpr (kSharesP) {
      const auto p_rows = left<kBlockM>(shared_address(smem.p), key_0());
      const auto ds_rows = left<kBlockM>(shared_address(smem.ds), key_0());
      auto load_from = [](const tile_t<kBlockM>& rows) {
        return [&rows](unsigned (&x)[kKeyTiles][4], int step) {
#pragma unroll
          for (int m = 0; m < kKeyTiles; ++m) {
            ptx::ldmatrix_x4(x[m], rows.at(16 * m, 2 * step));
          }
        };
      };
      multiply_sums<kBlockM>(sums_v, load_from(p_rows), dout_sums);
      load_next(next_dout);
      multiply_sums<kBlockM>(sums_k, load_from(ds_rows), q_sums);
    } else {
      multiply_sums<kBlockM>(
          sums_v,
          [&](unsigned (&x)[kKeyTiles][4], int step) { as_operand(x, s, step); },
          dout_sums);
      load_next(next_dout);
      multiply_sums<kBlockM>(
          sums_k,
          [&](unsigned (&x)[kKeyTiles][4], int step) { as_operand(x, dp, step); },
          q_sums);
    }
    load_next(next_q);
  }

  // dq += dS^T k, as many columns at a time as registers allow.
  __device__ __forceinline__ void add_dq(int i0) const {
    constexpr int kAtOnce = kColTilesQ < 4 ? kColTilesQ : 4;
#pragma unroll 1
    for (int first = 0; first < kColTilesQ; first += kAtOnce) {
      frag_t<2, kAtOnce> dq;
      clear(dq);
      const auto ds_columns =
          left_trans<kBlockM>(shared_address(smem.ds), 0, warp_index() / kColWarps * 4);
      multiply_sums<kBlockN>(
          dq,
          [&](unsigned (&x)[2][4], int step) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              ptx::ldmatrix_x4_trans(x[m], ds_columns.at(16 * step, 2 * m));
            }
          },
          summed<kHeadDim>(shared_address(smem.k), 0,
                           warp_index() % kColWarps * kColTilesQ + first));
      float* const target = view.sums + index_t(i0) * kHeadDim +
                            (warp_index() * 2 * kColTilesQ + first) * 128;
      const int lane = lane_index();
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          add_to_sums(target + (m * kColTilesQ + n) * 128, lane, dq[m][n]);
        }
      }
    }
  }

  // Loops over the queries of an entry.
  __device__ __forceinline__ void attend(sums_t& sums_k, sums_t& sums_v,
                                         const scores_t& scores) const {
    auto shown = [&](int i) {
      return scores.shown(i, min(index_t(i + kBlockM), params.seqlen_q), view.first_key,
                          min(index_t(view.first_key + kBlockN), params.seqlen_k));
    };
    tiles_t tiles;
    load_block(tiles.next(view.first, view.last, shown));
    // The first tile is found again: kept across the copies it costs registers.
#pragma unroll 1
    for (int i0 = tiles.next(view.first, view.last, shown); i0 < view.last;
         i0 += tiles.distance) {
      const bool is_shown = tiles.is_whole(i0);
      tiles.step<kStages == 2>(i0, view.last, shown);
      const unsigned stage = stage_of(i0);
      const unsigned stage_q = shared_address(smem.q) + stage * kBytesM;
      const unsigned stage_dout = shared_address(smem.dout) + stage * kBytesM;
      const float* const lse =
          reinterpret_cast<const float*>(smem.stats + stage * kBytesStats);
      ptx::wait_copy_groups<0>();
      // This block has arrived; all warps have read the previous one, and dS.
      __syncthreads();
      if constexpr (kCareful) clean_block(scores, i0);
      if constexpr (kStages == 2) load_block(i0 + tiles.distance);
      scores_frag_t s, dp;
      multiply_scores(s, left<kHeadDim>(shared_address(smem.k), key_0()),
                      right<kHeadDim>(stage_q, part() * (8 * kQueryTiles)));
      multiply_scores(dp, left<kHeadDim>(shared_address(smem.v), key_0()),
                      right<kHeadDim>(stage_dout, part() * (8 * kQueryTiles)));
      weigh(s, dp, scores, lse, i0, is_shown);
      if constexpr (kSharesP || kMakesDq) share_weights(s, dp);
      add_dk_dv(sums_k, sums_v, s, dp, i0, tiles);
      if constexpr (kMakesDq) add_dq(i0);
    }
  }

  __device__ __forceinline__ void store(grad_t* dk, grad_t* dv, const sums_t& sums_k,
                                        const sums_t& sums_v) const {
    const float unfactor =
        unfactor_of(differentiate.factor, static_cast<float>(params.scale));
    const int j0 = view.first_key;
    const int num_keys = static_cast<int>(min(params.seqlen_k - j0, index_t(kBlockN)));
    const int dim = static_cast<int>(params.head_dim);
    const int dim_v = static_cast<int>(params.head_dim_v);
    const auto kept = locate(grads.kept, view.kept);
    const int column = part() * (8 * kColTiles);
    float nonfinite =
        store_sums(dk + kept.of[1] + j0 * grads.row[0], grads.row[0], grads.col[0],
                   sums_k, unfactor, key_0(), column, num_keys, dim);
    nonfinite +=
        store_sums(dv + kept.of[2] + j0 * grads.row[1], grads.row[1], grads.col[1],
                   sums_v, 1 / kFactorP, key_0(), column, num_keys, dim_v);
    if (nonfinite != 0) (kCareful ? found->still_nonfinite : found->nonfinite) = 1;
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_mma(BACKWARD_PARAMETERS,
                      const float* __restrict__ stats,  // backward.cuh
                      float* __restrict__ sums_q,       // backward.cuh
                      found_t* __restrict__ found,
                      const __grid_constant__ schedule_t schedule,
                      grad_t* __restrict__ dk,  // as k, summed over entries
                      grad_t* __restrict__ dv,  // as v, summed over entries
                      SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ __align__(16) unsigned char view_memory[sizeof(view_t)];
  view_t& view = reinterpret_cast<view_t&>(view_memory);
  __shared__ bad_rows_t bad;
  if (kCareful && found->nonfinite == 0) return;
  const backward_t block = {
      params, grads, smem_t(smem), view, bad, found, differentiate_t(params, found)};
  index_t number = block_index();
  do {
    if (kCareful) __syncthreads();  // all warps have finished the previous work tile
    if (threadIdx.x == 0) view.set_work_tile(number, grads, schedule, params);
    __syncthreads();  // the view is complete
    if (view.first_key < 0) return;
    if constexpr (kCareful) clear_rows(bad.keys);
    {
      const int j0 = view.first_key;
      // Padding past all lengths is not even read.
      index_t num_keys = params.seqlen_k;
      if constexpr (kHasKeyLengths) {
        num_keys = 0;
        for (index_t n = 0; n < grads.num_summed; ++n) {
          const scores_t scores(grads.entry(params, view.entry, n), SCORE_ARGUMENTS);
          num_keys = max(num_keys, scores.num_keys());
        }
      }
      block.load_kv(k, v, j0, num_keys);
    }
    backward_t::sums_t sums_k, sums_v;
    clear(sums_k);
    clear(sums_v);
#pragma unroll 1
    for (unsigned summed_index = 0; summed_index < grads.num_summed; ++summed_index) {
      const tile_coord_t at = grads.entry(params, view.entry, summed_index);
      const scores_t scores(at, SCORE_ARGUMENTS);
      __syncthreads();  // all warps have read the blocks of the previous entry
      if (threadIdx.x == 0) {
        block.set_entry(at, scores, q, dout, stats, sums_q, schedule);
      }
      __syncthreads();  // the view is complete
      block.attend(sums_k, sums_v, scores);
    }
    ptx::wait_copy_groups<0>();  // of a tile that no query sees
    block.store(dk, dv, sums_k, sums_v);
    number += gridDim.x;
  } while (kCareful);
}

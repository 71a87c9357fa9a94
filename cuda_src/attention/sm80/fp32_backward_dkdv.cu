// SPDX-License-Identifier: MIT
// attention_vjp_mma_split_keys: dk and dv of float32 by mma.sync.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2). A block owns a tile of
//            keys and loops over granules of queries, with transposed scores:
//                S = k q^T,  P = exp(scale S - lse),  dP = v dO^T,  dS = P (dP - delta)
//                dv += P dO,  dk += dS q
//            P is multiplied by the factor that attention_vjp_mma_split_queries
//            computed for its query
// Grid       1-D, one block per tile of keys of a kept entry; first tiles first, since
//            causal ones are longest
// Tiles      k, v     kBlockN / kGranule operands   shared, loaded once
//            q, dO    one of each            shared, kStages of them
//            S, dP, dk, dv  a warp has 16 kKeyTiles keys, and kColumns of dk and dv
//            S, dP    of each warp           shared, where two share keys
//            With one stage dO comes while S is computed, and q during dv; for dk alone
//            q comes during dP, which is first, and dO during the other products
// Memory     global: k, v, dk and dv once; q and dO once per tile of keys, mostly L2
// Numbers    fp32_backward.cuh; a fixed order of sums: the same bits in every run
// Limits     as attention_vjp_mma_split_queries
#include "attention/sm80/fp32_backward.cuh"

constexpr int kKeyTiles = kBlockN / (16 * kRowWarps), kQueryTiles = kGranule / 8;
constexpr int kGranules = kBlockN / kGranule;
// dk and dv together, or only one of them where registers do not hold both.
#if !defined(MAKES_DK) || !defined(MAKES_DV)
#error "MAKES_DK and MAKES_DV come from the host"
#endif
constexpr bool kMakesDk = MAKES_DK, kMakesDv = MAKES_DV;
constexpr int kHalves = kKeyTiles;
// P is in shared memory while other products are computed, for lack of registers.
constexpr bool kKeepsP = kColumnWarps > 1 && kMakesDk&& kMakesDv;
constexpr int kRegion = kKeepsP ? 4 : 8;
static_assert(kKeyTiles <= 2 && kKeyTiles * 16 * kRowWarps == kBlockN &&
              kGranules * kGranule == kBlockN);
static_assert(kColumnWarps == 1 || kHalves == 1);
constexpr bool kBeginsWithDp = kStages == 1 && kMakesDk && !kMakesDv;
static_assert(!kBeginsWithDp || kHalves == 1);
static_assert(kBlockM == kGranule && kLargestTile % kBlockN == 0);

// What all threads need of a block and of an entry; too much for registers.
struct view_t : bits_of_rows_t<kMaskBits> {
  split_operands_t operands;
  const float* stats;
  index_t kept, entry;  // the kept entry, and its first entry of all
  int j0, first, last;  // first key; range of queries
  seen_t seen;
};

// The first or the second.
template <bool kFirst, typename A, typename B>
__device__ __forceinline__ auto& of_two(A& a, B& b) {
  if constexpr (kFirst) {
    return a;
  } else {
    return b;
  }
}

// The unit of an operand: read early where the whole stage has arrived, unless two
// warps share keys, for then registers do not hold it. With one stage an operand is
// still on its way when the loop begins.
struct unit_t {
  static constexpr bool kEarly = kColumnWarps == 1 && kStages == 2;
  const unsigned char* operand;
  float early;

  __device__ __forceinline__ explicit unit_t(const unsigned char* of)
      : operand(of), early(kEarly ? tile_stats_of(of).from_parts : 0) {}
  __device__ __forceinline__ float operator()() const {
    return kEarly ? early : tile_stats_of(operand).from_parts;
  }
};

// This warp's first key within the tile.
__device__ __forceinline__ int key_0() { return row_warp() * (16 * kKeyTiles); }

// Stores dk and dv of the tile of keys, and reports a number that is not finite.
template <typename SumsK, typename SumsV>
__device__ __forceinline__ void store(grad_t* dk, grad_t* dv, const SumsK& sums_k,
                                      const SumsV& sums_v, const view_t& view,
                                      const params_t& params, const grads_t& grads,
                                      found_t* found) {
  const int j0 = view.j0;
  const int num_keys = static_cast<int>(min(params.seqlen_k - j0, index_t(kBlockN)));
  const auto kept = locate(grads.kept, view.kept);
  float nonfinite = 0;
  if constexpr (kMakesDk) {
    nonfinite += store_sums(
        dk + kept.of[1] + j0 * grads.row[0], grads.row[0], grads.col[0], sums_k,
        static_cast<float>(params.scale) / kLift, key_0(), column_warp() * kColumns,
        num_keys, static_cast<int>(params.head_dim));
  }
  if constexpr (kMakesDv) {
    nonfinite +=
        store_sums(dv + kept.of[2] + j0 * grads.row[1], grads.row[1], grads.col[1],
                   sums_v, 1 / kLift, key_0(), column_warp() * kColumns, num_keys,
                   static_cast<int>(params.head_dim_v));
  }
  if (nonfinite != 0) found->nonfinite = 1;
}

// What all threads need of an entry of which a tile of keys is summed.
__device__ __forceinline__ void begin(view_t& view, const tile_coord_t& at,
                                      const scores_t& scores, const params_t& params,
                                      const unsigned char* operands, const float* stats,
                                      index_t split, index_t num_splits) {
  const int j0 = view.j0;
  const range_t queries =
      scores.queries_of(j0, min(index_t(j0) + kBlockN, params.seqlen_k));
  view.first = static_cast<int>(queries.first) / kGranule * kGranule;
  view.last = static_cast<int>(queries.last);
  if (queries.first >= queries.last) view.first = view.last;
  if constexpr (kSplitsLoop) take_split(view.first, view.last, split, num_splits);
  view.seen = seen_t(scores.mask_bounds(0, j0));
  view.operands = split_operands_t(operands, params, at);
  view.operands.k += index_t(j0 / kGranule) * kBytesOperand;
  view.operands.v += index_t(j0 / kGranule) * kBytesOperand;
  view.stats = stats + at.row_of_heads * granules_of(params.seqlen_q) * (3 * kGranule);
}

// Which keys the mask shows to this lane's queries 8 n + 2 t + e of a granule: g + 8 h
// + 16 m in bit 4 m + 2 h.
using shown_bits_t = unsigned[kQueryTiles][2];

__device__ __forceinline__ void load_shown(shown_bits_t& shown, const view_t& view,
                                           int i0) {
#pragma unroll
  for (int n = 0; n < kQueryTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int g = lane_index() / 4, query = lane_index() % 4 * 2 + 8 * n + e;
      shown[n][e] = view.word(i0 + query, view.j0 + key_0(), g / 2) >> g % 2;
    }
  }
}

// S of queries from i0 on becomes P, and `derivative` its derivatives. of_queries(0, n)
// are the log sums of a tile of queries, of_queries(2, n) their factors.
template <typename OfQueries, int kDerivatives>
__device__ __forceinline__ void weigh_scores(
    frag_t<kKeyTiles, kQueryTiles>& s, frag_t<kKeyTiles, kDerivatives>& derivative,
    const view_t& view, const differentiate_t& differentiate, const scores_t& scores,
    const shown_bits_t& shown, int i0, OfQueries of_queries) {
  const int row = key_0() + lane_index() / 4, column = lane_index() % 4 * 2;
  const mask_bounds_t bounds = view.seen.at(i0, 0);
  const int first_key = kHasTerms ? view.j0 : 0;
  auto weigh = [&](auto sees) {
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      if constexpr (kHasTerms) ptx::compiler_fence();  // no prefetch
      const float2 lse = of_queries(0, n), factor = of_queries(2, n);
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = column + 8 * n + e % 2, j = row + 16 * m + e / 2 * 8;
          float slope = 1;
          const bool is_shown =
              !kMaskBits || shown[n][e % 2] >> (4 * m + e / 2 * 2) & 1;
          const float weight = differentiate.weigh(
              s[m][n][e], sees(i, j) && is_shown, scores, index_t(i0 + i),
              index_t(first_key + j), e % 2 ? lse.y : lse.x, slope);
          if constexpr (kHasDerivative) derivative[m][n][e] = slope;
          s[m][n][e] = weight * (e % 2 ? factor.y : factor.x);
        }
      }
    }
  };
  if (kHasTwoWays && bounds.sees_all(kGranule, kBlockN)) {
    weigh([](int, int) { return true; });
  } else {
    weigh([&](int i, int j) { return bounds.sees(i, j); });
  }
}

// dP of tiles of queries from `first` on becomes dS. of_queries(1, n) are their deltas.
template <typename OfQueries, int kTiles, int kDerivatives>
__device__ __forceinline__ void differentiate_scores(
    frag_t<kKeyTiles, kTiles>& ds, const parts_t<kKeyTiles> (&p)[kApart],
    const frag_t<kKeyTiles, kDerivatives>& derivative, int first,
    OfQueries of_queries) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int tile = first + n;
    const float2 delta = of_queries(1, tile);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float weight = of_parts(p, m, tile, e);
        if constexpr (kHasDerivative) weight *= derivative[m][tile][e];
        ds[m][n][e] = weight * (ds[m][n][e] - (e % 2 ? delta.y : delta.x));
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_mma_split_keys(
        const unsigned char* __restrict__ operands,  // fp32_backward.cuh
        const float* __restrict__ stats,             // fp32_backward.cuh
        found_t* __restrict__ found,
        const index_t section,  // entries whose q and dO fit into L2 together
        LOOP_PARAMETERS grad_t* __restrict__ dk,  // as k, summed over entries
        grad_t* __restrict__ dv,                  // as v, summed over entries
        MASK_BITS_PARAMETER SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ __align__(16) unsigned char view_memory[sizeof(view_t)];
  [[maybe_unused]] __shared__ index_t split;  // of the loop
  view_t& view = reinterpret_cast<view_t&>(view_memory);
  unsigned char* const smem_k = smem;
  unsigned char* const smem_v = smem_k + kGranules * kBytesOperand;
  unsigned char* const stages = smem_v + kGranules * kBytesOperand;
  constexpr unsigned kBytesStage = 2 * kBytesOperand + kBytesStats;
  const exchange_t<2, kKeyTiles, kQueryTiles> exchange = {
      reinterpret_cast<float4*>(stages + kStages * kBytesStage)};

  const index_t num_tiles = (params.seqlen_k + kBlockN - 1) / kBlockN;
  {
    const work_tile_t work(work_index(num_splits), section, grads.num_kept, num_tiles);
    // Another block may just set the flag: make all threads of this one agree.
    if (__syncthreads_or(!work.exists || found->nonfinite != 0)) return;
    if (threadIdx.x == 0) {
      view.kept = work.kept;
      view.entry = locate(grads.kept, work.kept).of[0];
      view.j0 = static_cast<int>(work.tile) * kBlockN;
      if constexpr (kSplitsLoop) split = split_index(num_splits);
    }
    __syncthreads();  // both are stored
  }
  const differentiate_t differentiate(params, found);

  frag_t<kKeyTiles, kMakesDk ? kColumns / 8 : 1> sums_k;
  frag_t<kKeyTiles, kMakesDv ? kColumns / 8 : 1> sums_v;
  clear(sums_k);
  clear(sums_v);
  two_level_sum_t<float, decltype(sums_k), kTwoLevelSums && kMakesDk> two_level_k;
  two_level_sum_t<float, decltype(sums_v), kTwoLevelSums && kMakesDv> two_level_v;
  two_level_k.begin();
  two_level_v.begin();
  auto end_run = [&] {
    two_level_k.end(sums_k);
    two_level_v.end(sums_v);
  };
#pragma unroll 1
  for (unsigned summed_index = 0; summed_index < grads.num_summed; ++summed_index) {
    const tile_coord_t at = grads.entry(params, view.entry, summed_index);
    const scores_t scores(at, SCORE_ARGUMENTS);
    __syncthreads();  // all warps have read the tiles of the previous entry
    if (threadIdx.x == 0) {
      begin(view, at, scores, params, operands, stats, kSplitsLoop ? split : 0,
            num_splits);
      view.bits_of_rows_t<kMaskBits>::begin(MASK_BITS_ARGUMENT, at, 0, params.seqlen_q);
    }
    __syncthreads();  // the view is complete
    // Heads and entries that share a gradient of k need not share k itself.
    copy_bytes<kGranules * kBytesOperand>(smem_k, view.operands.k);
    copy_bytes<kGranules * kBytesOperand>(smem_v, view.operands.v);
    // Statistics come with q if dP is first, else with dO.
    auto load = [&](int i0, bool q, bool dout) {
      if (i0 < view.last) {
        unsigned char* const to = stages + i0 / kGranule % kStages * kBytesStage;
        const index_t granule = i0 / kGranule;
        if (q) copy_bytes<kBytesOperand>(to, view.operands.q + granule * kBytesOperand);
        if (dout) {
          copy_bytes<kBytesOperand>(to + kBytesOperand,
                                    view.operands.dout + granule * kBytesOperand);
        }
        if (kBeginsWithDp ? q : dout) {
          copy_bytes<kBytesStats>(to + 2 * kBytesOperand,
                                  view.stats + granule * (3 * kGranule));
        }
      }
      ptx::commit_copies();
    };
    auto shown = [&](int i) {
      return scores.shown(i, min(index_t(i + kGranule), params.seqlen_q), view.j0,
                          min(index_t(view.j0 + kBlockN), params.seqlen_k));
    };
    shown_tiles_t<kGranule> tiles;
    load(tiles.next(view.first, view.last, shown), !kBeginsWithDp,
         kStages == 2 || kBeginsWithDp);

    // The first tile is found again: kept across the copies it costs registers.
#pragma unroll 1
    for (int i0 = tiles.next(view.first, view.last, shown); i0 < view.last;
         i0 += tiles.distance) {
      tiles.step<kStages == 2>(i0, view.last, shown);
      ptx::wait_copy_groups<0>();
      __syncthreads();  // this granule has arrived; the previous one has been read
      load(kStages == 2 ? i0 + tiles.distance : i0, kStages == 2 || kBeginsWithDp,
           !kBeginsWithDp);
      const unsigned char* const operand_q =
          stages + i0 / kGranule % kStages * kBytesStage;
      const unsigned char* const operand_dout = operand_q + kBytesOperand;
      const float* const rows =
          reinterpret_cast<const float*>(operand_q + 2 * kBytesOperand);
      const unsigned operand = key_0() / kGranule * kBytesOperand;
      const unit_t unit_q(operand_q), unit_dout(operand_dout);

      // Numbers of this lane's queries, by tile of 8.
      auto of_queries = [&](int which, int n) {
        const int column = lane_index() % 4 * 2 + 8 * n;
        return *reinterpret_cast<const float2*>(rows + which * kGranule + column);
      };

      // dP of queries from `first` on.
      auto multiply_values = [&](auto& dp, int first) {
        multiply_scores_in_parts<true>(
            dp, left<kColumns>(columns_of(smem_v) + operand, key_0() % kGranule),
            right<kColumns>(columns_of(operand_dout), first),
            unit_dout() * tile_stats_of(smem_v + operand).from_parts);
        exchange.publish(1, dp);
      };
      frag_t<kKeyTiles, kBeginsWithDp ? kQueryTiles : 2> early_dp;
      if constexpr (kBeginsWithDp) {
        multiply_values(early_dp, 0);
        ptx::wait_copy_groups<0>();
        __syncthreads();  // q and statistics have arrived; dO has been read
        load(i0 + tiles.distance, false, true);
      }

      // dv first if both are there: afterwards dP can use the registers of the product.
      parts_t<kKeyTiles> p[kApart];
      frag_t<kKeyTiles, kHasDerivative ? kQueryTiles : 1> derivative;
      units_t<kKeyTiles> from_p;
      {
        shown_bits_t shown_keys;
        load_shown(shown_keys, view, i0);
        frag_t<kKeyTiles, kQueryTiles> s;
        multiply_scores_in_parts<true>(
            s, left<kColumns>(columns_of(smem_k) + operand, key_0() % kGranule),
            right<kColumns>(columns_of(operand_q), 0),
            unit_q() * tile_stats_of(smem_k + operand).from_parts);
        exchange.publish(0, s);
        if constexpr (kStages == 1 && !kBeginsWithDp) {
          ptx::wait_copy_groups<0>();
          __syncthreads();  // dO and statistics have arrived; all warps have published
          if constexpr (!kMakesDk) load(i0 + tiles.distance, true, false);
        } else {
          exchange.wait();
        }
        exchange.add(0, s);
        weigh_scores(s, derivative, view, differentiate, scores, shown_keys, i0,
                     of_queries);
        from_p = as_parts(p, s);
        if constexpr (kKeepsP) {
          exchange.wait();  // the other warp has read the sums in the place of P
          exchange.keep(0, p);
        }
      }
      auto add_to_dv = [&] {
        if constexpr (kMakesDv) {
          add_product_in_parts<kRegion>(sums_v, p,
                                        summed<kColumns>(columns_of(operand_dout), 0),
                                        from_p * kLift * unit_dout());
        }
      };
      if constexpr (kStages == 2) add_to_dv();
      // dP and dS for half of the queries at a time, if registers do not hold all.
      if constexpr (kMakesDk) {
        constexpr int kSteps = kApart / kHalves;
#pragma unroll
        for (int first = 0; first < kApart; first += kSteps) {
          frag_t<kKeyTiles, 2 * kSteps> late_dp;
          if constexpr (!kBeginsWithDp) {
            multiply_values(late_dp, 16 * first);
            exchange.wait();
          }
          auto& ds = of_two<kBeginsWithDp>(early_dp, late_dp);
          exchange.add(1, ds);
          if constexpr (kKeepsP) exchange.take_back(0, p);
          differentiate_scores(ds, p, derivative, 2 * first, of_queries);
          unsigned parts[kSteps][kKeyTiles][kParts][4];
          const auto from_ds = as_parts(parts, ds);
          add_product_in_parts<kRegion>(
              sums_k, parts, summed<kColumns>(columns_of(operand_q), 16 * first),
              from_ds * kLift * from_p * unit_q());
        }
      }
      if constexpr (kStages == 1) {
        if constexpr (kMakesDk && kMakesDv) {
          __syncthreads();  // all warps have read q
          load(i0 + tiles.distance, true, false);
        }
        if constexpr (kKeepsP) exchange.take_back(0, p);
        add_to_dv();
      }
      if (run_ends_between(i0, i0 + tiles.distance, view.last)) end_run();
    }
    ptx::wait_copy_groups<0>();  // of a tile that no query sees
  }

  two_level_k.finish(sums_k);
  two_level_v.finish(sums_v);
  if constexpr (kSplitsLoop) {
    const index_t rows = split * grads.num_kept * params.seqlen_k;
    dk += rows * params.head_dim;
    dv += rows * params.head_dim_v;
  }
  store(dk, dv, sums_k, sums_v, view, params, grads, found);
}

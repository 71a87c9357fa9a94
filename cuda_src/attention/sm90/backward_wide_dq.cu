// SPDX-License-Identifier: MIT
// attention_vjp_hopper_wide_queries: dq for wide heads, and for options, by tensor
// cores fed by TMA, for sm_90a; and dbias, if each score has a bias of its
// own.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), the share of a tile of
//            queries, over tiles of keys from first to last:
//                S = q k^T,  P = exp(scale S - lse),  dP = dO v^T,  dS = P (dP - delta)
//                dq += dS k
//            P and dS come out of one product in the registers that the next one reads.
//            attention_vjp_hopper_wide_keys makes dk and dv
// Grid       a block a multiprocessor. An item is a tile of queries of an entry; blocks
//            take item after item, from a counter where items differ in length
// Threads    two warpgroups compute 64 queries each; a thread of a third asks TMA
//            , and finds out what the next item is
// Tiles      q, dO    64 x kHeadDim a warpgroup   shared, loaded once an item
//            k, v     64 x kHeadDim               shared, 2 and kStagesV stages
//            bias, mask  64 x 64 a warpgroup, or a number a key    shared,
//                                                 kStagesTerms stages
//            S, P, dP, dS, dq  registers, as wgmma lays them out
// Memory     global: q, dO and dq once; k and v once a tile of queries, mostly from L2
// Numbers    S, P, dP, dS and sums in float; dS rounded to elem_t before its product
// Limits     as attention_vjp_hopper; q is not shared by entries of the batch
#include "attention/sm90/backward_score_terms.cuh"

#ifndef STAGES_V
#error "STAGES_V comes from the host"
#endif
// With DBIAS_T dS goes to memory, too, where each score has a bias of its own.
#ifdef DBIAS_T
constexpr bool kMakesDbias = true;
using dbias_t = DBIAS_T;
#define DBIAS_PARAMETER dbias_t* __restrict__ dbias,
static_assert(kBiasTiles && !kHasSoftcap);
#else
constexpr bool kMakesDbias = false;
using dbias_t = float;
#define DBIAS_PARAMETER
#endif
constexpr int kGroups = 2, kTileM = kGroups * 64;
// k is read for S and then for dq, v for dP alone: it is free long before the next one
// is needed, so one stage will do where there is no room for two.
constexpr int kStagesK = 2, kStagesV = STAGES_V;
// Terms of scores come by stages, too, those of keys by a warp of the third warpgroup.
constexpr int kTerms = kHasTiles || kTermsOfKeys ? kStagesTerms : 0;
// For racecheck, as in backward_wide_dkdv.cu.
#ifdef EACH_LANE_ARRIVES
constexpr int kArrivals = 32;  // of a warp at a barrier of terms
#else
constexpr int kArrivals = 1;
#endif
// setmaxnreg moves registers inside the pool of the launch, 168 a thread. Options take
// some of the producer's, and sums leave some over in narrow heads.
constexpr bool kNeedsMany = kHasOptions && kHeadDim <= 192;
constexpr int kProducerRegisters = kNeedsMany ? 72 : 40;
constexpr int kConsumerRegisters = kNeedsMany ? 216 : 232;

// Writes a thread's numbers of dS, two side by side.
template <typename T>
__device__ __forceinline__ void store_dbias(const float (&p)[kScores],
                                            const float (&dp)[kScores],
                                            const float (&delta)[2],
                                            T* target,
                                            int row,
                                            int column,
                                            float factor,
                                            int num_rows,
                                            int num_columns,
                                            index_t row_step) {
  // Rows of a number of columns that is even start at whole pairs.
  const bool as_pairs = row_step % 2 == 0;
#pragma unroll
  for (int e = 0; e < kScores; e += 2) {
    const int r = e / 2 % 2, c = column + e / 4 * 8;
    T* const to_pair = target + (row + 8 * r) * row_step + c;
    if (row + 8 * r >= num_rows || c >= num_columns) continue;
    const float x = p[e] * (dp[e] - delta[r]) * factor;
    const float y = p[e + 1] * (dp[e + 1] - delta[r]) * factor;
    if constexpr (sizeof(T) == 4) {
      if (as_pairs) {
        *reinterpret_cast<float2*>(to_pair) = make_float2(x, y);
        continue;
      }
    } else {
      if (as_pairs) {
        *reinterpret_cast<unsigned*>(to_pair) = pair_of<T>::from(y, x);
        continue;
      }
    }
    to_pair[0] = to<T>(x);
    if (c + 1 < num_columns) to_pair[1] = to<T>(y);
  }
}

// What the producer finds out about an item.
struct view_t {
  index_t dq;                 // of the first row of the tile in the gradient
  int tile_first, tile_last;  // of keys that queries see; < 0: no item is left
  int row_first, stats;       // stats: the first block of the entry's
  int low, high;              // mask_bounds_t, from key 0
  matrix_t q, dout, k, v;
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_vjp_hopper_wide_queries(const __grid_constant__ all_inputs_t inputs,
                                      const float* __restrict__ stats,  // backward.cuh
                                      elem_t* __restrict__ dq,          // as q
                                      DBIAS_PARAMETER found_t* __restrict__ found,
                                      int* __restrict__ counter,  // starts as 0
                                      SCORE_PARAMETERS,
                                      const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ __align__(
      8) unsigned long long barriers[4 + 2 * kStagesK + 2 * kStagesV + 2 * kTerms];
  __shared__ view_t views[kViews];
  __shared__ entry_t entries[kHasOptions ? kViews : 1];
  // Of the gradient of the bias, the first row of the tile.
  __shared__ dbias_t* dbias_tiles[kMakesDbias ? kViews : 1];
  __shared__ __align__(8) float of_keys[kTermsOfKeys ? kStagesTerms * kBlockN : 2];

  // The host adds 1024 bytes for this: a swizzled tile starts at a multiple.
  const unsigned smem_q = (ptx::shared_address(smem) + 1023) & ~1023u;
  const unsigned smem_dout = smem_q + kGroups * kBytes,
                 smem_k = smem_dout + kGroups * kBytes,
                 smem_v = smem_k + kStagesK * kBytes,
                 smem_bias = smem_v + kStagesV * kBytes,
                 smem_mask = smem_bias + kTerms * kGroups * kBytesBias;
  const unsigned q_full = ptx::shared_address(barriers), dout_full = q_full + 8,
                 k_full = dout_full + 8, v_full = k_full + 8 * kStagesK,
                 q_empty = v_full + 8 * kStagesV, dout_empty = q_empty + 8,
                 k_empty = dout_empty + 8, v_empty = k_empty + 8 * kStagesK,
                 terms_full = v_empty + 8 * kStagesV,
                 terms_empty = terms_full + 8 * kTerms;
  if (threadIdx.x == 0) {
    constexpr int kTiles = 2 + kStagesK + kStagesV;
    for (int n = 0; n < kTiles; ++n) {
      ptx::mbarrier_init(q_full + 8 * n, 1);
      // A warp that is done arrives; with q, that which reads terms of keys.
      const bool is_told = kTermsOfKeys && n == 0;
      ptx::mbarrier_init(q_empty + 8 * n, 4 * kGroups + is_told);
    }
    for (int n = 0; n < kTerms; ++n) {
      ptx::mbarrier_init(terms_full + 8 * n, kTermsOfKeys ? kArrivals : 1);
      ptx::mbarrier_init(terms_empty + 8 * n, 4 * kGroups * kArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are there before anyone uses them

  const int group = uniform(threadIdx.x / 128);
  ring_t<kStagesK> of_k;
  ring_t<kStagesV> of_v;
  ring_t<kStagesTerms> of_terms;
  int place = 0;  // of views
  auto next_place = [&] { place = place + 1 == kViews ? 0 : place + 1; };

  if (group == kGroups) {
    // --- the producer
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if constexpr (kTermsOfKeys) {
      if (threadIdx.x / 32 == 4 * kGroups + 1) {
        const int lane = threadIdx.x % 32;
        for (unsigned items = 0;; ++items) {
          wait(q_full, items & 1);
          const int tile_first = views[place].tile_first;
          const int tile_last = views[place].tile_last;
          if (tile_last < 0) return;
          const entry_t& entry = entries[place];
          for (int tile = tile_first; tile < tile_last; ++tile) {
            float terms[2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              terms[n] = term_of_key(entry.bias, entry.mask, params,
                                     tile * kBlockN + n * 32 + lane);
            }
            wait(terms_empty + 8 * of_terms.stage, of_terms.parity ^ 1);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              of_keys[of_terms.stage * kBlockN + n * 32 + lane] = terms[n];
            }
            __syncwarp();  // all lanes have written
            if (lane < kArrivals) {
              ptx::mbarrier_arrive(terms_full + 8 * of_terms.stage);
            }
            of_terms.advance();
          }
          if (lane == 0) ptx::mbarrier_arrive(q_empty);
          next_place();
        }
      }
    }
    if (threadIdx.x / 32 != 4 * kGroups || !ptx::elect()) return;

    int number = static_cast<int>(blockIdx.x);
    auto find = [&](view_t& view) {
      view.tile_last = -1;
      if (number >= inputs.num_items) return;
      const item_t item = item_of(number, inputs);
      // The last queries see most keys, where positions hide some.
      const int row_first = (inputs.num_tiles - 1 - item.tile) * kTileM;
      int tile_first = 0;
      int tile_last = (static_cast<int>(params.seqlen_k) + kBlockN - 1) / kBlockN;
      if constexpr (kBounds > 0) {
        const tile_coord_t at =
            kBandOfEntry ? grads.entry(params, locate(grads.kept, item.kept).of[0], 0)
                         : tile_coord_t();
        const scores_t scores(at, SCORE_ARGUMENTS);
        const range_t keys = scores.keys_of(row_first, row_first + kTileM);
        tile_first = static_cast<int>(keys.first) / kBlockN;
        tile_last = (static_cast<int>(keys.last) + kBlockN - 1) / kBlockN;
        if (keys.first >= keys.last) tile_last = tile_first;
        const mask_bounds_t band = scores.mask_bounds(row_first, 0);
        view.low = band.low;
        view.high = band.high;
      }
      view.row_first = row_first;
      view.tile_first = tile_first;
      view.tile_last = tile_last;
      const auto kept = locate(grads.kept, item.kept);
      view.dq = kept.of[1] + row_first * grads.row[0];
      const tile_coord_t at = grads.entry(params, kept.of[0], 0);
      view.stats = static_cast<int>(at.row_of_heads) * inputs.num_blocks;
      view.q = matrix_of(at, at.head, params.q);
      view.dout = matrix_of(at, at.head, grads.dout);
      view.k = matrix_of(at, at.kv_head, params.k);
      view.v = matrix_of(at, at.kv_head, params.v);
      if constexpr (kHasOptions) {
        entries[place].set(scores_t(at, SCORE_ARGUMENTS), at, params, row_first, 0);
      }
#ifdef DBIAS_T
      dbias_tiles[place] = dbias + kept.of[2] + row_first * grads.row[1];
#endif
    };
    auto load_own = [&](unsigned target, const ptx::tensor_map_t& map, unsigned full,
                        unsigned empty, unsigned parity, const matrix_t& matrix) {
      wait(empty, parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, kGroups * kBytes);
      for (int n = 0; n < kGroups; ++n) {
        load_chunks<0, kChunks>(target + n * kBytes, map, full,
                                views[place].row_first + n * 64, matrix);
      }
    };

    find(views[0]);
    for (unsigned items = 0;; ++items) {
      const unsigned parity = items & 1;
      if (views[place].tile_last < 0) {
        wait(q_empty, parity ^ 1);
        ptx::mbarrier_arrive(q_full);
        return;
      }
      load_own(smem_q, inputs.q_map, q_full, q_empty, parity, views[place].q);
      for (int tile = views[place].tile_first; tile < views[place].tile_last; ++tile) {
        const unsigned k_barrier = k_full + 8 * of_k.stage;
        wait(k_empty + 8 * of_k.stage, of_k.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(k_barrier, kBytes);
        load_chunks<0, kChunks>(smem_k + of_k.stage * kBytes, inputs.k_map, k_barrier,
                                tile * kBlockN, views[place].k);
        if constexpr (kHasTiles) {
          const unsigned full = terms_full + 8 * of_terms.stage;
          wait(terms_empty + 8 * of_terms.stage, of_terms.parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(full, kGroups * (kBytesBias + kBytesMask));
          for (int n = 0; n < kGroups; ++n) {
            load_terms(smem_bias + (of_terms.stage * kGroups + n) * kBytesBias,
                       smem_mask + (of_terms.stage * kGroups + n) * kBytesMask, inputs,
                       entries[place], full, views[place].row_first + n * 64,
                       tile * kBlockN);
          }
          of_terms.advance();
        }
        if (tile == views[place].tile_first) {
          load_own(smem_dout, inputs.dout_map, dout_full, dout_empty, parity,
                   views[place].dout);
        }
        const unsigned v_barrier = v_full + 8 * of_v.stage;
        wait(v_empty + 8 * of_v.stage, of_v.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(v_barrier, kBytes);
        load_chunks<0, kChunks>(smem_v + of_v.stage * kBytes, inputs.v_map, v_barrier,
                                tile * kBlockN, views[place].v);
        of_k.advance();
        of_v.advance();
      }
      if (views[place].tile_first >= views[place].tile_last) {
        load_own(smem_dout, inputs.dout_map, dout_full, dout_empty, parity,
                 views[place].dout);
      }
      number = item_after(number, counter);
      next_place();
      find(views[place]);
      if (views[place].tile_last >= 0) {
        for (int n = 0; n < kGroups; ++n) {
          const int row = views[place].row_first + n * 64;
          prefetch_rows(inputs.q_map, row, views[place].q);
          prefetch_rows(inputs.dout_map, row, views[place].dout);
        }
      }
    }
  }

  // --- those that compute
  ptx::setmaxnreg_inc<kConsumerRegisters>();
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4;  // of the warpgroup's, and the one 8 below
  const float factor = factor_of(found);
  const unsigned long long q_rows = descriptor(smem_q + group * kBytes, 16),
                           dout_rows = descriptor(smem_dout + group * kBytes, 16),
                           k_rows = descriptor(smem_k, 16),
                           v_rows = descriptor(smem_v, 16),
                           k_sums = descriptor(smem_k, kChunk);
  // This warp is done with a tile.
  auto release = [&](unsigned barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  float sums[kSums], s[kScores], dp[kScores];
  for (unsigned items = 0;; ++items) {
    wait(q_full, items & 1);
    const volatile view_t& view = views[place];
    const int tile_first = uniform(view.tile_first);
    const int tile_last = uniform(view.tile_last);
    if (tile_last < 0) return;
    float log_sum[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = view.row_first + group * 64 + row + 8 * r;
      const float* const from =
          stats + index_t(view.stats + i / kBlockM) * (2 * kBlockM) + i % kBlockM;
      const bool exists = i < params.seqlen_q;
      log_sum[r] = exists ? from[0] : infinity<float>();
      delta[r] = exists ? from[kBlockM] * factor : 0.f;
    }
#pragma unroll
    for (int e = 0; e < kSums; ++e) sums[e] = 0;
    // The rings are the same in all lanes, which the compiler loses sight of between
    // items.
    of_k = {unsigned(uniform(of_k.stage)), unsigned(uniform(of_k.parity))};
    of_v = {unsigned(uniform(of_v.stage)), unsigned(uniform(of_v.parity))};
    if constexpr (kTerms > 0) {
      of_terms = {unsigned(uniform(of_terms.stage)),
                  unsigned(uniform(of_terms.parity))};
    }

#pragma unroll 1
    for (int tile = tile_first; tile < tile_last; ++tile) {
      wait(k_full + 8 * of_k.stage, of_k.parity);
      ptx::wgmma_fence();
      multiply_scores(s, q_rows, k_rows + of_k.stage * (kBytes / 16));
      ptx::wgmma_commit_group();
      wait(dout_full, items & 1);
      wait(v_full + 8 * of_v.stage, of_v.parity);
      ptx::wgmma_fence();
      multiply_scores(dp, dout_rows, v_rows + of_v.stage * (kBytes / 16));
      ptx::wgmma_commit_group();
      // With options: what is added to the exponents.
      float rest[kScores];
      auto find_rest = [&](auto use) {
        const volatile entry_t& entry = entries[place];
        const tile_terms_t<false> terms(
            smem_bias + (of_terms.stage * kGroups + group) * kBytesBias,
            smem_mask + (of_terms.stage * kGroups + group) * kBytesMask, row, lane);
        float slope = 0, distance = 0;
        if constexpr (kHasAlibi) {
          slope = entry.slope * float(kLog2e);
          distance = static_cast<float>(entry.diagonal + group * 64 + row -
                                        tile * kBlockN - lane % 4 * 2);
        }
        if constexpr (kTerms > 0) {
          wait(terms_full + 8 * of_terms.stage, of_terms.parity);
        }
        const unsigned keys = ptx::shared_address(of_keys) +
                              of_terms.stage * (kBlockN * 4) + lane % 4 * 8;
        float2 of_two;
#pragma unroll
        for (int e = 0; e < kScores; ++e) {
          float x = -log_sum[e / 2 % 2];
          if constexpr (kTermsOfKeys) {
            if (e % 4 == 0) of_two = ptx::load_shared_f32x2(keys + e / 4 * 32);
            x += e % 2 ? of_two.y : of_two.x;
          }
          if constexpr (kHasTiles) x += terms(e);
          if constexpr (kHasAlibi) {
            const int apart = e / 2 % 2 * 8 - e / 4 * 8 - e % 2;
            x = fmaf(-slope, fabsf(distance + static_cast<float>(apart)), x);
          }
          use(e, x);
        }
        if constexpr (kTerms > 0) {
          __syncwarp();  // all lanes have read them
          if (lane < kArrivals) {
            ptx::mbarrier_arrive(terms_empty + 8 * of_terms.stage);
          }
          of_terms.advance();
        }
      };
      auto keep_rest = [&](int e, float x) { rest[e] = x; };
      if constexpr (kAhead) find_rest(keep_rest);
      ptx::wgmma_wait_group<1>();  // S
      keep_order(s);
      if (tile + 1 == tile_last) release(q_empty);

      if constexpr (kHasOptions) {
        const mask_bounds_t band =
            shifted(entries[place].band, group * 64, tile * kBlockN);
        float derivatives[kDerivatives];
        add_terms(s, derivatives, inputs, rest, find_rest);
        if (hides_some(band)) {
#pragma unroll
          for (int e = 0; e < kScores; ++e) {
            const int key = e / 4 * 8 + e % 2 + lane % 4 * 2;
            if (!band.sees(row + e / 2 % 2 * 8, key)) s[e] = -infinity<float>();
          }
        }
#pragma unroll
        for (int e = 0; e < kScores; ++e) {
          s[e] = ptx::ex2_approx_ftz(s[e]);
          if constexpr (kHasSoftcap) s[e] *= derivatives[e];
        }
      } else {
        // Number e stands in column e / 4 * 8 + lane % 4 * 2 + e % 2, row e / 2 % 2
        // * 8.
        const int num_keys = static_cast<int>(params.seqlen_k) - tile * kBlockN;
        int low = -(1 << 30), high = 1 << 30;
        if constexpr (kBounds > 0) {
          low = view.low + group * 64 - tile * kBlockN;
          high = view.high + group * 64 - tile * kBlockN;
        }
        if (num_keys < kBlockN || low > 1 - 64 || high < kBlockN) {
#pragma unroll
          for (int e = 0; e < kScores; ++e) {
            const int column = e / 4 * 8 + e % 2 + lane % 4 * 2;
            const int distance = column - row - e / 2 % 2 * 8;
            const bool sees = low <= distance && distance < high && column < num_keys;
            if (!sees) s[e] = inputs.hidden;
          }
        }
#pragma unroll
        for (int e = 0; e < kScores; ++e) {
          s[e] = ptx::ex2_approx_ftz(s[e] * inputs.to_log2 - log_sum[e / 2 % 2]);
        }
      }
      ptx::wgmma_wait_group<0>();  // dP
      keep_order(dp);
      release(v_empty + 8 * of_v.stage);
      if (tile + 1 == tile_last) release(dout_empty);
      unsigned ds[4][4];
#pragma unroll
      for (int e = 0; e < kScores; e += 2) {
        const int r = e / 2 % 2;
        if constexpr (kNarrow<elem_t>) {
          dp[e] *= factor;
          dp[e + 1] *= factor;
        }
        ds[e / 8][e / 2 % 4] = pair16_t::from(s[e + 1] * (dp[e + 1] - delta[r]),
                                              s[e] * (dp[e] - delta[r]));
      }
      ptx::wgmma_fence();
      multiply_sums(sums, ds, k_sums + of_k.stage * (kBytes / 16));
      ptx::wgmma_commit_group();
      if constexpr (kMakesDbias) {
        store_dbias(s, dp, delta, dbias_tiles[place] + tile * kBlockN, group * 64 + row,
                    lane % 4 * 2, unfactor_of(factor, 1.f),
                    static_cast<int>(params.seqlen_q) - view.row_first,
                    static_cast<int>(params.seqlen_k) - tile * kBlockN, grads.row[1]);
      }
      ptx::wgmma_wait_group<0>();
      keep_order(sums);
      release(k_empty + 8 * of_k.stage);
      of_k.advance();
      of_v.advance();
    }
    if (tile_first >= tile_last) {  // no query of the tile sees a key
      wait(dout_full, items & 1);
      release(q_empty);
      release(dout_empty);
    }

    const float odd =
        store_rows(sums, unfactor_of(factor, static_cast<float>(params.scale)),
                   dq + view.dq, grads.row[0], group * 64 + row,
                   static_cast<int>(params.seqlen_q) - view.row_first,
                   static_cast<int>(params.head_dim));
    if (odd != 0) found->odd = 1;
    next_place();
  }
}

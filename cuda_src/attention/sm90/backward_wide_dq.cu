// SPDX-License-Identifier: MIT
// attention_vjp_hopper_wide_queries: dq for wide heads or score options, by TMA and
// wgmma, for sm_90a; and dbias, if each score has a bias of its own.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), the part of a tile of
//            queries, over tiles of keys from first to last:
//                S = q k^T,  P = exp(scale S - lse),  dP = dO v^T,  dS = P (dP - delta)
//                dq += dS k
//            P and dS are accumulators of one product and, in the same registers, the A
//            operand of the next. attention_vjp_hopper_wide_keys computes dk and dv
// Grid       Persistent, one block per multiprocessor. A work tile is a tile of queries
//            of an entry; blocks take them from a counter where these differ in length
// Threads    two consumer warpgroups, 64 queries each; one thread of a third loads by
//            TMA and finds the next work tile
// Tiles      q, dO    64 x kHeadDim per warpgroup  shared, loaded once per work tile
//            k, v     64 x kHeadDim               shared, 2 and kStagesV stages
//            bias, mask  64 x 64 per warpgroup, or one number per key    shared,
//                                                 kStagesTerms stages
//            S, P, dP, dS, dq  registers, in the layout of wgmma
// Memory     global: q, dO and dq once; k and v once per tile of queries, mostly L2
// Numbers    S, P, dP, dS and sums in float; dS rounded to elem_t before its product
// Limits     as attention_vjp_hopper; q is not shared by entries of the batch
#include "attention/sm90/backward_score_mod.cuh"
#include "attention/sm90/score_arguments.cuh"

#ifndef STAGES_V
#error "STAGES_V comes from the host"
#endif
// With DBIAS_T, dS is stored as well: each score has a bias of its own.
#ifdef DBIAS_T
constexpr bool kMakesDbias = true;
using dbias_t = DBIAS_T;
#define DBIAS_PARAMETER dbias_t* __restrict__ dbias,
#define DBIAS_ARGUMENT dbias
static_assert(kBiasTiles && !kHasChain);
#else
constexpr bool kMakesDbias = false;
using dbias_t = float;
#define DBIAS_PARAMETER
#define DBIAS_ARGUMENT nullptr
#endif
constexpr int kGroups = 2, kTileM = kGroups * 64;
// k is read for S and later for dq; v only for dP. It is free long before the next one
// is needed, so one stage is enough where there is no room for two.
constexpr int kStagesK = 2, kStagesV = STAGES_V;
// Bias and mask are staged as well; those per key by a warp of the third warpgroup.
constexpr int kTerms = kHasTiles || kTermsOfKeys ? kStagesTerms : 0;
// For racecheck, as in backward_wide_dkdv.cu.
constexpr int kArrivals =
    IS_GIVEN(EACH_LANE_ARRIVES) ? 32 : 1;  // of a warp at a barrier of terms

// Stores a thread's numbers of dS in pairs.
template <typename T>
__device__ __forceinline__ void store_dbias(const float (&p)[kScores],
                                            const float (&dp)[kScores],
                                            const float (&delta)[2], T* target, int row,
                                            int column, float factor, int num_rows,
                                            int num_columns, index_t row_step) {
  // With an even number of columns, rows start at whole pairs.
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

// --- shared memory

// A work tile as published by the producer.
struct tile_info_t {
  index_t dq;                 // offset of the tile's first row in the gradient
  int tile_first, tile_last;  // range of keys seen; < 0: no work tile left
  int row_first, stats;       // stats: first block of the entry
  int low, high;              // mask_bounds_t, for key 0
  matrix_t q, dout, k, v;
};

struct shared_t {
  tile_info_t* tile_infos;  // kPublished of each
  entry_t* entries;
  function_place_t* places;
  const unsigned** lists;     // of a mask function: tiles are then indices into one
  dbias_t** dbias_tiles;      // of the gradient of the bias: first row of the tile
  float* of_keys;             // bias and mask per key, by stage
  volatile unsigned* listed;  // list entry of each tile of k, by stage
};

constexpr int kBarriers = 4 + 2 * kStagesK + 2 * kStagesV + 2 * kTerms;

// Shared memory addresses.
struct addresses_t {
  unsigned q, dout, k, v, bias, mask;  // tiles
  unsigned q_full, dout_full, k_full, v_full, q_empty, dout_empty, k_empty, v_empty;
  unsigned terms_full, terms_empty;

  __device__ __forceinline__ addresses_t(const void* tiles,
                                         const unsigned long long* barriers) {
    q = swizzled_tiles(tiles);
    dout = q + kGroups * kBytes;
    k = dout + kGroups * kBytes;
    v = k + kStagesK * kBytes;
    bias = v + kStagesV * kBytes;
    mask = bias + kTerms * kGroups * kBytesBias;
    q_full = ptx::shared_address(barriers);
    dout_full = q_full + 8;
    k_full = dout_full + 8;
    v_full = k_full + 8 * kStagesK;
    q_empty = v_full + 8 * kStagesV;
    dout_empty = q_empty + 8;
    k_empty = dout_empty + 8;
    v_empty = k_empty + 8 * kStagesK;
    terms_full = v_empty + 8 * kStagesV;
    terms_empty = terms_full + 8 * kTerms;
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kTiles = 2 + kStagesK + kStagesV;
    for (int n = 0; n < kTiles; ++n) {
      ptx::mbarrier_init(q_full + 8 * n, 1);
      // Each warp arrives when it has finished; for q, so does the reader of key terms.
      const bool has_reader = kTermsOfKeys && n == 0;
      ptx::mbarrier_init(q_empty + 8 * n, 4 * kGroups + has_reader);
    }
    for (int n = 0; n < kTerms; ++n) {
      ptx::mbarrier_init(terms_full + 8 * n, kTermsOfKeys ? kArrivals : 1);
      ptx::mbarrier_init(terms_empty + 8 * n, 4 * kGroups * kArrivals);
    }
    ptx::fence_mbarrier_init();
  }
};

// The arguments of the kernel.
struct arguments_t {
  const all_inputs_t& inputs;
  const float* stats;
  elem_t* dq;
  dbias_t* dbias;
  found_t* found;
  int* counter;
  tile_lists_t tile_lists;
  score_arguments_t score;
  const grads_t& grads;
};

// Positions in the rings, the same in producer and consumers.
struct pipeline_t {
  ring_t<kStagesK> k;
  ring_t<kStagesV> v;
  ring_t<kStagesTerms> terms;
  int place = 0;  // slot of tile_infos
};

// --- producer warpgroup

struct producer_t {
  const arguments_t& args;
  const shared_t& shared;
  const addresses_t& smem;
  pipeline_t at;

  __device__ __forceinline__ tile_info_t& info() const {
    return shared.tile_infos[at.place];
  }

  // Computes and publishes work tile `number`.
  __device__ __forceinline__ void publish(int number) const {
    const inputs_t& inputs = args.inputs;
    const params_t& params = args.score.params;
    const grads_t& grads = args.grads;
    tile_info_t& info = this->info();
    info.tile_last = -1;
    if (number >= inputs.num_work_tiles) return;
    const work_tile_t tile = tile_of<(kBounds > 0)>(number, inputs);
    // Last tiles first: with causal masks they are longest.
    const int row_first = (inputs.num_tiles - 1 - tile.tile) * kTileM;
    int tile_first = 0;
    int tile_last = (static_cast<int>(params.seqlen_k) + kBlockN - 1) / kBlockN;
    if constexpr (kBounds > 0) {
      const tile_coord_t entry =
          kBoundsPerEntry ? grads.entry(params, locate(grads.kept, tile.kept).of[0], 0)
                          : tile_coord_t();
      const scores_t scores = args.score.scores_of(entry);
      const range_t keys = scores.keys_of(row_first, row_first + kTileM);
      tile_first = static_cast<int>(keys.first) / kBlockN;
      tile_last = (static_cast<int>(keys.last) + kBlockN - 1) / kBlockN;
      if (keys.first >= keys.last) tile_last = tile_first;
      const mask_bounds_t bounds = scores.mask_bounds(row_first, 0);
      info.low = bounds.low;
      info.high = bounds.high;
    }
    info.row_first = row_first;
    info.tile_first = tile_first;
    info.tile_last = tile_last;
    const auto kept = locate(grads.kept, tile.kept);
    info.dq = kept.of[1] + row_first * grads.row[0];
    const tile_coord_t entry = grads.entry(params, kept.of[0], 0);
    info.stats = static_cast<int>(entry.row_of_heads) * inputs.num_blocks;
    info.q = matrix_of(entry, entry.head, params.q);
    info.dout = matrix_of(entry, entry.head, grads.dout);
    info.k = matrix_of(entry, entry.kv_head, params.k);
    info.v = matrix_of(entry, entry.kv_head, params.v);
    if constexpr (kHasOptions) {
      const scores_t scores = args.score.scores_of(entry);
      shared.entries[at.place].set(scores, entry, params, row_first, 0);
      if constexpr (kHasFunctions) shared.places[at.place].set(scores, row_first, 0);
    }
    if constexpr (kListsTiles) {
      tile_coord_t own = entry;
      own.tile = row_first / kTileM;
      const unsigned* const list =
          args.tile_lists.of(own, static_cast<int>(params.num_heads));
      shared.lists[at.place] = list;
      info.tile_first = 0;
      info.tile_last = num_seen(list);
    }
    if constexpr (kMakesDbias) {
      shared.dbias_tiles[at.place] = args.dbias + kept.of[2] + row_first * grads.row[1];
    }
  }

  // Loads q or dO of the work tile.
  __device__ __forceinline__ void load_own(unsigned target,
                                           const ptx::tensor_map_t& map, unsigned full,
                                           unsigned empty, unsigned parity,
                                           const matrix_t& matrix) const {
    wait(empty, parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, kGroups * kBytes);
    for (int n = 0; n < kGroups; ++n) {
      load_chunks<0, kChunks>(target + n * kBytes, map, full, info().row_first + n * 64,
                              matrix);
    }
  }
  // Entry n of the list of the work tile; without lists, tile n.
  __device__ __forceinline__ listed_tile_t listed(int n) const {
    if constexpr (kListsTiles) return listed_tile(shared.lists[at.place], n);
    return {static_cast<unsigned>(n) << 8};
  }
  __device__ __forceinline__ void load_dout(unsigned parity) const {
    load_own(smem.dout, args.inputs.dout_map, smem.dout_full, smem.dout_empty, parity,
             info().dout);
  }
  // Loads a tile of k or v.
  template <int kStages>
  __device__ __forceinline__ void load_keys(ring_t<kStages>& ring, unsigned target,
                                            const ptx::tensor_map_t& map, unsigned full,
                                            unsigned empty, int tile,
                                            const matrix_t& matrix) {
    const unsigned barrier = full + 8 * ring.stage;
    wait(empty + 8 * ring.stage, ring.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(barrier, kBytes);
    load_chunks<0, kChunks>(target + ring.stage * kBytes, map, barrier, tile * kBlockN,
                            matrix);
    ring.advance();
  }
  __device__ __forceinline__ void load_term_tiles(int tile) {
    const unsigned full = smem.terms_full + 8 * at.terms.stage;
    wait(smem.terms_empty + 8 * at.terms.stage, at.terms.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, kGroups * (kBytesBias + kBytesMask));
    for (int n = 0; n < kGroups; ++n) {
      load_terms(smem.bias + (at.terms.stage * kGroups + n) * kBytesBias,
                 smem.mask + (at.terms.stage * kGroups + n) * kBytesMask, args.inputs,
                 shared.entries[at.place], full, info().row_first + n * 64,
                 tile * kBlockN);
    }
    at.terms.advance();
  }

  // Run by one thread.
  __device__ __forceinline__ void produce() {
    const all_inputs_t& inputs = args.inputs;
    int number = static_cast<int>(blockIdx.x);
    publish(number);
    for (unsigned num_done = 0;; ++num_done) {
      const unsigned parity = num_done & 1;
      if (info().tile_last < 0) {
        wait(smem.q_empty, parity ^ 1);
        ptx::mbarrier_arrive(smem.q_full);
        return;
      }
      load_own(smem.q, inputs.q_map, smem.q_full, smem.q_empty, parity, info().q);
      for (int n = info().tile_first; n < info().tile_last; ++n) {
        int tile = n;
        if constexpr (kListsTiles) {
          const listed_tile_t listed = this->listed(n);
          tile = listed.tile();
          wait(smem.k_empty + 8 * at.k.stage, at.k.parity ^ 1);
          shared.listed[at.k.stage] = listed.word;
        }
        load_keys(at.k, smem.k, inputs.k_map, smem.k_full, smem.k_empty, tile,
                  info().k);
        if constexpr (kHasTiles) load_term_tiles(tile);
        if (n == info().tile_first) load_dout(parity);
        load_keys(at.v, smem.v, inputs.v_map, smem.v_full, smem.v_empty, tile,
                  info().v);
      }
      if (info().tile_first >= info().tile_last) load_dout(parity);
      number = tile_after(number, args.counter);
      at.place = place_after(at.place);
      publish(number);
      if (info().tile_last >= 0) {
        for (int n = 0; n < kGroups; ++n) {
          const int row = info().row_first + n * 64;
          prefetch_rows(inputs.q_map, row, info().q);
          prefetch_rows(inputs.dout_map, row, info().dout);
        }
      }
    }
  }

  // Run by another warp: bias and mask per key, where all queries share them.
  __device__ __forceinline__ void read_key_terms() {
    const int lane = threadIdx.x % 32;
    for (unsigned num_done = 0;; ++num_done) {
      wait(smem.q_full, num_done & 1);
      const int tile_first = info().tile_first, tile_last = info().tile_last;
      if (tile_last < 0) return;
      const entry_t& entry = shared.entries[at.place];
      for (int place = tile_first; place < tile_last; ++place) {
        const int tile = kListsTiles ? listed(place).tile() : place;
        float terms[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          terms[n] = term_of_key(entry.bias, entry.mask, args.score.params,
                                 tile * kBlockN + n * 32 + lane);
        }
        wait(smem.terms_empty + 8 * at.terms.stage, at.terms.parity ^ 1);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          shared.of_keys[at.terms.stage * kBlockN + n * 32 + lane] = terms[n];
        }
        __syncwarp();  // all lanes have written
        if (lane < kArrivals) {
          ptx::mbarrier_arrive(smem.terms_full + 8 * at.terms.stage);
        }
        at.terms.advance();
      }
      if (lane == 0) ptx::mbarrier_arrive(smem.q_empty);
      at.place = place_after(at.place);
    }
  }
};

// --- consumer warpgroups

struct consumer_t {
  const arguments_t& args;
  const shared_t& shared;
  const addresses_t& smem;
  int group, lane;
  fragment_t<false> fragment;  // row: within the warpgroup; the second is 8 further
  float factor;
  unsigned long long q_rows, dout_rows, k_rows, v_rows, k_sums;
  pipeline_t at;
  unsigned num_done = 0;  // work tiles so far
  float log_sum[2], delta[2];
  float sums[kSums], s[kScores], dp[kScores];
  float rest[kScores];  // with options: what is added to the exponents
  function_rows_t<false, true, false> functions;

  __device__ __forceinline__ consumer_t(const arguments_t& args, const shared_t& shared,
                                        const addresses_t& smem, int group)
      : args(args),
        shared(shared),
        smem(smem),
        group(group),
        lane(threadIdx.x % 32),
        fragment{int(threadIdx.x / 32 % 4 * 16 + lane / 4), lane},
        factor(factor_of(args.found)),
        q_rows(descriptor(smem.q + group * kBytes, 16)),
        dout_rows(descriptor(smem.dout + group * kBytes, 16)),
        k_rows(descriptor(smem.k, 16)),
        v_rows(descriptor(smem.v, 16)),
        k_sums(descriptor(smem.k, kChunk)) {}

  // This warp has finished with a tile.
  __device__ __forceinline__ void release(unsigned barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ const volatile tile_info_t& info() const {
    return shared.tile_infos[at.place];
  }

  // Loads the statistics of this thread's rows and clears the sums.
  __device__ __forceinline__ void begin_tile() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = info().row_first + group * 64 + fragment.row + 8 * r;
      const float* const from = args.stats +
                                index_t(info().stats + i / kBlockM) * (2 * kBlockM) +
                                i % kBlockM;
      const bool exists = i < args.score.params.seqlen_q;
      log_sum[r] = exists ? from[0] : infinity<float>();
      delta[r] = exists ? from[kBlockM] * factor : 0.f;
    }
#pragma unroll
    for (int e = 0; e < kSums; ++e) sums[e] = 0;
    at.k = uniform(at.k);
    at.v = uniform(at.v);
    if constexpr (kTerms > 0) at.terms = uniform(at.terms);
  }

  template <typename Use>
  __device__ __forceinline__ void find_rest_of(int tile, const Use& use) {
    const volatile entry_t& entry = shared.entries[at.place];
    const tile_terms_t<false> terms =
        tile_terms_t<false>(fragment.row, lane)
            .at(smem.bias + (at.terms.stage * kGroups + group) * kBytesBias,
                smem.mask + (at.terms.stage * kGroups + group) * kBytesMask);
    float slope = 0, distance = 0;
    if constexpr (kHasAlibi) {
      slope = entry.slope * float(kLog2e);
      distance = static_cast<float>(entry.diagonal + group * 64 + fragment.distance() -
                                    tile * kBlockN);
    }
    if constexpr (kTerms > 0) {
      wait(smem.terms_full + 8 * at.terms.stage, at.terms.parity);
    }
    const unsigned keys = ptx::shared_address(shared.of_keys) +
                          at.terms.stage * (kBlockN * 4) + lane % 4 * 8;
    float2 of_two;
    find_rest(
        terms, slope, distance, [&](int e) { return log_sum[e / 2 % 2]; },
        [&](int e) {
          if (e % 4 == 0) of_two = ptx::load_shared_f32x2(keys + e / 4 * 32);
          return e % 2 ? of_two.y : of_two.x;
        },
        use);
    if constexpr (kTerms > 0) {
      // What TMA loads into the stage next must come behind what lanes have read of it.
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane < kArrivals) {
        ptx::mbarrier_arrive(smem.terms_empty + 8 * at.terms.stage);
      }
      at.terms.advance();
    }
  }

  // Where the functions are evaluated.
  __device__ __forceinline__ function_place_t place_of(int tile) const {
    const volatile function_place_t& place = shared.places[at.place];
    return place.shifted(group * 64, tile * kBlockN);
  }

  // s becomes P of a tile of keys, times the derivative of the score if it has one.
  // `is_mixed`: a mask function hides a part of the tile.
  __device__ __forceinline__ void softmax(int tile, bool is_mixed) {
    const all_inputs_t& inputs = args.inputs;
    if constexpr (kHasOptions) {
      const mask_bounds_t bounds =
          shifted(shared.entries[at.place].bounds, group * 64, tile * kBlockN);
      float derivatives[kDerivatives];
      const params_t& params = args.score.params;
      add_terms(fragment, s, derivatives, inputs, params, functions, rest,
                [&](auto use) { find_rest_of(tile, use); });
      if constexpr (kHasMaskFunction) {
        if (is_mixed) hide_keys(fragment, s, place_of(tile), params);
      }
      mask(fragment, s, bounds);
#pragma unroll
      for (int e = 0; e < kScores; ++e) {
        s[e] = ptx::ex2_approx_ftz(s[e]);
        if constexpr (kHasChain) s[e] *= derivatives[e];
      }
    } else {
      const int num_keys =
          static_cast<int>(args.score.params.seqlen_k) - tile * kBlockN;
      int low = -(1 << 30), high = 1 << 30;
      if constexpr (kBounds > 0) {
        low = info().low + group * 64 - tile * kBlockN;
        high = info().high + group * 64 - tile * kBlockN;
      }
      fragment.mask(s, low, high, num_keys, inputs.hidden);
#pragma unroll
      for (int e = 0; e < kScores; ++e) {
        s[e] = ptx::ex2_approx_ftz(s[e] * inputs.to_log2 - log_sum[e / 2 % 2]);
      }
    }
  }

  // Adds a tile of keys to dq, and stores its part of dbias.
  __device__ __forceinline__ void step(int number, bool is_last) {
    const params_t& params = args.score.params;
    wait(smem.k_full + 8 * at.k.stage, at.k.parity);
    int tile = number;
    bool is_mixed = false;
    if constexpr (kListsTiles) {
      const listed_tile_t listed = {
          __shfl_sync(kFullMask, shared.listed[at.k.stage], 0)};
      tile = listed.tile();
      // A tile of which this warpgroup sees nothing must be masked as well.
      is_mixed = listed.is_mixed(group) || !listed.is_seen(group);
    }
    ptx::wgmma_fence();
    multiply_scores(s, q_rows, k_rows + at.k.stage * (kBytes / 16));
    ptx::wgmma_commit_group();
    wait(smem.dout_full, num_done & 1);
    wait(smem.v_full + 8 * at.v.stage, at.v.parity);
    ptx::wgmma_fence();
    multiply_scores(dp, dout_rows, v_rows + at.v.stage * (kBytes / 16));
    ptx::wgmma_commit_group();
    if constexpr (kAhead) find_rest_of(tile, [&](int e, float x) { rest[e] = x; });
    if constexpr (kHasScoreFunction) {
      functions.set(args.score.function(), place_of(tile), fragment);
    }
    ptx::wgmma_wait_group<1>();  // S
    compiler_fence(s);
    if (is_last) release(smem.q_empty);
    softmax(tile, is_mixed);
    ptx::wgmma_wait_group<0>();  // dP
    compiler_fence(dp);
    release(smem.v_empty + 8 * at.v.stage);
    if (is_last) release(smem.dout_empty);
    unsigned ds[4][4];
    weigh_rows(ds, s, dp, delta, factor);
    ptx::wgmma_fence();
    multiply_sums(sums, ds, k_sums + at.k.stage * (kBytes / 16));
    ptx::wgmma_commit_group();
    if constexpr (kMakesDbias) {
      store_dbias(s, dp, delta, shared.dbias_tiles[at.place] + tile * kBlockN,
                  group * 64 + fragment.row, lane % 4 * 2, unfactor_of(factor, 1.f),
                  static_cast<int>(params.seqlen_q) - info().row_first,
                  static_cast<int>(params.seqlen_k) - tile * kBlockN,
                  args.grads.row[1]);
    }
    ptx::wgmma_wait_group<0>();
    compiler_fence(sums);
    release(smem.k_empty + 8 * at.k.stage);
    at.k.advance();
    at.v.advance();
  }

  __device__ __forceinline__ void store() const {
    const params_t& params = args.score.params;
    const float nonfinite =
        store_rows(sums, unfactor_of(factor, static_cast<float>(params.scale)),
                   args.dq + info().dq, args.grads.row[0], group * 64 + fragment.row,
                   static_cast<int>(params.seqlen_q) - info().row_first,
                   static_cast<int>(params.head_dim));
    if (nonfinite != 0) args.found->nonfinite = 1;
  }

  __device__ __forceinline__ void consume() {
    for (;; ++num_done) {
      wait(smem.q_full, num_done & 1);
      const int tile_first = uniform(info().tile_first);
      const int tile_last = uniform(info().tile_last);
      if (tile_last < 0) return;
      begin_tile();
#pragma unroll 1
      for (int tile = tile_first; tile < tile_last; ++tile) {
        step(tile, tile + 1 == tile_last);
      }
      if (tile_first >= tile_last) {  // no query of the tile sees a key
        wait(smem.dout_full, num_done & 1);
        release(smem.q_empty);
        release(smem.dout_empty);
      }
      store();
      at.place = place_after(at.place);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_vjp_hopper_wide_queries(const __grid_constant__ all_inputs_t inputs,
                                      const float* __restrict__ stats,  // backward.cuh
                                      elem_t* __restrict__ dq,          // as q
                                      DBIAS_PARAMETER found_t* __restrict__ found,
                                      int* __restrict__ counter,  // starts at 0
                                      LISTS_PARAMETER SCORE_PARAMETERS,
                                      const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(16) unsigned char tiles[];
  __shared__ __align__(8) unsigned long long barriers[kBarriers];
  __shared__ tile_info_t tile_infos[kPublished];
  __shared__ entry_t entries[kHasOptions ? kPublished : 1];
  __shared__ dbias_t* dbias_tiles[kMakesDbias ? kPublished : 1];
  __shared__ __align__(8) float of_keys[kTermsOfKeys ? kStagesTerms * kBlockN : 2];
  __shared__ unsigned listed[kListsTiles ? kStagesK : 1];
  const arguments_t args = {inputs,
                            stats,
                            dq,
                            DBIAS_ARGUMENT,
                            found,
                            counter,
                            LISTS_ARGUMENT,
                            {SCORE_ARGUMENTS},
                            grads};
  __shared__ function_place_t places[kPublished];
  __shared__ const unsigned* lists[kPublished];
  const shared_t shared = {tile_infos,  entries, places, lists,
                           dbias_tiles, of_keys, listed};
  const addresses_t smem(tiles, barriers);
  if (threadIdx.x == 0) smem.init_barriers();
  __syncthreads();  // the barriers are initialized

  const int group = uniform(threadIdx.x / 128);
  if (group == kGroups) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    producer_t producer{args, shared, smem};
    if (kTermsOfKeys && threadIdx.x / 32 == 4 * kGroups + 1) {
      producer.read_key_terms();
    } else if (threadIdx.x / 32 == 4 * kGroups && ptx::elect()) {
      producer.produce();
    }
    return;
  }
  ptx::setmaxnreg_inc<kConsumerRegisters>();
  consumer_t(args, shared, smem, group).consume();
}

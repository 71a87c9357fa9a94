// SPDX-License-Identifier: MIT
// attention_vjp_hopper_wide_keys: dk and dv for wide heads or score options, by TMA and
// wgmma, for sm_90a.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), the part of a tile of
//            keys, over blocks of queries; products transposed, so that keys are rows:
//                S = k q^T,  P = exp(scale S - lse),  dP = v dO^T,  dS = P (dP - delta)
//                dv += P dO,  dk += dS q
//            Sums of 256 columns take half of a thread's registers, so each warpgroup
//            owns one: the first computes S, P and dv, the second dP, dS and dk. P goes
//            from the first to the second through shared memory; both use the same
//            layout, so each thread passes its numbers to one other thread.
//            attention_vjp_hopper_wide_queries computes dq. Only the first warpgroup
//            applies score options (backward_score_mod.cuh); with a softcap it hands
//            over P times the derivative of the score
// Grid       Persistent, one block per multiprocessor. A work tile is a tile of keys;
//            blocks take them from a counter where these differ in length
// Threads    two consumer warpgroups; one thread of a third loads by TMA and finds the
//            next work tile
// Tiles      k, v     64 x kHeadDim   loaded once per work tile, 64 columns into
//                                     registers, the others into shared memory
//            q, dO    64 x kHeadDim   shared, kStagesQ and kStagesDout stages
//            bias, mask  64 x 64      shared, kStagesTerms stages, if queries differ
//            P        64 x 64 float   shared
//            S, P, dP, dS, dk, dv  registers, in the layout of wgmma
// Memory     global: k, v, dk and dv once; q and dO once per tile of keys, mostly L2
// Numbers    S, P, dP, dS and sums in float; P and dS rounded to elem_t before
//            products. A fixed order of sums: the same bits in every run
// Limits     as attention_vjp_hopper, also for infinities and NaN; entries that are
//            summed see the same keys, mask and bias aside
#include "attention/sm90/backward_score_mod.cuh"
#include "attention/sm90/score_arguments.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"

#if !defined(STAGES_Q) || !defined(STAGES_DOUT)
#error "STAGES_Q and STAGES_DOUT come from the host"
#endif
// q is read for S and, a step later, for dk. dO is read for dP and dv at almost the
// same time, and has one stage less where memory is short.
constexpr int kStagesQ = STAGES_Q, kStagesDout = STAGES_DOUT;
constexpr int kStages = kStagesQ + kStagesDout;
constexpr int kTerms = kHasTiles ? kStagesTerms : 0;
// Chunks of k and v kept in registers during a work tile. That saves reads of shared
// memory, which is as busy as the tensor cores. They arrive through a stage of q.
constexpr int kHeld = 1;
constexpr int kBytesRest = (kChunks - kHeld) * kChunk;
// Bytes of a stage of q; with 64 columns it must also hold chunks of k and v.
constexpr int kBytesQ = kChunks > 2 * kHeld ? kBytes : 2 * kHeld * kChunk;

constexpr int kBytesWeights = kBlockN * kBlockM * 4, kBytesStats = kBlockM * 4;

// Named barriers: P is written; P has been read.
constexpr int kWritten = 1, kRead = 2;
// racecheck of compute-sanitizer follows the arrivals of individual lanes at an
// mbarrier, but neither bar.arrive nor one lane that arrives for its warp. For it each
// lane arrives at mbarriers, which gives the same order and takes 0 to 5 % longer.
constexpr bool kEachArrives = IS_GIVEN(EACH_LANE_ARRIVES);

// s = a b^T with the first chunks of a in registers.
__device__ __forceinline__ void multiply_held(float (&s)[kScores],
                                              const unsigned (&held)[4 * kHeld][4],
                                              unsigned long long a,
                                              unsigned long long b) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    const unsigned long long from = b + (chunk * kChunk + inside) / 16;
    if (chunk < kHeld) {
      ptx::wgmma_t<elem_t, 64>::rs_k(s, held[chunk < kHeld ? step : 0], from, step > 0);
    } else {
      ptx::wgmma_t<elem_t, 64>::ss(s, a + ((chunk - kHeld) * kChunk + inside) / 16,
                                   from, 1);
    }
  }
}

// --- shared memory

// A work tile as published by the producer.
struct tile_info_t {
  index_t dk, dv;  // offset of the tile's first row in the gradients
  int num_steps;   // blocks of queries over all summed entries; < 0: no tile left
  int kept, key_first, num_keys;
  int block_first, block_last;  // of queries that see keys of the tile
  int low, high;                // mask_bounds_t, for query 0
  matrix_t k, v;
};

// Where the queries of a summed entry lie; kept here for lack of registers.
struct source_t {
  matrix_t q, dout;
  int stats;  // the first block of statistics
};

struct shared_t {
  tile_info_t* tile_infos;  // kPublished
  source_t& source;
  // The options for the keys of the tile: those of the current entry, and those for the
  // queries in each stage of q.
  entry_t &source_entry, *entries;
  function_place_t &source_place, *places;  // the same for functions
};

constexpr int kBarriers = 6 + 2 * kStages + 2 * kTerms;

// Shared memory addresses.
struct addresses_t {
  unsigned k, v, q, dout, weights, bias, mask, lse, delta;  // tiles
  unsigned k_full, v_full, q_full, dout_full, k_empty, v_empty, q_empty, dout_empty;
  unsigned terms_full, terms_empty, p_written, p_read;

  __device__ __forceinline__ addresses_t(const void* tiles,
                                         const unsigned long long* barriers) {
    k = swizzled_tiles(tiles);
    v = k + kBytesRest;
    q = v + kBytesRest;
    dout = q + kStagesQ * kBytesQ;
    weights = dout + kStagesDout * kBytes;
    bias = weights + kBytesWeights;
    mask = bias + kTerms * kBytesBias;
    lse = mask + kTerms * kBytesMask;
    delta = lse + kStagesQ * kBytesStats;
    k_full = ptx::shared_address(barriers);
    v_full = k_full + 8;
    q_full = v_full + 8;
    dout_full = q_full + 8 * kStagesQ;
    k_empty = dout_full + 8 * kStagesDout;
    v_empty = k_empty + 8;
    q_empty = v_empty + 8;
    dout_empty = q_empty + 8 * kStagesQ;
    terms_full = dout_empty + 8 * kStagesDout;
    terms_empty = terms_full + 8 * kTerms;
    p_written = terms_empty + 8 * kTerms;
    p_read = p_written + 8;
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int n = 0; n < 2 + kStages; ++n) ptx::mbarrier_init(k_full + 8 * n, 1);
    // Each warp arrives when it has finished.
    for (int n = 0; n < 2; ++n) ptx::mbarrier_init(k_empty + 8 * n, 4);
    for (int n = 0; n < kStagesQ; ++n) ptx::mbarrier_init(q_empty + 8 * n, 8);
    for (int n = 0; n < kStagesDout; ++n) {
      ptx::mbarrier_init(dout_empty + 8 * n, kEachArrives ? 4 + 128 : 8);
    }
    ptx::mbarrier_init(p_written, 128);
    ptx::mbarrier_init(p_read, 128);
    for (int n = 0; n < kTerms; ++n) {
      ptx::mbarrier_init(terms_full + 8 * n, 1);
      ptx::mbarrier_init(terms_empty + 8 * n, kEachArrives ? 128 : 4);
    }
    ptx::fence_mbarrier_init();
  }
};

// The arguments of the kernel.
struct arguments_t {
  const all_inputs_t& inputs;
  const float* stats;
  elem_t *dk, *dv;
  found_t* found;
  int* counter;
  tile_lists_t tile_lists;
  score_arguments_t score;
  const grads_t& grads;
};

// Positions in the rings, the same in producer and consumers.
struct pipeline_t {
  ring_t<kStagesQ> q;
  ring_t<kStagesDout> dout;
  ring_t<kStagesTerms> terms;
  int place = 0;  // slot of tile_infos
};

// --- producer

struct producer_t {
  const arguments_t& args;
  const shared_t& shared;
  const addresses_t& smem;
  pipeline_t at;

  // Computes and publishes work tile `number`.
  __device__ __forceinline__ void publish(int number) const {
    const inputs_t& inputs = args.inputs;
    const params_t& params = args.score.params;
    const grads_t& grads = args.grads;
    tile_info_t& info = shared.tile_infos[at.place];
    info.num_steps = -1;
    if (number >= inputs.num_work_tiles) return;
    const work_tile_t tile = tile_of<(kBounds > 0)>(number, inputs);
    const auto kept = locate(grads.kept, tile.kept);
    const int key_first = tile.tile * kBlockN;
    info.dk = kept.of[1] + key_first * grads.row[0];
    info.dv = kept.of[2] + key_first * grads.row[1];
    info.kept = tile.kept;
    info.key_first = key_first;
    info.num_keys = static_cast<int>(params.seqlen_k) - key_first;
    int block_first = 0, block_last = inputs.num_blocks;
    if constexpr (kBounds > 0) {
      // Entries that are summed see the same keys.
      const tile_coord_t entry =
          kBoundsPerEntry ? grads.entry(params, kept.of[0], 0) : tile_coord_t();
      const scores_t scores = args.score.scores_of(entry);
      const range_t queries = scores.queries_of(key_first, key_first + kBlockN);
      block_first = static_cast<int>(queries.first) / kBlockM;
      block_last = (static_cast<int>(queries.last) + kBlockM - 1) / kBlockM;
      if (queries.first >= queries.last) block_last = block_first;
      const mask_bounds_t bounds = scores.mask_bounds(0, key_first);
      info.low = bounds.low;
      info.high = bounds.high;
    }
    info.block_first = block_first;
    info.block_last = block_last;
    info.num_steps = (block_last - block_first) * inputs.num_summed;
    if constexpr (kListsTiles) {
      info.num_steps = 0;
      for (int summed = 0; summed < inputs.num_summed; ++summed) {
        info.num_steps += num_seen(list_of(info, summed));
      }
    }
    const tile_coord_t entry = grads.entry(params, kept.of[0], 0);
    info.k = matrix_of(entry, entry.kv_head, params.k);
    info.v = matrix_of(entry, entry.kv_head, params.v);
  }
  // The blocks of queries of a summed entry that the mask function shows to the tile.
  __device__ __forceinline__ const unsigned* list_of(const tile_info_t& info,
                                                     int summed) const {
    const params_t& params = args.score.params;
    tile_coord_t at =
        args.grads.entry(params, locate(args.grads.kept, info.kept).of[0], summed);
    at.tile = info.key_first / kBlockN;
    return args.tile_lists.of(at, static_cast<int>(params.num_heads));
  }
  __device__ __forceinline__ void find_source(int kept, int summed,
                                              int key_first) const {
    const params_t& params = args.score.params;
    const grads_t& grads = args.grads;
    const tile_coord_t entry =
        grads.entry(params, locate(grads.kept, kept).of[0], summed);
    shared.source.q = matrix_of(entry, entry.head, params.q);
    shared.source.dout = matrix_of(entry, entry.head, grads.dout);
    shared.source.stats = static_cast<int>(entry.row_of_heads) * args.inputs.num_blocks;
    if constexpr (kHasOptions) {
      const scores_t scores = args.score.scores_of(entry);
      shared.source_entry.set(scores, entry, params, 0, key_first);
      if constexpr (kHasFunctions) shared.source_place.set(scores, 0, key_first);
    }
  }

  // Loads k and v: the first chunks into a stage of q, the others into their own tiles.
  __device__ __forceinline__ void load_keys(const tile_info_t& info) {
    const inputs_t& inputs = args.inputs;
    const int key_first = info.key_first;
    const unsigned full = smem.q_full + 8 * at.q.stage;
    wait(smem.q_empty + 8 * at.q.stage, at.q.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, 2 * kHeld * kChunk);
    const unsigned held = smem.q + at.q.stage * kBytesQ;
    load_chunks<0, kHeld>(held, inputs.k_map, full, key_first, info.k);
    load_chunks<0, kHeld>(held + kHeld * kChunk, inputs.v_map, full, key_first, info.v);
    at.q.advance();
    ptx::mbarrier_arrive_expect_tx(smem.k_full, kBytesRest);
    load_chunks<kHeld, kChunks>(smem.k, inputs.k_map, smem.k_full, key_first, info.k);
    ptx::mbarrier_arrive_expect_tx(smem.v_full, kBytesRest);
    load_chunks<kHeld, kChunks>(smem.v, inputs.v_map, smem.v_full, key_first, info.v);
  }
  // Loads a block of queries, with bias and mask for its scores.
  __device__ __forceinline__ void load_queries(const tile_info_t& info, int block,
                                               bool is_mixed = false) {
    const all_inputs_t& inputs = args.inputs;
    const source_t& source = shared.source;
    const float* const rows =
        args.stats + index_t(source.stats + block) * (2 * kBlockM);
    const unsigned q_barrier = smem.q_full + 8 * at.q.stage,
                   dout_barrier = smem.dout_full + 8 * at.dout.stage;
    wait(smem.q_empty + 8 * at.q.stage, at.q.parity ^ 1);
    if constexpr (kHasOptions) {
      ::publish(shared.entries[at.q.stage], shared.source_entry, block * kBlockM);
      if constexpr (kHasFunctions) {
        function_place_t place = shared.source_place.shifted(block * kBlockM, 0);
        place.is_mixed = is_mixed;
        shared.places[at.q.stage] = place;
      }
    }
    ptx::mbarrier_arrive_expect_tx(q_barrier, kBytes + kBytesStats);
    load_chunks<0, kChunks>(smem.q + at.q.stage * kBytesQ, inputs.q_map, q_barrier,
                            block * kBlockM, source.q);
    ptx::cp_async_bulk(smem.lse + at.q.stage * kBytesStats, rows, kBytesStats,
                       q_barrier);
    wait(smem.dout_empty + 8 * at.dout.stage, at.dout.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(dout_barrier, kBytes + kBytesStats);
    load_chunks<0, kChunks>(smem.dout + at.dout.stage * kBytes, inputs.dout_map,
                            dout_barrier, block * kBlockM, source.dout);
    ptx::cp_async_bulk(smem.delta + at.dout.stage * kBytesStats, rows + kBlockM,
                       kBytesStats, dout_barrier);
    if constexpr (kHasTiles) {
      const unsigned full = smem.terms_full + 8 * at.terms.stage;
      wait(smem.terms_empty + 8 * at.terms.stage, at.terms.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, kBytesBias + kBytesMask);
      load_terms(smem.bias + at.terms.stage * kBytesBias,
                 smem.mask + at.terms.stage * kBytesMask, inputs, shared.source_entry,
                 full, block * kBlockM, info.key_first);
      at.terms.advance();
    }
    at.q.advance();
    at.dout.advance();
  }

  // Loads the blocks in the lists of all summed entries.
  __device__ __forceinline__ void load_listed(const tile_info_t& info) {
    for (int summed = 0; summed < args.inputs.num_summed; ++summed) {
      const unsigned* const list = list_of(info, summed);
      const int count = num_seen(list);
      if (count > 0) find_source(info.kept, summed, info.key_first);
      listed_tile_t now = listed_tile(list, 0);
      for (int n = 0; n < count; ++n) {
        const listed_tile_t next = listed_tile(list, min(n + 1, count - 1));
        load_queries(info, now.tile(), now.is_mixed(0));
        now = next;
      }
    }
  }

  __device__ __forceinline__ void produce() {
    int number = static_cast<int>(blockIdx.x);
    for (unsigned num_done = 0;; ++num_done) {
      publish(number);
      const tile_info_t& info = shared.tile_infos[at.place];
      if (info.num_steps >= 0) {
        prefetch_rows(args.inputs.k_map, info.key_first, info.k);
        prefetch_rows(args.inputs.v_map, info.key_first, info.v);
      }
      wait(smem.k_empty, (num_done & 1) ^ 1);
      wait(smem.v_empty, (num_done & 1) ^ 1);
      if (info.num_steps < 0) {
        ptx::mbarrier_arrive(smem.k_full);
        ptx::mbarrier_arrive(smem.v_full);
        return;
      }
      load_keys(info);
      const int num_steps = info.num_steps;
      if constexpr (kListsTiles) {
        load_listed(info);
      } else {
        int block = info.block_first, summed = 0;
        for (int step = 0; step < num_steps; ++step) {
          if (block == info.block_first) {
            find_source(info.kept, summed++, info.key_first);
          }
          load_queries(info, block);
          if (++block == info.block_last) block = info.block_first;
        }
      }
      number = tile_after(number, args.counter);
      at.place = place_after(at.place);
    }
  }
};

// --- consumers

// The last product of a work tile: what it reads, and the barrier that then opens.
struct last_sum_t {
  unsigned long long tile;
  unsigned barrier;
};

// Common to both warpgroups: sums of a gradient, scores, and the array of their rows.
struct consumer_t {
  const arguments_t& args;
  const shared_t& shared;
  const addresses_t& smem;
  int role, warp, lane;
  fragment_t<true> fragment;  // row: a key; the second is 8 further
  unsigned weights;           // address of this thread's numbers of P
  pipeline_t at;
  // Parity of the barriers that pass P from one warpgroup to the other.
  unsigned p_parity = 0;
  float sums[kSums], s[kScores];
  unsigned held[4 * kHeld][4];
  unsigned factors[4][4];  // P or dS, rounded

  __device__ __forceinline__ consumer_t(const arguments_t& args, const shared_t& shared,
                                        const addresses_t& smem, int role)
      : args(args),
        shared(shared),
        smem(smem),
        role(role),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32),
        fragment{warp * 16 + lane / 4, lane},
        weights(smem.weights + threadIdx.x % 128 * 16) {}

  // This warp has finished with a tile.
  __device__ __forceinline__ void release(unsigned barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  // What TMA loads into a stage next must come behind what lanes have read of it:
  // without a fence their loads may still be under way when the barrier opens.
  __device__ __forceinline__ void finish_reads() const {
    ptx::fence_proxy_async();
    __syncwarp();
  }
  // The lanes of this warp have read a tile.
  __device__ __forceinline__ void release_read(unsigned barrier) const {
    finish_reads();
    if constexpr (kEachArrives) {
      ptx::mbarrier_arrive(barrier);
    } else {
      release(barrier);
    }
  }
  __device__ __forceinline__ void publish_p(unsigned barrier, int number) const {
    if constexpr (kEachArrives) {
      ptx::mbarrier_arrive(barrier);
    } else {
      ptx::bar_arrive<256>(number);
    }
  }
  __device__ __forceinline__ void wait_for_p(unsigned barrier, int number) {
    if constexpr (kEachArrives) {
      wait(barrier, p_parity);
      p_parity ^= 1;
    } else {
      ptx::bar_sync<256>(number);
    }
  }

  // Loads the chunks that stay in registers. A lane gives the address of 8 columns of a
  // row; the swizzle XORs bits 4 to 6 with the row.
  __device__ __forceinline__ void load_held() {
    const unsigned source =
        smem.q + role * kHeld * kChunk + (warp * 16 + lane % 16) * 128;
    wait(smem.q_full + 8 * at.q.stage, at.q.parity);
#pragma unroll
    for (int step = 0; step < 4 * kHeld; ++step) {
      const unsigned inside = (step % 4 * 32 + lane / 16 * 16) ^ (lane % 8 * 16);
      ptx::ldmatrix_x4(held[step],
                       source + at.q.stage * kBytesQ + step / 4 * kChunk + inside);
    }
    finish_reads();
    release(smem.q_empty + 8 * at.q.stage);
    at.q.advance();
  }
  __device__ __forceinline__ void make_uniform() {
    at.q = uniform(at.q);
    at.dout = uniform(at.dout);
    if constexpr (kHasTiles) at.terms = uniform(at.terms);
  }

  // s = k q^T or v dO^T for a stage that has arrived.
  __device__ __forceinline__ void start_scores(unsigned long long own,
                                               unsigned long long other) {
    ptx::wgmma_fence();
    multiply_held(s, held, own, other);
    ptx::wgmma_commit_group();
  }
  // dv += P dO or dk += dS q.
  __device__ __forceinline__ void start_sums(unsigned long long tile) {
    ptx::wgmma_fence();
    multiply_sums(sums, factors, tile);
    ptx::wgmma_commit_group();
  }

  // The next work tile; its number of blocks of queries is < 0 if there is none.
  __device__ __forceinline__ const volatile tile_info_t& info() const {
    return shared.tile_infos[at.place];
  }
  __device__ __forceinline__ int begin_tile(unsigned full, unsigned num_done) {
    wait(full, num_done & 1);
    return uniform(info().num_steps);
  }
  __device__ __forceinline__ void begin_sums() {
#pragma unroll
    for (int e = 0; e < kSums; ++e) sums[e] = 0;
    load_held();
    make_uniform();
  }
  __device__ __forceinline__ void store(elem_t* target, index_t row_step, float factor,
                                        int dim) const {
    const float nonfinite =
        store_rows(sums, factor, target, row_step, fragment.row, info().num_keys, dim);
    if (nonfinite != 0) args.found->nonfinite = 1;
  }
};

// The first warpgroup: S, P and dv.
struct dv_consumer_t : consumer_t {
  unsigned long long k_rows, q_rows, dout_sums;
  tile_terms_t<true> terms;
  function_rows_t<true, true, false> functions;
  float rest[kScores];  // with options: what is added to the exponents
  int block;            // of queries

  __device__ __forceinline__ dv_consumer_t(const consumer_t& consumer)
      : consumer_t(consumer),
        k_rows(descriptor(smem.k, 16)),
        q_rows(descriptor(smem.q, 16)),
        dout_sums(descriptor(smem.dout, kChunk)),
        terms(fragment.row, lane) {}

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int e = 0; e < kScores; e += 2) {
      factors[e / 8][e / 2 % 4] = pair16_t::from(s[e + 1], s[e]);
    }
  }
  // Address of the lse of this thread's queries in a stage of q.
  __device__ __forceinline__ unsigned lse_here() const {
    return smem.lse + at.q.stage * kBytesStats + lane % 4 * 8;
  }
  __device__ __forceinline__ void release_q() {
    finish_reads();
    release(smem.q_empty + 8 * at.q.stage);
    at.q.advance();
  }

  // Without options: s becomes P of a block of queries.
  __device__ __forceinline__ void softmax_plain() {
    const inputs_t& inputs = args.inputs;
    const int num_keys = info().num_keys;
    int low = -(1 << 30), high = 1 << 30;
    if constexpr (kBounds > 0) {
      low = info().low + block * kBlockM;
      high = info().high + block * kBlockM;
      if (++block == info().block_last) block = info().block_first;
    }
    fragment.mask(s, low, high, num_keys, inputs.hidden);
    const unsigned lse = lse_here();
#pragma unroll
    for (int e = 0; e < kScores; e += 4) {
      const float2 log_sum = ptx::load_shared_f32x2(lse + e * 8);
      s[e] = ptx::ex2_approx_ftz(s[e] * inputs.to_log2 - log_sum.x);
      s[e + 1] = ptx::ex2_approx_ftz(s[e + 1] * inputs.to_log2 - log_sum.y);
      s[e + 2] = ptx::ex2_approx_ftz(s[e + 2] * inputs.to_log2 - log_sum.x);
      s[e + 3] = ptx::ex2_approx_ftz(s[e + 3] * inputs.to_log2 - log_sum.y);
    }
    release_q();
  }

  template <typename Use> __device__ __forceinline__ void find_rest_of(const Use& use) {
    const volatile entry_t& entry = shared.entries[at.q.stage];
    const tile_terms_t<true> tile = terms.at(smem.bias + at.terms.stage * kBytesBias,
                                             smem.mask + at.terms.stage * kBytesMask);
    float slope = 0, distance = 0;
    if constexpr (kHasAlibi) {
      slope = entry.slope * float(kLog2e);
      distance = static_cast<float>(entry.diagonal + fragment.distance());
    }
    float of_keys[2] = {0, 0};
    if constexpr (kTermsOfKeys) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        of_keys[r] = term_of_key(entry.bias, entry.mask, args.score.params,
                                 info().key_first + fragment.row + 8 * r);
      }
    }
    if constexpr (kHasTiles) {
      wait(smem.terms_full + 8 * at.terms.stage, at.terms.parity);
    }
    const unsigned lse = lse_here();
    float2 log_sum;
    find_rest(
        tile, slope, distance,
        [&](int e) {
          if (e % 4 == 0) log_sum = ptx::load_shared_f32x2(lse + e * 8);
          return e % 2 ? log_sum.y : log_sum.x;
        },
        [&](int e) { return of_keys[e / 2 % 2]; }, use);
    if constexpr (kHasTiles) {
      release_read(smem.terms_empty + 8 * at.terms.stage);
      at.terms.advance();
    }
  }
  __device__ __forceinline__ void find_rest_ahead() {
    if constexpr (kAhead) find_rest_of([&](int e, float x) { rest[e] = x; });
  }

  // Where the functions are evaluated.
  __device__ __forceinline__ function_place_t place_here() const {
    const volatile function_place_t& place = shared.places[at.q.stage];
    return place.shifted(0, 0);
  }

  // With a derivative, P goes to p, and s becomes the factor of dP - delta.
  __device__ __forceinline__ void softmax_of_terms() {
    const mask_bounds_t bounds = shifted(shared.entries[at.q.stage].bounds, 0, 0);
    float derivatives[kDerivatives];
    const params_t& params = args.score.params;
    add_terms(fragment, s, derivatives, args.inputs, params, functions, rest,
              [&](auto use) { find_rest_of(use); });
    if constexpr (kHasMaskFunction) {
      const function_place_t place = place_here();
      if (place.is_mixed) hide_keys(fragment, s, place, params);
    }
    release_q();
    ::mask(fragment, s, bounds);
#pragma unroll
    for (int e = 0; e < kScores; ++e) s[e] = ptx::ex2_approx_ftz(s[e]);
    if constexpr (kHasChain) {
      pack();
#pragma unroll
      for (int e = 0; e < kScores; ++e) s[e] *= derivatives[e];
    }
  }
  __device__ __forceinline__ void start_s() {
    wait(smem.q_full + 8 * at.q.stage, at.q.parity);
    start_scores(k_rows, q_rows + at.q.stage * (kBytesQ / 16));
  }
  // Waits for S, which is in flight, and computes P.
  __device__ __forceinline__ void softmax() {
    find_rest_ahead();
    if constexpr (kHasScoreFunction) {
      functions.set(args.score.function(), place_here(), fragment);
    }
    ptx::wgmma_wait_group<0>();
    compiler_fence(s);
    if constexpr (kHasOptions) {
      softmax_of_terms();
    } else {
      softmax_plain();
    }
  }

  // Hands over P of a block of queries; returns the stage of its dO.
  __device__ __forceinline__ unsigned pass_p() {
    wait_for_p(smem.p_read, kRead);
#pragma unroll
    for (int e = 0; e < kScores; e += 4) {
      ptx::store_shared_f32x4(weights + e / 4 * 2048, s[e], s[e + 1], s[e + 2],
                              s[e + 3]);
    }
    publish_p(smem.p_written, kWritten);
    if constexpr (!kHasChain) pack();
    const unsigned stage = at.dout.stage;
    wait(smem.dout_full + 8 * stage, at.dout.parity);
    at.dout.advance();
    return stage;
  }
  // One block of queries, with S and P of the next. No product is in flight between
  // steps, because ptxas does not track them around a loop (C7514).
  __device__ __forceinline__ void step() {
    const unsigned stage = pass_p();
    start_sums(dout_sums + stage * (kBytes / 16));
    start_s();
    ptx::wgmma_wait_group<1>();  // dv
    compiler_fence(sums);
    release(smem.dout_empty + 8 * stage);
    softmax();
  }
  // All blocks but the last product.
  __device__ __forceinline__ last_sum_t sum_dv(int num_steps) {
    block = info().block_first;
    if (num_steps > 0) {
      start_s();
      softmax();
#pragma unroll 1
      for (int n = 1; n < num_steps; ++n) step();
    }
    release(smem.k_empty);
    if (num_steps == 0) return {};
    const unsigned stage = pass_p();
    return {dout_sums + stage * (kBytes / 16), smem.dout_empty + 8 * stage};
  }
};

// The second warpgroup: dP, dS and dk. It also has the loop of both over work tiles:
// what both do at the start and the end of one, half of their code, is there once.
struct dk_consumer_t : dv_consumer_t {
  unsigned long long v_rows, dout_rows, q_sums;

  __device__ __forceinline__ dk_consumer_t(const consumer_t& consumer)
      : dv_consumer_t(consumer),
        v_rows(descriptor(smem.v, 16)),
        dout_rows(descriptor(smem.dout, 16)),
        q_sums(descriptor(smem.q, kChunk)) {}

  __device__ __forceinline__ void make_ds(float factor) {
    const unsigned delta = smem.delta + at.dout.stage * kBytesStats + lane % 4 * 8;
    wait_for_p(smem.p_written, kWritten);
#pragma unroll
    for (int e = 0; e < kScores; e += 4) {
      float2 d = ptx::load_shared_f32x2(delta + e * 8);
      const float4 w = ptx::load_shared_f32x4(weights + e / 4 * 2048);
      if constexpr (kNarrow<elem_t>) {
        d.x *= factor;
        d.y *= factor;
#pragma unroll
        for (int f = e; f < e + 4; ++f) s[f] *= factor;
      }
      unsigned (&of_rows)[4] = factors[e / 8];
      of_rows[e / 2 % 4] = pair16_t::from(w.y * (s[e + 1] - d.y), w.x * (s[e] - d.x));
      of_rows[e / 2 % 4 + 1] =
          pair16_t::from(w.w * (s[e + 3] - d.y), w.z * (s[e + 2] - d.x));
    }
  }
  __device__ __forceinline__ void start_dp() {
    wait(smem.dout_full + 8 * at.dout.stage, at.dout.parity);
    start_scores(v_rows, dout_rows + at.dout.stage * (kBytes / 16));
  }
  __device__ __forceinline__ void wait_for_dp() {
    ptx::wgmma_wait_group<0>();
    compiler_fence(s);
  }
  // dS of a block of queries; returns the stage of its q.
  template <bool kLast> __device__ __forceinline__ unsigned find_ds(float factor) {
    make_uniform();
    make_ds(factor);
    if constexpr (!kLast) publish_p(smem.p_read, kRead);
    release_read(smem.dout_empty + 8 * at.dout.stage);  // delta
    at.dout.advance();
    const unsigned stage = at.q.stage;
    wait(smem.q_full + 8 * stage, at.q.parity);
    at.q.advance();
    return stage;
  }
  // One block of queries, with dP of the next.
  __device__ __forceinline__ void step(float factor) {
    const unsigned stage = find_ds<false>(factor);
    start_sums(q_sums + stage * (kBytesQ / 16));
    start_dp();
    ptx::wgmma_wait_group<1>();  // dk
    compiler_fence(sums);
    release(smem.q_empty + 8 * stage);
    wait_for_dp();
  }
  // All blocks but the last product.
  __device__ __forceinline__ last_sum_t sum_dk(int num_steps, float factor) {
    if (num_steps > 0) {
      publish_p(smem.p_read, kRead);  // nothing of this tile is written yet
      start_dp();
      wait_for_dp();
#pragma unroll 1
      for (int n = 1; n < num_steps; ++n) step(factor);
    }
    release(smem.v_empty);
    if (num_steps == 0) return {};
    const unsigned stage = find_ds<true>(factor);
    return {q_sums + stage * (kBytesQ / 16), smem.q_empty + 8 * stage};
  }

  __device__ __forceinline__ void consume() {
    const params_t& params = args.score.params;
    const float factor = role == 0 ? 1 : factor_of(args.found);
    for (unsigned num_done = 0;; ++num_done) {
      const int num_steps = begin_tile(role == 0 ? smem.k_full : smem.v_full, num_done);
      if (num_steps < 0) return;
      begin_sums();
      const last_sum_t last = role == 0 ? sum_dv(num_steps) : sum_dk(num_steps, factor);
      if (num_steps > 0) {
        start_sums(last.tile);
        ptx::wgmma_wait_group<0>();
        compiler_fence(sums);
        release(last.barrier);
      }
      store(role == 0 ? args.dv + info().dv : args.dk + info().dk,
            args.grads.row[role == 0],
            role == 0 ? 1 / kFactorP
                      : unfactor_of(factor, static_cast<float>(params.scale)),
            static_cast<int>(role == 0 ? params.head_dim_v : params.head_dim));
      at.place = place_after(at.place);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_vjp_hopper_wide_keys(const __grid_constant__ all_inputs_t inputs,
                                   const float* __restrict__ stats,  // backward.cuh
                                   elem_t* __restrict__ dk,          // as k, summed
                                   elem_t* __restrict__ dv,          // as v, summed
                                   found_t* __restrict__ found,
                                   int* __restrict__ counter,  // starts at 0
                                   LISTS_PARAMETER SCORE_PARAMETERS,
                                   const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(16) unsigned char tiles[];
  __shared__ __align__(8) unsigned long long barriers[kBarriers];
  __shared__ tile_info_t tile_infos[kPublished];
  __shared__ source_t source;
  __shared__ entry_t source_entry, entries[kHasOptions ? kStagesQ : 1];
  __shared__ function_place_t source_place, places[kStagesQ];
  const arguments_t args = {
      inputs, stats, dk, dv, found, counter, LISTS_ARGUMENT, {SCORE_ARGUMENTS}, grads};
  const shared_t shared = {tile_infos, source,       source_entry,
                           entries,    source_place, places};
  const addresses_t smem(tiles, barriers);
  if (threadIdx.x == 0) smem.init_barriers();
  __syncthreads();  // the barriers are initialized

  const int role = uniform(threadIdx.x / 128);
  if (role == 2) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x / 32 != 8 || !ptx::elect()) return;
    producer_t{args, shared, smem}.produce();
    return;
  }
  ptx::setmaxnreg_inc<kConsumerRegisters>();
  dk_consumer_t(consumer_t(args, shared, smem, role)).consume();
}

// SPDX-License-Identifier: MIT
// attention_vjp_hopper_wide_keys: dk and dv for wide heads, and for options, by tensor
// cores fed by TMA, for sm_90a.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), the share of a tile of
//            keys, over blocks of queries; products transposed, so that keys are rows:
//                S = k q^T,  P = exp(scale S - lse),  dP = v dO^T,  dS = P (dP - delta)
//                dv += P dO,  dk += dS q
//            Sums of 256 columns take half of a thread's registers, so each warpgroup
//            has one: the first makes S, P and dv, the second dP, dS and dk. P goes
//            from one to the other through shared memory, number by number, since the
//            same thread of both has the same place. attention_vjp_hopper_wide_queries
//            makes dq. Options (backward_score_terms.cuh) are the first's alone: with
//            softcap it hands over P times the derivative of the score
// Grid       a block a multiprocessor. An item is a tile of keys of a kept entry;
//            blocks take item after item, from a counter where items differ in length
// Threads    two warpgroups compute; a thread of a third asks TMA, and
//            finds out what the next item is
// Tiles      k, v     64 x kHeadDim   loaded once an item, 64 columns to registers and
//                                     the others to shared memory
//            q, dO    64 x kHeadDim   shared, kStagesQ and kStagesDout stages
//            bias, mask  64 x 64      shared, kStagesTerms stages, if queries differ
//            P        64 x 64 float   shared
//            S, P, dP, dS, dk, dv  registers, as wgmma lays them out
// Memory     global: k, v, dk and dv once; q and dO once a tile of keys, mostly from L2
// Numbers    S, P, dP, dS and sums in float; P and dS rounded to elem_t before
//            products. One order of sums: the same bits in every run
// Limits     as attention_vjp_hopper, of infinities and NaN too; entries that are
// summed
//            see the same keys, mask and bias aside
#include "attention/sm90/backward_score_terms.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"

#if !defined(STAGES_Q) || !defined(STAGES_DOUT)
#error "STAGES_Q and STAGES_DOUT come from the host"
#endif
// q is read for S and, a step later, for dk; dO is read for dP and dv nearly at one
// time, and has a stage less where there is no room.
constexpr int kStagesQ = STAGES_Q, kStagesDout = STAGES_DOUT;
constexpr int kStages = kStagesQ + kStagesDout;
constexpr int kTerms = kHasTiles ? kStagesTerms : 0;
// Chunks of k and v that stand in registers while an item is computed: their products
// ask for fewer bytes of shared memory, which is as busy as the tensor cores. They come
// by a stage of q.
constexpr int kHeld = 1;
constexpr int kBytesRest = (kChunks - kHeld) * kChunk;
// Of a stage of q; that of 64 columns has to hold k and v, too.
constexpr int kBytesQ = kChunks > 2 * kHeld ? kBytes : 2 * kHeld * kChunk;
// setmaxnreg moves registers inside the pool of the launch, 168 a thread. Options take
// some of the producer's, and sums leave some over in narrow heads.
constexpr bool kNeedsMany = kHasOptions && kHeadDim <= 192;
constexpr int kProducerRegisters = kNeedsMany ? 72 : 40;
constexpr int kConsumerRegisters = kNeedsMany ? 216 : 232;

constexpr int kBytesWeights = kBlockN * kBlockM * 4, kBytesStats = kBlockM * 4;

// Barriers by number: P is there; P has been read.
constexpr int kWritten = 1, kRead = 2;
// compute-sanitizer's racecheck follows arrivals at an mbarrier, of the lane that
// comes; bar.arrive it does not follow, nor one lane that arrives for its warp. For it
// each lane arrives at mbarriers, which orders the same, and takes 0 to 5 % longer.
#ifdef EACH_LANE_ARRIVES
constexpr bool kEachArrives = true;
#else
constexpr bool kEachArrives = false;
#endif

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

// What the producer finds out about an item.
struct view_t {
  index_t dk, dv;  // of the first row of the tile in the gradients
  int num_steps;   // blocks of queries, over all summed entries; < 0: no item is left
  int kept, key_first, num_keys;
  int block_first, block_last;  // of queries that see keys of the tile
  int low, high;                // mask_bounds_t, from query 0
  matrix_t k, v;
};

// Where the queries of a summed entry lie. The producer has no registers for it.
struct source_t {
  matrix_t q, dout;
  int stats;  // the first block of statistics
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_vjp_hopper_wide_keys(const __grid_constant__ all_inputs_t inputs,
                                   const float* __restrict__ stats,  // backward.cuh
                                   elem_t* __restrict__ dk,          // as k, summed
                                   elem_t* __restrict__ dv,          // as v, summed
                                   found_t* __restrict__ found,
                                   int* __restrict__ counter,  // starts as 0
                                   SCORE_PARAMETERS,
                                   const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ __align__(8) unsigned long long barriers[6 + 2 * kStages + 2 * kTerms];
  __shared__ view_t views[kViews];
  __shared__ source_t source;
  // What options are to the keys of the tile: those of the source, and of the queries
  // in a stage of q.
  __shared__ entry_t source_entry, entries[kHasOptions ? kStagesQ : 1];

  // The host adds 1024 bytes for this: a swizzled tile starts at a multiple.
  const unsigned smem_k = (ptx::shared_address(smem) + 1023) & ~1023u;
  const unsigned smem_v = smem_k + kBytesRest, smem_q = smem_v + kBytesRest,
                 smem_dout = smem_q + kStagesQ * kBytesQ,
                 smem_weights = smem_dout + kStagesDout * kBytes,
                 smem_bias = smem_weights + kBytesWeights,
                 smem_mask = smem_bias + kTerms * kBytesBias,
                 smem_lse = smem_mask + kTerms * kBytesMask,
                 smem_delta = smem_lse + kStagesQ * kBytesStats;
  const unsigned k_full = ptx::shared_address(barriers), v_full = k_full + 8,
                 q_full = v_full + 8, dout_full = q_full + 8 * kStagesQ,
                 k_empty = dout_full + 8 * kStagesDout, v_empty = k_empty + 8,
                 q_empty = v_empty + 8, dout_empty = q_empty + 8 * kStagesQ,
                 terms_full = dout_empty + 8 * kStagesDout,
                 terms_empty = terms_full + 8 * kTerms,
                 p_written = terms_empty + 8 * kTerms, p_read = p_written + 8;
  if (threadIdx.x == 0) {
    for (int n = 0; n < 2 + kStages; ++n) ptx::mbarrier_init(k_full + 8 * n, 1);
    // Warps that are done arrive.
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
  __syncthreads();  // the barriers are there before anyone uses them

  const int role = uniform(threadIdx.x / 128);
  ring_t<kStagesQ> of_q;
  ring_t<kStagesDout> of_dout;
  ring_t<kStagesTerms> of_terms;
  int place = 0;  // of views
  auto next_place = [&] { place = place + 1 == kViews ? 0 : place + 1; };

  if (role == 2) {
    // --- the producer
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x / 32 != 8 || !ptx::elect()) return;

    int number = static_cast<int>(blockIdx.x);
    auto find = [&](view_t& view) {
      view.num_steps = -1;
      if (number >= inputs.num_items) return;
      const item_t item = item_of(number, inputs);
      const auto kept = locate(grads.kept, item.kept);
      const int key_first = item.tile * kBlockN;
      view.dk = kept.of[1] + key_first * grads.row[0];
      view.dv = kept.of[2] + key_first * grads.row[1];
      view.kept = item.kept;
      view.key_first = key_first;
      view.num_keys = static_cast<int>(params.seqlen_k) - key_first;
      int block_first = 0, block_last = inputs.num_blocks;
      if constexpr (kBounds > 0) {
        // Entries that are summed see the same.
        const tile_coord_t at =
            kBandOfEntry ? grads.entry(params, kept.of[0], 0) : tile_coord_t();
        const scores_t scores(at, SCORE_ARGUMENTS);
        const range_t queries = scores.queries_of(key_first, key_first + kBlockN);
        block_first = static_cast<int>(queries.first) / kBlockM;
        block_last = (static_cast<int>(queries.last) + kBlockM - 1) / kBlockM;
        if (queries.first >= queries.last) block_last = block_first;
        const mask_bounds_t band = scores.mask_bounds(0, key_first);
        view.low = band.low;
        view.high = band.high;
      }
      view.block_first = block_first;
      view.block_last = block_last;
      view.num_steps = (block_last - block_first) * inputs.num_summed;
      const tile_coord_t at = grads.entry(params, kept.of[0], 0);
      view.k = matrix_of(at, at.kv_head, params.k);
      view.v = matrix_of(at, at.kv_head, params.v);
    };
    auto find_source = [&](int kept, int summed, int key_first) {
      const tile_coord_t at =
          grads.entry(params, locate(grads.kept, kept).of[0], summed);
      source.q = matrix_of(at, at.head, params.q);
      source.dout = matrix_of(at, at.head, grads.dout);
      source.stats = static_cast<int>(at.row_of_heads) * inputs.num_blocks;
      if constexpr (kHasOptions) {
        source_entry.set(scores_t(at, SCORE_ARGUMENTS), at, params, 0, key_first);
      }
    };

    find(views[0]);
    for (unsigned items = 0;; ++items) {
      const view_t& view = views[place];
      wait(k_empty, (items & 1) ^ 1);
      wait(v_empty, (items & 1) ^ 1);
      if (view.num_steps < 0) {
        ptx::mbarrier_arrive(k_full);
        ptx::mbarrier_arrive(v_full);
        return;
      }
      const int key_first = view.key_first;
      wait(q_empty + 8 * of_q.stage, of_q.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(q_full + 8 * of_q.stage, 2 * kHeld * kChunk);
      const unsigned held = smem_q + of_q.stage * kBytesQ;
      load_chunks<0, kHeld>(held, inputs.k_map, q_full + 8 * of_q.stage, key_first,
                            view.k);
      load_chunks<0, kHeld>(held + kHeld * kChunk, inputs.v_map,
                            q_full + 8 * of_q.stage, key_first, view.v);
      of_q.advance();
      ptx::mbarrier_arrive_expect_tx(k_full, kBytesRest);
      load_chunks<kHeld, kChunks>(smem_k, inputs.k_map, k_full, key_first, view.k);
      ptx::mbarrier_arrive_expect_tx(v_full, kBytesRest);
      load_chunks<kHeld, kChunks>(smem_v, inputs.v_map, v_full, key_first, view.v);
      const int num_steps = view.num_steps;
      find_source(view.kept, 0, key_first);
      int block = view.block_first, summed = 0;
      for (int step = 0; step < num_steps; ++step) {
        const float* const rows = stats + index_t(source.stats + block) * (2 * kBlockM);
        const unsigned q_barrier = q_full + 8 * of_q.stage,
                       dout_barrier = dout_full + 8 * of_dout.stage;
        wait(q_empty + 8 * of_q.stage, of_q.parity ^ 1);
        if constexpr (kHasOptions) {
          tell(entries[of_q.stage], source_entry, block * kBlockM);
        }
        ptx::mbarrier_arrive_expect_tx(q_barrier, kBytes + kBytesStats);
        load_chunks<0, kChunks>(smem_q + of_q.stage * kBytesQ, inputs.q_map, q_barrier,
                                block * kBlockM, source.q);
        ptx::cp_async_bulk(smem_lse + of_q.stage * kBytesStats, rows, kBytesStats,
                           q_barrier);
        wait(dout_empty + 8 * of_dout.stage, of_dout.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(dout_barrier, kBytes + kBytesStats);
        load_chunks<0, kChunks>(smem_dout + of_dout.stage * kBytes, inputs.dout_map,
                                dout_barrier, block * kBlockM, source.dout);
        ptx::cp_async_bulk(smem_delta + of_dout.stage * kBytesStats, rows + kBlockM,
                           kBytesStats, dout_barrier);
        if constexpr (kHasTiles) {
          const unsigned full = terms_full + 8 * of_terms.stage;
          wait(terms_empty + 8 * of_terms.stage, of_terms.parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(full, kBytesBias + kBytesMask);
          load_terms(smem_bias + of_terms.stage * kBytesBias,
                     smem_mask + of_terms.stage * kBytesMask, inputs, source_entry,
                     full, block * kBlockM, view.key_first);
          of_terms.advance();
        }
        of_q.advance();
        of_dout.advance();
        if (++block == view.block_last && step + 1 < num_steps) {
          block = view.block_first;
          find_source(view.kept, ++summed, view.key_first);
        }
      }
      number = item_after(number, counter);
      next_place();
      view_t& next = views[place];
      find(next);
      if (next.num_steps >= 0) {
        prefetch_rows(inputs.k_map, next.key_first, next.k);
        prefetch_rows(inputs.v_map, next.key_first, next.v);
      }
    }
  }

  // --- those that compute
  ptx::setmaxnreg_inc<kConsumerRegisters>();
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const unsigned long long k_rows = descriptor(smem_k, 16),
                           v_rows = descriptor(smem_v, 16),
                           q_rows = descriptor(smem_q, 16),
                           dout_rows = descriptor(smem_dout, 16),
                           q_sums = descriptor(smem_q, kChunk),
                           dout_sums = descriptor(smem_dout, kChunk);
  // Number e of a thread stands in column e / 4 * 8 + lane % 4 * 2 + e % 2, a query,
  // and row e / 2 % 2 * 8 + row_thread, a key.
  const int row_thread = warp * 16 + lane / 4;
  const unsigned weights = smem_weights + threadIdx.x % 128 * 16;
  // This warp is done with a tile.
  auto release = [&](unsigned barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  // Its lanes have read one.
  auto release_read = [&](unsigned barrier) {
    if constexpr (kEachArrives) {
      ptx::mbarrier_arrive(barrier);
    } else {
      __syncwarp();
      release(barrier);
    }
  };
  // P on its way from one warpgroup to the other: it is there, and has been read.
  unsigned p_parity = 0;
  auto tell_p = [&](unsigned barrier, int number) {
    if constexpr (kEachArrives) {
      ptx::mbarrier_arrive(barrier);
    } else {
      ptx::bar_arrive<256>(number);
    }
  };
  auto wait_for_p = [&](unsigned barrier, int number) {
    if constexpr (kEachArrives) {
      wait(barrier, p_parity);
      p_parity ^= 1;
    } else {
      ptx::bar_sync<256>(number);
    }
  };
  float sums[kSums], s[kScores];
  unsigned held[4 * kHeld][4];
  // What a warpgroup holds of its array. A lane gives the address of 8 columns of a
  // row; the swizzle flips bits 4 to 6 of it by the row.
  const unsigned held_source =
      smem_q + role * kHeld * kChunk + (warp * 16 + lane % 16) * 128;
  auto take_held = [&] {
    wait(q_full + 8 * of_q.stage, of_q.parity);
#pragma unroll
    for (int step = 0; step < 4 * kHeld; ++step) {
      const unsigned inside = (step % 4 * 32 + lane / 16 * 16) ^ (lane % 8 * 16);
      ptx::ldmatrix_x4(held[step],
                       held_source + of_q.stage * kBytesQ + step / 4 * kChunk + inside);
    }
    __syncwarp();
    release(q_empty + 8 * of_q.stage);
    of_q.advance();
  };
  // The rings are the same in all lanes, which the compiler loses sight of between
  // items.
  auto make_uniform = [&] {
    of_q = {unsigned(uniform(of_q.stage)), unsigned(uniform(of_q.parity))};
    of_dout = {unsigned(uniform(of_dout.stage)), unsigned(uniform(of_dout.parity))};
    if constexpr (kHasTiles) {
      of_terms = {unsigned(uniform(of_terms.stage)),
                  unsigned(uniform(of_terms.parity))};
    }
  };

  if (role == 0) {
    // --- S, P and dv
    unsigned p[4][4];
    auto pack = [](unsigned (&p)[4][4], const float (&s)[kScores]) {
#pragma unroll
      for (int e = 0; e < kScores; e += 2) {
        p[e / 8][e / 2 % 4] = pair16_t::from(s[e + 1], s[e]);
      }
    };
    for (unsigned items = 0;; ++items) {
      wait(k_full, items & 1);
      const volatile view_t& view = views[place];
      const int num_steps = uniform(view.num_steps);
      if (num_steps < 0) return;
#pragma unroll
      for (int e = 0; e < kSums; ++e) sums[e] = 0;
      take_held();
      make_uniform();

      int block = view.block_first;
      // s becomes P of a block of queries, whose lse is in a stage.
      auto softmax_plain = [&] {
        const int num_keys = view.num_keys;
        int low = -(1 << 30), high = 1 << 30;
        if constexpr (kBounds > 0) {
          low = view.low + block * kBlockM;
          high = view.high + block * kBlockM;
          if (++block == view.block_last) block = view.block_first;
        }
        if (num_keys < kBlockN || low > 1 - kBlockM || high < kBlockN) {
#pragma unroll
          for (int e = 0; e < kScores; ++e) {
            const int key = row_thread + e / 2 % 2 * 8;
            const int distance = key - e / 4 * 8 - e % 2 - lane % 4 * 2;
            const bool sees = low <= distance && distance < high && key < num_keys;
            if (!sees) s[e] = inputs.hidden;
          }
        }
        const unsigned lse = smem_lse + of_q.stage * kBytesStats + lane % 4 * 8;
#pragma unroll
        for (int e = 0; e < kScores; e += 4) {
          const float2 log_sum = ptx::load_shared_f32x2(lse + e * 8);
          s[e] = ptx::ex2_approx_ftz(s[e] * inputs.to_log2 - log_sum.x);
          s[e + 1] = ptx::ex2_approx_ftz(s[e + 1] * inputs.to_log2 - log_sum.y);
          s[e + 2] = ptx::ex2_approx_ftz(s[e + 2] * inputs.to_log2 - log_sum.x);
          s[e + 3] = ptx::ex2_approx_ftz(s[e + 3] * inputs.to_log2 - log_sum.y);
        }
        __syncwarp();  // all lanes have read lse
        release(q_empty + 8 * of_q.stage);
        of_q.advance();
      };
      // With options: what is added to the exponents.
      float rest[kScores];
      auto find_rest = [&](auto use) {
        const volatile entry_t& entry = entries[of_q.stage];
        const unsigned lse = smem_lse + of_q.stage * kBytesStats + lane % 4 * 8;
        const tile_terms_t<true> tile(smem_bias + of_terms.stage * kBytesBias,
                                      smem_mask + of_terms.stage * kBytesMask,
                                      row_thread, lane);
        float slope = 0, distance = 0;
        if constexpr (kHasAlibi) {
          slope = entry.slope * float(kLog2e);
          distance = static_cast<float>(entry.diagonal + lane % 4 * 2 - row_thread);
        }
        float of_keys[2] = {0, 0};
        if constexpr (kTermsOfKeys) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            of_keys[r] = term_of_key(entry.bias, entry.mask, params,
                                     view.key_first + row_thread + 8 * r);
          }
        }
        if constexpr (kHasTiles) {
          wait(terms_full + 8 * of_terms.stage, of_terms.parity);
        }
        float2 log_sum;
#pragma unroll
        for (int e = 0; e < kScores; ++e) {
          if (e % 4 == 0) log_sum = ptx::load_shared_f32x2(lse + e * 8);
          float x = -(e % 2 ? log_sum.y : log_sum.x);
          if constexpr (kTermsOfKeys) x += of_keys[e / 2 % 2];
          if constexpr (kHasTiles) x += tile(e);
          if constexpr (kHasAlibi) {
            const int apart = e / 4 * 8 + e % 2 - e / 2 % 2 * 8;
            x = fmaf(-slope, fabsf(distance + static_cast<float>(apart)), x);
          }
          use(e, x);
        }
        if constexpr (kHasTiles) {
          release_read(terms_empty + 8 * of_terms.stage);
          of_terms.advance();
        }
      };
      auto keep_rest = [&](int e, float x) { rest[e] = x; };
      // With softcap P goes to p, and s becomes what dP - delta is multiplied by.
      auto softmax_of_terms = [&] {
        const mask_bounds_t band = shifted(entries[of_q.stage].band, 0, 0);
        float derivatives[kDerivatives];
        add_terms(s, derivatives, inputs, rest, find_rest);
        __syncwarp();  // all lanes have read the stage
        release(q_empty + 8 * of_q.stage);
        of_q.advance();
        if (hides_some(band)) {
#pragma unroll
          for (int e = 0; e < kScores; ++e) {
            const int query = e / 4 * 8 + e % 2 + lane % 4 * 2;
            if (!band.sees(query, row_thread + e / 2 % 2 * 8)) {
              s[e] = -infinity<float>();
            }
          }
        }
#pragma unroll
        for (int e = 0; e < kScores; ++e) s[e] = ptx::ex2_approx_ftz(s[e]);
        if constexpr (kHasSoftcap) {
          pack(p, s);
#pragma unroll
          for (int e = 0; e < kScores; ++e) s[e] *= derivatives[e];
        }
      };
      auto softmax = [&] {
        if constexpr (kHasOptions) {
          softmax_of_terms();
        } else {
          softmax_plain();
        }
      };
      auto ask_scores = [&] {
        wait(q_full + 8 * of_q.stage, of_q.parity);
        ptx::wgmma_fence();
        multiply_held(s, held, k_rows, q_rows + of_q.stage * (kBytesQ / 16));
        ptx::wgmma_commit_group();
      };
      // One block of queries; S and P of the next one. No product is in flight between
      // steps: ptxas does not follow them around a loop (C7514).
      auto step = [&](auto is_last) {
        constexpr bool kLast = decltype(is_last)::value;
        wait_for_p(p_read, kRead);
#pragma unroll
        for (int e = 0; e < kScores; e += 4) {
          ptx::store_shared_f32x4(weights + e / 4 * 2048, s[e], s[e + 1], s[e + 2],
                                  s[e + 3]);
        }
        tell_p(p_written, kWritten);
        if constexpr (!kHasSoftcap) pack(p, s);
        const unsigned stage = of_dout.stage;
        wait(dout_full + 8 * stage, of_dout.parity);
        of_dout.advance();
        ptx::wgmma_fence();
        multiply_sums(sums, p, dout_sums + stage * (kBytes / 16));
        ptx::wgmma_commit_group();
        if constexpr (!kLast) ask_scores();
        ptx::wgmma_wait_group<kLast ? 0 : 1>();  // dv
        keep_order(sums);
        release(dout_empty + 8 * stage);
        if constexpr (!kLast) {
          if constexpr (kAhead) find_rest(keep_rest);
          ptx::wgmma_wait_group<0>();
          keep_order(s);
          softmax();
        }
      };
      if (num_steps > 0) {
        ask_scores();
        if constexpr (kAhead) find_rest(keep_rest);
        ptx::wgmma_wait_group<0>();
        keep_order(s);
        softmax();
#pragma unroll 1
        for (int n = 1; n < num_steps; ++n) step(flag_t<false>());
      }
      release(k_empty);
      if (num_steps > 0) step(flag_t<true>());
      const float odd =
          store_rows(sums, 1 / kFactorP, dv + view.dv, grads.row[1], row_thread,
                     view.num_keys, static_cast<int>(params.head_dim_v));
      if (odd != 0) found->odd = 1;
      next_place();
    }
  } else {
    // --- dP, dS and dk
    unsigned ds[4][4];
    const float factor = factor_of(found);
    for (unsigned items = 0;; ++items) {
      wait(v_full, items & 1);
      const volatile view_t& view = views[place];
      const int num_steps = uniform(view.num_steps);
      if (num_steps < 0) return;
#pragma unroll
      for (int e = 0; e < kSums; ++e) sums[e] = 0;
      take_held();
      make_uniform();

      auto ask_scores = [&] {
        wait(dout_full + 8 * of_dout.stage, of_dout.parity);
        ptx::wgmma_fence();
        multiply_held(s, held, v_rows, dout_rows + of_dout.stage * (kBytes / 16));
        ptx::wgmma_commit_group();
      };
      // One block of queries; dP of the next one.
      auto step = [&](auto is_last) {
        constexpr bool kLast = decltype(is_last)::value;
        make_uniform();
        const unsigned delta = smem_delta + of_dout.stage * kBytesStats + lane % 4 * 8;
        wait_for_p(p_written, kWritten);
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
          ds[e / 8][e / 2 % 4] =
              pair16_t::from(w.y * (s[e + 1] - d.y), w.x * (s[e] - d.x));
          ds[e / 8][e / 2 % 4 + 1] =
              pair16_t::from(w.w * (s[e + 3] - d.y), w.z * (s[e + 2] - d.x));
        }
        if constexpr (!kLast) tell_p(p_read, kRead);
        release_read(dout_empty + 8 * of_dout.stage);  // delta
        of_dout.advance();
        const unsigned stage = of_q.stage;
        wait(q_full + 8 * stage, of_q.parity);
        of_q.advance();
        ptx::wgmma_fence();
        multiply_sums(sums, ds, q_sums + stage * (kBytesQ / 16));
        ptx::wgmma_commit_group();
        if constexpr (!kLast) ask_scores();
        ptx::wgmma_wait_group<kLast ? 0 : 1>();  // dk
        keep_order(sums);
        release(q_empty + 8 * stage);
        if constexpr (!kLast) {
          ptx::wgmma_wait_group<0>();
          keep_order(s);
        }
      };
      if (num_steps > 0) {
        tell_p(p_read, kRead);  // nothing of this item has been written yet
        ask_scores();
        ptx::wgmma_wait_group<0>();
        keep_order(s);
#pragma unroll 1
        for (int n = 1; n < num_steps; ++n) step(flag_t<false>());
      }
      release(v_empty);
      if (num_steps > 0) step(flag_t<true>());
      const float unfactor = unfactor_of(factor, static_cast<float>(params.scale));
      const float odd =
          store_rows(sums, unfactor, dk + view.dk, grads.row[0], row_thread,
                     view.num_keys, static_cast<int>(params.head_dim));
      if (odd != 0) found->odd = 1;
      next_place();
    }
  }
}

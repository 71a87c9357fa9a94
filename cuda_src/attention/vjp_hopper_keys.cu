// SPDX-License-Identifier: MIT
// attention_vjp_hopper_keys: dk and dv for wide heads, and for scores with options, by
// tensor cores fed by the copy engine, for sm_90a.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), the share of a tile of
//            keys, over blocks of queries; products transposed, so that keys are rows:
//                S = k q^T,  P = exp(score(S) - lse),  dP = v dO^T
//                dS = P (dP - delta) score'(S),  dv += P dO,  dk += dS q
//            Sums of 256 columns take half of a thread's registers, so each warpgroup
//            has one: the first makes S, P and dv, the second dP, dS and dk. P goes
//            from one to the other through shared memory, number by number, since the
//            same thread of both has the same place. attention_vjp_hopper_queries makes
//            dq
// Grid       1-D, a block a tile of keys of a kept entry, as item_of() numbers them
// Threads    two warpgroups compute; a thread of a third asks the copy engine
// Tiles      k, v     64 x kHeadDim   shared
//            q, dO    64 x kHeadDim   shared, kStages of each
//            P        64 x 64 float   shared
//            S, P, dP, dS, dk, dv  registers, as wgmma lays them out
// Memory     global: k, v, dk and dv once; q and dO once a tile of keys, mostly from L2
// Numbers    S, P, dP, dS and sums in float; P and dS rounded to elem_t before
//            products. One order of sums: the same bits in every run
// Limits     as attention_vjp_hopper, of infinities and NaN too; head dimensions up to
//            256
#include "attention/vjp_hopper.cuh"
#include "attention/vjp_hopper_scores.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/opaque.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma_shapes.cuh"

#if !defined(BOUNDS) || !defined(STAGES)
#error "BOUNDS and STAGES come from the host"
#endif
constexpr int kBounds = BOUNDS;  // as in vjp_hopper.cu
constexpr int kBlockN = 64;      // keys of a tile
constexpr int kStages = STAGES;
static_assert(kNumThreads == 384 && kBlockM == 64);
// setmaxnreg moves registers inside the pool of the launch, 168 a thread.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// A tile of 64 rows: chunks of 64 columns, each [rows][128 bytes], swizzled.
constexpr int kChunks = kHeadDim / 64, kChunk = 64 * 128, kBytes = kChunks * kChunk;
constexpr int kBytesWeights = kBlockN * kBlockM * 4, kBytesStats = kBlockM * 4;
constexpr int kScores = kBlockM / 2, kSums = kHeadDim / 2;

// Barriers by number: P is there; P has been read.
constexpr int kWritten = 1, kRead = 2;

// S = k q^T or dP = v dO^T. A step is 16 columns: 32 bytes of a row of 128.
__device__ __forceinline__ void multiply_scores(float (&s)[kScores],
                                                unsigned long long kv,
                                                unsigned long long qd) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int offset = (step / 4 * kChunk + step % 4 * 32) / 16;
    ptx::wgmma_t<elem_t, kBlockM>::ss(s, kv + offset, qd + offset, step > 0);
  }
}

// dv += P dO or dk += dS q. A step is 16 rows of dO or q, of 128 bytes.
__device__ __forceinline__ void multiply_sums(float (&sums)[kSums],
                                              const unsigned (&p)[kBlockM / 16][4],
                                              unsigned long long qd) {
#pragma unroll
  for (int step = 0; step < kBlockM / 16; ++step) {
    ptx::wgmma_t<elem_t, kHeadDim>::rs(sums, p[step], qd + step * (16 * 128 / 16), 1);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_vjp_hopper_keys(const __grid_constant__ inputs_t inputs,
                              const float* __restrict__ stats,  // vjp_hopper.cuh
                              elem_t* __restrict__ dk,  // as k, summed over entries
                              elem_t* __restrict__ dv,  // as v, summed over entries
                              found_t* __restrict__ found,
                              SCORE_PARAMETERS,
                              const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) unsigned long long barriers[2 + 4 * kStages];

  // The host adds 1024 bytes for this: a swizzled tile starts at a multiple.
  const unsigned smem_k = (ptx::shared_address(smem) + 1023) & ~1023u;
  const unsigned smem_v = smem_k + kBytes, smem_q = smem_v + kBytes,
                 smem_dout = smem_q + kStages * kBytes,
                 smem_weights = smem_dout + kStages * kBytes,
                 smem_lse = smem_weights + kBytesWeights,
                 smem_delta = smem_lse + kStages * kBytesStats;
  const unsigned k_full = ptx::shared_address(barriers), v_full = k_full + 8,
                 q_full = v_full + 8, dout_full = q_full + 8 * kStages,
                 q_empty = dout_full + 8 * kStages, dout_empty = q_empty + 8 * kStages;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(k_full, 1);
    ptx::mbarrier_init(v_full, 1);
    // A tile and its statistics. q is done with when dk is; dO when both dS and dv are.
    for (int n = 0; n < kStages; ++n) {
      ptx::mbarrier_init(q_full + 8 * n, 2);
      ptx::mbarrier_init(dout_full + 8 * n, 2);
      ptx::mbarrier_init(q_empty + 8 * n, 4);
      ptx::mbarrier_init(dout_empty + 8 * n, 8);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are there before anyone uses them

  if (block_index() >= inputs.num_items) return;
  const item_t item = item_of<(kBounds > 0)>(static_cast<int>(block_index()), inputs);
  const index_t entry = locate(grads.kept, item.kept).of[0];
  const int key_first = item.tile * kBlockN;
  const int num_keys = static_cast<int>(params.seqlen_k) - key_first;

  // The blocks of queries of a summed entry that see keys of the tile.
  struct blocks_t {
    int first, last;
  };
  auto blocks_of = [&](const scores_t& scores) -> blocks_t {
    if constexpr (kBounds == 0) return {0, inputs.num_blocks};
    const range_t queries = scores.queries_of(key_first, key_first + kBlockN);
    if (queries.first >= queries.last) return {0, 0};
    return {uniform(static_cast<int>(queries.first) / kBlockM),
            uniform((static_cast<int>(queries.last) + kBlockM - 1) / kBlockM)};
  };
  unsigned stage = 0, parity = 0;
  auto advance = [&] {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  };

  const int role = uniform(threadIdx.x / 128);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (role == 2) {
    // --- the producer
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x % 128 >= 32) return;
    const bool asks = lane == 0;
    for (int summed = 0; summed < inputs.num_summed; ++summed) {
      const place_t at = grads.entry(params, entry, summed);
      const blocks_t blocks = blocks_of(scores_t(at, SCORE_ARGUMENTS));
      int batch[2];
      if (asks && summed == 0) {
        batch_coordinates(batch, at, params.k);
        load_tile<64, kChunks>(smem_k, inputs.k_map, k_full, key_first,
                               coordinate(at.kv_head, params.k.head), batch);
        batch_coordinates(batch, at, params.v);
        load_tile<64, kChunks>(smem_v, inputs.v_map, v_full, key_first,
                               coordinate(at.kv_head, params.v.head), batch);
      }
      for (int block = blocks.first; block < blocks.last; ++block) {
        if (asks) {
          const float* const row =
              stats + (at.row_of_heads * inputs.num_blocks + block) * (2 * kBlockM);
          wait(q_empty + 8 * stage, parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(q_full + 8 * stage, kBytesStats);
          ptx::cp_async_bulk(smem_lse + stage * kBytesStats, row, kBytesStats,
                             q_full + 8 * stage);
          batch_coordinates(batch, at, params.q);
          load_tile<64, kChunks>(smem_q + stage * kBytes, inputs.q_map,
                                 q_full + 8 * stage, block * kBlockM,
                                 coordinate(at.head, params.q.head), batch);
          wait(dout_empty + 8 * stage, parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(dout_full + 8 * stage, kBytesStats);
          ptx::cp_async_bulk(smem_delta + stage * kBytesStats, row + kBlockM,
                             kBytesStats, dout_full + 8 * stage);
          batch_coordinates(batch, at, grads.dout);
          load_tile<64, kChunks>(smem_dout + stage * kBytes, inputs.dout_map,
                                 dout_full + 8 * stage, block * kBlockM,
                                 coordinate(at.head, grads.dout.head), batch);
        }
        advance();
      }
    }
    return;
  }

  // --- those that compute
  ptx::setmaxnreg_inc<kConsumerRegisters>();
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
  float sums[kSums], s[kScores];
#pragma unroll
  for (int e = 0; e < kSums; ++e) sums[e] = 0;

  if (role == 0) {
    // --- S, P and dv
    unsigned p[kBlockM / 16][4];
    bool first = true;  // nothing has been written for the other warpgroup
    for (int summed = 0; summed < inputs.num_summed; ++summed) {
      const place_t at = grads.entry(params, entry, summed);
      const scores_t scores(at, SCORE_ARGUMENTS);
      const blocks_t blocks = blocks_of(scores);
      int block = blocks.first;
      if (block >= blocks.last) continue;
      float derivative[kHasSoftcap ? kScores : 1];

      // s becomes P of a block of queries, whose lse is in a stage.
      auto softmax = [&](int block, unsigned stage) {
        const int query_first = block * kBlockM;
        band_t band = {-kMany, kMany, kMany, num_keys};
        if constexpr (kBounds > 0) band = scores.band(query_first, key_first);
        const unsigned lse = smem_lse + stage * kBytesStats + lane % 4 * 8;
        if (kHasTerms || !band.sees_all(kBlockM, kBlockN)) {
#pragma unroll
          for (int e = 0; e < kScores; ++e) {
            const int query = e / 4 * 8 + lane % 4 * 2 + e % 2;
            const int key = row_thread + e / 2 % 2 * 8;
            float unused;
            float& slope = kHasSoftcap ? derivative[kHasSoftcap ? e : 0] : unused;
            if (!band.sees(query, key) || query_first + query >= params.seqlen_q) {
              s[e] = hidden_score(inputs);
              slope = 1;
            } else if constexpr (kHasTerms) {
              s[e] = scores.with_derivative(s[e], query_first + query, key_first + key,
                                            slope);
            }
          }
        }
#pragma unroll
        for (int e = 0; e < kScores; e += 4) {
          const float2 log_sum = ptx::load_shared_f32x2(lse + e * 8);
#pragma unroll
          for (int f = e; f < e + 4; ++f) {
            s[f] = ptx::ex2_approx_ftz(s[f] * to_log2(inputs) -
                                       (f % 2 ? log_sum.y : log_sum.x));
          }
        }
      };

      wait(k_full, 0);
      wait(q_full + 8 * stage, parity);
      ptx::wgmma_fence();
      multiply_scores(s, k_rows, q_rows + stage * (kBytes / 16));
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      keep_order(s);
      softmax(block, stage);
      // One block of queries; S and P of the next one.
      auto step = [&](auto is_last) {
        constexpr bool kLast = decltype(is_last)::value;
        if (!first) ptx::bar_sync<256>(kRead);
        first = false;
#pragma unroll
        for (int e = 0; e < kScores; e += 4) {
          float w[4];
#pragma unroll
          for (int f = 0; f < 4; ++f) {
            w[f] = s[e + f];
            if constexpr (kHasSoftcap) w[f] *= derivative[e + f];
          }
          ptx::store_shared_f32x4(weights + e / 4 * 2048, w[0], w[1], w[2], w[3]);
        }
        ptx::bar_arrive<256>(kWritten);
#pragma unroll
        for (int e = 0; e < kScores; e += 2) {
          p[e / 8][e / 2 % 4] = pair16_t::from(s[e + 1], s[e]);
        }
        const unsigned this_stage = stage, this_parity = parity;
        advance();
        if constexpr (!kLast) {
          wait(q_full + 8 * stage, parity);
          ptx::wgmma_fence();
          multiply_scores(s, k_rows, q_rows + stage * (kBytes / 16));
          ptx::wgmma_commit_group();
        }
        wait(dout_full + 8 * this_stage, this_parity);
        ptx::wgmma_fence();
        multiply_sums(sums, p, dout_sums + this_stage * (kBytes / 16));
        ptx::wgmma_commit_group();
        if constexpr (!kLast) {
          ptx::wgmma_wait_group<1>();  // S
          keep_order(s);
          softmax(block + 1, stage);
        }
        ptx::wgmma_wait_group<0>();
        keep_order(sums);
        if (lane == 0) ptx::mbarrier_arrive(dout_empty + 8 * this_stage);
      };
#pragma unroll 1
      while (block + 1 < blocks.last) {
        step(flag_t<false>());
        ++block;
      }
      step(flag_t<true>());
    }
    if (!first) ptx::bar_sync<256>(kRead);
  } else {
    // --- dP, dS and dk
    unsigned ds[kBlockM / 16][4];
    const float factor = factor_of(found);
    for (int summed = 0; summed < inputs.num_summed; ++summed) {
      const place_t at = grads.entry(params, entry, summed);
      const blocks_t blocks = blocks_of(scores_t(at, SCORE_ARGUMENTS));
      int block = blocks.first;
      if (block >= blocks.last) continue;
      wait(v_full, 0);
      wait(dout_full + 8 * stage, parity);
      ptx::wgmma_fence();
      multiply_scores(s, v_rows, dout_rows + stage * (kBytes / 16));
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      keep_order(s);
      // dS and dk of one block of queries; dP of the next one.
      auto step = [&](auto is_last) {
        constexpr bool kLast = decltype(is_last)::value;
        const unsigned delta = smem_delta + stage * kBytesStats + lane % 4 * 8;
        ptx::bar_sync<256>(kWritten);
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
        ptx::bar_arrive<256>(kRead);
        if (lane == 0) ptx::mbarrier_arrive(dout_empty + 8 * stage);
        const unsigned this_stage = stage, this_parity = parity;
        advance();
        if constexpr (!kLast) {
          wait(dout_full + 8 * stage, parity);
          ptx::wgmma_fence();
          multiply_scores(s, v_rows, dout_rows + stage * (kBytes / 16));
          ptx::wgmma_commit_group();
        }
        wait(q_full + 8 * this_stage, this_parity);
        ptx::wgmma_fence();
        multiply_sums(sums, ds, q_sums + this_stage * (kBytes / 16));
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        if constexpr (!kLast) keep_order(s);
        keep_order(sums);
        if (lane == 0) ptx::mbarrier_arrive(q_empty + 8 * this_stage);
      };
#pragma unroll 1
      while (block + 1 < blocks.last) {
        step(flag_t<false>());
        ++block;
      }
      step(flag_t<true>());
    }
  }

  // Each warpgroup writes its gradient.
  const int which = role == 0 ? 1 : 0;
  const auto kept = locate(ptx::anew(grads).kept, item.kept);
  const float unfactor =
      role == 0 ? 1 / kFactorP
                : unfactor_of(factor_of(found), static_cast<float>(params.scale));
  const index_t row_step = grads.row[which];
  elem_t* const target =
      (role == 0 ? dv : dk) + kept.of[1 + which] + key_first * row_step;
  const int dim = static_cast<int>(role == 0 ? params.head_dim_v : params.head_dim);
  float odd = 0;  // NaN where a sum is not finite
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = row_thread + 8 * r < num_keys;
    elem_t* const row = target + (row_thread + 8 * r) * row_step;
#pragma unroll
    for (int e = 0; e < kSums; e += 16) {
      unsigned words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int from = e + 4 * t + 2 * r;
        words[t] = pair16_t::from(sums[from + 1] * unfactor, sums[from] * unfactor);
        if (exists) odd = fmaf(sums[from], 0, fmaf(sums[from + 1], 0, odd));
      }
      transpose(words, lane);  // 8 columns side by side
      const int column = e * 2 + lane % 4 * 8;
      if (exists && column < dim) {
        *reinterpret_cast<uint4*>(row + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
  if (odd != 0) found->odd = 1;
}

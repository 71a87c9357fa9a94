// SPDX-License-Identifier: MIT
// attention_vjp_hopper_queries: dq with the same bits in every run, for sm_90a.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), the part of a tile of
//            queries, over tiles of keys from first to last:
//                S = q k^T,  P = exp(scale S - lse),  dP = dO v^T,  dS = P (dP - delta)
//                dq += dS k
//            P and dS are accumulators of one product and, in the same registers, the A
//            operand of the next. attention_vjp_hopper, without dq, computes dk and dv
// Grid       1-D, one block per tile of queries of an entry; last tiles first, since
//            causal ones are longest
// Threads    two consumer warpgroups, 64 queries each; a thread of a third loads by TMA
//
// Tiles      q, dO    64 x kHeadDim per warpgroup  shared
//            k, v     kBlockN x kHeadDim          shared, kStages of each
//            S, P, dP, dS, dq  registers, in the layout of wgmma
// Memory     global: q, dO and dq once; k and v once per tile of queries, mostly L2
// Numbers    S, P, dP, dS and sums in float; dS rounded to elem_t before its product
// Limits     as attention_vjp_hopper; q is not shared by entries of the batch
#include "attention/sm90/backward.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma_shapes.cuh"

#ifndef BOUNDS
#error "BOUNDS comes from the host"
#endif
constexpr int kBounds = BOUNDS;  // as in backward.cu
constexpr int kGroups = 2, kGroupM = 64, kTileM = kGroups * kGroupM;
constexpr int kBlockN = 128;  // keys per tile
constexpr int kStages = 2;
static_assert(kNumThreads == 128 * (kGroups + 1));
static_assert(kBlockM == kGroupM || kHeadDim == 64, "a box has rows of one group");
// Whether S of the next tile is issued right behind dq, before waiting. With 64
// columns, whose products are short next to the exponentials, that was slower.
constexpr bool kChained = kHeadDim == 128;
// setmaxnreg redistributes the registers of the block, 168 per thread.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

// A tile: chunks of 64 columns, each [rows][128 bytes], swizzled.
constexpr int kChunks = kHeadDim / 64;
constexpr int kBytesM = kChunks * kGroupM * 128, kBytesN = kChunks * kBlockN * 128;
constexpr int kScores = kBlockN / 2, kSums = kHeadDim / 2;

// S = q k^T or dP = dO v^T. A step covers 16 columns, 32 bytes of each 128-byte row.
__device__ __forceinline__ void multiply_scores(float (&s)[kScores],
                                                unsigned long long qd,
                                                unsigned long long kv) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    ptx::wgmma_t<elem_t, kBlockN>::ss(s, qd + (chunk * kGroupM * 128 + inside) / 16,
                                      kv + (chunk * kBlockN * 128 + inside) / 16,
                                      step > 0);
  }
}

// dq += dS k. A step covers 16 rows of k, 128 bytes each.
__device__ __forceinline__ void multiply_sums(float (&dq)[kSums],
                                              const unsigned (&ds)[kBlockN / 16][4],
                                              unsigned long long k) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    ptx::wgmma_t<elem_t, kHeadDim>::rs(dq, ds[step], k + step * (16 * 128 / 16), 1);
  }
}

// Shared memory addresses.
struct addresses_t {
  unsigned q, dout, k, v, q_full, k_full, v_full, empty;

  __device__ __forceinline__ addresses_t(const void* tiles,
                                         const unsigned long long* barriers) {
    q = swizzled_tiles(tiles);
    dout = q + kGroups * kBytesM;
    k = dout + kGroups * kBytesM;
    v = k + kStages * kBytesN;
    q_full = ptx::shared_address(barriers);
    k_full = q_full + 8;
    v_full = k_full + 8 * kStages;
    empty = v_full + 8 * kStages;
  }
};

// One thread loads q and dO by TMA, and then tiles of k and v.
__device__ __forceinline__ void produce(const inputs_t& inputs, const params_t& params,
                                        const grads_t& grads, const tile_coord_t& at,
                                        const addresses_t& smem, int row_first,
                                        int tile, int tile_end) {
  int batch[2];
  ptx::mbarrier_arrive_expect_tx(smem.q_full, 2 * kGroups * kBytesM);
  // Boxes of kBlockM rows; a box of 128 holds the rows of both warpgroups.
  for (int first = 0; first < kTileM; first += kBlockM) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const unsigned offset = first / kGroupM * kBytesM + chunk * kGroupM * 128;
      const int row = row_first + first;
      batch_coordinates(batch, at, params.q);
      ptx::cp_async_bulk_tensor_5d(smem.q + offset, inputs.q_map, smem.q_full,
                                   chunk * 64, row, coordinate(at.head, params.q.head),
                                   batch[0], batch[1]);
      batch_coordinates(batch, at, grads.dout);
      ptx::cp_async_bulk_tensor_5d(
          smem.dout + offset, inputs.dout_map, smem.q_full, chunk * 64, row,
          coordinate(at.head, grads.dout.head), batch[0], batch[1]);
    }
  }
  for (unsigned n = 0; tile < tile_end; ++tile, ++n) {
    const unsigned stage = n % kStages;
    wait(smem.empty + 8 * stage, (n / kStages & 1) ^ 1);
    batch_coordinates(batch, at, params.k);
    load_tile<kBlockN, kChunks>(smem.k + stage * kBytesN, inputs.k_map,
                                smem.k_full + 8 * stage, tile * kBlockN,
                                coordinate(at.kv_head, params.k.head), batch);
    batch_coordinates(batch, at, params.v);
    load_tile<kBlockN, kChunks>(smem.v + stage * kBytesN, inputs.v_map,
                                smem.v_full + 8 * stage, tile * kBlockN,
                                coordinate(at.kv_head, params.v.head), batch);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_vjp_hopper_queries(const __grid_constant__ inputs_t inputs,
                                 const float* __restrict__ stats,  // backward.cuh
                                 elem_t* __restrict__ dq,          // as q
                                 found_t* __restrict__ found, SCORE_PARAMETERS,
                                 const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ __align__(8) unsigned long long barriers[1 + 4 * kStages];

  const addresses_t smem(tiles, barriers);
  if (threadIdx.x == 0) {
    for (int n = 0; n < 1 + 2 * kStages; ++n)
      ptx::mbarrier_init(smem.q_full + 8 * n, 1);
    for (int n = 0; n < kStages; ++n)
      ptx::mbarrier_init(smem.empty + 8 * n, 4 * kGroups);
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_launch_dependents();
  stats = ptx::griddepcontrol_wait(stats);
  __syncthreads();  // the barriers are initialized

  const index_t num_tiles = (params.seqlen_q + kTileM - 1) / kTileM;
  const index_t from_last = divide(block_index(), grads.num_kept);
  const tile_coord_t at = grads.entry(
      params, locate(grads.kept, block_index() - from_last * grads.num_kept).of[0], 0);
  if (from_last >= num_tiles) return;
  const int row_first = static_cast<int>(num_tiles - 1 - from_last) * kTileM;
  const scores_t scores(at, SCORE_ARGUMENTS);
  int tile = 0, tile_end = (static_cast<int>(params.seqlen_k) + kBlockN - 1) / kBlockN;
  if constexpr (kBounds > 0) {
    const range_t keys = scores.keys_of(row_first, row_first + kTileM);
    tile = static_cast<int>(keys.first) / kBlockN;
    tile_end = (static_cast<int>(keys.last) + kBlockN - 1) / kBlockN;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= 4 * kGroups) {
    // --- producer
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x != 128 * kGroups) return;
    produce(inputs, params, grads, at, smem, row_first, tile, tile_end);
    return;
  }

  // --- consumers
  ptx::setmaxnreg_inc<kConsumerRegisters>();
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  const int row_group = row_first + group * kGroupM;
  const int row = warp % 4 * 16 + lane / 4;  // of the warpgroup; the second: + 8
  const float factor = factor_of(found);
  float log_sum[2], delta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = row_group + row + 8 * r;
    const index_t num_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
    const float* const from =
        stats + (at.row_of_heads * num_blocks + i / kBlockM) * (2 * kBlockM) +
        place_in_stats(i % kBlockM);
    const bool exists = i < params.seqlen_q;
    log_sum[r] = exists ? from[0] : infinity<float>();
    delta[r] = exists ? from[kBlockM] * factor : 0.f;
  }
  const unsigned long long q_rows = descriptor(smem.q + group * kBytesM, 16),
                           dout_rows = descriptor(smem.dout + group * kBytesM, 16),
                           k_rows = descriptor(smem.k, 16),
                           v_rows = descriptor(smem.v, 16),
                           k_sums = descriptor(smem.k, kBlockN * 128);

  float sums[kSums], s[kScores], dp[kScores];
#pragma unroll
  for (int e = 0; e < kSums; ++e) sums[e] = 0;
  // Computes P of the tile of keys in s; dP may still be in flight.
  auto softmax = [&] {
    // Number e is in column e / 4 * 8 + lane % 4 * 2 + e % 2, row e / 2 % 2 * 8.
    const int key_first = tile * kBlockN;
    const int num_keys = static_cast<int>(params.seqlen_k) - key_first;
    mask_bounds_t bounds = {-(1 << 30), 1 << 30, 0, num_keys};
    if constexpr (kBounds > 0) bounds = scores.mask_bounds(row_group, key_first);
    if (num_keys < kBlockN || bounds.low > 1 - kGroupM || bounds.high < kBlockN) {
#pragma unroll
      for (int e = 0; e < kScores; ++e) {
        const int column = e / 4 * 8 + e % 2 + lane % 4 * 2;
        const int distance = column - row - e / 2 % 2 * 8;
        const bool sees =
            bounds.low <= distance && distance < bounds.high && column < num_keys;
        if (!sees) s[e] = inputs.hidden;
      }
    }
#pragma unroll
    for (int e = 0; e < kScores; ++e) {
      s[e] = ptx::ex2_approx_ftz(s[e] * inputs.to_log2 - log_sum[e / 2 % 2]);
    }
  };
  unsigned n = 0;  // tiles so far; gives stage and parity
  auto start_s = [&] {
    const unsigned stage = n % kStages;
    wait(smem.k_full + 8 * stage, n / kStages & 1);
    ptx::wgmma_fence();
    multiply_scores(s, q_rows, k_rows + stage * (kBytesN / 16));
    ptx::wgmma_commit_group();
  };
  auto start_dp = [&] {
    const unsigned stage = n % kStages;
    wait(smem.v_full + 8 * stage, n / kStages & 1);
    ptx::wgmma_fence();
    multiply_scores(dp, dout_rows, v_rows + stage * (kBytesN / 16));
    ptx::wgmma_commit_group();
  };

  // No product is in flight between iterations, because ptxas does not track them
  // around a loop (C7514). With kChained, dq of one tile and S and dP of the next
  // follow without a gap; all three in flight would need too many registers (C7512).
  const bool any = tile < tile_end;
  wait(smem.q_full, 0);
  if (any) {
    start_s();
    start_dp();
    ptx::wgmma_wait_group<1>();  // S
    compiler_fence(s);
    softmax();
    ptx::wgmma_wait_group<0>();  // dP
    compiler_fence(dp);
  }
  auto step = [&](auto is_last) {
    constexpr bool kLast = decltype(is_last)::value;
    const unsigned stage = n % kStages;
    unsigned ds[kBlockN / 16][4];
    weigh_rows(ds, s, dp, delta, factor);
    ptx::wgmma_fence();
    multiply_sums(sums, ds, k_sums + stage * (kBytesN / 16));
    ptx::wgmma_commit_group();
    if constexpr (kLast) {
      ptx::wgmma_wait_group<0>();
      compiler_fence(sums);
    } else {
      ++n;
      ++tile;
      if constexpr (!kChained) ptx::wgmma_wait_group<0>();
      start_s();
      if constexpr (kChained) ptx::wgmma_wait_group<1>();  // dq
      compiler_fence(sums);
      start_dp();
      ptx::wgmma_wait_group<1>();  // S
      compiler_fence(s);
      if (lane == 0) ptx::mbarrier_arrive(smem.empty + 8 * stage);
      softmax();
      ptx::wgmma_wait_group<0>();  // dP
      compiler_fence(dp);
    }
  };
#pragma unroll 1
  while (tile + 1 < tile_end) step(flag_t<false>());
  if (any) step(flag_t<true>());

  const float unfactor = unfactor_of(factor, static_cast<float>(params.scale));
  const auto kept = locate(grads.kept, block_index() - from_last * grads.num_kept);
  const float nonfinite = store_rows(
      sums, unfactor, dq + kept.of[1] + row_group * grads.row[0], grads.row[0], row,
      static_cast<int>(params.seqlen_q) - row_group, static_cast<int>(params.head_dim));
  if (nonfinite != 0) found->nonfinite = 1;
}

// SPDX-License-Identifier: MIT
// attention_hopper: tensor cores fed by the copy engine, for sm_90a.
//
// Algorithm  FlashAttention-3 forward (Shah et al. 2024), on tiles of keys from last to
//            first: while o += p v of one tile runs, so does s = q k^T of the
//            next, and its softmax. The reference m of a row moves only when a score
//            passes it by 2^8, which leaves o alone in most steps.
// Grid       a block a multiprocessor. An item is a tile of queries of one head; blocks
//            take item after item, from a counter where items differ in length
// Threads    warpgroup 0 asks the copy engine for tiles (one thread); each other one
//            computes 64 queries. With kTakeTurns they issue products one after another
// Tiles      q     kGroupM x kHeadDim a warpgroup   shared
//            k, v  kBlockN x kHeadDim (kHeadDimV)   shared, kStages of each
//            s, p, o  registers, as wgmma lays them out
// Memory     global: q and out once; k and v once an item, mostly from L2
// Numbers    s, m, l, o in float32; p is rounded to elem_t before p v
// Limits     q, k, v as a tensor map takes them (_tensormap.py); seqlen_k >= 1; numbers
//            of items, queries and keys in 32 bits
#include "attention/hopper_exact.cuh"
#include "attention/hopper_softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_shapes.cuh"

// setmaxnreg moves registers inside the pool of the launch, 65536 / kNumThreads a
// thread. Lengths and options cost the producer registers, since it finds the tiles of
// an item.
constexpr bool kBusyProducer = kHasLengths || kHasQueryOffsets || kHasTerms;
constexpr int kProducerRegisters = kNumGroups > 2 ? 32 : kBusyProducer ? 56 : 40;
constexpr int kConsumerRegisters = kNumGroups == 2   ? (504 - kProducerRegisters) / 2
                                   : kNumGroups == 3 ? 160
                                                     : 112;
static_assert(kProducerRegisters + kNumGroups * kConsumerRegisters <=
              65536 / kNumThreads / 8 * 8 * (kNumGroups + 1));

// Describes a tile to wgmma (PTX ISA, "matrix descriptor"): 128-byte swizzle, 8 rows
// are 1024 bytes, `chunk` bytes to the next 64 columns (of a K-major tile not used).
__device__ __forceinline__ unsigned long long descriptor(unsigned address,
                                                         unsigned chunk) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  constexpr unsigned kEightRows = 1024;
  return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(chunk >> 4) << 16 |
         static_cast<unsigned long long>(kEightRows >> 4) << 32 | kSwizzle128;
}

// s = q k^T. A step is 16 columns: 32 bytes of a row of 128.
__device__ __forceinline__ void multiply_qk(float (&s)[kScores],
                                            unsigned long long q,
                                            unsigned long long k) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    ptx::wgmma_t<elem_t, kBlockN>::ss(s, q + (chunk * kGroupM * 128 + inside) / 16,
                                      k + (chunk * kBlockN * 128 + inside) / 16,
                                      step > 0);
  }
}

// o += p v, or o = p v. A step is 16 rows of v, of 128 bytes.
__device__ __forceinline__ void multiply_pv(float (&o)[kOutputs],
                                            const unsigned (&p)[kBlockN / 16][4],
                                            unsigned long long v,
                                            bool accumulate) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    ptx::wgmma_t<elem_t, kHeadDimV>::rs(o, p[step], v + step * (16 * 128 / 16),
                                        step > 0 || accumulate);
  }
}

template <int kCount>
__device__ __forceinline__ void keep_order(float (&x)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) ptx::keep_order(x[e]);
}

// A coordinate in a tensor map, whose broadcast axes have length 1.
__device__ __forceinline__ int coordinate(index_t index, index_t stride) {
  return stride == 0 ? 0 : static_cast<int>(index);
}

// Asks for rows [row, row + kRows) of one matrix; those outside it arrive as zeros.
template <int kRows, int kChunks>
__device__ __forceinline__ void load_tile(unsigned target,
                                          const ptx::tensor_map_t& map,
                                          unsigned barrier,
                                          int row,
                                          int head,
                                          const int (&batch)[2]) {
  ptx::mbarrier_arrive_expect_tx(barrier, kRows * kChunks * 128);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    ptx::cp_async_bulk_tensor_5d(target + chunk * kRows * 128, map, barrier, chunk * 64,
                                 row, head, batch[0], batch[1]);
  }
}

// The coordinates of a batch entry, innermost first.
__device__ __forceinline__ void batch_coordinates(int (&batch)[2],
                                                  const place_t& at,
                                                  const operand_t& operand) {
  batch[0] = coordinate(at.batch[kBatchDims - 1], operand.batch[kBatchDims - 1]);
  batch[1] = kBatchDims == 2 ? coordinate(at.batch[0], operand.batch[0]) : 0;
}

// A compile-time bool as an argument.
template <bool kValue>
struct flag_t {
  static constexpr bool value = kValue;
};

// What depends on the memory of q, k and v. Mirrored by HOPPER_INPUTS in
// _attention_kernels.py.
struct alignas(64) inputs_t {
  ptx::tensor_map_t q_map, k_map, v_map;
  schedule_t schedule;
  const elem_t* q;  // (batch, heads, queries, head_dim)
  const elem_t* k;  // (batch, kv heads, keys, head_dim)
  const elem_t* v;  // (batch, kv heads, keys, head_dim_v)
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_hopper(const __grid_constant__ inputs_t inputs,
                     elem_t* __restrict__ out,  // (batch, heads, queries, head_dim_v)
                     float* __restrict__ lse,   // (batch, heads, queries), or null
                     counter_t* __restrict__ counter,
                     SCORE_PARAMETERS) {
  const schedule_t& schedule = inputs.schedule;
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) unsigned long long barriers[2 * kNumGroups + 4 * kStages + 4];
  __shared__ int mailbox[2];  // items, from the producer to the consumers

  // The host adds 1024 bytes for this: a swizzled tile starts at a multiple.
  const unsigned smem_q = (ptx::shared_address(smem) + 1023) & ~1023u;
  const unsigned smem_k = smem_q + kNumGroups * kBytesQ;
  const unsigned smem_v = smem_k + kStages * kBytesK;
  const unsigned first_barrier = ptx::shared_address(barriers);
  constexpr int kBarrier = ring_t::kBytes;
  const ring_t q_ring = {first_barrier, first_barrier + kNumGroups * kBarrier};
  const ring_t k_ring = {q_ring.empty + kNumGroups * kBarrier,
                         q_ring.empty + (kNumGroups + kStages) * kBarrier};
  const ring_t v_ring = {k_ring.empty + kStages * kBarrier,
                         k_ring.empty + 2 * kStages * kBarrier};
  const ring_t item_ring = {v_ring.empty + kStages * kBarrier,
                            v_ring.empty + (kStages + 2) * kBarrier};

  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int n = 0; n < kNumGroups; ++n) {
      ptx::mbarrier_init(q_ring.full_at(n), 1);
      ptx::mbarrier_init(q_ring.empty_at(n), 4);
    }
    for (int n = 0; n < kStages; ++n) {
      ptx::mbarrier_init(k_ring.full_at(n), 1);
      ptx::mbarrier_init(k_ring.empty_at(n), 4 * kNumGroups);
      ptx::mbarrier_init(v_ring.full_at(n), 1);
      ptx::mbarrier_init(v_ring.empty_at(n), 4 * kNumGroups);
    }
    for (int n = 0; n < 2; ++n) {
      ptx::mbarrier_init(item_ring.full_at(n), 1);
      ptx::mbarrier_init(item_ring.empty_at(n), 4 * kNumGroups);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are there before anyone uses them

  if (group == 0) {
    // --- the producer: k0, q, k1, v0, k2, v1, .., since k is needed one tile before v
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) {
      unsigned num_tiles = 0;  // of k and v so far: gives stage and parity
      unsigned num_items = 0;
      int item = blockIdx.x;
      bool more = true;
      while (more) {
        if constexpr (kDynamic) {
          const unsigned slot = num_items & 1;
          wait(item_ring.empty_at(slot), (num_items >> 1 & 1) ^ 1);
          *const_cast<volatile int*>(&mailbox[slot]) = item;
          ptx::mbarrier_arrive(item_ring.full_at(slot));
        }
        more = item < schedule.num_items;
        if (!more) break;
        int next = item + gridDim.x;
        if constexpr (kDynamic) next = atomicAdd(&counter->next, 1) + gridDim.x;

        const place_t at = place_of(item, schedule, params);
        const scores_t scores(at, SCORE_ARGUMENTS);
        const int i_first = static_cast<int>(at.tile) * kBlockM;
        const tiles_t tiles =
            tiles_of(scores, i_first, min(i_first + kBlockM, int(params.seqlen_q)),
                     params.seqlen_k);
        const int count = tiles.last - tiles.first;
        int batch_q[2], batch_k[2], batch_v[2];
        batch_coordinates(batch_q, at, params.q);
        batch_coordinates(batch_k, at, params.k);
        batch_coordinates(batch_v, at, params.v);
        for (int n = 0; n <= count; ++n) {
          if (n < count) {
            const unsigned number = num_tiles + n, stage = stage_of(number);
            wait(k_ring.empty_at(stage), parity_of(number) ^ 1);
            load_tile<kBlockN, kChunksQk>(
                smem_k + stage * kBytesK, inputs.k_map, k_ring.full_at(stage),
                (tiles.last - 1 - n) * kBlockN, coordinate(at.kv_head, params.k.head),
                batch_k);
          }
          if (n == 0) {
            for (int g = 0; g < kNumGroups; ++g) {
              wait(q_ring.empty_at(g), (num_items & 1) ^ 1);
              load_tile<kGroupM, kChunksQk>(
                  smem_q + g * kBytesQ, inputs.q_map, q_ring.full_at(g),
                  i_first + g * kGroupM, coordinate(at.head, params.q.head), batch_q);
            }
          } else {
            const unsigned number = num_tiles + n - 1, stage = stage_of(number);
            wait(v_ring.empty_at(stage), parity_of(number) ^ 1);
            load_tile<kBlockN, kChunksV>(
                smem_v + stage * kBytesV, inputs.v_map, v_ring.full_at(stage),
                (tiles.last - n) * kBlockN, coordinate(at.kv_head, params.v.head),
                batch_v);
          }
        }
        num_tiles += count;
        ++num_items;
        item = next;
      }
      if constexpr (kDynamic) {
        // All blocks have taken their last item: ready for the next launch.
        if (atomicAdd(&counter->finished, 1) == int(gridDim.x) - 1) {
          counter->next = 0;
          counter->finished = 0;
          __threadfence();
        }
      }
    }
    return;
  }

  // --- the consumers
  ptx::setmaxnreg_inc<kConsumerRegisters>();
  const int w = group - 1, lane = threadIdx.x % kWarpSize;
  const bool elected = lane == 0;
  const unsigned long long q_tile = descriptor(smem_q + w * kBytesQ, 16);
  const unsigned long long k_tiles = descriptor(smem_k, 16);
  const unsigned long long v_tiles = descriptor(smem_v, kBlockN * 128);
  const float scale = static_cast<float>(params.scale);
  const float to_log2 =
      kHasTerms ? float(kLog2e) : static_cast<float>(params.scale * kLog2e);
  // Barrier 1 + w is the turn of warpgroup w.
  if (kTakeTurns && w == kNumGroups - 1) ptx::bar_arrive<256>(1);
  auto take_turn = [&] {
    if constexpr (kTakeTurns) ptx::bar_sync<256>(1 + w);
  };
  auto pass_turn = [&] {
    if constexpr (kTakeTurns)
      ptx::bar_arrive<256>(1 + (w + 1 == kNumGroups ? 0 : w + 1));
  };

  unsigned num_tiles = 0, num_items = 0;
  auto next_item = [&](int item) {
    if constexpr (!kDynamic) return static_cast<int>(item + gridDim.x);
    const unsigned slot = num_items & 1;
    wait(item_ring.full_at(slot), num_items >> 1 & 1);
    const int next = *const_cast<volatile int*>(&mailbox[slot]);
    __syncwarp();
    if (elected) ptx::mbarrier_arrive(item_ring.empty_at(slot));
    return __shfl_sync(kFullMask, next, 0);
  };

  float s[kScores], o[kOutputs];
  unsigned p[kBlockN / 16][4];
  int item = kDynamic ? next_item(0) : blockIdx.x;
  // Kept free of break and return: with them ptxas loses the registers of setmaxnreg.
  while (item < schedule.num_items) {
    const place_t at = place_of(item, schedule, params);
    const scores_t scores(at, SCORE_ARGUMENTS);
    const int seqlen_q = params.seqlen_q, seqlen_k = params.seqlen_k;
    const int i_block = static_cast<int>(at.tile) * kBlockM;
    const int i_group = i_block + w * kGroupM;
    const int i_group_last = min(i_group + kGroupM, seqlen_q);
    const tiles_t tiles =
        tiles_of(scores, i_block, min(i_block + kBlockM, seqlen_q), seqlen_k);
    const int count = tiles.last - tiles.first;
    const int i_thread = i_group + threadIdx.x / kWarpSize % 4 * 16 + lane / 4;

    // Keys [first, last) that this thread's rows see, from its first column on.
    int first[2] = {}, last[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kDynamic) {
        const range_t keys = scores.keys_of(i_thread + 8 * r, i_thread + 8 * r + 1);
        first[r] = int(keys.first) - lane % 4 * 2;
        last[r] = int(keys.last) - lane % 4 * 2;
      } else {
        last[r] = seqlen_k - lane % 4 * 2;
      }
    }
    // Of the block's tiles, n = 0 is the last one. This warpgroup skips what only
    // others see, masks up to `masked_end`, and again from `whole_end` on.
    int skipped = 0, masked_end = 1, whole_end = count;
    if constexpr (kBounds > 0) {
      const tiles_t own = tiles_of(scores, i_group, i_group_last, seqlen_k);
      skipped = tiles.last - max(own.last, tiles.first + 1);
      skipped = max(skipped, 0);
      const int whole_last = int(scores.keys_of(i_group, i_group + 1).last) / kBlockN;
      masked_end = min(count, tiles.last - whole_last);
      if constexpr (kBounds == 2) {
        const int i_last = i_group_last - 1;
        const int whole_first =
            (int(scores.keys_of(i_last, i_last + 1).first) + kBlockN - 1) / kBlockN;
        whole_end = scores.is_query(i_last) ? tiles.last - whole_first : 0;
        whole_end = min(count, whole_end);
      }
#pragma unroll 1
      for (int n = 0; n < skipped; ++n) {
        const unsigned number = num_tiles + n, stage = stage_of(number);
        wait(k_ring.full_at(stage), parity_of(number));
        if (elected) ptx::mbarrier_arrive(k_ring.empty_at(stage));
        take_turn();
        pass_turn();
        wait(v_ring.full_at(stage), parity_of(number));
        if (elected) ptx::mbarrier_arrive(v_ring.empty_at(stage));
      }
    }

    // Products into final scores, for the tile whose first key is j0.
    auto finish_scores = [&](int j0, auto masked) {
      if constexpr (kHasTerms) {
#pragma unroll
        for (int e = 0; e < kScores; ++e) {
          const int i = min(i_thread + 8 * row_of(e), seqlen_q - 1);
          const int j = j0 + lane % 4 * 2 + column_of(e);
          s[e] = scores(s[e], i, min(j, seqlen_k - 1));
        }
      }
      if constexpr (masked.value) {
        const int some = max(max(first[0], first[1]) - j0, 0);
        if (__any_sync(kFullMask, min(last[0], last[1]) - j0 < kBlockN | some > 0)) {
#pragma unroll
          for (int e = 0; e < kScores; ++e) {
            const int r = row_of(e), column = column_of(e);
            bool seen = column < last[r] - j0;
            if constexpr (kBounds == 2) seen &= column >= first[r] - j0;
            if (!seen) s[e] = -infinity<float>();
          }
        }
      }
    };

    softmax_t row(to_log2);

    // The first tile: s, softmax, p.
    wait(q_ring.full_at(w), num_items & 1);
    {
      const unsigned number = num_tiles + skipped, stage = stage_of(number);
      wait(k_ring.full_at(stage), parity_of(number));
      ptx::wgmma_fence();
      multiply_qk(s, q_tile, k_tiles + stage * (kBytesK / 16));
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      keep_order(s);
      if (elected) {
        ptx::mbarrier_arrive(k_ring.empty_at(stage));
        if (skipped == count - 1) ptx::mbarrier_arrive(q_ring.empty_at(w));
      }
      finish_scores((tiles.last - 1 - skipped) * kBlockN, flag_t<true>());
      raise(row, s, to_log2);
      exponentiate(row, s, to_log2);
      round_to(p, s);
    }
    // The others: s of tile n, and o += p v of tile n - 1 beside its softmax.
    auto step = [&](int n, auto masked) {
      const unsigned number = num_tiles + n, stage = stage_of(number);
      const unsigned before = number - 1, stage_v = stage_of(before);
      wait(k_ring.full_at(stage), parity_of(number));
      take_turn();
      ptx::wgmma_fence();
      multiply_qk(s, q_tile, k_tiles + stage * (kBytesK / 16));
      ptx::wgmma_commit_group();
      wait(v_ring.full_at(stage_v), parity_of(before));
      // p was written; without this fence ptxas lets each product wait for the last.
      ptx::wgmma_fence();
      multiply_pv(o, p, v_tiles + stage_v * (kBytesV / 16), n > skipped + 1);
      ptx::wgmma_commit_group();
      pass_turn();
      ptx::wgmma_wait_group<1>();
      keep_order(s);
      if (elected) {
        ptx::mbarrier_arrive(k_ring.empty_at(stage));
        if (n == count - 1) ptx::mbarrier_arrive(q_ring.empty_at(w));
      }
      finish_scores((tiles.last - 1 - n) * kBlockN, masked);
      const bool moved = raise(row, s, to_log2);
      // ptxas moves this wait up to the last branch, which is the one in raise().
      ptx::wgmma_wait_group<0>();
      keep_order(o);
      if (elected) ptx::mbarrier_arrive(v_ring.empty_at(stage_v));
      exponentiate(row, s, to_log2);
      round_to(p, s);  // only now: a product in flight was reading p
      if (moved) {
#pragma unroll
        for (int e = 0; e < kOutputs; ++e) o[e] *= row.alpha[row_of(e)];
      }
    };
    int n = skipped + 1;
    if constexpr (kHasMask) {
#pragma unroll 1
      for (; n < count; ++n) step(n, flag_t<true>());
    } else {
      if constexpr (kBounds > 0) {
#pragma unroll 1
        for (; n < masked_end; ++n) step(n, flag_t<true>());
      }
#pragma unroll 1
      for (; n < whole_end; ++n) step(n, flag_t<false>());
      if constexpr (kBounds == 2) {
#pragma unroll 1
        for (; n < count; ++n) step(n, flag_t<true>());
      }
    }

    // The last product.
    const unsigned last_number = num_tiles + count - 1,
                   last_stage = stage_of(last_number);
    num_tiles += count;
    ++num_items;
    const int following = next_item(item);
    wait(v_ring.full_at(last_stage), parity_of(last_number));
    ptx::wgmma_fence();
    multiply_pv(o, p, v_tiles + last_stage * (kBytesV / 16), count > skipped + 1);
    ptx::wgmma_commit_group();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row.l[r] += shuffle_xor(row.l[r], 1);
      row.l[r] += shuffle_xor(row.l[r], 2);
    }
    float m[2], inverse[2];
    bool seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = i_thread + 8 * r;
      m[r] = kHasTerms ? row.m[r] : row.m[r] * scale;
      const finished_t finished = scores.finish(i, m[r], row.l[r]);
      inverse[r] = finished.inverse;
      seen[r] = scores.is_query(i) && row.l[r] != 0;
      if (lse != nullptr && lane % 4 == 0 && i < seqlen_q) {
        lse[at.row_of_heads * seqlen_q + i] = finished.lse;
      }
    }
    ptx::wgmma_wait_group<0>();
    keep_order(o);
    if (elected) ptx::mbarrier_arrive(v_ring.empty_at(last_stage));

    // o / l. A word holds two columns: word t of a lane 8 t + lane % 4 * 2 of every 32.
    elem_t* const out_rows = at.at(out, params.out);
    unsigned odd[2] = {};  // not 0 where a result is not finite
    const bool aligned = (reinterpret_cast<unsigned long long>(out_rows) % 16 |
                          params.out.row % 8) == 0 &&
                         params.out.col == 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = i_thread + 8 * r < seqlen_q;
      elem_t* const out_row = out_rows + (i_thread + 8 * r) * params.out.row;
#pragma unroll
      for (int e = 0; e < kOutputs; e += 16) {
        unsigned words[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const int from = e + 4 * t + 2 * r;
          const unsigned word =
              pair16_t::from(o[from + 1] * inverse[r], o[from] * inverse[r]);
          words[t] = seen[r] ? word : 0;
          odd[r] = pair16_t::fma(words[t], 0, odd[r]);
        }
        if (aligned) {
          transpose(words, lane);  // 8 columns side by side
          const int column = e * 2 + lane % 4 * 8;
          if (exists && column < params.head_dim_v) {
            *reinterpret_cast<uint4*>(out_row + column) =
                make_uint4(words[0], words[1], words[2], words[3]);
          }
        } else if (exists) {
#pragma unroll
          for (int t = 0; t < 8; ++t) {
            const int column = e * 2 + t / 2 * 8 + lane % 4 * 2 + t % 2;
            const unsigned short bits = words[t / 2] >> (t % 2 * 16);
            if (column < params.head_dim_v)
              out_row[column * params.out.col] = elem_t{bits};
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!is_finite(row.l[r]) || !seen[r] || i_thread + 8 * r >= seqlen_q) odd[r] = 0;
    }
    // Values of keys that are not seen may have come in as 0 * NaN.
    const unsigned odd_top = __ballot_sync(kFullMask, odd[0] != 0);
    const unsigned odd_bottom = __ballot_sync(kFullMask, odd[1] != 0);
    if ((odd_top | odd_bottom) != 0) {
      __syncwarp();  // what the warp has stored stands before it is written again
#pragma unroll 1
      for (int n = 0; n < 16; ++n) {
        const int r = n / 8, source = n % 8 * 4;
        if (((r ? odd_bottom : odd_top) >> source & 15) != 0) {
          const float m_row = __shfl_sync(kFullMask, r ? m[1] : m[0], source);
          const float inverse_row =
              __shfl_sync(kFullMask, r ? inverse[1] : inverse[0], source);
          exact_row(at.at(inputs.q, params.q), at.at_kv(inputs.k, params.k),
                    at.at_kv(inputs.v, params.v), out_rows, scores, params,
                    i_thread - lane / 4 + n, m_row, inverse_row);
        }
      }
    }
    item = following;
  }
}

// SPDX-License-Identifier: MIT
// attention_vjp_hopper_fed: gradients by tensor cores, as attention_vjp_hopper makes
// them, with a warp of its own for the copy engine.
//
// Algorithm  as vjp_hopper.cu. The feeder asks for all tiles, and gives dq, which the
//            others have made, to the copy engine to add it to the sums in memory
// Grid       a block a multiprocessor. An item is a tile of keys of a kept entry;
//            blocks take item after item
// Threads    two warpgroups compute, 64 keys each; a thread of a third asks the copy
//            engine
// Tiles      k, v     kBlockN x kHeadDim   shared, loaded once an item
//            q, dO    kBlockM x kHeadDim   shared, 3 and 2 stages
//            dS       kBlockN x kBlockM    shared, twice
//            dq       kBlockM x kHeadDim   shared, floats on their way to memory
//            S, P, dP, dS, dk, dv, dq  registers, as wgmma lays them out
// Memory     global: k, v, dk and dv once; q and dO once a tile of keys, mostly from
//            L2; dq is added to sums of floats by the copy engine
// Numbers    S, P, dP, dS and sums in float; P and dS rounded to elem_t before
//            products. The order of sums in dq differs from run to run
// Limits     as vjp_hopper.cu
#include "attention/vjp_hopper.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/opaque.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma_shapes.cuh"

#ifndef BOUNDS
#error "BOUNDS comes from the host"
#endif
constexpr int kBlockN = 128;  // keys of a tile
// Which queries see a key by its position: 0 all, 1 from a first one on, 2 from a first
// one to a last one.
constexpr int kBounds = BOUNDS;
constexpr bool kDynamic = kBounds > 0;  // items differ in length
constexpr int kGroups = 2, kWorkers = 128 * kGroups;
static_assert(kNumThreads == kWorkers + 128);
// A step of 128 queries has no registers for P in both forms beside dP.
static_assert(kHeadDim == 128 && kBlockM == 64);
// setmaxnreg moves registers inside the pool of the launch, 168 a thread.
constexpr int kFeederRegisters = 24, kWorkerRegisters = 240;

// q is read for S and an iteration later for dk, dO in one iteration.
constexpr int kStagesQ = 3, kStagesDout = 2;
constexpr int kMaxSummed = 128;
constexpr int kMany = 1 << 30;

// A tile: chunks of 64 columns, each [rows][128 bytes], swizzled.
constexpr int kChunks = kHeadDim / 64;
constexpr int kChunkN = kBlockN * 128, kChunkM = kBlockM * 128;
constexpr int kBytesN = kChunks * kChunkN, kBytesM = kChunks * kChunkM;
constexpr int kBytesDs = 2 * kChunkM;  // columns are keys: a chunk a warpgroup
constexpr int kBytesStats = 2 * kBlockM * 4;
constexpr int kBytesPart = kPart * 4;

constexpr int kScores = kBlockM / 2;  // of S, P, dP and dS, numbers of a thread
constexpr int kSums = kHeadDim / 2;   // of dk and dv
constexpr int kSumsQ = kPart / 128;   // of dq
// Of the pairs of lse and delta that a thread needs, so many are asked for ahead.
constexpr int kEarlyLse = 8, kEarlyDelta = 4;

// Where the queries of an entry lie: first block of sums or of stats, head, and batch.
struct alignas(16) source_t {
  int4 q, dout;
};

// What all are told of an item, and where its k and v lie.
struct alignas(16) view_t {
  int4 k, v;     // row, head, and batch
  int count;     // blocks of queries, over all summed entries; 0: no more items
  float factor;  // of dP, where dS has one
  int num_keys;  // from its first on; may be more than the tile has
  // Key j, counted from the first, is seen by query i if low <= j - i < high. No key is
  // hidden from blocks whose first query lies in [whole_first, whole_last].
  int low, high, whole_first, whole_last;
  int tile;
  index_t dk, dv;  // where the gradients go
};
// The feeder tells of an item while others may still be at the third before it.
constexpr int kViews = 4;

struct barriers_t {
  unsigned long long k_full, v_full, kv_empty;
  unsigned long long q_full[kStagesQ], q_empty[kStagesQ];
  unsigned long long dout_full[kStagesDout], dout_empty[kStagesDout];
  unsigned long long dq_full[kGroups], dq_empty;
};

// S = k q^T or dP = v dO^T. A step is 16 columns: 32 bytes of a row of 128.
__device__ __forceinline__ void multiply_scores(float (&s)[kScores],
                                                unsigned long long kv,
                                                unsigned long long qd) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    ptx::wgmma_t<elem_t, kBlockM>::ss(s, kv + (chunk * kChunkN + inside) / 16,
                                      qd + (chunk * kChunkM + inside) / 16, step > 0);
  }
}

// dv += P dO or dk += dS q. A step is 16 rows of dO or q, of 128 bytes.
__device__ __forceinline__ void multiply_sums(float (&sums)[kSums],
                                              const unsigned (&p)[kBlockM / 16][4],
                                              unsigned long long qd,
                                              bool accumulate) {
#pragma unroll
  for (int step = 0; step < kBlockM / 16; ++step) {
    ptx::wgmma_t<elem_t, kHeadDim>::rs(sums, p[step], qd + step * (16 * 128 / 16),
                                       step > 0 || accumulate);
  }
}

// This warpgroup's part of dS^T k. A step is 16 keys.
__device__ __forceinline__ void multiply_dq(float (&dq)[kSumsQ],
                                            unsigned long long ds,
                                            unsigned long long k) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    ptx::wgmma_t<elem_t, 64>::ss_mn(dq, ds + (chunk * kChunkM + inside) / 16,
                                    k + step * (16 * 128 / 16), step > 0);
  }
}

// Of one array, the offset of element `index`. Entries are few enough for 32 bits.
template <int kAxes, int kArrays>
__device__ __forceinline__ index_t offset_of(const axes_t<kAxes, kArrays>& axes,
                                             unsigned index,
                                             int array) {
  index_t sum = 0;
#pragma unroll
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    const unsigned size = axes.size[axis], next = axis > 0 ? index / size : 0;
    sum += index_t(index - next * size) * axes.stride[array][axis];
    index = next;
  }
  return sum;
}

// A tile of keys of a kept entry.
struct item_t {
  int tile, kept;
};

// In a section the tiles that most queries see come first.
__device__ __forceinline__ item_t item_of(int number, const inputs_t& inputs) {
  const unsigned n = number, num_tiles = inputs.num_tiles;
  if constexpr (kDynamic) {
    const unsigned in_section = inputs.section * num_tiles;
    const unsigned first = n / in_section * inputs.section;
    const unsigned rest = n % in_section;
    const unsigned width = min(inputs.num_kept - first, unsigned(inputs.section));
    return {int(rest / width), int(first + rest % width)};
  } else {
    return {int(n % num_tiles), int(n / num_tiles)};
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_vjp_hopper_fed(const __grid_constant__ inputs_t inputs,
                             const float* __restrict__ stats,  // vjp_hopper.cuh
                             float* __restrict__ sums_q,       // vjp_hopper.cuh
                             elem_t* __restrict__ dk,  // as k, summed over entries
                             elem_t* __restrict__ dv,  // as v, summed over entries
                             found_t* __restrict__ found,
                             counter_t* __restrict__ counter,
                             SCORE_PARAMETERS,
                             const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ barriers_t barriers;
  __shared__ view_t views[kViews];
  // Of each stage of q: its first query, and its number among the blocks of sums_q.
  __shared__ int2 origins_memory[kStagesQ];
  __shared__ source_t sources[kMaxSummed];
  __shared__ volatile int next_item;  // not in a register: the feeder has few

  // The host adds 1024 bytes for this: a swizzled tile starts at a multiple.
  const unsigned smem_k = (ptx::shared_address(smem) + 1023) & ~1023u;
  const unsigned smem_v = smem_k + kBytesN, smem_q = smem_v + kBytesN,
                 smem_dout = smem_q + kStagesQ * kBytesM,
                 smem_ds = smem_dout + kStagesDout * kBytesM,
                 smem_dq = smem_ds + 2 * kBytesDs,
                 smem_stats = smem_dq + kGroups * kBytesPart;
  const unsigned k_full = ptx::shared_address(&barriers), v_full = k_full + 8,
                 kv_empty = v_full + 8, q_full = kv_empty + 8,
                 q_empty = q_full + 8 * kStagesQ, dout_full = q_empty + 8 * kStagesQ,
                 dout_empty = dout_full + 8 * kStagesDout,
                 dq_full = dout_empty + 8 * kStagesDout,
                 dq_empty = dq_full + 8 * kGroups;
  const unsigned origins = ptx::shared_address(origins_memory);

  const int group = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * kGroups;
    ptx::mbarrier_init(k_full, 1);
    ptx::mbarrier_init(v_full, 1);
    ptx::mbarrier_init(kv_empty, kWarps);
    for (int n = 0; n < kStagesQ; ++n) {
      ptx::mbarrier_init(q_full + 8 * n, 1);
      ptx::mbarrier_init(q_empty + 8 * n, kWarps);
    }
    for (int n = 0; n < kStagesDout; ++n) {
      ptx::mbarrier_init(dout_full + 8 * n, 2);  // statistics come by themselves
      ptx::mbarrier_init(dout_empty + 8 * n, kWarps);
    }
    for (int n = 0; n < kGroups; ++n) ptx::mbarrier_init(dq_full + 8 * n, 4);
    ptx::mbarrier_init(dq_empty, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_wait();
  // Blocks of the next kernel have no room before those of this one are done.
  ptx::griddepcontrol_launch_dependents();
  __syncthreads();  // the barriers are there before anyone uses them
  auto after = [](unsigned stage) { return stage + 1 == kStagesQ ? 0u : stage + 1; };

  if (group == kGroups) {
    // --- the feeder
    ptx::setmaxnreg_dec<kFeederRegisters>();
    if (threadIdx.x != kWorkers) return;
    next_item = blockIdx.x;
    unsigned items = 0;  // told of so far
    unsigned asked = 0;  // blocks of queries asked for so far
    unsigned q_stage = 0, q_parity = 1;
    // The next block to ask for, among those of its entry.
    int block = 0, block_first = 0, block_last = 0, summed = 0;

    // Tells of the next item, or that there is none.
    auto begin_item = [&] {
      view_t& view = views[items++ % kViews];
      const int number = next_item;
      if (number >= inputs.num_items) {
        view.count = 0;
        block_last = 0;
        return;
      }
      const inputs_t& inputs_now = ptx::anew(inputs);
      const params_t& params_now = ptx::anew(params);
      const grads_t& grads_now = ptx::anew(grads);
      const item_t item = item_of(number, inputs_now);
      const int row = item.tile * kBlockN;
      view.dk = offset_of(grads_now.kept, item.kept, 1);
      view.dv = offset_of(grads_now.kept, item.kept, 2);
      const unsigned entry = offset_of(grads_now.kept, item.kept, 0);
#pragma unroll 1
      for (int n = 0; n < inputs.num_summed; ++n) {
        const unsigned number =
            n == 0 ? entry : entry + unsigned(offset_of(grads_now.summed, n, 0));
        unsigned rest = number / unsigned(params_now.num_heads);
        const int head = number - rest * unsigned(params_now.num_heads);
        const int kv_head = unsigned(head) / unsigned(params_now.group_size);
        int at[2] = {0, 0};  // batch coordinates, innermost first
        if constexpr (kBatchDims == 2) {
          at[1] = rest / unsigned(params_now.batch_shape[1]);
          rest -= at[1] * unsigned(params_now.batch_shape[1]);
        }
        at[0] = rest;
        // Broadcast axes have length 1.
        auto in = [](int index, index_t stride) { return stride == 0 ? 0 : index; };
        auto place = [&](int first, int head, const operand_t& x) {
          return int4{first, in(head, x.head), in(at[0], x.batch[kBatchDims - 1]),
                      kBatchDims == 2 ? in(at[1], x.batch[0]) : 0};
        };
        index_t slot = head;
#pragma unroll
        for (int axis = 0; axis < kBatchDims; ++axis) {
          slot += at[kBatchDims - 1 - axis] * inputs_now.slot[axis];
        }
        const int num_blocks = inputs_now.num_blocks;
        sources[n].q = place(static_cast<int>(slot) * num_blocks, head, params_now.q);
        sources[n].dout = place(number * num_blocks, head, grads_now.dout);
        if (n > 0) continue;
        view.k = place(row, kv_head, params_now.k);
        view.v = place(row, kv_head, params_now.v);
      }
      view.tile = item.tile;
      view.factor = factor_of(found);
      view.num_keys = static_cast<int>(params.seqlen_k) - row;
      // The blocks of queries that see keys of the tile; at least one.
      block_first = 0;
      block_last = inputs.num_blocks;
      if constexpr (kBounds > 0) {
        // As scores_t has them, with few registers: the band of keys that the first
        // query sees, counted from the tile's first, and from it the queries.
        auto bounded = [](index_t x) { return int(clamp(x, -kMany, kMany)); };
        const int low = bounded(query_offset - row - params_now.left),
                  high = bounded(query_offset - row + params_now.right + 1);
        const int num_queries = params_now.seqlen_q;
        const int num_keys = min(int(params_now.seqlen_k) - row, kBlockN);
        const int first = min(max(1 - high, 0), num_queries),
                  last = min(max(num_keys - low, 0), num_queries);
        block_first = first / kBlockM;
        block_last = (last + kBlockM - 1) / kBlockM;
        if (block_first >= block_last) {
          block_first = 0;
          block_last = 1;
        }
        view.low = low;
        view.high = high;
        view.whole_first = num_keys < kBlockN ? kMany : kBlockN - high;
        view.whole_last = -low - (kBlockM - 1);
      }
      view.count = (block_last - block_first) * inputs.num_summed;
      block = block_first;
      summed = 0;
      next_item = (kDynamic ? atomicAdd(&counter->next, 1) : number) + gridDim.x;
    };
    // Asks for k and v of item number n, or lets the others see that it is none.
    auto ask_for_kv = [&](unsigned n) {
      const view_t& view = views[n % kViews];
      if (view.count == 0) {
        ptx::mbarrier_arrive(k_full);
        return;
      }
      const int k_batch[2] = {view.k.z, view.k.w}, v_batch[2] = {view.v.z, view.v.w};
      load_tile<kBlockN, kChunks>(smem_k, inputs.k_map, k_full, view.k.x, view.k.y,
                                  k_batch);
      load_tile<kBlockN, kChunks>(smem_v, inputs.v_map, v_full, view.v.x, view.v.y,
                                  v_batch);
    };
    // Asks for a block of queries as soon as its stages are free.
    auto ask_for_queries = [&] {
      if (block_last == 0) return;
      const source_t& from = sources[summed];
      wait(q_empty + 8 * q_stage, q_parity);
      const int q_batch[2] = {from.q.z, from.q.w};
      origins_memory[q_stage] = {block * kBlockM, from.q.x + block};
      load_tile<kBlockM, kChunks>(smem_q + q_stage * kBytesM, inputs.q_map,
                                  q_full + 8 * q_stage, block * kBlockM, from.q.y,
                                  q_batch);
      q_stage = after(q_stage);
      q_parity ^= q_stage == 0;
      const unsigned stage = asked % kStagesDout, full = dout_full + 8 * stage;
      wait(dout_empty + 8 * stage, (asked / kStagesDout & 1) ^ 1);
      const int dout_batch[2] = {from.dout.z, from.dout.w};
      ptx::mbarrier_arrive_expect_tx(full, kBytesStats);
      ptx::cp_async_bulk(smem_stats + stage * kBytesStats,
                         stats + index_t(from.dout.x + block) * (2 * kBlockM),
                         kBytesStats, full);
      load_tile<kBlockM, kChunks>(smem_dout + stage * kBytesM, inputs.dout_map, full,
                                  block * kBlockM, from.dout.y, dout_batch);
      ++asked;
      if (++block < block_last) return;
      block = block_first;
      if (++summed == inputs.num_summed) begin_item();
    };

    begin_item();
    ask_for_kv(0);
    ask_for_queries();
    ask_for_queries();
    unsigned sent_stage = 0;  // of q
    unsigned n = 0;
    for (unsigned item = 0;; ++item) {
      int left = views[item % kViews].count;
      if (left == 0) break;
      for (; left > 0; --left, ++n) {
        ask_for_queries();
        const int target = origins_memory[sent_stage].y;
        sent_stage = after(sent_stage);
        // The others have made dq of a block: it goes to the sums.
        for (int g = 0; g < kGroups; ++g) {
          wait(dq_full + 8 * g, n & 1);
          ptx::cp_reduce_async_bulk_add(
              sums_q + (index_t(target) * kGroups + g) * kPart,
              smem_dq + g * kBytesPart, kBytesPart);
          ptx::cp_async_bulk_commit_group();
        }
        if (left == 1) {
          wait(kv_empty, item & 1);
          ask_for_kv(item + 1);
        }
        ptx::cp_async_bulk_wait_group_read();
        ptx::mbarrier_arrive(dq_empty);
      }
    }
    ptx::cp_async_bulk_wait_group();
    // The last block to finish leaves both numbers at 0 for the next launch.
    if (kDynamic && atomicAdd(&counter->finished, 1) == gridDim.x - 1) {
      counter->next = 0;
      counter->finished = 0;
      __threadfence();
    }
    return;
  }

  // --- those that compute
  ptx::setmaxnreg_inc<kWorkerRegisters>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;

  // A operands: rows of this warpgroup; B operands; and operands whose rows are summed.
  const unsigned long long k_rows = descriptor(smem_k + group * 8192, 16),
                           v_rows = descriptor(smem_v + group * 8192, 16),
                           q_rows = descriptor(smem_q, 16),
                           dout_rows = descriptor(smem_dout, 16),
                           q_sums = descriptor(smem_q, kChunkM),
                           dout_sums = descriptor(smem_dout, kChunkM);
  // Of dq, a warpgroup makes 64 of 128 columns.
  const unsigned long long ds_rows = descriptor(smem_ds, 16),
                           k_sums = descriptor(smem_k + group * kChunkN, kChunkN);
  // For stmatrix a lane gives a row of a matrix: queries n and n + 8 of two groups of
  // 8 keys. The swizzle flips bits 4 to 6 of an address by bits 7 to 9.
  const unsigned ds_target = smem_ds + group * kChunkM +
                             (lane / 16 * 8 + lane % 8) * 128 +
                             ((32 * warp + 16 * (lane / 8 % 2)) ^ (lane % 8 * 16));
  const unsigned lane_stats = smem_stats + lane % 4 * 8;
  const unsigned dq_target = smem_dq + threadIdx.x / 32 * 4096 + lane * 16;

  unsigned items = 0;  // of this block, so far
  unsigned block = 0;  // of queries, so far: gives stages and parities but those of q
  // Those of q. A remainder by 3 would be made in vector registers, and all descriptors
  // with it, which then are moved to uniform ones.
  unsigned q_stage = 0, q_parity = 0;
  auto wait_for_q = [&] { wait(q_full + 8 * q_stage, q_parity); };
  auto wait_for_dout = [&](unsigned number) {
    wait(dout_full + 8 * (number % kStagesDout), number / kStagesDout & 1);
  };
  // All lanes of this warp have done with what the barrier stands for.
  auto release = [&](unsigned barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };

  float sums_k[kSums], sums_v[kSums], s[kScores], dp[kScores];
  unsigned p[kBlockM / 16][4], ds[kBlockM / 16][4];
  // How many blocks of queries the next item has; 0: there is none.
  auto next_count = [&] {
    wait(k_full, items & 1);
    return uniform(*const_cast<volatile int*>(&views[items % kViews].count));
  };
  int count = next_count();
  while (count != 0) {
    volatile view_t& view = views[items % kViews];
    const unsigned last = block + count - 1;

    // Pair n of a thread's lse, or of its delta, of the queries in a stage.
    auto load_lse = [&](unsigned dout_stage, int n) {
      return ptx::load_shared_f32x2(lane_stats + dout_stage * kBytesStats + n * 32);
    };
    auto load_delta = [&](unsigned dout_stage, int n) {
      return ptx::load_shared_f32x2(lane_stats + dout_stage * kBytesStats +
                                    4 * kBlockM + n * 32);
    };
    // The pairs that are asked for ahead; one too many, since there may be none.
    float2 early_lse[kEarlyLse + 1], early_delta[kEarlyDelta + 1];
    auto ask_for_lse = [&](unsigned dout_stage) {
#pragma unroll
      for (int n = 0; n < kEarlyLse; ++n) early_lse[n] = load_lse(dout_stage, n);
    };
    auto ask_for_delta = [&](unsigned dout_stage) {
#pragma unroll
      for (int n = 0; n < kEarlyDelta; ++n) early_delta[n] = load_delta(dout_stage, n);
    };

    // s becomes P of the block of queries in a stage, and p the same as operand. Number
    // e stands in column e / 4 * 8 + lane % 4 * 2 + e % 2, row e / 2 % 2 * 8.
    auto softmax = [&](unsigned dout_stage, bool whole) {
      if (!whole) {
        // A row's key is hidden from queries before `first`, and after `last`.
        const int num_keys = view.num_keys;
        const int row_thread = group * 64 + warp * 16 + lane / 4;
        int first[2] = {-kMany, -kMany}, last = kMany;
        if constexpr (kBounds > 0) {
          const int origin = ptx::load_shared_s32(origins + 8 * q_stage);
          const int corner = row_thread - origin - lane % 4 * 2;
          first[0] = corner - view.high + 1;
          first[1] = first[0] + 8;
          if (kBounds == 2) last = corner - view.low;
        }
        if (row_thread >= num_keys) first[0] = kMany;
        if (row_thread + 8 >= num_keys) first[1] = kMany;
#pragma unroll
        for (int e = 0; e < kScores; ++e) {
          const int column = e / 4 * 8 + e % 2, row = e / 2 % 2;
          bool hides = column < first[row];
          if (kBounds == 2) hides |= column > last + row * 8;
          if (hides) s[e] = inputs.hidden;
        }
      }
#pragma unroll
      for (int e = 0; e < kScores; e += 4) {
        const int n = e / 4;
        const float2 lse = n < kEarlyLse ? early_lse[n] : load_lse(dout_stage, n);
        s[e] = ptx::ex2_approx_ftz(s[e] * inputs.to_log2 - lse.x);
        s[e + 1] = ptx::ex2_approx_ftz(s[e + 1] * inputs.to_log2 - lse.y);
        s[e + 2] = ptx::ex2_approx_ftz(s[e + 2] * inputs.to_log2 - lse.x);
        s[e + 3] = ptx::ex2_approx_ftz(s[e + 3] * inputs.to_log2 - lse.y);
      }
#pragma unroll
      for (int e = 0; e < kScores; e += 2) {
        p[e / 8][e / 2 % 4] = pair16_t::from(s[e + 1], s[e]);
      }
    };

    // Whether no key is hidden from the block of queries in the stage.
    auto is_whole = [&] {
      if constexpr (kBounds == 0) return view.num_keys >= kBlockN;
      const int origin = ptx::load_shared_s32(origins + 8 * q_stage);
      return origin >= view.whole_first && (kBounds < 2 || origin <= view.whole_last);
    };

    // dS of the block in a stage of dO, from P in s and dP.
    auto make_ds = [&](unsigned dout_stage) {
      const float factor = kNarrow<elem_t> ? view.factor : 1.f;
#pragma unroll
      for (int e = 0; e < kScores; e += 4) {
        const int n = e / 4;
        float2 d = n < kEarlyDelta ? early_delta[n] : load_delta(dout_stage, n);
        if constexpr (kNarrow<elem_t>) {
          d.x *= factor;
          d.y *= factor;
#pragma unroll
          for (int f = e; f < e + 4; ++f) dp[f] *= factor;
        }
        ds[e / 8][e / 2 % 4] =
            pair16_t::from(s[e + 1] * (dp[e + 1] - d.y), s[e] * (dp[e] - d.x));
        ds[e / 8][e / 2 % 4 + 1] =
            pair16_t::from(s[e + 3] * (dp[e + 3] - d.y), s[e + 2] * (dp[e + 2] - d.x));
      }
    };
    // dS for dq, to shared memory; wgmma reads it behind a fence.
    auto store_ds = [&] {
#pragma unroll
      for (int m = 0; m < kBlockM / 16; ++m) {
        ptx::stmatrix_x4_trans(ds_target + block % 2 * kBytesDs + m * 2048, ds[m][0],
                               ds[m][1], ds[m][2], ds[m][3]);
      }
    };
    auto start_s = [&](unsigned q_stage) {
      ptx::wgmma_fence();
      multiply_scores(s, k_rows, q_rows + q_stage * (kBytesM / 16));
      ptx::wgmma_commit_group();
    };
    auto start_dp = [&](unsigned dout_stage) {
      ptx::wgmma_fence();
      multiply_scores(dp, v_rows, dout_rows + dout_stage * (kBytesM / 16));
      ptx::wgmma_commit_group();
    };
    bool accumulate = false;
    auto start_dv = [&](unsigned dout_stage) {
      ptx::wgmma_fence();
      multiply_sums(sums_v, p, dout_sums + dout_stage * (kBytesM / 16), accumulate);
      ptx::wgmma_commit_group();
    };
    auto start_dk = [&](unsigned q_stage) {
      ptx::wgmma_fence();
      multiply_sums(sums_k, ds, q_sums + q_stage * (kBytesM / 16), accumulate);
      ptx::wgmma_commit_group();
    };
    auto start_dq = [&](float (&dq)[kSumsQ]) {
      ptx::wgmma_fence();
      multiply_dq(dq, ds_rows + block % 2 * (kBytesDs / 16), k_sums);
      ptx::wgmma_commit_group();
    };
    // Sums of dq leave through shared memory, when those before have.
    auto give_dq = [&](const float (&dq)[kSumsQ]) {
      wait(dq_empty, (block & 1) ^ 1);
#pragma unroll
      for (int e = 0; e < kSumsQ; e += 4) {
        ptx::store_shared_f32x4(dq_target + e * 128, dq[e], dq[e + 1], dq[e + 2],
                                dq[e + 3]);
      }
      ptx::fence_proxy_async();
      release(dq_full + 8 * group);
    };

    wait_for_q();
    wait_for_dout(block);
    wait(v_full, items & 1);
    ask_for_lse(block % kStagesDout);
    bool whole = is_whole();

    // One block of queries. No product is in flight between steps: ptxas does not
    // follow them around a loop (C7514).
    //
    // The softmax runs beside dP, the making of dS beside dv, and dq leaves beside dk.
    // There are no registers for S of the next block beside dk.
    auto step = [&](auto is_last) {
      constexpr bool kLast = decltype(is_last)::value;
      const unsigned this_q = q_stage, this_dout = block % kStagesDout;
      start_s(this_q);
      start_dp(this_dout);
      ptx::wgmma_wait_group<1>();  // S
      keep_order(s);
      softmax(this_dout, whole);
      start_dv(this_dout);
      ask_for_delta(this_dout);
      q_stage = after(q_stage);
      q_parity ^= q_stage == 0;
      bool q_is_there = false;
      if constexpr (!kLast) {
        q_is_there = ptx::mbarrier_try_wait_parity(q_full + 8 * q_stage, q_parity);
      }
      ptx::wgmma_wait_group<1>();  // dP
      keep_order(dp);
      make_ds(this_dout);
      store_ds();
      ptx::fence_proxy_async();
      ptx::bar_arrive<kWorkers>(1 + group + block % 2 * 2);
      ptx::bar_sync<kWorkers>(2 - group + block % 2 * 2);  // the other's, too
      auto& dq = dp;                                       // whose registers are free
      start_dq(dq);
      ptx::wgmma_wait_group<1>();  // dv
      start_dk(this_q);
      keep_order(sums_v);
      ptx::wgmma_wait_group<1>();  // dq
      keep_order(dq);
      release(dout_empty + 8 * this_dout);
      if constexpr (kLast) release(kv_empty);
      give_dq(dq);
      if constexpr (!kLast) {
        if (!q_is_there) wait_for_q();
        whole = is_whole();
        wait_for_dout(block + 1);
        ask_for_lse((block + 1) % kStagesDout);
      }
      ptx::wgmma_wait_group<0>();
      keep_order(sums_k);
      release(q_empty + 8 * this_q);
    };

#pragma unroll 1
    while (block != last) {
      step(flag_t<false>());
      ++block;
      accumulate = true;
    }
    step(flag_t<true>());
    ++block;
    ++items;

    const int key_first = view.tile * kBlockN;
    const int num_keys = view.num_keys;
    const int row_thread = group * 64 + warp * 16 + lane / 4;  // and the one 8 below
    float odd = 0;  // NaN where a sum is not finite
    auto store = [&](const float (&sums)[kSums], float factor, elem_t* target,
                     index_t row_step, int dim) {
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
            words[t] = pair16_t::from(sums[from + 1] * factor, sums[from] * factor);
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
    };
    store(sums_k, unfactor_of(factor_of(found), static_cast<float>(params.scale)),
          dk + view.dk + key_first * grads.row[0], grads.row[0],
          static_cast<int>(params.head_dim));
    store(sums_v, 1 / kFactorP, dv + view.dv + key_first * grads.row[1], grads.row[1],
          static_cast<int>(params.head_dim_v));
    if (odd != 0) found->odd = 1;
    count = next_count();
  }
}

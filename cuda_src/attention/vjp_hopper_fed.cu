// SPDX-License-Identifier: MIT
// attention_vjp_hopper_fed: gradients by tensor cores, as attention_vjp_hopper makes
// them, at 128 columns, with warps of their own for all that is not arithmetic.
//
// Algorithm  as vjp_hopper.cu, S at the start of a step. Sums of dq leave through
//            shared memory. Who adds the last to a block of them makes dq of it
// Grid       a block a multiprocessor. An item is a tile of keys of a kept entry;
//            blocks take item after item, from a counter
// Threads    two warpgroups compute, 64 keys each. Of a third, a warp asks for tiles,
//            one gives sums of dq to the copy engine, and two make dq of sums
// Tiles      k, v     kBlockN x kHeadDim   shared, loaded once an item
//            q, dO    kBlockM x kHeadDim   shared, 2 stages each
//            dS       kBlockN x kBlockM    shared, twice
//            dq       kBlockM x kHeadDim   shared, floats on their way to memory; and
//                                          on their way back
//            S, P, dP, dS, dk, dv, dq  registers, as wgmma lays them out
// Memory     global: k, v, dk and dv once; q and dO once a tile of keys, mostly from
//            L2; dq is added to sums of floats by the copy engine
// Numbers    S, P, dP, dS and sums in float; P and dS rounded to elem_t before
//            products. The order of sums in dq differs from run to run unless kOrdered
// Limits     as vjp_hopper.cu; any number of summed entries
#include "attention/vjp_hopper.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/opaque.cuh"
#include "ptx/registers.cuh"
#include "ptx/relaxed.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma_shapes.cuh"

#if !defined(BOUNDS) || !defined(ORDERED) || !defined(FINISHES)
#error "BOUNDS, ORDERED and FINISHES come from the host"
#endif
#ifndef SPLIT
#define SPLIT 2
#endif
#ifndef DV_LATE
#define DV_LATE 0
#endif
constexpr int kBlockN = 128;  // keys of a tile
// Which queries see a key by its position: 0 all, 1 from a first one on, 2 from a first
// one to a last one.
constexpr int kBounds = BOUNDS;
// Tiles of keys add to a block of dq one after the other, from the last to the first:
// then it has the same bits in every run. No block of threads waits for one that has
// not begun: items are taken in the order in which they add.
constexpr bool kOrdered = ORDERED;
// Else vjp_hopper_dq.cu makes dq of sums.
constexpr bool kFinishes = FINISHES;
constexpr int kGroups = 2, kWorkers = 128 * kGroups;
static_assert(kNumThreads == kWorkers + 128 && kHeadDim == 128);
static_assert(kPart == kBlockM * 64);
// setmaxnreg moves registers inside the pool of the launch, 168 a thread.
constexpr int kFeederRegisters = kBlockM == 64 ? 40 : 24;
constexpr int kWorkerRegisters = kBlockM == 64 ? 232 : 240;
// dq of a block is made as dq^T where its queries are no multiple of 64.
constexpr bool kTurned = kBlockM % 64 != 0;
static_assert(!(kFinishes && kTurned));

#ifndef STAGES_Q
#define STAGES_Q 3
#endif
#ifndef STAGES_DOUT
#define STAGES_DOUT 2
#endif
#ifndef LAG
#define LAG 1
#endif
constexpr int kStagesQ = STAGES_Q, kStagesDout = STAGES_DOUT;
// A step makes dq of the block before, and there are two stages of dS.
constexpr bool kLag = LAG;
constexpr int kStagesDs = kLag ? 2 : 1;
constexpr int kMany = 1 << 30;

// A tile: chunks of 64 columns, each [rows][128 bytes], swizzled.
constexpr int kChunks = kHeadDim / 64;
constexpr int kChunkN = kBlockN * 128, kChunkM = kBlockM * 128;
constexpr int kBytesN = kChunks * kChunkN, kBytesM = kChunks * kChunkM;
constexpr int kBytesDs = 2 * kChunkM;  // columns are keys: a chunk a warpgroup
constexpr int kBytesStats = 2 * kBlockM * 4;
constexpr int kBytesPart = kPart * 4;
constexpr int kBytesFinish = kBytesPart / 2;  // on their way back

constexpr int kScores = kBlockM / 2;  // of S, P, dP, dS and dq, numbers of a thread
constexpr int kSums = kHeadDim / 2;   // of dk and dv
// Of the pairs of lse and delta that a thread needs, so many are asked for ahead.
constexpr int kEarlyLse = kBlockM / 8, kEarlyDelta = kTurned ? 2 : 4;

template <int kNumber>
struct number_t {
  static constexpr int value = kNumber;
};

// What all are told of an item.
struct alignas(16) view_t {
  int count;     // blocks of queries, over all summed entries; 0: no more items
  float factor;  // of dP, where dS has one
  int num_keys;  // from its first on; may be more than the tile has
  // Key j, counted from the first, is seen by query i if low <= j - i < high. No key is
  // hidden from blocks whose first query lies in [whole_first, whole_last].
  int low, high, whole_first, whole_last;
  int tile;
  index_t dk, dv;  // where the gradients go
  bool adds;       // to dq: else no query sees a key of it
};
// The feeder tells of an item while others may still be at the fourth before it.
constexpr int kViews = 8;
// Of a block of queries: its first one, its number among the blocks of sums_q, and
// among those of dq; then bits: the last of its item, the last of all, the first of its
// entry; and how often others have had the sums before.
constexpr int kOrigins = 8;

// Of who asks: where queries of an entry lie (first block of sums or of stats, head,
// batch), and keys of an item (row, head, batch).
struct alignas(16) places_t {
  int4 q, dout, k, v;
  int2 sums;  // the first block of sums, and how often others have had it before
};

// A stage, and how often all of them have been gone through.
template <int kCount>
struct stage_t {
  unsigned number = 0, parity = 0;

  __device__ __forceinline__ void next() {
    number = number + 1 == kCount ? 0 : number + 1;
    parity ^= number == 0;
  }
};

struct barriers_t {
  unsigned long long k_full, v_full, k_empty, v_empty;
  unsigned long long q_full[kStagesQ], q_empty[kStagesQ];
  unsigned long long dout_full[kStagesDout], dout_empty[kStagesDout];
  unsigned long long ds_full[2], ds_empty[2];
  unsigned long long dq_full[kGroups], dq_empty[kGroups];
  unsigned long long finish_full, finish_empty, part_full[kGroups];
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
template <int kFirst = 0, int kLast = kBlockM / 16>
__device__ __forceinline__ void multiply_sums(float (&sums)[kSums],
                                              const unsigned (&p)[kBlockM / 16][4],
                                              unsigned long long qd,
                                              bool accumulate) {
#pragma unroll
  for (int step = kFirst; step < kLast; ++step) {
    ptx::wgmma_t<elem_t, kHeadDim>::rs(sums, p[step], qd + step * (16 * 128 / 16),
                                       step > 0 || accumulate);
  }
}

// This warpgroup's 64 columns of dq = dS^T k, or kTurned of dq^T = k^T dS. A step is
// 16 keys.
template <int kCount>
__device__ __forceinline__ void multiply_dq(float (&dq)[kCount],
                                            unsigned long long ds,
                                            unsigned long long k) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    const unsigned long long ds_step = ds + (chunk * kChunkM + inside) / 16;
    const unsigned long long k_step = k + step * (16 * 128 / 16);
    if constexpr (kTurned) {
      ptx::wgmma_t<elem_t, 2 * kCount>::ss_m(dq, k_step, ds_step, step > 0);
    } else {
      ptx::wgmma_t<elem_t, 2 * kCount>::ss_mn(dq, ds_step, k_step, step > 0);
    }
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

// Where items differ in length, or add in one order, those of a section of entries come
// tile after tile: first those that most queries see, or those that add first.
__device__ __forceinline__ item_t item_of(int number, const inputs_t& inputs) {
  const unsigned n = number, num_tiles = inputs.num_tiles;
  if constexpr (kBounds > 0 || kOrdered) {
    const unsigned in_section = inputs.section * num_tiles;
    const unsigned first = n / in_section * inputs.section;
    const unsigned rest = n % in_section;
    const unsigned width = min(inputs.num_kept - first, unsigned(inputs.section));
    const int tile = rest / width;
    return {kOrdered ? inputs.num_tiles - 1 - tile : tile, int(first + rest % width)};
  } else {
    return {int(n % num_tiles), int(n / num_tiles)};
  }
}

// The tiles of keys that queries [first, first + kBlockM) see, where key j, counted
// from the first of `tile`, is seen by query i if low <= j - i < high. One at least.
__device__ __forceinline__ int2 tiles_of(
    int first, int low, int high, int tile, int num_queries, int num_keys) {
  const int row = tile * kBlockN;
  const int last = min(first + kBlockM, num_queries) - 1;
  const int begin = max(row + first + low, 0) / kBlockN;
  const int end = (max(min(row + last + high, num_keys), 0) + kBlockN - 1) / kBlockN;
  return begin < end ? int2{begin, end} : int2{tile, tile + 1};
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_vjp_hopper_fed(const __grid_constant__ inputs_t inputs,
                             const float* __restrict__ stats,  // vjp_hopper.cuh
                             float* __restrict__ sums_q,       // vjp_hopper.cuh
                             int* turns,                       // vjp_hopper.cuh
                             const int ring,
                             elem_t* __restrict__ dq_out,  // vjp_hopper_dq.cu
                             const index_t dq_batch,       // strides of dq
                             const index_t dq_head,
                             const index_t dq_row,
                             elem_t* __restrict__ dk,  // as k, summed over entries
                             elem_t* __restrict__ dv,  // as v, summed over entries
                             found_t* __restrict__ found,
                             counter_t* __restrict__ counter,
                             SCORE_PARAMETERS,
                             const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ barriers_t barriers;
  __shared__ view_t views[kViews];
  __shared__ int4 origins_memory[kOrigins];
  __shared__ places_t places;
  __shared__ volatile int next_item;      // of who asks, who has few registers
  // Of which block of sums dq is to be made, and which it is among those of dq.
  __shared__ volatile int finish_target, finish_place;

  const unsigned smem_k = ptx::shared_address(smem);
  const unsigned smem_v = smem_k + kBytesN, smem_q = smem_v + kBytesN,
                 smem_dout = smem_q + kStagesQ * kBytesM,
                 smem_ds = smem_dout + kStagesDout * kBytesM,
                 smem_dq = smem_ds + kStagesDs * kBytesDs,
                 smem_finish = smem_dq + kGroups * kBytesPart,
                 smem_stats = smem_finish + kFinishes * kGroups * kBytesFinish;
  const unsigned k_full = ptx::shared_address(&barriers), v_full = k_full + 8,
                 k_empty = v_full + 8, v_empty = k_empty + 8, q_full = v_empty + 8,
                 q_empty = q_full + 8 * kStagesQ, dout_full = q_empty + 8 * kStagesQ,
                 dout_empty = dout_full + 8 * kStagesDout,
                 ds_full = dout_empty + 8 * kStagesDout, ds_empty = ds_full + 16,
                 dq_full = ds_empty + 16, dq_empty = dq_full + 8 * kGroups,
                 finish_full = dq_empty + 8 * kGroups, finish_empty = finish_full + 8,
                 part_full = finish_empty + 8;
  unsigned origins = ptx::shared_address(origins_memory);
  ptx::forget(origins);

  const int group = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * kGroups;
    ptx::mbarrier_init(k_full, 1);
    ptx::mbarrier_init(v_full, 1);
    ptx::mbarrier_init(k_empty, kWarps);
    ptx::mbarrier_init(v_empty, kWarps);
    for (int n = 0; n < kStagesQ; ++n) {
      ptx::mbarrier_init(q_full + 8 * n, 1);
      ptx::mbarrier_init(q_empty + 8 * n, kWarps);
    }
    for (int n = 0; n < kStagesDout; ++n) {
      ptx::mbarrier_init(dout_full + 8 * n, 2);  // statistics come by themselves
      ptx::mbarrier_init(dout_empty + 8 * n, kWarps);
    }
    for (int n = 0; n < 2; ++n) {
      ptx::mbarrier_init(ds_full + 8 * n, kWarps);
      ptx::mbarrier_init(ds_empty + 8 * n, kWarps);
    }
    for (int n = 0; n < kGroups; ++n) {
      ptx::mbarrier_init(dq_full + 8 * n, 4);
      ptx::mbarrier_init(dq_empty + 8 * n, 1);
      ptx::mbarrier_init(part_full + 8 * n, 1);
    }
    ptx::mbarrier_init(finish_full, 1);
    ptx::mbarrier_init(finish_empty, kGroups);
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_wait();
  // Blocks of the next kernel have no room before those of this one are done.
  ptx::griddepcontrol_launch_dependents();
  __syncthreads();  // the barriers are there before anyone uses them

  if (group == kGroups) {
    ptx::setmaxnreg_dec<kFeederRegisters>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4 * kGroups;
    if (warp == 0 && lane == 0) {
      // --- who asks for tiles
      const unsigned q_from = ptx::shared_address(&places), dout_from = q_from + 16,
                     k_from = q_from + 32, v_from = q_from + 48,
                     sums_from = q_from + 64;
      auto store_place = [](unsigned to, const int4& x) {
        ptx::store_shared_s32x2(to, x.x, x.y);
        ptx::store_shared_s32x2(to + 8, x.z, x.w);
      };
      next_item = kOrdered ? atomicAdd(&counter->next, 1) : int(blockIdx.x);
      unsigned asked = 0;  // blocks of queries so far
      stage_t<kStagesQ> q_stage;
      stage_t<kStagesDout> dout_stage;
#pragma unroll 1
      for (unsigned items = 0;; ++items) {
        view_t& view = views[items % kViews];
        if (next_item >= inputs.num_items) {
          view.count = 0;
          if (items > 0) wait(k_empty, (items - 1) & 1);
          ptx::mbarrier_arrive(k_full);
          break;
        }
        const inputs_t& inputs_now = ptx::anew(inputs);
        const params_t& params_now = ptx::anew(params);
        const grads_t& grads_now = ptx::anew(grads);
        const item_t item = item_of(next_item, inputs_now);
        const int row = item.tile * kBlockN;
        view.dk = offset_of(grads_now.kept, item.kept, 1);
        view.dv = offset_of(grads_now.kept, item.kept, 2);
        const unsigned entry = offset_of(grads_now.kept, item.kept, 0);
        view.tile = item.tile;
        view.factor = factor_of(found);
        view.num_keys = static_cast<int>(params.seqlen_k) - row;
        view.adds = true;
        // The blocks of queries that see keys of the tile; at least one.
        int block_first = 0, block_last = inputs.num_blocks;
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
          const bool empty = first >= last;
          block_first = first / kBlockM;
          block_last = (last + kBlockM - 1) / kBlockM;
          // Blocks that see no key at all are with the first tile, or the last.
          const int blind_first = block_last;
          const int blind_last =
              first == num_queries ? inputs.num_blocks : block_first;
          if (item.tile == 0 && blind_last > 0) {
            block_first = 0;
            if (empty) block_last = blind_last;
          } else if (item.tile == inputs.num_tiles - 1 &&
                     blind_first < inputs.num_blocks) {
            block_last = inputs.num_blocks;
            if (empty) block_first = blind_first;
          } else if (empty) {
            view.adds = false;
            block_first = 0;
            block_last = 1;
          }
          view.low = low;
          view.high = high;
          view.whole_first = num_keys < kBlockN ? kMany : kBlockN - high;
          view.whole_last = -low - (kBlockM - 1);
        }
        view.count = (block_last - block_first) * inputs.num_summed;
        next_item = atomicAdd(&counter->next, 1) + (kOrdered ? 0 : int(gridDim.x));

#pragma unroll 1
        for (int summed = 0; summed < inputs.num_summed; ++summed) {
          const unsigned of_all =
              summed == 0 ? entry
                          : entry + unsigned(offset_of(grads_now.summed, summed, 0));
          unsigned rest = of_all / unsigned(params_now.num_heads);
          const int head = of_all - rest * unsigned(params_now.num_heads);
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
          int slot = head;
#pragma unroll
          for (int axis = 0; axis < kBatchDims; ++axis) {
            slot += at[kBatchDims - 1 - axis] * int(inputs_now.slot[axis]);
          }
          const int num_blocks = inputs_now.num_blocks;
          store_place(q_from, place(slot * num_blocks, head, params_now.q));
          if constexpr (kFinishes) {
            const unsigned number = item.kept * inputs.num_summed + summed;
            const unsigned before = number / unsigned(ring);
            ptx::store_shared_s32x2(sums_from, (number - before * ring) * num_blocks,
                                    before);
          } else {
            ptx::store_shared_s32x2(sums_from, slot * num_blocks, 0);
          }
          store_place(dout_from, place(of_all * num_blocks, head, grads_now.dout));
          if (summed == 0) {
            const int kv_head = unsigned(head) / unsigned(params_now.group_size);
            store_place(k_from, place(row, kv_head, params_now.k));
            store_place(v_from, place(row, kv_head, params_now.v));
          }
#pragma unroll 1
          for (int block = block_first; block < block_last; ++block, ++asked) {
            int4 from = ptx::load_shared_s32x4(q_from);
            wait(q_empty + 8 * q_stage.number, q_stage.parity ^ 1);
            const bool ends = block == block_last - 1 &&
                              summed == inputs.num_summed - 1;
            const unsigned origin = origins + asked % kOrigins * 16;
            const int2 sums = ptx::load_shared_s32x2(sums_from);
            const int flags = (!ends ? 0 : next_item < inputs.num_items ? 1 : 3) |
                              (block == block_first) << 2 | sums.y << 3;
            ptx::store_shared_s32x2(origin, block * kBlockM, sums.x + block);
            ptx::store_shared_s32x2(origin + 8, from.x + block, flags);
            const int q_batch[2] = {from.z, from.w};
            load_tile<kBlockM, kChunks>(smem_q + q_stage.number * kBytesM, inputs.q_map,
                                        q_full + 8 * q_stage.number, block * kBlockM,
                                        from.y, q_batch);
            q_stage.next();
            from = ptx::load_shared_s32x4(dout_from);
            const unsigned stage = dout_stage.number, full = dout_full + 8 * stage;
            wait(dout_empty + 8 * stage, dout_stage.parity ^ 1);
            dout_stage.next();
            ptx::mbarrier_arrive_expect_tx(full, kBytesStats);
            ptx::cp_async_bulk(smem_stats + stage * kBytesStats,
                               stats + index_t(from.x + block) * (2 * kBlockM),
                               kBytesStats, full);
            const int dout_batch[2] = {from.z, from.w};
            load_tile<kBlockM, kChunks>(smem_dout + stage * kBytesM, inputs.dout_map,
                                        full, block * kBlockM, from.y, dout_batch);
            if (summed > 0 || block > block_first) continue;
            // Behind the first block those of keys.
            if (items > 0) wait(v_empty, (items - 1) & 1);
            from = ptx::load_shared_s32x4(v_from);
            const int v_batch[2] = {from.z, from.w};
            load_tile<kBlockN, kChunks>(smem_v, inputs.v_map, v_full, from.x, from.y,
                                        v_batch);
            if (items > 0) wait(k_empty, (items - 1) & 1);
            from = ptx::load_shared_s32x4(k_from);
            const int k_batch[2] = {from.z, from.w};
            load_tile<kBlockN, kChunks>(smem_k, inputs.k_map, k_full, from.x, from.y,
                                        k_batch);
          }
        }
      }
    } else if (warp == 1 && lane == 0) {
      // --- who gives sums of dq to the copy engine
      int finishes = 0;  // blocks whose dq is to be made, so far
      unsigned items = 0;
      auto finish = [&](int target, int place) {
        wait(finish_empty, (finishes & 1) ^ 1);
        finish_target = target;
        finish_place = place;
        ptx::mbarrier_arrive(finish_full);
        ++finishes;
      };
      // A block of sums, its place, and how many tiles add to it; 0: nobody has.
      int3 added = {0, 0, 0};
      auto count = [&] {
        if (added.z > 0 && atomicAdd(turns + added.x, 1) == added.z - 1) {
          finish(added.x, added.y);
        }
      };
      wait(k_full, 0);
      bool any = *const_cast<volatile int*>(&views[0].count) != 0;
#pragma unroll 1
      for (unsigned block = 0; any; ++block) {
        {
          const volatile view_t& view = views[items % kViews];
          wait(dq_full, block & 1);  // then the origin is there, too
          const int4 origin = ptx::load_shared_s32x4(origins + block % kOrigins * 16);
          items += origin.w & 1;
          any = !(origin.w & 2);
          // Those before have been made dq of, and the sums are 0 again.
          const int before = origin.w >> 3;
          if (kFinishes && (origin.w & 4) && before > 0) {
            const int* const cleared =
                turns + ring * inputs.num_blocks + origin.y / inputs.num_blocks;
            while (ptx::load_relaxed(cleared) < before * inputs.num_blocks) {
            }
            __threadfence();
          }
          int2 tiles = {0, inputs.num_tiles};
          if constexpr (kBounds > 0) {
            tiles = tiles_of(origin.x, view.low, view.high, view.tile,
                             static_cast<int>(params.seqlen_q),
                             static_cast<int>(params.seqlen_k));
          }
          int* const turn = turns + origin.y;
          const bool adds = kBounds == 0 || view.adds;
          if (kOrdered && adds && view.tile < tiles.y - 1) {
            while (ptx::load_relaxed(turn) < tiles.y - 1 - view.tile) {
            }
          }
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            if (g > 0) wait(dq_full + 8 * g, block & 1);
            if (adds) {
              ptx::cp_reduce_async_bulk_add(
                  sums_q + (index_t(origin.y) * kGroups + g) * kPart,
                  smem_dq + g * kBytesPart, kBytesPart);
            }
            ptx::cp_async_bulk_commit_group();
          }
          ptx::cp_async_bulk_wait_group_read<1>();
          ptx::mbarrier_arrive(dq_empty);
          ptx::cp_async_bulk_wait_group_read();
          ptx::mbarrier_arrive(dq_empty + 8);
          if constexpr (kOrdered) {
            // The tile behind may add. No fence between: the engine alone reads and
            // writes sums, in the L2 cache, and says when it has.
            if (adds) {
              ptx::cp_async_bulk_wait_group();
              if (view.tile != tiles.x) ptx::store_relaxed(turn, tiles.y - view.tile);
              if (kFinishes && view.tile == tiles.x) finish(origin.y, origin.z);
            }
          } else if constexpr (kFinishes) {
            // Of the block before, whose sums have been added meanwhile.
            ptx::cp_async_bulk_wait_group<kGroups>();
            count();
            added = {origin.y, origin.z, adds ? tiles.y - tiles.x : 0};
          }
        }
      }
      ptx::cp_async_bulk_wait_group();
      if constexpr (kFinishes) {
        if (!kOrdered) count();
        finish(-1, 0);
      }
      // The last block to finish leaves both numbers at 0 for the next launch.
      if (atomicAdd(&counter->finished, 1) == int(gridDim.x) - 1) {
        counter->next = 0;
        counter->finished = 0;
        __threadfence();
      }
    } else if (kFinishes && warp >= 2) {
      // --- who makes dq of the sums of a block, each 64 columns
      const int g = warp - 2;
      const bool clears = ring < inputs.num_kept * inputs.num_summed;
      const unsigned part = smem_finish + g * kBytesFinish, full = part_full + 8 * g;
#pragma unroll 1
      for (unsigned n = 0;; ++n) {
        wait(finish_full, n & 1);
        const int target = finish_target, dq_block = finish_place;
        __syncwarp();
        if (target < 0) break;
        if (lane == 0) {
          ptx::mbarrier_arrive(finish_empty);
        }
        const params_t& params_now = ptx::anew(params);
        const float factor =
            unfactor_of(factor_of(found), static_cast<float>(params_now.scale));
        const unsigned slot = unsigned(dq_block) / unsigned(inputs.num_blocks);
        const unsigned entry = slot / unsigned(params_now.num_heads);
        const int head = slot - entry * unsigned(params_now.num_heads);
        const int first = (dq_block - slot * inputs.num_blocks) * kBlockM;
        // A lane's vector has two columns of two rows, 8 apart; four of them, behind an
        // exchange with three neighbours, are 8 columns of both.
        int rows = static_cast<int>(params_now.seqlen_q) - first - lane / 4;
        const int column = g * 64 + lane % 4 * 8;
        elem_t* to = dq_out + entry * dq_batch + head * dq_head +
                     (first + lane / 4) * dq_row + column;
        unsigned from = 0;
        float odd = 0;
#pragma unroll 1
        for (int m = 0; m < kBlockM / 16; ++m) {
          if (m % 2 == 0) {
            __syncwarp();
            if (lane == 0) {
              ptx::mbarrier_arrive_expect_tx(full, kBytesFinish);
              ptx::cp_async_bulk(part,
                                 sums_q + (index_t(target) * kGroups + g) * kPart +
                                     m / 2 * (kPart / 2),
                                 kBytesFinish, full);
            }
            from = part + lane * 16;
            wait(full, m / 2);
          }
#pragma unroll 1
          for (int half = 0; half < 2; ++half, from += 4 * 512) {
            unsigned words[2][4];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
              const float4 x = ptx::load_shared_f32x4(from + t * 512);
              odd = fmaf(x.x, 0, fmaf(x.y, 0, fmaf(x.z, 0, fmaf(x.w, 0, odd))));
              words[0][t] = pair16_t::from(x.y * factor, x.x * factor);
              words[1][t] = pair16_t::from(x.w * factor, x.z * factor);
            }
            transpose(words[0], lane);
            transpose(words[1], lane);
            if (column + half * 32 < static_cast<int>(params_now.head_dim)) {
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                if (8 * r >= rows) continue;
                *reinterpret_cast<uint4*>(to + 8 * r * dq_row + half * 32) =
                    make_uint4(words[r][0], words[r][1], words[r][2], words[r][3]);
              }
            }
          }
          to += 16 * dq_row;
          rows -= 16;
          if (m % 2 == 1 && clears) {
#pragma unroll
            for (int e = 0; e < kBytesFinish; e += 512) {
              ptx::store_shared_f32x4(part + lane * 16 + e, 0, 0, 0, 0);
            }
            ptx::fence_proxy_async();
            __syncwarp();
            if (lane == 0) {
              ptx::cp_async_bulk_store(sums_q + (index_t(target) * kGroups + g) * kPart +
                                           m / 2 * (kPart / 2),
                                       part, kBytesFinish);
              ptx::cp_async_bulk_commit_group();
              ptx::cp_async_bulk_wait_group_read();
            }
          }
        }
        if (clears) {
          if (lane == 0) ptx::cp_async_bulk_wait_group();
          __threadfence();
          ptx::bar_sync<32 * kGroups>(1);
          if (g == 0 && lane == 0) {
            ptx::store_relaxed(turns + target, 0);
            __threadfence();
            atomicAdd(turns + ring * inputs.num_blocks + target / inputs.num_blocks, 1);
          }
        }
        if (odd != 0) found->odd = 1;
        __syncwarp();
      }
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
  unsigned ds_target = smem_ds + group * kChunkM +
                             (lane / 16 * 8 + lane % 8) * 128 +
                             ((32 * warp + 16 * (lane / 8 % 2)) ^ (lane % 8 * 16));
  unsigned lane_stats = smem_stats + lane % 4 * 8;
  unsigned dq_target = smem_dq + threadIdx.x / 32 * (kBytesPart / 4) + lane * 16;
  // Else they are made anew in each step, from a special register that answers late.
  ptx::forget(ds_target);
  ptx::forget(lane_stats);
  ptx::forget(dq_target);

  unsigned items = 0;  // of this block, so far
  unsigned block = 0;  // of queries, so far: gives stages and parities
  // A remainder by 3 would be made in vector registers, and all descriptors with it,
  // which then are moved to uniform ones.
  stage_t<kStagesQ> q_stage;
  stage_t<kStagesDout> dout_stage;
  auto wait_for_q = [&] { wait(q_full + 8 * q_stage.number, q_stage.parity); };
  auto wait_for_dout = [&] {
    wait(dout_full + 8 * dout_stage.number, dout_stage.parity);
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
    auto load_lse = [&](unsigned stage, int n) {
      return ptx::load_shared_f32x2(lane_stats + stage * kBytesStats + n * 32);
    };
    auto load_delta = [&](unsigned stage, int n) {
      return ptx::load_shared_f32x2(lane_stats + stage * kBytesStats + 4 * kBlockM +
                                    n * 32);
    };
    // The pairs that are asked for ahead.
    float2 early_lse[kEarlyLse + 1], early_delta[kEarlyDelta + 1];
    auto ask_for_lse = [&](unsigned stage) {
#pragma unroll
      for (int n = 0; n < kEarlyLse; ++n) early_lse[n] = load_lse(stage, n);
    };
    auto ask_for_delta = [&](unsigned stage) {
#pragma unroll
      for (int n = 0; n < kEarlyDelta; ++n) early_delta[n] = load_delta(stage, n);
    };
    auto origin_of = [&](unsigned number) {
      return ptx::load_shared_s32(origins + number % kOrigins * 16);
    };

    // s becomes P of a block of queries, and p the same as operand. Number e stands in
    // column e / 4 * 8 + lane % 4 * 2 + e % 2, row e / 2 % 2 * 8.
    auto hide = [&](bool whole) {
      if (!whole) {
        // A row's key is hidden from queries before `first`, and after `last`.
        const int num_keys = view.num_keys;
        const int row_thread = group * 64 + warp * 16 + lane / 4;
        int first[2] = {-kMany, -kMany}, last = kMany;
        if constexpr (kBounds > 0) {
          const int corner = row_thread - origin_of(block) - lane % 4 * 2;
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
    };
    auto exponentials = [&](unsigned stage, auto from, auto to) {
#pragma unroll
      for (int e = decltype(from)::value; e < decltype(to)::value; e += 4) {
        const int n = e / 4;
        const float2 lse = n < kEarlyLse ? early_lse[n] : load_lse(stage, n);
        s[e] = ptx::ex2_approx_ftz(s[e] * inputs.to_log2 - lse.x);
        s[e + 1] = ptx::ex2_approx_ftz(s[e + 1] * inputs.to_log2 - lse.y);
        s[e + 2] = ptx::ex2_approx_ftz(s[e + 2] * inputs.to_log2 - lse.x);
        s[e + 3] = ptx::ex2_approx_ftz(s[e + 3] * inputs.to_log2 - lse.y);
      }
#pragma unroll
      for (int e = decltype(from)::value; e < decltype(to)::value; e += 2) {
        p[e / 8][e / 2 % 4] = pair16_t::from(s[e + 1], s[e]);
      }
    };

    // Whether no key is hidden from a block of queries.
    auto is_whole = [&](unsigned number) {
      if constexpr (kBounds == 0) return view.num_keys >= kBlockN;
      const int origin = origin_of(number);
      return origin >= view.whole_first && (kBounds < 2 || origin <= view.whole_last);
    };

    // dS of the block in a stage of dO, from P in s and dP.
    auto make_ds = [&](unsigned stage, auto from, auto to) {
      const float factor = kNarrow<elem_t> ? view.factor : 1.f;
#pragma unroll
      for (int e = decltype(from)::value; e < decltype(to)::value; e += 4) {
        const int n = e / 4;
        float2 d = n < kEarlyDelta ? early_delta[n] : load_delta(stage, n);
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
        ptx::stmatrix_x4_trans(ds_target + block % kStagesDs * kBytesDs + m * 2048, ds[m][0],
                               ds[m][1], ds[m][2], ds[m][3]);
      }
    };
    auto start_s = [&](unsigned stage) {
      ptx::wgmma_fence();
      multiply_scores(s, k_rows, q_rows + stage * (kBytesM / 16));
      ptx::wgmma_commit_group();
    };
    auto start_dp = [&](unsigned stage) {
      ptx::wgmma_fence();
      multiply_scores(dp, v_rows, dout_rows + stage * (kBytesM / 16));
      ptx::wgmma_commit_group();
    };
    constexpr int kHalf = kBlockM / 32;
    auto start_dv = [&](unsigned stage, auto from, auto to, bool accumulate) {
      ptx::wgmma_fence();
      multiply_sums<decltype(from)::value, decltype(to)::value>(
          sums_v, p, dout_sums + stage * (kBytesM / 16), accumulate);
      ptx::wgmma_commit_group();
    };
    auto start_dk = [&](unsigned stage, bool accumulate) {
      ptx::wgmma_fence();
      multiply_sums<0, kBlockM / 16>(sums_k, ds, q_sums + stage * (kBytesM / 16),
                                     accumulate);
      ptx::wgmma_commit_group();
    };
    // Of the block before.
    auto start_dq = [&](float (&dq)[kScores], unsigned number) {
      wait(ds_full + 8 * (number % kStagesDs), number / kStagesDs & 1);
      ptx::wgmma_fence();
      multiply_dq(dq, ds_rows + number % kStagesDs * (kBytesDs / 16), k_sums);
      ptx::wgmma_commit_group();
    };
    // Sums of dq leave through shared memory, when those before have.
    auto store_dq = [&](const float (&dq)[kScores], unsigned number) {
      wait(dq_empty + 8 * group, (number & 1) ^ 1);
#pragma unroll
      for (int e = 0; e < kScores; e += 4) {
        ptx::store_shared_f32x4(dq_target + e * 128, dq[e], dq[e + 1], dq[e + 2],
                                dq[e + 3]);
      }
    };

    wait_for_q();
    wait(v_full, items & 1);

    // One block of queries. No product is in flight between steps: ptxas does not
    // follow them around a loop (C7514).
    //
    // The softmax runs beside dP, the making of dS beside a part of dv, and dq of the
    // block before leaves beside dk: by then the other group's dS has long been there,
    // and each group may be ahead of the other by half a step.
    auto& dq = dp;  // whose registers are free
    const unsigned first = block;
    auto tell = [&](unsigned number) {
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        if (number != first) ptx::mbarrier_arrive(dq_full + 8 * group);
        ptx::mbarrier_arrive(ds_full + 8 * (number % 2));
      }
    };
    auto step = [&](auto is_first) {
      constexpr bool kFirst = decltype(is_first)::value;
      const unsigned this_q = q_stage.number, stage = dout_stage.number;
      start_s(this_q);
      const bool whole = is_whole(block);
      wait_for_dout();
      start_dp(stage);
      ask_for_lse(stage);
      // What the step before has left in shared memory is seen by the copy engine and
      // by wgmma behind a fence, which here runs beside S.
      if constexpr (kLag && !kFirst) tell(block - 1);
      q_stage.next();
      dout_stage.next();
      ptx::wgmma_wait_group<1>();  // S
      keep_order(s);
      hide(whole);
      exponentials(stage, number_t<0>(), number_t<kHalf * 8>());
      if (SPLIT == 0) exponentials(stage, number_t<kHalf * 8>(), number_t<kScores>());
      if (SPLIT == 0) start_dv(stage, number_t<0>(), number_t<kBlockM / 16>(), !kFirst);
      if (SPLIT == 1 || SPLIT == 2) start_dv(stage, number_t<0>(), number_t<kHalf>(), !kFirst);
      if (SPLIT == 1) exponentials(stage, number_t<kHalf * 8>(), number_t<kScores>());
      ask_for_delta(stage);
      ptx::wgmma_wait_group<SPLIT < 3 ? 1 : 0>();  // dP
      keep_order(dp);
      if (block == last) release(v_empty);
      make_ds(stage, number_t<0>(), number_t<kHalf * 8>());
      if (SPLIT >= 2) exponentials(stage, number_t<kHalf * 8>(), number_t<kScores>());
      make_ds(stage, number_t<kHalf * 8>(), number_t<kScores>());
      wait(ds_empty + 8 * (block % kStagesDs), (block / kStagesDs & 1) ^ 1);
      store_ds();
      if (SPLIT == 1 || SPLIT == 2) start_dv(stage, number_t<kHalf>(), number_t<kBlockM / 16>(), true);
      if (SPLIT >= 3) start_dv(stage, number_t<0>(), number_t<kBlockM / 16>(), !kFirst);
      if constexpr (!kLag) {
        ptx::fence_proxy_async();
        release(ds_full);
      }
      const unsigned of_dq = block - kLag;
      constexpr bool kMakesDq = !kLag || !kFirst;
      if constexpr (kMakesDq) start_dq(dq, of_dq);
      ptx::wgmma_wait_group<kMakesDq ? 1 : 0>();  // dv
      start_dk(this_q, !kFirst);
      keep_order(sums_v);
      release(dout_empty + 8 * stage);
      if constexpr (kMakesDq) {
        ptx::wgmma_wait_group<1>();  // dq
        keep_order(dq);
        if (!kLag && block == last) release(k_empty);
        if (kLag) release(ds_empty + 8 * (of_dq % 2));
        store_dq(dq, of_dq);
      }
      if constexpr (!kLag) {
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
          ptx::mbarrier_arrive(dq_full + 8 * group);
          ptx::mbarrier_arrive(ds_empty + 8 * (of_dq % kStagesDs));
        }
      }
      if (block != last) wait_for_q();
      ptx::wgmma_wait_group<0>();
      keep_order(sums_k);
      release(q_empty + 8 * this_q);
    };

    step(flag_t<true>());
#pragma unroll 1
    while (block != last) {
      ++block;
      step(flag_t<false>());
    }
    if constexpr (kLag) {
      tell(block);
      start_dq(dq, block);
      ptx::wgmma_wait_group<0>();
      keep_order(dq);
      release(k_empty);
      release(ds_empty + 8 * (block % 2));
      store_dq(dq, block);
      ptx::fence_proxy_async();
      release(dq_full + 8 * group);
    }
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
    store(sums_v, 1 / kFactorP, dv + view.dv + key_first * grads.row[1], grads.row[1],
          static_cast<int>(params.head_dim_v));
    store(sums_k, unfactor_of(factor_of(found), static_cast<float>(params.scale)),
          dk + view.dk + key_first * grads.row[0], grads.row[0],
          static_cast<int>(params.head_dim));
    if (odd != 0) found->odd = 1;
    count = next_count();
  }
}

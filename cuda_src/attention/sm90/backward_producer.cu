// SPDX-License-Identifier: MIT
// attention_vjp_hopper_fed: gradients by tensor cores, as attention_vjp_hopper makes
// them, with a warpgroup for all that is not arithmetic.
//
// Algorithm  as backward.cu, but that a step makes dq of the block of queries before:
//            by then dS of both warpgroups has long been there, and each of them may be
//            ahead of the other by half a step
// Grid       a block a multiprocessor. An item is a tile of keys of a kept entry;
//            blocks take item after item, from a counter. Where all keys are seen,
//            items left over are cut in two, of which the one that ends last adds both
// Threads    two warpgroups compute, 64 keys each. Of a third, the feeder, a thread
//            asks TMA for all tiles, and another gives dq to it to be added
//            to the sums in memory
// Tiles      k, v     kBlockN x kHeadDim   shared, loaded once an item
//            q, dO    kBlockM x kHeadDim   shared, 3 and 2 stages
//            dS       kBlockN x kBlockM    shared, twice
//            dq       kBlockM x kHeadDim   shared, floats on their way to memory
//            S, P, dP, dS, dk, dv, dq  registers, as wgmma lays them out; dk and dv
//            go to memory by way of the place of dq
// Memory     global: k, v, dk and dv once; q and dO once a tile of keys, mostly from
//            L2; dq is added to sums of floats by TMA
// Numbers    S, P, dP, dS and sums in float; P and dS rounded to elem_t before
//            products. The order of sums in dq differs from run to run
// Limits     as backward.cu
#include "attention/sm90/backward_dkdv.cuh"
#include "ptx/bulk.cuh"
#include "ptx/global.cuh"
#include "ptx/opaque.cuh"
#include "ptx/relaxed.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"

constexpr int kGroups = 2, kWorkers = 128 * kGroups;
static_assert(kNumThreads == kWorkers + 128 && kHeadDim == 128 && kBlockM == 64);
// setmaxnreg moves registers inside the pool of the launch, 168 a thread.
constexpr int kFeederRegisters = 40, kWorkerRegisters = 232;

// q is read for S and at the end of a step for dk, dO in its first half.
constexpr int kStagesQ = 3, kStagesDout = 2, kStagesDs = 2;
constexpr int kBytesPart = kPart * 4;
// Of the pairs of lse and delta that a thread needs, so many are asked for ahead.
constexpr int kEarlyLse = kBlockM / 8, kEarlyDelta = 4;

// What all are told of an item.
struct alignas(16) view_t {
  int count;     // blocks of queries, over all summed entries; 0: no more items
  float factor;  // of dP, where dS has one
  int num_keys;  // from its first on; may be more than the tile has
  // Key j, counted from the first, is seen by query i if low <= j - i < high. No key is
  // hidden from blocks whose first query lies in [whole_first, whole_last].
  int low, high, whole_first, whole_last;
  int tile;
  int slot;  // of a part of an item: which one; else < 0
  // All keys of the second warpgroup are hidden from the first block of several.
  int skips;
  index_t dk, dv;  // where the gradients go
};
// The feeder tells of an item while others may still be at the fourth before it.
constexpr int kViews = 8;
// Of a block of queries: its first one, its number among the blocks of sums_q, and
// whether it is the last of all.
constexpr int kOrigins = 8;
// So many blocks of queries before the end of an item the next one is taken. Earlier,
// and long items lie in wait behind long ones, while others are done; later, and who
// asks for blocks waits for it.
constexpr int kAhead = 6;

// Where the queries of an entry lie: first block of sums or of stats, head, and batch.
struct alignas(16) source_t {
  int4 q, dout;
};
// Of who asks: where keys of an item lie (row, head, batch); the blocks of queries that
// see them; and of these, over all summed entries, the first and the last of the item.
struct alignas(16) places_t {
  int4 k, v;
  int4 blocks;
};

struct barriers_t {
  unsigned long long k_full, v_full, k_empty, v_empty;
  unsigned long long q_full[kStagesQ], q_empty[kStagesQ];
  unsigned long long dout_full[kStagesDout], dout_empty[kStagesDout];
  unsigned long long ds_full[kStagesDs], ds_empty[kStagesDs];
  unsigned long long dq_full[kGroups], dq_empty[kGroups];
};

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

// Writes a warp's 16 rows of a gradient, of which `num_rows` exist, by way of 4096
// bytes of shared memory, so that lanes store whole lines. Numbers stand as in
// store_rows. Returns bits that are not 0 if one is not finite.
__device__ __forceinline__ unsigned store_staged(const float (&sums)[kSums],
                                                 unsigned staged,
                                                 float factor,
                                                 elem_t* target,
                                                 index_t row_step,
                                                 int num_rows,
                                                 int dim) {
  const int lane = threadIdx.x % 32;
  // In a row, bits of the number of 16 bytes are flipped by those of the row: then
  // neither rows nor columns share banks.
  const unsigned to = staged + lane % 16 * 256 + (lane / 16 ^ lane % 8) * 16;
  unsigned odd[2] = {0, 0};
#pragma unroll
  for (int e = 0; e < kSums; e += 8) {
    unsigned words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int from = e + 2 * n;
      words[n] = pair16_t::from(sums[from + 1] * factor, sums[from] * factor);
      if (lane / 4 + n % 2 * 8 < num_rows) {
        odd[n % 2] = pair16_t::fma(words[n], 0, odd[n % 2]);
      }
    }
    ptx::stmatrix_x4(to ^ e * 4, words[0], words[1], words[2], words[3]);
  }
  __syncwarp();
  const int row = lane / 16, column = lane % 16;
  const unsigned from = staged + row * 256 + (column ^ row) * 16;
  if (column * 8 >= dim) num_rows = 0;
  auto out = reinterpret_cast<long long>(target + row * row_step + column * 8);
#pragma unroll
  for (int half = 0; half < 8; half += 4) {
    uint4 x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      x[n] = ptx::load_shared_u32x4((from ^ n * 32) + (half + n) * 512);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (row + 2 * (half + n) < num_rows) {
        ptx::store_global(reinterpret_cast<uint4*>(out), x[n]);
      }
      out += 2 * row_step * int(sizeof(elem_t));
      ptx::launder(out);  // one address, not one for each
    }
  }
  __syncwarp();
  return (odd[0] | odd[1]) & 0x7fff7fff;
}

// Of the two parts of an item that is cut, the first to end leaves its sums in memory,
// and the second adds them to its own: bits do not depend on which is which. True if
// the sums of this warp are whole then.
__device__ __forceinline__ bool meet(
    float (&sums_k)[kSums], float (&sums_v)[kSums], int slot, int* met, float* parts) {
  slot = uniform(slot);
  if (slot < 0) return true;
  const int lane = threadIdx.x % 32, at = slot * (kWorkers / 32) + threadIdx.x / 32;
  met += 2 * at;
  auto* const there = reinterpret_cast<float4*>(parts) + at * (kSums / 2 * 32) + lane;
  int ended = 1;
  if (lane == 0) ended = atomicAdd(met, 1);
  if (uniform(ended) == 0) {
#pragma unroll
    for (int e = 0; e < kSums; e += 4) {
      there[e * 8] = {sums_v[e], sums_v[e + 1], sums_v[e + 2], sums_v[e + 3]};
      there[(e + kSums) * 8] = {sums_k[e], sums_k[e + 1], sums_k[e + 2], sums_k[e + 3]};
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) ptx::store_relaxed(met + 1, 1);
    return false;
  }
  while (uniform(ptx::load_relaxed(met + 1)) == 0) {
  }
  __threadfence();
  auto add = [](float (&sums)[kSums], const float4* from) {
#pragma unroll
    for (int e = 0; e < kSums; e += 4) {
      const float4 x = __ldcg(from + e * 8);
      sums[e] += x.x;
      sums[e + 1] += x.y;
      sums[e + 2] += x.z;
      sums[e + 3] += x.w;
    }
  };
  add(sums_v, there);
  add(sums_k, there + kSums * 8);
  return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_vjp_hopper_fed(const __grid_constant__ inputs_t inputs,
                             const float* __restrict__ stats,  // backward.cuh
                             float* __restrict__ sums_q,       // backward.cuh
                             int* met,                         // backward.cuh
                             float* parts,                     // backward.cuh
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
  __shared__ source_t sources[kMaxSummed];
  __shared__ places_t places;
  __shared__ volatile int next_item;  // not in a register: who asks has few

  // The host adds 1024 bytes for this: a swizzled tile starts at a multiple.
  const unsigned smem_k = (ptx::shared_address(smem) + 1023) & ~1023u;
  const unsigned smem_v = smem_k + kBytesN, smem_q = smem_v + kBytesN,
                 smem_dout = smem_q + kStagesQ * kBytesM,
                 smem_ds = smem_dout + kStagesDout * kBytesM,
                 smem_dq = smem_ds + kStagesDs * kBytesDs,
                 smem_stats = smem_dq + kGroups * kBytesPart;
  const unsigned k_full = ptx::shared_address(&barriers), v_full = k_full + 8,
                 k_empty = v_full + 8, v_empty = k_empty + 8, q_full = v_empty + 8,
                 q_empty = q_full + 8 * kStagesQ, dout_full = q_empty + 8 * kStagesQ,
                 dout_empty = dout_full + 8 * kStagesDout,
                 ds_full = dout_empty + 8 * kStagesDout,
                 ds_empty = ds_full + 8 * kStagesDs, dq_full = ds_empty + 8 * kStagesDs,
                 dq_empty = dq_full + 8 * kGroups;
  unsigned origins = ptx::shared_address(origins_memory);

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
    for (int n = 0; n < kStagesDs; ++n) {
      ptx::mbarrier_init(ds_full + 8 * n, kWarps);
      ptx::mbarrier_init(ds_empty + 8 * n, kWarps);
    }
    for (int n = 0; n < kGroups; ++n) {
      ptx::mbarrier_init(dq_full + 8 * n, 4);
      ptx::mbarrier_init(dq_empty + 8 * n, 1);
    }
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
      const unsigned kv_from = ptx::shared_address(&places);
      auto store_place = [](unsigned to, const int4& x) {
        ptx::store_shared_s32x2(to, x.x, x.y);
        ptx::store_shared_s32x2(to + 8, x.z, x.w);
      };
      next_item = blockIdx.x;
      unsigned items = 0, asked = 0;  // items, and blocks of queries, so far
      // Tells of the next item.
      auto begin_item = [&] {
        view_t& view = views[items % kViews];
        int number = next_item;
        const inputs_t& inputs_now = ptx::reload(inputs);
        const params_t& params_now = ptx::reload(params);
        const grads_t& grads_now = ptx::reload(grads);
        // The second parts of the items that are cut come last.
        const bool is_second = number >= inputs_now.num_items - inputs_now.num_split;
        if (is_second) number -= inputs_now.num_split;
        view.slot = number - (inputs_now.num_items - 2 * inputs_now.num_split);
        const item_t item = item_of<(kBounds > 0), false>(number, inputs_now);
        const int row = item.tile * kBlockN;
        view.dk = offset_of(grads_now.kept, item.kept, 1);
        view.dv = offset_of(grads_now.kept, item.kept, 2);
        const unsigned entry = offset_of(grads_now.kept, item.kept, 0);
#pragma unroll 1
        for (int n = 0; n < inputs.num_summed; ++n) {
          const unsigned of_all =
              n == 0 ? entry : entry + unsigned(offset_of(grads_now.summed, n, 0));
          unsigned rest = of_all / unsigned(params_now.num_heads);
          const int head = of_all - rest * unsigned(params_now.num_heads);
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
          int slot = head;
#pragma unroll
          for (int axis = 0; axis < kBatchDims; ++axis) {
            slot += at[kBatchDims - 1 - axis] * int(inputs_now.slot[axis]);
          }
          const int num_blocks = inputs_now.num_blocks;
          const unsigned source = ptx::shared_address(sources + n);
          store_place(source, place(slot * num_blocks, head, params_now.q));
          store_place(source + 16, place(of_all * num_blocks, head, grads_now.dout));
          if (n > 0) continue;
          store_place(kv_from, place(row, kv_head, params_now.k));
          store_place(kv_from + 16, place(row, kv_head, params_now.v));
        }
        view.tile = item.tile;
        view.factor = factor_of(found);
        view.num_keys = static_cast<int>(params.seqlen_k) - row;
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
          view.skips = block_first + 1 < block_last &&
                       kBlockN / 2 - block_first * kBlockM - (kBlockM - 1) >= high;
        }
        const int all = (block_last - block_first) * inputs_now.num_summed;
        const int begin = is_second ? inputs_now.first_part : 0,
                  end = view.slot < 0 || is_second ? all : inputs_now.first_part;
        view.count = end - begin;
        places.blocks = {block_first, block_last, begin, end};
      };
      // Asks for a block of queries as soon as its stages are free.
      auto ask_for_queries = [&](int summed, int block, int flags) {
        const unsigned source = ptx::shared_address(sources + summed);
        int4 from = ptx::load_shared_s32x4(source);
        const unsigned origin = origins + asked % kOrigins * 16;
        unsigned stage = asked % kStagesQ, full = q_full + 8 * stage;
        wait(q_empty + 8 * stage, (asked / kStagesQ & 1) ^ 1);
        ptx::store_shared_s32x2(origin, block * kBlockM, from.x + block);
        ptx::store_shared_s32(origin + 8, flags);
        const int q_batch[2] = {from.z, from.w};
        load_tile<kBlockM, kChunks>(smem_q + stage * kBytesM, inputs.q_map, full,
                                    block * kBlockM, from.y, q_batch);
        from = ptx::load_shared_s32x4(source + 16);
        stage = asked % kStagesDout;
        full = dout_full + 8 * stage;
        wait(dout_empty + 8 * stage, (asked / kStagesDout & 1) ^ 1);
        ++asked;
        ptx::mbarrier_arrive_expect_tx(full, kBytesStats);
        ptx::cp_async_bulk(smem_stats + stage * kBytesStats,
                           stats + index_t(from.x + block) * (2 * kBlockM), kBytesStats,
                           full);
        const int dout_batch[2] = {from.z, from.w};
        load_tile<kBlockM, kChunks>(smem_dout + stage * kBytesM, inputs.dout_map, full,
                                    block * kBlockM, from.y, dout_batch);
      };
      auto ask_for_keys = [&](unsigned target, const ptx::tensor_map_t& map,
                              unsigned full, unsigned empty, unsigned place) {
        if (items > 0) wait(empty, (items - 1) & 1);
        const int4 from = ptx::load_shared_s32x4(place);
        const int batch[2] = {from.z, from.w};
        load_tile<kBlockN, kChunks>(target, map, full, from.x, from.y, batch);
      };
#pragma unroll 1
      for (; next_item < inputs.num_items; ++items) {
        begin_item();
        const int4 blocks = places.blocks;
        const int num_blocks = blocks.y - blocks.x;
        int summed = blocks.z / num_blocks;
        int block = blocks.x + blocks.z - summed * num_blocks;
#pragma unroll 1
        for (int n = blocks.z; n < blocks.w; ++n) {
          const bool ends = n + 1 == blocks.w;
          if (n == max(blocks.z, blocks.w - kAhead)) {
            next_item = atomicAdd(&counter->next, 1) + gridDim.x;
          }
          ask_for_queries(summed, block, ends && next_item >= inputs.num_items);
          if (n == blocks.z) {
            ask_for_keys(smem_v, inputs.v_map, v_full, v_empty, kv_from + 16);
            ask_for_keys(smem_k, inputs.k_map, k_full, k_empty, kv_from);
          }
          if (++block == blocks.y) {
            block = blocks.x;
            ++summed;
          }
        }
      }
      views[items % kViews].count = 0;
      if (items > 0) wait(k_empty, (items - 1) & 1);
      ptx::mbarrier_arrive(k_full);
    } else if (warp == 1 && lane == 0) {
      // --- who gives sums of dq to TMA
      bool more = blockIdx.x < inputs.num_items;
#pragma unroll 1
      for (unsigned block = 0; more; ++block) {
        wait(dq_full, block & 1);  // then the origin is there, too
        const int4 origin = ptx::load_shared_s32x4(origins + block % kOrigins * 16);
        more = origin.z == 0;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if (g > 0) wait(dq_full + 8 * g, block & 1);
          ptx::cp_reduce_async_bulk_add(
              sums_q + (index_t(origin.y) * kGroups + g) * kPart,
              smem_dq + g * kBytesPart, kBytesPart);
          ptx::cp_async_bulk_commit_group();
        }
        ptx::cp_async_bulk_wait_group_read<1>();
        ptx::mbarrier_arrive(dq_empty);
        ptx::cp_async_bulk_wait_group_read();
        ptx::mbarrier_arrive(dq_empty + 8);
      }
      ptx::cp_async_bulk_wait_group();
      // The last block to finish leaves both numbers at 0 for the next launch.
      if (atomicAdd(&counter->finished, 1) == int(gridDim.x) - 1) {
        counter->next = 0;
        counter->finished = 0;
        __threadfence();
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
  unsigned ds_target = smem_ds + group * kChunkM + (lane / 16 * 8 + lane % 8) * 128 +
                       ((32 * warp + 16 * (lane / 8 % 2)) ^ (lane % 8 * 16));
  unsigned lane_stats = smem_stats + lane % 4 * 8;
  unsigned dq_target = smem_dq + threadIdx.x / 32 * (kBytesPart / 4) + lane * 16;
  // Else they are made anew in each step, from a special register that answers late.
  ptx::launder(ds_target);
  ptx::launder(lane_stats);
  ptx::launder(dq_target);
  ptx::launder(origins);

  unsigned items = 0;  // of this block, so far
  unsigned block = 0;  // of queries, so far: gives stages and parities
  // A remainder by 3 would be made in vector registers, and all descriptors with it,
  // which then are moved to uniform ones.
  ring_t<kStagesQ> q_stage;
  ring_t<kStagesDout> dout_stage;
  auto wait_for_q = [&] { wait(q_full + 8 * q_stage.stage, q_stage.parity); };
  auto wait_for_dout = [&] {
    wait(dout_full + 8 * dout_stage.stage, dout_stage.parity);
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

    // Whether no key is hidden from a block of queries.
    auto is_whole = [&](unsigned number) {
      if constexpr (kBounds == 0) return view.num_keys >= kBlockN;
      const int origin = origin_of(number);
      return origin >= view.whole_first && (kBounds < 2 || origin <= view.whole_last);
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
    // Of one half of the queries.
    constexpr int kHalf = kScores / 2;
    auto exponentials = [&](auto half) {
      constexpr int kBegin = decltype(half)::value * kHalf;
#pragma unroll
      for (int e = kBegin; e < kBegin + kHalf; e += 4) {
        const float2 lse = early_lse[e / 4];
        s[e] = ptx::ex2_approx_ftz(s[e] * inputs.to_log2 - lse.x);
        s[e + 1] = ptx::ex2_approx_ftz(s[e + 1] * inputs.to_log2 - lse.y);
        s[e + 2] = ptx::ex2_approx_ftz(s[e + 2] * inputs.to_log2 - lse.x);
        s[e + 3] = ptx::ex2_approx_ftz(s[e + 3] * inputs.to_log2 - lse.y);
      }
#pragma unroll
      for (int e = kBegin; e < kBegin + kHalf; e += 2) {
        p[e / 8][e / 2 % 4] = pair16_t::from(s[e + 1], s[e]);
      }
    };

    // dS of the block in a stage of dO, from P in s and dP.
    auto make_ds = [&](unsigned stage, auto half) {
      constexpr int kBegin = decltype(half)::value * kHalf;
      const float factor = kNarrow<elem_t> ? view.factor : 1.f;
#pragma unroll
      for (int e = kBegin; e < kBegin + kHalf; e += 4) {
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
        ptx::stmatrix_x4_trans(ds_target + block % kStagesDs * kBytesDs + m * 2048,
                               ds[m][0], ds[m][1], ds[m][2], ds[m][3]);
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
    auto start_dv = [&](unsigned stage, auto half, bool accumulate) {
      constexpr int kSteps = kBlockM / 32, kBegin = decltype(half)::value * kSteps;
      ptx::wgmma_fence();
      multiply_sums<kBegin, kBegin + kSteps>(
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
    auto start_dq = [&](float (&dq)[kSumsQ], unsigned number) {
      wait(ds_full + 8 * (number % kStagesDs), number / kStagesDs & 1);
      ptx::wgmma_fence();
      multiply_dq(dq, ds_rows + number % kStagesDs * (kBytesDs / 16), k_sums);
      ptx::wgmma_commit_group();
    };
    // Sums of dq leave through shared memory, when those before have.
    auto store_dq = [&](const float (&dq)[kSumsQ], unsigned number) {
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
      const unsigned this_q = q_stage.stage, this_dout = dout_stage.stage;
      start_s(this_q);
      const bool whole = is_whole(block);
      wait_for_dout();
      start_dp(this_dout);
      ask_for_lse(this_dout);
      if constexpr (!kFirst) tell(block - 1);
      q_stage.advance();
      dout_stage.advance();
      ptx::wgmma_wait_group<1>();  // S
      keep_order(s);
      hide(whole);
      exponentials(number_t<0>());
      start_dv(this_dout, number_t<0>(), !kFirst);
      ask_for_delta(this_dout);
      ptx::wgmma_wait_group<1>();  // dP
      keep_order(dp);
      if (block == last) release(v_empty);
      make_ds(this_dout, number_t<0>());
      exponentials(number_t<1>());
      make_ds(this_dout, number_t<1>());
      wait(ds_empty + 8 * (block % kStagesDs), (block / kStagesDs & 1) ^ 1);
      store_ds();
      start_dv(this_dout, number_t<1>(), true);
      if constexpr (!kFirst) start_dq(dq, block - 1);
      ptx::wgmma_wait_group<kFirst ? 0 : 1>();  // dv
      start_dk(this_q, !kFirst);
      keep_order(sums_v);
      release(dout_empty + 8 * this_dout);
      if constexpr (!kFirst) {
        ptx::wgmma_wait_group<1>();  // dq
        keep_order(dq);
        release(ds_empty + 8 * ((block - 1) % kStagesDs));
        store_dq(dq, block - 1);
      }
      if (block != last) wait_for_q();
      ptx::wgmma_wait_group<0>();  // dk
      keep_order(sums_k);
      release(q_empty + 8 * this_q);
    };

    // A first block of queries that sees none of this group's keys.
    auto skip = [&] {
      wait_for_dout();
      const unsigned this_q = q_stage.stage, this_dout = dout_stage.stage;
      q_stage.advance();
      dout_stage.advance();
#pragma unroll
      for (int e = 0; e < kSums; ++e) sums_k[e] = sums_v[e] = 0;
#pragma unroll
      for (int m = 0; m < kBlockM / 16; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) ds[m][e] = 0;
      }
      wait(ds_empty + 8 * (block % kStagesDs), (block / kStagesDs & 1) ^ 1);
      store_ds();
      release(dout_empty + 8 * this_dout);
      release(q_empty + 8 * this_q);
      wait_for_q();
    };
    if (kBounds > 0 && group > 0 && uniform(view.skips)) {
      skip();
    } else {
      step(flag_t<true>());
    }
#pragma unroll 1
    while (block != last) {
      ++block;
      step(flag_t<false>());
    }
    const bool is_mine = kBounds > 0 || meet(sums_k, sums_v, view.slot, met, parts);
    // dq of the last block, while the next item's keys are asked for.
    tell(block);
    start_dq(dq, block);
    ptx::wgmma_wait_group<0>();
    keep_order(dq);
    release(k_empty);
    release(ds_empty + 8 * (block % kStagesDs));
    // Where dq leaves, dv and dk go first, when that of the block before has left.
    wait(dq_empty + 8 * group, (block & 1) ^ 1);
    const int first_row = group * 64 + warp * 16;
    const int num_rows = is_mine ? view.num_keys - first_row : 0;
    const int row = view.tile * kBlockN + first_row;
    unsigned odd = store_staged(sums_v, dq_target - lane * 16, 1 / kFactorP,
                                dv + view.dv + row * grads.row[1], grads.row[1],
                                num_rows, static_cast<int>(params.head_dim_v));
    odd |= store_staged(sums_k, dq_target - lane * 16,
                        unfactor_of(factor_of(found), static_cast<float>(params.scale)),
                        dk + view.dk + row * grads.row[0], grads.row[0], num_rows,
                        static_cast<int>(params.head_dim));
    if (odd != 0) found->odd = 1;
    store_dq(dq, block);
    ptx::fence_proxy_async();
    release(dq_full + 8 * group);
    ++block;
    ++items;
    count = next_count();
  }
}

// SPDX-License-Identifier: MIT
// attention_vjp_hopper: dq, dk and dv by TMA and wgmma, for sm_90a.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), one block of queries
//            per step, with transposed products (rows are keys):
//                S = k q^T,  P = exp(scale S - lse),  dP = v dO^T,  dS = P (dP - delta)
//                dv += P dO,  dk += dS q,  dq += dS^T k
//            P and dS are accumulators of one product and, in the same registers, the A
//            operand of the next; only dS goes through shared memory, for dq. A step
//            computes dq of the previous block of queries: dS of both warpgroups is
//            complete by then, and either may run ahead of the other by half a step
// Grid       Persistent, one block per multiprocessor. A work tile is a tile of keys;
//            blocks take them from a counter. Without masks or a fixed order, leftover
//            tiles are cut into parts, and the part that finishes last adds them up
// Threads    two consumer warpgroups, 64 keys each. In the producer warpgroup one
//            thread issues all TMA loads, another lets TMA add dq to the sums in memory
// Tiles      k, v     kBlockN x kHeadDim   shared, loaded once per work tile
//            q, dO    kBlockM x kHeadDim   shared, 3 and 2 stages
//            dS       kBlockN x kBlockM    shared, two buffers
//            dq       kBlockM x kHeadDim   shared, floats, staging for the sums
//            S, P, dP, dS, dk, dv, dq  registers, in the layout of wgmma; dk and dv are
//            stored through the staging buffer of dq
// Memory     global: k, v, dk and dv once; q and dO once per tile of keys, mostly from
//            L2; TMA adds dq to float sums, unless kStoresDq
// Numbers    S, P, dP, dS and sums in float; P and dS rounded to elem_t before
//            products. The order of the sums of dq varies from run to run, unless
//            kOrdered; dk and dv always have the same bits
// Options    alibi alone: its slope arrives with each block of queries, since summed
//            entries have different heads. Or a mask function alone: a work tile walks
//            over lists of the blocks of queries that see some of its keys. Or a mask
//            array alone, as bits (score/mask_words.cuh)
// Limits     q, k, v and dO must fit a tensor map (_cuda/tensor_map.py); head
//            dimensions up to kHeadDim; rows of gradients are whole 16-byte vectors,
//            shortened by copy/trim_rows.cu; at most kMaxSummed entries are summed.
//            Infinities and NaN that a query does not see still turn into NaN, as does
//            a dS too large for elem_t: found->nonfinite then asks for another kernel
#include "attention/score/mask_words.cuh"
#include "attention/score/tile_lists.cuh"
#include "attention/sm90/backward_dkdv.cuh"
#include "attention/sm90/score_arguments.cuh"
#include "ptx/acquire_release.cuh"
#include "ptx/bulk.cuh"
#include "ptx/global.cuh"
#include "ptx/opaque.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"

#ifndef ORDERED
#error "ORDERED comes from the host"
#endif
// Deterministic dq: tiles of keys add to a block of dq one after the other, from the
// first to the last. No block waits for one that has not started, since blocks take the
// tiles in this order. Queries go from the last to the first, so that with a causal
// bound, too, a tile starts behind the tiles before it.
constexpr bool kOrdered = ORDERED;
// Keys of an entry fit one tile: dq needs no sums and is stored at once. Blocks of
// queries that see no key are not visited; the kernel of statistics clears their dq.
constexpr bool kStoresDq = IS_GIVEN(STORES_DQ);
static_assert(!kStoresDq || !kOrdered, "dq of one tile has no order");

constexpr int kGroups = 2, kConsumers = 128 * kGroups;
static_assert(kNumThreads == kConsumers + 128 && kHeadDim * kBlockM == 128 * 64);
// With 64 columns, sums leave registers for twice as many queries.
constexpr bool kIsWide = kBlockM == 128;
// setmaxnreg redistributes the registers of the block, 168 per thread.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// q is read for S and at the end of a step for dk; dO in the first half of a step only.
constexpr int kStagesQ = 3, kStagesDout = 2, kStagesDs = 2;
constexpr int kBytesPart = kPart * 4;
// The mask array comes as bits, and scores know nothing of it.
constexpr bool kMaskWords = IS_GIVEN(MASK_WORDS);
constexpr bool kHasOptions = kHasAlibi || kHasMaskFunction;
constexpr int kPartsM = kBlockM / kQueriesOfWords;
constexpr int kBytesPartOfWords = kBlockN / kKeysOfWords * 128;
constexpr int kBytesWords = kMaskWords ? kPartsM * kBytesPartOfWords : 0;
// Of a warp at a barrier. racecheck does not follow __syncwarp() and one arrival.
constexpr int kArrivals = IS_GIVEN(EACH_LANE_ARRIVES) ? 32 : 1;
// How many of the pairs of lse and delta of a thread are prefetched.
constexpr int kEarlyLse = 8, kEarlyDelta = kIsWide                     ? 0
                                           : kHasOptions || kMaskWords ? 3
                                                                       : 4;

// Whether a warpgroup may skip the first block of a work tile.
constexpr bool kSkips = kBounds > 0 && !kHasMaskFunction && !kOrdered;

// --- shared memory

// A work tile as published by the producer.
struct alignas(16) published_t : tile_info_t {
  int tile;
  int slot, part;  // index of a tile that is cut, or < 0; and of a part of it
  // With kSkips: the first block of several is invisible to all keys of the second
  // warpgroup.
  int skips;
  index_t dk, dv;  // offsets of the gradients
};
// The producer may be up to four work tiles ahead.
constexpr int kPublished = 8;
// For a block of queries: its first query, its index among the blocks of sums_q, and
// whether it is the last of all. With kOrdered, further how many tiles are before this
// one, or < 0: it adds to no block; and kIsFirst if none of them adds to this block.
// With kStoresDq, after its index: batch entry and head of dq instead.
constexpr int kIsLast = 1, kIsFirst = 2;
constexpr int kOrigins = 8, kToOptions = kOrigins * sizeof(int4);
static_assert(kBounds > 0 || !kHasMaskFunction, "work tiles of different lengths");
static_assert(!kMaskWords || !kHasAlibi && !kHasMaskFunction && !kHasMask);
static_assert(!kOrdered || !kHasOptions, "options are summed in any order");
// The next work tile is taken this many blocks of queries before the end of the current
// one. Earlier, blocks hoard long tiles while others run dry; later, loads are late.
constexpr int kAhead = 6;

// Where the queries of an entry lie: first block of sums or of stats, head, batch.
struct alignas(16) source_t {
  int4 q, dout;
};
// With a mask function: its list of blocks, batch entry and head.
struct alignas(16) listed_t {
  const unsigned* list;
  int b, h;
};
// For the producer: position of the keys of a work tile (row, head, batch); the blocks
// of queries that see them; and the first and last of these over all summed entries.
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

struct shared_t {
  barriers_t barriers;
  published_t published[kPublished];
  // With alibi, kOrigins further on: two floats, the slope, and how far the first query
  // is behind the first key of the work tile. With a mask function: its word in the
  // list, batch entry, head, and the position of the first query among the keys.
  int4 origins[kHasOptions ? 2 * kOrigins : kOrigins];
  source_t sources[kMaxSummed];
  places_t places;
  int next_tile;                             // kept here for lack of registers
  float slopes[kHasAlibi ? kMaxSummed : 1];  // of each source, times log2 e
  listed_t listed[kHasMaskFunction ? kMaxSummed : 1];
  // With kMaskWords: those of each source, for all queries and the keys of the tile.
  const unsigned* words[kMaskWords ? kMaxSummed : 1];
  // With kOrdered: the first work tile of this block. And for the current one, how many
  // tiles are before it, or < 0: it adds to no block of dq; and the block from which on
  // none of them adds.
  int first_tile, turn, first_from;
};

// Shared memory addresses.
struct addresses_t {
  unsigned k, v, q, dout, ds, dq, stats, words;  // tiles
  unsigned k_full, v_full, k_empty, v_empty, q_full, q_empty, dout_full, dout_empty;
  unsigned ds_full, ds_empty, dq_full, dq_empty;

  __device__ __forceinline__ addresses_t(const void* tiles,
                                         const barriers_t& barriers) {
    k = swizzled_tiles(tiles);
    v = k + kBytesN;
    q = v + kBytesN;
    dout = q + kStagesQ * kBytesM;
    ds = dout + kStagesDout * kBytesM;
    dq = ds + kStagesDs * kBytesDs;
    stats = dq + kGroups * kBytesPart;
    words = stats + kStagesDout * kBytesStats;
    k_full = ptx::shared_address(&barriers);
    v_full = k_full + 8;
    k_empty = v_full + 8;
    v_empty = k_empty + 8;
    q_full = v_empty + 8;
    q_empty = q_full + 8 * kStagesQ;
    dout_full = q_empty + 8 * kStagesQ;
    dout_empty = dout_full + 8 * kStagesDout;
    ds_full = dout_empty + 8 * kStagesDout;
    ds_empty = ds_full + 8 * kStagesDs;
    dq_full = ds_empty + 8 * kStagesDs;
    dq_empty = dq_full + 8 * kGroups;
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 4 * kGroups * kArrivals;
    ptx::mbarrier_init(k_full, 1);
    ptx::mbarrier_init(v_full, 1);
    ptx::mbarrier_init(k_empty, kWarps);
    ptx::mbarrier_init(v_empty, kWarps);
    for (int n = 0; n < kStagesQ; ++n) {
      ptx::mbarrier_init(q_full + 8 * n, 1);
      ptx::mbarrier_init(q_empty + 8 * n, kWarps);
    }
    for (int n = 0; n < kStagesDout; ++n) {
      ptx::mbarrier_init(dout_full + 8 * n, 2);  // statistics arrive separately
      ptx::mbarrier_init(dout_empty + 8 * n, kWarps);
    }
    for (int n = 0; n < kStagesDs; ++n) {
      ptx::mbarrier_init(ds_full + 8 * n, kWarps);
      ptx::mbarrier_init(ds_empty + 8 * n, kWarps);
    }
    for (int n = 0; n < kGroups; ++n) {
      ptx::mbarrier_init(dq_full + 8 * n, 4 * kArrivals);
      ptx::mbarrier_init(dq_empty + 8 * n, 1);
    }
    ptx::fence_mbarrier_init();
  }
};

// Where dq is stored.
struct dq_t {
  elem_t* data;
  index_t batch_step, head_step, row_step;
};
#if STORES_DQ
#define DQ_PARAMETERS                                                               \
  elem_t *__restrict__ dq, const index_t dq_batch_step, const index_t dq_head_step, \
      const index_t dq_row_step,
#define DQ_ARGUMENTS dq, dq_batch_step, dq_head_step, dq_row_step
#else
#define DQ_PARAMETERS
#define DQ_ARGUMENTS
#endif

// The arguments of the kernel.
struct arguments_t {
  const inputs_t& inputs;
  const float* stats;
  float* sums_q;
  int* counts;
  float* parts;
  elem_t *dk, *dv;
  found_t* found;
  counter_t* counter;
  tile_lists_t tile_lists;
  const mask_words_t& mask_words;
  dq_t dq;
  score_arguments_t score;
  const grads_t& grads;
};

// Offset of element `index` in one array. 32 bits suffice for the number of entries.
template <int kAxes, int kArrays>
__device__ __forceinline__ index_t offset_of(const axes_t<kAxes, kArrays>& axes,
                                             unsigned index, int array) {
  index_t sum = 0;
#pragma unroll
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    const unsigned size = axes.size[axis], next = axis > 0 ? index / size : 0;
    sum += index_t(index - next * size) * axes.stride[array][axis];
    index = next;
  }
  return sum;
}

// Stores a warp's 16 rows of a gradient, or of 64 columns of it, of which `num_rows`
// exist, through shared memory so that lanes write whole cache lines. Numbers are laid
// out as in store_rows. Returns nonzero bits if one is not finite.
template <int kCount>
__device__ __forceinline__ unsigned store_staged(const float (&sums)[kCount],
                                                 unsigned staged, float factor,
                                                 elem_t* target, index_t row_step,
                                                 int num_rows, int dim) {
  // 16-byte units of a row, and rows that lanes store together.
  constexpr int kUnits = kCount / 4, kTogether = 32 / kUnits, kTimes = 16 / kTogether;
  unsigned thread = threadIdx.x;
  // These steps have no register for the addresses, which would be computed ahead.
  if constexpr (kIsWide || kBounds == 0 || kStoresDq) ptx::launder(thread);
  const int lane = thread % 32;
  // XOR swizzle of the units: neither rows nor columns share banks.
  const unsigned to = staged + lane % 16 * (kUnits * 16) + (lane / 16 ^ lane % 8) * 16;
  unsigned nonfinite[2] = {0, 0};
#pragma unroll
  for (int e = 0; e < kCount; e += 8) {
    unsigned words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int from = e + 2 * n;
      words[n] = pair16_t::from(sums[from + 1] * factor, sums[from] * factor);
      if (lane / 4 + n % 2 * 8 < num_rows) {
        nonfinite[n % 2] = pair16_t::fma(words[n], 0, nonfinite[n % 2]);
      }
    }
    ptx::stmatrix_x4(to ^ e * 4, words[0], words[1], words[2], words[3]);
  }
  __syncwarp();
  const int row = lane / kUnits, column = lane % kUnits;
  const unsigned from = staged + row * (kUnits * 16) + (column ^ row) * 16;
  if (column * 8 >= dim) num_rows = 0;
  auto out = reinterpret_cast<long long>(target + row * row_step + column * 8);
#pragma unroll
  for (int first = 0; first < kTimes; first += 4) {
    uint4 x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      x[n] =
          ptx::load_shared_u32x4((from ^ n * kTogether % 8 * 16) + (first + n) * 512);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (row + kTogether * (first + n) < num_rows) {
        ptx::store_global(reinterpret_cast<uint4*>(out), x[n]);
      }
      out += kTogether * row_step * int(sizeof(elem_t));
      ptx::launder(out);  // one address instead of many
    }
  }
  __syncwarp();
  return (nonfinite[0] | nonfinite[1]) & 0x7fff7fff;
}

// Every part of a tile that is cut leaves its sums in memory, and the last to finish
// adds them up in their order. Returns whether the sums of this warp are complete.
__device__ __forceinline__ bool meet(float (&sums_k)[kSums], float (&sums_v)[kSums],
                                     const volatile published_t& info,
                                     const inputs_t& inputs, int* met, float* parts) {
  if (uniform(info.slot) < 0) return true;
  constexpr int kWarps = kConsumers / 32, kVectors = kSums / 2 * 32;
  // The sums that this warp leaves of a part. There is no register for addresses ahead.
  auto place = [&](int part) {
    unsigned thread = threadIdx.x;
    ptx::launder(thread);
    const int of_all = (info.slot * inputs.num_parts + part) * kWarps + thread / 32;
    return reinterpret_cast<float4*>(parts) + of_all * kVectors + thread % 32;
  };
  float4* const own = place(info.part);
#pragma unroll
  for (int e = 0; e < kSums; e += 4) {
    own[e * 8] = {sums_v[e], sums_v[e + 1], sums_v[e + 2], sums_v[e + 3]};
    own[(e + kSums) * 8] = {sums_k[e], sums_k[e + 1], sums_k[e + 2], sums_k[e + 3]};
  }
  __threadfence();
  __syncwarp();
  int ended = kMany;
  if (threadIdx.x % 32 == 0) {
    ended = atomicAdd(met + info.slot * kWarps + threadIdx.x / 32, 1);
  }
  if (uniform(ended) != inputs.num_parts - 1) return false;
  __threadfence();
  // Some of the numbers at a time: for all of them ptxas needs twice the registers.
  auto add_up = [&](float (&sums)[kSums], int offset) {
#pragma unroll
    for (int begin = 0; begin < kSums; begin += 32) {
#pragma unroll
      for (int e = begin; e < begin + 32; ++e) sums[e] = 0;
#pragma unroll 1
      for (int part = 0; part < inputs.num_parts; ++part) {
        const float4* const from = place(part) + offset;
#pragma unroll
        for (int e = begin; e < begin + 32; e += 4) {
          const float4 x = __ldcg(from + e * 8);
          sums[e] += x.x;
          sums[e + 1] += x.y;
          sums[e + 2] += x.z;
          sums[e + 3] += x.w;
        }
      }
    }
  };
  add_up(sums_v, 0);
  add_up(sums_k, kSums * 8);
  return true;
}

// --- producer

__device__ __forceinline__ void store_place(unsigned to, const int4& x) {
  ptx::store_shared_s32x2(to, x.x, x.y);
  ptx::store_shared_s32x2(to + 8, x.z, x.w);
}

// One thread issues all TMA loads and publishes work tiles.
struct producer_t {
  const arguments_t& args;
  shared_t& shared;
  const addresses_t& smem;
  unsigned num_done = 0, loaded = 0;  // work tiles and blocks of queries so far

  __device__ __forceinline__ volatile int& next_tile() const {
    return const_cast<volatile int&>(shared.next_tile);
  }

  // Finds where the keys of a work tile, and the queries of its summed entries, lie;
  // the first query that may see a key is in row `row`. Returns the length of all lists
  // of a mask function.
  __device__ __forceinline__ int locate_entries(unsigned entry, int row) const {
    int num_in_lists = 0;
    const inputs_t& inputs_now = ptx::reload(args.inputs);
    const params_t& params_now = ptx::reload(args.score.params);
    const grads_t& grads_now = ptx::reload(args.grads);
#pragma unroll 1
    for (int n = 0; n < args.inputs.num_summed; ++n) {
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
      const unsigned source = ptx::shared_address(shared.sources + n);
      const int first_block = kStoresDq ? slot : slot * num_blocks;
      store_place(source, place(first_block, head, params_now.q));
      store_place(source + 16, place(of_all * num_blocks, head, grads_now.dout));
      if constexpr (kHasAlibi) {
        const operand_t& slopes = params_now.alibi_slopes;
        index_t offset = head * slopes.head;
#pragma unroll
        for (int axis = 0; axis < kBatchDims; ++axis) {
          offset += at[kBatchDims - 1 - axis] * slopes.batch[axis];
        }
        shared.slopes[n] = to<float>(args.score.alibi_slopes[offset]) * float(kLog2e);
      }
      if constexpr (kMaskWords) {
        const operand_t& steps = args.mask_words.steps;
        index_t offset = head * steps.head + row / kKeysOfWords * 32;
#pragma unroll
        for (int axis = 0; axis < kBatchDims; ++axis) {
          offset += at[kBatchDims - 1 - axis] * steps.batch[axis];
        }
        shared.words[n] = args.mask_words.words + offset;
      }
      if constexpr (kHasMaskFunction) {
        const tile_lists_t& lists = args.tile_lists;
        const int b = of_all / unsigned(params_now.num_heads);
        const index_t number =
            index_t(b) * lists.batch_lists + head * lists.head_lists + row / kBlockN;
        const unsigned* const list = lists.words + number * lists.stride;
        shared.listed[n] = {list, b, head};
        num_in_lists += num_listed(list);
      }
      if (n > 0) continue;
      const unsigned keys = ptx::shared_address(&shared.places);
      store_place(keys, place(row, kv_head, params_now.k));
      store_place(keys + 16, place(row, kv_head, params_now.v));
    }
    return num_in_lists;
  }

  // Publishes the next work tile.
  __device__ __forceinline__ void publish() {
    published_t& info = shared.published[num_done % kPublished];
    int number = next_tile();
    const inputs_t& inputs_now = ptx::reload(args.inputs);
    const params_t& params_now = ptx::reload(args.score.params);
    const grads_t& grads_now = ptx::reload(args.grads);
    // First parts of the tiles that are cut come in their place, others behind all.
    const int num_split = inputs_now.num_split;
    const int num_tiles =
        inputs_now.num_work_tiles - num_split * (inputs_now.num_parts - 1);
    int part = 0;
    for (; number >= num_tiles; ++part) number -= num_split;
    info.part = part;
    info.slot = number - (num_tiles - num_split);
    const work_tile_t tile = tile_of<(kBounds > 0 || kOrdered)>(number, inputs_now);
    const int row = tile.tile * kBlockN;
    info.dk = offset_of(grads_now.kept, tile.kept, 1);
    info.dv = offset_of(grads_now.kept, tile.kept, 2);
    const int num_in_lists =
        locate_entries(offset_of(grads_now.kept, tile.kept, 0), row);
    info.tile = tile.tile;
    info.factor = factor_of(args.found);
    info.num_keys = static_cast<int>(args.score.params.seqlen_k) - row;
    // The blocks of queries that see keys of the tile; at least one.
    int block_first = 0, block_last = args.inputs.num_blocks;
    if constexpr (kOrdered) shared.turn = tile.tile;
    if constexpr (kBounds > 0) {
      // As in scores_t, but with fewer registers: bounds on the keys that the first
      // query sees, relative to the tile's first key, and from these the queries.
      auto bounded = [](index_t x) { return int(clamp(x, -kMany, kMany)); };
      const index_t diagonal = args.score.query_offset - row;
      const int low = bounded(diagonal - params_now.left),
                high = bounded(diagonal + params_now.right + 1);
      const int num_queries = params_now.seqlen_q;
      const int num_keys = min(int(params_now.seqlen_k) - row, kBlockN);
      const int first = min(max(1 - high, 0), num_queries),
                last = min(max(num_keys - low, 0), num_queries);
      block_first = first / kBlockM;
      block_last = (last + kBlockM - 1) / kBlockM;
      if (block_first >= block_last) {
        block_first = 0;
        block_last = 1;
        if constexpr (kOrdered) shared.turn = -1;
      }
      if constexpr (kOrdered) {
        // Behind the last query that sees a key of the tile before.
        const int end = min(max(-low, 0), num_queries);
        shared.first_from = (end + kBlockM - 1) / kBlockM;
      }
      info.low = low;
      info.high = high;
      info.whole_first = num_keys < kBlockN ? kMany : kBlockN - high;
      info.whole_last = -low - (kBlockM - 1);
      info.skips = block_first + 1 < block_last &&
                   kBlockN / 2 - block_first * kBlockM - (kBlockM - 1) >= high;
    }
    const int all = kHasMaskFunction
                        ? num_in_lists
                        : (block_last - block_first) * inputs_now.num_summed;
    const int begin = part * inputs_now.part_blocks,
              end = info.slot < 0 ? all : min(begin + inputs_now.part_blocks, all);
    info.count = end - begin;
    shared.places.blocks = {block_first, block_last, begin, end};
  }

  // Loads a block of queries as soon as its stages are free; `word` is in a list.
  __device__ __forceinline__ void load_queries(int summed, int block, int is_last,
                                               int word) {
    const unsigned source = ptx::shared_address(shared.sources + summed);
    int4 from = ptx::load_shared_s32x4(source);
    const unsigned origin =
        ptx::shared_address(shared.origins) + loaded % kOrigins * 16;
    unsigned stage = loaded % kStagesQ, full = smem.q_full + 8 * stage;
    wait(smem.q_empty + 8 * stage, (loaded / kStagesQ & 1) ^ 1);
    ptx::store_shared_s32x2(origin, block * kBlockM, from.x + block);
    if constexpr (kOrdered) {
      const bool is_first = kBounds == 2 && block >= shared.first_from;
      ptx::store_shared_s32x2(origin + 8, is_last * kIsLast | is_first * kIsFirst,
                              shared.turn);
    } else if constexpr (kStoresDq) {
      const unsigned slot = from.x, heads = args.score.params.num_heads;
      ptx::store_shared_s32x2(origin + 8, slot / heads, slot % heads);
    } else {
      ptx::store_shared_s32(origin + 8, is_last);
    }
    if constexpr (kHasAlibi) {
      const index_t row = shared.places.k.x, i = block * kBlockM;
      const auto distance = static_cast<float>(args.score.query_offset + i - row);
      ptx::store_shared_s32x2(origin + kToOptions,
                              __float_as_int(shared.slopes[summed]),
                              __float_as_int(distance));
    }
    if constexpr (kHasMaskFunction) {
      const listed_t& of = shared.listed[summed];
      const index_t i = args.score.query_offset + block * kBlockM;
      ptx::store_shared_s32x2(origin + kToOptions, word, of.b);
      ptx::store_shared_s32x2(origin + kToOptions + 8, of.h, static_cast<int>(i));
    }
    const int q_batch[2] = {from.z, from.w};
    load_tile<kBlockM, kChunks>(smem.q + stage * kBytesM, args.inputs.q_map, full,
                                block * kBlockM, from.y, q_batch);
    from = ptx::load_shared_s32x4(source + 16);
    stage = loaded % kStagesDout;
    full = smem.dout_full + 8 * stage;
    wait(smem.dout_empty + 8 * stage, (loaded / kStagesDout & 1) ^ 1);
    ++loaded;
    ptx::mbarrier_arrive_expect_tx(full, kBytesStats + kBytesWords);
    if constexpr (kMaskWords) {
      const index_t step = args.mask_words.steps.row;
      const unsigned* const words = shared.words[summed] + block * kPartsM * step;
#pragma unroll
      for (int n = 0; n < kPartsM; ++n) {
        ptx::cp_async_bulk(smem.words + stage * kBytesWords + n * kBytesPartOfWords,
                           words + n * step, kBytesPartOfWords, full);
      }
    }
    ptx::cp_async_bulk(smem.stats + stage * kBytesStats,
                       args.stats + index_t(from.x + block) * (2 * kBlockM),
                       kBytesStats, full);
    const int dout_batch[2] = {from.z, from.w};
    load_tile<kBlockM, kChunks>(smem.dout + stage * kBytesM, args.inputs.dout_map, full,
                                block * kBlockM, from.y, dout_batch);
  }
  __device__ __forceinline__ void load_keys(unsigned target,
                                            const ptx::tensor_map_t& map, unsigned full,
                                            unsigned empty, const int4& place) const {
    if (num_done > 0) wait(empty, (num_done - 1) & 1);
    const int4 from = ptx::load_shared_s32x4(ptx::shared_address(&place));
    const int batch[2] = {from.z, from.w};
    load_tile<kBlockN, kChunks>(target, map, full, from.x, from.y, batch);
  }

  // Block n of a work tile with a mask function, whose lists are walked one after the
  // other: now that of entry `summed`, which starts at block `first`.
  __device__ __forceinline__ listed_tile_t next_listed(int n, int& summed,
                                                       int& first) const {
    const unsigned* list = shared.listed[summed].list;
    if (n == first + num_listed(list)) {
      first = n;
      list = shared.listed[++summed].list;
    }
    return listed_tile(list, n - first);
  }

  __device__ __forceinline__ void produce() {
    const inputs_t& inputs = args.inputs;
    next_tile() = kOrdered ? shared.first_tile : blockIdx.x;
#pragma unroll 1
    for (; next_tile() < inputs.num_work_tiles; ++num_done) {
      publish();
      const int4 blocks = shared.places.blocks;
      const int num_blocks = blocks.y - blocks.x;
      int summed = blocks.z / num_blocks;
      int block = kOrdered ? blocks.y - 1 : blocks.x + blocks.z - summed * num_blocks;
      [[maybe_unused]] int first = 0, word = 0;
#pragma unroll 1
      for (int n = blocks.z; n < blocks.w; ++n) {
        if constexpr (kHasMaskFunction) {
          const listed_tile_t listed = next_listed(n, summed, first);
          block = listed.tile();
          word = listed.word;
        }
        const bool ends = n + 1 == blocks.w;
        if (n == max(blocks.z, blocks.w - kAhead)) {
          next_tile() = atomicAdd(&args.counter->next, 1) + (kOrdered ? 0 : gridDim.x);
        }
        load_queries(summed, block, ends && next_tile() >= inputs.num_work_tiles, word);
        if (n == blocks.z) {
          load_keys(smem.v, inputs.v_map, smem.v_full, smem.v_empty, shared.places.v);
          load_keys(smem.k, inputs.k_map, smem.k_full, smem.k_empty, shared.places.k);
        }
        if constexpr (kHasMaskFunction) continue;
        if (kOrdered ? --block < blocks.x : ++block == blocks.y) {
          block = kOrdered ? blocks.y - 1 : blocks.x;
          ++summed;
        }
      }
    }
    shared.published[num_done % kPublished].count = 0;
    if (num_done > 0) wait(smem.k_empty, (num_done - 1) & 1);
    ptx::mbarrier_arrive(smem.k_full);
  }
};

// The last block to finish resets both numbers for the next launch.
__device__ __forceinline__ void leave(counter_t* counter) {
  if (atomicAdd(&counter->finished, 1) == int(gridDim.x) - 1) {
    counter->next = 0;
    counter->finished = 0;
    __threadfence();
  }
}

// Another thread hands dq to TMA, which adds it to the sums in memory. With kOrdered, a
// semaphore per block of dq counts the tiles that have added to it. Release and
// acquire order the sums themselves: waiting for the group does not, since ptxas makes
// the same instruction of it as of waiting until the sources are read.
__device__ __forceinline__ void add_dq(const arguments_t& args, const shared_t& shared,
                                       const addresses_t& smem) {
  const unsigned origins = ptx::shared_address(shared.origins);
  const int first_tile = kOrdered ? shared.first_tile : int(blockIdx.x);
  bool more = first_tile < args.inputs.num_work_tiles;
#pragma unroll 1
  for (unsigned block = 0; more; ++block) {
    wait(smem.dq_full, block & 1);  // now the origin is stored, too
    const int4 origin = ptx::load_shared_s32x4(origins + block % kOrigins * 16);
    more = kOrdered ? (origin.z & kIsLast) == 0 : origin.z == 0;
    int* const semaphore = args.counts + origin.y;
    if (kOrdered && (origin.z & kIsFirst) == 0) {
      while (ptx::load_acquire(semaphore) < origin.w) {
      }
      ptx::fence_proxy_async_global();
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (g > 0) wait(smem.dq_full + 8 * g, block & 1);
      if (kOrdered && origin.w < 0) continue;
      ptx::cp_reduce_async_bulk_add(
          args.sums_q + (index_t(origin.y) * kGroups + g) * kPart,
          smem.dq + g * kBytesPart, kBytesPart);
      ptx::cp_async_bulk_commit_group();
    }
    ptx::cp_async_bulk_wait_group_read<1>();
    ptx::mbarrier_arrive(smem.dq_empty);
    ptx::cp_async_bulk_wait_group_read();
    ptx::mbarrier_arrive(smem.dq_empty + 8);
    if constexpr (kOrdered) {
      ptx::cp_async_bulk_wait_group();
      if (origin.w >= 0) ptx::store_release(semaphore, origin.w + 1);
    }
  }
  ptx::cp_async_bulk_wait_group();
  leave(args.counter);
}

// --- consumers

// `kCount` numbers of x, from number kBegin on.
template <int kCount, int kBegin = 0, int kAll>
__device__ __forceinline__ float (&part_of(float (&x)[kAll])) [kCount] {
  static_assert(kBegin + kCount <= kAll);
  return reinterpret_cast<float (&)[kCount]>(x[kBegin]);
}

struct mainloop_t : mma_t {
  const arguments_t& args;
  shared_t& shared;
  const addresses_t& smem;

  unsigned num_done = 0;  // work tiles of this block so far
  unsigned block = 0;     // of queries so far; gives stages and parities
  unsigned first, last;   // blocks of the work tile
  // A remainder by 3 would be computed in vector registers, and with it all
  // descriptors, which then move to uniform registers.
  ring_t<kStagesQ> q_stage;
  ring_t<kStagesDout> dout_stage;
  unsigned origins, dq_target;
  // With a mask function: whether this warpgroup's keys are all shown to a block of
  // queries, and if not, a bit for each hidden score.
  bool all_shown;
  unsigned hidden[kScores / 32];
  // Prefetched pairs of statistics.
  float2 early_lse[kEarlyLse + 1], early_delta[kEarlyDelta + 1];

  __device__ __forceinline__ mainloop_t(int group, const arguments_t& args,
                                        shared_t& shared, const addresses_t& smem)
      : mma_t(group, smem.k, smem.v, smem.q, smem.dout, smem.ds, smem.stats),
        args(args),
        shared(shared),
        smem(smem) {
    origins = ptx::shared_address(shared.origins);
    dq_target = smem.dq + threadIdx.x / 32 * (kBytesPart / 4) + lane * 16;
    // Otherwise recomputed in each step from a special register with high latency.
    ptx::launder(ds_target);
    ptx::launder(lane_stats);
    ptx::launder(dq_target);
    ptx::launder(origins);
  }

  __device__ __forceinline__ const volatile published_t& info() const {
    return shared.published[num_done % kPublished];
  }
  __device__ __forceinline__ void wait_for_q() const {
    wait(smem.q_full + 8 * q_stage.stage, q_stage.parity);
  }
  __device__ __forceinline__ void wait_for_dout() const {
    wait(smem.dout_full + 8 * dout_stage.stage, dout_stage.parity);
  }
  // All lanes of this warp have finished with what the barrier protects.
  __device__ __forceinline__ void release(unsigned barrier) const {
    __syncwarp();
    if (kArrivals > 1 || lane == 0) ptx::mbarrier_arrive(barrier);
  }
  // The number of blocks of queries of the next work tile; 0 if there is none.
  __device__ __forceinline__ int next_count() const {
    wait(smem.k_full, num_done & 1);
    return uniform(info().count);
  }

  // Pair n of a thread's lse, or delta, for the queries in a stage; `delta_at` is 0 for
  // lse.
  __device__ __forceinline__ float2 load_pair(unsigned stage, int n,
                                              int delta_at) const {
    return ptx::load_shared_f32x2(lane_stats + stage * kBytesStats + delta_at + n * 32);
  }
  // The same for pairs n and n + 1, which with 64 columns are adjacent.
  __device__ __forceinline__ void load_two(float2 (&to)[2], unsigned stage, int n,
                                           int delta_at) const {
    const float4 x = ptx::load_shared_f32x4(lane_stats + lane % 4 * 8 +
                                            stage * kBytesStats + delta_at + n * 32);
    to[0] = {x.x, x.y}, to[1] = {x.z, x.w};
  }
  // Those of all queries or, in a wide step, of a half.
  __device__ __forceinline__ void prefetch_lse(unsigned stage, int half = 0) {
    if constexpr (kIsWide) {
#pragma unroll
      for (int n = 0; n < kEarlyLse; n += 2) {
        float2 two[2];
        load_two(two, stage, half * kEarlyLse + n, 0);
        early_lse[n] = two[0], early_lse[n + 1] = two[1];
      }
    } else {
#pragma unroll
      for (int n = 0; n < kEarlyLse; ++n) early_lse[n] = load_pair(stage, n, 0);
    }
  }
  __device__ __forceinline__ void prefetch_delta(unsigned stage) {
#pragma unroll
    for (int n = 0; n < kEarlyDelta; ++n) {
      early_delta[n] = load_pair(stage, n, 4 * kBlockM);
    }
  }
  __device__ __forceinline__ auto origin() const {
    return [this] { return ptx::load_shared_s32(origins + block % kOrigins * 16); };
  }

  // Finds the scores of a block of queries that the mask function hides.
  __device__ __forceinline__ void find_hidden() {
    const int4 at =
        ptx::load_shared_s32x4(origins + block % kOrigins * 16 + kToOptions);
    const unsigned word = at.x;
    const listed_tile_t listed = {word};
    all_shown = listed.is_seen(group) && !listed.is_mixed(group);
    if (all_shown) return;
    const int row = group * 64 + warp * 16 + lane / 4, column = lane % 4 * 2;
    const volatile published_t& tile = info();
    const int corner = row - origin()() - column;
#pragma unroll 1
    for (int begin = 0; begin < kBlockM; begin += 64) {
      hidden[0] = hidden[kScores / 32 - 1];
      hidden[kScores / 32 - 1] = hidden_scores(
          args.score.function(), at.y, at.z, at.w + column + begin,
          tile.tile * kBlockN + row, corner - tile.high + 1 - begin,
          kBounds == 2 ? corner - tile.low - begin : kMany, tile.num_keys - row);
    }
  }

  // Hides what the mask or a bound hides, and keys that do not exist.
  __device__ __forceinline__ void hide_by_words(unsigned stage) {
    // Recompute the address, rather than keep it in a register.
    unsigned thread = threadIdx.x;
    ptx::launder(thread);
    const unsigned from = smem.words + stage * kBytesWords + thread * 4;
#pragma unroll
    for (int n = 0; n < kPartsM; ++n) {
      hide(ptx::load_shared_s32(from + n * kBytesPartOfWords), 32 * n,
           args.inputs.hidden);
    }
  }

  // Half of the queries at a time: P, dS, and their share of dv.
  static constexpr int kHalf = kScores / 2, kSteps = kBlockM / 32;
  template <int kNth> __device__ __forceinline__ void exponentiate_half() {
    const auto lse = [&](int n) { return early_lse[n % kEarlyLse]; };
    if constexpr (kHasAlibi) {
      const float2 alibi =
          ptx::load_shared_f32x2(origins + block % kOrigins * 16 + kToOptions);
      // Of the first query and key of this thread.
      const float distance = alibi.y + static_cast<float>(lane % 4 * 2 - lane / 4 -
                                                          group * 64 - warp * 16);
      exponentiate<kNth * kHalf, (kNth + 1) * kHalf>(args.inputs.to_log2, lse, alibi.x,
                                                     distance);
    } else {
      exponentiate<kNth * kHalf, (kNth + 1) * kHalf>(args.inputs.to_log2, lse);
    }
    round_p<kNth * kHalf, (kNth + 1) * kHalf>();
  }
  template <int kNth> __device__ __forceinline__ void start_dp_half(unsigned stage) {
    constexpr int kRows = kNth * kBlockM / 2;
    ptx::wgmma_fence();
    multiply_scores(part_of<kHalf, kNth * kHalf>(dp), v_rows,
                    dout_rows + (stage * kBytesM + kRows * 128) / 16);
    ptx::wgmma_commit_group();
  }
  template <int kNth> __device__ __forceinline__ void make_ds_half(unsigned stage) {
    float2 two[2];
    make_ds<kNth * kHalf, (kNth + 1) * kHalf>(
        kNarrow<elem_t> ? info().factor : 1.f, [&](int n) {
          if (kIsWide && n % 2 == 0) load_two(two, stage, n, 4 * kBlockM);
          return kIsWide           ? two[n % 2]
                 : n < kEarlyDelta ? early_delta[n]
                                   : load_pair(stage, n, 4 * kBlockM);
        });
  }
  template <int kNth>
  __device__ __forceinline__ void start_dv_half(unsigned stage, bool accumulate) {
    start_dv<kNth * kSteps, (kNth + 1) * kSteps>(stage, accumulate);
  }

  __device__ __forceinline__ void wait_for_ds_stage() const {
    wait(smem.ds_empty + 8 * (block % kStagesDs), (block / kStagesDs & 1) ^ 1);
  }
  // Starts dq of block `number`, once dS of both warpgroups is stored.
  __device__ __forceinline__ void start_dq_of(float (&dq)[kSumsQ], unsigned number) {
    wait(smem.ds_full + 8 * (number % kStagesDs), number / kStagesDs & 1);
    start_dq(dq, number % kStagesDs);
  }
  // Stores all that there is of a block of dq.
  __device__ __forceinline__ void store_all_of_dq(const float (&dq)[kSumsQ],
                                                  unsigned number) const {
    const int4 origin = ptx::load_shared_s32x4(origins + number % kOrigins * 16);
    const params_t& params = args.score.params;
    const dq_t& to = args.dq;
    // Each warpgroup has 64 rows, or 64 columns.
    const int row = origin.x + kIsWide * group * 64 + warp * 16;
    const int column = !kIsWide * group * 64;
    const float factor = kNarrow<elem_t> ? info().factor : 1.f;
    const unsigned nonfinite =
        store_staged(dq, dq_target - lane * 16,
                     unfactor_of(factor, static_cast<float>(params.scale)),
                     to.data + origin.z * to.batch_step + origin.w * to.head_step +
                         row * to.row_step + column,
                     to.row_step, static_cast<int>(params.seqlen_q) - row,
                     static_cast<int>(params.head_dim) - column);
    if (nonfinite != 0) args.found->nonfinite = 1;
  }
  // Stages dq in shared memory, once the previous block has left it.
  __device__ __forceinline__ void store_dq(const float (&dq)[kSumsQ],
                                           unsigned number) const {
    if constexpr (kStoresDq) return store_all_of_dq(dq, number);
    wait(smem.dq_empty + 8 * group, (number & 1) ^ 1);
#pragma unroll
    for (int e = 0; e < kSumsQ; e += 4) {
      ptx::store_shared_f32x4(dq_target + e * 128, dq[e], dq[e + 1], dq[e + 2],
                              dq[e + 3]);
    }
  }
  // Publishes dS of block `number`, and dq of the previous one.
  __device__ __forceinline__ void publish_ds(unsigned number) const {
    ptx::fence_proxy_async();
    __syncwarp();
    if (kArrivals > 1 || lane == 0) {
      if (!kStoresDq && number != first) {
        ptx::mbarrier_arrive(smem.dq_full + 8 * group);
      }
      ptx::mbarrier_arrive(smem.ds_full + 8 * (number % 2));
    }
  }

  // One block of queries. No product is in flight between steps, because ptxas does not
  // track them around a loop (C7514).
  //
  // The softmax overlaps with dP, dS with a part of dv, and storing dq of the previous
  // block with dk: by then dS of the other warpgroup is long complete, so each may run
  // ahead of the other by half a step.
  template <bool kFirst> __device__ __forceinline__ void step() {
    auto& dq = part_of<kSumsQ>(dp);  // its registers are free
    const unsigned this_q = q_stage.stage, this_dout = dout_stage.stage;
    if constexpr (kHasMaskFunction) find_hidden();
    start_s(this_q);
    const bool whole = kHasMaskFunction ? all_shown : info().is_whole(origin());
    wait_for_dout();
    if constexpr (kIsWide) {
      start_dp_half<0>(this_dout);
    } else {
      start_dp(this_dout);
    }
    prefetch_lse(this_dout);
    if constexpr (!kFirst) publish_ds(block - 1);
    q_stage.advance();
    dout_stage.advance();
    ptx::wgmma_wait_group<1>();  // S
    compiler_fence(s);
    if constexpr (kHasMaskFunction) {
      if (!whole) {
#pragma unroll
        for (int n = 0; n < kScores / 32; ++n) {
          hide(hidden[n], 32 * n, args.inputs.hidden);
        }
      }
    } else if constexpr (kMaskWords) {
      hide_by_words(this_dout);
    } else {
      if (!whole) mask(info(), args.inputs.hidden, origin());
    }
    exponentiate_half<0>();
    start_dv_half<0>(this_dout, !kFirst);
    prefetch_delta(this_dout);
    ptx::wgmma_wait_group<1>();  // dP, in a wide step a half
    compiler_fence(part_of<kIsWide ? kHalf : kScores>(dp));
    if (!kIsWide && block == last) release(smem.v_empty);
    make_ds_half<0>(this_dout);
    if constexpr (kIsWide) {
      ptx::wgmma_wait_group<0>();
      compiler_fence(sums_v);
      start_dp_half<1>(this_dout);
      prefetch_lse(this_dout, 1);
    }
    exponentiate_half<1>();
    if constexpr (kIsWide) {
      ptx::wgmma_wait_group<0>();  // dP
      compiler_fence(part_of<kHalf, kHalf>(dp));
      if (block == last) release(smem.v_empty);
    }
    make_ds_half<1>(this_dout);
    wait_for_ds_stage();
    store_ds(block % kStagesDs);
    start_dv_half<1>(this_dout, true);
    if constexpr (!kFirst) start_dq_of(dq, block - 1);
    ptx::wgmma_wait_group<kFirst ? 0 : 1>();  // dv
    start_dk(this_q, !kFirst);
    compiler_fence(sums_v);
    release(smem.dout_empty + 8 * this_dout);
    if constexpr (!kFirst) {
      ptx::wgmma_wait_group<1>();  // dq
      compiler_fence(dq);
      release(smem.ds_empty + 8 * ((block - 1) % kStagesDs));
      store_dq(dq, block - 1);
    }
    if (block != last) wait_for_q();
    ptx::wgmma_wait_group<0>();  // dk
    compiler_fence(sums_k);
    release(smem.q_empty + 8 * this_q);
  }

  // Skips a first block of queries that sees none of this warpgroup's keys.
  __device__ __forceinline__ void skip() {
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
    wait_for_ds_stage();
    store_ds(block % kStagesDs);
    release(smem.dout_empty + 8 * this_dout);
    release(smem.q_empty + 8 * this_q);
    wait_for_q();
  }

  // Sums dk and dv over the `count` blocks of queries of a work tile.
  __device__ __forceinline__ void attend(int count) {
    first = block;
    last = block + count - 1;
    wait_for_q();
    wait(smem.v_full, num_done & 1);
    if (kSkips && group > 0 && uniform(info().skips)) {
      skip();
    } else {
      step<true>();
    }
#pragma unroll 1
    while (block != last) {
      ++block;
      step<false>();
    }
  }

  // Stores dk and dv, unless another part of the tile will.
  __device__ __forceinline__ void store(bool is_mine) const {
    const volatile published_t& to = info();
    const params_t& params = args.score.params;
    const grads_t& grads = args.grads;
    const int first_row = group * 64 + warp * 16;
    const int num_rows = is_mine ? to.num_keys - first_row : 0;
    const int row = to.tile * kBlockN + first_row;
    const unsigned staged = dq_target - lane * 16;
    unsigned nonfinite =
        store_staged(sums_v, staged, 1 / kFactorP, args.dv + to.dv + row * grads.row[1],
                     grads.row[1], num_rows, static_cast<int>(params.head_dim_v));
    nonfinite |= store_staged(
        sums_k, staged,
        unfactor_of(factor_of(args.found), static_cast<float>(params.scale)),
        args.dk + to.dk + row * grads.row[0], grads.row[0], num_rows,
        static_cast<int>(params.head_dim));
    if (nonfinite != 0) args.found->nonfinite = 1;
  }

  // dq of the last block, while the keys of the next work tile load; then dk and dv.
  __device__ __forceinline__ void finalize() {
    auto& dq = part_of<kSumsQ>(dp);
    const bool is_mine =
        kBounds > 0 || kOrdered ||
        meet(sums_k, sums_v, info(), args.inputs, args.counts, args.parts);
    publish_ds(block);
    start_dq_of(dq, block);
    ptx::wgmma_wait_group<0>();
    compiler_fence(dq);
    release(smem.k_empty);
    release(smem.ds_empty + 8 * (block % kStagesDs));
    // dv and dk use the staging buffer of dq, once the previous block has left it.
    if (!kStoresDq) wait(smem.dq_empty + 8 * group, (block & 1) ^ 1);
    store(is_mine);
    store_dq(dq, block);
    if constexpr (!kStoresDq) {
      ptx::fence_proxy_async();
      release(smem.dq_full + 8 * group);
    }
    ++block;
    ++num_done;
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) attention_vjp_hopper(
    const __grid_constant__ inputs_t inputs,
    const float* __restrict__ stats,  // backward.cuh
    float* __restrict__ sums_q,       // backward.cuh
    int* counts,                      // met, or dq_semaphores: backward.cuh
    float* parts,                     // backward.cuh
    elem_t* __restrict__ dk,          // as k, summed over entries
    elem_t* __restrict__ dv,          // as v, summed over entries
    found_t* __restrict__ found, counter_t* __restrict__ counter,
    LISTS_PARAMETER MASK_WORDS_PARAMETER DQ_PARAMETERS SCORE_PARAMETERS,
    const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ shared_t shared;
  const arguments_t args = {inputs,
                            stats,
                            sums_q,
                            counts,
                            parts,
                            dk,
                            dv,
                            found,
                            counter,
                            LISTS_ARGUMENT,
                            MASK_WORDS_ARGUMENT,
                            {DQ_ARGUMENTS},
                            {SCORE_ARGUMENTS},
                            grads};
  const addresses_t smem(tiles, shared.barriers);
  const int group = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) smem.init_barriers();
  ptx::griddepcontrol_wait();
  // The next kernel may start: its blocks find no room before these are finished.
  ptx::griddepcontrol_launch_dependents();
  if (kOrdered && threadIdx.x == 0) shared.first_tile = atomicAdd(&counter->next, 1);
  __syncthreads();  // the barriers are initialized

  if (group == kGroups) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4 * kGroups;
    if (warp == 0 && lane == 0) {
      producer_t{args, shared, smem}.produce();
      if constexpr (kStoresDq) leave(counter);
    } else if (!kStoresDq && warp == 1 && lane == 0) {
      add_dq(args, shared, smem);
    }
    return;
  }
  ptx::setmaxnreg_inc<kConsumerRegisters>();
  mainloop_t mainloop(group, args, shared, smem);
  int count = mainloop.next_count();
  while (count != 0) {
    mainloop.attend(count);
    mainloop.finalize();
    count = mainloop.next_count();
  }
}

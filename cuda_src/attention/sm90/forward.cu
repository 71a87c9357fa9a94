// SPDX-License-Identifier: MIT
// attention_hopper: tensor cores fed by TMA, for sm_90a.
//
// Algorithm  FlashAttention-3 forward (Shah et al. 2024), on tiles of keys from last to
//            first: while o += p v of one tile runs, so does s = q k^T of the
//            next, and its softmax. The reference m of a row moves only when a score
//            passes it by 2^8, which leaves o alone in most steps.
// Grid       a block a multiprocessor. An item is a tile of queries of one head; blocks
//            take item after item, from a counter where items differ in length
// Threads    warpgroup 0 asks TMA for tiles (one thread); each other one
//            computes 64 queries. With kTakeTurns they issue products one after another
// Tiles      q     kGroupM x kHeadDim a warpgroup   shared
//            k, v  kBlockN x kHeadDim (kHeadDimV)   shared, kStages of each
//            s, p, o  registers, as wgmma lays them out
//            out   16 x kStagedColumns a warp       shared, on their way to memory
// Memory     global: q and out once; k and v once an item, mostly from L2
// Numbers    s, m, l, o in float32; p is rounded to elem_t before p v
// Limits     q, k, v as a tensor map takes them (_cuda/tensor_map.py); seqlen_k >= 1;
// numbers
//            of items, queries and keys in 32 bits
#include "attention/sm90/nonfinite_values.cuh"
#include "attention/sm90/split_kv.cuh"
#include "attention/sm90/softmax.cuh"
#include "attention/sm90/epilogue.cuh"
#include "attention/sm90/score_terms.cuh"
#include "ptx/barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma_shapes.cuh"

// setmaxnreg moves registers inside the pool of the launch, 65536 / kNumThreads a
// thread. Lengths and options cost the producer registers, since it finds the tiles of
// an item.
constexpr int kProducerRegisters = kNumGroups == 4                                 ? 32
                                   : kNumGroups == 3 && (kBandOfItem || kHasTerms) ? 56
                                   : kNumGroups == 3                               ? 32
                                   : kBandOfItem && kHasTerms                      ? 56
                                                                                   : 40;
constexpr int kConsumerRegisters = kNumGroups == 2   ? (504 - kProducerRegisters) / 2
                                   : kNumGroups == 3 ? (512 - kProducerRegisters) / 3
                                                     : 112;
static_assert(kNumGroups == 1 || kProducerRegisters + kNumGroups * kConsumerRegisters <=
                                     65536 / kNumThreads / 8 * 8 * (kNumGroups + 1));

// A short launch waits for little else than what comes before its first keys.
constexpr bool kFindsFirst = kNumGroups == 1 && !kDynamic;

// Tiles of v that a warpgroup skips and leaves standing until its first product has
// begun. The producer asks for tile n of k after tile n - 2 of v, so that it waits for
// none of these.
constexpr int kLateV = 2;
static_assert(kNumGroups == 1 || kStages >= kLateV);

// Whether tiles of k and q are given back without a branch. With more stages and where
// terms of keys have barriers of their own that is slower: the assembler moves more
// into the turn.
constexpr bool kGivesBackAtOnce = kNumGroups > 1 && kStages == 2 && !kHasKeyRing;

// s = q k^T, or s += q k^T with kPresetBias. A step is 16 columns: 32 bytes of a row of
// 128.
__device__ __forceinline__ void multiply_qk(float (&s)[kScores],
                                            unsigned long long q,
                                            unsigned long long k) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    ptx::wgmma_t<elem_t, kBlockN>::ss(s, q + (chunk * kGroupM * 128 + inside) / 16,
                                      k + (chunk * kBlockN * 128 + inside) / 16,
                                      kPresetBias || step > 0);
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

// What depends on the memory of q, k and v. Mirrored by HOPPER_INPUTS in
// _attention/gpu/sm90/forward.py.
struct alignas(64) inputs_t {
  ptx::tensor_map_t q_map, k_map, v_map;
  schedule_t schedule;
  const elem_t* q;   // (batch, heads, queries, head_dim)
  const elem_t* k;   // (batch, kv heads, keys, head_dim)
  const elem_t* v;   // (batch, kv heads, keys, head_dim_v)
  double from_log2;  // what a unit of the exponents is in units of lse, by to_log2
  float to_log2;     // what makes scores, or q.k, exponents of 2
  float margin;      // kLazyLog2 in their units
  cap_t cap;
};

// Where merged parts go.
#ifdef MERGE
#define MERGED_PARAMETERS                                                \
  elem_t* __restrict__ merged, /* (batch, heads, queries, head_dim_v) */ \
      float* __restrict__ merged_lse,
#else
#define MERGED_PARAMETERS
#endif

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_hopper(const __grid_constant__ inputs_t inputs,
                     out_t* __restrict__ out,  // (batch, heads, queries, head_dim_v)
                     lse_t* __restrict__ lse,  // (batch, heads, queries), or null
                     counter_t* __restrict__ counter,
                     MERGED_PARAMETERS SCORE_PARAMETERS) {
  const schedule_t& schedule = inputs.schedule;
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(
      8) unsigned long long barriers[2 * kNumGroups + 4 * kStages + 4 + kOrders +
                                     (kHasKeyRing ? 2 * kKeySlots : 0)];
  __shared__ tile_info_t tile_info_memory[2];
  volatile tile_info_t* const tile_infos = tile_info_memory;
  __shared__ orders_t orders_memory;
  volatile orders_t& orders = orders_memory;
  __shared__ key_terms_t key_terms[kKeySlots];
  [[maybe_unused]] __shared__ bool is_last_part;

  // The host adds 1024 bytes for this: a swizzled tile starts at a multiple.
  const unsigned smem_q = (ptx::shared_address(smem) + 1023) & ~1023u;
  const unsigned smem_k = smem_q + kNumGroups * kBytesQ;
  const unsigned smem_v = smem_k + kStages * kBytesK;
  [[maybe_unused]] const unsigned smem_out = smem_v + kStages * kBytesV;
  unsigned first_barrier = ptx::shared_address(barriers);
  // Or else the assembler finds it anew in each step; at 128 columns it takes a
  // register that terms need.
  if constexpr (kNumGroups > 1 && kHeadDimV != 128) ptx::launder(first_barrier);
  constexpr int kBarrier = ring_t::kBytes;
  const ring_t q_ring = {first_barrier, first_barrier + kNumGroups * kBarrier};
  const ring_t k_ring = {q_ring.empty + kNumGroups * kBarrier,
                         q_ring.empty + (kNumGroups + kStages) * kBarrier};
  const ring_t v_ring = {k_ring.empty + kStages * kBarrier,
                         k_ring.empty + 2 * kStages * kBarrier};
  const ring_t item_ring = {v_ring.empty + kStages * kBarrier,
                            v_ring.empty + (kStages + 2) * kBarrier};
  const unsigned landed = item_ring.empty + 2 * kBarrier;  // tiles to be looked through
  const ring_t key_ring = {landed + kOrders * kBarrier,
                           landed + (kOrders + kKeySlots) * kBarrier};

  if (kNumGroups == 1 && threadIdx.x == 128) {
    ptx::prefetch_tensormap(inputs.k_map);
    ptx::prefetch_tensormap(inputs.q_map);
    ptx::prefetch_tensormap(inputs.v_map);
  }
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  // The producer finds its first item while another warp makes the barriers.
  [[maybe_unused]] tile_coord_t first_place;
  if (kFindsFirst && threadIdx.x == 0) {
    first_place = place_of(blockIdx.x, schedule, params);
  }
  if (threadIdx.x == (kFindsFirst ? kWarpSize : 0)) {
    for (int n = 0; n < kNumGroups; ++n) {
      ptx::mbarrier_init(q_ring.full_at(n), 1);
      ptx::mbarrier_init(q_ring.empty_at(n), 4);
    }
    for (int n = 0; n < kStages; ++n) {
      ptx::mbarrier_init(k_ring.full_at(n), 1 + kBiasBehind);
      ptx::mbarrier_init(k_ring.empty_at(n), 4 * kNumGroups);
      ptx::mbarrier_init(v_ring.full_at(n), 1);
      ptx::mbarrier_init(v_ring.empty_at(n), 4 * kNumGroups);
    }
    for (int n = 0; n < 2; ++n) {
      ptx::mbarrier_init(item_ring.full_at(n), 1);
      ptx::mbarrier_init(item_ring.empty_at(n), 4 * kNumGroups + kTermsOfKeys);
      orders.special[n] = -1;
    }
    orders.count = 0;
    orders.looked_at = 0;
    for (int n = 0; n < (kHidesSome ? kOrders : 0); ++n) {
      ptx::mbarrier_init(landed + n * kBarrier, 1);
    }
    for (int n = 0; n < (kHasKeyRing ? kKeySlots : 0); ++n) {
      ptx::mbarrier_init(key_ring.full_at(n), 1);
      ptx::mbarrier_init(key_ring.empty_at(n), 4 * kNumGroups);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are there before anyone uses them

  if (group == 0) {
    // --- the producer: k0, q, k1, v0, k2, v1, .., since k is needed one tile before v
    if constexpr (kNumGroups > 1) ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) {
      unsigned num_tiles = 0;  // of k and v so far: gives stage and parity
      unsigned num_items = 0;
      orders.next = blockIdx.x;
      if constexpr (kDynamic && !kBandOfItem) {
        const mask_bounds_t band =
            scores_t(tile_coord_t(), SCORE_ARGUMENTS).mask_bounds(0, 0);
        for (int n = 0; n < 2; ++n) tile_infos[n].put(band);
      }
      while (true) {
        int item = orders.next;
        if constexpr (kDynamic) {
          const unsigned slot = num_items & 1;
          wait(item_ring.empty_at(slot), (num_items >> 1 & 1) ^ 1);
          if constexpr (kHidesSome) {
            unsigned done = num_items == 0 ? 0 : num_items - 1;
            if (item >= schedule.num_items && num_items > 0) {  // no other comes
              wait(item_ring.empty_at(slot ^ 1), done >> 1 & 1);
              done = num_items;
            }
            const int again = find_again(orders, done);
            orders.careful = again >= 0;
            if (again >= 0) item = again | kCareful;
            orders.again[num_items % kRemembered] = -1;
          }
          tile_infos[slot].item = item;
        }
        const bool careful = item >= kCareful;
        if (careful) item -= kCareful;
        const tile_coord_t at = kFindsFirst && num_items == 0
                                    ? first_place
                                    : place_of(item, schedule, params);
        const int row_block = first_row(at, schedule);
        const int row_first = max(row_block, 0);
        const int row_last = min(row_block + kBlockM, int(params.seqlen_q) * kPack);
        // The tile_infos holds what there are no registers for.
        volatile tile_info_t& tile_info = tile_infos[num_items & 1];
        if constexpr (kDynamic) {
          tile_info.put(at);
          if (item < schedule.num_items) {
            if (kBandOfItem)
              tile_info.put(scores_t(at, SCORE_ARGUMENTS).mask_bounds(0, 0));
            tile_info.put(share_of(
                tiles_of(tile_info.seen(), row_first, row_last, params.seqlen_k), item,
                schedule));
          }
          ptx::mbarrier_arrive(item_ring.full_at(num_items & 1));
        }
        if (item >= schedule.num_items) break;
        int next = item;
        if (kDynamic && !careful) next = atomicAdd(&counter->next, 1);
        if (kHidesSome && orders.careful) {
          const tiles_t whole =
              whole_tiles_of(tile_info.seen(), row_first, row_last, params.seqlen_k);
          orders.whole_first = whole.first;
          orders.whole_last = whole.last;
        }
        const tiles_t tiles =
            kDynamic ? tile_info.share().tiles
                     : share_of(tiles_of({}, row_first, row_last, params.seqlen_k),
                                item, schedule)
                           .tiles;
        const int count = tiles.last - tiles.first;
        // Coordinates of two batch axes have no registers either.
        auto place = [&] {
          if constexpr (kDynamic && kBatchDims > 1) return tile_info.place();
          return at;
        };
        for (int n = 0; n <= count; ++n) {
          if (n < count) {
            const unsigned number = num_tiles + n, stage = stage_of(number);
            wait(k_ring.empty_at(stage), parity_of(number) ^ 1);
            const tile_coord_t from = place();
            int batch_k[2];
            batch_coordinates(batch_k, from, params.k);
            load_tile<kBlockN, kChunksQk, kReadOnce, kBoxN>(
                smem_k + stage * kBytesK, inputs.k_map, k_ring.full_at(stage),
                (tiles.last - 1 - n) * kBlockN, coordinate(from.kv_head, params.k.head),
                batch_k);
          }
          if (n == 0) {
            const tile_coord_t from = place();
            int batch_q[2];
            batch_coordinates(batch_q, from, params.q);
            for (int g = 0; g < kNumGroups; ++g) {
              wait(q_ring.empty_at(g), (num_items & 1) ^ 1);
              const int row = row_block + g * kGroupM;
              if constexpr (kPack == 1) {
                load_tile<kGroupM, kChunksQk>(
                    smem_q + g * kBytesQ, inputs.q_map, q_ring.full_at(g), row,
                    coordinate(from.head, params.q.head), batch_q);
              } else {  // axes: columns, packed heads, queries, others heads, batch
                const int others[2] = {int(from.head) / kPack, batch_q[0]};
                load_tile<kGroupM, kChunksQk, false, kGroupM, kGroupM / kPack * kPack>(
                    smem_q + g * kBytesQ, inputs.q_map, q_ring.full_at(g), 0,
                    query_of(row), others);
              }
            }
            if (!careful) orders.next = next + gridDim.x;  // by now it has come
          } else {
            const unsigned number = num_tiles + n - 1, stage = stage_of(number);
            wait(v_ring.empty_at(stage), parity_of(number) ^ 1);
            unsigned arrival = v_ring.full_at(stage);
            if (kHidesSome && orders.careful &&
                !is_in(tiles.last - n, {orders.whole_first, orders.whole_last})) {
              const unsigned slot = orders.count % kOrders;
              if (orders.count == 0)
                ptx::barrier_arrive<kInspectors + kWarpSize>(kWakeBarrier);
              orders.count = orders.count + 1;
              orders.stage[slot] = stage;
              orders.item[slot] = num_items;
              arrival = landed + slot * kBarrier;
            }
            const tile_coord_t from = place();
            int batch_v[2];
            batch_coordinates(batch_v, from, params.v);
            load_tile<kBlockN, kChunksV, kReadOnce, kBoxN>(
                smem_v + stage * kBytesV, inputs.v_map, arrival,
                (tiles.last - n) * kBlockN, coordinate(from.kv_head, params.v.head),
                batch_v);
          }
        }
        num_tiles += count;
        ++num_items;
      }
      if constexpr (kDynamic) {
        // All blocks have taken their last item: ready for the next launch.
        if (atomicAdd(&counter->finished, 1) == int(gridDim.x) - 1) {
          counter->next = 0;
          counter->finished = 0;
          __threadfence();
        }
      }
      if constexpr (kHidesSome) {
        if (orders.count == 0)
          ptx::barrier_arrive<kInspectors + kWarpSize>(kWakeBarrier);
        const unsigned slot = orders.count % kOrders;
        orders.stage[slot] = -1;
        ptx::mbarrier_arrive(landed + slot * kBarrier);
      }
    } else if (kTermsOfKeys && threadIdx.x / kWarpSize == 1) {
      // --- the reader of terms of keys
      const int lane = threadIdx.x % kWarpSize;
      const ring_t& ring = kBiasBehind ? k_ring : key_ring;
      [[maybe_unused]] const inverse_t inverse_scale(params.scale);
      unsigned num_tiles = 0, num_items = 0;
      wait(item_ring.full_at(0), 0);
      while ((tile_infos[num_items & 1].item & ~kCareful) < schedule.num_items) {
        const tile_coord_t at = tile_infos[num_items & 1].place();
        const tiles_t tiles = tile_infos[num_items & 1].share().tiles;
        const scores_t scores(at, SCORE_ARGUMENTS);
        // Other terms leave no registers to ask ahead.
        read_terms_t read;
        if constexpr (kKeyBias) {
          read.read(scores, (tiles.last - 1) * kBlockN, params.seqlen_k, lane);
        }
#pragma unroll 1
        for (int tile = tiles.last - 1; tile >= tiles.first; --tile, ++num_tiles) {
          const unsigned slot = num_tiles % kKeySlots;
          wait(ring.empty_at(slot), (num_tiles / kKeySlots & 1) ^ 1);
          if constexpr (kKeyBias) {
            write_key_bias(key_terms[slot], read, inverse_scale, lane);
          } else {
            read.read(scores, tile * kBlockN, params.seqlen_k, lane);
            write_key_terms(key_terms[slot], read, lane);
          }
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(ring.full_at(slot));
          if (kKeyBias && tile > tiles.first) {
            read.read(scores, (tile - 1) * kBlockN, params.seqlen_k, lane);
          }
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(item_ring.empty_at(num_items & 1));
        ++num_items;
        wait(item_ring.full_at(num_items & 1), num_items >> 1 & 1);
      }
    } else if (kHidesSome && threadIdx.x >= 128 - kInspectors) {
      // --- the inspectors
      const int thread = threadIdx.x - (128 - kInspectors);
      unsigned char* const tiles_v = smem + (smem_v - ptx::shared_address(smem));
      unsigned slot = 0, parity = 0;
      ptx::bar_sync<kInspectors + kWarpSize>(kWakeBarrier);
      wait(landed, 0);
      int stage = orders.stage[0];
      while (stage >= 0) {
        if (clean(reinterpret_cast<uint4*>(tiles_v + stage * kBytesV), thread)) {
          const int number = orders.item[slot];
          orders.special[number & 1] = number;
          ptx::fence_proxy_async();
        }
        ptx::bar_sync<kInspectors>(kInspectBarrier);
        if (thread == 0) ptx::mbarrier_arrive(v_ring.full_at(stage));
        slot = (slot + 1) % kOrders;
        parity ^= slot == 0;
        wait(landed + slot * kBarrier, parity);
        stage = orders.stage[slot];
      }
    }
    return;
  }

  // --- the consumers
  if constexpr (kNumGroups > 1) ptx::setmaxnreg_inc<kConsumerRegisters>();
  const int w = group - 1, lane = threadIdx.x % kWarpSize;
  const bool elected = lane == 0;
  const unsigned long long q_tile = descriptor(smem_q + w * kBytesQ, 16);
  const unsigned long long k_tiles = descriptor(smem_k, 16);
  const unsigned long long v_tiles = descriptor(smem_v, kBlockN * 128);
  const float to_log2 = kCapOnly ? 1.f : kHasTerms ? float(kLog2e) : inputs.to_log2;
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
    wait(item_ring.full_at(num_items & 1), num_items >> 1 & 1);
    return __shfl_sync(kFullMask, tile_infos[num_items & 1].item, 0);
  };

  // The number of a row in lse, and of one in out where that is split.
  auto row_number = [&](const tile_coord_t& at, int row, int item) {
    index_t number = (at.row_of_heads + row % kPack) * params.seqlen_q + query_of(row);
    if constexpr (kSplit) {
      number += static_cast<index_t>(unsigned(item) % schedule.num_splits) *
                schedule.num_heads * kPack * params.seqlen_q;
    }
    return number;
  };

  float s[kScores], o[kOutputs];
  unsigned p[kBlockN / 16][4];
  int item = kDynamic ? next_item(0) : blockIdx.x;
  // Kept free of break and return: with them ptxas loses the registers of setmaxnreg.
  while ((item & ~kCareful) < schedule.num_items) {
    const tile_coord_t at =
        kDynamic ? tile_infos[num_items & 1].place() : place_of(item, schedule, params);
    const mask_bounds_t band =
        kDynamic ? tile_infos[num_items & 1].seen() : mask_bounds_t{};
    const scores_t scores(at, SCORE_ARGUMENTS);
    const int seqlen_q = params.seqlen_q, seqlen_k = params.seqlen_k;
    const int num_rows = seqlen_q * kPack;
    const int row_block = first_row(at, schedule);
    // A warpgroup before the first query has as much to do as one behind the last.
    const int row_own = row_block + w * kGroupM;
    const int row_group = row_own < 0 ? num_rows : row_own;
    const int row_group_last = min(row_group + kGroupM, num_rows);
    const share_t share =
        kDynamic
            ? tile_infos[num_items & 1].share()
            : share_of(tiles_of(band, row_block, row_block, seqlen_k), item, schedule);
    const tiles_t tiles = share.tiles;
    const int count = tiles.last - tiles.first;
    const int row_thread = row_group + threadIdx.x / kWarpSize % 4 * 16 + lane / 4;

    // Keys [first, last) that this thread's rows see, from its first column on.
    int first[2] = {}, last[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kDynamic) {
        const int i = query_of(row_thread + 8 * r);
        const tiles_t keys = keys_of(band, i, i + 1);
        first[r] = keys.first - lane % 4 * 2;
        last[r] = keys.last - lane % 4 * 2;
      } else {
        last[r] = seqlen_k - lane % 4 * 2;
      }
      if (kSplit && share.empty) last[r] = 0;
    }
    // Of the block's tiles, n = 0 is the last one. This warpgroup skips what only
    // others see, masks up to `masked_end`, and again from `whole_end` on.
    auto skip_v = [&](int n) {
      const unsigned number = num_tiles + n, stage = stage_of(number);
      wait(v_ring.full_at(stage), parity_of(number));
      if (elected) ptx::mbarrier_arrive(v_ring.empty_at(stage));
    };
    int skipped = 0, masked_end = 1, whole_end = count;
    if constexpr (kBounds > 0) {
      const tiles_t own = tiles_of(band, row_group, row_group_last, seqlen_k);
      skipped = tiles.last - max(own.last, tiles.first + 1);
      skipped = max(skipped, 0);
      const int i_first = query_of(row_group);
      const int whole_last = keys_of(band, i_first, i_first + 1).last / kBlockN;
      masked_end = min(count, tiles.last - whole_last);
      if constexpr (kBounds == 2) {
        const int i_last = query_of(row_group_last - 1);
        const int whole_first =
            (keys_of(band, i_last, i_last + 1).first + kBlockN - 1) / kBlockN;
        whole_end = i_last < band.num_queries ? tiles.last - whole_first : 0;
        whole_end = min(count, whole_end);
      }
#pragma unroll 1
      for (int n = 0; n < skipped; ++n) {
        const unsigned number = num_tiles + n, stage = stage_of(number);
        wait(k_ring.full_at(stage), parity_of(number));
        if (elected) ptx::mbarrier_arrive(k_ring.empty_at(stage));
        // Before the turn: whoever has it may wait for a later tile in this place.
        if (n >= kLateV) skip_v(n - kLateV);
        take_turn();
        pass_turn();
        if constexpr (kHasKeyRing) {
          wait(key_ring.full_at(number % kKeySlots), number / kKeySlots & 1);
          if (elected) ptx::mbarrier_arrive(key_ring.empty_at(number % kKeySlots));
        }
      }
    }

    // What products are added to, for tile number n of the item; whether something is
    // left for finish_scores() to add.
    auto begin_scores = [&](int n) {
      if constexpr (kPresetBias) {
        const unsigned number = num_tiles + n, slot = number % kKeySlots;
        wait(key_ring.full_at(slot), number / kKeySlots & 1);
        set_terms(s, key_terms[slot].terms + lane % 4 * 2);
        return key_terms[slot].some_late;
      }
      return false;
    };
    // A bias that comes with its tile of k.
    [[maybe_unused]] key_bias_t key_bias;
    auto load_key_bias = [&](unsigned stage) {
      if constexpr (kBiasBehind) key_bias.load(key_terms[stage].terms + lane % 4 * 2);
    };
    auto add_key_bias = [&] {
      if constexpr (kBiasBehind) key_bias.add_to(s);
    };
    // Products into final scores.
    auto finish_scores = [&](int n, bool late, auto masked) {
      const int j0 = (tiles.last - 1 - n) * kBlockN;
      if constexpr (kPresetBias) {
        const unsigned slot = (num_tiles + n) % kKeySlots;
        if (late) add_late_terms(s, key_terms[slot].late + lane % 4 * 2);
        __syncwarp();
        if (elected) ptx::mbarrier_arrive(key_ring.empty_at(slot));
      }
      // Where nothing is masked, a softcap alone is left to exponentiate_capped().
      if constexpr (kHasTerms && (!kCapOnly || masked.value)) {
        const int i[2] = {query_of(min(row_thread, num_rows - 1)),
                          query_of(min(row_thread + 8, num_rows - 1))};
        const int j = j0 + lane % 4 * 2;
        const unsigned number = num_tiles + n, slot = number % kKeySlots;
        if constexpr (kTermsOfKeys) {
          wait(key_ring.full_at(slot), number / kKeySlots & 1);
        }
        add_terms<masked.value>(s, scores, params, inputs.cap,
                                key_terms[slot].terms + lane % 4 * 2, i, j,
                                seqlen_k - j);
        if constexpr (kTermsOfKeys) {
          __syncwarp();
          if (elected) ptx::mbarrier_arrive(key_ring.empty_at(slot));
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
      const bool late = begin_scores(skipped);
      wait(k_ring.full_at(stage), parity_of(number));
      ptx::wgmma_fence();
      multiply_qk(s, q_tile, k_tiles + stage * (kBytesK / 16));
      ptx::wgmma_commit_group();
      load_key_bias(stage);
      if constexpr (kBounds > 0) {
#pragma unroll 1
        for (int n = max(skipped - kLateV, 0); n < skipped; ++n) skip_v(n);
      }
      ptx::wgmma_wait_group<0>();
      keep_order(s);
      add_key_bias();
      if (elected) {
        ptx::mbarrier_arrive(k_ring.empty_at(stage));
        if (skipped == count - 1) ptx::mbarrier_arrive(q_ring.empty_at(w));
      }
      finish_scores(skipped, late, flag_t<true>());
      raise(row, s, to_log2, inputs.margin);
      exponentiate(row, s, to_log2);
      round_to(p, s);
    }
    // The others: s of tile n, and o += p v of tile n - 1 beside its softmax.
    auto step = [&](int n, auto masked) {
      const unsigned number = num_tiles + n, stage = stage_of(number);
      const unsigned before = number - 1, stage_v = stage_of(before);
      wait(k_ring.full_at(stage), parity_of(number));
      const bool late = begin_scores(n);
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
      load_key_bias(stage);
      ptx::wgmma_wait_group<1>();
      keep_order(s);
      add_key_bias();
      if constexpr (kGivesBackAtOnce) {
        ptx::mbarrier_arrive_if(elected, k_ring.empty_at(stage));
        ptx::mbarrier_arrive_if(elected & (n == count - 1), q_ring.empty_at(w));
      } else if (elected) {
        ptx::mbarrier_arrive(k_ring.empty_at(stage));
        if (n == count - 1) ptx::mbarrier_arrive(q_ring.empty_at(w));
      }
      finish_scores(n, late, masked);
      raised_t raised;
      if constexpr (kCapOnly && !masked.value) {
        raised = raise(row, s, to_log2, inputs.margin, capped_t{inputs.cap});
      } else {
        raised = raise(row, s, to_log2, inputs.margin);
      }
      // ptxas moves this wait up to the last branch, which is the one in raise().
      ptx::wgmma_wait_group<0>();
      keep_order(o);
      if (elected) ptx::mbarrier_arrive(v_ring.empty_at(stage_v));
      if constexpr (kCapOnly && !masked.value) {
        exponentiate_capped(row, s, inputs.cap, !raised.passes);
      } else {
        exponentiate(row, s, to_log2);
      }
      round_to(p, s);  // only now: a product in flight was reading p
      if (raised.moves) {
#pragma unroll
        for (int e = 0; e < kOutputs; ++e) o[e] *= row.alpha[row_of(e)];
      }
    };
    int n = skipped + 1;
    if constexpr (kBounds > 0) {
#pragma unroll 1
      for (; n < masked_end; ++n) step(n, flag_t<true>());
    }
    // Counted down apart: a comparison of n would have to leave the uniform registers.
    unsigned left = max(whole_end - n, 0);
#pragma unroll 1
    for (; left > 0; ++n) {
      --left;
      ptx::launder(left);
      step(n, flag_t<false>());
    }
    if constexpr (kBounds == 2) {
#pragma unroll 1
      for (; n < count; ++n) step(n, flag_t<true>());
    }

    // The last product.
    const unsigned last_number = num_tiles + count - 1,
                   last_stage = stage_of(last_number);
    wait(v_ring.full_at(last_stage), parity_of(last_number));
    num_tiles += count;
    ++num_items;
    ptx::wgmma_fence();
    multiply_pv(o, p, v_tiles + last_stage * (kBytesV / 16), count > skipped + 1);
    ptx::wgmma_commit_group();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row.l[r] += row.rest[r];
      row.l[r] += shuffle_xor(row.l[r], 1);
      row.l[r] += shuffle_xor(row.l[r], 2);
    }
    // The place again: in the loop there are no registers for it.
    const int number = static_cast<int>(num_items) - 1;
    const tile_coord_t here = kDynamic ? tile_infos[number & 1].place() : at;
    float inverse[2];
    bool seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row_r = row_thread + 8 * r, i = query_of(row_r);
      const bool is_query =
          kDynamic ? i < tile_infos[number & 1].band.num_queries : i < seqlen_q;
      seen[r] = is_query && row.l[r] != 0;
      inverse[r] = ptx::rcp_approx_ftz(row.l[r]);
      if (!kHasSinks && lse == nullptr) continue;
      // lse has to know to the last bit what was subtracted; l takes what a float of it
      // leaves over. Above a million that is less than a unit of lse.
      const double m = rounded_product(row.m[r], to_log2) * inputs.from_log2;
      const float high = static_cast<float>(m);
      const float low = fabsf(high) < 1e6f ? static_cast<float>(m - high) : 0.f;
      const float l = row.l[r] * (1 + low);
      float lse_r = seen[r] ? high + log_of(l) : -infinity<float>();
      if constexpr (kHasSinks && !kSplit) {  // of parts, who merges them lets it join
        const finished_t finished = scores.finish(i, high, l);
        inverse[r] = finished.inverse * (1 + low);
        lse_r = finished.lse;
      }
      if (lse != nullptr && lane % 4 == 0 && row_r < num_rows) {
        const index_t number = row_number(here, row_r, item & ~kCareful);
        if constexpr (kSplit) {
          lse[number] = seen[r] ? m + log_of(row.l[r]) : -infinity<double>();
        } else {
          lse[number] = lse_r;
        }
      }
    }
    ptx::wgmma_wait_group<0>();
    keep_order(o);
    if (elected) ptx::mbarrier_arrive(v_ring.empty_at(last_stage));

    // o / l. A word holds two columns: word t of a lane 8 t + lane % 4 * 2 of every 32.
    unsigned odd[2] = {};  // not 0 where a result is not finite
    if constexpr (kSplit) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row_r = row_thread + 8 * r;
        if (row_r < num_rows) {
          float* const out_row =
              reinterpret_cast<float*>(out) +
              row_number(here, row_r, item & ~kCareful) * params.head_dim_v;
#pragma unroll
          for (int e = 2 * r; e < kOutputs; e += 4) {
            const int column = column_of(e) + lane % 4 * 2;
            const float2 pair =
                seen[r] ? make_float2(o[e] * inverse[r], o[e + 1] * inverse[r])
                        : make_float2(0, 0);
            odd[r] |= !(is_finite(pair.x) & is_finite(pair.y));
            if (column < params.head_dim_v) {
              *reinterpret_cast<float2*>(out_row + column) = pair;
            }
          }
        }
      }
    } else {
      elem_t* const out_rows = here.at(reinterpret_cast<elem_t*>(out), params.out);
      const int steps = static_cast<int>(params.out.row | params.head_dim_v) |
                        (kPack > 1 ? static_cast<int>(params.out.head) : 0);
      const bool aligned =
          (static_cast<int>(reinterpret_cast<unsigned long long>(out_rows)) % 16 |
           steps % 8) == 0 &&
          params.out.col == 1;
      // A word: two columns of row r of this thread.
      auto word_of = [&](int e, int r) {
        const unsigned word = pair16_t::from(o[e + 1] * inverse[r], o[e] * inverse[r]);
        const unsigned shown = seen[r] ? word : 0;
        if constexpr (kHidesSome) odd[r] = pair16_t::fma(shown, 0, odd[r]);
        return shown;
      };
      if constexpr (kStagesOut) {
        const int row_warp = row_thread - lane / 4;
        const unsigned staged = smem_out + (threadIdx.x / kWarpSize - 4) * kStagedBytes;
#pragma unroll
        for (int first = 0; first < kHeadDimV; first += kStagedColumns) {
          __syncwarp();  // what was staged there before has been read
#pragma unroll
          for (int column = 0; column < kStagedColumns; column += 16) {
            const int e = (first + column) / 2;
            ptx::stmatrix_x4(staged_row(staged, lane) + column * 2, word_of(e, 0),
                             word_of(e + 2, 1), word_of(e + 4, 0), word_of(e + 6, 1));
          }
          __syncwarp();
          store_staged(staged,
                       out_rows + row_warp * params.out.row + first * params.out.col,
                       params.out, aligned, num_rows - row_warp,
                       int(params.head_dim_v) - first, lane);
        }
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row_r = row_thread + 8 * r;
          const bool exists = row_r < num_rows;
          elem_t* const out_row = out_rows + query_of(row_r) * params.out.row +
                                  row_r % kPack * params.out.head;
#pragma unroll
          for (int e = 0; e < kOutputs; e += 16) {
            unsigned words[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
              words[t] = word_of(e + 4 * t + 2 * r, r);
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
      }
    }
    if constexpr (kHidesSome) {
      // Values of keys that are not seen may have come in as 0 * NaN.
      bool again = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) again |= odd[r] != 0 && is_finite(row.l[r]);
      bool special = false;
      if (item < kCareful) {
        if (again) orders.again[number % kRemembered] = item;
      } else {
        special = orders.special[number & 1] == number;
      }
      if (special) {
        __syncwarp();  // what the warp has stored is there for all its lanes
        add_specials(inputs.v, out, here, row_block, w, scores_t(here, SCORE_ARGUMENTS),
                     tile_infos[number & 1].seen(), params,
                     tile_infos[number & 1].share().tiles, item & ~kCareful,
                     row_number);
      }
    }
#ifdef MERGE
    __threadfence();
    ptx::bar_sync<128 * kNumGroups>(kMergeBarrier);  // the part is in memory
    if (threadIdx.x == 128) {
      const int number_of_tile = unsigned(item & ~kCareful) / schedule.num_splits;
      int* const arrived = counter->arrived() + number_of_tile;
      // A part that will be computed again does not count yet.
      const bool again =
          kHidesSome && item < kCareful && orders.again[number % kRemembered] >= 0;
      const bool last = !again && atomicAdd(arrived, 1) == schedule.num_splits - 1;
      if (last) *arrived = 0;  // ready for the next launch
      is_last_part = last;
      __threadfence();
    }
    ptx::bar_sync<128 * kNumGroups>(kMergeBarrier);
    if (is_last_part) {
      const scores_t finished(here, SCORE_ARGUMENTS);
#pragma unroll 1
      for (int row = max(row_block, 0) + int(threadIdx.x - 128) / kWarpSize;
           row < min(row_block + kBlockM, num_rows); row += 4 * kNumGroups) {
        const int i = query_of(row);
        merge_row(reinterpret_cast<const float*>(out),
                  reinterpret_cast<const double*>(lse),
                  here.at(merged, params.out) + i * params.out.row +
                      row % kPack * params.out.head,
                  merged_lse, (here.row_of_heads + row % kPack) * params.seqlen_q + i,
                  static_cast<index_t>(schedule.num_heads) * kPack * params.seqlen_q,
                  schedule.num_splits,
                  finished.is_query(i) ? finished.sink(i) : -infinity<float>(), params);
      }
    }
#endif
    if constexpr (kDynamic) {
      __syncwarp();
      if (elected) ptx::mbarrier_arrive(item_ring.empty_at(number & 1));
    }
    item = next_item(item);
  }
}

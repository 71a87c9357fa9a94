// SPDX-License-Identifier: MIT
// attention_hopper: FlashAttention-3 forward with TMA and wgmma, for sm_90a.
//
// Algorithm  FlashAttention-3 forward (Shah et al. 2024). Tiles of keys run from last
//            to first; o += p v of one tile overlaps with s = q k^T and the softmax of
//            the next. The reference m of a row moves only when a score exceeds it by
//            more than 8 in log2, so most steps need no rescaling of o.
// Grid       Persistent, one block per multiprocessor. A work tile is a tile of queries
//            of one head. Blocks take work tiles from a counter where these differ in
//            length, otherwise in a fixed stride.
// Threads    One thread of warpgroup 0 issues the TMA loads; each other warpgroup
//            computes 64 queries. With kPingpong their products alternate (pingpong).
// Tiles      q     kGroupM x kHeadDim per warpgroup  shared
//            k, v  kBlockN x kHeadDim (kHeadDimV)    shared, kStages of each
//            bias  kBlockM x kBlockN                 shared, kStages of them, or none
//            s, p, o  registers, in the layout of wgmma
//            out   16 x kStagedColumns per warp      shared, staging for the stores
// Memory     global: q and out once; k and v once per work tile, mostly from L2
// Numbers    s, m, l, o in float32; p is rounded to elem_t before p v
// Limits     q, k, v must fit a tensor map (_cuda/tensor_map.py); seqlen_k >= 1; work
//            tiles, queries and keys are counted in 32 bits
#include "attention/sm90/epilogue.cuh"
#include "attention/sm90/nonfinite_values.cuh"
#include "attention/sm90/score_arguments.cuh"
#include "attention/sm90/score_mod.cuh"
#include "attention/sm90/softmax.cuh"
#include "attention/sm90/split_kv.cuh"
#include "ptx/barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma_shapes.cuh"

// setmaxnreg redistributes the registers of the block, 65536 / kNumThreads per thread.
// Lengths and score options cost the producer registers: it computes which tiles of
// keys a work tile needs.
constexpr int kProducerRegisters = kNumGroups == 4 ? 32
                                   : kNumGroups == 3 && (kBoundsPerTile || kHasTerms)
                                       ? 56
                                   : kNumGroups == 3             ? 32
                                   : kBoundsPerTile && kHasTerms ? 56
                                                                 : 40;
constexpr int kConsumerRegisters = kNumGroups == 2   ? (504 - kProducerRegisters) / 2
                                   : kNumGroups == 3 ? (512 - kProducerRegisters) / 3
                                                     : 112;
static_assert(kNumGroups == 1 || kProducerRegisters + kNumGroups * kConsumerRegisters <=
                                     65536 / kNumThreads / 8 * 8 * (kNumGroups + 1));

// A short launch mostly waits for its first keys: find the first work tile early.
constexpr bool kFindsFirst = kNumGroups == 1 && !kDynamic;

// How many tiles of v a warpgroup that skips keys may leave unreleased until its first
// product has started. The producer loads tile n of k after tile n - 2 of v, so it
// never waits for these.
constexpr int kLateV = 2;
static_assert(kNumGroups == 1 || kStages >= kLateV);
// A list entry is read again for v, when the next tile of k has been loaded.
static_assert(!kListsTiles || kStages >= 2);

// Keep the stage of a tile of v in a register until the tile is given back. Otherwise
// it is computed anew there, and ptxas moves that behind the exponentials, while the
// producer waits. At 64 columns this gains up to 1 %; at 128, tiles of 80 keys without
// pingpong lose 3 to 5 %. Lengths, and score options but a softcap, were not timed.
constexpr bool kKeepsStage = kHeadDim == 64 && kNumGroups == 3 && !kBoundsPerTile &&
                             (kCapOnly || !(kChangesScores || kScaleScores));

// Release k and q by predicated arrivals, without a branch. With more stages, or where
// bias and mask have a ring of their own, this was slower: the assembler moves more
// instructions between the waits of pingpong. With lists it saves 5 instructions.
constexpr bool kGivesBackAtOnce =
    kNumGroups > 1 && (kStages == 2 || kListsTiles) && !kHasKeyRing;

// s = q k^T, or s += q k^T with kPresetBias. A step covers 16 columns, 32 bytes of each
// 128-byte row.
__device__ __forceinline__ void multiply_qk(float (&s)[kScores], unsigned long long q,
                                            unsigned long long k) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    ptx::wgmma_t<elem_t, kBlockN>::ss(s, q + (chunk * kGroupM * 128 + inside) / 16,
                                      k + (chunk * kBlockN * 128 + inside) / 16,
                                      kPresetBias || step > 0);
  }
}

// o += p v, or o = p v. A step covers 16 rows of v, 128 bytes each.
__device__ __forceinline__ void multiply_pv(float (&o)[kOutputs],
                                            const unsigned (&p)[kBlockN / 16][4],
                                            unsigned long long v, bool accumulate) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    ptx::wgmma_t<elem_t, kHeadDimV>::rs(o, p[step], v + step * (16 * 128 / 16),
                                        step > 0 || accumulate);
  }
}

// One copy of the code for masked tiles: the first of a work tile and those on both
// sides of the whole ones. A kernel with options mostly consists of such copies, and
// the time to compile it follows its size. From 192 columns on it would spill.
constexpr bool kOneMaskedStep =
    kHasTerms && !kCapOnly && kBounds > 0 && !kListsTiles && kHeadDimV <= 128;

// Arrivals per warp at an mbarrier. racecheck of compute-sanitizer does not understand
// that one lane arrives for its warp after __syncwarp(); for it every lane arrives.
constexpr int kArrivals = IS_GIVEN(EACH_LANE_ARRIVES) ? kWarpSize : 1;

// What depends on the memory of q, k and v. HOPPER_INPUTS of
// _attention/gpu/sm90/forward.py is the same struct on the host.
struct alignas(64) inputs_t {
  ptx::tensor_map_t q_map, k_map, v_map;
  schedule_t schedule;
  const elem_t* q;  // (batch, heads, queries, head_dim)
  const elem_t* k;  // (batch, kv heads, keys, head_dim)
  const elem_t* v;  // (batch, kv heads, keys, head_dim_v)
  double
      from_log2;  // from exponents of 2 back to the unit of lse, multiplied by to_log2
  float to_log2;  // from scores, or from q.k, to exponents of 2
  float margin;   // kLazyLog2 in the unit of the scores
  cap_t cap;
  float scale;  // of params_t, rounded
};

// HOPPER_BIAS_INPUTS there.
struct with_bias_t : inputs_t {
  ptx::tensor_map_t bias_map;
};
template <bool> struct inputs_of {
  using type = inputs_t;
};
template <> struct inputs_of<true> {
  using type = with_bias_t;
};
using all_inputs_t = inputs_of<kBiasTiles>::type;

// Output of the combined splits.
#ifdef COMBINE
#define COMBINED_PARAMETERS                                                \
  elem_t* __restrict__ combined, /* (batch, heads, queries, head_dim_v) */ \
      float* __restrict__ combined_lse,
#define COMBINED_ARGUMENTS combined, combined_lse
#else
#define COMBINED_PARAMETERS
#define COMBINED_ARGUMENTS nullptr, nullptr
#endif

// The arguments of the kernel.
struct arguments_t {
  const all_inputs_t& inputs;
  out_t* out;
  lse_t* lse;
  counter_t* counter;
  elem_t* combined;
  float* combined_lse;
  tile_lists_t tile_lists;
  mask_bits_t mask_bits;
  score_arguments_t score;

  __device__ __forceinline__ const schedule_t& schedule() const {
    return inputs.schedule;
  }
  __device__ __forceinline__ const params_t& params() const { return score.params; }
  // The tiles of keys of a work tile: those its queries see by their position, or
  // entries of its list. Entries from 0 on are of tiles that all queries see whole.
  __device__ __forceinline__ tiles_t tiles_of(const tile_coord_t& at,
                                              const mask_bounds_t& bounds,
                                              int row_first, int row_last) const {
    if constexpr (kListsTiles) {
      const unsigned* const list = list_of(at);
      return {-num_at_end(list), num_listed(list)};
    }
    return ::tiles_of(bounds, row_first, row_last, params().seqlen_k);
  }
  __device__ __forceinline__ const unsigned* list_of(const tile_coord_t& at) const {
    return tile_lists.of(at, params().num_heads);
  }
  __device__ __forceinline__ listed_tile_t listed(const tile_coord_t& at, int n) const {
    return tile_lists.entry(list_of(at), n);
  }
};

// --- shared memory

struct shared_t {
  volatile tile_info_t* tile_infos;  // two, alternating
  volatile orders_t& orders;
  key_terms_t* key_terms;     // kKeySlots
  volatile unsigned* listed;  // list entry of each tile of k, by stage
  bool& is_last_part;
  unsigned char* start;  // of the dynamic shared memory
};

constexpr int kBarriers =
    2 * kNumGroups + 4 * kStages + 4 + kOrders + (kHasKeyRing ? 2 * kKeySlots : 0);

// Shared memory addresses.
struct addresses_t {
  unsigned q, k, v, bias, out;  // tiles
  ring_t q_ring, k_ring, v_ring, tile_ring, key_ring;
  unsigned landed;  // barriers of tiles of v that must be scrubbed

  __device__ __forceinline__ addresses_t(const unsigned char* start,
                                         const unsigned long long* barriers) {
    q = swizzled_tiles(start);
    k = q + kNumGroups * kBytesQ;
    v = k + kStages * kBytesK;
    bias = v + kStages * kBytesV;
    out = bias + kStages * kBytesBias;
    unsigned first = ptx::shared_address(barriers);
    // Keeps the address in a register; otherwise it is recomputed in each step. With
    // 128 columns the score options need that register.
    if constexpr (kNumGroups > 1 && kHeadDimV != 128) ptx::launder(first);
    constexpr int kBarrier = ring_t::kBytes;
    q_ring = {first, first + kNumGroups * kBarrier};
    k_ring = {q_ring.empty + kNumGroups * kBarrier,
              q_ring.empty + (kNumGroups + kStages) * kBarrier};
    v_ring = {k_ring.empty + kStages * kBarrier, k_ring.empty + 2 * kStages * kBarrier};
    tile_ring = {v_ring.empty + kStages * kBarrier,
                 v_ring.empty + (kStages + 2) * kBarrier};
    landed = tile_ring.empty + 2 * kBarrier;
    key_ring = {landed + kOrders * kBarrier, landed + (kOrders + kKeySlots) * kBarrier};
  }

  __device__ __forceinline__ void init_barriers(volatile orders_t& orders) const {
    for (int n = 0; n < kNumGroups; ++n) {
      ptx::mbarrier_init(q_ring.full_at(n), 1);
      ptx::mbarrier_init(q_ring.empty_at(n), 4 * kArrivals);
    }
    for (int n = 0; n < kStages; ++n) {
      ptx::mbarrier_init(k_ring.full_at(n), 1 + kBiasBehind * kArrivals + kBiasTiles);
      ptx::mbarrier_init(k_ring.empty_at(n), 4 * kNumGroups * kArrivals);
      ptx::mbarrier_init(v_ring.full_at(n), 1);
      ptx::mbarrier_init(v_ring.empty_at(n), 4 * kNumGroups * kArrivals);
    }
    for (int n = 0; n < 2; ++n) {
      ptx::mbarrier_init(tile_ring.full_at(n), 1);
      ptx::mbarrier_init(tile_ring.empty_at(n),
                         (4 * kNumGroups + kTermsOfKeys) * kArrivals);
      orders.special[n] = -1;
    }
    orders.count = 0;
    orders.looked_at = 0;
    for (int n = 0; n < (kHidesSome ? kOrders : 0); ++n) {
      ptx::mbarrier_init(landed + n * ring_t::kBytes, 1);
    }
    for (int n = 0; n < (kHasKeyRing ? kKeySlots : 0); ++n) {
      ptx::mbarrier_init(key_ring.full_at(n), kArrivals);
      ptx::mbarrier_init(key_ring.empty_at(n), 4 * kNumGroups * kArrivals);
    }
    ptx::fence_mbarrier_init();
  }
};

// --- producer warpgroup

// One thread issues the TMA loads, in the order k0, q, k1, v0, k2, v1, ...: the
// consumers need k one tile before v.
struct producer_t {
  const arguments_t& args;
  const shared_t& shared;
  const addresses_t& smem;
  unsigned num_tiles = 0;  // of k and v so far; gives stage and parity
  unsigned num_done = 0;   // work tiles so far

  // State that does not fit into registers.
  __device__ __forceinline__ volatile tile_info_t& info() const {
    return shared.tile_infos[num_done & 1];
  }

  // Waits until the slot of the next work tile is free, and returns its number. A work
  // tile that must be recomputed takes precedence over `number`.
  __device__ __forceinline__ int claim(int number) const {
    volatile orders_t& orders = shared.orders;
    const unsigned slot = num_done & 1;
    wait(smem.tile_ring.empty_at(slot), (num_done >> 1 & 1) ^ 1);
    if constexpr (kHidesSome) {
      unsigned done = num_done == 0 ? 0 : num_done - 1;
      if (number >= args.schedule().num_work_tiles &&
          num_done > 0) {  // this was the last one
        wait(smem.tile_ring.empty_at(slot ^ 1), done >> 1 & 1);
        done = num_done;
      }
      const int again = find_again(orders, done);
      orders.careful = again >= 0;
      if (again >= 0) number = again | kCareful;
      orders.again[num_done % kRemembered] = -1;
    }
    shared.tile_infos[slot].work_tile = number;
    return number;
  }
  __device__ __forceinline__ void publish(const tile_coord_t& at, int number,
                                          int row_first, int row_last) const {
    volatile tile_info_t& info = this->info();
    info.put(at);
    if (number < args.schedule().num_work_tiles) {
      if (kBoundsPerTile) info.put(args.score.scores_of(at).mask_bounds(0, 0));
      if (kListsTiles) info.list = args.list_of(at);
      info.put(split_of(args.tiles_of(at, info.seen(), row_first, row_last), number,
                        args.schedule()));
    }
    ptx::mbarrier_arrive(smem.tile_ring.full_at(num_done & 1));
  }

  // With two batch axes, or a list, the coordinates do not fit into registers.
  __device__ __forceinline__ tile_coord_t coord(const tile_coord_t& at) const {
    if constexpr (kDynamic && (kBatchDims > 1 || kListsTiles)) return info().coord();
    return at;
  }
  // Of keys and values alone: with a list the loads of this thread set the pace.
  __device__ __forceinline__ tile_coord_t coord_of_keys(const tile_coord_t& at) const {
    if constexpr (!kListsTiles) return coord(at);
    tile_coord_t keys;
    keys.kv_head = info().kv_head;
#pragma unroll
    for (int axis = 0; axis < kBatchDims; ++axis) {
      keys.batch[axis] = info().batch[axis];
    }
    return keys;
  }
  // Loads tile `number` of k, counted over all work tiles; it starts at key `first`.
  __device__ __forceinline__ void load_k(const tile_coord_t& at, unsigned number,
                                         int first, listed_tile_t listed = {}) const {
    const unsigned stage = stage_of(number);
    wait(smem.k_ring.empty_at(stage), parity_of(number) ^ 1);
    const tile_coord_t from = coord_of_keys(at);
    int batch[2];
    batch_coordinates(batch, from, args.params().k);
    load_tile<kBlockN, kChunksQk, kReadOnce, kBoxN>(
        smem.k + stage * kBytesK, args.inputs.k_map, smem.k_ring.full_at(stage), first,
        coordinate(from.kv_head, args.params().k.head), batch);
    if constexpr (kBiasTiles) load_bias(args.inputs, at, stage, first);
  }
  // Loads the bias of this block's queries and the keys from `first` on.
  template <typename Inputs>
  __device__ __forceinline__ void load_bias(const Inputs& inputs,
                                            const tile_coord_t& at, unsigned stage,
                                            int first) const {
    const tile_coord_t from = coord(at);
    const operand_t& operand = args.params().bias;
    int batch[2];
    batch_coordinates(batch, from, operand);
    const unsigned barrier = smem.k_ring.full_at(stage);
    ptx::mbarrier_arrive_expect_tx(barrier, kBytesBias);
#pragma unroll
    for (int chunk = 0; chunk < kChunksBias; ++chunk) {
      ptx::cp_async_bulk_tensor_5d(
          smem.bias + stage * kBytesBias + chunk * (kBlockM * 128), inputs.bias_map,
          barrier, first + chunk * 64, first_row(from, args.schedule()),
          coordinate(from.head, operand.head), batch[0], batch[1]);
    }
  }
  __device__ __forceinline__ void load_q(const tile_coord_t& at, int row_block) const {
    const tile_coord_t from = coord(at);
    int batch[2];
    batch_coordinates(batch, from, args.params().q);
    for (int g = 0; g < kNumGroups; ++g) {
      wait(smem.q_ring.empty_at(g), (num_done & 1) ^ 1);
      const int row = row_block + g * kGroupM;
      if constexpr (kPack == 1) {
        load_tile<kGroupM, kChunksQk>(
            smem.q + g * kBytesQ, args.inputs.q_map, smem.q_ring.full_at(g), row,
            coordinate(from.head, args.params().q.head), batch);
      } else {  // axes: columns, packed heads, queries, other heads, batch
        const int others[2] = {int(from.head) / kPack, batch[0]};
        load_tile<kGroupM, kChunksQk, false, kGroupM, kGroupM / kPack * kPack>(
            smem.q + g * kBytesQ, args.inputs.q_map, smem.q_ring.full_at(g), 0,
            query_of(row), others);
      }
    }
  }
  // Loads tile `tile` of v. One that must be scrubbed signals the scrubbers instead.
  __device__ __forceinline__ void load_v(const tile_coord_t& at, unsigned number,
                                         int tile) const {
    volatile orders_t& orders = shared.orders;
    const unsigned stage = stage_of(number);
    wait(smem.v_ring.empty_at(stage), parity_of(number) ^ 1);
    unsigned arrival = smem.v_ring.full_at(stage);
    if (kHidesSome && orders.careful &&
        !is_in(tile, {orders.whole_first, orders.whole_last})) {
      const unsigned slot = orders.count % kOrders;
      if (orders.count == 0) ptx::barrier_arrive<kScrubbers + kWarpSize>(kWakeBarrier);
      orders.count = orders.count + 1;
      orders.stage[slot] = stage;
      orders.work_tile[slot] = num_done;
      arrival = smem.landed + slot * ring_t::kBytes;
    }
    const tile_coord_t from = coord_of_keys(at);
    int batch[2];
    batch_coordinates(batch, from, args.params().v);
    load_tile<kBlockN, kChunksV, kReadOnce, kBoxN>(
        smem.v + stage * kBytesV, args.inputs.v_map, arrival, tile * kBlockN,
        coordinate(from.kv_head, args.params().v.head), batch);
  }

  // Loads the list entries of this work tile, last one first. Each is read one step
  // ahead, because the list lies in global memory.
  template <typename AfterQ>
  __device__ __forceinline__ void load_listed(const tile_coord_t& at, int count,
                                              const AfterQ& after_q) const {
    auto entry = [&](int n) {
      const volatile tile_info_t& here = info();  // it does not fit into registers
      return args.tile_lists.entry(here.list, max(here.last - 1 - n, here.first));
    };
    listed_tile_t now = entry(0);
    for (int n = 0; n <= count; ++n) {
      const listed_tile_t next = entry(n + 1);
      if (n < count) {
        const unsigned number = num_tiles + n, stage = stage_of(number);
        wait(smem.k_ring.empty_at(stage), parity_of(number) ^ 1);
        shared.listed[stage] = now.word;
        load_k(at, number, now.tile() * kBlockN);
      }
      if (n == 0) {
        load_q(at, first_row(coord(at), args.schedule()));
        after_q();
      } else {
        const unsigned before = num_tiles + n - 1;
        const listed_tile_t tile = {shared.listed[stage_of(before)]};
        load_v(at, before, tile.tile());
      }
      now = next;
    }
  }

  __device__ __forceinline__ void produce(const tile_coord_t& first_coord) {
    volatile orders_t& orders = shared.orders;
    const schedule_t& schedule = args.schedule();
    const params_t& params = args.params();
    orders.next = blockIdx.x;
    if constexpr (kDynamic && !kBoundsPerTile) {
      const mask_bounds_t bounds =
          args.score.scores_of(tile_coord_t()).mask_bounds(0, 0);
      for (int n = 0; n < 2; ++n) shared.tile_infos[n].put(bounds);
    }
    while (true) {
      int number = orders.next;
      if constexpr (kDynamic) number = claim(number);
      const bool careful = number >= kCareful;
      if (careful) number -= kCareful;
      const tile_coord_t at = kFindsFirst && num_done == 0
                                  ? first_coord
                                  : coord_of(number, schedule, params);
      const int row_block = first_row(at, schedule);
      const int row_first = max(row_block, 0);
      const int row_last = min(row_block + kBlockM, int(params.seqlen_q) * kPack);
      if constexpr (kDynamic) publish(at, number, row_first, row_last);
      if (number >= schedule.num_work_tiles) break;
      int next = number;
      if (kDynamic && !careful) next = atomicAdd(&args.counter->next, 1);
      if (kHidesSome && orders.careful) {
        const tiles_t whole =
            whole_tiles_of(info().seen(), row_first, row_last, params.seqlen_k);
        orders.whole_first = whole.first;
        orders.whole_last = whole.last;
      }
      const tiles_t tiles =
          kDynamic ? info().split().tiles
                   : split_of(tiles_of({}, row_first, row_last, params.seqlen_k),
                              number, schedule)
                         .tiles;
      const int count = tiles.last - tiles.first;
      auto set_next = [&] {  // the atomic has returned by now
        if (!careful) orders.next = next + gridDim.x;
      };
      if constexpr (kListsTiles) {
        load_listed(at, count, set_next);
      } else {
        const tile_order_t order = order_of(tiles, args.score.scores_of(at), row_last);
        for (int n = 0; n <= count; ++n) {
          if (n < count) load_k(at, num_tiles + n, order.tile(n) * kBlockN);
          if (n == 0) {
            load_q(at, row_block);
            set_next();
          } else {
            load_v(at, num_tiles + n - 1, order.tile(n - 1));
          }
        }
      }
      num_tiles += count;
      ++num_done;
    }
    finish();
  }

  __device__ __forceinline__ void finish() const {
    if constexpr (kDynamic) {
      // The last block to finish resets the counter for the next launch.
      if (atomicAdd(&args.counter->finished, 1) == int(gridDim.x) - 1) {
        args.counter->next = 0;
        args.counter->finished = 0;
        __threadfence();
      }
    }
    if constexpr (kHidesSome) {
      volatile orders_t& orders = shared.orders;
      if (orders.count == 0) ptx::barrier_arrive<kScrubbers + kWarpSize>(kWakeBarrier);
      const unsigned slot = orders.count % kOrders;
      orders.stage[slot] = -1;
      ptx::mbarrier_arrive(smem.landed + slot * ring_t::kBytes);
    }
  }
};

// One warp reads bias and mask where these are the same for all queries.
__device__ __forceinline__ void read_key_terms(const arguments_t& args,
                                               const shared_t& shared,
                                               const addresses_t& smem) {
  volatile tile_info_t* const tile_infos = shared.tile_infos;
  const params_t& params = args.params();
  const int lane = threadIdx.x % kWarpSize;
  const bool elected = kArrivals > 1 || lane == 0;
  const ring_t& ring = kBiasBehind ? smem.k_ring : smem.key_ring;
  [[maybe_unused]] const inverse_t inverse_scale(params.scale);
  unsigned num_tiles = 0, num_done = 0;
  wait(smem.tile_ring.full_at(0), 0);
  while ((tile_infos[num_done & 1].work_tile & ~kCareful) <
         args.schedule().num_work_tiles) {
    const tile_coord_t at = tile_infos[num_done & 1].coord();
    const tiles_t tiles = tile_infos[num_done & 1].split().tiles;
    const scores_t scores = args.score.scores_of(at);
    auto first_key = [&](int tile) {
      if constexpr (kListsTiles) tile = args.listed(at, tile).tile();
      return tile * kBlockN;
    };
    // With other score options there are no registers left to prefetch.
    read_terms_t read;
    if constexpr (kKeyBias) {
      read.read(scores, first_key(tiles.last - 1), params.seqlen_k, lane);
    }
#pragma unroll 1
    for (int tile = tiles.last - 1; tile >= tiles.first; --tile, ++num_tiles) {
      const unsigned slot = num_tiles % kKeySlots;
      wait(ring.empty_at(slot), (num_tiles / kKeySlots & 1) ^ 1);
      if constexpr (kKeyBias) {
        write_key_bias(shared.key_terms[slot], read, inverse_scale, lane);
      } else {
        read.read(scores, first_key(tile), params.seqlen_k, lane);
        write_key_terms(shared.key_terms[slot], read, lane);
      }
      __syncwarp();
      if (elected) ptx::mbarrier_arrive(ring.full_at(slot));
      if (kKeyBias && tile > tiles.first) {
        read.read(scores, first_key(tile - 1), params.seqlen_k, lane);
      }
    }
    __syncwarp();
    if (elected) ptx::mbarrier_arrive(smem.tile_ring.empty_at(num_done & 1));
    ++num_done;
    wait(smem.tile_ring.full_at(num_done & 1), num_done >> 1 & 1);
  }
}

// The remaining warps scrub tiles of v, as the producer's orders tell them.
__device__ __forceinline__ void scrub(const shared_t& shared, const addresses_t& smem) {
  volatile orders_t& orders = shared.orders;
  const int thread = threadIdx.x - (128 - kScrubbers);
  unsigned char* const tiles_v =
      shared.start + (smem.v - ptx::shared_address(shared.start));
  unsigned slot = 0, parity = 0;
  ptx::bar_sync<kScrubbers + kWarpSize>(kWakeBarrier);
  wait(smem.landed, 0);
  int stage = orders.stage[0];
  while (stage >= 0) {
    const bool changed =
        clean(reinterpret_cast<uint4*>(tiles_v + stage * kBytesV), thread);
    if (changed) ptx::fence_proxy_async();
    const bool any_changed = ptx::bar_or<kScrubbers>(kScrubBarrier, changed);
    if (thread == 0) {
      const int number = orders.work_tile[slot];
      if (any_changed) orders.special[number & 1] = number;
      ptx::mbarrier_arrive(smem.v_ring.full_at(stage));
    }
    slot = (slot + 1) % kOrders;
    parity ^= slot == 0;
    wait(smem.landed + slot * ring_t::kBytes, parity);
    stage = orders.stage[slot];
  }
}

// --- consumer warpgroups

// Makes the compiler keep x itself in a register, rather than recompute it in the loop.
__device__ __forceinline__ int opaque(int x) {
  unsigned word = x;
  ptx::launder(word);
  return word;
}

// A work tile from the point of view of one warpgroup.
struct work_t {
  tile_coord_t at;
  mask_bounds_t bounds;
  scores_t scores;
  int i[2];  // query indices of this thread's two rows
  score_rows_t rows;
  function_rows_t functions;
  split_t split;
  tiles_t tiles;
  tile_order_t order;
  int count;  // of tiles of keys
  int num_rows, row_block, row_group;
  int row_thread;  // this thread's first row; the second is 8 further
  // This thread's rows see keys [first, last), relative to its first column.
  int first[2] = {}, last[2];
  // Tile n = 0 is the last one of the block. This warpgroup skips the first `skipped`
  // tiles, which only other warpgroups see, and masks those before `masked_end` and
  // from `whole_end` on.
  int skipped = 0, masked_end = 1, whole_end;

  __device__ __forceinline__ work_t(const arguments_t& args,
                                    const volatile tile_info_t& info, int number,
                                    int group, int lane)
      : at(kDynamic ? info.coord() : coord_of(number, args.schedule(), args.params())),
        bounds(kDynamic ? info.seen() : mask_bounds_t{}),
        scores(args.score.scores_of(at)) {
    const int seqlen_k = args.params().seqlen_k;
    find_rows(args, at, group, lane);
    const int row_group_last = min(row_group + kGroupM, num_rows);
    split = kDynamic ? info.split()
                     : split_of(tiles_of(bounds, row_block, row_block, seqlen_k),
                                number, args.schedule());
    tiles = split.tiles;
    order = order_of(tiles, scores, min(row_block + kBlockM, num_rows));
    count = opaque(tiles.last - tiles.first);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kDynamic) {
        const int i = query_of(row_thread + 8 * r);
        const tiles_t keys = keys_of(bounds, i, i + 1);
        first[r] = keys.first - lane % 4 * 2;
        last[r] = keys.last - lane % 4 * 2;
      } else {
        last[r] = seqlen_k - lane % 4 * 2;
      }
      if (kSplit && split.empty) last[r] = 0;
    }
    i[0] = query_of(min(row_thread, num_rows - 1));
    i[1] = query_of(min(row_thread + 8, num_rows - 1));
    rows.set(scores, i);
    rows.set(args.mask_bits, at, i, lane);
    functions.set<true, false>(args.score, scores, i);
    whole_end = count;
    if constexpr (kFromDiagonal) masked_end = count;
    if constexpr (kBounds > 0 && !kListsTiles) {
      const tiles_t own = tiles_of(bounds, row_group, row_group_last, seqlen_k);
      skipped = tiles.last - max(own.last, tiles.first + 1);
      skipped = opaque(max(skipped, 0));
      const int i_first = query_of(row_group);
      const int whole_last = keys_of(bounds, i_first, i_first + 1).last / kBlockN;
      masked_end = min(count, tiles.last - whole_last);
      if constexpr (kBounds == 2) {
        const int i_last = query_of(row_group_last - 1);
        const int whole_first =
            (keys_of(bounds, i_last, i_last + 1).first + kBlockN - 1) / kBlockN;
        whole_end = i_last < bounds.num_queries ? tiles.last - whole_first : 0;
        whole_end = min(count, whole_end);
      }
    }
  }

  // First rows of the block, of this warpgroup and of this thread.
  __device__ __forceinline__ void find_rows(const arguments_t& args,
                                            const tile_coord_t& at, int group,
                                            int lane) {
    num_rows = static_cast<int>(args.params().seqlen_q) * kPack;
    row_block = first_row(at, args.schedule());
    // Treat a warpgroup before the first query like one behind the last: nothing to do.
    const int row_own = row_block + group * kGroupM;
    row_group = row_own < 0 ? num_rows : row_own;
    row_thread = row_group + threadIdx.x / kWarpSize % 4 * 16 + lane / 4;
  }
};

struct consumer_t {
  const arguments_t& args;
  const shared_t& shared;
  const addresses_t& smem;
  int w, lane;  // w: index among the consumer warpgroups
  bool elected;
  unsigned long long q_tile, k_tiles, v_tiles;
  float to_log2;
  unsigned num_tiles = 0, num_done = 0;  // tiles of keys, and work tiles, so far
  float s[kScores], o[kOutputs];
  unsigned p[kBlockN / 16][4];
  key_bias_t key_bias;    // arrives together with its tile of k
  bias_tile_t bias_tile;  // so does this
  unsigned bias_start;    // where this lane reads it, in the first stage
  unsigned shown[2];      // with kMaskBits or a mask function: the keys that rows see

  __device__ __forceinline__ consumer_t(const arguments_t& args, const shared_t& shared,
                                        const addresses_t& smem, int group)
      : args(args),
        shared(shared),
        smem(smem),
        w(group - 1),
        lane(threadIdx.x % kWarpSize),
        elected(kArrivals > 1 || lane == 0),
        q_tile(descriptor(smem.q + w * kBytesQ, 16)),
        k_tiles(descriptor(smem.k, 16)),
        v_tiles(descriptor(smem.v, kBlockN * 128)),
        to_log2(kCapOnly    ? 1.f
                : kHasTerms ? float(kLog2e)
                            : args.inputs.to_log2) {
    const int row = w * kGroupM + threadIdx.x / kWarpSize % 4 * 16;
    bias_start = bias_tile_t::start(smem.bias, row, lane);
    // Named barrier 1 + w lets warpgroup w issue its products; warpgroup 0 starts.
    if (kPingpong && w == kNumGroups - 1) ptx::bar_arrive<256>(1);
  }

  // --- pingpong: the warpgroups issue their products alternately
  __device__ __forceinline__ void pingpong_wait() const {
    if constexpr (kPingpong) ptx::bar_sync<256>(1 + w);
  }
  __device__ __forceinline__ void pingpong_arrive() const {
    if constexpr (kPingpong) {
      ptx::bar_arrive<256>(1 + (w + 1 == kNumGroups ? 0 : w + 1));
    }
  }

  // --- scheduler
  __device__ __forceinline__ int next_tile(int number) const {
    if constexpr (!kDynamic) return static_cast<int>(number + gridDim.x);
    wait(smem.tile_ring.full_at(num_done & 1), num_done >> 1 & 1);
    return tile_here();
  }
  __device__ __forceinline__ int tile_here() const {
    return __shfl_sync(kFullMask, shared.tile_infos[num_done & 1].work_tile, 0);
  }
  // Row index in lse, and in out where the keys are split.
  __device__ __forceinline__ index_t row_number(const tile_coord_t& at, int row,
                                                int tile) const {
    const params_t& params = args.params();
    index_t number = (at.row_of_heads + row % kPack) * params.seqlen_q + query_of(row);
    if constexpr (kSplit) {
      number += static_cast<index_t>(unsigned(tile) % args.schedule().num_splits) *
                args.schedule().num_heads * kPack * params.seqlen_q;
    }
    return number;
  }

  // --- mainloop

  // Releases tiles of keys that only other warpgroups see.
  __device__ __forceinline__ void skip_v(int n) const {
    const unsigned number = num_tiles + n, stage = stage_of(number);
    wait(smem.v_ring.full_at(stage), parity_of(number));
    if (elected) ptx::mbarrier_arrive(smem.v_ring.empty_at(stage));
  }
  __device__ __forceinline__ void skip(int skipped) const {
#pragma unroll 1
    for (int n = 0; n < skipped; ++n) {
      const unsigned number = num_tiles + n, stage = stage_of(number);
      wait(smem.k_ring.full_at(stage), parity_of(number));
      if (elected) ptx::mbarrier_arrive(smem.k_ring.empty_at(stage));
      // Before pingpong_wait(): the warpgroup ahead may wait for this stage to be free.
      if (n >= kLateV) skip_v(n - kLateV);
      pingpong_wait();
      pingpong_arrive();
      if constexpr (kHasKeyRing) {
        wait(smem.key_ring.full_at(number % kKeySlots), number / kKeySlots & 1);
        if (elected) ptx::mbarrier_arrive(smem.key_ring.empty_at(number % kKeySlots));
      }
    }
  }

  // Those that skip() left.
  __device__ __forceinline__ void skip_last_v(int skipped) const {
#pragma unroll 1
    for (int n = max(skipped - kLateV, 0); n < skipped; ++n) skip_v(n);
  }

  // Prepares the accumulators for tile n of the work tile; returns whether
  // finish_scores() must still add large biases.
  __device__ __forceinline__ bool begin_scores(int n) {
    if constexpr (kPresetBias) {
      const unsigned number = num_tiles + n, slot = number % kKeySlots;
      wait(smem.key_ring.full_at(slot), number / kKeySlots & 1);
      set_terms(s, shared.key_terms[slot].terms + lane % 4 * 2);
      return shared.key_terms[slot].some_late;
    }
    return false;
  }
  // Loads what the mask shows of tile n, long before finish_scores() needs it.
  __device__ __forceinline__ void load_shown(const work_t& work, int n) {
    if constexpr (kMaskBits) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        shown[r] = __ldg(work.rows.bits[r] + work.order.tile(n) * 4);
      }
    }
  }
  // Loads the bias of a stage while the product is in flight.
  __device__ __forceinline__ void load_bias(unsigned stage) {
    if constexpr (kBiasBehind) {
      key_bias.load(shared.key_terms[stage].terms + lane % 4 * 2);
    }
    if constexpr (kBiasTiles) bias_tile.load(bias_start + stage * kBytesBias);
  }
  // Adds a bias of keys. From here on the stage may be released.
  __device__ __forceinline__ void finish_bias() {
    if constexpr (kBiasBehind) key_bias.add_to(s);
    if constexpr (kBiasTiles) {
      // What TMA loads into the stage next must come behind what lanes have read of it.
      ptx::fence_proxy_async();
      __syncwarp();
    }
  }
  // The list entry of a tile of k, valid until that is released.
  __device__ __forceinline__ listed_tile_t listed_at(unsigned stage) const {
    const listed_tile_t listed = {__shfl_sync(kFullMask, shared.listed[stage], 0)};
    __syncwarp();  // all lanes have read it
    return listed;
  }
  // The index of tile n, whose k must not have been released.
  __device__ __forceinline__ int tile_of(const work_t& work, int n) const {
    if constexpr (!kListsTiles) return work.order.tile(n);
    if constexpr (!kHasTerms) return 0;  // it does not matter
    return listed_at(stage_of(num_tiles + n)).tile();
  }
  // Turns products into final scores.
  template <bool kMasked>
  __device__ __forceinline__ void finish_scores(const work_t& work, int n, bool late,
                                                int tile) {
    const bool is_masked = kMasked && (!kFromDiagonal || work.order.is_last(tile));
    finish_scores<kMasked>(work, n, late, tile * kBlockN, is_masked);
  }
  // With a mask function, `is_masked` says whether the tile has hidden keys.
  template <bool kMasked>
  __device__ __forceinline__ void finish_scores(const work_t& work, int n, bool late,
                                                int j0, bool is_masked) {
    if constexpr (kPresetBias) {
      const unsigned slot = (num_tiles + n) % kKeySlots;
      if (late) add_late_terms(s, shared.key_terms[slot].late + lane % 4 * 2);
      __syncwarp();
      if (elected) ptx::mbarrier_arrive(smem.key_ring.empty_at(slot));
    }
    // Unmasked tiles with only a softcap leave it to exponentiate_capped().
    if constexpr (kHasTerms && (!kCapOnly || kMasked)) {
      const int j = j0 + lane % 4 * 2;
      const unsigned number = num_tiles + n, slot = number % kKeySlots;
      if constexpr (kTermsOfKeys) {
        wait(smem.key_ring.full_at(slot), number / kKeySlots & 1);
      }
      score_mod<kMasked>(s, work.scores, work.rows, args.params(), args.inputs.scale,
                         args.inputs.cap, shared.key_terms[slot].terms + lane % 4 * 2,
                         work.i, j, static_cast<int>(args.params().seqlen_k) - j,
                         args.score, work.functions, bias_tile);
      if constexpr (kTermsOfKeys) {
        __syncwarp();
        if (elected) ptx::mbarrier_arrive(smem.key_ring.empty_at(slot));
      }
    }
    if constexpr (kMaskBits) hide_unshown(s, shown);
    if (kMasked && is_masked) {
      if constexpr (kListsTiles) {
        hide_unshown(s, shown);
      } else {
        mask(work, j0);
      }
    }
  }
  // Hides the keys from j0 on that the rows do not see by their position.
  __device__ __forceinline__ void mask(const work_t& work, int j0) {
    const int (&first)[2] = work.first, (&last)[2] = work.last;
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

  __device__ __forceinline__ void start_qk(unsigned stage) {
    ptx::wgmma_fence();
    multiply_qk(s, q_tile, k_tiles + stage * (kBytesK / 16));
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void start_pv(unsigned stage, bool accumulate) {
    // p was just written; without this fence ptxas serializes the products.
    ptx::wgmma_fence();
    multiply_pv(o, p, v_tiles + stage * (kBytesV / 16), accumulate);
    ptx::wgmma_commit_group();
  }

  // The first tile: s, softmax, p.
  __device__ __forceinline__ void first_step(const work_t& work, softmax_t& row) {
    const int skipped = work.skipped;
    const unsigned number = num_tiles + skipped, stage = stage_of(number);
    const bool late = begin_scores(skipped);
    load_shown(work, skipped);
    wait(smem.k_ring.full_at(stage), parity_of(number));
    listed_tile_t listed;
    bool is_masked = true;
    if constexpr (kListsTiles) {
      listed = listed_at(stage);
      is_masked = find_shown_of(work, listed);
    }
    start_qk(stage);
    load_bias(stage);
    if constexpr (kBounds > 0) skip_last_v(skipped);
    ptx::wgmma_wait_group<0>();
    compiler_fence(s);
    finish_bias();
    if (elected) {
      ptx::mbarrier_arrive(smem.k_ring.empty_at(stage));
      if (skipped == work.count - 1) ptx::mbarrier_arrive(smem.q_ring.empty_at(w));
    }
    if constexpr (kListsTiles) {
      finish_scores<true>(work, 0, late, listed.tile() * kBlockN, is_masked);
    } else {
      finish_scores<true>(work, skipped, late, work.order.tile(skipped));
    }
    raise(row, s, to_log2, args.inputs.margin);
    exponentiate(row, s, to_log2);
    round_to(p, s);
  }
  // Any other tile n: s of this tile, while o += p v of tile n - 1 is in flight. With
  // `is_first` there is none before it.
  template <bool kMasked>
  __device__ __forceinline__ void step(const work_t& work, softmax_t& row, int n,
                                       bool is_first = false) {
    const unsigned number = num_tiles + n, stage = stage_of(number);
    const unsigned before = number - 1;
    unsigned stage_v = stage_of(before);
    if constexpr (kKeepsStage) ptx::launder(stage_v);
    load_shown(work, n);
    wait(smem.k_ring.full_at(stage), parity_of(number));
    const bool late = begin_scores(n);
    if (!is_first) pingpong_wait();
    start_qk(stage);
    if (is_first) {
      skip_last_v(work.skipped);
      ptx::wgmma_fence();         // or the assembler adds one (C7519)
      ptx::wgmma_commit_group();  // of no product
    } else {
      wait(smem.v_ring.full_at(stage_v), parity_of(before));
      start_pv(stage_v, n > work.skipped + 1);
      pingpong_arrive();
    }
    load_bias(stage);
    const int tile = tile_of(work, n);
    ptx::wgmma_wait_group<1>();
    compiler_fence(s);
    finish_bias();
    if constexpr (kGivesBackAtOnce) {
      ptx::mbarrier_arrive_if(elected, smem.k_ring.empty_at(stage));
      ptx::mbarrier_arrive_if(elected & (n == work.count - 1), smem.q_ring.empty_at(w));
    } else if (elected) {
      ptx::mbarrier_arrive(smem.k_ring.empty_at(stage));
      if (n == work.count - 1) ptx::mbarrier_arrive(smem.q_ring.empty_at(w));
    }
    finish_scores<kMasked>(work, n, late, tile);
    raised_t raised;
    if constexpr (kCapOnly && !kMasked) {
      raised = raise(row, s, to_log2, args.inputs.margin, capped_t{args.inputs.cap});
    } else {
      raised = raise(row, s, to_log2, args.inputs.margin);
    }
    // ptxas moves this wait up to the last branch before it, the one in raise().
    ptx::wgmma_wait_group<0>();
    compiler_fence(o);
    if (elected && !is_first) ptx::mbarrier_arrive(smem.v_ring.empty_at(stage_v));
    if constexpr (kCapOnly && !kMasked) {
      exponentiate_capped(row, s, args.inputs.cap, !raised.passes);
    } else {
      exponentiate(row, s, to_log2);
    }
    round_to(p, s);  // only now, because the product in flight was reading p
    if (raised.moves && !is_first) {
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) o[e] *= row.alpha[row_of(e)];
    }
  }
  // --- mainloop over a list of tiles

  // Step n also finishes tile n - 1: it computes o += p v, or only releases v if this
  // warpgroup saw nothing of that tile.
  __device__ __forceinline__ void release_k(const work_t& work, int n) const {
    const unsigned stage = stage_of(num_tiles + n);
    if (elected) {
      ptx::mbarrier_arrive(smem.k_ring.empty_at(stage));
      if (n == work.count - 1) ptx::mbarrier_arrive(smem.q_ring.empty_at(w));
    }
  }
  __device__ __forceinline__ void end_before(int n, bool is_pending) {
    const unsigned number = num_tiles + n, stage = stage_of(number);
    wait(smem.v_ring.full_at(stage), parity_of(number));
    if (is_pending) {
      start_pv(stage, n > 0);
      ptx::wgmma_wait_group<0>();
      compiler_fence(o);
    }
    if (elected) ptx::mbarrier_arrive(smem.v_ring.empty_at(stage));
  }
  // Whether a tile has hidden keys, and which are shown then. Few tiles have, so all
  // that this needs is found again. An empty split has a tile of the list, all of whose
  // keys are hidden from it.
  __device__ __forceinline__ bool find_shown_of(const work_t& work,
                                                listed_tile_t listed) {
    const bool is_masked =
        __any_sync(kFullMask, !listed.is_whole(w) || (kSplit && work.split.empty));
    if (is_masked) {
      const volatile tile_info_t& info = shared.tile_infos[num_done & 1];
      const tile_coord_t at = info.coord();
      const mask_bounds_t bounds = info.seen();
      work_t here = work;
      here.find_rows(args, at, w, lane);
      const int j = listed.tile() * kBlockN + lane % 4 * 2;
      int i[2];
      unsigned by_position[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        i[r] = query_of(min(here.row_thread + 8 * r, here.num_rows - 1));
        const tiles_t keys = keys_of(bounds, i[r], i[r] + 1);
        by_position[r] = bits_below(keys.last - j) & ~bits_below(keys.first - j);
        if (kSplit && info.split().empty) by_position[r] = 0;
      }
      find_shown(shown, args.score, at, i, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) shown[r] &= by_position[r];
    }
    return is_masked;
  }
  __device__ __forceinline__ void scale_sums(const softmax_t& row, bool moves) {
    if (moves) {
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) o[e] *= row.alpha[row_of(e)];
    }
  }
  __device__ __forceinline__ void skip_listed(const work_t& work, int n,
                                              bool is_pending) {
    if constexpr (kHasKeyRing) {
      const unsigned number = num_tiles + n, slot = number % kKeySlots;
      wait(smem.key_ring.full_at(slot), number / kKeySlots & 1);
      __syncwarp();
      if (elected) ptx::mbarrier_arrive(smem.key_ring.empty_at(slot));
    }
    release_k(work, n);
    pingpong_wait();
    pingpong_arrive();
    end_before(n - 1, is_pending);
  }
  // A visible tile after one that this warpgroup did not see.
  __device__ __forceinline__ void step_alone(const work_t& work, softmax_t& row, int n,
                                             listed_tile_t listed) {
    const unsigned stage = stage_of(num_tiles + n);
    const bool is_masked = find_shown_of(work, listed);
    const bool late = begin_scores(n);
    pingpong_wait();
    start_qk(stage);
    pingpong_arrive();
    load_bias(stage);
    ptx::wgmma_wait_group<0>();
    compiler_fence(s);
    finish_bias();
    release_k(work, n);
    end_before(n - 1, false);
    finish_scores<true>(work, n, late, listed.tile() * kBlockN, is_masked);
    const raised_t raised = raise(row, s, to_log2, args.inputs.margin);
    exponentiate(row, s, to_log2);
    round_to(p, s);
    scale_sums(row, raised.moves);
  }
  // A visible tile, while o += p v of the one before is in flight.
  __device__ __forceinline__ void step_listed(const work_t& work, softmax_t& row, int n,
                                              listed_tile_t listed) {
    const unsigned number = num_tiles + n, stage = stage_of(number);
    const unsigned before = number - 1, stage_v = stage_of(before);
    const bool is_masked = find_shown_of(work, listed);
    const bool late = begin_scores(n);
    pingpong_wait();
    start_qk(stage);
    wait(smem.v_ring.full_at(stage_v), parity_of(before));
    start_pv(stage_v, n > 1);
    pingpong_arrive();
    load_bias(stage);
    ptx::wgmma_wait_group<1>();
    compiler_fence(s);
    finish_bias();
    release_k(work, n);
    finish_scores<true>(work, n, late, listed.tile() * kBlockN, is_masked);
    const raised_t raised = raise(row, s, to_log2, args.inputs.margin);
    ptx::wgmma_wait_group<0>();
    compiler_fence(o);
    if (elected) ptx::mbarrier_arrive(smem.v_ring.empty_at(stage_v));
    exponentiate(row, s, to_log2);
    round_to(p, s);  // only now, because the product in flight was reading p
    scale_sums(row, raised.moves);
  }
  // The tiles of a list that are whole for all warpgroups.
  __device__ __forceinline__ int num_whole() const {
    const split_t split = shared.tile_infos[num_done & 1].split();
    if (kSplit && split.empty) return 0;
    return max(split.tiles.last - max(split.tiles.first, 0), 0);
  }
  // First the tiles that are whole for all warpgroups, as without lists, then others.
  __device__ __forceinline__ void attend_listed(const work_t& work, softmax_t& row) {
    int n = attend(work, row);
    bool is_pending = true;
#pragma unroll 1
    for (; n < work.count; ++n) {
      const unsigned number = num_tiles + n, stage = stage_of(number);
      wait(smem.k_ring.full_at(stage), parity_of(number));
      const listed_tile_t listed = listed_at(stage);
      // The vote tells the compiler that a warp branches as one.
      if (!__any_sync(kFullMask, listed.is_seen(w))) {
        skip_listed(work, n, is_pending);
        is_pending = false;
      } else if (is_pending) {
        step_listed(work, row, n, listed);
      } else {
        step_alone(work, row, n, listed);
        is_pending = true;
      }
    }
    end_before(work.count - 1, is_pending);
  }

  // The whole tiles from n on; returns the number of the one behind them.
  __device__ __forceinline__ int attend_whole(const work_t& work, softmax_t& row,
                                              int n) {
    // A separate counter: comparing n would move it out of the uniform registers.
    unsigned left = max((kListsTiles ? num_whole() : work.whole_end) - n, 0);
#pragma unroll 1
    for (; left > 0; ++n) {
      --left;
      ptx::launder(left);
      step<false>(work, row, n);
    }
    return n;
  }
  // All tiles of keys, or the whole ones of a list, except the last product with v.
  // Returns their number.
  __device__ __forceinline__ int attend(const work_t& work, softmax_t& row) {
    wait(smem.q_ring.full_at(w), num_done & 1);
    int n = work.skipped;
    if constexpr (kOneMaskedStep) {
      bool is_first = true;
      int masked_end = work.masked_end;
#pragma unroll 1
      do {  // masked tiles and whole ones, then those masked on the other side
#pragma unroll 1
        do {
          step<true>(work, row, n, is_first);
          is_first = false;
        } while (++n < masked_end);
        n = attend_whole(work, row, n);
        masked_end = work.count;
      } while (kBounds == 2 && n < work.count);
      return n;
    }
    first_step(work, row);
    ++n;
    if constexpr ((kBounds > 0 && !kListsTiles) || kFromDiagonal) {
#pragma unroll 1
      for (; n < work.masked_end; ++n) step<true>(work, row, n);
    }
    if constexpr (kFromDiagonal) return n;
    n = attend_whole(work, row, n);
    if constexpr (kBounds == 2 && !kListsTiles) {
#pragma unroll 1
      for (; n < work.count; ++n) step<true>(work, row, n);
    }
    return n;
  }

  // --- epilogue

  // Computes 1 / l of both rows, whether they see any key, and stores lse.
  __device__ __forceinline__ void finalize(const work_t& work, softmax_t& row,
                                           const tile_coord_t& here, int tile,
                                           float (&inverse)[2], bool (&seen)[2]) const {
    const int slot = (static_cast<int>(num_done) - 1) & 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row_r = work.row_thread + 8 * r, i = query_of(row_r);
      const bool is_query = kDynamic ? i < shared.tile_infos[slot].bounds.num_queries
                                     : i < static_cast<int>(args.params().seqlen_q);
      seen[r] = is_query && row.l[r] != 0;
      inverse[r] = ptx::rcp_approx_ftz(row.l[r]);
      if (!kHasSinks && args.lse == nullptr) continue;
      // lse needs m exactly as it was subtracted; what does not fit into `high` goes
      // into l. Beyond a million the rest is below one ulp of lse.
      const double m = rounded_product(row.m[r], to_log2) * args.inputs.from_log2;
      const float high = static_cast<float>(m);
      const float low = fabsf(high) < 1e6f ? static_cast<float>(m - high) : 0.f;
      const float l = row.l[r] * (1 + low);
      float lse_r = seen[r] ? high + log_of(l) : -infinity<float>();
      if constexpr (kHasSinks &&
                    !kSplit) {  // for splits, the combine step adds the sink
        const finished_t finished = work.scores.finish(i, high, l);
        inverse[r] = finished.inverse * (1 + low);
        lse_r = finished.lse;
      }
      if (args.lse != nullptr && lane % 4 == 0 && row_r < work.num_rows) {
        const index_t number = row_number(here, row_r, tile);
        if constexpr (kSplit) {
          args.lse[number] = seen[r] ? m + log_of(row.l[r]) : -infinity<double>();
        } else {
          args.lse[number] = lse_r;
        }
      }
    }
  }

  // Stores o / l of one split as floats, and zeros behind the last column.
  // `nonfinite`: nonzero if any is not finite.
  __device__ __forceinline__ void store_part(const work_t& work,
                                             const tile_coord_t& here, int tile,
                                             const float (&inverse)[2],
                                             const bool (&seen)[2],
                                             unsigned (&nonfinite)[2]) const {
    const int pitch = part_pitch(args.params());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row_r = work.row_thread + 8 * r;
      if (row_r < work.num_rows) {
        float* const out_row =
            reinterpret_cast<float*>(args.out) + row_number(here, row_r, tile) * pitch;
#pragma unroll
        for (int e = 2 * r; e < kOutputs; e += 4) {
          const int column = column_of(e) + lane % 4 * 2;
          const float2 pair =
              seen[r] ? make_float2(o[e] * inverse[r], o[e + 1] * inverse[r])
                      : make_float2(0, 0);
          nonfinite[r] |= !(is_finite(pair.x) & is_finite(pair.y));
          if (column < pitch) {
            *reinterpret_cast<float2*>(out_row + column) = pair;
          }
        }
      }
    }
  }

  // Stores o / l as elem_t: staged in shared memory, as vectors, or one by one.
  __device__ __forceinline__ void store_rows(const work_t& work,
                                             const tile_coord_t& here,
                                             const float (&inverse)[2],
                                             const bool (&seen)[2],
                                             unsigned (&nonfinite)[2]) const {
    const params_t& params = args.params();
    const int num_rows = work.num_rows, row_thread = work.row_thread;
    elem_t* const out_rows = here.at(reinterpret_cast<elem_t*>(args.out), params.out);
    const int steps = static_cast<int>(params.out.row | params.head_dim_v) |
                      (kPack > 1 ? static_cast<int>(params.out.head) : 0);
    const bool aligned =
        (static_cast<int>(reinterpret_cast<unsigned long long>(out_rows)) % 16 |
         steps % 8) == 0 &&
        params.out.col == 1;
    // A word holds two columns of row r of this thread. Word t of a lane has column 8 t
    // + lane % 4 * 2 of each group of 32 and the one behind it.
    auto word_of = [&](int e, int r) {
      const unsigned word = pair16_t::from(o[e + 1] * inverse[r], o[e] * inverse[r]);
      const unsigned shown = seen[r] ? word : 0;
      if constexpr (kHidesSome) nonfinite[r] = pair16_t::fma(shown, 0, nonfinite[r]);
      return shown;
    };
    if constexpr (kStagesOut) {
      const int row_warp = row_thread - lane / 4;
      const unsigned staged = smem.out + (threadIdx.x / kWarpSize - 4) * kStagedBytes;
#pragma unroll
      for (int first = 0; first < kHeadDimV; first += kStagedColumns) {
        __syncwarp();  // the previous columns have been read
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
          store_words(out_row, words, params.out, e * 2, aligned, exists,
                      params.head_dim_v, lane);
        }
      }
    }
  }

  // Hidden keys may have contributed 0 * NaN. Requests that the work tile is recomputed
  // with scrubbed values or, if this was that second pass, adds what was scrubbed.
  __device__ __forceinline__ void repair(const work_t& work, const softmax_t& row,
                                         const tile_coord_t& here, int work_tile,
                                         const unsigned (&nonfinite)[2]) const {
    const int number = static_cast<int>(num_done) - 1;
    bool again = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) again |= nonfinite[r] != 0 && is_finite(row.l[r]);
    bool special = false;
    if (work_tile < kCareful) {
      if (again) shared.orders.again[number % kRemembered] = work_tile;
    } else {
      special = shared.orders.special[number & 1] == number;
    }
    if (same(special)) {
      __syncwarp();  // the stores of the warp are visible to all its lanes
      const volatile tile_info_t& info = shared.tile_infos[number & 1];
      // Reload: otherwise the compiler hoists the softcap of a zero product out of the
      // loop over tiles and spends registers on it.
      const score_arguments_t score = kHasSoftcap ? args.score.reloaded() : args.score;
      add_specials(
          args.inputs.v, args.out, here, work.row_block, w, score.scores_of(here),
          info.seen(), score.params, info.split().tiles, work_tile & ~kCareful,
          [this](const tile_coord_t& at, int row, int tile) {
            return row_number(at, row, tile);
          },
          [&](int n) { return kListsTiles ? args.listed(here, n).tile() : n; });
    }
  }

  // The block that finishes the last split of a tile combines all of them.
  __device__ __forceinline__ void combine(const work_t& work, const tile_coord_t& here,
                                          int work_tile) const {
    const params_t& params = args.params();
    const schedule_t& schedule = args.schedule();
    const int number = static_cast<int>(num_done) - 1;
    __threadfence();
    ptx::bar_sync<128 * kNumGroups>(kCombineBarrier);  // this split is in memory
    if (threadIdx.x == 128) {
      const int number_of_tile = unsigned(work_tile & ~kCareful) / schedule.num_splits;
      int* const arrived = args.counter->arrived() + number_of_tile;
      // A split that will be recomputed does not count yet.
      const bool again = kHidesSome && work_tile < kCareful &&
                         shared.orders.again[number % kRemembered] >= 0;
      const bool last = !again && atomicAdd(arrived, 1) == schedule.num_splits - 1;
      if (last) *arrived = 0;  // reset for the next launch
      shared.is_last_part = last;
      __threadfence();
    }
    ptx::bar_sync<128 * kNumGroups>(kCombineBarrier);
    if (shared.is_last_part) {
      const scores_t finished = args.score.scores_of(here);
#pragma unroll 1
      for (int row = max(work.row_block, 0) + int(threadIdx.x - 128) / kWarpSize;
           row < min(work.row_block + kBlockM, work.num_rows); row += 4 * kNumGroups) {
        const int i = query_of(row);
        combine_row(
            reinterpret_cast<const float*>(args.out),
            reinterpret_cast<const double*>(args.lse),
            here.at(args.combined, params.out) + i * params.out.row +
                row % kPack * params.out.head,
            args.combined_lse, (here.row_of_heads + row % kPack) * params.seqlen_q + i,
            static_cast<index_t>(schedule.num_heads) * kPack * params.seqlen_q,
            schedule.num_splits,
            finished.is_query(i) ? finished.sink(i) : -infinity<float>(), params);
      }
    }
  }

  // Last product with v, overlapped with the row sums; then out and lse.
  __device__ __forceinline__ void store(work_t& work, softmax_t& row, int work_tile) {
    const int tile = work_tile & ~kCareful;
    const unsigned last_number = num_tiles + work.count - 1,
                   last_stage = stage_of(last_number);
    if constexpr (!kListsTiles) {
      wait(smem.v_ring.full_at(last_stage), parity_of(last_number));
    }
    num_tiles += work.count;
    ++num_done;
    if constexpr (!kListsTiles) start_pv(last_stage, work.count > work.skipped + 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row.l[r] += row.rest[r];
      row.l[r] += shuffle_xor(row.l[r], 1);
      row.l[r] += shuffle_xor(row.l[r], 2);
    }
    // Recompute the coordinates and rows, which did not fit into registers during the
    // loop. A single warpgroup keeps its rows.
    const int number = static_cast<int>(num_done) - 1;
    const tile_coord_t here =
        kDynamic ? shared.tile_infos[number & 1].coord() : work.at;
    if constexpr (kDynamic && kNumGroups > 1) work.find_rows(args, here, w, lane);
    float inverse[2];
    bool seen[2];
    finalize(work, row, here, tile, inverse, seen);
    if constexpr (!kListsTiles) {
      ptx::wgmma_wait_group<0>();
      compiler_fence(o);
      if (elected) ptx::mbarrier_arrive(smem.v_ring.empty_at(last_stage));
    }

    unsigned nonfinite[2] = {};  // nonzero if a result is not finite
    if constexpr (kSplit) {
      store_part(work, here, tile, inverse, seen, nonfinite);
    } else {
      store_rows(work, here, inverse, seen, nonfinite);
    }
    if constexpr (kHidesSome) repair(work, row, here, work_tile, nonfinite);
    if constexpr (kCombine) combine(work, here, work_tile);
    if constexpr (kDynamic) {
      __syncwarp();
      if (elected) ptx::mbarrier_arrive(smem.tile_ring.empty_at(number & 1));
    }
  }

  // No break or return here: with them ptxas ignores the registers of setmaxnreg.
  __device__ __forceinline__ void consume() {
    int work_tile = kDynamic ? next_tile(0) : blockIdx.x;
    while ((work_tile & ~kCareful) < args.schedule().num_work_tiles) {
      work_t work(args, shared.tile_infos[num_done & 1], work_tile, w, lane);
      if constexpr (kBounds > 0 && !kListsTiles) skip(work.skipped);
      softmax_t row(to_log2);
      if constexpr (kListsTiles) {
        attend_listed(work, row);
        work_tile = tile_here();  // it did not fit into registers
      } else {
        attend(work, row);
      }
      store(work, row, work_tile);
      work_tile = next_tile(work_tile);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) attention_hopper(
    const __grid_constant__ all_inputs_t inputs,
    out_t* __restrict__ out,  // (batch, heads, queries, head_dim_v)
    lse_t* __restrict__ lse,  // (batch, heads, queries), or null
    counter_t* __restrict__ counter,
    COMBINED_PARAMETERS LISTS_PARAMETER MASK_BITS_PARAMETER SCORE_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ __align__(8) unsigned long long barriers[kBarriers];
  __shared__ tile_info_t tile_infos[2];
  __shared__ orders_t orders;
  __shared__ key_terms_t key_terms[kKeySlots];
  __shared__ unsigned listed[kListsTiles ? kStages : 1];
  __shared__ bool is_last_part;
  const arguments_t args = {inputs,
                            out,
                            lse,
                            counter,
                            COMBINED_ARGUMENTS,
                            LISTS_ARGUMENT,
                            MASK_BITS_ARGUMENT,
                            {SCORE_ARGUMENTS}};
  const shared_t shared = {tile_infos, orders, key_terms, listed, is_last_part, tiles};
  const addresses_t smem(tiles, barriers);

  if (kNumGroups == 1 && threadIdx.x == 128) {
    ptx::prefetch_tensormap(inputs.k_map);
    ptx::prefetch_tensormap(inputs.q_map);
    ptx::prefetch_tensormap(inputs.v_map);
  }
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  // The producer finds its first work tile while another warp initializes the barriers.
  tile_coord_t first_coord;
  if (kFindsFirst && threadIdx.x == 0) {
    first_coord = coord_of(blockIdx.x, inputs.schedule, params);
  }
  if (threadIdx.x == (kFindsFirst ? kWarpSize : 0)) smem.init_barriers(shared.orders);
  __syncthreads();  // the barriers are initialized

  if (group == 0) {
    if constexpr (kNumGroups > 1) ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) {
      producer_t{args, shared, smem}.produce(first_coord);
    } else if (kTermsOfKeys && threadIdx.x / kWarpSize == 1) {
      read_key_terms(args, shared, smem);
    } else if (kHidesSome && threadIdx.x >= 128 - kScrubbers) {
      scrub(shared, smem);
    }
    return;
  }
  if constexpr (kNumGroups > 1) ptx::setmaxnreg_inc<kConsumerRegisters>();
  consumer_t(args, shared, smem, group).consume();
}

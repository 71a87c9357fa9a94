// SPDX-License-Identifier: MIT
// attention_vjp_hopper: dq, dk and dv by TMA and wgmma, for sm_90a and up to 64
// columns.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), one block of queries
//            per step, with transposed products (rows are keys):
//                S = k q^T,  P = exp(scale S - lse),  dP = v dO^T,  dS = P (dP - delta)
//                dv += P dO,  dk += dS q,  dq += dS^T k
//            P and dS are accumulators of one product and, in the same registers, the A
//            operand of the next; only dS goes through shared memory, for dq. Products
//            of one step overlap with the softmax of the next
// Grid       Persistent, one block per multiprocessor. A work tile is a tile of keys.
//            Blocks take work tiles from a counter where these differ in length.
//            Otherwise the last ones are cut into pieces, which backward_postprocess.cu
//            adds up
// Threads    two warpgroups, 64 keys each; a third one for the loads would leave too
//            few registers (ptxas C7512 at 240). Threads of the two issue the TMA loads
// Tiles      k, v     kBlockN x kHeadDim   shared, loaded once per work tile
//            q, dO    kBlockM x kHeadDim   shared, 3 and 2 stages
//            dS       kBlockN x kBlockM    shared, two buffers
//            S, P, dP, dS, dk, dv, dq  registers, in the layout of wgmma
// Memory     global: k, v, dk and dv once; q and dO once per tile of keys, mostly from
//            L2; dq is added to float sums by red
// Numbers    S, P, dP, dS and sums in float; P and dS rounded to elem_t before
//            products. The order of the sums of dq varies from run to run; dk and dv
//            always have the same bits
// Limits     q, k, v and dO must fit a tensor map (_cuda/tensor_map.py); head
//            dimensions up to kHeadDim; rows of gradients are whole 16-byte vectors,
//            shortened by copy/trim_rows.cu; at most kMaxSummed entries are summed.
//            Infinities and NaN that a query does not see still turn into NaN, as does
//            a dS too large for elem_t: found->nonfinite then asks for another kernel
#include "attention/sm90/backward_dkdv.cuh"
#include "attention/sm90/score_arguments.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared.cuh"

// Work tiles differ in length.
constexpr bool kDynamic = kBounds > 0;
// The last tiles are cut into pieces where no counter balances them.
constexpr bool kCuts = !kDynamic;
static_assert(kNumThreads == 256 && kHeadDim == 64 && kBlockM == 128);

// q is read for S and one iteration later for dk; dO in one iteration only. Both are
// loaded two blocks ahead.
constexpr int kStagesQ = 3, kStagesDout = 2;

// Shared memory is slow while sums of dq leave through it, so statistics are
// prefetched: this many of the pairs of lse of a thread.
constexpr int kEarlyLse = 16;

// What is loaded of a block of queries. All warps wait for the loading threads, so
// three threads load one part each.
enum class part_t { kQ, kDout, kStats };
constexpr int kLoaders = 3;
// Lanes that load nothing also read where to load from, and ignore it: they read a slot
// that nobody writes. With bounds that costs 3 to 7 % (note 0011), so there they read
// the slot of a loading thread, which may be writing it. What they get is then old or
// new, word by word; the address they make of it is inside `shared`, and what they read
// there is ignored too. racecheck of compute-sanitizer cannot know that, so for it they
// read the slot that nobody writes.
constexpr bool kIdleReadsIdle = kBounds == 0 || IS_GIVEN(EACH_LANE_ARRIVES);

// --- shared memory

// Where the queries of an entry lie.
struct source_t {
  rows_t q, dout;
};

// The next block of queries of a loading thread, and the range of the work tile; kept
// here for lack of registers.
struct alignas(16) next_t {
  int block, summed, first, last;
};

// Barriers and what thread 0 exchanges with others: one struct, one base address.
struct published_t {
  unsigned long long full[2 + kStagesQ + kStagesDout], empty;
  next_t next[kLoaders + kIdleReadsIdle];  // the last is the dummy of idle lanes
  int4 k_from, v_from;  // position of k and v of the work tile: row, head, batch
  // For each stage of q: its first query and its index among the blocks of sums_q.
  int2 origins[kStagesQ];
};
static_assert((3 + kStagesQ + kStagesDout) % 2 == 0, "no gap in front of next_t");

// Where the gradients of a work tile go. Two, since one is written while the previous
// is still read.
struct outputs_t {
  index_t dk, dv;
  int tile;
  int piece;  // of a tile that was cut; < 0: the tile is whole
};

struct shared_t {
  published_t published;
  int next_tiles[2];
  source_t sources[kMaxSummed];
  tile_info_t tile_info;
  outputs_t outputs[2];
};

// Shared memory addresses.
struct addresses_t {
  unsigned k, v, q, dout, ds, stats;                                         // tiles
  unsigned k_full, v_full, q_full, dout_full, empty, next, k_from, origins;  // the rest

  __device__ __forceinline__ addresses_t(const void* tiles,
                                         const published_t& published) {
    k = swizzled_tiles(tiles);
    v = k + kBytesN;
    q = v + kBytesN;
    dout = q + kStagesQ * kBytesM;
    ds = dout + kStagesDout * kBytesM;
    stats = ds + 2 * kBytesDs;
    k_full = ptx::shared_address(&published);
    v_full = k_full + 8;
    q_full = v_full + 8;
    dout_full = q_full + 8 * kStagesQ;
    empty = dout_full + 8 * kStagesDout;
    next = empty + 8;
    k_from = next + (kLoaders + kIdleReadsIdle) * sizeof(next_t);
    origins = k_from + 32;
  }

  __device__ __forceinline__ void init_barriers(published_t& published) const {
    for (int n = 0; n < 2 + kStagesQ + kStagesDout; ++n) {
      ptx::mbarrier_init(k_full + 8 * n, 1);
    }
    ptx::mbarrier_init(empty, 1);
    if constexpr (kIdleReadsIdle) published.next[kLoaders] = next_t();
    ptx::fence_mbarrier_init();
  }
};

// The arguments of the kernel.
struct arguments_t {
  const inputs_t& inputs;
  const located_t* entries;
  const float* stats;
  float* sums_q;
  float* pieces;
  elem_t *dk, *dv;
  found_t* found;
  counter_t* counter;
  score_arguments_t score;
  const grads_t& grads;
};

__device__ __forceinline__ unsigned stage_after(unsigned q_stage) {
  return q_stage + 1 == kStagesQ ? 0u : q_stage + 1;
}

// --- producer

// Operands for loading a part of the next block of queries.
struct request_t {
  int4 next, from;
};

// Threads of the computing warps issue the TMA loads.
struct producer_t {
  const arguments_t& args;
  shared_t& shared;
  const addresses_t& smem;
  int warp, lane;  // within the warpgroup

  // The first threads of some warps of warpgroup 0 load. The other lanes read as well
  // and ignore the result.
  __device__ __forceinline__ int loader() const {
    const int warp_of_block = threadIdx.x / 32;
    return !kIdleReadsIdle                         ? min(warp_of_block, kLoaders - 1)
           : lane == 0 && warp_of_block < kLoaders ? warp_of_block
                                                   : kLoaders;
  }

  __device__ __forceinline__ unsigned source_of(const int4& next) const {
    const int summed = args.inputs.num_summed == 1 ? 0 : next.y;
    return ptx::shared_address(shared.sources + summed);
  }
  __device__ __forceinline__ request_t read_part(int loader) const {
    const int4 now = ptx::load_shared_s32x4(smem.next + loader * sizeof(next_t));
    const int4 from = ptx::load_shared_s32x4(source_of(now) + (loader == 0 ? 0 : 16));
    return request_t{now, from};
  }

  // One thread loads a part of a block of queries into the given stage.
  template <part_t kPart>
  __device__ __forceinline__ void load_queries(const request_t& request,
                                               unsigned q_stage,
                                               unsigned dout_stage) const {
    const int block = request.next.x;
    const bool more = block + 1 < request.next.w;
    ptx::store_shared_s32x2(smem.next + int(kPart) * sizeof(next_t),
                            more ? block + 1 : request.next.z, request.next.y + !more);
    const unsigned q_barrier = smem.q_full + 8 * q_stage,
                   dout_barrier = smem.dout_full + 8 * dout_stage;
    const int4 from = request.from;
    if constexpr (kPart == part_t::kQ) {
      ptx::store_shared_s32x2(smem.origins + 8 * q_stage, block * kBlockM,
                              from.w + block);
      ptx::mbarrier_arrive_expect_tx(q_barrier, kBytesM);
      ptx::cp_async_bulk_tensor_5d(smem.q + q_stage * kBytesM, args.inputs.q_map,
                                   q_barrier, 0, block * kBlockM, from.x, from.y,
                                   from.z);
    } else if constexpr (kPart == part_t::kDout) {
      ptx::mbarrier_arrive_expect_tx(dout_barrier, kBytesM + kBytesStats);
      ptx::cp_async_bulk_tensor_5d(smem.dout + dout_stage * kBytesM,
                                   args.inputs.dout_map, dout_barrier, 0,
                                   block * kBlockM, from.x, from.y, from.z);
    } else {
      ptx::cp_async_bulk(smem.stats + dout_stage * kBytesStats,
                         args.stats + index_t(from.w + block) * (2 * kBlockM),
                         kBytesStats, dout_barrier);
    }
  }
  // Called by the first thread of each of three warps.
  __device__ __forceinline__ void load_parts(const request_t& request, unsigned q_stage,
                                             unsigned dout_stage) const {
    if (threadIdx.x == 0) {
      load_queries<part_t::kQ>(request, q_stage, dout_stage);
    } else if (threadIdx.x == 32) {
      load_queries<part_t::kDout>(request, q_stage, dout_stage);
    } else if (threadIdx.x == 64) {
      load_queries<part_t::kStats>(request, q_stage, dout_stage);
    }
  }

  __device__ __forceinline__ void load_keys(unsigned target,
                                            const ptx::tensor_map_t& map, unsigned full,
                                            unsigned place) const {
    const int4 from = ptx::load_shared_s32x4(place);
    const int batch[2] = {from.z, from.w};
    load_tile<kBlockN, kChunks>(target, map, full, from.x, from.y, batch);
  }
  // Called by thread 0, when no product reads the previous work tile any more.
  __device__ __forceinline__ void load_k(int number) const {
    if (number < args.inputs.num_work_tiles) {
      load_keys(smem.k, args.inputs.k_map, smem.k_full, smem.k_from);
    }
  }
  // Called by warpgroup 0: loads v of the published work tile, and its first two blocks
  // of queries.
  __device__ __forceinline__ void load(int number, unsigned q_stage,
                                       unsigned block) const {
    if (number >= args.inputs.num_work_tiles || lane != 0) return;
    if (warp == kLoaders) {
      load_keys(smem.v, args.inputs.v_map, smem.v_full, smem.k_from + 16);
      return;
    }
    load_parts(read_part(warp), q_stage, block % kStagesDout);
    if (const_cast<volatile tile_info_t&>(shared.tile_info).count > 1) {
      load_parts(read_part(warp), stage_after(q_stage), (block + 1) % kStagesDout);
    }
  }

  // Thread 0 publishes work tile `number`, the `nth` of this block. No warp-wide
  // instructions in here: they would make the compiler treat uniform numbers as
  // varying.
  __device__ __forceinline__ void publish(int number, unsigned nth) const {
    const inputs_t& inputs = args.inputs;
    const params_t& params = args.score.params;
    volatile tile_info_t& info = shared.tile_info;
    // Reload: reciprocals of the divisors are not worth registers between work tiles.
    const inputs_t& inputs_now = ptx::reload(inputs);
    if (number >= inputs.num_work_tiles) return;
    int piece = -1;
    if (kCuts && number >= inputs.num_whole) {
      piece = number - inputs.num_whole;
      number = inputs.num_whole + unsigned(piece) / unsigned(inputs_now.num_pieces);
    }
    const work_tile_t tile = tile_of<kDynamic>(number, inputs_now);
    const int row = tile.tile * kBlockN;
    const located_t* const entry =
        args.entries + index_t(tile.kept) * inputs_now.num_summed;
    const located_t at = *entry;
    shared.sources[0] = {at.q, at.dout};
    auto place = [&](unsigned to, const rows_t& rows) {
      ptx::store_shared_s32x2(to, row, rows.head);
      ptx::store_shared_s32x2(to + 8, rows.batch[0], rows.batch[1]);
    };
    place(smem.k_from, at.k);
    place(smem.k_from + 16, at.v);
    // The blocks of queries that see keys of the tile; at least one.
    int block_first = 0, block_last = inputs.num_blocks;
    info.factor = factor_of(args.found);
    info.num_keys = static_cast<int>(params.seqlen_k) - row;
    if constexpr (kBounds > 0) {
      const scores_t scores = args.score.scores_of(tile_coord_t());
      const index_t key_first = index_t(tile.tile) * kBlockN;
      const range_t queries = scores.queries_of(key_first, key_first + kBlockN);
      block_first = int(queries.first) / kBlockM;
      block_last = (int(queries.last) + kBlockM - 1) / kBlockM;
      if (block_first >= block_last) {
        block_first = 0;
        block_last = 1;
      }
      const mask_bounds_t bounds = scores.mask_bounds(0, row);
      info.low = bounds.low;
      info.high = bounds.high;
      const bool tail = row + kBlockN > params.seqlen_k;
      info.whole_first = tail ? 1 << 30 : kBlockN - bounds.high;
      info.whole_last = -bounds.low - (kBlockM - 1);
    }
    if (kCuts && piece >= 0) {
      const unsigned num_pieces = inputs_now.num_pieces;
      const unsigned of_tile = unsigned(piece) % num_pieces;
      block_first = inputs_now.num_blocks * of_tile / num_pieces;
      block_last = inputs_now.num_blocks * (of_tile + 1) / num_pieces;
    }
    shared.outputs[nth & 1] = {at.dk, at.dv, tile.tile, piece};
    info.count = (block_last - block_first) * inputs.num_summed;
#pragma unroll
    for (int loader = 0; loader < kLoaders; ++loader) {
      const unsigned here = smem.next + loader * sizeof(next_t);
      ptx::store_shared_s32x2(here, block_first, 0);
      ptx::store_shared_s32x2(here + 8, block_first, block_last);
    }
    // The entries that are summed with this one.
    for (int n = 1; n < inputs.num_summed; ++n) {
      shared.sources[n] = {entry[n].q, entry[n].dout};
    }
  }
};

// --- mainloop

// Loops over the blocks of queries of one work tile after another.
struct mainloop_t : mma_t {
  const arguments_t& args;
  shared_t& shared;
  const addresses_t& smem;
  producer_t producer;

  int number, next_number;  // of the work tile
  unsigned num_done = 0;    // work tiles of this block so far
  unsigned block = 0;       // of queries so far; gives stages and parities, except of q
  unsigned last;            // block of this work tile
  // Those of q. A remainder by 3 would be computed in vector registers, and with it all
  // descriptors, which then move to uniform registers: 100 instructions per step.
  unsigned q_stage = 0, q_parity = 0;
  bool accumulate;
  float2 early_lse[kEarlyLse];  // prefetched pairs

  __device__ __forceinline__ mainloop_t(int group, const arguments_t& args,
                                        shared_t& shared, const addresses_t& smem)
      : mma_t(group, smem.k, smem.v, smem.q, smem.dout, smem.ds, smem.stats),
        args(args),
        shared(shared),
        smem(smem),
        producer{args, shared, smem, warp, lane} {}

  __device__ __forceinline__ void wait_for_q() const {
    wait(smem.q_full + 8 * q_stage, q_parity);
  }
  __device__ __forceinline__ void wait_for_dout(unsigned number) const {
    wait(smem.dout_full + 8 * (number % kStagesDout), number / kStagesDout & 1);
  }
  __device__ __forceinline__ const volatile tile_info_t& info() const {
    return shared.tile_info;
  }
  __device__ __forceinline__ auto origin() const {
    return [this] { return ptx::load_shared_s32(smem.origins + 8 * q_stage); };
  }
  __device__ __forceinline__ bool is_whole() const { return info().is_whole(origin()); }

  // --- scheduler

  // Takes the next work tile during the last step of this one.
  __device__ __forceinline__ void take_next(bool is_last) {
    if (kDynamic && is_last && threadIdx.x == 0) {
      next_number = atomicAdd(&args.counter->next, 1) + gridDim.x;
    }
  }
  __device__ __forceinline__ void publish_next(bool is_last) const {
    if (kDynamic && is_last && threadIdx.x == 0) {
      *const_cast<volatile int*>(&shared.next_tiles[num_done & 1]) = next_number;
    }
  }
  __device__ __forceinline__ int published_next() const {
    return *const_cast<volatile int*>(&shared.next_tiles[num_done & 1]);
  }
  __device__ __forceinline__ void begin() {
    number = blockIdx.x;
    if (threadIdx.x == 0) {
      producer.publish(number, num_done);
      producer.load_k(number);
    }
    __syncthreads();
    if (group == 0) producer.load(number, q_stage, block);
  }
  __device__ __forceinline__ void advance() {
    if constexpr (kDynamic) {
      number = uniform(published_next());
    } else {
      number += gridDim.x;
    }
    ++num_done;
    if (threadIdx.x == 0) producer.load_k(number);
  }

  // --- statistics of queries

  // Pairs n and n + 1 of a thread's lse, or delta, for the queries in a stage, which
  // are adjacent. `delta_at` is 0 for lse.
  __device__ __forceinline__ void load_two(float2 (&to)[2], unsigned dout_stage, int n,
                                           int delta_at) const {
    const float4 x = ptx::load_shared_f32x4(
        smem.stats + lane % 4 * 16 + dout_stage * kBytesStats + delta_at + n * 32);
    to[0] = {x.x, x.y}, to[1] = {x.z, x.w};
  }
  __device__ __forceinline__ void prefetch_lse(unsigned dout_stage) {
#pragma unroll
    for (int n = 0; n < kEarlyLse; n += 2) {
      float2 two[2];
      load_two(two, dout_stage, n, 0);
      early_lse[n] = two[0], early_lse[n + 1] = two[1];
    }
  }

  // --- P and dS

  // s becomes P, and p the same as an A operand.
  __device__ __forceinline__ void softmax(bool whole) {
    if (!whole) mask(info(), args.inputs.hidden, origin());
    exponentiate<0, kScores>(args.inputs.to_log2, [&](int n) { return early_lse[n]; });
    round_p<0, kScores>();
  }
  // Computes dS for the block in a stage of dO.
  __device__ __forceinline__ void make_ds_of(unsigned dout_stage) {
    float2 two[2];
    make_ds<0, kScores>(kNarrow<elem_t> ? info().factor : 1.f, [&](int n) {
      if (n % 2 == 0) load_two(two, dout_stage, n, 4 * kBlockM);
      return two[n % 2];
    });
  }
  // Adds this warp's part of dq to the sums in memory.
  __device__ __forceinline__ void add_dq(const float (&dq)[kSumsQ],
                                         int target_block) const {
    index_t start = index_t(target_block) * (2 * kPart) + group * kPart +
                    warp * (kPart / 4) + lane * 4;
    ptx::launder(start);  // one address rather than one for each store
#pragma unroll
    for (int e = 0; e < kSumsQ; e += 4) {
      ptx::red_global_add(args.sums_q + start + e * 32, dq[e], dq[e + 1], dq[e + 2],
                          dq[e + 3]);
    }
  }

  // --- one block of queries, with S and P of the next. No product is in flight between
  // steps, because ptxas does not track them around a loop (C7514).

  // Starts with dP. dv overlaps with the computation of dS, dk and dq with the softmax.
  // A warpgroup waits for the other's dS only after dk: half a step of slack.
  template <bool kLast> __device__ __forceinline__ void step() {
    const unsigned this_q = q_stage, this_dout = block % kStagesDout;
    q_stage = stage_after(q_stage);
    q_parity ^= q_stage == 0;
    start_dp(this_dout);
    start_dv(this_dout, accumulate);
    ptx::wgmma_wait_group<1>();  // dP
    compiler_fence(dp);
    make_ds_of(this_dout);
    take_next(kLast);
    store_ds(block % 2);  // both warpgroups read it for dq
    ptx::fence_proxy_async();
    ptx::wgmma_wait_group<0>();  // dv
    compiler_fence(sums_v);
    // This warpgroup's dS is complete, and it has finished dv of this block and dk of
    // the previous one.
    ptx::bar_arrive<kNumThreads>(1 + group + block % 2 * 2);
    request_t request;
    if constexpr (!kLast) {
      wait_for_q();
      start_s(q_stage);
    }
    start_dk(this_q, accumulate);
    const int target_block = ptx::load_shared_s32(smem.origins + 8 * this_q + 4);
    bool whole = true;
    if constexpr (!kLast) {
      whole = is_whole();
      if (group == 0) request = producer.read_part(producer.loader());
    }
    ptx::bar_sync<kNumThreads>(2 - group + block % 2 * 2);  // and the other warpgroup's
    float dq[kSumsQ];
    start_dq(dq, block % 2);
    // The stages for the block after next are free; in the last step so are all tiles
    // except k, for the next work tile.
    if (!kLast && block + 1 != last) {
      producer.load_parts(request, stage_after(q_stage), this_dout);
    }
    if (kLast && threadIdx.x == 0) {
      publish_next(kLast);
      producer.publish(next_number, num_done + 1);
    }
    if (kLast && group == 0) {
      ptx::bar_sync<128>(6);
      producer.load(kDynamic ? published_next() : next_number, q_stage, block + 1);
    }
    if constexpr (!kLast) {
      wait_for_dout(block + 1);
      prefetch_lse((block + 1) % kStagesDout);
      ptx::wgmma_wait_group<2>();  // S
      compiler_fence(s);
      softmax(whole);
    }
    ptx::wgmma_wait_group<0>();
    compiler_fence(dq);
    add_dq(dq, target_block);
    ++block;
  }

  // Sums dk and dv over the blocks of queries of a work tile.
  __device__ __forceinline__ void attend() {
    next_number = number + static_cast<int>(gridDim.x);
    accumulate = false;
    // The first block: S and P.
    wait(smem.k_full, num_done & 1);
    wait_for_q();  // now the info of the tile has arrived, too
    last = block + uniform(info().count) - 1;
    start_s(q_stage);
    wait(smem.v_full, num_done & 1);
    wait_for_dout(block);
    prefetch_lse(block % kStagesDout);
    ptx::wgmma_wait_group<0>();
    compiler_fence(s);
    softmax(is_whole());
#pragma unroll 1
    while (block != last) {
      step<false>();
      accumulate = true;
    }
    step<true>();
    compiler_fence(sums_k);
    compiler_fence(sums_v);
    ptx::bar_sync<kNumThreads>(5);  // all products of this tile end here
  }

  // --- epilogue

  // Stores the sums of a piece unchanged.
  __device__ __forceinline__ void store_piece(int piece) const {
    float4* const part = reinterpret_cast<float4*>(args.pieces) +
                         (index_t(piece) * 4 + group) * (kPart / 4) + warp * 256 + lane;
#pragma unroll
    for (int e = 0; e < kSums; e += 4) {
      part[e * 8] = make_float4(sums_k[e], sums_k[e + 1], sums_k[e + 2], sums_k[e + 3]);
      part[2 * (kPart / 4) + e * 8] =
          make_float4(sums_v[e], sums_v[e + 1], sums_v[e + 2], sums_v[e + 3]);
    }
  }
  __device__ __forceinline__ void store(const outputs_t& to) const {
    const params_t& params = args.score.params;
    const grads_t& grads = args.grads;
    const int key_first = to.tile * kBlockN;
    const int num_keys = static_cast<int>(params.seqlen_k) - key_first;
    const int row_thread = group * 64 + warp * 16 + lane / 4;  // the second: + 8
    float nonfinite = store_rows(
        sums_k, unfactor_of(factor_of(args.found), static_cast<float>(params.scale)),
        args.dk + to.dk + key_first * grads.row[0], grads.row[0], row_thread, num_keys,
        static_cast<int>(params.head_dim));
    nonfinite = store_rows(
        sums_v, 1 / kFactorP, args.dv + to.dv + key_first * grads.row[1], grads.row[1],
        row_thread, num_keys, static_cast<int>(params.head_dim_v), nonfinite);
    if (nonfinite != 0) args.found->nonfinite = 1;
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_vjp_hopper(const __grid_constant__ inputs_t inputs,
                         const located_t* entries,         // backward.cuh
                         const float* __restrict__ stats,  // backward.cuh
                         float* __restrict__ sums_q,       // backward.cuh
                         float* pieces,                    // backward.cuh
                         elem_t* __restrict__ dk,          // as k, summed over entries
                         elem_t* __restrict__ dv,          // as v, summed over entries
                         found_t* __restrict__ found, counter_t* __restrict__ counter,
                         SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ shared_t shared;
  const arguments_t args = {inputs, entries, stats, sums_q,  pieces,
                            dk,     dv,      found, counter, {SCORE_ARGUMENTS},
                            grads};
  const addresses_t smem(tiles, shared.published);
  const int group = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) smem.init_barriers(shared.published);
  ptx::griddepcontrol_wait();
  // The next kernel may start: its blocks find no room before these are finished.
  ptx::griddepcontrol_launch_dependents();
  __syncthreads();  // the barriers are initialized

  mainloop_t mainloop(group, args, shared, smem);
  mainloop.begin();
  while (mainloop.number < inputs.num_work_tiles) {
    mainloop.attend();
    mainloop.advance();
    const outputs_t to = shared.outputs[(mainloop.num_done - 1) & 1];
    if (kCuts && to.piece >= 0) {
      mainloop.store_piece(to.piece);
    } else {
      mainloop.store(to);
    }
  }
  // The last block to finish resets both numbers for the next launch.
  if (kDynamic && threadIdx.x == 0 &&
      atomicAdd(&counter->finished, 1) == int(gridDim.x) - 1) {
    counter->next = 0;
    counter->finished = 0;
    __threadfence();
  }
}

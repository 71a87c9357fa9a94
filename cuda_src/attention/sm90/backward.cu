// SPDX-License-Identifier: MIT
// attention_vjp_hopper: gradients by tensor cores fed by TMA, for sm_90a.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), a block of queries at a
//            time, all products transposed so that keys are rows:
//                S = k q^T,  P = exp(scale S - lse),  dP = v dO^T,  dS = P (dP - delta)
//                dv += P dO,  dk += dS q,  dq += dS^T k
//            P and dS come out of one product in the registers that the next one reads;
//            dS alone goes through shared memory, for dq. While products of one step
//            run, so does the softmax of the next
// Grid       a block a multiprocessor. An item is a tile of keys of a kept entry;
//            blocks take item after item, from a counter where items differ in length.
//            Else the last ones are cut into pieces, which backward_postprocess.cu adds
//            up With kCluster = 2, two blocks have neighbouring tiles and share q and
//            dO
// Threads    two warpgroups, 64 keys each; with a third for the copies there would be
//            too few registers (ptxas C7512 at 240). Threads of them ask TMA
//
// Tiles      k, v     kBlockN x kHeadDim   shared, loaded once an item
//            q, dO    kBlockM x kHeadDim   shared, 3 and 2 stages
//            dS       kBlockN x kBlockM    shared, twice
//            S, P, dP, dS, dk, dv, dq  registers, as wgmma lays them out
// Memory     global: k, v, dk and dv once; q and dO once a tile of keys, mostly from
//            L2; dq is added to sums of floats, by red, or in order by TMA
// Numbers    S, P, dP, dS and sums in float; P and dS rounded to elem_t before
//            products. The order of sums in dq differs from run to run; without
//            kMakesDq dk and dv alone are made, and have the same bits always
// Limits     q, k, v and dO as a tensor map takes them (_cuda/tensor_map.py), head
// dimensions
//            up to kHeadDim; rows of gradients are whole vectors of 16 bytes, which
//            copy/trim_rows.cu makes shorter; at most kMaxSummed summed
//            entries. Infinities and NaN in what a query does not see come through as
//            NaN, and so does a dS too large for elem_t: found->odd says that the
//            gradients have to be made in another way
#include "attention/sm90/backward_dkdv.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cluster_mbarrier.cuh"
#include "ptx/opaque.cuh"
#include "ptx/relaxed.cuh"
#include "ptx/shared.cuh"

#if !defined(CLUSTER) || !defined(MAKES_DQ) || !defined(ORDERED)
#error "CLUSTER, MAKES_DQ and ORDERED come from the host"
#endif
// Else backward_dq.cu makes dq, with the same bits in every run.
constexpr bool kMakesDq = MAKES_DQ;
constexpr int kCluster = CLUSTER;
// Tiles of keys add to a block of dq one after the other, from the last to the first:
// then it has the same bits in every run. Each warp has its own part of dq, and waits
// for that warp of the tile before. No block of threads waits for one that has not
// begun: items are taken in the order in which they add.
constexpr bool kOrdered = ORDERED;
// Items differ in length, or their order counts.
constexpr bool kDynamic = kBounds > 0 || kOrdered;
// The last items are cut into pieces, where there is no counter that shares them out.
constexpr bool kCuts = kMakesDq && !kDynamic && kBlockM == 128;
// The tiles of an item are asked for by four warps, those of a narrow step by one
// thread.
constexpr bool kSpread = kBlockM == 128;
// Asking for the next block takes warp 0 a while. Without a cluster and an order it
// does so behind dq and dk, which then run beside it.
constexpr bool kLate = kMakesDq && kCluster == 1 && !kOrdered;
static_assert(kNumThreads == 256 && (kCluster == 1 || kCluster == 2));
static_assert(!kOrdered || (kMakesDq && kCluster == 1));
constexpr int kWarps = kNumThreads / 32;

// q is read for S and an iteration later for dk, dO in one iteration. Both are asked
// for two blocks ahead.
constexpr int kStagesQ = 3, kStagesDout = 2;

// A step of 64 queries has registers to ask for dP ahead, beside S; one of 128 has not.
constexpr bool kNarrowStep = kBlockM == 64;
// The shared memory answers late while sums of dq leave through it; what is read there
// is asked for ahead: of the pairs of lse and delta that a thread needs, so many.
constexpr int kEarlyLse = kNarrowStep ? 8 : 16;
// Two pairs of them at a time; without dq that spills.
constexpr bool kByFours = !kNarrowStep && kMakesDq;
constexpr int kEarlyDelta = !kNarrowStep ? 0 : kBounds > 0 ? 3 : 4;

// What a block of queries is asked for in: bits of a set. All warps wait for one that
// asks; of a wide step three do, each for a part.
constexpr int kPartQ = 1, kPartDout = 2, kPartStats = 4, kPartsAll = 7;
constexpr int kAskers = kNarrowStep ? 1 : 3;
// Who does not ask reads what nobody changes, so that racecheck, which does not follow
// the barrier between, has nothing to report. Where positions hide keys that was slower
// by 3 to 7 %.
constexpr bool kIdleReadsIdle = kBounds == 0 || kOrdered;

// Where the queries of an entry lie.
struct source_t {
  rows_t q, dout;
};

// What a warp asks for next, and within which blocks of queries. There are no registers
// for it.
struct alignas(16) next_t {
  int block, summed, first, last;
};

// Barriers, and what thread 0 writes and reads often; together, for one address.
struct told_t {
  unsigned long long full[2 + kStagesQ + kStagesDout], empty;
  next_t next[kAskers + kIdleReadsIdle];  // the last: nobody asks with it
  int4 k_from, v_from;  // where k and v of the item lie: row, head, and batch
  // Of each stage of q: its first query, and its number among the blocks of sums_q.
  int2 origins[kStagesQ];
};
static_assert((3 + kStagesQ + kStagesDout) % 2 == 0, "no gap in front of next_t");

// What all threads are told of an item, for the same reason.
struct view_t {
  int count;     // blocks of queries, over all summed entries
  float factor;  // of dP, where dS has one
  int num_keys;  // from its first on; may be more than the tile has
  // Key j, counted from the first, is seen by query i if low <= j - i < high. No key is
  // hidden from blocks whose first query lies in [whole_first, whole_last].
  int low, high, whole_first, whole_last;
};

// Where the gradients of an item go. Two: written before the item before has gone.
struct outputs_t {
  index_t dk, dv;
  int tile;
  // Where kOrdered: how many tiles add to a block of dq before this one does, of those
  // from query `turn_first` on; to others it is the first. < 0: it adds to none.
  int turn, turn_first;
  int piece;  // of those that items are cut into; < 0: it is whole
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    __cluster_dims__(kCluster, 1, 1)
        attention_vjp_hopper(const __grid_constant__ inputs_t inputs,
                             const located_t* entries,         // backward.cuh
                             const float* __restrict__ stats,  // backward.cuh
                             float* __restrict__ sums_q,       // backward.cuh
                             int* turns,                       // backward.cuh
                             float* pieces,                    // backward.cuh
                             elem_t* __restrict__ dk,  // as k, summed over entries
                             elem_t* __restrict__ dv,  // as v, summed over entries
                             found_t* __restrict__ found,
                             counter_t* __restrict__ counter,
                             SCORE_PARAMETERS,
                             const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ told_t told;
  __shared__ int next_items[2];
  __shared__ source_t sources[kMaxSummed];
  __shared__ view_t view_memory;
  __shared__ outputs_t outputs[2];
  // Of each warp, the block of dq that it adds to, or has added to without having told
  // so; < 0: none.
  __shared__ int added[kOrdered ? kWarps : 1];
  volatile view_t& view = view_memory;

  // The host adds 1024 bytes for this: a swizzled tile starts at a multiple.
  const unsigned smem_k = (ptx::shared_address(smem) + 1023) & ~1023u;
  const unsigned smem_v = smem_k + kBytesN, smem_q = smem_v + kBytesN,
                 smem_dout = smem_q + kStagesQ * kBytesM,
                 smem_ds = smem_dout + kStagesDout * kBytesM,
                 smem_stats = smem_ds + 2 * kBytesDs,
                 smem_dq = smem_stats + kStagesDout * kBytesStats;
  const unsigned k_full = ptx::shared_address(&told), v_full = k_full + 8,
                 q_full = v_full + 8, dout_full = q_full + 8 * kStagesQ,
                 empty = dout_full + 8 * kStagesDout, next = empty + 8,
                 k_from = next + (kAskers + kIdleReadsIdle) * sizeof(next_t),
                 origins = k_from + 32;

  const int group = uniform(threadIdx.x / 128);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // The first threads of some warps of the first group ask. What its others read is not
  // used; it is read in front of a barrier of that group, and changed behind it.
  const int warp_of_block = threadIdx.x / 32;
  const int asker = !kIdleReadsIdle ? min(warp_of_block, kAskers - 1)
                    : lane == 0 && warp_of_block < kAskers ? warp_of_block
                                                           : kAskers;
  auto rank = [] { return kCluster > 1 ? int(ptx::cluster_rank()) : 0; };
  if (threadIdx.x == 0) {
    for (int n = 0; n < 2 + kStagesQ + kStagesDout; ++n) {
      ptx::mbarrier_init(k_full + 8 * n, 1);
    }
    ptx::mbarrier_init(empty, kCluster);
    if constexpr (kIdleReadsIdle) told.next[kAskers] = next_t();
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_wait();
  // Blocks of the next kernel have no room before those of this one are done.
  ptx::griddepcontrol_launch_dependents();
  // The barriers are there before anyone uses them, in both blocks.
  if constexpr (kCluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }

  // A operands: rows of this warpgroup; B operands; and operands whose rows are summed.
  const unsigned long long k_rows = descriptor(smem_k + group * 8192, 16),
                           v_rows = descriptor(smem_v + group * 8192, 16),
                           q_rows = descriptor(smem_q, 16),
                           dout_rows = descriptor(smem_dout, 16),
                           q_sums = descriptor(smem_q, kChunkM),
                           dout_sums = descriptor(smem_dout, kChunkM);
  // Of dq, a warpgroup makes 64 of 128 rows, or 64 of 128 columns.
  constexpr bool kByRows = kBlockM == 128;
  const unsigned long long ds_rows =
      descriptor(smem_ds + (kByRows ? group * 8192 : 0), 16);
  const unsigned long long k_sums =
      descriptor(smem_k + (kByRows ? 0 : group * kChunkN), kChunkN);
  // For stmatrix a lane gives a row of a matrix: queries n and n + 8 of two groups of
  // 8 keys. The swizzle flips bits 4 to 6 of an address by bits 7 to 9.
  const unsigned ds_target = smem_ds + group * kChunkM +
                             (lane / 16 * 8 + lane % 8) * 128 +
                             ((32 * warp + 16 * (lane / 8 % 2)) ^ (lane % 8 * 16));
  const unsigned lane_stats = smem_stats + lane % 4 * 8;
  // This warp's dq on its way to TMA.
  const unsigned dq_target =
      smem_dq + (threadIdx.x / 32 * (kSumsQ / 4) * 32 + lane) * 16;

  if (kOrdered && lane == 0) added[threadIdx.x / 32] = -1;
  unsigned items = 0;  // of this block, so far
  unsigned block = 0;  // of queries, so far: gives stages and parities but those of q
  // Those of q. A remainder by 3 would be made in vector registers, and all descriptors
  // with it, which then are moved to uniform ones: 100 instructions a step.
  unsigned q_stage = 0, q_parity = 0;
  auto after = [](unsigned stage) { return stage + 1 == kStagesQ ? 0u : stage + 1; };

  auto wait_for_q = [&] { wait(q_full + 8 * q_stage, q_parity); };
  auto wait_for_dout = [&](unsigned number) {
    wait(dout_full + 8 * (number % kStagesDout), number / kStagesDout & 1);
  };

  // What the next block of queries, or a part of it, is asked for with.
  struct asked_t {
    int4 next, q, dout;
  };
  auto source_of = [&](const int4& next) {
    const int summed = inputs.num_summed == 1 ? 0 : next.y;
    return ptx::shared_address(sources + summed);
  };
  auto read_all = [&] {
    const int4 now = ptx::load_shared_s32x4(next);
    const unsigned source = source_of(now);
    return asked_t{now, ptx::load_shared_s32x4(source),
                   ptx::load_shared_s32x4(source + 16)};
  };
  auto read_part = [&](int asker) {
    const int4 now = ptx::load_shared_s32x4(next + asker * sizeof(next_t));
    const int4 from = ptx::load_shared_s32x4(source_of(now) + (asker == 0 ? 0 : 16));
    return asked_t{now, from, from};
  };
  // One thread asks for parts of a block of queries, into these stages.
  auto load_queries = [&](auto parts, const asked_t& asked, unsigned q_stage,
                          unsigned dout_stage) {
    constexpr int kParts = decltype(parts)::value;
    constexpr bool kHasQ = kParts & kPartQ, kHasDout = kParts & kPartDout;
    const int block = asked.next.x;
    const bool more = block + 1 < asked.next.w;
#pragma unroll
    for (int asker = 0; asker < kAskers; ++asker) {
      if ((kParts >> asker & 1) == 0) continue;
      ptx::store_shared_s32x2(next + asker * sizeof(next_t),
                              more ? block + 1 : asked.next.z, asked.next.y + !more);
    }
    const unsigned q_barrier = q_full + 8 * q_stage,
                   dout_barrier = dout_full + 8 * dout_stage;
    const unsigned q_target = smem_q + q_stage * kBytesM,
                   dout_target = smem_dout + dout_stage * kBytesM;
    if constexpr (kHasQ) {
      ptx::store_shared_s32x2(origins + 8 * q_stage, block * kBlockM,
                              asked.q.w + block);
      ptx::mbarrier_arrive_expect_tx(q_barrier, kBytesM);
    }
    if constexpr (kHasDout) {
      ptx::mbarrier_arrive_expect_tx(dout_barrier, kBytesM + kBytesStats);
    }
    // Boxes of kBlockM rows and 64 columns; each block of a cluster brings its share.
    auto load_box = [&](unsigned target, const ptx::tensor_map_t& map, unsigned barrier,
                        int chunk, const int4& from) {
      target += chunk * kChunkM;
      const int column = chunk * 64, row = block * kBlockM;
      if constexpr (kCluster > 1) {
        constexpr unsigned short kAll = (1 << kCluster) - 1;
        ptx::cp_async_bulk_tensor_5d_multicast(target, map, barrier, kAll, column, row,
                                               from.x, from.y, from.z);
      } else {
        ptx::cp_async_bulk_tensor_5d(target, map, barrier, column, row, from.x, from.y,
                                     from.z);
      }
    };
#pragma unroll
    for (int n = 0; n < kChunks / kCluster; ++n) {
      const int chunk = n + rank() * (kChunks / kCluster);
      if constexpr (kHasQ) load_box(q_target, inputs.q_map, q_barrier, chunk, asked.q);
      if constexpr (kHasDout) {
        load_box(dout_target, inputs.dout_map, dout_barrier, chunk, asked.dout);
      }
    }
    if constexpr ((kParts & kPartStats) != 0) {
      ptx::cp_async_bulk(smem_stats + dout_stage * kBytesStats,
                         stats + index_t(asked.dout.w + block) * (2 * kBlockM),
                         kBytesStats, dout_barrier);
    }
  };
  auto load_all = [&](unsigned q_stage, unsigned dout_stage) {
    load_queries(number_t<kPartsAll>(), read_all(), q_stage, dout_stage);
  };
  // By the first thread of each of three warps.
  auto load_parts = [&](const asked_t& asked, unsigned q_stage, unsigned dout_stage) {
    if (threadIdx.x == 0) {
      load_queries(number_t<kPartQ>(), asked, q_stage, dout_stage);
    } else if (threadIdx.x == 32) {
      load_queries(number_t<kPartDout>(), asked, q_stage, dout_stage);
    } else if (threadIdx.x == 64) {
      load_queries(number_t<kPartStats>(), asked, q_stage, dout_stage);
    }
  };

  // Thread 0 tells of an item, whose first block of queries is `block`. Of a narrow
  // step it asks for its tiles and first two blocks, too; else load_item and load_k do.
  // With a warp-wide instruction in here, the compiler would take numbers that are the
  // same in all lanes for different ones.
  auto begin_item = [&](int number, unsigned items, unsigned block) {
    // Reciprocals of what is divided by are not worth registers between items.
    const inputs_t& inputs_now = ptx::reload(inputs);
    if (number >= inputs.num_items) return;
    int piece = -1;
    if (kCuts && number >= inputs.num_whole) {
      piece = number - inputs.num_whole;
      number = inputs.num_whole + unsigned(piece) / unsigned(inputs_now.num_pieces);
    }
    const item_t item = item_of<kDynamic, kOrdered>(number, inputs_now);
    const int row = (item.tile * kCluster + rank()) * kBlockN;
    const located_t* const entry = entries + index_t(item.kept) * inputs_now.num_summed;
    const located_t at = *entry;
    sources[0] = {at.q, at.dout};
    if constexpr (kSpread) {
      auto place = [&](unsigned to, const rows_t& rows) {
        ptx::store_shared_s32x2(to, row, rows.head);
        ptx::store_shared_s32x2(to + 8, rows.batch[0], rows.batch[1]);
      };
      place(k_from, at.k);
      place(k_from + 16, at.v);
    } else {
      load_tile<kBlockN, kChunks>(smem_k, inputs.k_map, k_full, row, at.k.head,
                                  at.k.batch);
    }
    // The blocks of queries that see keys of the tile, or of those of the cluster; at
    // least one.
    int turn = inputs.num_tiles - 1 - item.tile, turn_first = 0;
    int block_first = 0, block_last = inputs.num_blocks;
    view.factor = factor_of(found);
    view.num_keys = static_cast<int>(params.seqlen_k) - row;
    if constexpr (kBounds > 0) {
      const scores_t scores(tile_coord_t(), SCORE_ARGUMENTS);
      const index_t key_first = index_t(item.tile) * (kCluster * kBlockN);
      const range_t queries =
          scores.queries_of(key_first, key_first + kCluster * kBlockN);
      block_first = int(queries.first) / kBlockM;
      block_last = (int(queries.last) + kBlockM - 1) / kBlockM;
      if (block_first >= block_last) {
        block_first = 0;
        block_last = 1;
        turn = -1;
      } else if constexpr (kOrdered) {
        // Queries that see keys of the tile after this one are the last of its own.
        const index_t next = key_first + kBlockN;
        const range_t later = scores.queries_of(next, next + kBlockN);
        const bool any = next < params.seqlen_k && later.first < later.last;
        turn_first = any ? int(later.first) / kBlockM * kBlockM : kMany;
      }
      const mask_bounds_t band = scores.mask_bounds(0, row);
      view.low = band.low;
      view.high = band.high;
      const bool tail = row + kBlockN > params.seqlen_k;
      view.whole_first = tail ? 1 << 30 : kBlockN - band.high;
      view.whole_last = -band.low - (kBlockM - 1);
    }
    if (kCuts && piece >= 0) {
      const unsigned num_pieces = inputs_now.num_pieces;
      const unsigned nth = unsigned(piece) % num_pieces;
      block_first = inputs_now.num_blocks * nth / num_pieces;
      block_last = inputs_now.num_blocks * (nth + 1) / num_pieces;
    }
    outputs[items & 1] = {at.dk, at.dv, item.tile, turn, turn_first, piece};
    view.count = (block_last - block_first) * inputs.num_summed;
#pragma unroll
    for (int part = 0; part < kAskers; ++part) {
      const unsigned here = next + part * sizeof(next_t);
      ptx::store_shared_s32x2(here, block_first, 0);
      ptx::store_shared_s32x2(here + 8, block_first, block_last);
    }
    if constexpr (!kSpread) {
      load_all(q_stage, block % kStagesDout);
      load_tile<kBlockN, kChunks>(smem_v, inputs.v_map, v_full, row, at.v.head,
                                  at.v.batch);
    }
    // Those that are summed with it, behind the first loads if they are this thread's.
    for (int n = 1; n < inputs.num_summed; ++n) {
      sources[n] = {entry[n].q, entry[n].dout};
    }
    if (!kSpread && view.count > 1) load_all(after(q_stage), (block + 1) % kStagesDout);
  };
  auto load_keys = [&](unsigned target, const ptx::tensor_map_t& map, unsigned full,
                       unsigned place) {
    const int4 from = ptx::load_shared_s32x4(place);
    const int batch[2] = {from.z, from.w};
    load_tile<kBlockN, kChunks>(target, map, full, from.x, from.y, batch);
  };
  // By thread 0, once no product reads the item before.
  auto load_k = [&](int number) {
    if (kSpread && number < inputs.num_items) {
      load_keys(smem_k, inputs.k_map, k_full, k_from);
    }
  };
  // By the first group: v of the item that thread 0 has told of, and its first two
  // blocks of queries.
  auto load_item = [&](int number, unsigned block) {
    if (number >= inputs.num_items || lane != 0) return;
    if (warp == kAskers) {
      load_keys(smem_v, inputs.v_map, v_full, k_from + 16);
      return;
    }
    load_parts(read_part(warp), q_stage, block % kStagesDout);
    if (view.count > 1) {
      load_parts(read_part(warp), after(q_stage), (block + 1) % kStagesDout);
    }
  };

  float sums_k[kSums], sums_v[kSums], s[kScores], dp[kScores];
  unsigned p[kBlockM / 16][4], ds[kBlockM / 16][4];
  int number = blockIdx.x / kCluster;  // of the item
  if constexpr (kOrdered) {
    if (threadIdx.x == 0) next_items[1] = atomicAdd(&counter->next, 1);
    __syncthreads();
    number = uniform(next_items[1]);
  }
  if (threadIdx.x == 0) {
    begin_item(number, items, block);
    load_k(number);
  }
  if constexpr (kSpread) {
    __syncthreads();
    if (group == 0) load_item(number, block);
  }
  while (number < inputs.num_items) {
    // Pair n of a thread's lse, or of its delta, of the queries in a stage.
    auto load_pair = [&](unsigned dout_stage, int n, int delta_at) {
      // Of a wide step, pairs n and n + 1 lie side by side.
      const unsigned place =
          kNarrowStep ? n * 32 : lane % 4 * 8 + n / 2 * 64 + n % 2 * 8;
      return ptx::load_shared_f32x2(lane_stats + dout_stage * kBytesStats + delta_at +
                                    place);
    };
    auto load_lse = [&](unsigned dout_stage, int n) {
      return load_pair(dout_stage, n, 0);
    };
    auto load_delta = [&](unsigned dout_stage, int n) {
      return load_pair(dout_stage, n, 4 * kBlockM);
    };
    // The pairs that are asked for ahead; one too many, since there may be none.
    float2 early_lse[kEarlyLse + 1], early_delta[kEarlyDelta + 1];
    // Of a wide step, pairs n and n + 1 lie side by side; `delta_at` is 0 for lse.
    auto load_two = [&](float2(&to)[2], unsigned dout_stage, int n, int delta_at) {
      const float4 x = ptx::load_shared_f32x4(
          smem_stats + lane % 4 * 16 + dout_stage * kBytesStats + delta_at + n * 32);
      to[0] = {x.x, x.y}, to[1] = {x.z, x.w};
    };
    auto ask_for_lse = [&](unsigned dout_stage) {
#pragma unroll
      for (int n = 0; n < kEarlyLse; n += 2) {
        if constexpr (!kByFours) {
          early_lse[n] = load_lse(dout_stage, n);
          early_lse[n + 1] = load_lse(dout_stage, n + 1);
        } else {
          float2 two[2];
          load_two(two, dout_stage, n, 0);
          early_lse[n] = two[0], early_lse[n + 1] = two[1];
        }
      }
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
      float2 two[2];
#pragma unroll
      for (int e = 0; e < kScores; e += 4) {
        const int n = e / 4;
        if (kByFours && n % 2 == 0) load_two(two, dout_stage, n, 4 * kBlockM);
        float2 d = kByFours          ? two[n % 2]
                   : n < kEarlyDelta ? early_delta[n]
                                     : load_delta(dout_stage, n);
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
    auto read_target = [&](unsigned q_stage) {
      return ptx::load_shared_s32(origins + 8 * q_stage + 4);
    };
    // Where kOrdered, by lane 0 of each warp: the sums that it gave to TMA
    // have been added, and the tile behind this one may add. A fence between, which
    // takes 600 cycles, has nothing left to wait for: the engine alone reads and writes
    // sums, in the L2 cache, and says when it has.
    auto turn_at = [&](int target_block) {
      return turns + (target_block * kWarps + int(threadIdx.x / 32));
    };
    const unsigned added_here = ptx::shared_address(added + threadIdx.x / 32);
    auto pass_turn = [&](int turn) {
      const int before = ptx::load_shared_s32(added_here);
      ptx::cp_async_bulk_wait_group();
      if (before >= 0) ptx::store_relaxed(turn_at(before), turn + 1);
    };
    // How many tiles have added to the block of dq that comes next; asked for ahead.
    int seen = 0;
    auto ask_for_turn = [&](unsigned q_stage) {
      if (kOrdered && lane == 0) {
        seen = ptx::load_relaxed(turn_at(read_target(q_stage)));
        pass_turn(outputs[items & 1].turn);
      }
    };
    auto wait_for_turn = [&](unsigned q_stage) {
      const int2 origin = ptx::load_shared_s32x2(origins + 8 * q_stage);
      const volatile outputs_t& to = outputs[items & 1];
      const int turn = to.turn;
      if (kBounds == 0 || origin.x >= to.turn_first) {
        while (seen < turn) seen = ptx::load_relaxed(turn_at(origin.y));
      }
      ptx::store_shared_s32(added_here, turn < 0 ? -1 : origin.y);
    };
    auto start_of = [&](int target_block) {
      return index_t(target_block) * (2 * kPart) + group * kPart + warp * (kPart / 4);
    };
    auto add_dq = [&](const float (&dq)[kSumsQ], int target_block) {
      if constexpr (kOrdered) {
        __syncwarp();
#pragma unroll
        for (int e = 0; e < kSumsQ; e += 4) {
          ptx::store_shared_f32x4(dq_target + e * 128, dq[e], dq[e + 1], dq[e + 2],
                                  dq[e + 3]);
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
          target_block = ptx::load_shared_s32(added_here);
          if (target_block >= 0) {
            ptx::cp_reduce_async_bulk_add(sums_q + start_of(target_block), dq_target,
                                          kPart / 4 * sizeof(float));
            ptx::cp_async_bulk_commit_group();
          }
        }
      } else {
        index_t start = start_of(target_block) + lane * 4;
        // One address for all; else a wide step has one made for each.
        if constexpr (!kNarrowStep) ptx::launder(start);
#pragma unroll
        for (int e = 0; e < kSumsQ; e += 4) {
          ptx::red_global_add(sums_q + start + e * 32, dq[e], dq[e + 1], dq[e + 2],
                              dq[e + 3]);
        }
      }
    };
    // The number of the next item is asked for in the last step.
    int next_number = number + static_cast<int>(gridDim.x) / kCluster;
    auto ask_number = [&](bool is_last) {
      if (kDynamic && is_last && threadIdx.x == 0 && rank() == 0) {
        next_number =
            atomicAdd(&counter->next, 1) + (kOrdered ? 0 : gridDim.x / kCluster);
      }
    };
    auto tell_number = [&](bool is_last) {
      if (kDynamic && is_last && threadIdx.x == 0 && rank() == 0) {
        int* const slot = &next_items[items & 1];
        if constexpr (kCluster > 1) {
          for (int n = 0; n < kCluster; ++n) {
            ptx::store_cluster_s32(ptx::mapa(ptx::shared_address(slot), n),
                                   next_number);
          }
        } else {
          *const_cast<volatile int*>(slot) = next_number;
        }
      }
    };

    // The first block: S and P, and of a narrow step dP.
    wait(k_full, items & 1);
    wait_for_q();  // then the view is there, too
    const unsigned last = block + uniform(view.count) - 1;
    start_s(q_stage);
    wait(v_full, items & 1);
    wait_for_dout(block);
    if constexpr (kNarrowStep) start_dp(block % kStagesDout);
    ask_for_lse(block % kStagesDout);
    ptx::wgmma_wait_group<kNarrowStep ? 1 : 0>();
    keep_order(s);
    softmax(block % kStagesDout, is_whole());
    if constexpr (kNarrowStep) {
      ask_for_delta(block % kStagesDout);
      ptx::wgmma_wait_group<0>();
      keep_order(dp);
    }

    // One block of queries, and S and P of the next one. No product is in flight
    // between steps: ptxas does not follow them around a loop (C7514).
    //
    // Here dP of the next one, too, so that the softmax runs beside dk and dP.
    auto narrow_step = [&](auto is_last, auto& dq) {
      constexpr bool kLast = decltype(is_last)::value;
      const unsigned this_q = q_stage, this_dout = block % kStagesDout;
      q_stage = after(q_stage);
      q_parity ^= q_stage == 0;
      start_dv(this_dout);
      // Whether stages are full is asked ahead, too.
      bool q_is_there = false, dout_is_there = false, whole = true;
      if constexpr (!kLast) {
        q_is_there = ptx::mbarrier_try_wait_parity(q_full + 8 * q_stage, q_parity);
      }
      make_ds(this_dout);
      if constexpr (kMakesDq) {
        store_ds();
        ptx::fence_proxy_async();
      }
      if constexpr (!kLast) {
        if (!q_is_there) wait_for_q();
        start_s(q_stage);
        ptx::wgmma_wait_group<1>();  // dv
        dout_is_there = ptx::mbarrier_try_wait_parity(
            dout_full + 8 * ((block + 1) % kStagesDout), (block + 1) / kStagesDout & 1);
        whole = is_whole();
      }
      const int target_block = kMakesDq && !kOrdered ? read_target(this_q) : 0;
      // dS of both warpgroups is there. Both are also done with dv of this block and dk
      // of the one before: the stages of the block after the next one are free.
      ptx::bar_sync<kNumThreads>(1);
      const bool more = !kLast && block + 1 != last;
      if constexpr (kCluster > 1) {
        // In each step, so that the number of the block gives the parity.
        if (threadIdx.x < kCluster) {
          // Nothing but reads of the stages is behind it, and all of those are done.
          ptx::mbarrier_arrive_cluster_relaxed(ptx::mapa(empty, threadIdx.x));
        }
      } else if constexpr (!kLate) {
        if (more && threadIdx.x == 0) load_all(after(q_stage), this_dout);
      }
      ask_number(kLast);
      if constexpr (kMakesDq) start_dq(dq);
      start_dk(this_q);
      ask_for_turn(this_q);
      if constexpr (!kLast) {
        if (!dout_is_there) wait_for_dout(block + 1);
        ask_for_lse((block + 1) % kStagesDout);
      }
      if constexpr (kCluster > 1) {
        if (more && threadIdx.x == 0) {
          wait(empty, block & 1);  // both blocks are done with the stages
          load_all(after(q_stage), this_dout);
        }
      } else if constexpr (kLate) {
        if (more && threadIdx.x == 0) load_all(after(q_stage), this_dout);
      }
      if (kOrdered && lane == 0) wait_for_turn(this_q);
      ptx::wgmma_wait_group<1>();  // all but dk
      if constexpr (kMakesDq) keep_order(dq);
      if constexpr (!kLast) keep_order(s);
      if constexpr (kMakesDq) add_dq(dq, target_block);
      if constexpr (!kLast) {
        start_dp((block + 1) % kStagesDout);
        softmax((block + 1) % kStagesDout, whole);
        ask_for_delta((block + 1) % kStagesDout);
      }
      ptx::wgmma_wait_group<0>();
      if constexpr (!kLast) keep_order(dp);
      tell_number(kLast);
    };

    // Here dP is asked for first. dv runs beside the making of dS, dk and dq beside the
    // softmax. A group waits for the other's dS behind dk only: half a step of slack.
    auto wide_step = [&](auto is_last) {
      constexpr bool kLast = decltype(is_last)::value;
      const unsigned this_q = q_stage, this_dout = block % kStagesDout;
      q_stage = after(q_stage);
      q_parity ^= q_stage == 0;
      if constexpr (kOrdered) ask_number(kLast);
      start_dp(this_dout);
      start_dv(this_dout);
      ask_for_delta(this_dout);
      ptx::wgmma_wait_group<1>();  // dP
      keep_order(dp);
      make_ds(this_dout);
      if constexpr (!kOrdered) ask_number(kLast);
      if constexpr (kMakesDq) {
        store_ds();
        ptx::fence_proxy_async();
      }
      ptx::wgmma_wait_group<0>();  // dv
      keep_order(sums_v);
      // This group's dS is there, and it is done with dv of this block and dk of the
      // one before.
      ptx::bar_arrive<kNumThreads>(1 + group + block % 2 * 2);
      asked_t asked;
      if constexpr (!kLast) {
        wait_for_q();
        start_s(q_stage);
      }
      start_dk(this_q);
      const int target_block = kMakesDq && !kOrdered ? read_target(this_q) : 0;
      bool whole = true;
      if constexpr (!kLast) {
        whole = is_whole();
        if (group == 0) asked = read_part(asker);
      }
      ask_for_turn(this_q);
      ptx::bar_sync<kNumThreads>(2 - group + block % 2 * 2);  // the other's, too
      float dq[kSumsQ];
      if constexpr (kMakesDq) start_dq(dq);
      // The stages of the block after the next one are free; in the last step all tiles
      // but that of k, for the next item.
      if (!kLast && block + 1 != last) {
        load_parts(asked, after(q_stage), this_dout);
      }
      if (kLast && threadIdx.x == 0) {
        tell_number(kLast);
        begin_item(next_number, items + 1, block + 1);
      }
      if (kLast && kSpread && group == 0) {
        ptx::bar_sync<128>(6);
        const int next =
            kDynamic ? *const_cast<volatile int*>(&next_items[items & 1]) : next_number;
        load_item(next, block + 1);
      }
      if constexpr (!kLast) {
        wait_for_dout(block + 1);
        ask_for_lse((block + 1) % kStagesDout);
        ptx::wgmma_wait_group<kMakesDq ? 2 : 1>();  // S
        keep_order(s);
        softmax((block + 1) % kStagesDout, whole);
      }
      if (kOrdered && lane == 0) wait_for_turn(this_q);
      ptx::wgmma_wait_group<0>();
      if constexpr (kMakesDq) {
        keep_order(dq);
        add_dq(dq, target_block);
      }
    };
    auto step = [&](auto is_last) {
      if constexpr (kNarrowStep) {
        narrow_step(is_last, dp);  // whose registers are free
      } else {
        wide_step(is_last);
      }
    };
#pragma unroll 1
    while (block != last) {
      step(flag_t<false>());
      ++block;
      accumulate = true;
    }
    step(flag_t<true>());
    ++block;
    keep_order(sums_k);
    keep_order(sums_v);
    // Every product of this item is done, in both blocks, before the next one's tiles.
    if constexpr (kCluster > 1) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    } else {
      ptx::bar_sync<kNumThreads>(5);
    }
    if constexpr (kDynamic) {
      number = uniform(*const_cast<volatile int*>(&next_items[items & 1]));
    } else {
      number += gridDim.x / kCluster;
    }
    ++items;
    if (threadIdx.x == 0) {
      if constexpr (kNarrowStep) begin_item(number, items, block);
      load_k(number);
    }

    const outputs_t to = outputs[(items - 1) & 1];
    if (kCuts && to.piece >= 0) {
      float4* const part = reinterpret_cast<float4*>(pieces) +
                           (index_t(to.piece) * 4 + group) * (kPart / 4) + warp * 256 +
                           lane;
#pragma unroll
      for (int e = 0; e < kSums; e += 4) {
        part[e * 8] =
            make_float4(sums_k[e], sums_k[e + 1], sums_k[e + 2], sums_k[e + 3]);
        part[2 * (kPart / 4) + e * 8] =
            make_float4(sums_v[e], sums_v[e + 1], sums_v[e + 2], sums_v[e + 3]);
      }
      continue;
    }
    const int key_first = (to.tile * kCluster + rank()) * kBlockN;
    const int num_keys = static_cast<int>(params.seqlen_k) - key_first;
    const int row_thread = group * 64 + warp * 16 + lane / 4;  // and the one 8 below
    float odd = store_rows(
        sums_k, unfactor_of(factor_of(found), static_cast<float>(params.scale)),
        dk + to.dk + key_first * grads.row[0], grads.row[0], row_thread, num_keys,
        static_cast<int>(params.head_dim));
    odd = store_rows(sums_v, 1 / kFactorP, dv + to.dv + key_first * grads.row[1],
                     grads.row[1], row_thread, num_keys,
                     static_cast<int>(params.head_dim_v), odd);
    if (odd != 0) found->odd = 1;
    if (kOrdered && lane == 0) {
      pass_turn(to.turn);
      ptx::store_shared_s32(added_here, -1);
    }
  }
  if (kOrdered && lane == 0) ptx::cp_async_bulk_wait_group();
  // The last block to finish leaves both numbers at 0 for the next launch.
  if (kDynamic && threadIdx.x == 0 && rank() == 0 &&
      atomicAdd(&counter->finished, 1) == gridDim.x / kCluster - 1) {
    counter->next = 0;
    counter->finished = 0;
    __threadfence();
  }
}

// SPDX-License-Identifier: MIT
// attention_vjp_hopper_64: vjp_hopper.cu for heads of up to 64 columns and few queries:
// a block runs on from item to item.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), a block of queries at a
//            time, all products transposed so that keys are rows:
//                S = k q^T,  P = exp(scale S - lse),  dP = v dO^T,  dS = P (dP - delta)
//                dv += P dO,  dk += dS q,  dq += dS^T k
//            P and dS come out of one product in the registers that the next one reads;
//            dS alone goes through shared memory, for dq. While products of one block
//            of queries run, so does the softmax of the next, be it of the next item
// Grid       a block a multiprocessor. An item is a tile of keys of a kept entry;
//            blocks take item after item, from a counter where items differ in length
// Threads    two warpgroups, 64 keys each; threads of the first ask the copy engine
// Tiles      k        kBlockN x kHeadDim   shared, 2 stages, one an item
//            v        kBlockN x kHeadDim   shared
//            q, dO    kBlockM x kHeadDim   shared, 3 and 2 stages
//            dS       kBlockN x kBlockM    shared, twice
//            S, P, dP, dS, dk, dv, dq  registers, as wgmma lays them out
// Memory     global: k, v, dk and dv once; q and dO once a tile of keys, mostly from
//            L2; dq is added to sums of floats, by red or by the copy engine
// Numbers    S, P, dP, dS and sums in float; P and dS rounded to elem_t before
//            products. The order of sums in dq differs from run to run, unless it is
//            kOrdered; without kMakesDq dk and dv alone are made, with the same bits
// Limits     q, k, v and dO as a tensor map takes them (_tensormap.py); head_dim and
//            head_dim_v multiples of 8 up to kHeadDim. Infinities and NaN in what a
//            query does not see come through as NaN, and so does a dS too large for
//            elem_t: found->odd says that the gradients have to be made in another way
#include "attention/vjp_hopper.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/opaque.cuh"
#include "ptx/relaxed.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma_shapes.cuh"

#if !defined(BOUNDS) || !defined(MAKES_DQ) || !defined(ORDERED)
#error "BOUNDS, MAKES_DQ and ORDERED come from the host"
#endif
// Else vjp_hopper_queries.cu makes dq, with the same bits in every run.
constexpr bool kMakesDq = MAKES_DQ;
constexpr int kBlockN = 128;  // keys of a tile
// Which queries see a key by its position: 0 all, 1 from a first one on, 2 from a first
// one to a last one.
constexpr int kBounds = BOUNDS;
// Tiles of keys add to a block of dq one after the other, from the last to the first:
// then it has the same bits in every run. Each warp has its own part of dq, and waits
// for that warp of the tile before. No block of threads waits for one that has not
// begun: items are taken in the order in which they add.
constexpr bool kOrdered = ORDERED;
// Items differ in length, or their order counts.
constexpr bool kDynamic = kBounds > 0 || kOrdered;
static_assert(kNumThreads == 256 && kHeadDim == 64 && kBlockM == 128);
static_assert(!kOrdered || kMakesDq);
constexpr int kWarps = kNumThreads / 32;
// The last items are cut into pieces, where there is no counter that shares them out.
constexpr bool kCuts = kMakesDq && !kDynamic;

// q is read for S and an iteration later for dk, dO in one iteration. Both are asked
// for two blocks ahead.
constexpr int kStagesQ = 3, kStagesDout = 2;
constexpr int kMany = 1 << 30;

// A tile: [rows][128 bytes], swizzled.
constexpr int kBytesN = kBlockN * 128, kBytesM = kBlockM * 128;
constexpr int kBytesDs = 2 * kBytesM;  // columns are keys: a chunk a warpgroup
constexpr int kBytesStats = 2 * kBlockM * 4;
constexpr int kBytesDq = kOrdered ? 2 * kPart * 4 : 0;  // on its way to the copy engine

constexpr int kScores = kBlockM / 2;  // of S, P, dP and dS, numbers of a thread
constexpr int kSums = kHeadDim / 2;   // of dk and dv
constexpr int kSumsQ = kPart / 128;   // of dq

// What a block of queries is asked for in, each by the first thread of a warp, since
// all warps wait for one that asks. A fourth asks for keys.
constexpr int kQ = 0, kDout = 1, kStats = 2, kAskers = 3;
constexpr int kAsksForKeys = 3 * 32;
template <int kNumber>
struct part_t {
  static constexpr int value = kNumber;
};

// What a thread asks for next: a block of queries of an entry, within which blocks, and
// where the rows of that entry lie. There are no registers for it.
struct alignas(16) next_t {
  int block, entry, first, last;
  rows_t rows;
};

// An item, as all threads are told of it: its first entry, and numbers.
struct alignas(16) item_t {
  places_t entry;
  int numbers[16];
};
static_assert(sizeof(places_t) == 80 && sizeof(item_t) == 144);
enum number_t {
  kCount,  // blocks of queries, over all summed entries; 0: there is no item
  kFirstEntry,
  kBlockFirst,
  kBlockLast,
  kRow,      // of the first key
  kNumKeys,  // from there on; may be more than the tile has
  // Key j, counted from the first, is seen by query i if low <= j - i < high. No key is
  // hidden from blocks whose first query lies in [whole_first, whole_last].
  kLow,
  kHigh,
  kWholeFirst,
  kWholeLast,
  // Where kOrdered: how many tiles add to a block of dq before this one does, of those
  // from query `turn_first` on; to others it is the first. < 0: it adds to none.
  kTurn,
  kTurnFirst,
  kPiece  // of those that items are cut into; < 0: it is whole
};
// What is done with, what is computed, and what is asked for.
constexpr int kItems = 3;

// What is in shared memory behind the tiles.
struct told_t {
  unsigned long long full[3 + kStagesQ + kStagesDout];  // k, v, q, dO
  unsigned long long told;                              // of an item
  next_t next[kAskers];
  item_t items[kItems];
  // Of each stage of q: its first query, and its number among the blocks of sums_q.
  int2 origins[kStagesQ];
  // Of each warp, the block of dq that it adds to, or has added to without having told
  // so; < 0: none.
  int added[kWarps];
};
static_assert(sizeof(told_t) <= 1024, "what the host asks for");

// S = k q^T or dP = v dO^T. A step is 16 columns: 32 bytes of a row of 128.
__device__ __forceinline__ void multiply_scores(float (&s)[kScores],
                                                unsigned long long kv,
                                                unsigned long long qd) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    ptx::wgmma_t<elem_t, kBlockM>::ss(s, kv + step * 2, qd + step * 2, step > 0);
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

// This warpgroup's rows of dS^T k. A step is 16 keys.
__device__ __forceinline__ void multiply_dq(float (&dq)[kSumsQ],
                                            unsigned long long ds,
                                            unsigned long long k) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    ptx::wgmma_t<elem_t, 64>::ss_mn(dq, ds + (chunk * kBytesM + inside) / 16,
                                    k + step * (16 * 128 / 16), step > 0);
  }
}

// The tile of keys and the kept entry of an item. In a section the tiles that most
// queries see come first, or those that add first.
__device__ __forceinline__ int2 tile_and_kept(int number, const inputs_t& inputs) {
  const unsigned n = number, num_tiles = inputs.num_tiles;
  if constexpr (kDynamic) {
    const unsigned in_section = inputs.section * num_tiles;
    const unsigned first = n / in_section * inputs.section;
    const unsigned rest = n % in_section;
    const unsigned width = min(inputs.num_kept - first, unsigned(inputs.section));
    const int tile = rest / width;
    return make_int2(kOrdered ? inputs.num_tiles - 1 - tile : tile,
                     first + rest % width);
  } else {
    return make_int2(n % num_tiles, n / num_tiles);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_vjp_hopper_64(const __grid_constant__ inputs_t inputs,
                            const places_t* __restrict__ entries,  // vjp_hopper.cuh
                            const float* __restrict__ stats,       // vjp_hopper.cuh
                            float* __restrict__ sums_q,            // vjp_hopper.cuh
                            int* turns,                            // vjp_hopper.cuh
                            float* __restrict__ pieces,            // vjp_hopper.cuh
                            elem_t* __restrict__ dk,  // as k, summed over entries
                            elem_t* __restrict__ dv,  // as v, summed over entries
                            found_t* __restrict__ found,
                            counter_t* __restrict__ counter,
                            SCORE_PARAMETERS,
                            const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(1024) unsigned char smem[];
  // A swizzled tile starts at a multiple of 1024, as does what the host asks for.
  constexpr int kV = 2 * kBytesN, kQs = kV + kBytesN, kDouts = kQs + kStagesQ * kBytesM,
                kDs = kDouts + kStagesDout * kBytesM, kDqs = kDs + 2 * kBytesDs,
                kAllStats = kDqs + kBytesDq,
                kTold = kAllStats + kStagesDout * kBytesStats;
  const unsigned smem_k = ptx::shared_address(smem);
  const unsigned smem_v = smem_k + kV, smem_q = smem_k + kQs,
                 smem_dout = smem_k + kDouts, smem_ds = smem_k + kDs,
                 smem_dq = smem_k + kDqs, smem_stats = smem_k + kAllStats;
  told_t& told = *reinterpret_cast<told_t*>(smem + kTold);
  const unsigned k_full = smem_k + kTold, v_full = k_full + 16, q_full = v_full + 8,
                 dout_full = q_full + 8 * kStagesQ,
                 is_told = dout_full + 8 * kStagesDout, next = is_told + 16,
                 told_items = next + kAskers * sizeof(next_t),
                 origins = told_items + kItems * sizeof(item_t);

  const int group = uniform(threadIdx.x / 128);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int warp_of_block = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    if (smem_k % 1024 != 0) __trap();
    for (int n = 0; n < 4 + kStagesQ + kStagesDout; ++n) {
      ptx::mbarrier_init(k_full + 8 * n, 1);
    }
    ptx::fence_mbarrier_init();
  }
  if (lane == 0) told.added[warp_of_block] = -1;
  ptx::griddepcontrol_wait();
  // Blocks of the next kernel have no room before those of this one are done.
  ptx::griddepcontrol_launch_dependents();
  const float factor = factor_of(found);  // of dP

  // A operands: rows of this warpgroup; B operands; and operands whose rows are summed.
  const unsigned long long k_rows = descriptor(smem_k + group * 8192, 16),
                           v_rows = descriptor(smem_v + group * 8192, 16),
                           q_rows = descriptor(smem_q, 16),
                           dout_rows = descriptor(smem_dout, 16),
                           q_sums = descriptor(smem_q, kBytesM),
                           dout_sums = descriptor(smem_dout, kBytesM);
  // Of dq, a warpgroup makes 64 of 128 rows.
  const unsigned long long ds_rows = descriptor(smem_ds + group * 8192, 16);
  const unsigned long long k_sums = descriptor(smem_k, kBytesN);
  // For stmatrix a lane gives a row of a matrix: queries n and n + 8 of two groups of
  // 8 keys. The swizzle flips bits 4 to 6 of an address by bits 7 to 9.
  const unsigned ds_target = smem_ds + group * kBytesM +
                             (lane / 16 * 8 + lane % 8) * 128 +
                             ((32 * warp + 16 * (lane / 8 % 2)) ^ (lane % 8 * 16));
  const unsigned lane_stats = smem_stats + lane % 4 * 16;
  // This warp's dq on its way to the copy engine.
  const unsigned dq_target = smem_dq + (warp_of_block * kSumsQ / 4 * 32 + lane) * 16;

  unsigned items = 0;  // of this block, so far
  unsigned block = 0;  // of queries, so far: gives stages and parities but those of q
  // Those of q. A remainder by 3 would be made in vector registers, and all descriptors
  // with it, which then are moved to uniform ones: 100 instructions a step.
  unsigned q_stage = 0, q_parity = 0;
  unsigned last = 0;  // block of the item
  auto after = [](unsigned stage) { return stage + 1 == kStagesQ ? 0u : stage + 1; };
  static_assert(kItems == kStagesQ);
  // Where all are told of this item.
  unsigned told_here = told_items, told_next = told_items + sizeof(item_t);
  auto after_told = [&](unsigned address) {
    address += sizeof(item_t);
    return address == told_items + kItems * sizeof(item_t) ? told_items : address;
  };
  auto number_of = [](unsigned told, number_t number) {
    return ptx::load_shared_s32(told + sizeof(places_t) + 4 * number);
  };

  // What thread 0 tells of an item is there.
  auto wait_for_item = [&](unsigned items) { wait(is_told, items & 1); };
  auto wait_for_k = [&](unsigned items) {
    wait(k_full + 8 * (items & 1), items >> 1 & 1);
  };
  auto wait_for_q = [&] { wait(q_full + 8 * q_stage, q_parity); };
  auto wait_for_dout = [&](unsigned number) {
    wait(dout_full + 8 * (number % kStagesDout), number / kStagesDout & 1);
  };

  // What the next block of queries is asked for with.
  struct asked_t {
    int4 next, rows;
  };
  auto read_next = [&](int asker) {
    const unsigned from = next + asker * sizeof(next_t);
    return asked_t{ptx::load_shared_s32x4(from), ptx::load_shared_s32x4(from + 16)};
  };
  // The first block of the next item.
  auto read_first = [&](unsigned told, int asker) {
    const int4 blocks = ptx::load_shared_s32x4(told + sizeof(places_t));
    const unsigned rows_at = asker == kQ ? 0 : sizeof(rows_t);
    return asked_t{make_int4(blocks.z, blocks.y, blocks.z, blocks.w),
                   ptx::load_shared_s32x4(told + rows_at)};
  };
  auto store_s32x4 = [](unsigned address, int4 x) {
    ptx::store_shared_s32x2(address, x.x, x.y);
    ptx::store_shared_s32x2(address + 8, x.z, x.w);
  };
  // One thread asks for its part of a block of queries, into these stages, and writes
  // down what it asks for next.
  auto load_part = [&](auto part, auto is_first, asked_t asked, unsigned q_stage,
                       unsigned dout_stage) {
    constexpr int kPartHere = decltype(part)::value;
    constexpr bool kFirst = decltype(is_first)::value;
    const unsigned here = next + kPartHere * sizeof(next_t);
    const int block = asked.next.x, row = block * kBlockM;
    const int4 rows = asked.rows;
    const bool more = block + 1 < asked.next.w;
    ptx::store_shared_s32x2(here, more ? block + 1 : asked.next.z,
                            asked.next.y + !more);
    if constexpr (kFirst) {
      ptx::store_shared_s32x2(here + 8, asked.next.z, asked.next.w);
      store_s32x4(here + 16, rows);
    }
    if constexpr (kPartHere == kQ) {
      const unsigned barrier = q_full + 8 * q_stage;
      ptx::store_shared_s32x2(origins + 8 * q_stage, row, rows.w + block);
      ptx::mbarrier_arrive_expect_tx(barrier, kBytesM);
      ptx::cp_async_bulk_tensor_5d(smem_q + q_stage * kBytesM, inputs.q_map, barrier, 0,
                                   row, rows.x, rows.y, rows.z);
    } else {
      const unsigned barrier = dout_full + 8 * dout_stage;
      if constexpr (kPartHere == kDout) {
        ptx::mbarrier_arrive_expect_tx(barrier, kBytesM + kBytesStats);
        ptx::cp_async_bulk_tensor_5d(smem_dout + dout_stage * kBytesM, inputs.dout_map,
                                     barrier, 0, row, rows.x, rows.y, rows.z);
      } else {
        ptx::cp_async_bulk(smem_stats + dout_stage * kBytesStats,
                           stats + index_t(rows.w + block) * (2 * kBlockM), kBytesStats,
                           barrier);
      }
    }
    if (!more && inputs.num_summed > 1) {
      const places_t& entry = entries[asked.next.y + 1];
      store_s32x4(here + 16, *reinterpret_cast<const int4*>(
                                 kPartHere == kQ ? &entry.q : &entry.dout));
    }
  };
  // By the first thread of each of three warps: the next block, or the first one of the
  // item that is told of there.
  auto load_parts = [&](auto is_first, unsigned told, unsigned q_stage,
                        unsigned dout_stage) {
    auto load = [&](auto part) {
      constexpr int kPartHere = decltype(part)::value;
      constexpr bool kFirst = decltype(is_first)::value;
      load_part(part, is_first,
                kFirst ? read_first(told, kPartHere) : read_next(kPartHere), q_stage,
                dout_stage);
    };
    if (threadIdx.x == 0) {
      load(part_t<kQ>());
    } else if (threadIdx.x == 32) {
      load(part_t<kDout>());
    } else if (threadIdx.x == 64) {
      load(part_t<kStats>());
    }
  };
  // One thread asks for the keys of an item, if there is one.
  auto load_keys = [&](unsigned told, unsigned target, const ptx::tensor_map_t& map,
                       unsigned barrier, unsigned rows_at) {
    if (number_of(told, kCount) == 0) {
      ptx::mbarrier_arrive(barrier);
      return;
    }
    const int4 rows = ptx::load_shared_s32x4(told + rows_at);
    ptx::mbarrier_arrive_expect_tx(barrier, kBytesN);
    ptx::cp_async_bulk_tensor_5d(target, map, barrier, 0, number_of(told, kRow), rows.x,
                                 rows.y, rows.z);
  };
  auto load_k = [&](unsigned told, unsigned items) {
    load_keys(told, smem_k + (items & 1) * kBytesN, inputs.k_map,
              k_full + 8 * (items & 1), 2 * sizeof(rows_t));
  };
  auto load_v = [&](unsigned told) {
    load_keys(told, smem_v, inputs.v_map, v_full, 3 * sizeof(rows_t));
  };

  // Thread 0 tells of an item. With a warp-wide instruction in here, the compiler would
  // take numbers that are the same in all lanes for different ones.
  auto describe = [&](int number, unsigned address) {
    auto tell = [&](number_t number, int x) {
      ptx::store_shared_s32(address + sizeof(places_t) + 4 * number, x);
    };
    // Reciprocals of what is divided by are not worth registers between items.
    const inputs_t& inputs_now = ptx::anew(inputs);
    const params_t& params_now = ptx::anew(params);
    if (number >= inputs.num_items) {
      tell(kCount, 0);
      ptx::mbarrier_arrive(is_told);
      return;
    }
    int piece = -1;
    if (kCuts && number >= inputs.num_whole) {
      piece = number - inputs.num_whole;
      number = inputs.num_whole + unsigned(piece) / unsigned(inputs_now.num_pieces);
    }
    const int2 which = tile_and_kept(number, inputs_now);
    const int tile = which.x, entry = which.y * inputs_now.num_summed;
    const int row = tile * kBlockN;
    tell(kFirstEntry, entry);
    tell(kRow, row);
    tell(kNumKeys, static_cast<int>(params_now.seqlen_k) - row);
    int turn = inputs_now.num_tiles - 1 - tile, turn_first = 0;
    // The blocks of queries that see keys of the tile; at least one.
    int block_first = 0, block_last = inputs_now.num_blocks;
    if constexpr (kBounds > 0) {
      const scores_t scores(place_t(), params_now, bias, mask, sinks, alibi_slopes,
                            query_offsets, query_lengths, key_lengths, query_offset);
      const range_t queries = scores.queries_of(row, row + kBlockN);
      block_first = int(queries.first) / kBlockM;
      block_last = (int(queries.last) + kBlockM - 1) / kBlockM;
      if (block_first >= block_last) {
        block_first = 0;
        block_last = 1;
        turn = -1;
      } else if constexpr (kOrdered) {
        // Queries that see keys of the tile after this one are the last of its own.
        const index_t next = row + kBlockN;
        const range_t later = scores.queries_of(next, next + kBlockN);
        const bool any = next < params_now.seqlen_k && later.first < later.last;
        turn_first = any ? int(later.first) / kBlockM * kBlockM : kMany;
      }
      const band_t band = scores.band(0, row);
      tell(kLow, band.low);
      tell(kHigh, band.high);
      const bool tail = row + kBlockN > params_now.seqlen_k;
      tell(kWholeFirst, tail ? 1 << 30 : kBlockN - band.high);
      tell(kWholeLast, -band.low - (kBlockM - 1));
    }
    if (kCuts && piece >= 0) {
      const unsigned num_pieces = inputs_now.num_pieces;
      const unsigned own = unsigned(piece) % num_pieces;
      block_first = inputs_now.num_blocks * own / num_pieces;
      block_last = inputs_now.num_blocks * (own + 1) / num_pieces;
    }
    tell(kPiece, piece);
    tell(kTurn, turn);
    tell(kTurnFirst, turn_first);
    tell(kBlockFirst, block_first);
    tell(kBlockLast, block_last);
    tell(kCount, (block_last - block_first) * inputs_now.num_summed);
    ptx::mbarrier_arrive_expect_tx(is_told, sizeof(places_t));
    ptx::cp_async_bulk(address, entries + entry, sizeof(places_t), is_told);
  };

  float sums_k[kSums], sums_v[kSums], s[kScores], dp[kScores];
  unsigned p[kBlockM / 16][4], ds[kBlockM / 16][4];
  int number = blockIdx.x;  // of the item that is told of next, by thread 0
  auto ask_number = [&] {
    if constexpr (kDynamic) {
      number = atomicAdd(&counter->next, 1) + (kOrdered ? 0 : gridDim.x);
    } else {
      number += gridDim.x;
    }
  };

  // Fours n of a thread's lse, or of its delta, of the queries in a stage.
  auto load_lse = [&](unsigned dout_stage, int n) {
    return ptx::load_shared_f32x4(lane_stats + dout_stage * kBytesStats + n * 64);
  };
  auto load_delta = [&](unsigned dout_stage, int n) {
    return ptx::load_shared_f32x4(lane_stats + dout_stage * kBytesStats + 4 * kBlockM +
                                  n * 64);
  };
  // The shared memory answers late while sums of dq leave through it; lse is asked for
  // ahead.
  float4 lse[kScores / 8];
  auto ask_for_lse = [&](unsigned dout_stage) {
#pragma unroll
    for (int n = 0; n < kScores / 8; ++n) lse[n] = load_lse(dout_stage, n);
  };

  // s becomes P of the block of queries in a stage, and p the same as operand. Number
  // e stands in column e / 4 * 8 + lane % 4 * 2 + e % 2, row e / 2 % 2 * 8.
  auto softmax = [&](unsigned told, bool whole) {
    if (!whole) {
      // A row's key is hidden from queries before `first`, and after `last`.
      const int num_keys = number_of(told, kNumKeys);
      const int row_thread = group * 64 + warp * 16 + lane / 4;
      int first[2] = {-kMany, -kMany}, last = kMany;
      if constexpr (kBounds > 0) {
        const int origin = ptx::load_shared_s32(origins + 8 * q_stage);
        const int corner = row_thread - origin - lane % 4 * 2;
        first[0] = corner - number_of(told, kHigh) + 1;
        first[1] = first[0] + 8;
        if (kBounds == 2) last = corner - number_of(told, kLow);
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
    for (int e = 0; e < kScores; e += 8) {
      const float4 x = lse[e / 8];
      const float of_column[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int f = e; f < e + 8; ++f) {
        s[f] = ptx::ex2_approx_ftz(s[f] * inputs.to_log2 -
                                   of_column[f / 4 % 2 * 2 + f % 2]);
      }
    }
#pragma unroll
    for (int e = 0; e < kScores; e += 2) {
      p[e / 8][e / 2 % 4] = pair16_t::from(s[e + 1], s[e]);
    }
  };
  // Whether no key is hidden from the block of queries in the stage.
  auto is_whole = [&](unsigned told) {
    if constexpr (kBounds == 0) return number_of(told, kNumKeys) >= kBlockN;
    const int origin = ptx::load_shared_s32(origins + 8 * q_stage);
    return number_of(told, kWholeFirst) <= origin &&
           (kBounds == 1 || origin <= number_of(told, kWholeLast));
  };
  auto make_ds = [&](unsigned dout_stage) {
#pragma unroll
    for (int e = 0; e < kScores; e += 8) {
      const float4 x = load_delta(dout_stage, e / 8);
      const float of_column[4] = {x.x, x.y, x.z, x.w};
      float d[8];
#pragma unroll
      for (int f = 0; f < 8; ++f) {
        d[f] = kNarrow<elem_t>
                   ? dp[e + f] * factor - of_column[f / 4 * 2 + f % 2] * factor
                   : dp[e + f] - of_column[f / 4 * 2 + f % 2];
        d[f] *= s[e + f];
      }
#pragma unroll
      for (int f = 0; f < 8; f += 2) {
        ds[e / 8][f / 2] = pair16_t::from(d[f + 1], d[f]);
      }
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
  // Each with the stage of what it reads.
  auto start_s = [&](unsigned items) {
    ptx::wgmma_fence();
    multiply_scores(s, k_rows + (items & 1) * (kBytesN / 16),
                    q_rows + q_stage * (kBytesM / 16));
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
    multiply_dq(dq, ds_rows + block % 2 * (kBytesDs / 16),
                k_sums + (items & 1) * (kBytesN / 16));
    ptx::wgmma_commit_group();
  };
  auto read_target = [&](unsigned q_stage) {
    return ptx::load_shared_s32(origins + 8 * q_stage + 4);
  };
  // Where kOrdered, by lane 0 of each warp: the sums that it gave to the copy engine
  // have been added, and the tile behind this one may add. A fence between, which
  // takes 600 cycles, has nothing left to wait for: the engine alone reads and writes
  // sums, in the L2 cache, and says when it has.
  auto turn_at = [&](int target_block) {
    return turns + (target_block * kWarps + warp_of_block);
  };
  const unsigned added_here = ptx::shared_address(told.added + warp_of_block);
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
      pass_turn(number_of(told_here, kTurn));
    }
  };
  auto wait_for_turn = [&](unsigned q_stage) {
    const int2 origin = ptx::load_shared_s32x2(origins + 8 * q_stage);
    const int turn = number_of(told_here, kTurn);
    if (kBounds == 0 || origin.x >= number_of(told_here, kTurnFirst)) {
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
                                        kPart);
          ptx::cp_async_bulk_commit_group();
        }
      }
    } else {
      index_t start = start_of(target_block) + lane * 4;
      ptx::forget(start);  // one address for all; else one is made for each
#pragma unroll
      for (int e = 0; e < kSumsQ; e += 4) {
        ptx::red_global_add(sums_q + start + e * 32, dq[e], dq[e + 1], dq[e + 2],
                            dq[e + 3]);
      }
    }
  };

  // The first item, its first two blocks of queries, and the keys of the second.
  if (threadIdx.x == 0) {
    if constexpr (kOrdered) ask_number();
    describe(number, told_here);
  }
  __syncthreads();
  wait_for_item(0);
  if (threadIdx.x == kAsksForKeys) {
    load_k(told_here, 0);
    load_v(told_here);
  }
  load_parts(flag_t<true>(), told_here, 0, 0);
  const int first_count = number_of(told_here, kCount);
  if (first_count > 1) load_parts(flag_t<false>(), told_here, 1, 1);
  if (threadIdx.x == 0 && first_count == 1) {
    ask_number();
    describe(number, told_next);
  }
  if (warp_of_block != kAsksForKeys / 32) ptx::bar_arrive<kNumThreads>(5);
  wait_for_k(0);
  wait_for_q();
  start_s(0);
  wait_for_dout(0);
  ask_for_lse(0);
  ptx::wgmma_wait_group<0>();
  keep_order(s);
  softmax(told_here, is_whole(told_here));

  // One block of queries, and S and P of the next one, which may be of the next item.
  // No product is in flight between steps: ptxas does not follow them around a loop
  // (C7514). dv runs beside the making of dS, dk and dq beside the softmax. A group
  // waits for the other's dS behind dk only: half a step of slack.
  auto step = [&](auto is_last) {
    constexpr bool kLast = decltype(is_last)::value;
    const unsigned this_q = q_stage, this_dout = block % kStagesDout;
    q_stage = after(q_stage);
    q_parity ^= q_stage == 0;
    const unsigned told_then = kLast ? told_next : told_here;
    if constexpr (kLast) {
      wait_for_item(items + 1);
      if (group == 0) {
        const int next_count = number_of(told_next, kCount);
        // The stages that the block before has left.
        if (next_count > 0) {
          load_parts(flag_t<true>(), told_next, q_stage, (block + 1) % kStagesDout);
        }
        if (warp_of_block == kAsksForKeys / 32) {
          ptx::bar_sync<kNumThreads>(5);
          if (lane == 0) load_k(told_next, items + 1);
        }
        if (next_count == 1 && threadIdx.x == 0) ask_number();
      }
    } else {
      if (block + 1 == last && threadIdx.x == 0) ask_number();
    }
    start_dp(this_dout);
    start_dv(this_dout);
    ptx::wgmma_wait_group<1>();  // dP
    keep_order(dp);
    make_ds(this_dout);
    store_ds();  // without dq, too: else ptxas makes dS later, and spills
    if constexpr (kMakesDq) ptx::fence_proxy_async();
    ptx::wgmma_wait_group<0>();  // dv
    keep_order(sums_v);
    // This group's dS is there, and it is done with dv of this block and dk of the
    // one before.
    ptx::bar_arrive<kNumThreads>(1 + group + block % 2 * 2);
    // Of the item behind the last one there is nothing but a k that has come; its S and
    // P are of what lies about.
    bool exists = true;
    if constexpr (kLast) {
      wait_for_k(items + 1);
      exists = number_of(told_next, kCount) > 0;
    }
    if (exists) wait_for_q();
    start_s(kLast ? items + 1 : items);
    start_dk(this_q);
    ask_for_turn(this_q);
    ptx::bar_sync<kNumThreads>(2 - group + block % 2 * 2);  // the other's, too
    float dq[kSumsQ];
    if constexpr (kMakesDq) start_dq(dq);
    // The stages of the block after the next one are free, and in the last step v.
    const int target_block = kMakesDq && !kOrdered ? read_target(this_q) : 0;
    const bool whole = is_whole(told_then);
    // The next item is told of in the last step but one; where there is one step only,
    // in the last step of the item before.
    if constexpr (!kLast) {
      if (block + 1 != last) {
        load_parts(flag_t<false>(), told_here, after(q_stage), this_dout);
      } else if (threadIdx.x == 0) {
        describe(number, told_next);
      }
    } else if (group == 0) {
      const int next_count = number_of(told_next, kCount);
      if (next_count > 1) {
        load_parts(flag_t<false>(), told_next, after(q_stage), this_dout);
      } else if (next_count == 1 && threadIdx.x == 0) {
        describe(number, after_told(told_next));
      }
      if (threadIdx.x == kAsksForKeys) load_v(told_next);
    }
    if (exists) wait_for_dout(block + 1);
    ask_for_lse((block + 1) % kStagesDout);
    ptx::wgmma_wait_group<kMakesDq ? 2 : 1>();  // S
    keep_order(s);
    softmax(told_then, whole);
    if (kOrdered && lane == 0) wait_for_turn(this_q);
    ptx::wgmma_wait_group<0>();
    if constexpr (kMakesDq) {
      keep_order(dq);
      add_dq(dq, target_block);
    }
  };
  int count = uniform(number_of(told_here, kCount));
#pragma unroll 1
  while (count != 0) {
    wait(v_full, items & 1);
    last = block + count - 1;
#pragma unroll 1
    while (block != last) {
      step(flag_t<false>());
      ++block;
      accumulate = true;
    }
    step(flag_t<true>());
    ++block;
    accumulate = false;
    keep_order(sums_k);
    keep_order(sums_v);
    count = uniform(number_of(told_next, kCount));
    // This warp is done with k: that of the item after the next one may come.
    if (count != 0 && warp_of_block != kAsksForKeys / 32) {
      ptx::bar_arrive<kNumThreads>(5);
    }

    const index_t row = number_of(told_here, kRow);
    const int num_keys = number_of(told_here, kNumKeys);
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
    const int4 offsets = ptx::load_shared_s32x4(told_here + 4 * sizeof(rows_t));
    auto offset_of = [](int low, int high) {
      return index_t(high) << 32 | static_cast<unsigned>(low);
    };
    const int piece = number_of(told_here, kPiece);
    if (kCuts && piece >= 0) {
      float4* const part = reinterpret_cast<float4*>(pieces) +
                           (index_t(piece) * 4 + group) * (kPart / 4) + warp * 256 +
                           lane;
#pragma unroll
      for (int e = 0; e < kSums; e += 4) {
        part[e * 8] =
            make_float4(sums_k[e], sums_k[e + 1], sums_k[e + 2], sums_k[e + 3]);
        part[2 * (kPart / 4) + e * 8] =
            make_float4(sums_v[e], sums_v[e + 1], sums_v[e + 2], sums_v[e + 3]);
      }
    } else {
      store(sums_k, unfactor_of(factor, static_cast<float>(params.scale)),
            dk + offset_of(offsets.x, offsets.y) + row * grads.row[0], grads.row[0],
            static_cast<int>(params.head_dim));
      store(sums_v, 1 / kFactorP,
            dv + offset_of(offsets.z, offsets.w) + row * grads.row[1], grads.row[1],
            static_cast<int>(params.head_dim_v));
    }
    if (odd != 0) found->odd = 1;
    if (kOrdered && lane == 0) {
      pass_turn(number_of(told_here, kTurn));
      ptx::store_shared_s32(added_here, -1);
    }
    ++items;
    told_here = told_next;
    told_next = after_told(told_next);
  }
  if (kOrdered && lane == 0) ptx::cp_async_bulk_wait_group();
  // The last block to finish leaves both numbers at 0 for the next launch.
  if (kDynamic && threadIdx.x == 0 &&
      atomicAdd(&counter->finished, 1) == gridDim.x - 1) {
    counter->next = 0;
    counter->finished = 0;
    __threadfence();
  }
}

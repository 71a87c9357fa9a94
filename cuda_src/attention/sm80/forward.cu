// SPDX-License-Identifier: MIT
// attention_mma: FlashAttention-2 on tensor cores that work for a warp (mma.sync).
//
// Algorithm  As attention_tiled: for each tile of keys
//                s = score(q k^T),  m' = max(m, rowmax s),  p = exp(s - m')
//                l = l exp(m - m') + rowsum p,  o = o exp(m - m') + p v
//            and at the end  out = o / l,  lse = m + log l.
//            m follows the maximum only when that has grown by 2^8. float32 is split
//            into float16 numbers (fp32_forward.cuh).
// Grid       (blocks of a head, heads). A block has one tile of queries, or, where it
//            stays (STAYS), several of one head, of which it fetches the next one while
//            it stores; last tiles first, since causal ones are longest
// Tiles      q     kBlockM x kHeadDim                 shared, loaded once
//            k, v  kBlockN x kHeadDim (kHeadDimV)     shared, kStages of each; float32
//                                                     comes to a tile of its own first
//            s, o  registers; warp w owns rows [16 kRowTiles w, 16 kRowTiles (w + 1)),
//                  or two warps share twice as many (shared_rows.cuh)
// Memory     global: q and out once; k and v once a block, mostly from L2, by cp.async
//            shared: see smem_bytes() in _attention/gpu/sm80/forward.py
// Numbers    s, m, l, o in float32; p is rounded to 16 bits before p v, or split
// Limits     head_dim and head_dim_v up to 256, filled up with zeros; fewer than 2^29
//            keys; sm_80 or newer. A block begins again, with care, where values of
//            hidden keys that are not finite have reached its result
//            (nonfinite_values.cuh) or scores were too large (large_scores.cuh).
#include "attention/sm80/nonfinite_values.cuh"
#include "attention/sm80/large_scores.cuh"
#include "attention/sm80/long_sums.cuh"
#include "attention/sm80/fp32_forward.cuh"
#include "ptx/registers.cuh"

#ifdef STAGES
constexpr int kStages = STAGES;
#else
constexpr int kStages = 1;
#endif
// float32 comes from tiles that attention_mma_prepare has split, or is split here.
#ifdef PREPARED
constexpr bool kPrepared = true;
#else
constexpr bool kPrepared = false;
#endif
// Rows of 16-bit q, k and v are known to be whole chunks of 16 bytes.
#ifdef ALIGNED
constexpr bool kAligned = true;
#else
constexpr bool kAligned = false;
#endif
constexpr bool kStaged = kSplits && !kPrepared;
static_assert(kStages == 1 || (kStages == 2 && !kStaged && kWarpsPerRow == 1));
// A block has several tiles of queries.
#ifdef STAYS
constexpr bool kStays = true;
#else
constexpr bool kStays = false;
#endif
// Of a stage in shared memory.
constexpr unsigned kStageK = kParts * kBytesK + (kPrepared ? kBytesTileStats : 0);
constexpr unsigned kStageV = kParts * kBytesV + (kPrepared ? kBytesTileStats : 0);
constexpr unsigned kStage = kStageK + kStageV;
constexpr unsigned kBytesOut = kBlockM * kHeadDimV * sizeof(elem_t);
constexpr unsigned kBytesTiles = kParts * kBytesQ + kStages * kStage;
// Fragments of q stay in registers where there is room.
constexpr bool kKeepQ =
    !kSplits && kHeadDim <= 64 && kHeadDimV <= 64 && kRowTiles * kHeadDim <= 128;
// Results leave by way of shared memory, while the next tiles come: from one stage,
// from a place of their own, or as follows; else from the place of all tiles.
constexpr bool kOutApart = kStays && kStages == 1 && kKeepQ && kWarpsPerRow == 1;
// Half of the rows at a time, by the place of weights: q and k of the next tile come
// beside the last products with v.
constexpr bool kOutByP = kStays && kStages == 1 && kWarpsPerRow > 1;
constexpr int kOutRounds = kOutByP ? 2 : 1;
// By the place of q, which then comes last.
constexpr bool kOutByQ =
    kStays && !kOutApart && !kOutByP && (kStages == 1 || kBytesOut > kStage);
static_assert(!kStays || (!kSplits && !kHasTerms));
static_assert(!kHasParts || kSplits);  // 16 bits would round results of parts
static_assert(!kStays || kOutApart || kOutByP ||
              kBytesOut <= (kOutByQ ? kBytesQ : kStage));
static_assert(!kOutByP || (kBytesOut <= 4 * kBytesP && kRowTiles == 2));
constexpr unsigned kBytesFront = kOutApart                 ? kBytesTiles + kBytesOut
                                 : kBytesTiles > kBytesOut ? kBytesTiles
                                                           : kBytesOut;

// A tensor core cuts the bits that fall off a sum: products of one sign come out
// smaller by about 0.4 units in the last place with each step of 16 columns but the
// first. Half of that is given back, never more than the 2 units that a score may be
// wrong by; up to 4 steps nothing is. float32 is summed by rounding (fp32_forward.cuh).
constexpr double kUnits = 0.2 * (kSteps + 1);
constexpr double kGivenBack =
    kSplits || kSteps <= 4 ? 1.0 : 1 + (kUnits < 1.9 ? kUnits : 1.9) / 8388608;

// Keys that the queries of a block see, by their numbers.
struct block_t {
  int low, high, num_keys;      // as mask_bounds_t, for the tile at key 0
  int plain_first, plain_last;  // tiles of which all queries see all keys

  block_t() = default;
  __device__ __forceinline__ block_t(const mask_bounds_t& head, int i0)
      : low(head.low + i0),
        high(head.high + i0),
        num_keys(head.num_keys),
        plain_first(low + kBlockM - 1),
        plain_last(min(high, num_keys) - kBlockN) {}

  // Whether all queries see all keys of the tile at j0.
  __device__ __forceinline__ bool sees_all(int j0) const {
    return plain_first <= j0 && j0 <= plain_last;
  }
};

// A tile of queries, and the keys that it walks over.
struct item_t {
  const elem_t* q_rows;
  block_t block;
  int num_rows, first, last, i0;

  item_t() = default;
  // `head` is the bounds of query 0 and key 0, whose numbers are so far from those of
  // all queries and keys where they are clamped that sums stay beyond them. Rows behind
  // the queries are zeros, and nobody stores what comes of them. Tiles of keys start at
  // multiples of kBlockN, so that a row is summed in the same order whatever the tile
  // of queries it lies in.
  __device__ __forceinline__ item_t(const mask_bounds_t& head,
                                    const elem_t* q_head,
                                    index_t row_stride,
                                    int i0,
                                    int first_of_part = 0)
      : q_rows(q_head + i0 * row_stride), block(head, i0), i0(i0) {
    num_rows = max(0, min(head.num_queries - i0, kBlockM));
    const bool any = num_rows > 0;
    const int low = max(first_of_part, min(block.low, block.num_keys));
    first = any ? low / kBlockN * kBlockN : 0;
    last = any ? max(0, min(block.high - 1 + num_rows, block.num_keys)) : 0;
  }
};

// Where tile `turn` of this block begins among the queries; less than 0 behind the
// last one. The blocks of a head take turns up and down, so that each gets long ones
// and short ones.
__device__ __forceinline__ int query_of_turn(int turn, int num_tiles) {
  const int blocks = gridDim.x, block = blockIdx.x;
  const int tile =
      turn % 2 == 0 ? turn * blocks + block : (turn + 1) * blocks - 1 - block;
  return (num_tiles - 1 - tile) * kBlockM;
}

// What only the end of the kernel or rare data need: in the loop there are no registers
// for it.
struct kept_t {
  tile_coord_t at;
  double from_log2;
  const elem_t *k_rows, *v_rows;
  const elem_t* q_head;  // of tile 0
  mask_bounds_t head;
  item_t item;
  int turn;  // of the item among those of this block
  bool aligned_q, aligned_k, aligned_v;
  __device__ bool has_aligned_q() const { return kAligned || aligned_q; }
  __device__ bool has_aligned_k() const { return kAligned || aligned_k; }
  __device__ bool has_aligned_v() const { return kAligned || aligned_v; }
  bool special;                   // a value of this block's keys is not finite
  const unsigned char* operands;  // of the tiles of k and v, of this head
};
constexpr unsigned kBytesStatsOfStaging = 128, kKeptBytes = 384;
static_assert(sizeof(kept_t) <= kKeptBytes);
static_assert(4 * sizeof(tile_stats_t) + sizeof(int) <= kBytesStatsOfStaging);

// What is kept, to be read again; still known to lie in shared memory, since a load
// that has to find out takes ten times as long.
__device__ __forceinline__ const kept_t& read_anew(const kept_t& kept) {
  unsigned address = shared_address(&kept);
  ptx::launder(address);
  return *static_cast<const kept_t*>(__cvta_shared_to_generic(address));
}

// Scores that a query does not see become -inf.
__device__ __forceinline__ void hide_scores(scores_frag_t& s,
                                            const block_t& block,
                                            int j0) {
  const int row_0 = lanes_t::warp_row() + lanes_t::lane() / 4;
  const int column_0 = lanes_t::warp_key() + lanes_t::lane() % 4 * 2;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = row_0 + 8 * r;
    const int first = block.low + row - j0 - column_0;
    const int last = min(block.high + row, block.num_keys) - j0 - column_0;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * n + e;
        float& x = s[r / 2][n][r % 2 * 2 + e];
        if (column < first || column >= last) x = -infinity<float>();
      }
    }
  }
}

// Products into final scores, mask of positions aside.
__device__ __forceinline__ void finish_scores(scores_frag_t& s,
                                              const scores_t& scores,
                                              const params_t& params,
                                              index_t i0,
                                              int j0) {
  const int lane = lanes_t::lane();
  const int row_0 = lanes_t::warp_row() + lane / 4, column_0 = lane % 4 * 2;
  if constexpr (kHasTerms) {
    auto finish = [&](float x, int row, int column) {
      const index_t i = i0 + row, j = j0 + column;
      return scores(x * static_cast<float>(kGivenBack), min(i, params.seqlen_q - 1),
                    min(j, params.seqlen_k - 1));
    };
    if constexpr (kHeadDimV > 128) {
      // o takes the registers: a few scores at a time, by way of the stack.
      float on_stack[kRowTiles * kScoreTiles * 4];
      put<kScoreTiles>(on_stack, s);
#pragma unroll 1
      for (int n = 0; n < kRowTiles * kScoreTiles * 4; ++n) {
        const int row = n / (kScoreTiles * 4) * 16 + n / 2 % 2 * 8;
        const int column = n / 4 % kScoreTiles * 8 + n % 2;
        on_stack[n] = finish(on_stack[n], row_0 + row, column_0 + column);
      }
      ptx::launder(on_stack);
      get<kScoreTiles>(s, on_stack);
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          // Parts leave no registers for what other columns will load.
          if constexpr (kParts == 2) ptx::compiler_fence();
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[r / 2][n][r % 2 * 2 + e];
            x = finish(x, row_0 + 8 * r, column_0 + 8 * n + e);
          }
        }
      }
    }
  }
}

// Stores what this thread has of a row of float32. One branch a row: code that runs
// once a block has to be fetched, and jumps over rare code make that slow.
__device__ __forceinline__ void store_row(elem_t* row,
                                          const float (&x)[2 * kOutTiles],
                                          int dim,
                                          index_t step,
                                          bool as_pairs) {
  if (as_pairs) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const int column = lanes_t::out_column(n);
      if (column < dim) {
        *reinterpret_cast<float2*>(row + column) = make_float2(x[2 * n], x[2 * n + 1]);
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < 2 * kOutTiles; ++n) {
      const int column = lanes_t::out_column(n / 2) + n % 2;
      if (column < dim) row[column * step] = to<elem_t>(x[n]);
    }
  }
}

// Rows of o times `inverse`, that of row lane % kRows, go to shared memory as 16 bits.
__device__ __forceinline__ void put_rows(unsigned char* tile,
                                         out_frag_t& o,
                                         float own_inverse,
                                         int round) {
  constexpr int kRowsOfRound = kRows / kOutRounds;
  unsigned thread = threadIdx.x;
  ptx::launder(thread);  // what follows from it would take registers of the loop
  const int lane = lanes_t::lane(thread);
  float inverse[kRows];
  bool any_empty = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    inverse[r] = __shfl_sync(kFullMask, own_inverse, (lane & ~3) + r);
    any_empty |= inverse[r] == 0;
  }
  if (any_empty) {  // whatever the sums are; one branch for all rows
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
        for (int e = r % 2 * 2; e < r % 2 * 2 + 2; ++e) {
          if (inverse[r] == 0) o[r / 2][n][e] = 0;
        }
      }
    }
  }
  const tile_t<kHeadDimV> to(lane % 4 * 4,
                             lanes_t::warp_row(thread) / kOutRounds + lane / 4,
                             lanes_t::warp_of_row(thread) * 4);
#pragma unroll
  for (int n_row = 0; n_row < kRowsOfRound; ++n_row) {
    const int r = round * kRowsOfRound + n_row;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const float (&x)[4] = o[r / 2][n];
      *reinterpret_cast<unsigned*>(tile + to.at(8 * n_row, lanes_t::out_tile(n))) =
          pair16_t::from(x[r % 2 * 2] * inverse[r], x[r % 2 * 2 + 1] * inverse[r]);
    }
  }
}

// Stores a chunk of 8 elements that lies in shared memory.
__device__ __forceinline__ void store_chunk(
    elem_t* to, const unsigned char* from, index_t step, int count, bool as_vector) {
  const uint4 word = *reinterpret_cast<const uint4*>(from);
  if (as_vector) {
    *reinterpret_cast<uint4*>(to) = word;
    return;
  }
  const unsigned words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const unsigned short bits = static_cast<unsigned short>(words[e / 2] >> e % 2 * 16);
    if (e < count) *reinterpret_cast<unsigned short*>(to + e * step) = bits;
  }
}

// Stores what this warp has of out, which lies in shared memory by 16-bit rows: whole
// chunks of 16 bytes, since a warp's pairs would take four times as many instructions.
__device__ __forceinline__ void store_tile(elem_t* out,
                                           const unsigned char* tile,
                                           int num_rows,
                                           int dim,
                                           const operand_t& to,
                                           int round) {
  constexpr int kOwnRows = 16 * kRowTiles / kOutRounds;
  using rows_t = tile_t<kHeadDimV>;
  constexpr int kChunks = kOutTiles, kElems = 8;
  unsigned thread = threadIdx.x;
  ptx::launder(thread);
  const int lane = lanes_t::lane(thread);
  const bool as_vectors =
      ((to.row | dim) % kElems | reinterpret_cast<unsigned long long>(out) % 16) == 0 &&
      to.col == 1;
  __syncwarp();  // the warp's rows are there
  if constexpr (kWarpSize % kChunks == 0 && kWarpSize / kChunks <= 8) {
    // A lane has the same chunk of each of its rows.
    constexpr int kStep = kWarpSize / kChunks;
    const int row = lanes_t::warp_row(thread) + round * kOwnRows + lane / kChunks;
    const int place = lanes_t::warp_row(thread) / kOutRounds + lane / kChunks;
    const int chunk =
        lanes_t::out_tile(lane % kChunks) + lanes_t::warp_of_row(thread) * 4;
    const int count = dim - chunk * kElems;
    if (count <= 0) return;
    elem_t* at = out + row * to.row + chunk * kElems * to.col;
    if (as_vectors) {
#pragma unroll
      for (int n = 0; n < kOwnRows / kStep; ++n) {
        const unsigned from = rows_t::offset(place + n * kStep, chunk);
        if (row + n * kStep < num_rows) store_chunk(at, tile + from, 1, kElems, true);
        at += kStep * to.row;
      }
    } else {
#pragma unroll 1
      for (int n = 0; n < kOwnRows / kStep; ++n) {
        const unsigned from = rows_t::offset(place + n * kStep, chunk);
        if (row + n * kStep < num_rows) {
          store_chunk(at, tile + from, to.col, count, false);
        }
        at += kStep * to.row;
      }
    }
  } else {
#pragma unroll 4
    for (int n = lane; n < kOwnRows * kChunks; n += kWarpSize) {
      const int row = lanes_t::warp_row(thread) + round * kOwnRows + n / kChunks;
      const int place = lanes_t::warp_row(thread) / kOutRounds + n / kChunks;
      const int chunk =
          lanes_t::out_tile(n % kChunks) + lanes_t::warp_of_row(thread) * 4;
      if (row >= num_rows || chunk * kElems >= dim) continue;
      store_chunk(out + row * to.row + chunk * kElems * to.col,
                  tile + rows_t::offset(place, chunk), to.col, dim - chunk * kElems,
                  as_vectors);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks) attention_mma(
    // Tiles of k and v in parts, (batch, kv heads, tiles), or null.
    const unsigned char* __restrict__ operands,
    const elem_t* __restrict__ q,  // (batch, heads, queries, head_dim)
    const elem_t* __restrict__ k,  // (batch, kv heads, keys, head_dim)
    const elem_t* __restrict__ v,  // (batch, kv heads, keys, head_dim_v)
    elem_t* __restrict__ out,      // (batch, heads, queries, head_dim_v)
    row_lse_t* __restrict__ lse,   // (batch, heads, queries), or null
    SCORE_PARAMETERS) {
  extern __shared__ __align__(128) unsigned char smem[];
  unsigned char* const smem_q = smem;
  unsigned char* const smem_k = smem_q + kParts * kBytesQ;
  unsigned char* const smem_v = smem_k + kStageK;  // stages of k and v follow
  unsigned char* const staging_k = smem_k + kStages * kStage;
  unsigned char* const staging_v = staging_k + (kStaged ? 2 * kBytesK : 0);
  unsigned char* const behind =
      kSplits ? staging_v + (kStaged ? 2 * kBytesV : 0) : smem + kBytesFront;
  // Of float32, by parity of the tile.
  tile_stats_t* const stats_k = reinterpret_cast<tile_stats_t*>(behind);
  tile_stats_t* const stats_v = stats_k + 2;
  int* const largest_q = reinterpret_cast<int*>(stats_v + 2);
  kept_t& kept = *reinterpret_cast<kept_t*>(behind + kBytesStatsOfStaging);
  unsigned char* const smem_p = behind + kBytesStatsOfStaging + kKeptBytes;
  row_exchange_t& exchange =
      *reinterpret_cast<row_exchange_t*>(smem_p + (kWarpsPerRow > 1 ? 2 * kBytesP : 0));

  const int num_tiles = static_cast<int>((params.seqlen_q + kBlockM - 1) / kBlockM);
  const tile_coord_t at(params, blockIdx.y + index_t(gridDim.y) * blockIdx.z);
  if (!at.exists) return;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);

  const elem_t* const q_head = at.at(q, params.q);
  const elem_t* const k_rows = at.at_kv(k, params.k);
  const elem_t* const v_rows = at.at_kv(v, params.v);
  mask_bounds_t head(scores.mask_bounds(0, 0));
  int first_of_part = 0;
  if constexpr (kHasParts) {
    const range_t part = scores.part();
    first_of_part = static_cast<int>(part.first);
    head.num_keys = static_cast<int>(part.last);
  }
  const item_t item(head, q_head, params.q.row, query_of_turn(0, num_tiles),
                    first_of_part);
  const int i0 = item.i0;
  const bool aligned_q = kAligned || has_aligned_rows(q_head, params.q.row, dim);

  // Scores times to_log2 are exponents of 2.
  const double scale = kHasTerms ? 1.0 : params.scale * kGivenBack;
  const float to_log2 = static_cast<float>(scale * kLog2e);
  auto is_aligned_k = [&] {
    return kAligned || has_aligned_rows(k_rows, params.k.row, dim);
  };
  auto is_aligned_v = [&] {
    return kAligned || has_aligned_rows(v_rows, params.v.row, dim_v);
  };
  auto keep = [&] {
    if (threadIdx.x == 0) {
      kept.at = at;
      kept.q_head = q_head;
      kept.k_rows = k_rows;
      kept.v_rows = v_rows;
      if constexpr (kPrepared) {
        const index_t num_operands = (params.seqlen_k + kBlockN - 1) / kBlockN;
        index_t row = at.row_of_heads;
        // Parts all read the same operands.
        if constexpr (kHasParts) row -= at.batch[0] * params.part.head;
        kept.operands =
            operands + divide(row, params.group_size) * num_operands * kBytesOperands;
      }
      kept.head = head;
      kept.item = item;
      kept.turn = 0;
      kept.special = false;
      kept.aligned_q = aligned_q;
      kept.aligned_k = is_aligned_k();
      kept.aligned_v = is_aligned_v();
      // The scale again in double: to_log2 was rounded, and lse has to know it to the
      // bit.
      kept.from_log2 = scale / to_log2;
    }
  };
  int first = item.first, last = item.last;

  auto place_k = [](int row, int chunk) {
    if constexpr (kSplits) return staging_t<kHeadDim>::offset(row, chunk);
    return tile_t<kHeadDim>::offset(row, chunk);
  };
  auto place_v = [](int row, int chunk) {
    if constexpr (kSplits) return staging_t<kHeadDimV>::offset(row, chunk);
    return tile_t<kHeadDimV>::offset(row, chunk);
  };
  // The loop of 16 bits has no registers for where k and v lie, and looks that up.
  const bool aligned_k = kSplits && is_aligned_k();
  const bool aligned_v = kSplits && is_aligned_v();
  struct source_t {
    const elem_t* rows;
    bool aligned;
    int last;
  };
  auto source_k = [&]() -> source_t {
    if constexpr (kSplits) return {k_rows, aligned_k, last};
    return {read_anew(kept).k_rows, read_anew(kept).has_aligned_k(), last};
  };
  auto source_v = [&]() -> source_t {
    if constexpr (kSplits) return {v_rows, aligned_v, last};
    return {read_anew(kept).v_rows, read_anew(kept).has_aligned_v(), last};
  };
  auto load_k = [&](int j0, source_t source) {
    const int tile = j0 / kBlockN, stage = kStages == 2 ? tile % 2 : 0;
    if (j0 < source.last) {
      if constexpr (kPrepared) {
        copy_operand<kBytesOperandK>(
            smem_k + stage * kStage,
            read_anew(kept).operands + index_t(tile) * kBytesOperands);
      } else if constexpr (!kSplits) {
        copy_tile<kBlockN, kHeadDim>(smem_k + stage * kStage, source.rows, params.k.row,
                                     j0, source.last, dim, source.aligned);
      } else {
        load_tile<kBlockN, kHeadDim>(kStaged ? staging_k : smem_k + stage * kStage,
                                     source.rows + j0 * params.k.row, params.k.row,
                                     last - j0, dim, source.aligned, place_k);
      }
    }
    ptx::commit_copies();
  };
  auto load_v = [&](int j0, source_t source) {
    const int tile = j0 / kBlockN, stage = kStages == 2 ? tile % 2 : 0;
    if (j0 < source.last) {
      if constexpr (kPrepared) {
        copy_operand<kBytesOperandV>(
            smem_v + stage * kStage,
            read_anew(kept).operands + index_t(tile) * kBytesOperands + kBytesOperandK);
      } else if constexpr (!kSplits) {
        copy_tile<kBlockN, kHeadDimV>(smem_v + stage * kStage, source.rows,
                                      params.v.row, j0, source.last, dim_v,
                                      source.aligned);
      } else {
        load_tile<kBlockN, kHeadDimV>(kStaged ? staging_v : smem_v + stage * kStage,
                                      source.rows + j0 * params.v.row, params.v.row,
                                      last - j0, dim_v, source.aligned, place_v);
      }
    }
    ptx::commit_copies();
  };

  // Copies that the loop of 16 bits starts behind a barrier are made ready before it,
  // while others wait there.
  auto ready_k = [&](int j0) {
    const kept_t& with = read_anew(kept);
    const int stage = kStages == 2 ? j0 / kBlockN % 2 : 0;
    return copy_t<kBlockN, kHeadDim>(smem_k + stage * kStage, with.k_rows, params.k.row,
                                     j0, last, dim, with.has_aligned_k());
  };
  auto ready_v = [&](int j0) {
    const kept_t& with = read_anew(kept);
    const int stage = kStages == 2 ? j0 / kBlockN % 2 : 0;
    return copy_t<kBlockN, kHeadDimV>(smem_v + stage * kStage, with.v_rows,
                                      params.v.row, j0, last, dim_v,
                                      with.has_aligned_v());
  };
  auto start_k = [&](const copy_t<kBlockN, kHeadDim>& copy, int j0) {
    if (!copy.is_ready) {
      load_k(j0, source_k());
      return;
    }
    if (j0 < last) copy.start(params.k.row);
    ptx::commit_copies();
  };
  auto start_v = [&](const copy_t<kBlockN, kHeadDimV>& copy, int j0) {
    if (!copy.is_ready) {
      load_v(j0, source_v());
      return;
    }
    if (j0 < last) copy.start(params.v.row);
    ptx::commit_copies();
  };

  // The loop would compute it anew for each tile.
  auto bounds = [&]() -> const block_t& { return read_anew(kept).item.block; };
  lanes_t lanes(shared_address(smem_q), shared_address(smem_k), shared_address(smem_v),
                shared_address(smem_p));

  const unsigned base_k = lanes.k.base, base_v = lanes.v.base;
  // What a walk of 16-bit tiles begins with. It is on its way before anything else is
  // computed.
  auto begin_q = [&](const item_t& with, bool aligned_q) {
    copy_tile<kBlockM, kHeadDim>(smem_q, with.q_rows, params.q.row, 0, with.num_rows,
                                 dim, aligned_q);
  };
  auto begin = [&](const item_t& with, bool aligned_q, const elem_t* k_rows,
                   bool aligned_k, const elem_t* v_rows, bool aligned_v,
                   bool with_q = true) {
    if (with_q) begin_q(with, aligned_q);
    load_k(with.first, {k_rows, aligned_k, with.last});
    load_v(with.first, {v_rows, aligned_v, with.last});
  };
  if constexpr (!kSplits) {
    begin(item, aligned_q, k_rows, is_aligned_k(), v_rows, is_aligned_v());
  }
  keep();
  if constexpr (kSplits) __syncthreads();  // what is kept is there

  auto stage_of = [](int j0) { return j0 / kBlockN % 2; };
  // Weights have two stages, of which products step on to the next.
  auto move_stages = [&](int from, int to) {
    lanes.p.base += ((to ^ 1) - from) * kBytesP;
  };
  if constexpr (kWarpsPerRow > 1) move_stages(0, stage_of(first));

  // There is no register for it, but where each tile asks whether it is the first.
  auto start = [&] { return kWeighsAtOnce ? first : read_anew(kept).item.first; };
#pragma unroll 1
  for (;;) {
    if constexpr (!kSplits) {
      lanes.q.forget();
      lanes.k.forget();
      lanes.v.forget();
      if constexpr (kWarpsPerRow > 1) lanes.p.forget();
    }
    // What is kept is there; elsewhere another barrier comes before it is read.
    if constexpr (!kSplits && kWarpsPerRow == 1 && !kKeepQ) __syncthreads();
    out_frag_t o;
    softmax_t rows;
    centers_t centers;
    two_level_out_t two_level;
    bool careful = false;
    bool begun = false;  // the next tile of queries is on its way
#pragma unroll 1
    for (;; careful = true) {
      rows = softmax_t();
      two_level.begin();
      if (careful) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (centers.has(r)) rows.reference[r] = -kShift;
        }
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[m][n][e] = 0;
        }
      }
      queries_t<kKeepQ> q_frags;
      // From a product of parts to q k, and to p v.
      float unit_q = 1, unit_o = 1, size_q = 0;
      if constexpr (kStaged) {
        if (threadIdx.x == 0) {
#pragma unroll
          for (int n = 0; n < 4; ++n) stats_k[n].clear();
        }
      }
      if constexpr (kSplits) {
        if (threadIdx.x == 0) *largest_q = 0;
        load_k(start(), source_k());
        if (kStaged || kStages == 2) load_v(start(), source_v());
        __syncthreads();  // the statistics are cleared
        size_q = split_q(smem_q, largest_q, read_anew(kept).item.q_rows, params.q.row,
                         read_anew(kept).item.num_rows, dim,
                         read_anew(kept).has_aligned_q(), unit_q);
      } else {
        if (careful) {
          if (kOutByP && begun) {  // too early
            ptx::wait_copy_groups<0>();
            __syncthreads();
            begun = false;
          }
          const kept_t& with = read_anew(kept);
          begin(with.item, with.has_aligned_q(), with.k_rows, with.has_aligned_k(),
                with.v_rows, with.has_aligned_v());
        }
        if constexpr (kKeepQ) {
          ptx::wait_copy_groups<1>();
          __syncthreads();  // q is complete
#pragma unroll
          for (int step = 0; step < kSteps; ++step)
            load_q(q_frags.a[step], lanes, step);
        }
      }

      if constexpr (kWarpsPerRow > 1) {
        // Weights of a tile are computed beside the products of the one before with v.
        __syncthreads();  // what is kept is there
        scores_frag_t s;
        float sums[kRows];
        // From a stage to the other one.
        auto step = [&](int j0, unsigned size) {
          return stage_of(j0) ? size : 0 - size;
        };
        auto put_at = [&](unsigned j0) {
          ptx::launder(j0);
          put_weights(smem_p + stage_of(j0) * kBytesP, s);
        };
        // The first tile has no reference yet.
        bool again = true, is_first = true;
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r] = infinity<float>();
#pragma unroll 1
        for (int j0 = read_anew(kept).item.first; j0 < last; j0 += kBlockN) {
          const auto next_v = ready_v(j0);
          const auto next_k = ready_k(j0 + 2 * kBlockN);
          const bool sees_next = bounds().sees_all(j0 + kBlockN);
          if (is_first) {
            ptx::wait_copy_groups<1>();
          } else {
            ptx::wait_copy_groups<0>();
          }
          // The weights of this tile and the next tile of k are complete; all have read
          // the ones before.
          if (__syncthreads_or(again)) {
            if (!is_first) {
              load_k(j0, source_k());  // again
              ptx::wait_copy_groups<0>();
              __syncthreads();
            }
            multiply_qk(s, q_frags, lanes);
            if (!bounds().sees_all(j0)) hide_scores(s, bounds(), j0);
            if (careful) center(s, o, rows, centers, exchange, to_log2, j0);
            raise_shared(rows, s, exchange, to_log2, sums);
            rescale(o, rows);
            weigh(rows, s, to_log2, sums);
            put_at(j0);
            __syncthreads();  // all have read k
            load_k(j0 + kBlockN, source_k());
            ptx::wait_copy_groups<0>();
            __syncthreads();
          }
          add(rows, sums);
          if (!is_first) start_v(next_v, j0);
          is_first = false;
          if (careful) {
            ptx::wait_copy_groups<0>();
            __syncthreads();  // v is complete
            if (clean_values(smem_v)) kept.special = true;
            __syncthreads();  // all have cleaned their part
          }
          lanes.p.base += step(j0, kBytesP);
          const int next = j0 + kBlockN;
          if (next < last) {
            multiply_qk(s, q_frags, lanes);
            ptx::wait_copy_groups<0>();
            __syncthreads();  // v is complete; all have read k
            start_k(next_k, j0 + 2 * kBlockN);
            if (careful) {
              multiply_pv(o, s, lanes);
              if (!sees_next) hide_scores(s, bounds(), next);
              center(s, o, rows, centers, exchange, to_log2, next);
              weigh(rows, s, to_log2, sums);
            } else {
              if (!sees_next) hide_scores(s, bounds(), next);
              weigh_and_multiply(rows, s, to_log2, sums, o, lanes);
            }
            put_at(next);
          } else {
            if constexpr (kOutByP) {
              // Nobody asks for q and k any more: those of the next tile come.
              if (!careful) {
                const kept_t& with = read_anew(kept);
                const int query = query_of_turn(with.turn + 1, num_tiles);
                if (query >= 0) {
                  const item_t item(with.head, with.q_head, params.q.row, query);
                  begin_q(item, with.has_aligned_q());
                  load_k(item.first, {with.k_rows, with.has_aligned_k(), item.last});
                  begun = true;
                }
              }
              if (!begun) ptx::commit_copies();
              ptx::wait_copy_groups<1>();
              __syncthreads();  // v is complete
            } else {
              ptx::wait_copy_groups<0>();
              __syncthreads();  // v is complete
            }
            multiply_pv(o, s, lanes);
          }
          again = !are_small(sums);
        }
        const int start = read_anew(kept).item.first;
        if (start < last) move_stages(stage_of(last - 1), stage_of(start));
      } else {
        bool is_first = true;
#pragma unroll 1
        for (int j0 = start(); j0 < last; j0 += kBlockN) {
          scores_frag_t s;
          const int tile = j0 / kBlockN;
          const int stage = kStages == 2 ? tile % 2 : 0;
          const tile_stats_t* of_k = reinterpret_cast<tile_stats_t*>(
              smem_k + stage * kStage + kParts * kBytesK);
          const tile_stats_t* of_v = reinterpret_cast<tile_stats_t*>(
              smem_v + stage * kStage + kParts * kBytesV);
          // Asked before a barrier, as copies are made ready. Parts leave no register.
          const bool sees_all = !kSplits && bounds().sees_all(j0);
          if constexpr (kStaged) {
            ptx::wait_copy_groups<0>();
            const int parity = tile % 2;
            of_k = stats_k + parity;
            of_v = stats_v + parity;
            auto chunk_of_k = [&](int n) {
              return *reinterpret_cast<const float4*>(staging_k + n * 16);
            };
            auto chunk_of_v = [&](int n) {
              return *reinterpret_cast<const float4*>(staging_v + n * 16);
            };
            inspect<kHeadDim>(stats_k[parity], chunk_of_k);
            inspect<kHeadDimV>(stats_v[parity], chunk_of_v);
            __syncthreads();  // the statistics are complete; all have read the tiles
                              // before
            if (threadIdx.x == 0) {
              stats_k[parity ^ 1].clear();
              stats_v[parity ^ 1].clear();
            }
            split_tile<kHeadDim>(smem_k, scale_t(of_k->largest).to_parts, chunk_of_k);
            split_tile<kHeadDimV>(smem_v, values_t(*of_v).to_parts, chunk_of_v);
            load_k(j0 + kBlockN, source_k());
            load_v(j0 + kBlockN, source_v());
            __syncthreads();  // the parts of k and v are complete
          } else if constexpr (kSplits) {
            ptx::wait_copy_groups<0>();
            // This tile is complete, of one stage that of k; all have read the one
            // before, or its v.
            __syncthreads();
            if constexpr (kStages == 2) {
              load_k(j0 + kBlockN, source_k());
              load_v(j0 + kBlockN, source_v());
              lanes.k.base = base_k + stage * kStage;
              lanes.v.base = base_v + stage * kStage;
            } else {
              load_v(j0, source_v());
            }
          } else if constexpr (kStages == 2) {
            const int next = j0 + kBlockN;
            const auto next_k = ready_k(next);
            const auto next_v = ready_v(next);
            ptx::wait_copy_groups<0>();
            __syncthreads();  // this tile is complete; all have read the one before
            start_k(next_k, next);
            start_v(next_v, next);
            lanes.k.base = base_k + stage * kStage;
            lanes.v.base = base_v + stage * kStage;
          } else {
            const auto this_v = ready_v(j0);
            ptx::wait_copy_groups<0>();
            __syncthreads();  // this tile of k is complete; all have read v before
            if (!is_first) start_v(this_v, j0);
            is_first = false;
          }

          if constexpr (kSplits) {
            const scale_t scale(of_k->largest);
            const float unit = unit_q * scale.from_parts;
            if constexpr (kParts == 2) {
              multiply_qk_split(s, lanes, unit);
            } else {
              multiply_qk(s, q_frags, lanes);
              multiply_by(s, unit);
            }
            const float size = size_q * __int_as_float(of_k->largest) *
                               fabsf(static_cast<float>(params.scale)) * kHeadDim;
            const bool whole = !scale.fits || !(size <= kLargestScore);
            if (whole || any_marked(*of_k)) {
              float s_on_stack[kRowTiles * kScoreTiles * 4];
              float o_on_stack[kRowTiles * kOutTiles * 4];
              put<kScoreTiles>(s_on_stack, s);
              put<kOutTiles>(o_on_stack, o);
              ptx::launder(o_on_stack);
              compute_marked_scores(s_on_stack, of_k->marked, whole, kept.item.q_rows,
                                    kept.k_rows, params, kept.item.num_rows, j0);
              ptx::launder(o_on_stack);
              get<kScoreTiles>(s, s_on_stack);
              get<kOutTiles>(o, o_on_stack);
            }
          } else if constexpr (!kWeighsAtOnce) {
            multiply_qk(s, q_frags, lanes);
          }
          if constexpr (kWeighsAtOnce) {
            float sums[kRows];
            // The same code twice: where nothing is hidden there is no branch, and
            // exponentials stand among the products.
            if (sees_all && j0 != first && !careful) {
              multiply_qk(s, q_frags, lanes);
              weigh(rows, s, to_log2, sums);
            } else {
              ptx::compiler_fence();
              multiply_qk(s, q_frags, lanes);
              if (!sees_all) hide_scores(s, bounds(), j0);
              if (careful) center(s, o, rows, centers, exchange, to_log2, j0);
              if (j0 == first) {
                // With the reference that rows start with, all sums would be too large.
#pragma unroll
                for (int r = 0; r < kRows; ++r) sums[r] = infinity<float>();
                raise_where(rows, s, to_log2, sums);
              }
              weigh(rows, s, to_log2, sums);
            }
            if (__any_sync(kFullMask, !are_small(sums))) {
              multiply_qk(s, q_frags, lanes);
              if (!bounds().sees_all(j0)) hide_scores(s, bounds(), j0);
              if (careful) center(s, o, rows, centers, exchange, to_log2, j0);
              raise_where(rows, s, to_log2, sums);
              rescale(o, rows);
              weigh(rows, s, to_log2, sums);
            }
            add(rows, sums);
          } else {
            finish_scores(s, scores, params, i0, j0);
            if (!(kSplits ? bounds().sees_all(j0) : sees_all)) {
              hide_scores(s, bounds(), j0);
            }
            if (careful) {
              center(s, o, rows, centers, exchange, to_log2, j0);
              two_level.follow(rows);
            }
            if (raise(rows, s, to_log2)) {
              rescale(o, rows);
              two_level.follow(rows);
            }
          }
          if constexpr (!kSplits && kStages == 1) {
            const auto next_k = ready_k(j0 + kBlockN);
            ptx::wait_copy_groups<0>();
            __syncthreads();  // this tile of v is complete; all have read k
            start_k(next_k, j0 + kBlockN);
          } else if constexpr (!kStaged && kStages == 1) {
            ptx::wait_copy_groups<0>();
            __syncthreads();  // this tile of v is complete; all have read k
            load_k(j0 + kBlockN, source_k());
          }
          if constexpr (kSplits) {
            const values_t values(*of_v);
            if constexpr (kParts == 1) {
              // o has the unit of the tile.
              if (values.from_parts != unit_o) {
                multiply_by(o, unit_o * values.to_unit);
                unit_o = values.from_parts;
              }
            }
            if (values.whole || any_marked(*of_v)) {
              float o_on_stack[kRowTiles * kOutTiles * 4];
              float s_on_stack[kRowTiles * kScoreTiles * 4], reference[kRows];
              put<kOutTiles>(o_on_stack, o);
              put<kScoreTiles>(s_on_stack, s);
#pragma unroll
              for (int r = 0; r < kRows; ++r) reference[r] = rows.reference[r];
              add_marked_values(o_on_stack, s_on_stack, reference, to_log2,
                                kParts == 1 ? values.to_unit : 1.f, of_v->marked,
                                values.whole, kept.v_rows, params, j0, last);
              ptx::launder(s_on_stack);
              get<kScoreTiles>(s, s_on_stack);
              get<kOutTiles>(o, o_on_stack);
            }
            exponentiate(rows, s, to_log2);
            if constexpr (kParts == 2) {
              multiply_pv_split(o, s, lanes, values.from_parts);
              two_level.end_tile(o, j0 + kBlockN, last);
            } else {
              multiply_pv(o, s, lanes);
            }
          } else {
            if (careful) {
              if (clean_values(smem_v + stage * kStage)) kept.special = true;
              __syncthreads();  // all have cleaned their part
            }
            if constexpr (!kWeighsAtOnce) exponentiate(rows, s, to_log2);
            multiply_pv(o, s, lanes);
          }
        }
      }

      if constexpr (kSplits && kParts == 1) multiply_by(o, unit_o);
      two_level.finish(o);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float& l = rows.l[r];
        l += rows.rest[r];
        l += shuffle_xor(l, 1);
        l += shuffle_xor(l, 2);
      }
      if constexpr (kWarpsPerRow > 1) add_other_warp(exchange, rows.l);
      if (!kOutByP || !begun) ptx::wait_copy_groups<0>();
      if (careful) {
        __syncthreads();  // all have read the tiles
        break;
      }
      bool again = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) again |= is_huge(rows.reference[r]);
      if (again) {
        again = take_centers(centers, rows, scores_t(kept.at, SCORE_ARGUMENTS),
                             kept.item.i0);
      }
      // Values of keys that a row does not see may have come in as 0 * NaN.
      float nonfinite[4] = {};
      if constexpr (!kSplits) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
              nonfinite[e] = fmaf(o[m][n][e], 0, nonfinite[e]);
          }
        }
      }
      const bool any_nonfinite =
          (nonfinite[0] + nonfinite[1]) + (nonfinite[2] + nonfinite[3]) != 0;
      if (!__syncthreads_or(again | any_nonfinite)) break;  // all have read the tiles
    }

    // The tile of queries after this one comes while this one leaves.
    unsigned char* smem_out = smem;
    item_t next;
    next.i0 = -1;
    if constexpr (kStays) {
      const int query = query_of_turn(kept.turn + 1, num_tiles);
      next = item_t(kept.head, kept.q_head, params.q.row, query);
      smem_out = kOutByQ     ? smem_q
                 : kOutByP   ? smem_p
                 : kOutApart ? smem + kBytesTiles
                             : smem_k + (stage_of(next.first) ^ 1) * kStage;
      if (next.i0 >= 0) {
        if (kOutByP && begun) {
          load_v(next.first, {kept.v_rows, kept.has_aligned_v(), next.last});
        } else {
          begin(next, kept.has_aligned_q(), kept.k_rows, kept.has_aligned_k(),
                kept.v_rows, kept.has_aligned_v(), !kOutByQ);
        }
      }
    }

    const tile_coord_t& here = kept.at;
    const scores_t rows_of(here, SCORE_ARGUMENTS);
    elem_t* const out_rows = here.at(out, params.out);
    const bool as_pairs = params.out.col == 1 && params.out.row % 2 == 0 &&
                          params.head_dim_v % 2 == 0 &&
                          reinterpret_cast<unsigned long long>(out_rows) % 8 == 0;
    // What closes a row takes long and is the same in the four lanes that share it:
    // each of them does it for another row.
    static_assert(kRows <= 4);
    auto query = [&](int r) {
      return kept.item.i0 + lanes_t::warp_row() + 8 * r + lanes_t::lane() / 4;
    };
    float own_inverse;
    {
      const int own = lanes_t::lane() % kRows;
      float reference = rows.reference[0], l = rows.l[0];
#pragma unroll
      for (int r = 1; r < kRows; ++r) {
        if (own == r) {
          reference = rows.reference[r];
          l = rows.l[r];
        }
      }
      // lse has to know to the last bit what was subtracted; l takes what a float of it
      // leaves over. Above a million that is less than a unit of lse.
      double m = reference * kept.from_log2;
      if (careful && centers.has(own)) m += scale * centers.at[own];
      const maximum_t high =
          l == 0 ? -infinity<maximum_t>() : static_cast<maximum_t>(m);
      const float low = abs_of(high) < 1e6f ? static_cast<float>(m - high) : 0.f;
      const index_t i = query(own);
      const finished_t finished = rows_of.finish(i, high, l * (1 + low));
      own_inverse = finished.inverse * (1 + low);
      if (lse != nullptr && i < params.seqlen_q && lanes_t::lane() % 4 < kRows &&
          lanes_t::warp_of_row() == 0) {
        lse[here.row_of_heads * params.seqlen_q + i] = finished.lse;
      }
    }
    if constexpr (kSplits) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float inverse =
            __shfl_sync(kFullMask, own_inverse, (lanes_t::lane() & ~3) + r);
        const index_t i = query(r);
        if (i >= params.seqlen_q) continue;
        elem_t* const out_row = out_rows + i * params.out.row;
        if constexpr (!kHasSinks) {
          // A row of one key is its value, to the last bit, which the parts may lack.
          const range_t seen = rows_of.keys_of(i, i + 1);
          if (seen.last - seen.first == 1 && inverse > 0 && is_finite(rows.l[r])) {
            const elem_t* const only = kept.v_rows + seen.first * params.v.row;
#pragma unroll 1
            for (int n = lanes_t::lane() % 4; n < params.head_dim_v; n += 4) {
              out_row[n * params.out.col] = only[n];
            }
            continue;
          }
        }
        float x[2 * kOutTiles];
#pragma unroll
        for (int n = 0; n < 2 * kOutTiles; ++n) {
          x[n] = o[r / 2][n / 2][r % 2 * 2 + n % 2] * inverse;
        }
        if (inverse == 0) {
#pragma unroll
          for (int n = 0; n < 2 * kOutTiles; ++n) x[n] = 0;
        }
        const int dim = static_cast<int>(params.head_dim_v);
        store_row(out_row, x, dim, params.out.col, as_pairs);
        if constexpr (!kHasSinks) {
          // So is a huge row whose largest score takes all.
          if (careful && centers.has(r) && rows.l[r] == kLargestWeight) {
            const elem_t* const top = kept.v_rows + centers.key[r] * params.v.row;
#pragma unroll 1
            for (int n = 0; n < 2 * kOutTiles; ++n) {
              const int column = n / 2 * 8 + lanes_t::lane() % 4 * 2 + n % 2;
              if (column >= dim) continue;
              elem_t& stored = out_row[column * params.out.col];
              if (is_finite(to<float>(stored))) stored = top[column];
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int round = 0; round < kOutRounds; ++round) {
        if (round > 0) __syncwarp();  // the rows before have left
        put_rows(smem_out, o, own_inverse, round);
        store_tile(
            out_rows + kept.item.i0 * params.out.row, smem_out,
            static_cast<int>(min(params.seqlen_q - kept.item.i0, index_t(kBlockM))),
            static_cast<int>(params.head_dim_v), params.out, round);
      }
      if (kept.special) {
        const index_t i_first = kept.item.i0 + lanes_t::warp_row();
        add_specials(out_rows, kept.v_rows, rows_of, params, i_first,
                     min(i_first + 16 * kRowTiles, rows_of.num_queries()),
                     kept.item.first, kept.item.last);
      }
    }
    if (next.i0 < 0) return;
    if constexpr (kStays) {
      if constexpr (kWarpsPerRow > 1) {
        // Weights begin in the other stage.
        const int by = stage_of(next.first) - stage_of(kept.item.first);
        lanes.p.base -= by * kBytesP;
      }
      first = next.first;
      last = next.last;
      __syncthreads();  // this tile of queries has left, and nobody asks for it
      if constexpr (kOutByQ) {
        begin_q(next, kept.has_aligned_q());
        ptx::commit_copies();
        ptx::wait_copy_groups<0>();
      }
      if (threadIdx.x == 0) {
        kept.item = next;
        kept.turn += 1;
        kept.special = false;
      }
    }
  }
}

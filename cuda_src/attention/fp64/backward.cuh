// SPDX-License-Identifier: MIT
// Shared by the float64 gradient kernels on tensor cores. A block owns kBlockM rows of
// one kind, queries or keys, and loops over kBlockN rows at a time of the other kind.
//
// A pair of warps owns 16 rows: its first warp computes the scores S of a tile, its
// second dP. Both run the same code on different operands:
//     c = own other^T            q k^T and dO v^T, or k q^T and v dO^T
//     c becomes w in exchange    P or dS, as an operand of the next product
//     sums += w other
// The first warp multiplies by P and the second by dS, for the whole tile (keys); or
// both by dS, for half of the tile each (queries). So no warp holds sums of two
// gradients, which need too many registers, and each scheduler always has two warps.
//
// Where few blocks have long loops, several share one (loop_splits.cuh). Sums of splits
// are (splits, entries, rows, columns).
//
// A mask array comes as bits (MASK_BITS), those of a tile through shared memory.
//
// Shared  own       2 x kBlockM x kDim   as fragments (tile.cuh), once per entry
//         other     2 x kBlockN x kDim   the rows looped over; the first half of the
//                                        columns of a tile loads while the second half
//                                        of the previous tile is in use, and so on
//         exchange  kBlockM x kBlockN    between the warps of a pair
#pragma once

#include "attention/fp64/backward_row.cuh"
#include "attention/fp64/tile.cuh"
#include "attention/fp64/weights.cuh"
#include "attention/score/mask_bits.cuh"
#include "attention/simt/gradients.cuh"
#include "attention/simt/long_sums.cuh"
#include "attention/simt/loop_splits.cuh"
#include "ptx/barrier.cuh"
#include "ptx/hold.cuh"

#if !defined(DIM) || !defined(BLOCK_N) || !defined(MIN_BLOCKS)
#error "DIM, BLOCK_N and MIN_BLOCKS come from the host"
#endif
constexpr int kDim = DIM;  // of all rows, padded with zeros
constexpr int kBlockN = BLOCK_N;
constexpr int kMinBlocks = MIN_BLOCKS;  // blocks per multiprocessor; limits registers
constexpr int kNumPairs = kNumThreads / (2 * kWarpSize);
constexpr int kBlockM = kNumPairs * kWarpRows;

constexpr int kTiles = kBlockN / 8;    // of c, 8 columns each
constexpr int kStepsN = kBlockN / 16;  // of the sum over the rows looped over
constexpr int kChunks = kDim / 16;     // of the sums, and steps of the sum over columns
constexpr int kAhead = 1;  // fragments are loaded this many products ahead; 2 spill
static_assert(kDim % 16 == 0 && kDim >= 32 && kBlockN % 16 == 0 && kNumPairs <= 8);

// Columns are copied, and used, in two parts; the first is not the shorter one.
template <int kPart> constexpr int kFirstChunk = kPart == 0 ? 0 : (kChunks + 1) / 2;
template <int kPart>
constexpr int kPartChunks = kPart == 0 ? kFirstChunk<1> : kChunks - kFirstChunk<1>;

// The mask comes as bits; scores know nothing of it.
constexpr bool kMaskBits = IS_GIVEN(MASK_BITS);
static_assert(!kMaskBits || !kTerms);

constexpr int kOwnSize = kBlockM * kDim, kOtherSize = kBlockN * kDim;
constexpr int kWarpOwnSize = kWarpRows * kDim, kExchangeSize = kWarpRows * kBlockN;

// Position of a thread: the pair of its warp, whether the warp is the first (0) or
// second (1) of it, and the lane. With four pairs, both warps are on the same
// scheduler: while one waits for the other, products continue.
class thread_t {
 public:
  __device__ __forceinline__ thread_t() : index_(threadIdx.x) {
    // Recompute what depends on it, rather than keep it in registers.
    ptx::launder(index_);
  }
  __device__ __forceinline__ int pair() const { return index_ / kWarpSize % kNumPairs; }
  __device__ __forceinline__ int role() const {
    return index_ / (kWarpSize * kNumPairs);
  }
  __device__ __forceinline__ int first_row() const { return pair() * kWarpRows; }
  __device__ __forceinline__ int lane() const { return index_ % kWarpSize; }
  __device__ __forceinline__ int g() const { return index_ % kWarpSize / 4; }
  __device__ __forceinline__ int t() const { return index_ % 4; }

 private:
  unsigned index_;
};

// The tiles in shared memory.
__device__ __forceinline__ double* shared_tiles() {
  extern __shared__ __align__(16) unsigned char smem[];
  return reinterpret_cast<double*>(smem);
}
__device__ __forceinline__ double* own_of(const thread_t& me) {
  return shared_tiles() + me.role() * kOwnSize + me.pair() * kWarpOwnSize;
}
__device__ __forceinline__ double* shared_other() {
  return shared_tiles() + 2 * kOwnSize;
}
// The part of a lane: 16 adjacent bytes.
__device__ __forceinline__ double* exchange_of(const thread_t& me) {
  return shared_other() + 2 * kOtherSize + me.pair() * kExchangeSize + me.lane() * kVec;
}

__device__ __forceinline__ void sync_pair() {
  ptx::bar_sync<2 * kWarpSize>(1 + thread_t().pair());
}

template <int kValue> struct constant_t {
  static constexpr int value = kValue;
};

using product_t = double[kTiles][4];  // fragments c
// Rows 2 t + (0, 1, 0, 1) of 8 and of the next 8, columns 2 g + (0, 0, 1, 1) of a
// chunk: the fragments c of the transposed product.
using sums_t = double[kChunks][2][4];
template <int kSteps>
using weights_t = double[kSteps][2][4];  // of rows g and g + 8; fragments b

// The weight for element e of tile n of a fragment c: in step n / 2.
template <int kSteps>
__device__ __forceinline__ double& weight_at(weights_t<kSteps>& w, int n, int e) {
  return w[n / 2][e / 2][n % 2 * 2 + e % 2];
}

// c += own other^T over part kPart of the columns. Each product is enclosed by two
// holds, together with the loads for later ones; `count` is any number >= 0.
template <int kPart> __device__ __forceinline__ void dot(product_t& c, int count) {
  const thread_t me;
  const double* const own =
      own_of(me) + kFirstChunk<kPart> * kStepSize + me.lane() * kVec;
  const double* const other =
      shared_other() + me.role() * kOtherSize + kFirstChunk<kPart> * 16;
  const double* const other_lane[2] = {other + place<kDim>(me.g(), me.t()),
                                       other + place<kDim>(me.g(), 4 + me.t())};
  constexpr int kProducts = kTiles * kPartChunks<kPart>;
  double a[2][8], b[kAhead + 1][4];
  const auto load_a = [&](int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double2 x = ptx::load_here(own + step * kStepSize + i * kWarpSize * kVec);
      a[step % 2][2 * i] = x.x;
      a[step % 2][2 * i + 1] = x.y;
    }
  };
  const auto load_b = [&](int product) {
    const int at = 8 * (product % kTiles) * kDim + 16 * (product / kTiles);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const double2 x = ptx::load_here(other_lane[i] + at);
      b[product % (kAhead + 1)][2 * i] = x.x;
      b[product % (kAhead + 1)][2 * i + 1] = x.y;
    }
  };
  load_a(0);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_b(i);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int step = i / kTiles, n = i % kTiles;
    ptx::hold(count, i);
    if (i + kAhead < kProducts) load_b(i + kAhead);
    // Not before the first product of a step: the previous product may still be reading
    // these registers.
    if (n == 1 && step + 1 < kPartChunks<kPart>) load_a(step + 1);
    add_product(c[n], a[step % 2], b[i % (kAhead + 1)]);
  }
}

// sums += w other in part kPart of the columns, over 16 kSteps rows of shared memory
// from `other` on. The products of a tile are summed on their own first.
template <int kPart, int kSteps>
__device__ __forceinline__ void accumulate(sums_t& sums, const weights_t<kSteps>& w,
                                           int other, int count) {
  const thread_t me;
  const double* other_lane[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    other_lane[e] = shared_other() + other + kFirstChunk<kPart> * 16 +
                    place<kDim>(2 * me.t() + e, me.g());
  }
  // Two products per fragment, which is loaded one ahead. A sum is added two products
  // later: it is complete by then, and nothing waits for it.
  constexpr int kFragments = kSteps * kPartChunks<kPart>, kProducts = 2 * kFragments;
  constexpr int kDelay = 3;
  double a[2][8], sum[2][2][4];
  const auto load = [&](int fragment) {
    const int step = fragment % kSteps, c = fragment / kSteps;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double2 x =
          ptx::load_here(other_lane[i % 2] + (16 * step + 8 * (i / 2)) * kDim + 16 * c);
      a[fragment % 2][2 * i] = x.x;
      a[fragment % 2][2 * i + 1] = x.y;
    }
  };
  load(0);
#pragma unroll
  for (int i = 0; i < kProducts + kDelay; ++i) {
    const int done = i - kDelay;
    if (done >= 0 && done / 2 % kSteps == kSteps - 1) {
      const int c = done / 2 / kSteps, h = done % 2;
      double (&total)[4] = sums[kFirstChunk<kPart> + c][h];
      ptx::hold(count, 2 * i);
#pragma unroll
      for (int n = 0; n < 4; ++n) total[n] += sum[c % 2][h][n];
      // Otherwise the assembler moves all additions behind all products.
      ptx::hold(count, 2 * i + 1, total);
    } else {
      ptx::hold(count, 2 * i + 1);
    }
    if (i >= kProducts) continue;
    const int fragment = i / 2, h = i % 2;
    const int step = fragment % kSteps, c = fragment / kSteps;
    if (h == 1 && fragment + 1 < kFragments) load(fragment + 1);
    if (step == 0) {
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[c % 2][h][n] = 0;
    }
    add_product(sum[c % 2][h], a[fragment % 2], w[step][h]);
  }
}

// Leaves the tiles of a block's split of a loop; `first` is a multiple of kBlockN.
__device__ __forceinline__ void take_split(index_t& first, index_t& last, index_t split,
                                           index_t splits) {
  const index_t tiles = last > first ? (last - first + kBlockN - 1) / kBlockN : 0;
  const index_t start = first, end = last;
  first = start + divide(tiles * split, splits) * kBlockN;
  last = smaller(end, start + divide(tiles * (split + 1), splits) * kBlockN);
}

// Rows of a matrix in global memory.
struct rows_t {
  const double* x;
  index_t stride;
  int dim;
};

// State common to the threads of a block; in shared memory, since registers are scarce.
struct walk_t {
  offsets_t<3> kept;  // offsets of the entry in the gradients
  index_t summed;     // index of the current summed entry
  index_t own_first;  // the first row owned
  index_t first;      // the first row looped over
  rows_t rows[2];     // looped over
  int num_rows;
  // A second pass, after 0 * NaN: nonfinite numbers become 0, and if any of them is
  // visible, the portable kernels take over.
  bool is_exact;
  int odd_own[kBlockM];    // 1: the row has a nonfinite number
  int odd_other[kBlockN];  // index of the last tile in which this row had one
  alignas(16) unsigned char scores_bytes[sizeof(scores_t)];
  mask_bounds_t bounds;  // relative to the first query and key of the tiles
  exp2_table_t exp2;

  __device__ void keep(const scores_t& scores) { new (scores_bytes) scores_t(scores); }
  __device__ const scores_t& scores() const {
    return *reinterpret_cast<const scores_t*>(scores_bytes);
  }
};

// Bits of a mask of kQueries queries and a tile of keys, in shared memory.
template <int kQueries> struct mask_tile_t {
  const uint4* rows;  // of the first query, from the first tile of keys on
  index_t stride;
  uint4 words[kQueries];

  __device__ __forceinline__ void begin(const mask_bits_t& bits, const tile_coord_t& at,
                                        index_t i0, index_t j0) {
    stride = bits.steps.row;
    rows = at.at(bits.tiles, bits.steps) + i0 * stride + j0 / kKeysOfBits;
  }
  // Starts copies for queries from `first` of `rows` on, in a tile of keys.
  __device__ __forceinline__ void fetch(int first, int num_rows, index_t tile) {
    unsigned n = threadIdx.x;
    // Recompute addresses, rather than keep them in registers.
    ptx::launder(n);
    if (n >= kQueries) return;
    const int row = first + n;
    ptx::copy_or_fill<16>(static_cast<unsigned>(__cvta_generic_to_shared(words + n)),
                          rows + row * stride + tile, row < num_rows ? 16 : 0);
  }
  // The bits of keys `key`, `key` + 1, 8 and 9 further on, and so on; `key` is even.
  __device__ __forceinline__ unsigned from(int query, int key) const {
    return reinterpret_cast<const unsigned*>(words)[4 * query + key % 8 / 2] >>
           key % kKeysOfBits / 8 * 2;
  }
};

// Loads part kPart of the columns of both tiles of rows from `first` on, zero-padded.
template <int kPart>
__device__ __forceinline__ void fetch(const walk_t& block, int first) {
#pragma unroll 1
  for (int n = 0; n < 2; ++n) {
    const rows_t& rows = block.rows[n];
    constexpr int kFirst = 16 * kFirstChunk<kPart>;
    copy_rows<kBlockN, kDim, 16 * kPartChunks<kPart>>(
        shared_other() + n * kOtherSize + kFirst, rows.x + first * rows.stride + kFirst,
        rows.stride, block.num_rows - first, rows.dim - kFirst);
  }
}

// Zeroes the nonfinite numbers of a tile and notes their rows.
template <int kPart> __device__ __forceinline__ void clean(walk_t& block, int tile) {
  constexpr int kCols = 16 * kPartChunks<kPart>;
#pragma unroll 1
  for (int n = threadIdx.x; n < 2 * kBlockN * kCols; n += kNumThreads) {
    const int row = n / kCols % kBlockN;
    double& x = shared_other()[n / kCols * kDim + 16 * kFirstChunk<kPart> + n % kCols];
    if (is_finite(x)) continue;
    x = 0;
    block.odd_other[row] = tile;
  }
}

// The same for the rows of this warp.
__device__ __forceinline__ void clean_own(walk_t& block) {
  const thread_t me;
  double* const own = own_of(me);
#pragma unroll 1
  for (int n = me.lane(); n < kWarpOwnSize; n += kWarpSize) {
    if (is_finite(own[n])) continue;
    own[n] = 0;
    // In the order of copy_own().
    block.odd_own[me.first_row() + n % (2 * kWarpSize) / 8 + 8 * (n % 2)] = 1;
  }
}

// Whether a run ends before this tile, counted from row `first`. There is no register
// to count rows in addition to tiles.
__device__ __forceinline__ bool run_ends_before(index_t first, unsigned tile) {
  ptx::launder(tile);
  return (static_cast<unsigned>(first) / kBlockN + tile) % kRunTiles == 0;
}

// Loops over all tiles of block.rows; their scores become 16 kSteps weights.
//   fetch_row(tile)       starts copies of the statistics of the rows of a tile
//   is_seen(tile)         whether the pair takes part in it
//   exchange(tile, c, w)  computes the weights
template <int kSteps, typename FetchRow, typename IsSeen, typename Exchange>
__device__ __forceinline__ void walk(sums_t& sums, walk_t& block, FetchRow fetch_row,
                                     IsSeen is_seen, Exchange exchange) {
  const auto accumulate_part = [&](auto part, const weights_t<kSteps>& w) {
    // P multiplies dO and dS multiplies q; or dS of half a tile multiplies k.
    constexpr bool kWhole = kSteps == kStepsN;
    const int role = thread_t().role(), values = kWhole ? 1 - role : 0;
    const int start = kWhole ? 0 : role * kBlockN / 2;
    accumulate<part.value, kSteps>(sums, w, values * kOtherSize + start * kDim,
                                   block.num_rows);
  };
  const auto fetch_first = [&](int tile) {
    fetch<0>(block, tile * kBlockN);
    fetch_row(tile);
    ptx::commit_copy_group();
  };
  two_level_sum_t<double, sums_t> two_level;
  two_level.begin();
  if (block.num_rows > 0) fetch_first(0);
#pragma unroll 1
  for (int tile = 0; tile * kBlockN < block.num_rows; ++tile) {
    if constexpr (kTwoLevelSums) {
      if (tile > 0 && run_ends_before(block.first, tile)) two_level.end(sums);
    }
    product_t c = {};
    weights_t<kSteps> w;
    ptx::wait_copy_groups<0>();
    // The first half has arrived, and all warps have read the second half before it.
    __syncthreads();
    fetch<1>(block, tile * kBlockN);
    ptx::commit_copy_group();
    if (block.is_exact) {
      clean<0>(block, tile);
      __syncthreads();  // the scrubbed values are stored
    }
    const bool seen = is_seen(tile);
    if (seen) dot<0>(c, block.num_rows);
    ptx::wait_copy_groups<0>();
    __syncthreads();  // the second half has arrived
    if (block.is_exact) {
      clean<1>(block, tile);
      __syncthreads();  // the scrubbed values are stored
    }
    if (seen) {
      dot<1>(c, block.num_rows);
      exchange(tile, c, w);
      accumulate_part(constant_t<0>{}, w);
    }
    __syncthreads();  // all warps have read the first half
    if ((tile + 1) * kBlockN < block.num_rows) fetch_first(tile + 1);
    if (seen) accumulate_part(constant_t<1>{}, w);
  }
  two_level.finish(sums);
  ptx::wait_copy_groups<0>();  // also of the owned rows, if there was no tile
}

// Begins an entry, before its rows are loaded.
__device__ __forceinline__ void begin_walks(walk_t& block, index_t summed) {
  unsigned thread = threadIdx.x;
  ptx::launder(thread);
  if (thread == 0) {
    block.is_exact = false;
    block.summed = summed;
  }
  if (thread < kBlockM) block.odd_own[thread] = 0;
  if (thread < kBlockN) block.odd_other[thread] = -1;
}

// Whether a sum is not finite.
__device__ __forceinline__ bool any_nonfinite(const sums_t& sums) {
  bool nonfinite = false;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int n = 0; n < 8; ++n) nonfinite |= !is_finite(sums[c][n / 4][n % 4]);
  }
  return nonfinite;
}

// After a pass: whether the block needs an exact one.
__device__ __forceinline__ bool walks_again(walk_t& block, const sums_t& sums,
                                            int* found) {
  const bool nonfinite = any_nonfinite(sums);
  if (block.is_exact) {
    if (nonfinite) *found = 1;
    return false;
  }
  if (!__syncthreads_or(nonfinite)) return false;
  if (threadIdx.x == 0) block.is_exact = true;
  clean_own(block);
  __syncthreads();  // `block` is complete
  return true;
}

// Clears the sums.
__device__ __forceinline__ void clear(sums_t& sums) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int n = 0; n < 8; ++n) sums[c][n / 4][n % 4] = 0;
  }
}

// Calls store(row, column, sum, n) for a lane's part of a gradient; row is its n-th of
// four.
template <typename Store>
__device__ __forceinline__ void for_each_sum(const sums_t& sums, Store store) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const thread_t me;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int col = 0; col < 2; ++col) {
        store(2 * me.t() + n % 2 + 8 * (n / 2), 16 * c + 2 * me.g() + col,
              sums[c][n / 2][2 * col + n % 2], n);
      }
    }
  }
}

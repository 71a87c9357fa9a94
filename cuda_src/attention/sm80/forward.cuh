// SPDX-License-Identifier: MIT
// attention_mma: sizes, tiles in shared memory, products of tiles.
#pragma once

#include "attention/sm80/fp32_split.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_M) || \
    !defined(BLOCK_N) || !defined(MIN_BLOCKS)
#error "HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N and MIN_BLOCKS come from the host"
#endif
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kMinBlocks = MIN_BLOCKS;

// Warps that share rows: each computes some of the keys of s and some of the columns of
// o. They exchange weights through shared memory.
#ifdef WARPS_PER_ROW
constexpr int kWarpsPerRow = WARPS_PER_ROW;
#else
constexpr int kWarpsPerRow = 1;
#endif

// Rows per warp: one or two times the 16 of an instruction. With two, each fragment of
// k or v that is read from shared memory serves two instructions.
constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr int kRowTiles = kBlockM * kWarpsPerRow / (16 * kNumWarps);
static_assert(kRowTiles * 16 * kNumWarps == kBlockM * kWarpsPerRow);
// Tiles of 8 columns per warp.
constexpr int kScoreTiles = kBlockN / kWarpsPerRow / 8,
              kOutTiles = kHeadDimV / kWarpsPerRow / 8;
static_assert(kBlockN % (16 * kWarpsPerRow) == 0 && kBlockN % 32 == 0);
static_assert(kHeadDim % 32 == 0 && kHeadDimV % (32 * kWarpsPerRow) == 0);

// Whether scores are finished one by one before the softmax, or it scales them.
constexpr bool kHasTerms = kScaleScores || kChangesScores;
static_assert(kWarpsPerRow == 1 || (!kHasTerms && !kSplits));

// float32 of more than 128 columns: few registers are left beside o.
constexpr bool kWide =
    kParts == 2 && (kHeadDim > 128 || kHeadDimV > 128) && kRowTiles == 1;
// What a loop needs once per tile: on the stack if registers are that few.
template <bool kFew> struct kept_of {
  using type = float;
};
template <> struct kept_of<true> {
  using type = volatile float;
};
using kept_t = kept_of<kWide>::type;

// Accumulators: number e of a tile is in row e / 2 * 8 + lane / 4 and column lane % 4 *
// 2 + e % 2. lanes_t gives the position of a tile.
using scores_frag_t = float[kRowTiles][kScoreTiles][4];
using out_frag_t = float[kRowTiles][kOutTiles][4];

// Starts copying kBytes whose layout in global memory is that of shared memory.
template <unsigned kBytes>
__device__ __forceinline__ void copy_operand(unsigned char* smem,
                                             const unsigned char* operand) {
  static_assert(kBytes % 16 == 0);
  const unsigned to = shared_address(smem);
  constexpr unsigned kRound = kNumThreads * 16;
  if constexpr (kWide) {
    unsigned first = threadIdx.x * 16;
    ptx::launder(first);
#pragma unroll
    for (unsigned n = 0; n < kBytes / kRound; ++n) {
      ptx::copy_async_or_zero(to + first + n * kRound, operand + first + n * kRound,
                              16);
    }
    if (first < kBytes % kRound) {
      first += kBytes / kRound * kRound;
      ptx::copy_async_or_zero(to + first, operand + first, 16);
    }
    return;
  }
#pragma unroll
  for (unsigned n = threadIdx.x * 16; n < kBytes; n += kRound) {
    ptx::copy_async_or_zero(to + n, operand + n, 16);
  }
}

// Copies rows [i0, i0 + kRows) of a matrix (last, dim) of 16-bit numbers, 16 bytes at a
// time, padded with zeros to kRows x kDim. Same as load_tile(), but with half as many
// instructions, most of which can run before the barrier that precedes the copies.
template <int kRows, int kDim> struct copy_t {
  using rows_t = tile_t<kDim>;
  static constexpr int kStep = kNumThreads / rows_t::kChunks;
  // Steps of 8 rows do not change the swizzle.
  static constexpr bool kInSteps =
      kNumThreads % rows_t::kChunks == 0 && kStep % 8 == 0 && kRows % kStep == 0;

  const elem_t* from;
  unsigned to;
  int count;  // existing rows from this thread's first on
  bool is_ready;

  __device__ __forceinline__ copy_t(unsigned char* smem, const elem_t* x,
                                    index_t row_stride, int i0, int last, int dim,
                                    bool aligned) {
    unsigned thread = threadIdx.x;
    // Values derived from these would occupy registers during the loop.
    ptx::launder(thread);
    ptx::launder(row_stride);
    const int row = thread / rows_t::kChunks, chunk = thread % rows_t::kChunks;
    from = x + static_cast<unsigned>(i0 + row) * row_stride + chunk * 8;
    to = shared_address(smem) + rows_t::offset(row, chunk);
    count = chunk * 8 < dim ? last - i0 - row : 0;
    is_ready = kInSteps && aligned;
    ptx::launder(from);  // computed by now
  }

  __device__ __forceinline__ void start(index_t row_stride) const {
    const elem_t* x = from;
#pragma unroll
    for (int n = 0; n < kRows / kStep; ++n) {
      // Rows that do not exist are not read.
      ptx::copy_async_or_zero(to + n * kStep * rows_t::kPitch, x,
                              n * kStep < count ? 16 : 0);
      x += kStep * row_stride;
    }
  }
};

// The same in one call, whether or not rows are aligned.
template <int kRows, int kDim>
__device__ __forceinline__ void copy_tile(unsigned char* smem, const elem_t* x,
                                          index_t row_stride, int i0, int last, int dim,
                                          bool aligned) {
  auto place = [](int row, int chunk) { return tile_t<kDim>::offset(row, chunk); };
  const copy_t<kRows, kDim> copy(smem, x, row_stride, i0, last, dim, aligned);
  if (!copy.is_ready) {
    load_tile<kRows, kDim>(smem, x + i0 * row_stride, row_stride, last - i0, dim,
                           aligned, place);
    return;
  }
  copy.start(row_stride);
}

// --- products ------------------------------------------------------------------------

constexpr unsigned kBytesQ = kBlockM * kHeadDim * 2;  // of one part of a tile
constexpr unsigned kBytesK = kBlockN * kHeadDim * 2, kBytesV = kBlockN * kHeadDimV * 2;
constexpr unsigned kBytesP = kBlockM * kBlockN * 2;

// tile_t in one register. Tiles start at multiples of 128, so the swizzle of chunks
// changes only address bits that rows do not.
template <int kDim> struct lane_of_t {
  using rows_t = tile_t<kDim>;

  unsigned base;
  __device__ __forceinline__ lane_of_t(unsigned tile, int row, int chunk)
      : base(tile + rows_t::offset(row, chunk)) {}
  __device__ __forceinline__ unsigned at(int row, int chunk) const {
    constexpr int kMask = rows_t::kMask;
    return (base ^ (chunk & kMask) * 16) + (chunk & ~kMask) * 16 + row * rows_t::kPitch;
  }
  // Makes the compiler recompute what depends on it.
  __device__ __forceinline__ void launder() { ptx::launder(base); }
};

// A lane's base addresses in the tiles of q and p (its warp's rows), k and v.
struct lanes_t {
  lane_of_t<kHeadDim> q, k;
  lane_of_t<kHeadDimV> v;
  lane_of_t<kBlockN> p;  // weights, if warps share rows

  __device__ __forceinline__ lanes_t(unsigned smem_q, unsigned smem_k, unsigned smem_v,
                                     unsigned smem_p)
      : q(smem_q, warp_row() + lane() % 16, lane() / 16),
        k(smem_k, warp_key() + lane() % 8 + lane() / 16 * 8, lane() / 8 % 2),
        v(smem_v, lane() % 16, lane() / 16 + warp_of_row() * 4),
        p(smem_p, warp_row() + lane() % 16, lane() / 16) {}

  // Makes the compiler recompute what depends on them.
  __device__ __forceinline__ void launder() {
    q.launder();
    k.launder();
    v.launder();
    if constexpr (kWarpsPerRow > 1) p.launder();
  }

  static __device__ __forceinline__ int lane(unsigned thread = threadIdx.x) {
    return thread % kWarpSize;
  }
  static __device__ __forceinline__ int warp_of_row(unsigned thread = threadIdx.x) {
    return kWarpsPerRow == 1 ? 0 : thread / kWarpSize % kWarpsPerRow;
  }
  static __device__ __forceinline__ int warp_row(unsigned thread = threadIdx.x) {
    return thread / kWarpSize / kWarpsPerRow * 16 * kRowTiles;
  }
  // The first of a warp's keys, which are contiguous.
  static __device__ __forceinline__ int warp_key() {
    return warp_of_row() * (kBlockN / kWarpsPerRow);
  }
  // Tile n of a warp's columns of o. The warps that share rows alternate in groups of 4
  // tiles, which keeps the swizzle of v as it is for a single warp.
  static __device__ __forceinline__ constexpr int out_tile(int n) {
    return n / 4 * 4 * kWarpsPerRow + n % 4;
  }
  static __device__ __forceinline__ int out_column(int n) {
    return out_tile(n) * 8 + warp_of_row() * 32 + lane() % 4 * 2;
  }
};

// Loads a 16-column step of q for this warp's rows.
__device__ __forceinline__ void load_q(unsigned (&a)[kRowTiles][4],
                                       const lanes_t& lanes, int step, int part = 0) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    ptx::ldmatrix_x4(a[m], lanes.q.at(16 * m, 2 * step) + part * kBytesQ);
  }
}

// 16-bit products accumulate directly in s.
constexpr int kSteps = kHeadDim / 16;

template <bool kInRegisters> struct queries_t {
  unsigned a[kInRegisters ? kSteps : 1][kRowTiles][4];
};

// s = q k^T
template <bool kInRegisters>
__device__ __forceinline__ void multiply_qk(scores_frag_t& s,
                                            const queries_t<kInRegisters>& q,
                                            const lanes_t& lanes) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    unsigned loaded[kRowTiles][4];
    if constexpr (!kInRegisters) load_q(loaded, lanes, step);
    const auto& a = [&]() -> const unsigned (&)[kRowTiles][4] {
      if constexpr (kInRegisters) return q.a[step];
      return loaded;
    }();
#pragma unroll
    for (int n = 0; n < kScoreTiles; n += 2) {
      unsigned b[4];
      ptx::ldmatrix_x4(b, lanes.k.at(8 * n, 2 * step));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        pair16_t::mma(s[m][n], a[m], b[0], b[1]);
        pair16_t::mma(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// o += p v; `beside(step)` is interleaved with the products.
template <typename Beside>
__device__ __forceinline__ void multiply_pv(out_frag_t& o, const scores_frag_t& p,
                                            const lanes_t& lanes, Beside beside) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    beside(step);
    // The accumulators of two tiles of scores form the A operand of one step.
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (kWarpsPerRow > 1) {
        ptx::ldmatrix_x4(a[m], lanes.p.at(16 * m, 2 * step));
      } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float (&tile)[4] = p[m][2 * step + n / 2];
          a[m][n] = pair16_t::from(tile[n % 2 * 2], tile[n % 2 * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2) {
      unsigned b[4];
      ptx::ldmatrix_x4_trans(b, lanes.v.at(16 * step, lanes_t::out_tile(n)));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        pair16_t::mma(o[m][n], a[m], b[0], b[1]);
        pair16_t::mma(o[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

__device__ __forceinline__ void multiply_pv(out_frag_t& o, const scores_frag_t& p,
                                            const lanes_t& lanes) {
  multiply_pv(o, p, lanes, [](int) {});
}

template <int kCount>
__device__ __forceinline__ void multiply_by(float (&x)[kRowTiles][kCount][4],
                                            float factor) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][n][e] *= factor;
    }
  }
}

// Copies to and from the stack.
template <int kCount>
__device__ __forceinline__ void put(float* to, const float (&x)[kRowTiles][kCount][4]) {
#pragma unroll
  for (int n = 0; n < kRowTiles * kCount * 4; ++n) {
    to[n] = x[n / (kCount * 4)][n / 4 % kCount][n % 4];
  }
}
template <int kCount>
__device__ __forceinline__ void get(float (&x)[kRowTiles][kCount][4],
                                    const float* from) {
#pragma unroll
  for (int n = 0; n < kRowTiles * kCount * 4; ++n) {
    x[n / (kCount * 4)][n / 4 % kCount][n % 4] = from[n];
  }
}

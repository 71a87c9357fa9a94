// SPDX-License-Identifier: MIT
// attention_mma_few: sizes, pieces of k and v in shared memory, operands and products.
//
// A float32 is the sum of two tf32 numbers, high + low, off by at most 2^-23 of it at
// any magnitude; a product takes three, low high + high low + high high.
// precision="tf32" uses only high. Parts are made in registers, for each number once.
#pragma once

#include "attention/sm80/tile.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_M) || \
    !defined(BLOCK_N) || !defined(STAGES) || !defined(MIN_BLOCKS) || !defined(PARTS)
#error "HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, STAGES, MIN_BLOCKS, PARTS: by the host"
#endif
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kStages = STAGES, kMinBlocks = MIN_BLOCKS;
constexpr int kParts = PARTS;  // tf32 numbers per float32
#ifdef UNALIGNED
constexpr bool kUnaligned = true;  // rows of q, k or v are no whole 16-byte vectors
#else
constexpr bool kUnaligned = false;
#endif
static_assert(kParts == 1 || kParts == 2);

constexpr int kWarps = kNumThreads / kWarpSize;
constexpr int kRowTiles = kBlockM / 16;  // of 16 queries; all warps have all of them
constexpr int kRows = 2 * kRowTiles;     // of a lane: lane / 4 + 8 r
constexpr int kKeyTiles = kBlockN / kWarps / 8;   // of a warp, of 8 keys
constexpr int kColumns = kHeadDimV / kWarps;      // of v and out, of a warp
constexpr int kVec = kColumns % 32 == 0 ? 4 : 2;  // adjacent columns of a lane
constexpr int kSpans = kColumns / (8 * kVec);     // a lane has kVec columns in each
static_assert(kKeyTiles == 2 && kBlockM % 16 == 0 && kColumns % 16 == 0);

// k and v arrive in pieces: of the warp's 16 keys kDepth columns, and of its columns
// kDepthV keys. A group is 16 numbers along the sums: two steps of mma.sync.
constexpr int kDepth = 64, kDepthV = kColumns == 32 ? 32 : kColumns == 16 ? 64 : 16;
constexpr int kPiecesK = kHeadDim / kDepth, kPiecesV = kBlockN / kDepthV;
constexpr int kPieces = kPiecesK + kPiecesV;  // of a tile of keys
constexpr int kGroup = 16, kGroups = kBlockN / kGroup;
static_assert(kHeadDim % kDepth == 0 && kStages > 1);

// --- shared memory -------------------------------------------------------------------

// Rows of kDim floats in chunks of 16 bytes, which are swizzled. Along rows, 8 lanes
// read 4 chunks of two rows.
template <int kDim> struct along_t {
  static constexpr int kChunks = kDim / 4, kPeriod = 2;
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return (row * kChunks + (chunk ^ row % 2 * 4)) * 16;
  }
};
// Across rows, they read two chunks of 4 rows; or 16 of them halves of these.
template <int kDim> struct across_t {
  static constexpr int kChunks = kDim / 4, kPeriod = 4;
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    const int x = kChunks % 8 == 0 ? row % 4 * 2 : row / 2 % 2 * 2;
    return (row * kChunks + (chunk ^ x)) * 16;
  }
};

constexpr unsigned kBytesQ = kBlockM * kHeadDim * 4;
constexpr unsigned kBytesS = kBlockM * kBlockN * 4;  // of one of two tiles of scores
constexpr unsigned kBytesPiece =
    4 * (8 * kKeyTiles * kDepth > kDepthV * kColumns ? 8 * kKeyTiles * kDepth
                                                     : kDepthV * kColumns);

__device__ __forceinline__ int lane_index() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int warp_index() { return threadIdx.x / kWarpSize; }

// A tile of scores: 16 keys of a group are in an order that gives a lane 4 of them,
// t + 4 i, in one chunk.
__device__ __forceinline__ unsigned score_offset(int row, int key) {
  return along_t<kBlockN>::offset(row, key / kGroup * 4 + key % 4) +
         key % kGroup / 4 * 4;
}

// Starts copying kRowsOf rows of kDim floats, by kThreads threads; those from `rows` on
// are zero, as are columns from `columns` on.
template <typename Layout, int kRowsOf, int kThreads>
__device__ __forceinline__ void copy_rows(unsigned char* to, const float* x,
                                          index_t row_stride, int rows, int columns) {
  constexpr int kChunks = Layout::kChunks;
  constexpr int kStep = kThreads / kChunks;  // rows at a time
  unsigned thread = threadIdx.x;
  // Recompute addresses for each piece; otherwise they would occupy registers.
  ptx::launder(thread);
  ptx::launder(row_stride);
  thread %= kThreads;
  if constexpr (kUnaligned) {  // neighbours copy neighbours
#pragma unroll 8
    for (int n = thread; n < kRowsOf * kChunks * 4; n += kThreads) {
      const int row = n / (kChunks * 4), column = n % (kChunks * 4);
      const bool exists = row < rows && column < columns;
      ptx::copy_async_or_zero<4>(
          shared_address(to + Layout::offset(row, column / 4)) + column % 4 * 4,
          exists ? x + row * row_stride + column : x, exists ? 4 : 0);
    }
    return;
  }
  constexpr bool kFlips = kStep == 2 && Layout::kPeriod == 4;  // the swizzle
  if constexpr (kThreads % kChunks == 0 && (kStep % Layout::kPeriod == 0 || kFlips)) {
    const int row = thread / kChunks, chunk = thread % kChunks;
    const float* from = x + row * row_stride + 4 * chunk;
    const unsigned first = Layout::offset(row, chunk);
    const auto place_of = [&](int n) {
      return to + (first ^ (kFlips && n % 2 ? 64 : 0)) + n * kStep * kChunks * 16;
    };
    if (rows >= kRowsOf && columns >= 4 * kChunks) {  // fewer instructions
#pragma unroll
      for (int n = 0; n < kRowsOf / kStep; ++n, from += kStep * row_stride) {
        ptx::copy_async<16>(place_of(n), from);
      }
      return;
    }
    const int bytes = min(max(columns - 4 * chunk, 0), 4) * 4;
#pragma unroll
    for (int n = 0; n < kRowsOf / kStep; ++n, from += kStep * row_stride) {
      // Rows that do not exist are not read.
      ptx::copy_async_or_zero(shared_address(place_of(n)), from,
                              n * kStep + row < rows ? bytes : 0);
    }
  } else {
#pragma unroll 4
    for (int n = thread; n < kRowsOf * kChunks; n += kThreads) {
      const int row = n / kChunks, chunk = n % kChunks;
      const int bytes = row < rows ? min(max(columns - 4 * chunk, 0), 4) * 4 : 0;
      const float* const from = bytes > 0 ? x + row * row_stride + 4 * chunk : x;
      ptx::copy_async_or_zero(shared_address(to + Layout::offset(row, chunk)), from,
                              bytes);
    }
  }
}

template <int kCount>
__device__ __forceinline__ void read(float (&x)[kCount], const unsigned char* from) {
  if constexpr (kCount == 4) {
    const float4 all = *reinterpret_cast<const float4*>(from);
    x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
  } else {
    const float2 all = *reinterpret_cast<const float2*>(from);
    x[0] = all.x, x[1] = all.y;
  }
}

// --- products ------------------------------------------------------------------------

// mma.sync ignores the 13 low bits, so that adding half of the last one it reads
// rounds; the rest then has only one bit more than it reads.
__device__ __forceinline__ float high_of(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000) & ~0x1fffu);
}
__device__ __forceinline__ void split(float x, unsigned (&parts)[kParts]) {
  if constexpr (kParts == 2) {
    const float high = high_of(x);
    parts[0] = __float_as_uint(high);
    parts[1] = __float_as_uint(x - high);
  } else {
    parts[0] = ptx::tf32_from_f32(x);
  }
}

// 16 queries, or 8 columns of the other operand, by a group: slots t and t + 4 of step
// i are numbers 2 i and 2 i + 1 of the lane.
struct left_t {
  unsigned parts[2][kParts][4];

  // Numbers of rows lane / 4 and lane / 4 + 8.
  __device__ __forceinline__ left_t(const float (&low)[4], const float (&high)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      unsigned of_low[kParts], of_high[kParts];
      split(low[n], of_low);
      split(high[n], of_high);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        parts[n / 2][part][n % 2 * 2] = of_low[part];
        parts[n / 2][part][n % 2 * 2 + 1] = of_high[part];
      }
    }
  }
  left_t() = default;
};
struct right_t {
  unsigned parts[2][kParts][2];

  __device__ __forceinline__ void set(int n, float x) {
    unsigned of_x[kParts];
    split(x, of_x);
#pragma unroll
    for (int part = 0; part < kParts; ++part) parts[n / 2][part][n % 2] = of_x[part];
  }
};

// sums += a b over a group, small parts first. Tensor cores truncate: they sum a group
// alone, and such sums are added with rounding.
template <int kTiles>
__device__ __forceinline__ void add_products(float (&sums)[kRowTiles][kTiles][4],
                                             const left_t (&a)[kRowTiles],
                                             const right_t (&b)[kTiles]) {
  float sum[kRowTiles][kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int product = kParts == 2 ? 0 : 2; product < 3; ++product) {
      const int of_a = product == 0, of_b = product == 1;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const unsigned (&right)[2] = b[n].parts[step][of_b];
          ptx::mma_m16n8k8_tf32(sum[m][n], a[m].parts[step][of_a], right[0], right[1]);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int e = 0; e < 4 * kTiles; ++e) sums[m][e / 4][e % 4] += sum[m][e / 4][e % 4];
  }
}

using scores_frag_t = float[kRowTiles][kKeyTiles][4];
using out_frag_t = float[kSpans][kRowTiles][kVec][4];

// s += q k^T over a piece of k, whose first column is `first`.
__device__ __forceinline__ void multiply_qk(scores_frag_t& s, const unsigned char* q,
                                            const unsigned char* piece, int first) {
  const int row = lane_index() / 4, chunk = lane_index() % 4;
#pragma unroll 2
  for (int group = 0; group < kDepth / kGroup; ++group) {
    left_t a[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float low[4], high[4];
      const int at = (first + group * kGroup) / 4 + chunk;
      read(low, q + along_t<kHeadDim>::offset(16 * m + row, at));
      read(high, q + along_t<kHeadDim>::offset(16 * m + row + 8, at));
      a[m] = left_t(low, high);
    }
    right_t b[kKeyTiles];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      float x[4];
      read(x, piece + along_t<kDepth>::offset(8 * n + row, 4 * group + chunk));
#pragma unroll
      for (int i = 0; i < 4; ++i) b[n].set(i, x[i]);
    }
    add_products(s, a, b);
  }
}

// A value that parts cannot represent.
__device__ __forceinline__ bool is_odd(float value) {
  return !is_finite(value) || !is_finite(high_of(value));
}

// o += p v over a group of keys in a piece of v, the first of which is in row `first`.
__device__ __forceinline__ void multiply_pv(out_frag_t& o, const left_t (&p)[kRowTiles],
                                            const unsigned char* piece, int first) {
  const int row = first + lane_index() % 4, column = lane_index() / 4;
#pragma unroll
  for (int span = 0; span < kSpans; ++span) {
    right_t b[kVec];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[kVec];
      const int at = (span * 8 + column) * kVec;
      read(x, piece + across_t<kColumns>::offset(row + 4 * i, at / 4) + at % 4 * 4);
#pragma unroll
      for (int n = 0; n < kVec; ++n) {
        b[n].set(i, x[n]);
      }
    }
    add_products(o[span], p, b);
  }
}

// The column of number e of tile n of a span, relative to the warp's first.
__device__ __forceinline__ int out_column(int span, int n, int e) {
  return (span * 8 + lane_index() % 4 * 2 + e % 2) * kVec + n;
}

// SPDX-License-Identifier: MIT
// attention_mma: sizes, tiles in shared memory, products of tiles.
#pragma once

#include "attention/score.cuh"
#include "common/reduce.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "ptx/packed.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_M) || \
    !defined(BLOCK_N) || !defined(MIN_BLOCKS)
#error "HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N and MIN_BLOCKS come from the host"
#endif
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kMinBlocks = MIN_BLOCKS;

// A float32 is held as the sum of kParts float16 numbers: two, or one (tf32).
constexpr bool kSplits = sizeof(elem_t) == 4;
#ifdef PARTS
constexpr int kParts = PARTS;
#else
constexpr int kParts = 1;
#endif
static_assert(kParts == 1 || (kParts == 2 && kSplits));

// Number of rows that a warp owns: 16 of an instruction, once or twice. Twice, a
// fragment of k or v from shared memory serves two instructions.
constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr int kRowTiles = kBlockM / (16 * kNumWarps);
static_assert(kRowTiles * 16 * kNumWarps == kBlockM);
constexpr int kScoreTiles = kBlockN / 8, kOutTiles = kHeadDimV / 8;  // of 8 columns
static_assert(kBlockN % 32 == 0 && kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);

#ifdef SCALE_SCORES
constexpr bool kScaleScores = true;  // not a number that exp2 can take over
#else
constexpr bool kScaleScores = false;
#endif
// Whether scores are finished one by one before the softmax; else the softmax scales.
constexpr bool kHasTerms =
    kScaleScores || kHasSoftcap || kHasBias || kHasAlibi || kHasMask;

// Accumulators: number e of a tile stands in row e / 2 * 8 + lane / 4 and column
// lane % 4 * 2 + e % 2.
using scores_frag_t = float[kRowTiles][kScoreTiles][4];
using out_frag_t = float[kRowTiles][kOutTiles][4];

// --- tiles in shared memory ----------------------------------------------------------

// A matrix of 16-bit numbers with kDim columns. Chunks of 16 bytes are exchanged within
// a row so that the same chunk of 8 rows side by side lies in different banks.
template <int kDim>
struct tile_t {
  static constexpr int kPitch = kDim * 2, kChunks = kDim / 8;
  static constexpr int kMask = kChunks % 8 == 0 ? 7 : 3;
  static_assert(kChunks % 4 == 0);

  static __device__ __forceinline__ int exchange(int row) {
    return (kMask == 7 ? row : row / 2) & kMask;
  }
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return row * kPitch + (chunk ^ exchange(row)) * 16;
  }

  // Where a lane's address for a product starts. A step moves by `chunks` (even)
  // columns of 8 and by rows in multiples of 8, which are added as they are.
  unsigned base;
  int x;
  __device__ __forceinline__ tile_t(unsigned tile, int row, int chunk)
      : base(tile + row * kPitch), x(chunk ^ exchange(row)) {}
  __device__ __forceinline__ unsigned at(int row, int chunk) const {
    return base + (((chunk & kMask) ^ x) + (chunk & ~kMask)) * 16 + row * kPitch;
  }
};

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Whether rows can be copied 16 bytes at a time.
__device__ __forceinline__ bool has_aligned_rows(const elem_t* x,
                                                 index_t row_stride,
                                                 index_t dim) {
  constexpr int kElems = 16 / sizeof(elem_t);
  return (reinterpret_cast<unsigned long long>(x) % 16 | row_stride % kElems |
          dim % kElems) == 0;
}

// Elements [first, first + 16 bytes) of a row, zeros from `dim` on.
__device__ __forceinline__ uint4 gather(const elem_t* row, int first, int dim) {
  constexpr int kElems = 16 / sizeof(elem_t);
  union {
    uint4 word;
    elem_t element[kElems];
  } v;
  v.word = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int e = 0; e < kElems; ++e) {
    if (first + e < dim) v.element[e] = row[first + e];
  }
  return v.word;
}

// Starts to copy rows [0, num_rows) of a matrix (.., dim); zeros fill up kRows x kDim.
// `place(row, chunk)` tells the offset in shared memory of a chunk of 16 bytes. A
// thread gets the same chunks in each call.
template <int kRows, int kDim, typename Place>
__device__ __forceinline__ void load_tile(unsigned char* smem,
                                          const elem_t* x,
                                          index_t row_stride,
                                          int num_rows,
                                          int dim,
                                          bool aligned,
                                          Place place) {
  constexpr int kElems = 16 / sizeof(elem_t), kChunks = kDim / kElems;
  // Addresses are computed anew for each tile: kept, they would take the registers.
  ptx::forget(row_stride);
  if (aligned) {
    const unsigned to = shared_address(smem);
    // Steps of 8 rows leave the exchange of chunks as it is; staging has none.
    constexpr int kStep = kNumThreads % kChunks == 0 ? kNumThreads / kChunks : 1;
    if constexpr (kRows % kStep == 0 && (kStep % 8 == 0 || (kSplits && kStep > 1))) {
      const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
      const elem_t* from = x + row * row_stride + chunk * kElems;
      const unsigned first = to + place(row, chunk), step = place(kStep, 0);
      const int count = chunk * kElems < dim ? num_rows - row : 0;
#pragma unroll
      for (int n = 0; n < kRows / kStep; ++n) {
        const bool exists = n * kStep < count;
        ptx::copy_async_or_zero(first + n * step, exists ? from : x, exists ? 16 : 0);
        from += kStep * row_stride;
      }
    } else {
#pragma unroll 4
      for (int n = threadIdx.x; n < kRows * kChunks; n += kNumThreads) {
        const int row = n / kChunks, chunk = n % kChunks;
        const bool exists = row < num_rows && chunk * kElems < dim;
        ptx::copy_async_or_zero(to + place(row, chunk),
                                exists ? x + row * row_stride + chunk * kElems : x,
                                exists ? 16 : 0);
      }
    }
  } else {
#pragma unroll 1
    for (int n = threadIdx.x; n < kRows * kChunks; n += kNumThreads) {
      const int row = n / kChunks, chunk = n % kChunks;
      uint4 word = make_uint4(0, 0, 0, 0);
      if (row < num_rows) word = gather(x + row * row_stride, chunk * kElems, dim);
      *reinterpret_cast<uint4*>(smem + place(row, chunk)) = word;
    }
  }
}

// Starts to copy kBytes that lie in memory as in shared memory.
template <unsigned kBytes>
__device__ __forceinline__ void load_image(unsigned char* smem,
                                           const unsigned char* image) {
  static_assert(kBytes % 16 == 0);
  const unsigned to = shared_address(smem);
#pragma unroll
  for (unsigned n = threadIdx.x * 16; n < kBytes; n += kNumThreads * 16) {
    ptx::copy_async_or_zero(to + n, image + n, 16);
  }
}

// --- products ------------------------------------------------------------------------

template <typename T>
struct pair16_of;
template <>
struct pair16_of<half_t> {
  static constexpr bool kIsBfloat16 = false;
  static __device__ __forceinline__ unsigned from(float low, float high) {
    return ptx::f16x2_from_f32(high, low);
  }
  static __device__ __forceinline__ void mma(float (&d)[4],
                                             const unsigned (&a)[4],
                                             unsigned b0,
                                             unsigned b1) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
};
template <>
struct pair16_of<bfloat16_t> {
  static constexpr bool kIsBfloat16 = true;
  static __device__ __forceinline__ unsigned from(float low, float high) {
    return ptx::bf16x2_from_f32(high, low);
  }
  static __device__ __forceinline__ void mma(float (&d)[4],
                                             const unsigned (&a)[4],
                                             unsigned b0,
                                             unsigned b1) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  }
};
template <>
struct pair16_of<float> : pair16_of<half_t> {};
using pair16_t = pair16_of<elem_t>;

// Two floats as kParts words of two float16 each, which sum up to them.
template <int kCount>
__device__ __forceinline__ void split(unsigned (&words)[kCount], float x, float y) {
  words[0] = pair16_t::from(x, y);
  if constexpr (kCount == 2) {
    words[1] = pair16_t::from(
        x - ptx::f32_from_f16(static_cast<unsigned short>(words[0])),
        y - ptx::f32_from_f16(static_cast<unsigned short>(words[0] >> 16)));
  }
}

constexpr unsigned kBytesQ = kBlockM * kHeadDim * 2;  // of one part of a tile
constexpr unsigned kBytesK = kBlockN * kHeadDim * 2, kBytesV = kBlockN * kHeadDimV * 2;

// Where a lane's addresses start in the tiles of q (its warp's rows), k and v.
struct lanes_t {
  tile_t<kHeadDim> q, k;
  tile_t<kHeadDimV> v;

  __device__ __forceinline__ lanes_t(unsigned smem_q, unsigned smem_k, unsigned smem_v)
      : q(smem_q, warp_row() + lane() % 16, lane() / 16),
        k(smem_k, lane() % 8 + lane() / 16 * 8, lane() / 8 % 2),
        v(smem_v, lane() % 16, lane() / 16) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ __forceinline__ int warp_row() {
    return threadIdx.x / kWarpSize * 16 * kRowTiles;
  }
};

// A 16-column step of q, of this warp's rows.
__device__ __forceinline__ void load_q(unsigned (&a)[kRowTiles][4],
                                       const lanes_t& lanes,
                                       int step,
                                       int part = 0) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    ptx::ldmatrix_x4(a[m], lanes.q.at(16 * m, 2 * step) + part * kBytesQ);
  }
}

// 16-bit numbers are multiplied at once, into accumulators that go on.
constexpr int kSteps = kHeadDim / 16;

template <bool kInRegisters>
struct queries_t {
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

// o += p v
__device__ __forceinline__ void multiply_pv(out_frag_t& o,
                                            const scores_frag_t& p,
                                            const lanes_t& lanes) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    // The accumulators of two tiles of scores are the A operand of one step.
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float (&tile)[4] = p[m][2 * step + n / 2];
        a[m][n] = pair16_t::from(tile[n % 2 * 2], tile[n % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2) {
      unsigned b[4];
      ptx::ldmatrix_x4_trans(b, lanes.v.at(16 * step, n));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        pair16_t::mma(o[m][n], a[m], b[0], b[1]);
        pair16_t::mma(o[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
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

// To and from the stack.
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

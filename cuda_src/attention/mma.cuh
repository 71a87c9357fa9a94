// SPDX-License-Identifier: MIT
// attention_mma: sizes, tiles in shared memory, products of tiles.
#pragma once

#include "attention/mma_tiles.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_M) || \
    !defined(BLOCK_N) || !defined(MIN_BLOCKS)
#error "HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N and MIN_BLOCKS come from the host"
#endif
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kMinBlocks = MIN_BLOCKS;

// A float32 is held as the sum of kParts float16 numbers: two, or one (tf32).
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

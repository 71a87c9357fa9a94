// SPDX-License-Identifier: MIT
// Tiles of 16-bit numbers in shared memory, and pairs of them in registers, in the
// layouts of ldmatrix and mma.sync.
#pragma once

#include "copy/unaligned_load.cuh"
#include "attention/score/score.cuh"
#include "common/reduce.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "ptx/packed.cuh"

constexpr bool kScaleScores =
    IS_GIVEN(SCALE_SCORES);  // not a number that exp2 can take over
// float32 is split into float16 numbers before products.
constexpr bool kSplits = sizeof(elem_t) == 4;

// --- tiles in shared memory ----------------------------------------------------------

// A matrix of 16-bit numbers with kDim columns. The 16-byte chunks of a row are
// swizzled so that the same chunk of 8 consecutive rows lies in different banks.
template <int kDim> struct tile_t {
  static constexpr int kPitch = kDim * 2, kChunks = kDim / 8;
  static constexpr int kMask = kChunks % 8 == 0 ? 7 : 3;
  static_assert(kChunks % 4 == 0);

  static __device__ __forceinline__ int swizzle(int row) {
    return (kMask == 7 ? row : row / 2) & kMask;
  }
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return row * kPitch + (chunk ^ swizzle(row)) * 16;
  }

  // Base of a lane's addresses in a product. A step adds an even number of `chunks` (8
  // columns) and multiples of 8 rows, both without touching the swizzle.
  unsigned base;
  int x;
  __device__ __forceinline__ tile_t(unsigned tile, int row, int chunk)
      : base(tile + row * kPitch), x(chunk ^ swizzle(row)) {}
  __device__ __forceinline__ unsigned at(int row, int chunk) const {
    return base + (((chunk & kMask) ^ x) + (chunk & ~kMask)) * 16 + row * kPitch;
  }
  // Makes the compiler recompute what depends on it.
  __device__ __forceinline__ void launder() {
    ptx::launder(base);
    unsigned word = x;
    ptx::launder(word);
    x = word;
  }
};

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Whether rows can be copied in 16-byte chunks.
__device__ __forceinline__ bool has_aligned_rows(const elem_t* x, index_t row_stride,
                                                 index_t dim) {
  constexpr int kElems = 16 / sizeof(elem_t);
  return (reinterpret_cast<unsigned long long>(x) % 16 | row_stride % kElems |
          dim % kElems) == 0;
}

// Whether rows can be copied in 4-byte words.
__device__ __forceinline__ bool has_words(const elem_t* x, index_t row_stride) {
  return (reinterpret_cast<unsigned long long>(x) | row_stride * sizeof(elem_t)) % 4 ==
         0;
}

// Starts copying rows [0, num_rows) of a matrix (.., dim), padded with zeros to kRows x
// kDim. `place(row, chunk)` gives the shared memory offset of a 16-byte chunk. A thread
// copies the same chunks in each call.
template <int kRows, int kDim, typename Place>
__device__ __forceinline__ void load_tile(unsigned char* smem, const elem_t* x,
                                          index_t row_stride, int num_rows, int dim,
                                          bool aligned, Place place) {
  constexpr int kElems = 16 / sizeof(elem_t), kChunks = kDim / kElems;
  // Recompute addresses for each tile; otherwise they would occupy registers.
  ptx::launder(row_stride);
  if (aligned) {
    const unsigned to = shared_address(smem);
    // Steps of 8 rows do not change the swizzle; staging tiles have none.
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
  } else if (has_words(x, row_stride)) {
    const unsigned to = shared_address(smem);
#pragma unroll 1
    for (int n = threadIdx.x; n < kRows * kChunks; n += kNumThreads) {
      const int row = n / kChunks, chunk = n % kChunks;
      const bool exists = row < num_rows;
      const auto* from = reinterpret_cast<const unsigned*>(
          x + (exists ? row : 0) * row_stride + chunk * kElems);
      const int bytes = exists ? (dim - chunk * kElems) * int(sizeof(elem_t)) : 0;
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int left = min(max(bytes - 4 * word, 0), 4);
        ptx::copy_async_or_zero<4>(to + place(row, chunk) + 4 * word, from + word,
                                   left);
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

// --- pairs of 16-bit numbers ---------------------------------------------------------

template <typename T> struct pair16_of;
template <> struct pair16_of<half_t> {
  static constexpr bool kIsBfloat16 = false;
  static __device__ __forceinline__ unsigned from(float low, float high) {
    return ptx::f16x2_from_f32(high, low);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4],
                                             unsigned b0, unsigned b1) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
};
template <> struct pair16_of<bfloat16_t> {
  static constexpr bool kIsBfloat16 = true;
  static __device__ __forceinline__ unsigned from(float low, float high) {
    return ptx::bf16x2_from_f32(high, low);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4],
                                             unsigned b0, unsigned b1) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  }
};
template <> struct pair16_of<float> : pair16_of<half_t> {};
using pair16_t = pair16_of<elem_t>;

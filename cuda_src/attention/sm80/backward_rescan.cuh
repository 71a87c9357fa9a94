// SPDX-License-Identifier: MIT
// The second pass of the gradient kernels by mma.sync, if a gradient was not finite
// (kCareful): nonfinite inputs become 0 in shared memory. If no query sees them, the
// gradients have the bits that any other hidden numbers would give. If one does, or if
// a gradient is still not finite, found->still_nonfinite asks for kernels that compute
// one pair at a time.
#pragma once

#include "attention/sm80/backward.cuh"

constexpr bool kCareful = IS_GIVEN(CAREFUL);

// Which rows of a block's tiles held a nonfinite number.
struct bad_rows_t {
  unsigned char queries[kCareful ? kBlockM : 1], keys[kCareful ? kBlockN : 1];
};

__device__ __forceinline__ bool is_bad(elem_t x) {
  constexpr unsigned kExponent = kNarrow<elem_t> ? 0x7c00 : 0x7f80;
  return (x.bits & kExponent) == kExponent;
}

// Zeroes these numbers; the 16-byte chunks are swizzled only within a row.
template <int kRows>
__device__ __forceinline__ void clean_tile(unsigned char* tile, unsigned char* bad) {
  constexpr int kElems = 8, kChunks = kHeadDim / kElems;
#pragma unroll 1
  for (int n = thread_index(); n < kRows * kChunks; n += kNumThreads) {
    elem_t* const x = reinterpret_cast<elem_t*>(tile) + n * kElems;
#pragma unroll 1
    for (int e = 0; e < kElems; ++e) {
      if (is_bad(x[e])) {
        x[e] = {0};
        bad[n / kChunks] = 1;
      }
    }
  }
}

template <int kRows>
__device__ __forceinline__ void clear_rows(unsigned char (&bad)[kRows]) {
  for (int n = thread_index(); n < kRows; n += kNumThreads) bad[n] = 0;
}

// Whether, in the tile at query i0 and key j0, some query that sees a key is nonfinite,
// or sees a nonfinite one. `bounds` is relative to that corner.
__device__ __forceinline__ bool sees_bad_rows(const bad_rows_t& bad,
                                              const mask_bounds_t& bounds,
                                              const scores_t& scores, index_t i0,
                                              index_t j0) {
  bool found = false;
#pragma unroll 1
  for (int n = thread_index(); n < kBlockM * kBlockN; n += kNumThreads) {
    const int i = n / kBlockN, j = n % kBlockN;
    if ((bad.queries[i] || bad.keys[j]) && bounds.sees(i, j)) {
      found |= !scores.hides(i0 + i, j0 + j);
    }
  }
  return found;
}

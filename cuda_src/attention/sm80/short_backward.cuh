// SPDX-License-Identifier: MIT
// Shared by the gradient kernels that have all keys, or all queries, of a head on chip:
// powers of two that bring P and dS into the range of elem_t.
#pragma once

#include "attention/sm80/short.cuh"

#ifndef BLOCK_M
#error "BLOCK_M comes from the host"
#endif
constexpr int kBlockM = BLOCK_M;  // queries on chip at a time

using matrix_q = matrix_t<kHeadDim>;
using matrix_v = matrix_t<kHeadDimV>;

// float16 has a narrow range: P and dS are multiplied by powers of two before they are
// rounded to it. P by 2^15; dS so that 65536 stands for 2^7 times max |dO| of the head.
constexpr bool kNarrow = sizeof(elem_t) == 2 && !pair16_t::kIsBfloat16;
constexpr float kFactorP = kNarrow ? 32768.f : 1.f;

// max |dO| over 16 rows, as the bits of a float.
__device__ __forceinline__ unsigned largest_of_rows(const matrix_v& dout, int row) {
  unsigned largest = 0;
#pragma unroll
  for (int n = lane_index(); n < kRows * matrix_v::kChunks; n += kWarpSize) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(
        dout.rows + (row + n / matrix_v::kChunks) * matrix_v::kPitch +
        n % matrix_v::kChunks * 16);
    const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      largest = max(largest, max(words[i] & 0x7fff, words[i] >> 16 & 0x7fff));
    }
  }
  largest = __reduce_max_sync(kFullMask, largest);
  return __float_as_uint(to<float>(half_t{static_cast<unsigned short>(largest)}));
}
__device__ __forceinline__ float factor_of_ds(const unsigned* largest_of_warps) {
  if constexpr (!kNarrow) return 1;
  unsigned largest = 0;
#pragma unroll
  for (int n = 0; n < kBlockM / kRows; ++n) {
    largest = max(largest, largest_of_warps[n]);
  }
  const int exponent = min(max(static_cast<int>(largest >> 23) - 126, -24), 16);
  return __int_as_float((127 + 9 - exponent) << 23);
}

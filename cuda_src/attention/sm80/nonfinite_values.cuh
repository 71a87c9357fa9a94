// SPDX-License-Identifier: MIT
// attention_mma: infinities and NaN among 16-bit values that some query does not see.
//
// A product cannot leave out a key: it gives the key a weight of 0, and 0 * NaN is NaN.
// A block with a nonfinite result starts over with scrubbing: it zeroes the nonfinite
// numbers of each tile of v, and at the end adds them to the rows that see them. Rows
// that do not keep every bit. Finite data pay only for the check of the results.
#pragma once

#include "attention/sm80/softmax.cuh"

// Zeroes the nonfinite numbers of a tile of v; returns whether this thread found any.
__device__ __forceinline__ bool clean_values(unsigned char* tile) {
  constexpr unsigned kExponent = sizeof(elem_t) != 2     ? 0
                                 : pair16_t::kIsBfloat16 ? 0x7f80u
                                                         : 0x7c00u;
  using rows_t = tile_t<kHeadDimV>;
  bool found_any = false;
#pragma unroll 1
  for (int n = threadIdx.x; n < kBlockN * rows_t::kChunks; n += kNumThreads) {
    const int row = n / rows_t::kChunks, chunk = n % rows_t::kChunks;
    uint4& at = *reinterpret_cast<uint4*>(tile + rows_t::offset(row, chunk));
    uint4 vector = at;
    unsigned* const words = &vector.x;
    bool found = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool low = (words[i] & kExponent) == kExponent;
      const bool high = (words[i] >> 16 & kExponent) == kExponent;
      if (low) words[i] &= 0xffff0000u;
      if (high) words[i] &= 0xffffu;
      found |= low | high;
    }
    if (found) at = vector;
    found_any |= found;
  }
  return found_any;
}

// Adds the nonfinite values that the stored rows [i_first, i_last) see among keys
// [first, last). Rows and columns are those of this warp.
__device__ __forceinline__ void add_specials(elem_t* out_rows, const elem_t* v_rows,
                                             const scores_t& scores,
                                             const params_t& params, index_t i_first,
                                             index_t i_last, int first, int last) {
  unsigned lane = lanes_t::lane();
  ptx::launder(lane);  // derived values would occupy registers during the loop
  const int dim = static_cast<int>(params.head_dim_v);
  __syncwarp();  // the stores of the warp are visible to all its lanes
#pragma unroll 1
  for (index_t j0 = first; j0 < last; j0 += kWarpSize) {
    // Each lane checks one key; then the warp handles the keys with nonfinite values.
    bool special = false;
    if (j0 + lane < last) {
      const elem_t* const row = v_rows + (j0 + lane) * params.v.row;
#pragma unroll 1
      for (int column = 0; column < dim; ++column) {
        special |= !is_finite(to<float>(row[column]));
      }
    }
#pragma unroll 1
    for (unsigned left = __ballot_sync(kFullMask, special); left != 0;
         left &= left - 1) {
      const index_t j = j0 + __ffs(left) - 1;
#pragma unroll 1
      for (index_t i = i_first; i < i_last; ++i) {
        const range_t seen = scores.keys_of(i, i + 1);
        if (j < seen.first || j >= seen.last) continue;
        if (scores.hides(i, j)) continue;
#pragma unroll 1
        for (int column = lanes_t::warp_of_row() * 32 + lane; column < dim;
             column += 32 * kWarpsPerRow) {
          const float x = to<float>(v_rows[j * params.v.row + column]);
          elem_t& sum = out_rows[i * params.out.row + column * params.out.col];
          if (!is_finite(x)) sum = to<elem_t>(to<float>(sum) + x);
        }
      }
    }
  }
}

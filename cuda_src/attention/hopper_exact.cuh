// SPDX-License-Identifier: MIT
// attention_hopper: one row of the result without a matrix product.
//
// In p v a key that is not seen weighs 0, and 0 times infinity or NaN is NaN. A result
// that is not finite although l is has met such a value; its row is computed again
// here, key by key, leaving out those that are not seen.
#pragma once

#include "attention/hopper_tiles.cuh"
#include "common/reduce.cuh"

// One warp: row `i`, whose reference is `m` (a score) and whose sum is 1 / inverse.
__device__ __forceinline__ void exact_row(const elem_t* q,
                                          const elem_t* k,
                                          const elem_t* v,
                                          elem_t* out,
                                          const scores_t& scores,
                                          const params_t& params,
                                          int i,
                                          float m,
                                          float inverse) {
  constexpr int kColumns = (kHeadDimV + kWarpSize - 1) / kWarpSize;  // of a lane
  const int lane = threadIdx.x % kWarpSize;
  const int head_dim = params.head_dim, head_dim_v = params.head_dim_v;
  q += i * params.q.row;
  out += i * params.out.row;
  const range_t keys = scores.keys_of(i, i + 1);
  float o[kColumns] = {};
#pragma unroll 1
  for (int j0 = keys.first; j0 < keys.last; j0 += kWarpSize) {
    const int j = j0 + lane;
    float p = -0.f;
    if (j < keys.last) {
      float sum = 0;
#pragma unroll 1
      for (int d = 0; d < head_dim; ++d) {
        sum = fmaf(to<float>(q[d]), to<float>(k[j * params.k.row + d]), sum);
      }
      p = weight(scores(sum, i, j), m);
    }
#pragma unroll 1
    for (int t = 0; t < kWarpSize; ++t) {
      const float p_of_t = __shfl_sync(kFullMask, p, t);
      if (is_unseen(p_of_t)) continue;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const int column = n * kWarpSize + lane;
        if (column < head_dim_v) {
          o[n] = fmaf(p_of_t, to<float>(v[(j0 + t) * params.v.row + column]), o[n]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int column = n * kWarpSize + lane;
    if (column < head_dim_v) out[column * params.out.col] = to<elem_t>(o[n] * inverse);
  }
}

// SPDX-License-Identifier: MIT
// attention_hopper: parts of the keys of a tile, merged by the block that ends the last
// of them. The order of the sums is that of the parts, whoever merges.
#pragma once

#include "attention/hopper_tiles.cuh"
#include "common/reduce.cuh"

constexpr int kMergeBarrier = 10;  // of bar.sync, for all warpgroups that compute

// out and lse of one row, by one warp. `row` is that of the first part, and `stride`
// leads to the same row of the next.
__device__ __forceinline__ void merge_row(const float* parts,
                                          const double* lses,
                                          elem_t* out,
                                          float* lse,
                                          index_t row,
                                          index_t stride,
                                          int num_parts,
                                          const params_t& params) {
  const int lane = threadIdx.x % kWarpSize, head_dim_v = params.head_dim_v;
  double m = -infinity<double>(), first_lse = m;  // of part `lane`
  if (lane < num_parts) first_lse = __ldcg(lses + lane * stride + row);
  for (int part = lane; part < num_parts; part += kWarpSize) {
    const double x = part < kWarpSize ? first_lse : __ldcg(lses + part * stride + row);
    m = x > m ? x : m;  // not a NaN, which comes in by its weight
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const double x = __shfl_xor_sync(kFullMask, m, step);
    m = x > m ? x : m;
  }
#pragma unroll 1
  for (int first = 0; first < head_dim_v; first += 4 * kWarpSize) {
    const int column = first + 4 * lane;
    const bool exists = column < head_dim_v;
    float l = 0;
    float4 sum = {};
#pragma unroll 1
    for (int block = 0; block < num_parts; block += kWarpSize) {
      // A lane has the weight of a part; all of them come by in turn.
      float weight = 0;
      if (block + lane < num_parts) {
        const double x =
            block == 0 ? first_lse : __ldcg(lses + (block + lane) * stride + row);
        if (x != -infinity<double>()) weight = expf(static_cast<float>(x - m));
      }
      const int count = min(kWarpSize, num_parts - block);
#pragma unroll 8
      for (int part = 0; part < count; ++part) {
        const float w = __shfl_sync(kFullMask, weight, part);
        const float* from = parts + ((block + part) * stride + row) * head_dim_v;
        float4 y = {};
        if (exists) y = __ldcg(reinterpret_cast<const float4*>(from + column));
        l += w;
        sum.x = fmaf(w, y.x, sum.x);
        sum.y = fmaf(w, y.y, sum.y);
        sum.z = fmaf(w, y.z, sum.z);
        sum.w = fmaf(w, y.w, sum.w);
      }
    }
    const float inverse = l == 0 ? 0.f : 1 / l;
    if (exists) {
      const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        out[(column + n) * params.out.col] = to<elem_t>(values[n] * inverse);
      }
    }
    if (lse != nullptr && first == 0 && lane == 0) {
      lse[row] = l == 0 ? -infinity<float>() : static_cast<float>(m + logf(l));
    }
  }
}

// SPDX-License-Identifier: MIT
// attention_hopper: combines the splits of a query tile in the block that finishes
// last. The order of summation is that of the splits, whichever block combines them.
#pragma once

#include "attention/sm90/tile_scheduler.cuh"
#include "common/reduce.cuh"

constexpr int kCombineBarrier = 10;  // named barrier of all consumer warpgroups

// Columns from row to row of the results of a split: whole vectors.
__device__ __forceinline__ int part_pitch(const params_t& params) {
  return (static_cast<int>(params.head_dim_v) + 3) / 4 * 4;
}

// Combines out and lse of one row, by one warp. `row` is the row in the first split;
// `stride` leads to the same row of the next. `sink` is an extra score, or -inf.
__device__ __forceinline__ void combine_row(const float* parts, const double* lses,
                                            elem_t* out, float* lse, index_t row,
                                            index_t stride, int num_splits, float sink,
                                            const params_t& params) {
  // Splits loaded before their weights are known, as registers allow.
  constexpr int kAhead = kNumGroups == 1 && kHeadDimV <= 128 ? 16 : 4;
  const int lane = threadIdx.x % kWarpSize, head_dim_v = params.head_dim_v;
  const int pitch = part_pitch(params);
  auto lse_of = [&](int part) { return __ldcg(lses + part * stride + row); };
  const double first_lse = lane < num_splits ? lse_of(lane) : -infinity<double>();
  double m = -infinity<double>();
#pragma unroll 1
  for (int first = 0; first < head_dim_v; first += 4 * kWarpSize) {
    const int column = first + 4 * lane;
    const bool exists = column < head_dim_v;
    auto part_of = [&](int part) {
      const float* from = parts + (part * stride + row) * pitch + column;
      return exists ? __ldcg(reinterpret_cast<const float4*>(from)) : float4{};
    };
    float4 ahead[kAhead];
#pragma unroll
    for (int part = 0; part < kAhead; ++part) {
      ahead[part] = part < num_splits ? part_of(part) : float4{};
    }
    if (first == 0) {
      m = first_lse == first_lse ? first_lse : m;  // NaN enters through its weight
      for (int part = lane + kWarpSize; part < num_splits; part += kWarpSize) {
        const double x = lse_of(part);
        m = x > m ? x : m;
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const double x = __shfl_xor_sync(kFullMask, m, step);
        m = x > m ? x : m;
      }
    }
    // Lane n holds the weight of split n; shuffles broadcast them one by one.
    auto weight_by = [](double x, double top) {
      return x == -infinity<double>() ? 0.f : expf(static_cast<float>(x - top));
    };
    auto weight_of = [&](double x) { return weight_by(x, m); };
    float weight = weight_of(first_lse);
    float l = 0;
    float4 sum = {};
    auto add = [&](int part, const float4& y) {
      const float w = __shfl_sync(kFullMask, weight, part % kWarpSize);
      l += w;
      sum.x = fmaf(w, y.x, sum.x);
      sum.y = fmaf(w, y.y, sum.y);
      sum.z = fmaf(w, y.z, sum.z);
      sum.w = fmaf(w, y.w, sum.w);
    };
#pragma unroll
    for (int part = 0; part < kAhead; ++part) {
      if (part < num_splits) add(part, ahead[part]);
    }
#pragma unroll 4
    for (int part = kAhead; part < num_splits; ++part) {
      if (part % kWarpSize == 0) {
        const bool is_one = part + lane < num_splits;
        weight = is_one ? weight_of(lse_of(part + lane)) : 0.f;
      }
      add(part, part_of(part));
    }
    float factor = 1;
    if (kHasSinks && sink != -infinity<float>()) {
      const double top = sink > m ? sink : m;
      factor = weight_by(m, top);
      l = l * factor + weight_by(sink, top);
      m = top;
    }
    const float inverse = l == 0 ? 0.f : factor / l;
    if (exists) {
      const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (column + n >= head_dim_v) break;
        out[(column + n) * params.out.col] = to<elem_t>(values[n] * inverse);
      }
    }
    if (lse != nullptr && first == 0 && lane == 0) {
      lse[row] = l == 0 ? -infinity<float>() : static_cast<float>(m + logf(l));
    }
  }
}

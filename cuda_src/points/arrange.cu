// SPDX-License-Identifier: MIT
// points_arrange: copies a cloud with its log weights and values into curve order, one
// array per axis, padded to whole tiles; points_arrange_boxes: the boxes of its tiles.
//
// points_arrange_boxes uses one warp per tile of BOX_POINTS points. A tile with a
// nonfinite point gets a box that contains everything, so that no bound skips it.
// Corners are rounded outwards to float32, in units of the scale of each axis.

#include "common/math.cuh"
#include "common/reduce.cuh"
#include "points/params.cuh"

using coord_t = COORD_T;
using value_t = ACCUM_T;
using weight_t = WEIGHT_T;

extern "C" __global__ void points_arrange(
    const coord_t* __restrict__ x,         // (batch, num_points, kDim)
    const weight_t* __restrict__ weights,  // (batch, num_points), natural log, or null
    const value_t* __restrict__ values,    // (batch, num_points, num_columns), or null
    const long long* __restrict__ order,   // (batch, num_points), or null
    coord_t* __restrict__ sorted,          // (batch, kDim, padded)
    double* __restrict__ sorted_weights,   // (batch, padded), or null
    value_t* __restrict__ sorted_values,   // (batch, chunks kColumns, padded), or null
    long long num_points, long long padded, long long num_columns,
    long long stored_columns) {
  const long long j = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (j >= padded) return;
  const long long entry = blockIdx.y;
  const bool exists = j < num_points;
  const long long at = exists ? j : num_points - 1;
  const long long i =
      entry * num_points + (order != nullptr ? order[entry * num_points + at] : at);
  for (int d = 0; d < kDim; ++d) {
    sorted[(entry * kDim + d) * padded + j] = x[i * kDim + d];
  }
  if (sorted_weights != nullptr) {
    double weight = weights != nullptr ? static_cast<double>(weights[i]) : 0;
    if (!exists) weight = -infinity<double>();
    sorted_weights[entry * padded + j] = weight;
  }
  if (sorted_values == nullptr) return;
  for (long long v = 0; v < stored_columns; ++v) {
    const bool is_there = exists && v < num_columns;
    sorted_values[(entry * stored_columns + v) * padded + j] =
        is_there ? values[i * num_columns + v] : value_t(0);
  }
}

__device__ __forceinline__ float float_below(float x) { return x; }
__device__ __forceinline__ float float_below(double x) { return __double2float_rd(x); }
__device__ __forceinline__ float float_above(float x) { return x; }
__device__ __forceinline__ float float_above(double x) { return __double2float_ru(x); }

__device__ __forceinline__ float warp_max(float x) {
  return warp_reduce(x, [](float a, float b) { return fmaxf(a, b); });
}

__device__ __forceinline__ float log2_of(float x) { return log2f(x); }
__device__ __forceinline__ double log2_of(double x) { return log2(x); }

extern "C" __global__ void points_arrange_boxes(
    const coord_t* __restrict__ sorted,         // (batch, kDim, padded)
    const double* __restrict__ sorted_weights,  // (batch, padded), or null: all 0
    const value_t* __restrict__ sorted_values,  // or null
    const double* __restrict__ scales,          // of each axis, or null: all 1
    float* __restrict__ boxes,                  // (batch, tiles, kBoxSize)
    points_facts_t* __restrict__ facts,         // (batch), or null
    long long padded, long long stored_columns) {
  const long long entry = blockIdx.y, tile = blockIdx.x;
  const int lane = threadIdx.x;
  const float inf = infinity<float>();
  float* box = boxes + (entry * gridDim.x + tile) * kBoxSize;

  float reach = 0;
  bool is_odd = false;
#pragma unroll
  for (int d = 0; d < kBoxDim; ++d) {
    const coord_t* of_axis = sorted + (entry * kDim + d) * padded + tile * BOX_POINTS;
    float low = inf, high = -inf;
    for (int j = lane; j < BOX_POINTS; j += kWarpSize) {
      const coord_t a = of_axis[j];
      low = fminf(low, float_below(a));
      high = fmaxf(high, float_above(a));
      is_odd |= !is_finite(a);
    }
    low = -warp_max(-low);
    high = warp_max(high);
    if (scales != nullptr) {
      low = float_below(low * scales[d]);
      high = float_above(high * scales[d]);
    }
    // No distance from the middle, as kernels compute it, exceeds this.
    const float half = 0.5f * __fsub_ru(high, low) * 1.000001f;
    reach = fmaf(half, half, reach);
    if (lane == 0) {
      box[d] = low;
      box[kBoxDim + d] = high;
    }
  }
  is_odd = __any_sync(kFullMask, is_odd);

  // For sums without weights the largest value takes the role of the largest weight.
  float top = -inf, bottom = inf;
  value_t largest = 0;
  for (int j = lane; j < BOX_POINTS; j += kWarpSize) {
    const long long at = entry * padded + tile * BOX_POINTS + j;
    const double weight = sorted_weights != nullptr ? kLog2e * sorted_weights[at] : 0;
    top = fmaxf(top, __double2float_ru(weight));
    if (weight > -infinity<double>()) bottom = fminf(bottom, __double2float_rd(weight));
    is_odd |= !(weight < infinity<double>());
    for (long long v = 0; v < stored_columns; ++v) {
      const value_t b =
          sorted_values[(entry * stored_columns + v) * padded + tile * BOX_POINTS + j];
      largest = abs_of(b) > largest ? abs_of(b) : largest;
      is_odd |= !is_finite(b);
    }
  }
  top = warp_max(top);
  bottom = -warp_max(-bottom);
  const float log2_largest = warp_max(static_cast<float>(log2_of(largest)));
  is_odd = __any_sync(kFullMask, is_odd);
  if (lane != 0) return;
  if (!kHasWeights) top = bottom = log2_largest;
  if (is_odd) {
    for (int d = 0; d < kBoxDim; ++d) box[d] = -inf, box[kBoxDim + d] = inf;
    top = inf;
    reach = inf;
  }
  box[kTop] = top;
  box[kBottom] = bottom;
  box[kReach] = reach;
  if (facts == nullptr) return;
  atomicMax(&facts[entry].top, ordered(top));
  atomicMax(&facts[entry].values, ordered(log2_largest));
}

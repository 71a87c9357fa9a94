// SPDX-License-Identifier: MIT
// points_curve: the position of each point on a Hilbert curve through its cloud's box.
//
// Algorithm  Skilling, "Programming the Hilbert curve" (2004): coordinates of kBits
//            bits each become the transposed index, whose bits are then interleaved.
// Grid       (ceil(num_points / block), batch)
// Limits     kDim kBits <= 63; nonfinite points get an arbitrary position

#include "common/reduce.cuh"
#include "points/ordered.cuh"

using coord_t = COORD_T;
constexpr int kDim = DIM;
constexpr int kBits = kDim == 1 ? 31 : (63 / kDim > 20 ? 20 : 63 / kDim);

// The box of a cloud: the largest -x and x of each axis, as ordered(); starts at 0.
extern "C" __global__ void points_curve_bounds(
    const coord_t* __restrict__ x,  // (batch, num_points, kDim)
    unsigned* __restrict__ bounds,  // (batch, 2, kDim)
    long long num_points) {
  const long long entry = blockIdx.y;
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  unsigned most[2 * kDim] = {};
  for (long long i = first; i < num_points;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
#pragma unroll
    for (int d = 0; d < kDim; ++d) {
      const float a = static_cast<float>(x[(entry * num_points + i) * kDim + d]);
      if (!(a - a == 0)) continue;
      most[d] = max(most[d], ordered(-a));
      most[kDim + d] = max(most[kDim + d], ordered(a));
    }
  }
#pragma unroll
  for (int n = 0; n < 2 * kDim; ++n) {
    const unsigned of_warp =
        warp_reduce(most[n], [](unsigned a, unsigned b) { return a > b ? a : b; });
    if (threadIdx.x % kWarpSize == 0) atomicMax(&bounds[entry * 2 * kDim + n], of_warp);
  }
}

extern "C" __global__ void points_curve(
    const coord_t* __restrict__ x,           // (batch, num_points, kDim)
    const unsigned* __restrict__ bounds,     // (batch, 2, kDim), of points_curve_bounds
    unsigned long long* __restrict__ codes,  // (batch, num_points)
    long long num_points) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= num_points) return;
  const long long entry = blockIdx.y;
  const unsigned* of_entry = bounds + entry * 2 * kDim;
  double low[kDim], side = 0;
#pragma unroll
  for (int d = 0; d < kDim; ++d) {
    low[d] = -from_ordered(of_entry[d]);
    const double length = from_ordered(of_entry[kDim + d]) - low[d];
    side = length > side ? length : side;
  }
  const double steps = side > 0 ? static_cast<double>(1u << kBits) / side : 0;
  unsigned a[kDim];
#pragma unroll
  for (int d = 0; d < kDim; ++d) {
    const double from =
        static_cast<double>(x[(entry * num_points + i) * kDim + d]) - low[d];
    a[d] = min(__double2uint_rz(from * steps), (1u << kBits) - 1);
  }
#pragma unroll 1
  for (unsigned q = 1u << (kBits - 1); q > 1; q >>= 1) {
#pragma unroll
    for (int d = 0; d < kDim; ++d) {
      const bool is_set = a[d] & q;
      const unsigned inverted = is_set ? q - 1 : 0;
      const unsigned exchanged = is_set ? 0 : (a[0] ^ a[d]) & (q - 1);
      a[0] ^= inverted ^ exchanged;
      a[d] ^= exchanged;
    }
  }
#pragma unroll
  for (int d = 1; d < kDim; ++d) a[d] ^= a[d - 1];
  unsigned flips = 0;
  for (unsigned q = 1u << (kBits - 1); q > 1; q >>= 1) {
    if (a[kDim - 1] & q) flips ^= q - 1;
  }
  unsigned long long code = 0;
#pragma unroll 1
  for (int bit = kBits - 1; bit >= 0; --bit) {
#pragma unroll
    for (int d = 0; d < kDim; ++d) code = code << 1 | (((a[d] ^ flips) >> bit) & 1);
  }
  codes[entry * num_points + i] = code;
}

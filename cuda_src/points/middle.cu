// SPDX-License-Identifier: MIT
// points_middle: sums of the coordinates of slabs of a cloud; points_middle_join: the
// point that products.cu measures coordinates from, the mean of the keys or, with the
// sums of the rows, midway between both means.
//
// A lane of points_middle has one axis and a warp every eighth point of the slab. Sums
// are float64, and made in a fixed order.
//
// Grid       points_middle: (slabs, ceil(kDim / 32), batch); points_middle_join:
// (batch)

#include "common/reduce.cuh"

constexpr int kDim = DIM;
constexpr int kWarps = 8;

using coord_t = COORD_T;

extern "C" __global__ void __launch_bounds__(kWarps* kWarpSize)
    points_middle(const coord_t* __restrict__ x,  // (batch, num_points, kDim)
                  double* __restrict__ sums,      // (batch, slabs, kDim)
                  long long num_points) {
  __shared__ double of_warp[kWarps][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int axis = blockIdx.y * kWarpSize + lane;
  const long long entry = blockIdx.z, slabs = gridDim.x;
  const long long size = (num_points + slabs - 1) / slabs;
  const long long first = blockIdx.x * size;
  const long long last = first + size < num_points ? first + size : num_points;
  double sum = 0;
  if (axis < kDim) {
    const coord_t* of_axis = x + entry * num_points * kDim + axis;
#pragma unroll 8
    for (long long i = first + warp; i < last; i += kWarps) sum += of_axis[i * kDim];
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || axis >= kDim) return;
  for (int w = 1; w < kWarps; ++w) sum += of_warp[w][lane];
  sums[(entry * slabs + blockIdx.x) * kDim + axis] = sum;
}

__device__ __forceinline__ double mean_of(const double* sums, long long slabs,
                                          long long num_points) {
  double sum = 0;
#pragma unroll 8
  for (long long slab = 0; slab < slabs; ++slab) sum += sums[slab * kDim];
  return sum / static_cast<double>(num_points);
}

extern "C" __global__ void points_middle_join(
    const double* __restrict__ row_sums,  // (batch, row_slabs, kDim), or null
    const double* __restrict__ key_sums,  // (batch, key_slabs, kDim)
    double* __restrict__ centre,          // (batch, kDim)
    long long row_slabs, long long key_slabs, long long num_rows, long long num_keys) {
  const long long entry = blockIdx.x;
  for (int d = threadIdx.x; d < kDim; d += blockDim.x) {
    double middle =
        mean_of(key_sums + entry * key_slabs * kDim + d, key_slabs, num_keys);
    if (row_sums != nullptr) {
      middle = 0.5 * (middle + mean_of(row_sums + entry * row_slabs * kDim + d,
                                       row_slabs, num_rows));
    }
    centre[entry * kDim + d] = middle;
  }
}

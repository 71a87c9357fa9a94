// SPDX-License-Identifier: MIT
// Sums of dq in register order: tiles of 16 x 8, grouped by the computing warp.
#pragma once

#include "attention/sm80/backward.cuh"
#include "ptx/red.cuh"

#ifndef NUM_WARPS
#error "NUM_WARPS comes from the host"
#endif

// Warps of the kernel that adds; each computes 32 rows of a block of queries.
constexpr int kSumWarps = NUM_WARPS;
constexpr int kRowWarps = kBlockM / 32, kColWarps = kSumWarps / kRowWarps;
constexpr int kColTilesQ = kHeadDim / (8 * kColWarps);
static_assert(kRowWarps * kColWarps == kSumWarps && kColTilesQ % 2 == 0);

// Row of tile `n`, counted over (warp, 16 rows, 8 columns), in a block of queries.
__device__ __forceinline__ int row_of_sums(int n) {
  return n / (2 * kColTilesQ) / kColWarps * 32 + n / kColTilesQ % 2 * 16;
}
__device__ __forceinline__ int column_of_sums(int n) {
  return (n / (2 * kColTilesQ) % kColWarps * kColTilesQ + n % kColTilesQ) * 8;
}

// Before sm_90, floats are added one by one; those of neighbouring lanes are adjacent.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kByFour = true;
#else
constexpr bool kByFour = false;
#endif

// Adds a lane's numbers to a tile.
__device__ __forceinline__ void add_to_sums(float* tile, int lane,
                                            const float (&x)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  ptx::red_add_f32x4(tile + lane * 4, x);
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) ptx::red_add_f32(tile + e * 32 + lane, x[e]);
#endif
}

// Loads rows r and r + 8 of a tile.
__device__ __forceinline__ void load_rows_of_sums(float (&x)[2][8], const float* tile,
                                                  int r) {
  const float4* const from = reinterpret_cast<const float4*>(tile);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (kByFour) {  // lane 4 r + n
      const float4 y = from[4 * r + n];
      x[0][2 * n] = y.x;
      x[0][2 * n + 1] = y.y;
      x[1][2 * n] = y.z;
      x[1][2 * n + 1] = y.w;
    } else {  // number n of four lanes
      const float4 y = from[8 * n + r];
      x[n / 2][n % 2] = y.x;
      x[n / 2][n % 2 + 2] = y.y;
      x[n / 2][n % 2 + 4] = y.z;
      x[n / 2][n % 2 + 6] = y.w;
    }
  }
}

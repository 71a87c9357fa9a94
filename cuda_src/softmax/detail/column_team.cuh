// SPDX-License-Identifier: MIT
// Exchange between the blocks of a team, which share a tile of columns. All teams run
// at once; the grid is (blocks of a team, teams).
//
// A block publishes its sum of each column. One warp of the team adds those of a column
// and publishes the total, for which all blocks wait: if each block asked all others,
// the requests would grow with the square of the blocks. An earlier launch clears all.
#pragma once

#include "softmax/detail/column_tile.cuh"
#include "softmax/detail/published_sum.cuh"

struct team_t {
  unsigned long long* words;
  long long tile = 0;

  // Where a block publishes its sum of a column; the total is behind those of all
  // blocks.
  __device__ __forceinline__ unsigned long long* place(int block, int column) const {
    return words + ((tile * (gridDim.x + 1) + block) * kColumns + column) * 2;
  }
  __device__ __forceinline__ void publish(int column, const partial_t& sum) const {
    ::publish(place(blockIdx.x, column), sum);
  }
  // Adds what blocks publish of the columns whose turn it is for this block to add, a
  // column a warp. join(sums) adds some sums of all lanes of a warp, in all lanes.
  template <typename Join> __device__ __forceinline__ void add(Join join) const {
    constexpr int kWarps = kNumThreads / kWarpSize;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int c = blockIdx.x + warp * gridDim.x; c < kColumns; c += gridDim.x * kWarps) {
      const partial_t sum = total_of(c, join);
      if (lane == 0) ::publish(place(gridDim.x, c), sum);
    }
  }
  __device__ __forceinline__ partial_t total(int column) const {
    return wait_for(place(gridDim.x, column));
  }

  // Clears what is published of all tiles; called by all blocks of a grid like that of
  // the launch that publishes.
  __device__ __forceinline__ void clear(long long num_tiles) {
    tile = num_tiles;
    const long long count = place(0, 0) - words;
    const long long block = blockIdx.x + (long long)gridDim.x * blockIdx.y;
    const long long step = (long long)gridDim.x * gridDim.y * kNumThreads;
    for (long long i = block * kNumThreads + threadIdx.x; i < count; i += step) {
      words[i] = published_t::kUnpublished;
    }
  }

 private:
  // The sum of all blocks, in all lanes of a warp.
  template <typename Join>
  __device__ __forceinline__ partial_t total_of(int column, Join join) const {
    constexpr int kAtOnce = 4;  // that a lane asks for
    const unsigned lane = threadIdx.x % kWarpSize;
    partial_t sum = {0, -infinity<double>()};
#pragma unroll 1
    for (unsigned first = 0; first < gridDim.x; first += kAtOnce * kWarpSize) {
      partial_t own[kAtOnce + 1];
      bool is_over;
      do {
        is_over = true;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const unsigned block = first + k * kWarpSize + lane;
          own[k] = {0, -infinity<double>()};
          if (block < gridDim.x) is_over &= is_published(place(block, column), own[k]);
        }
      } while (!__all_sync(kFullMask, is_over));
      own[kAtOnce] = lane == 0 ? sum : partial_t{0, -infinity<double>()};
      sum = join(own);
    }
    return sum;
  }
};

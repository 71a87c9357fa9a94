// SPDX-License-Identifier: MIT
// Which tiles of keys a block visits: bounds from boxes, and lists made from them.
//
// The best score of a tile for a group of rows is its largest log weight plus log2 K at
// the distance of the two boxes. A tile is skipped if that is too small relative to
// what its rows have (`floor_`), and watched if it is so large that a sum could
// overflow.
#pragma once

#include "common/reduce.cuh"
#include "points/kernels.cuh"
#include "points/params.cuh"

constexpr float kHighest = 60;    // bits above the reference that need no watching
constexpr float kTall = 0x1p40f;  // a larger sum moves its reference

__device__ __forceinline__ float best_score(const float* rows, const float* keys,
                                            float scale) {
  float d2 = 0;
#pragma unroll
  for (int d = 0; d < kBoxDim; ++d) {
    const float gap = fmaxf(__fsub_rd(keys[d], rows[kBoxDim + d]),
                            __fsub_rd(rows[d], keys[kBoxDim + d]));
    if (gap > 0) d2 = fmaf(gap, gap, d2);
  }
  return keys[kTop] + log2_bound(scale * d2 * 0.99999f);
}

// The lowest score that the heaviest key of a tile can have with a group of rows.
__device__ __forceinline__ float least_score(const float* rows, const float* keys,
                                             float scale) {
  float d2 = 0;
#pragma unroll
  for (int d = 0; d < kBoxDim; ++d) {
    const float gap = fmaxf(__fsub_ru(keys[kBoxDim + d], rows[d]),
                            __fsub_ru(rows[kBoxDim + d], keys[d]));
    d2 = fmaf(gap, gap, d2);
  }
  return keys[kTop] - scale * d2 * 1.001f;
}

// Whether series.cu takes a pair of tiles. All kernels must agree, so the compiler must
// not fuse the product with anything.
__device__ __forceinline__ bool is_smooth(float row_reach, const float* keys,
                                          float cut) {
  return rounded_product(row_reach, keys[kReach]) < cut;
}

struct listed_tile_t {
  int tile;
  unsigned needed_by, watched_by;  // one bit per group of rows
};

// A block's groups of rows, and which of the next kThreads tiles they need.
template <int kGroups, int kThreads> struct tile_list_t {
  static constexpr int kWarps = kThreads / kWarpSize;

  float rows[kGroups][2 * kBoxDim + 1];
  float floor_[kGroups];  // lower bounds of the results of a group, in bits
  float best[kWarps];
  int where[kWarps], count[kWarps];
  listed_tile_t tiles[kThreads];

  // Called by all threads: loads the boxes of the groups, each kParts boxes of the
  // array.
  template <int kParts>
  __device__ __forceinline__ void load(const float* boxes, float floor) {
    constexpr int kCorners = kBoxDim > 0 ? 2 * kBoxDim : 1;
    for (int i = threadIdx.x; i < kGroups * 2 * kBoxDim; i += kThreads) {
      const int group = i / kCorners, n = i % kCorners;
      float corner = boxes[(group * kParts) * kBoxSize + n];
      for (int part = 1; part < kParts; ++part) {
        const float other = boxes[(group * kParts + part) * kBoxSize + n];
        corner = n < kBoxDim ? fminf(corner, other) : fmaxf(corner, other);
      }
      rows[group][n] = corner;
    }
    if (threadIdx.x < kGroups) floor_[threadIdx.x] = floor;
    __syncthreads();
  }

  // The middle of all groups, and the squared reach from it.
  __device__ __forceinline__ float middle(float (&mid)[kBoxDim + 1]) const {
    float reach = 0;
#pragma unroll
    for (int d = 0; d < kBoxDim; ++d) {
      float low = rows[0][d], high = rows[0][kBoxDim + d];
      for (int group = 1; group < kGroups; ++group) {
        low = fminf(low, rows[group][d]);
        high = fmaxf(high, rows[group][kBoxDim + d]);
      }
      mid[d] = 0.5f * (low + high);
      const float half = 0.5f * __fsub_ru(high, low) * 1.000001f;
      reach = fmaf(half, half, reach);
    }
    return reach;
  }

  // Called by one thread: a result of its group is at least `low`.
  __device__ __forceinline__ void raise(int group, float low) {
    const float least =
        -warp_reduce(-low, [](float a, float b) { return fmaxf(a, b); });
    if (threadIdx.x % kWarpSize == 0) floor_[group] = fmaxf(floor_[group], least);
  }

  // The tile with the best possible score, or -1; called by all threads. Every split
  // starts with it, to know early what is too small to count.
  __device__ __forceinline__ int find_best(const float* boxes, int num_tiles,
                                           float scale, float& score) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    float top = -infinity<float>();
    int at = -1;
    for (int tile = threadIdx.x; tile < num_tiles; tile += kThreads) {
      const float here = best_score(rows[kGroups / 2], boxes + tile * kBoxSize, scale);
      if (here > top) top = here, at = tile;
    }
    const auto take = [&](float other, int there) {
      if (other > top || (other == top && there < at)) top = other, at = there;
    };
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      const float other = shuffle_xor(top, offset);
      take(other, shuffle_xor(at, offset));
    }
    if (lane == 0) best[warp] = top, where[warp] = at;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) take(best[w], where[w]);
    score = top;
    return at;
  }

  // Lists the tiles among first .. first + kThreads - 1 that are needed; returns their
  // number. `smooth` tells which kind of pairs this kernel takes; `taken` was visited
  // before.
  __device__ __forceinline__ int list(const float* boxes, int first, int last,
                                      int taken, const points_params_t& params,
                                      float row_reach, float cut, bool smooth) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int tile = first + threadIdx.x;
    unsigned needed_by = 0, watched_by = 0;
    if (tile < last && tile != taken) {
      const float* keys = boxes + static_cast<long long>(tile) * kBoxSize;
      const bool is_ours = is_smooth(row_reach, keys, cut) == smooth;
      const bool is_spread = keys[kTop] - keys[kBottom] > kHighest;
      for (int group = 0; group < kGroups; ++group) {
        const float score = best_score(rows[group], keys, float(params.scale));
        // A NaN bound must not skip anything.
        bool counts = keys[kTop] > -infinity<float>();
        if (kernel_t::kHasExponent) counts &= !(score < floor_[group] - params.drop);
        if (is_ours && counts) needed_by |= 1u << group;
        if (!(score <= floor_[group] + kHighest) || is_spread) {
          watched_by |= 1u << group;
        }
      }
    }
    const unsigned votes = __ballot_sync(kFullMask, needed_by != 0);
    if (lane == 0) count[warp] = __popc(votes);
    __syncthreads();
    int at = __popc(votes & ((1u << lane) - 1)), total = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += count[w];
      total += count[w];
    }
    if (needed_by) tiles[at] = {tile, needed_by, watched_by};
    __syncthreads();
    return total;
  }
};

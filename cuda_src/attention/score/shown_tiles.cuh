// SPDX-License-Identifier: MIT
// A loop over tiles of keys, or of queries, that skips those that the mask function
// hides completely.
#pragma once

#include "attention/score/score.cuh"
#include "common/reduce.cuh"

// A compile-time constant, passed as an argument.
template <bool kIt> struct constant_t {
  static constexpr bool kValue = kIt;
};

// What a warp knows about 32 tiles, each of kTile keys or queries. All lanes call all
// functions with the same arguments; `shown(first)` tells how much of the tile at
// `first` is shown.
template <int kTile, bool kExists = kHasMaskFunction> class shown_tiles_t {
 public:
  int distance = kTile;  // from the current tile to the next

  // The first tile from `first` on that may be shown; `last` or more if there is none.
  template <typename Shown>
  __device__ __forceinline__ int next(int first, int last, Shown shown) {
    while (first < last) {
      if (place(first) >= kWarpSize) look(first, shown);
      if (const unsigned left = some_ >> place(first)) {
        return first + (__ffs(left) - 1) * kTile;
      }
      first = first_ + kWarpSize * kTile;
    }
    return first;
  }
  // Finds the tile after the one at `first`. With kInTurn tiles alternate between two
  // stages, so it is an odd number of tiles further: sometimes a hidden one.
  template <bool kInTurn, typename Shown>
  __device__ __forceinline__ void step(int first, int last, Shown shown) {
    distance = next(first + kTile, last, shown) - first;
    if (kInTurn && distance / kTile % 2 == 0) distance -= kTile;
  }
  // Whether the whole tile at `first` is known to be shown.
  __device__ __forceinline__ bool is_whole(int first) const {
    return place(first) < kWarpSize && (all_ >> place(first) & 1);
  }

 private:
  __device__ __forceinline__ unsigned place(int first) const {
    return static_cast<unsigned>(first - first_) / kTile;
  }
  template <typename Shown>
  __device__ __forceinline__ void look(int first, Shown shown) {
    const shown_t own =
        shown(first + static_cast<int>(threadIdx.x % kWarpSize) * kTile);
    first_ = first;
    some_ = __ballot_sync(kFullMask, own != kShowsNone);
    all_ = __ballot_sync(kFullMask, own == kShowsAll);
  }

  int first_ = -kWarpSize * kTile;  // of the known tiles
  unsigned some_ = 0, all_ = 0;     // a bit per tile
};

// Without a mask function: one tile after the other.
template <int kTile> class shown_tiles_t<kTile, false> {
 public:
  static constexpr int distance = kTile;

  template <typename Shown> __device__ __forceinline__ int next(int first, int, Shown) {
    return first;
  }
  template <bool kInTurn, typename Shown>
  __device__ __forceinline__ void step(int, int, Shown) {}
  __device__ __forceinline__ bool is_whole(int) const { return false; }
};

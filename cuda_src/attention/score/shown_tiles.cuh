// SPDX-License-Identifier: MIT
// A walk over tiles of keys, or of queries, that leaves out those of which the mask
// function shows nothing.
#pragma once

#include "attention/score/score.cuh"
#include "common/reduce.cuh"

// What a warp knows of 32 tiles, each of kTile keys or queries. All its lanes call all
// functions, with the same arguments, of which `shown(first)` tells about the tile that
// begins there.
template <int kTile>
class shown_tiles_t {
 public:
  // The first tile from that at `first` on that may be shown, or one that begins at
  // `last` or behind it.
  template <typename Shown>
  __device__ __forceinline__ int next(int first, int last, Shown shown) {
    if constexpr (!kHasMaskFunction) return first;
    while (first < last) {
      if (place(first) >= kWarpSize) look(first, shown);
      if (const unsigned left = some_ >> place(first)) {
        return first + (__ffs(left) - 1) * kTile;
      }
      first = first_ + kWarpSize * kTile;
    }
    return first;
  }
  // Whether it is known that all of the tile at `first` is shown.
  __device__ __forceinline__ bool is_whole(int first) const {
    if constexpr (!kHasMaskFunction) return true;
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

  int first_ = -kWarpSize * kTile;  // of the tiles that are known
  unsigned some_ = 0, all_ = 0;     // a bit a tile
};

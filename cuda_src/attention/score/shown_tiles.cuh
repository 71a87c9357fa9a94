// SPDX-License-Identifier: MIT
// A walk over tiles of keys, or of queries, that leaves out those of which the mask
// function shows nothing.
#pragma once

#include "attention/score/score.cuh"
#include "common/reduce.cuh"

// A constant as an argument.
template <bool kIt> struct constant_t {
  static constexpr bool kValue = kIt;
};

// What a warp knows of 32 tiles, each of kTile keys or queries. All its lanes call all
// functions, with the same arguments, of which `shown(first)` tells about the tile that
// begins there.
template <int kTile, bool kExists = kHasMaskFunction> class shown_tiles_t {
 public:
  int distance = kTile;  // from the tile that is visited to the next one

  // The first tile from that at `first` on that may be shown, or one that begins at
  // `last` or behind it.
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
  // Finds the tile that is visited after that at `first`. Where tiles take two stages
  // in turn, it is an odd number of tiles later: at times one that is hidden.
  template <bool kInTurn, typename Shown>
  __device__ __forceinline__ void step(int first, int last, Shown shown) {
    distance = next(first + kTile, last, shown) - first;
    if (kInTurn && distance / kTile % 2 == 0) distance -= kTile;
  }
  // Whether it is known that all of the tile at `first` is shown.
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

  int first_ = -kWarpSize * kTile;  // of the tiles that are known
  unsigned some_ = 0, all_ = 0;     // a bit a tile
};

// Without a mask function there is nothing to know: one tile after the other.
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

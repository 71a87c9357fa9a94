// SPDX-License-Identifier: MIT
// softmax_turn: copies a result to memory with another innermost axis.
//
// Algorithm  A copy by tiles: read along one axis, write along another.
// Grid       1-D; a block of kNumThreads takes a tile of kTile x kTile elements
// Tiles      one in shared memory, with rows offset by one bank
// Memory     everything once; accesses of a warp are contiguous on both sides
// Limits     none
//
// Parameters ELEM_T      a word of the size of an element
//            OUTER_AXES  axes other than the two
#include "common/strides.cuh"

#ifndef ELEM_T
#error "ELEM_T and OUTER_AXES come from the host"
#endif
using elem_t = ELEM_T;
constexpr int kTile = 64, kLanes = 32, kWarps = 8, kNumThreads = kWarps * kLanes;
constexpr int kPad = sizeof(elem_t) < 4 ? 4 / sizeof(elem_t) : 1;

enum { kFrom, kOnto, kNumArrays };

// Packed by the host: axis 0 is innermost in `from`, axis 1 in `onto`.
struct turn_t {
  long long size[2];
  long long from_step, onto_step;  // of axis 1 in `from`, of axis 0 in `onto`
  axes_t<OUTER_AXES, kNumArrays> outer;
};

// Calls f(a, b) for all elements of a tile; the lanes of a warp have consecutive b.
template <typename F> __device__ __forceinline__ void each(F f) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
#pragma unroll
  for (int a = 0; a < kTile; a += kWarps) {
#pragma unroll
    for (int b = 0; b < kTile; b += kLanes) f(a + warp, b + lane);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_turn(const elem_t* __restrict__ from, elem_t* __restrict__ onto,
                 const __grid_constant__ turn_t turn) {
  __shared__ elem_t tile[kTile][kTile + kPad];
  const long long tiles[2] = {(turn.size[0] + kTile - 1) / kTile,
                              (turn.size[1] + kTile - 1) / kTile};
  const long long column = divide(blockIdx.x, tiles[0]);
  const long long outer = divide(column, tiles[1]);
  const long long first[2] = {(blockIdx.x - column * tiles[0]) * kTile,
                              (column - outer * tiles[1]) * kTile};
  const int left[2] = {int(min(turn.size[0] - first[0], (long long)kTile)),
                       int(min(turn.size[1] - first[1], (long long)kTile))};
  const auto at = locate(turn.outer, outer);
  from += at.of[kFrom] + first[1] * turn.from_step + first[0];
  onto += at.of[kOnto] + first[0] * turn.onto_step + first[1];

  each([&](int j, int i) {
    if (j < left[1] && i < left[0]) tile[j][i] = from[j * turn.from_step + i];
  });
  __syncthreads();
  each([&](int i, int j) {
    if (i < left[0] && j < left[1]) onto[i * turn.onto_step + j] = tile[j][i];
  });
}

// SPDX-License-Identifier: MIT
// Shared by attention_vjp_hopper_wide_keys and attention_vjp_hopper_wide_queries: tiles
// of 64 rows, products of a warpgroup, and stores of gradients.
#pragma once

#include "attention/sm90/backward.cuh"
#include "ptx/elect.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma_shapes.cuh"

#ifndef BOUNDS
#error "BOUNDS comes from the host"
#endif
constexpr int kBounds = BOUNDS;  // as in backward.cu
constexpr int kBlockN = 64;      // keys per tile
static_assert(kBlockM == 64 && kHeadDim % 64 == 0 && kNumThreads == 384);

// A tile: chunks of 64 columns, each [64 rows][128 bytes], swizzled.
constexpr int kChunks = kHeadDim / 64, kChunk = 64 * 128, kBytes = kChunks * kChunk;
constexpr int kScores = 64 / 2;      // numbers of S, P, dP and dS per thread
constexpr int kSums = kHeadDim / 2;  // numbers of a gradient per thread

// s = a b^T. A step covers 16 columns, 32 bytes of each 128-byte row.
__device__ __forceinline__ void multiply_scores(float (&s)[kScores],
                                                unsigned long long a,
                                                unsigned long long b) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int offset = (step / 4 * kChunk + step % 4 * 32) / 16;
    ptx::wgmma_t<elem_t, 64>::ss(s, a + offset, b + offset, step > 0);
  }
}

// sums += p b. A step covers 16 rows of b, 128 bytes each.
__device__ __forceinline__ void multiply_sums(float (&sums)[kSums],
                                              const unsigned (&p)[4][4],
                                              unsigned long long b) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    ptx::wgmma_t<elem_t, kHeadDim>::rs(sums, p[step], b + step * (16 * 128 / 16), 1);
  }
}

// The work tile of this block after `number`; where they differ in length, the next one
// from the counter.
__device__ __forceinline__ int tile_after(int number, int* counter) {
  return static_cast<int>(gridDim.x) + (kBounds == 0 ? number : atomicAdd(counter, 1));
}

// Coordinates of the matrix of an entry in its tensor map.
struct matrix_t {
  int head, batch[2];
};
__device__ __forceinline__ matrix_t matrix_of(const tile_coord_t& at, index_t head,
                                              const operand_t& operand) {
  matrix_t found;
  found.head = coordinate(head, operand.head);
  batch_coordinates(found.batch, at, operand);
  return found;
}

// Loads chunks [kFirst, kLast) of 64 rows; their bytes are already expected.
template <int kFirst, int kLast>
__device__ __forceinline__ void load_chunks(unsigned target,
                                            const ptx::tensor_map_t& map,
                                            unsigned barrier, int row,
                                            const matrix_t& matrix) {
  const int head = matrix.head, batch[2] = {matrix.batch[0], matrix.batch[1]};
#pragma unroll
  for (int chunk = kFirst; chunk < kLast; ++chunk) {
    ptx::cp_async_bulk_tensor_5d(target + (chunk - kFirst) * kChunk, map, barrier,
                                 chunk * 64, row, head, batch[0], batch[1]);
  }
}

// Prefetches them into the L2 cache.
__device__ __forceinline__ void prefetch_rows(const ptx::tensor_map_t& map, int row,
                                              const matrix_t& matrix) {
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    ptx::prefetch_bulk_tensor_5d(map, chunk * 64, row, matrix.head, matrix.batch[0],
                                 matrix.batch[1]);
  }
}

// Slots for published work tiles: one is written while the tile before is computed and
// the one before that is stored.
constexpr int kPublished = 3;
__device__ __forceinline__ int place_after(int place) {
  return place + 1 == kPublished ? 0 : place + 1;
}

// Makes the ring uniform again for the compiler, which loses track between work tiles.
template <int kStages>
__device__ __forceinline__ ring_t<kStages> uniform(const ring_t<kStages>& ring) {
  return {unsigned(uniform(ring.stage)), unsigned(uniform(ring.parity))};
}

// Which scores a thread has. Number e is in row e / 2 % 2 * 8 + row and column e / 4 *
// 8 + e % 2 + lane % 4 * 2 of the warpgroup's tile; one of the two is a query, the
// other a key.
template <bool kKeysAreRows> struct fragment_t {
  int row, lane;

  __device__ __forceinline__ int row_of(int e) const { return row + e / 2 % 2 * 8; }
  __device__ __forceinline__ int column_of(int e) const {
    return e / 4 * 8 + e % 2 + lane % 4 * 2;
  }
  __device__ __forceinline__ int query(int e) const {
    return kKeysAreRows ? column_of(e) : row_of(e);
  }
  __device__ __forceinline__ int key(int e) const {
    return kKeysAreRows ? row_of(e) : column_of(e);
  }
  // query(e) - key(e), without the part that is common to all numbers of the thread.
  static __device__ constexpr int distance_of(int e) {
    const int row = e / 2 % 2 * 8, column = e / 4 * 8 + e % 2;
    return kKeysAreRows ? column - row : row - column;
  }
  // That common part.
  __device__ __forceinline__ int distance() const {
    return kKeysAreRows ? lane % 4 * 2 - row : row - lane % 4 * 2;
  }

  // Without options: sets the scores of hidden keys to `hidden`.
  __device__ __forceinline__ void mask(float (&s)[kScores], int low, int high,
                                       int num_keys, float hidden) const {
    if (num_keys < kBlockN || low > 1 - kBlockM || high < kBlockN) {
#pragma unroll
      for (int e = 0; e < kScores; ++e) {
        const int distance = key(e) - query(e);
        const bool sees = low <= distance && distance < high && key(e) < num_keys;
        if (!sees) s[e] = hidden;
      }
    }
  }
};

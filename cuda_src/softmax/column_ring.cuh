// SPDX-License-Identifier: MIT
// Rows of a tile of columns on their way to the threads that sum them.
//
// Each warp has a ring of kStages batches in shared memory, a batch being kHeld rows of
// each of its threads. It works on one batch while the others are on their way: brought
// by the copy engine (sm_90), whose requests pass by the loads of the warps, or asked
// for by each thread for itself (columns that are no whole vectors, or share their rows
// with other warps; older cards). No warp waits for another.
//
// Parameters STAGES    as above
//            and those of softmax/columns.cuh
#pragma once

#include "ptx/bulk.cuh"
#include "ptx/elect.cuh"
#include "ptx/tma.cuh"
#include "ptx/transaction.cuh"
#include "softmax/columns.cuh"

#ifndef STAGES
#error "STAGES comes from the host"
#endif
constexpr int kStages = STAGES;

extern __shared__ __align__(128) uint4 memory[];

// Whether a warp has all rows of a tile.
constexpr bool kHasWarpTiles = kSide * kDeep == kWarpSize;
#if __CUDA_ARCH__ >= 900
constexpr bool kHasEngine = kHasWarpTiles;
#else
constexpr bool kHasEngine = false;
#endif

// Array `kArray` of the problem, of T's.
template <typename T, int kArray, typename Tile>
struct column_ring_t {
  using vector = vector_t<T, kVector>;
  static constexpr int kRowBytes = kSide * int(sizeof(vector));
  static constexpr int kRows = kHeld * kDeep;  // of a batch, of all lanes
  // A row that is shorter is not worth a request of its own.
  static constexpr int kLeastBytes = 128;

  const Tile& tile;
  const T absent;
  const long long step;  // from row to row
  vector* const mine;    // place of this thread
  const T* next_row;     // of the thread; or of the warp, if the engine brings it
  int rows;              // of the thread with most of them; of all lanes
  int asked = 0;         // of these
  int to = 0, from = 0;  // stages
  unsigned parity = 0;
  bool by_engine = false, is_dense = false;
  unsigned barrier;  // of the first stage

  // Places without a row or a column hold `absent`.
  __device__ __forceinline__ column_ring_t(const T* p, const Tile& tile, T absent)
      : tile(tile),
        absent(absent),
        step(tile.layout.reduced.stride[kArray][0]),
        mine(reinterpret_cast<vector*>(memory) +
             threadIdx.x / kWarpSize * (kStages * kHeld * kWarpSize) + lane()),
        next_row(p + tile.start(kArray)),
        rows(__shfl_sync(kFullMask, tile.rows, 0)) {
    if constexpr (kHasEngine) begin_engine();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) ask();
  }

  // Whether there is a batch from row number `first` of the threads on.
  __device__ __forceinline__ bool has(int first) const {
    return by_engine ? first * kDeep < rows : first < rows;
  }
  // Waits for the next batch, and asks for one that comes later; its stage.
  __device__ __forceinline__ int next() {
    ask();
    const int stage = from;
    if (by_engine) {
      while (!ptx::transaction_barrier_try_wait(barrier + 8 * stage, parity)) {
      }
    } else {
#if __CUDA_ARCH__ >= 800
      ptx::wait_copy_groups<kStages - 1>();
#endif
    }
    if (++from == kStages) {
      from = 0;
      parity ^= 1;
    }
    return stage;
  }
  __device__ __forceinline__ vector& at(int stage, int k) const {
    return mine[(stage * kHeld + k) * kWarpSize];
  }
  // After the last batch.
  __device__ __forceinline__ void end() const {
    __syncwarp();
    if constexpr (kHasEngine) {
      if (by_engine && lane() == 0) {
#pragma unroll
        for (int i = 0; i < kStages; ++i) ptx::transaction_barrier_end(barrier + 8 * i);
      }
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }

  __device__ __forceinline__ void ask() {
    if (by_engine) {
      __syncwarp();  // all have read what lay there
      if (asked < rows) ask_engine();
    } else {
      copy();
    }
    to = to + 1 == kStages ? 0 : to + 1;
  }

  __device__ __forceinline__ void begin_engine() {
    __shared__ unsigned long long barriers[kNumThreads / kWarpSize * kStages];
    const int bytes = tile.columns * int(sizeof(T));
    is_dense = bytes == kRowBytes && step * int(sizeof(T)) == bytes;
    by_engine = tile.how == deal::kVectors && (is_dense || bytes >= kLeastBytes);
    if (!by_engine) return;
    rows = __reduce_add_sync(kFullMask, lane() % kSide == 0 ? tile.rows : 0);
    next_row -= lane() / kSide * step;
    barrier = ptx::shared_address(barriers + threadIdx.x / kWarpSize * kStages);
    if (lane() == 0) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) ptx::transaction_barrier_init(barrier + 8 * i);
      ptx::transaction_barrier_init_fence();
    }
    ptx::fence_proxy_async();  // of threads that have written there
    __syncwarp();
  }
  __device__ __forceinline__ void ask_engine() {
    const int count = rows - asked < kRows ? rows - asked : kRows;
    const int bytes = tile.columns * int(sizeof(T));
    const unsigned home = ptx::shared_address(&at(to, 0) - lane());
    const unsigned full = barrier + 8 * to;
    if (ptx::elect()) {
      ptx::transaction_barrier_expect(full, count * bytes);
      if (is_dense) {
        ptx::cp_async_bulk(home, next_row, count * bytes, full);
      } else if (count == kRows) {
        const T* row = next_row;
#pragma unroll
        for (int i = 0; i < kRows; ++i, row += step) {
          ptx::cp_async_bulk(home + i * kRowBytes, row, bytes, full);
        }
      } else {
        const T* row = next_row;
#pragma unroll 1
        for (int i = 0; i < count; ++i, row += step) {
          ptx::cp_async_bulk(home + i * kRowBytes, row, bytes, full);
        }
      }
    }
    __syncwarp();
    if (count < kRows || tile.columns < kColumns) fill(count, tile.columns);
    asked += kRows;
    next_row += kRows * step;
  }
  // Places of this thread behind so many rows and columns.
  __device__ __forceinline__ void fill(int count, int columns) const {
#pragma unroll 1
    for (int k = 0; k < kHeld; ++k) {
      if (k * kDeep + lane() / kSide < count && tile.offset(0) < columns) continue;
#pragma unroll
      for (int j = 0; j < kVector; ++j) at(to, k).element[j] = absent;
    }
  }

  __device__ __forceinline__ void copy() {
    const long long step = kDeep * this->step;
    const int left = tile.rows - asked;
    const T* p = next_row + tile.offset(0);
    const bool takes_vector =
        tile.how == deal::kVectors && tile.offset(0) < tile.columns;
    if (takes_vector && left >= kHeld) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) copy_vector(&at(to, k), p + k * step);
    } else {
#pragma unroll 1
      for (int k = 0; k < kHeld; ++k, p += step) {
        if (takes_vector && k < left) {
          copy_vector(&at(to, k), p);
          continue;
        }
        const int count = tile.how == deal::kSingles && k < left ? tile.columns : 0;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          T* const home = &at(to, k).element[j];
          if (tile.offset(j) < count) {
            copy_element(home, p + j * kSide);
          } else {
            *home = absent;
          }
        }
      }
    }
#if __CUDA_ARCH__ >= 800
    ptx::commit_copies();
#endif
    asked += kHeld;
    next_row += kHeld * step;
  }
  // Starts to copy an element, if the hardware copies so few bytes.
  static __device__ __forceinline__ void copy_element(T* to, const T* from) {
#if __CUDA_ARCH__ >= 800
    if constexpr (sizeof(T) >= 4) {
      ptx::copy_async<sizeof(T)>(to, from);
      return;
    }
#endif
    *to = *from;
  }
};

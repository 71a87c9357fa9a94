// SPDX-License-Identifier: MIT
// Spans of memory that hold many short contiguous rows.
//
// Parameters SPAN_ROWS   rows per block at a time
//            IN_REGISTERS        elements of a row per thread
//            APART       distance between the rows of a warp
#pragma once

#include "common/vector.cuh"
#include "softmax/detail/parking.cuh"
#include "softmax/detail/thread_group.cuh"

constexpr int kSpanRows = SPAN_ROWS, kRowStride = APART;
static_assert(kNumThreads / kWarpSize % kRowStride == 0);
static_assert(kSpanRows % kRowsPerBlock == 0, "all threads reduce together");
static_assert(kLanes <= kWarpSize);

// Bytes of shared memory for the rows: one more vector for the phase at the start, and
// one to round up the end.
template <typename T>
constexpr int kSpanBytes =
    kSpanRows * kLanes * IN_REGISTERS * int(sizeof(T)) / 16 * 16 + 32;

// A span in shared memory, with the alignment phase that it has in global memory:
// aligned vectors there are aligned vectors here.
template <typename T> struct span_t {
  static constexpr int kVector = 16 / sizeof(T);
  T* global;
  int length, phase;
  T* shared;

  __device__ __forceinline__ span_t(T* global, int length, void* buffer)
      : global(global), length(length) {
    phase = int(reinterpret_cast<unsigned long long>(global) / sizeof(T) % kVector);
    shared = static_cast<T*>(buffer) + phase;
  }

  // Calls f(i) for the first elements of whole vectors, g(i) for elements outside of
  // them.
  template <typename F, typename G>
  __device__ __forceinline__ void each(F f, G g) const {
    const int head = min((kVector - phase) % kVector, length);
    const int tail = head + (length - head) / kVector * kVector;
    for (int i = head + threadIdx.x * kVector; i < tail; i += kNumThreads * kVector)
      f(i);
    if (threadIdx.x < head) g(threadIdx.x);
    if (threadIdx.x < length - tail) g(tail + threadIdx.x);
  }

  // Starts to load; all threads that did must call wait_for_copies().
  __device__ __forceinline__ void load() const {
    using vector = vector_t<T, kVector>;
    each([&](int i) { copy_vector(reinterpret_cast<vector*>(shared + i), global + i); },
         [&](int i) { shared[i] = global[i]; });
  }
  __device__ __forceinline__ void store() const {
    each([&](int i) { store_vector(global + i, load_vector<kVector>(shared + i)); },
         [&](int i) { global[i] = shared[i]; });
  }
};

// The row of this thread's lanes among those of the block. Rows of a warp are
// kRowStride rows apart, so that their elements lie in different banks.
__device__ __forceinline__ int row_of_group() {
  constexpr int kOfWarp = kWarpSize / kLanes;
  const int warp = threadIdx.x / kWarpSize;
  const int in_warp = threadIdx.x % kWarpSize / kLanes;
  return warp / kRowStride * (kRowStride * kOfWarp) + in_warp * kRowStride +
         warp % kRowStride;
}

// Whether a lane has an element j, with `left` elements of the row from its first on:
// it has every kLanes-th, and all lanes have all but the last.
__device__ __forceinline__ bool has_element(int j, int left) {
  return j + 1 < IN_REGISTERS || j * kLanes < left;
}

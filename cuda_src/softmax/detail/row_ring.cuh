// SPDX-License-Identifier: MIT
// Rows that stream through the shared memory of many multiprocessors.
//
// All blocks are resident, one per multiprocessor. A group of blocks shares a row, and
// takes one row after another. A thread's elements pass through its slots of a ring in
// shared memory, one step at a time:
//
//     load (kAhead + 1 steps earlier)  ->  sum  ->  write (kLag steps later)
//
// At any time a block writes one row, sums the next and loads what follows, so that
// memory never waits for arithmetic or for another block. When a thread has summed its
// last step of a row, its block publishes the sum; the steps that remain before the
// first write hide the latency of that exchange.
//
// Parameters RING     steps that the ring holds
//            AHEAD    steps that may be loading while another is summed
// Grid       (blocks of a group, groups)
#pragma once

#include "ptx/copy.cuh"
#include "softmax/detail/thread_group.cuh"
#include "softmax/detail/aligned_span.cuh"
#include "softmax/detail/published.cuh"

constexpr int kRing = RING, kAhead = AHEAD;
constexpr int kLag = kRing - 1 - kAhead;
static_assert(kAhead >= 1 && kLag >= 1, "a step is loaded before it is summed");

// Steps of a row of this length, whatever its alignment: at most kLag + 1.
template <int kVector> __device__ __forceinline__ int num_steps(long long length) {
  const long long at_once = (long long)gridDim.x * kLanes;
  return int((length / kVector + at_once - 1) / at_once) + (length < kVector);
}

// Position of the threads of a block in the steps of the rows of their group.
struct walk_t {
  long long row;
  long long vector;  // of this thread, in the row
  int step = 0;      // of the row
  int slot = 0;      // of the ring

  __device__ __forceinline__ walk_t() : row(blockIdx.y), vector(first()) {}

  // Advances by a step; returns whether a new row starts.
  __device__ __forceinline__ bool next(int steps) {
    slot = slot + 1 == kRing ? 0 : slot + 1;
    vector += (long long)gridDim.x * kLanes;
    if (++step < steps) return false;
    step = 0;
    row += gridDim.y;
    vector = first();
    return true;
  }
  static __device__ __forceinline__ long long first() {
    return (long long)blockIdx.x * kLanes + threadIdx.x;
  }
};

// What the blocks of a group publish: two numbers per row and block.
struct board_t {
  unsigned long long* words;  // (num_rows, blocks of a group, 2)

  __device__ __forceinline__ unsigned long long* of(long long row, int block) const {
    return words + (row * gridDim.x + block) * 2;
  }
  // Resets the words; run by an earlier launch with as many columns of blocks.
  __device__ __forceinline__ void clear(long long num_rows) const {
    const long long step = (long long)gridDim.y * kLanes;
    for (long long row = (long long)blockIdx.y * kLanes + lane(); row < num_rows;
         row += step) {
      of(row, blockIdx.x)[0] = of(row, blockIdx.x)[1] = published_t::kUnpublished;
    }
  }
  // Called by one thread of this block.
  __device__ __forceinline__ void publish(long long row, double a, double b) const {
    published_t::publish(of(row, blockIdx.x), a);
    published_t::publish(of(row, blockIdx.x) + 1, b);
  }
  // Waits until a block has published the first of them.
  __device__ __forceinline__ double first_of(long long row, int block) const {
    return published_t::read(of(row, block));
  }
};

// This thread's slots in a ring of vectors.
template <typename T, int kVector> struct ring_t {
  using vector = vector_t<T, kVector>;
  vector* mine;

  // `memory` is shared memory of kBytes.
  static constexpr int kBytes = kRing * kLanes * int(sizeof(vector));
  __device__ __forceinline__ explicit ring_t(void* memory)
      : mine(static_cast<vector*>(memory) + threadIdx.x) {}

  __device__ __forceinline__ const vector& at(int slot) const {
    return mine[slot * kLanes];
  }
  // Starts to load a vector from an aligned address.
  __device__ __forceinline__ void load(int slot, const T* from) const {
    static_assert(sizeof(vector) >= 4, "cp.async moves 4, 8 or 16 bytes");
    ptx::copy_async<sizeof(vector)>(&mine[slot * kLanes], from);
  }
  // The same from an unaligned address.
  __device__ __forceinline__ void gather(int slot, const T* from) const {
    vector& home = mine[slot * kLanes];
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if constexpr (sizeof(T) == 4 || sizeof(T) == 8) {
        ptx::copy_async<sizeof(T)>(&home.element[e], from + e);
      } else {
        home.element[e] = from[e];
      }
    }
  }
};

// SPDX-License-Identifier: MIT
// Rows that stream through the shared memory of many multiprocessors.
//
// All blocks run at once, one on a multiprocessor. A group of them shares a row, and
// takes one row after another. What a thread has of its rows passes through its places
// in a ring in shared memory, a step at a time:
//
//     load (kAhead + 1 steps earlier)  ->  sum  ->  write (lag steps later)
//
// At every moment a block writes one row, sums the next one and loads what follows, so
// that memory never waits for arithmetic nor for another block. When a warp has summed
// its last step of a row, it tells a warp that does nothing else: the messenger, which
// joins what the warps of the block tell, and what the blocks of the group do. The
// steps that are still to come before the first of the row is written hide its way.
//
// Parameters RING     steps that the ring has places for
//            AHEAD    steps whose loads may be under way while another is summed
//            TOGETHER vectors of a thread in a step
//            LANES, ROWS_PER_BLOCK   as in softmax/group.cuh: LANES threads a block, and
//                     a warp more, the messenger
// Grid       (blocks of a group, groups)
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/relaxed.cuh"
#include "softmax/group.cuh"
#include "softmax/peeled.cuh"

#ifndef RING
#error "RING and AHEAD come from the host"
#endif
constexpr int kRing = RING, kAhead = AHEAD, kTogether = TOGETHER;
constexpr int kMostLag = kRing - 1 - kAhead;
constexpr int kWarps = kLanes / kWarpSize;
constexpr int kBlockThreads = kLanes + kWarpSize;
static_assert(kAhead >= 1 && kMostLag >= 1, "a step is loaded before it is summed");

// Steps that a row of so many elements takes, whatever its start: at most kMostLag + 1.
template <int kVector>
__device__ __forceinline__ int num_steps(long long length) {
  const long long at_once = (long long)gridDim.x * kLanes * kTogether;
  return int((length / kVector + at_once - 1) / at_once) + (length < kVector);
}

// From the sum of a step to its result: the row has ended by then, and the next one has
// not, so that there is news of one row at a time.
__device__ __forceinline__ int lag_of(int steps) {
  const int most = steps > 1 ? 2 * steps - 2 : 0;
  return kMostLag < most ? kMostLag : most;
}

// Where the threads of a block are, in the steps of the rows of their group.
struct walk_t {
  long long row;
  long long vector;  // of this thread, in the row; the first of the step
  int step = 0;      // of the row
  int slot = 0;      // of the ring

  __device__ __forceinline__ walk_t() : row(blockIdx.y), vector(first()) {}

  // Goes on by a step; whether it came to a new row.
  __device__ __forceinline__ bool next(int steps) {
    slot = slot + 1 == kRing ? 0 : slot + 1;
    vector += kTogether * step_of_vector();
    if (++step < steps) return false;
    step = 0;
    row += gridDim.y;
    vector = first();
    return true;
  }
  // From one vector of a thread to the next.
  static __device__ __forceinline__ long long step_of_vector() {
    return (long long)gridDim.x * kLanes;
  }
  static __device__ __forceinline__ long long first() {
    return (long long)blockIdx.x * kLanes + threadIdx.x;
  }
};

// What the blocks of a group tell each other: two numbers a row and block. Each number
// says by itself whether it has been told, so that nothing else has to be ordered.
struct board_t {
  static constexpr unsigned long long kUntold = ~0ull;  // a NaN that is never told

  unsigned long long* words;  // (num_rows, blocks of a group, 2)

  __device__ __forceinline__ unsigned long long* of(long long row, int block) const {
    return words + (row * gridDim.x + block) * 2;
  }
  static __device__ __forceinline__ unsigned long long bits_of(double x) {
    return x == x ? __double_as_longlong(x) : 0x7ffull << 52 | 1ull << 51;
  }
  static __device__ __forceinline__ double read(const unsigned long long* word) {
    unsigned long long bits;
    do {
      bits = ptx::load_relaxed(word);
    } while (bits == kUntold);
    return __longlong_as_double(bits);
  }

  // Before anything is told: by a launch of its own, of a grid of as many columns.
  __device__ __forceinline__ void clear(long long num_rows) const {
    const long long step = (long long)gridDim.y * kBlockThreads;
    for (long long row = (long long)blockIdx.y * kBlockThreads + threadIdx.x;
         row < num_rows; row += step) {
      of(row, blockIdx.x)[0] = of(row, blockIdx.x)[1] = kUntold;
    }
  }
  // By one thread of this block.
  __device__ __forceinline__ void tell(long long row, double a, double b) const {
    ptx::store_relaxed(of(row, blockIdx.x), bits_of(a));
    ptx::store_relaxed(of(row, blockIdx.x) + 1, bits_of(b));
  }
  // Waits until a block has told them.
  __device__ __forceinline__ double first_of(long long row, int block) const {
    return read(of(row, block));
  }
  __device__ __forceinline__ double second_of(long long row, int block) const {
    return read(of(row, block) + 1);
  }
};

// News of a row within a block: `Part` is what a warp finds, `Result` what becomes of
// the parts of all warps of all blocks.
template <typename Part, typename Result>
struct news_t {
  Part part[kWarps];
  Result result;

  // By each warp when it has summed a row.
  __device__ __forceinline__ void tell(const Part& found) {
    if (threadIdx.x % kWarpSize == 0) part[threadIdx.x / kWarpSize] = found;
    ptx::bar_arrive<kBlockThreads>(1);
  }
  // Waits for the result.
  __device__ __forceinline__ Result hear() {
    ptx::bar_sync<kBlockThreads>(2);
    return result;
  }

  // What the messenger does. join(a, b) of two parts, neutral Part(); post(board, row,
  // part) and read(board, row, block) put it on the board and take it from there;
  // finish(part) is the result.
  template <typename Join, typename Post, typename Read, typename Finish>
  __device__ __forceinline__ void carry(
      long long num_rows, Join join, Post post, Read read, Finish finish) {
    const int lane = threadIdx.x % kWarpSize;
    for (long long row = blockIdx.y; row < num_rows; row += gridDim.y) {
      ptx::bar_sync<kBlockThreads>(1);
      Part all = Part();
#pragma unroll
      for (int i = 0; i < kWarps; i += kWarpSize) {
        if (i + lane < kWarps) all = join(all, part[i + lane]);
      }
      all = warp_reduce(all, join);
      if (lane == 0) post(row, all);
      all = Part();
      for (int block = lane; block < gridDim.x; block += kWarpSize) {
        all = join(all, read(row, block));
      }
      all = warp_reduce(all, join);
      const Result found = finish(all);
      if (lane == 0) result = found;
      ptx::bar_arrive<kBlockThreads>(2);
    }
  }
};

// The places of this thread in a ring of vectors of T's.
template <typename T, int kVector>
struct ring_t {
  using vector = vector_t<T, kVector>;
  vector* mine;

  // `memory` is shared: kBytes of it.
  static constexpr int kBytes = kRing * kTogether * kLanes * int(sizeof(vector));
  __device__ __forceinline__ explicit ring_t(void* memory)
      : mine(static_cast<vector*>(memory) + threadIdx.x) {}

  // Vector k of a step.
  __device__ __forceinline__ vector& at(int slot, int k) const {
    return mine[(slot * kTogether + k) * kLanes];
  }
  // Starts to load a vector from where it is aligned.
  __device__ __forceinline__ void load(int slot, int k, const T* from) const {
    static_assert(sizeof(vector) >= 4, "cp.async moves 4, 8 or 16 bytes");
    ptx::copy_async<sizeof(vector)>(&at(slot, k), from);
  }
  // The same from where it is not.
  __device__ __forceinline__ void gather(int slot, int k, const T* from) const {
    vector& home = at(slot, k);
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

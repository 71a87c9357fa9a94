// SPDX-License-Identifier: MIT
// Rows that stream through the shared memory of many multiprocessors.
//
// All blocks run at once, one on a multiprocessor. A group of them shares a row, and
// takes one row after another. What a thread has of its rows passes through its places
// in a ring in shared memory, a step at a time:
//
//     load (kAhead + 1 steps earlier)  ->  sum  ->  write (kLag steps later)
//
// At every moment a block writes one row, sums the next one and loads what follows, so
// that memory never waits for arithmetic nor for another block. The warps of a block
// walk each for itself: whoever is the last to have summed a row tells the group what
// the block found; the first warp hears what all blocks found, a step before it is
// needed, and passes it on. The steps of a row that are still to come before the first
// is written hide the way of that news.
//
// Parameters RING     steps that the ring has places for
//            AHEAD    steps whose loads may be under way while another is summed
//            LANES, ROWS_PER_BLOCK   as in softmax/group.cuh: a block of LANES threads
// Grid       (blocks of a group, groups)
#pragma once

#include "ptx/copy.cuh"
#include "ptx/mbarrier_copy.cuh"
#include "softmax/group.cuh"
#include "softmax/peeled.cuh"
#include "softmax/told.cuh"

#ifndef RING
#error "RING and AHEAD come from the host"
#endif
constexpr int kRing = RING, kAhead = AHEAD;
constexpr int kLag = kRing - 1 - kAhead;
static_assert(kAhead >= 1 && kLag >= 1, "a step is loaded before it is summed");

// Steps that a row of so many elements takes, whatever its start: at most kLag + 1.
template <int kVector>
__device__ __forceinline__ int num_steps(long long length) {
  const long long at_once = (long long)gridDim.x * kLanes;
  return int((length / kVector + at_once - 1) / at_once) + (length < kVector);
}

// Where the threads of a block are, in the steps of the rows of their group.
struct walk_t {
  long long row;
  long long vector;  // of this thread, in the row
  int turn = 0;      // which of the rows of this block
  int step = 0;      // of the row
  int slot = 0;      // of the ring

  __device__ __forceinline__ walk_t() : row(blockIdx.y), vector(first()) {}

  // Goes on by a step; whether it came to a new row.
  __device__ __forceinline__ bool next(int steps) {
    slot = slot + 1 == kRing ? 0 : slot + 1;
    vector += (long long)gridDim.x * kLanes;
    if (++step < steps) return false;
    step = 0;
    ++turn;
    row += gridDim.y;
    vector = first();
    return true;
  }
  static __device__ __forceinline__ long long first() {
    return (long long)blockIdx.x * kLanes + threadIdx.x;
  }
};

// What the blocks of a group tell each other: a number a row and block.
struct board_t {
  unsigned long long* words;  // (num_rows, blocks of a group)

  // Before anything is told: by a launch of its own, of a grid of as many columns.
  __device__ __forceinline__ void clear(long long num_rows) const {
    const long long step = (long long)gridDim.y * kLanes;
    for (long long row = (long long)blockIdx.y * kLanes + lane(); row < num_rows;
         row += step) {
      words[row * gridDim.x + blockIdx.x] = told_t::kUntold;
    }
  }
  __device__ __forceinline__ void tell(long long row, double x) const {
    told_t::tell(words + row * gridDim.x + blockIdx.x, x);
  }
  // Waits until all blocks have told theirs, and adds them; for a warp.
  __device__ __forceinline__ double sum_of(long long row) const {
    constexpr int kAtOnce = 5;  // words of a lane that are asked for together
    const unsigned long long* const told = words + row * gridDim.x;
    sum_t sum;
    for (int first = threadIdx.x % kWarpSize; first < gridDim.x;
         first += kAtOnce * kWarpSize) {
      unsigned long long word[kAtOnce];
      bool is_told;
      do {
        is_told = true;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int block = first + i * kWarpSize;
          word[i] = block < gridDim.x ? ptx::load_relaxed(told + block) : 0;
          is_told = is_told && word[i] != told_t::kUntold;
        }
      } while (!is_told);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum += __longlong_as_double(word[i]);
    }
    return warp_reduce(total(sum), plus_t());
  }
};

// What the warps of a block tell each other of their rows. At most kRing rows are on
// their way from the first who sums to the last who writes.
struct news_t {
  static constexpr int kWarps = kLanes / kWarpSize;
  double of_warp[kRing][kWarps];
  unsigned summed_by[kRing];
  double of_row[kRing];
  ptx::copy_barrier_t is_known[kRing];

  // By all threads of the block.
  __device__ __forceinline__ void begin() {
    if (threadIdx.x < kRing) {
      summed_by[threadIdx.x] = 0;
      ptx::copy_barrier_init(&is_known[threadIdx.x], 1);
    }
    __syncthreads();
  }
  // Takes in what a lane found of row number `turn` of this block. Calls tell(sum) in
  // one lane of the last warp that comes.
  template <typename Tell>
  __device__ __forceinline__ void add(int turn, double found, Tell tell) {
    const int slot = turn % kRing;
    found = warp_reduce(found, plus_t());
    bool is_last = false;
    if (threadIdx.x % kWarpSize == 0) {
      of_warp[slot][threadIdx.x / kWarpSize] = found;
      __threadfence_block();
      is_last = atomicAdd(&summed_by[slot], 1u) % kWarps == kWarps - 1;
      __threadfence_block();
    }
    if (!__shfl_sync(kFullMask, is_last, 0)) return;
    __syncwarp();
    const double sum =
        warp_reduce<kWarps>(of_warp[slot][threadIdx.x % kWarps], plus_t());
    if (threadIdx.x % kWarpSize == 0) tell(sum);
  }
  // By one thread, for all.
  __device__ __forceinline__ void pass_on(int turn, double sum) {
    of_row[turn % kRing] = sum;
    ptx::copy_barrier_arrive(&is_known[turn % kRing]);
  }
  // Waits for it.
  __device__ __forceinline__ double sum_of(int turn) {
    while (!ptx::copy_barrier_test(&is_known[turn % kRing], turn / kRing & 1)) {
    }
    return of_row[turn % kRing];
  }
};

// The places of this thread in a ring of vectors of T's.
template <typename T, int kVector>
struct ring_t {
  using vector = vector_t<T, kVector>;
  vector* mine;

  // `memory` is shared: kBytes of it.
  static constexpr int kBytes = kRing * kLanes * int(sizeof(vector));
  __device__ __forceinline__ explicit ring_t(void* memory)
      : mine(static_cast<vector*>(memory) + threadIdx.x) {}

  __device__ __forceinline__ const vector& at(int slot) const {
    return mine[slot * kLanes];
  }
  // Starts to load a vector from where it is aligned.
  __device__ __forceinline__ void load(int slot, const T* from) const {
    static_assert(sizeof(vector) >= 4, "cp.async moves 4, 8 or 16 bytes");
    ptx::copy_async<sizeof(vector)>(&mine[slot * kLanes], from);
  }
  // The same from where it is not.
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

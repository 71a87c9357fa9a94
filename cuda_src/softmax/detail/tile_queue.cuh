// SPDX-License-Identifier: MIT
// Parts of long rows in one queue, each of them twice: once to be summed and once,
// kMargin parts after the last of its row, to be written.
//
// Blocks take the next of the queue whenever they are free. Nobody waits for what comes
// later in the queue, so that blocks need not all run at once; and what is written has
// been read so shortly before that it is still in the L2 cache.
//
// Parameters HELD     vectors of a thread: a part has LANES times as many
//            MARGIN   as above
//            LANES    as in softmax/detail/thread_group.cuh
#pragma once

#include "common/vector.cuh"
#include "ptx/cache_hint.cuh"
#include "softmax/detail/aligned_span.cuh"
#include "softmax/detail/thread_group.cuh"

constexpr int kHeld = HELD, kMargin = MARGIN;
constexpr int kWarps = kLanes / kWarpSize;
constexpr int kPart = kLanes * kHeld;  // vectors of a part

struct tile_queue_t {
  unsigned parts;  // of a row
  unsigned all, lag;

  // Of rows of so many elements, kVector a vector.
  __device__ __forceinline__ tile_queue_t(long long num_rows, long long row_length,
                                          int vector) {
    const int elements = kPart * vector;
    parts = unsigned((row_length + elements - 1) / elements);
    all = parts * unsigned(num_rows);
    lag = min(parts + kMargin, all);
  }

  struct place_t {
    bool is_written;  // or summed
    unsigned part;
  };
  // First only sums, then a sum and a result in turn, at last only results.
  __device__ __forceinline__ place_t at(unsigned number) const {
    if (number < lag) return {false, number};
    if (number >= 2 * all - lag) return {true, number - all};
    const unsigned turn = number - lag;
    return {turn % 2 != 0, turn / 2 + (turn % 2 == 0 ? lag : 0)};
  }
};

// A part of a row, as vectors of kVector elements, and the elements at the ends of the
// row that are in none.
template <int kVector> struct row_part_t {
  unsigned row;
  bool is_last;     // of its row
  int num_vectors;  // of the row
  int first;        // vector of this thread; others lie kLanes apart
  int edge;         // an element of this thread that is in no vector, or kNone
  static constexpr int kNone = -kVector;

  __device__ __forceinline__ row_part_t(const tile_queue_t& queue, unsigned part)
      : row(part / queue.parts) {
    is_last = part - row * queue.parts + 1 == queue.parts;
  }
  // Number `part` of the row, of which the first has the edges.
  __device__ __forceinline__ void find(unsigned part, const aligned_span_t& aligned) {
    num_vectors = int(aligned.num_vectors);
    first = int(part * kPart) + lane();
    const bool has_edge = part == 0 && lane() < aligned.head + aligned.tail;
    edge = has_edge ? int(aligned.edge<kVector>(lane())) - aligned.head : kNone;
  }
  __device__ __forceinline__ bool has(int k) const {
    return first + k * kLanes < num_vectors;
  }
  __device__ __forceinline__ bool has_edge() const { return edge != kNone; }
  // Of the first element of vector k of this thread.
  __device__ __forceinline__ int position(int k) const {
    return (first + k * kLanes) * kVector;
  }
};

// A vector of a result to memory; element by element where it does not begin at
// a multiple of its size.
template <typename T, int kCount>
__device__ __forceinline__ void store_vector(T* to, const vector_t<T, kCount>& x,
                                             bool in_vectors,
                                             unsigned long long policy) {
  if (in_vectors) {
    using word_t = typename vector_t<T, kCount>::word_t;
    ptx::store_global(reinterpret_cast<word_t*>(to), x.word, policy);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) to[e] = x.element[e];
  }
}

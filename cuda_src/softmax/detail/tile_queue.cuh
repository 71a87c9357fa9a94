// SPDX-License-Identifier: MIT
// A queue of the parts of long rows. Each part is in it twice: once to be summed and
// once, kMargin parts after the last of its row, to be written.
//
// Blocks take the next position whenever they are free. Nobody waits for a later
// position, so blocks need not all be resident; and what is written was read so
// recently that it is still in the L2 cache.
//
// Parameters IN_REGISTERS     vectors per thread: a part has LANES times as many
//            MARGIN   as above
#pragma once

#include "softmax/detail/aligned_span.cuh"
#include "softmax/detail/hinted.cuh"
#include "softmax/detail/published.cuh"
#include "softmax/detail/thread_group.cuh"

constexpr int kInRegisters = IN_REGISTERS, kMargin = MARGIN;
constexpr int kWarps = kLanes / kWarpSize;
constexpr int kPart = kLanes * kInRegisters;  // vectors per part

struct tile_queue_t {
  unsigned parts;  // per row
  unsigned all, lag;

  // For rows of `row_length` elements, in vectors.
  __device__ __forceinline__ tile_queue_t(long long num_rows, long long row_length,
                                          int vector) {
    const int elements = kPart * vector;
    parts = unsigned((row_length + elements - 1) / elements);
    all = parts * unsigned(num_rows);
    lag = min(parts + kMargin, all);
  }

  struct place_t {
    bool is_written;  // otherwise summed
    unsigned part;
  };
  // First only sums, then sums and results alternately, finally only results.
  __device__ __forceinline__ place_t at(unsigned number) const {
    if (number < lag) return {false, number};
    if (number >= 2 * all - lag) return {true, number - all};
    const unsigned turn = number - lag;
    return {turn % 2 != 0, turn / 2 + (turn % 2 == 0 ? lag : 0)};
  }
};

// What blocks publish: the next position in the queue; and a sum of kWords words for
// each row and each part.
template <int kWords> struct queue_board_t {
  unsigned long long* words;  // kWords (1 + num_rows + parts of all rows)
  unsigned num_rows;

  // Resets `count` words; run by an earlier launch.
  __device__ __forceinline__ void clear(long long count) const {
    const long long step = (long long)gridDim.x * kLanes;
    for (long long i = (long long)blockIdx.x * kLanes + lane(); i < count; i += step) {
      words[i] = i == 0 ? 0 : published_t::kUnpublished;
    }
  }
  __device__ __forceinline__ unsigned take_next() const {
    return unsigned(atomicAdd(words, 1ull));
  }
  __device__ __forceinline__ unsigned long long* of_row(unsigned row) const {
    return words + kWords + kWords * 1ull * row;
  }
};

// A part of a row as vectors of kVector elements, and the elements at the ends of the
// row that belong to none.
template <int kVector> struct row_part_t {
  unsigned row;
  bool is_last;     // of its row
  int num_vectors;  // per row
  int first;        // vector of this thread; its others are kLanes apart
  int edge;         // an element of this thread outside of vectors, or kNone
  static constexpr int kNone = -kVector;

  __device__ __forceinline__ row_part_t(const tile_queue_t& queue, unsigned part)
      : row(part / queue.parts) {
    is_last = part - row * queue.parts + 1 == queue.parts;
  }
  // Part `part` of the row; the first part has the edges.
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
  // Position of the first element of vector k of this thread.
  __device__ __forceinline__ int position(int k) const {
    return (first + k * kLanes) * kVector;
  }
};

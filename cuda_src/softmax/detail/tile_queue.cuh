// SPDX-License-Identifier: MIT
// Parts of long rows in one line, each of them twice: once to be summed and once,
// kMargin parts after the last of its row, to be written.
//
// Blocks take the next of the line whenever they are free. Nobody waits for what comes
// later in the line, so that blocks need not all run at once; and what is written has
// been read so shortly before that it is still in the L2 cache.
//
// Parameters HELD     vectors of a thread: a part has LANES times as many
//            MARGIN   as above
//            LANES    as in softmax/detail/thread_group.cuh
#pragma once

#include "common/vector.cuh"
#include "ptx/cache_hint.cuh"
#include "softmax/detail/thread_group.cuh"

constexpr int kHeld = HELD, kMargin = MARGIN;
constexpr int kWarps = kLanes / kWarpSize;
constexpr int kPart = kLanes * kHeld;  // vectors of a part

struct line_t {
  unsigned parts;  // of a row
  unsigned all, lag;

  // Of rows of so many elements, kVector a vector.
  __device__ __forceinline__ line_t(long long num_rows,
                                    long long row_length,
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
  __device__ __forceinline__ place_t at(unsigned ticket) const {
    if (ticket < lag) return {false, ticket};
    if (ticket >= 2 * all - lag) return {true, ticket - all};
    const unsigned turn = ticket - lag;
    return {turn % 2 != 0, turn / 2 + (turn % 2 == 0 ? lag : 0)};
  }
};

// A vector of a result to memory; element by element where it does not begin at
// a multiple of its size.
template <typename T, int kCount>
__device__ __forceinline__ void store_vector(T* to,
                                             const vector_t<T, kCount>& x,
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

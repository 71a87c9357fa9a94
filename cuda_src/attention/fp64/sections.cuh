// SPDX-License-Identifier: MIT
// Shared by the float64 gradient kernels that keep weights in memory. A section is some
// entries of dk and dv, some of those that each sums, and some of their queries:
// kernels run for one section after the other, and use the same memory.
//
//   weights, score_grads  P and dS of a section: (entry of the section, query, key)
//   totals                sums of P over the keys of a warp: (entry, part, query)
//
// Queries and keys are divided into squares of kSquare. Of squares in which no query
// sees a key nothing is written, and nothing is read.
#pragma once

#include "attention/simt/gradients.cuh"

constexpr int kSquare = 128;

// SECTION of _attention/gpu/fp64/sections_backward.py is the same struct on the host.
struct section_t {
  index_t first_kept, num_kept;      // entries of dk and dv
  index_t first_summed, num_summed;  // entries that each of them sums
  index_t first_row, num_rows;       // queries; the first is a multiple of kSquare
  index_t rows, cols;                // of P and dS in memory
  index_t num_parts, part_size;      // of `totals`: parts of a row, and keys of each
  index_t num_splits;                // blocks that share a loop
  index_t adds;                      // 1: add to what previous sections have written

  __device__ index_t num_entries() const { return num_kept * num_summed; }
  __device__ index_t matrix(index_t entry) const { return entry * rows * cols; }
};

// An entry of a section.
__device__ __forceinline__ tile_coord_t entry_of(const params_t& params,
                                                 const grads_t& grads,
                                                 const section_t& section,
                                                 index_t entry) {
  const index_t n = divide(entry, section.num_summed);
  const index_t summed = section.first_summed + entry - n * section.num_summed;
  return grads.entry(params, locate(grads.kept, section.first_kept + n).of[0], summed);
}

__device__ __forceinline__ index_t square_of(index_t n) {
  return n / kSquare * kSquare;
}

// The keys that some query of a square may see, and the queries that some key of a
// square is seen by.
__device__ __forceinline__ range_t keys_of_square(const scores_t& scores,
                                                  const params_t& params, index_t i0) {
  return scores.keys_of(i0, smaller(i0 + kSquare, params.seqlen_q));
}
__device__ __forceinline__ range_t queries_of_square(const scores_t& scores,
                                                     const params_t& params,
                                                     index_t j0) {
  return scores.queries_of(j0, smaller(j0 + kSquare, params.seqlen_k));
}
__device__ __forceinline__ bool meets(const range_t& range, index_t first) {
  return range.first < range.last && range.first < first + kSquare &&
         range.last > first;
}
// Whether a square is written.
__device__ __forceinline__ bool is_written(const scores_t& scores,
                                           const params_t& params, index_t i0,
                                           index_t j0) {
  return meets(keys_of_square(scores, params, i0), j0) ||
         meets(queries_of_square(scores, params, j0), i0);
}

__device__ __forceinline__ index_t larger_of(index_t a, index_t b) {
  return a > b ? a : b;
}

// The loop over what is in `seen` and in [start, end), from the begin of a step on.
// Nothing was written for a range that is empty: its ends need not be those of steps.
__device__ __forceinline__ range_t loop_over(const range_t& seen, index_t start,
                                             index_t end) {
  constexpr index_t kOf = 16;
  if (seen.first >= seen.last) return {start, start};
  const index_t first = clamp(seen.first, start, end) / kOf * kOf;
  return {first, larger_of(first, smaller(seen.last, end))};
}

// Leaves the steps of a block's split of a loop.
__device__ __forceinline__ void take_steps(index_t& first, index_t& last, index_t split,
                                           index_t splits) {
  constexpr index_t kOf = 16;
  const index_t steps = (last - first + kOf - 1) / kOf;
  const index_t start = first, end = last;
  first = start + divide(steps * split, splits) * kOf;
  last = smaller(end, start + divide(steps * (split + 1), splits) * kOf);
  last = larger_of(first, last);
}

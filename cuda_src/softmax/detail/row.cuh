// SPDX-License-Identifier: MIT
// Shared by the kernels of the ladder: a row of the problem.
//
// Parameters as in softmax/detail/params.cuh
//            LANES, ROWS_PER_BLOCK   as in softmax/detail/thread_group.cuh
#pragma once

#include "softmax/detail/thread_group.cuh"
#include "softmax/detail/params.cuh"

// One row of x, where and out; element i is the i-th along the reduced axes.
struct row_t {
  const x_t* x;
  const bool* where;
  out_t* out;
  const layout_t& layout;
  long long length;

  // The row of this thread's group when the block is at row `block_row`. Past the last
  // row it is empty: its threads still take part in reductions.
  __device__ __forceinline__ row_t(const x_t* x, const bool* where, out_t* out,
                                   const layout_t& layout, long long block_row)
      : layout(layout) {
    const long long row = row_of_lane(block_row);
    const auto at = locate(layout.outer, row);
    this->x = x + at.of[kX];
    this->where = where + at.of[kWhere];
    this->out = out + at.of[kOut];
    length = row < layout.num_rows ? layout.row_length : 0;
  }

  // Offset of element i in one of the arrays, from the start of the row.
  __device__ __forceinline__ long long offset(int array, long long i) const {
    return locate(layout.reduced, i).of[array];
  }
  // The same, for a row that is held on chip.
  __device__ __forceinline__ long long near_offset(int array, int i) const {
    return locate_in_row(layout.reduced, array, i);
  }
  // Whether element i is selected by the mask.
  __device__ __forceinline__ bool selected(long long i) const {
    return !kHasWhere || where[offset(kWhere, i)];
  }
  __device__ __forceinline__ acc_t load(long long i) const {
    return to<acc_t>(x[offset(kX, i)]);
  }
  // Also defined beyond the row, where nothing is selected.
  __device__ __forceinline__ score_t score(long long i) const {
    return i < length && selected(i) ? score_t(load(i), layout)
                                     : score_t::absent(layout);
  }
  __device__ __forceinline__ void store(long long i, acc_t value) const {
    out[offset(kOut, i)] = to<out_t>(value);
  }
};

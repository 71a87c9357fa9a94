// SPDX-License-Identifier: MIT
// Shared by the kernels of the ladder: a row of the problem.
#pragma once

#include "softmax/detail/thread_group.cuh"
#include "softmax/detail/params.cuh"

// One row of x, where and out.
struct row_t : row_of_group_t<layout_t> {
  const x_t* x;
  const bool* where;
  out_t* out;

  __device__ __forceinline__ row_t(const x_t* x, const bool* where, out_t* out,
                                   const layout_t& layout, long long block_row)
      : row_of_group_t{layout} {
    const long long row = row_of_lane(block_row);
    const auto at = locate(layout.outer, row);
    this->x = x + at.of[kX];
    this->where = where + at.of[kWhere];
    this->out = out + at.of[kOut];
    length = row < layout.num_rows ? layout.row_length : 0;
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

// SPDX-License-Identifier: MIT
// Shared by one-pass logsumexp: the problem, and its sums.
//
// Parameters A_T, OUT_T   element types of a, and of out and sign
//            OUTER_AXES, REDUCED_AXES   number of axes of each kind
#pragma once

#include "common/strides.cuh"
#include "common/types.cuh"
#include "softmax/detail/scaled_sum.cuh"

using a_t = A_T;
using out_t = OUT_T;

constexpr bool kCoarse = sizeof(out_t) == 2 && sizeof(acc_t) == 4;
using total_t = power_sum_t<acc_t, kCoarse>;
using partial_t = stored_sum_t<acc_t>;

enum { kA, kB, kWhere, kOut, kSign, kNumArrays };

// The problem, packed by the host.
struct layout_t {
  long long num_rows, row_length;
  long long returns_sign;
  axes_t<OUTER_AXES, kNumArrays> outer;
  axes_t<REDUCED_AXES, kNumArrays> reduced;  // out and sign have stride 0 here
};

// The sign of a sum without weights.
__device__ __forceinline__ acc_t sign_of(acc_t top) {
  return is_nan(top) ? top : acc_t(top > -infinity<acc_t>());
}

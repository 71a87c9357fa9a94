// SPDX-License-Identifier: MIT
// Parameters of the gradients.
//
// Parameters Y_T, DY_T, OUT_T   element types of y, dy and dx
//            LOG                1 for log_softmax
//            OUTER_AXES, REDUCED_AXES   number of axes of each kind
#pragma once

#include "common/strides.cuh"
#include "common/types.cuh"

using y_t = Y_T;
using dy_t = DY_T;
using out_t = OUT_T;
constexpr bool kLog = LOG;

enum { kY, kDy, kOut, kNumArrays };

// The problem, packed by the host.
struct layout_t {
  long long num_rows, row_length;
  double scale;
  axes_t<OUTER_AXES, kNumArrays> outer;
  axes_t<REDUCED_AXES, kNumArrays> reduced;
};

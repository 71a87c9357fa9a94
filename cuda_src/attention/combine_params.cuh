// SPDX-License-Identifier: MIT
// The parameters of the kernels that combine results over splits of the keys.
#pragma once

#include "common/strides.cuh"

#ifndef ROW_DIMS
#error "ROW_DIMS comes from the host"
#endif
constexpr int kRowDims = ROW_DIMS;

enum { kOuts, kLses, kOut, kArrays };

// COMBINE_PARAMS of _attention/gpu/combine_config.py is the same struct on the host.
struct combine_params_t {
  long long num_rows, num_parts, head_dim_v;
  long long outs_part, outs_col, lses_part, out_col;  // strides
  axes_t<kRowDims, kArrays> rows;
};

// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/max.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline float max_nan_f32(float a, float b) { return a > b || a != a ? a : b; }
inline float min_nan_f32(float a, float b) { return a < b || a != a ? a : b; }

}  // namespace ptx

// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/math.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline float rcp_approx_ftz(float x) { return 1 / x; }
inline float select(bool condition, float a, float b) { return condition ? a : b; }

}  // namespace ptx

// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/redux.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline int redux_min(int x) { return __reduce_min_sync(0xffffffffu, x); }

}  // namespace ptx

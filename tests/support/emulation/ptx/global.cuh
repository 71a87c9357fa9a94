// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/global.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline void store_global(uint4* p, uint4 v) { *p = v; }
inline void store_global(uint2* p, uint2 v) { *p = v; }

}  // namespace ptx

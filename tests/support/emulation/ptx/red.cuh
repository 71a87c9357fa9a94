// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/red.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline void red_add_f32(float* target, float x) { atomicAdd(target, x); }
inline void red_add_f32x4(float* target, const float (&x)[4]) {
  if (reinterpret_cast<uintptr_t>(target) % 16) emu::fail("red.v4 is not aligned");
  for (int i = 0; i < 4; ++i) atomicAdd(target + i, x[i]);
}

}  // namespace ptx

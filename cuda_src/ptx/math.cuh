// SPDX-License-Identifier: MIT
// PTX instructions on single numbers.
#pragma once

namespace ptx {

// 1 / x to about 2^-23. Not volatile: a pure function.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// condition ? a : b without a branch; both are computed.
__device__ __forceinline__ float select(bool condition, float a, float b) {
  float x;
  asm("{.reg .pred p; setp.ne.b32 p, %1, 0; selp.f32 %0, %2, %3, p;}"
      : "=f"(x)
      : "r"(static_cast<int>(condition)), "f"(a), "f"(b));
  return x;
}

}  // namespace ptx

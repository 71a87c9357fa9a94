// SPDX-License-Identifier: MIT
// PTX approximations of functions of one number.
#pragma once

namespace ptx {

// 1 / x to about 2^-23. Not volatile: a pure function.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx

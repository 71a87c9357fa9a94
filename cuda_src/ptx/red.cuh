// SPDX-License-Identifier: MIT
// PTX red: adds floats to global memory, each atomically, without waiting.
#pragma once

namespace ptx {

__device__ __forceinline__ void red_add_f32(float* target, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(target), "f"(x) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Four at once, at a multiple of 16 bytes (sm_90 or newer).
__device__ __forceinline__ void red_add_f32x4(float* target, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
#endif

}  // namespace ptx

// SPDX-License-Identifier: MIT
// PTX setmaxnreg (sm_90a): moves registers between the warpgroups of a block, within
// the pool of the launch. All warps of a warpgroup must take part.
#pragma once

namespace ptx {

// Releases registers, down to kRegisters per thread.
template <int kRegisters> __device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(kRegisters % 8 == 0 && 24 <= kRegisters && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits for registers from the pool, up to kRegisters per thread; forever if the pool
// is too small.
template <int kRegisters> __device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(kRegisters % 8 == 0 && 24 <= kRegisters && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ptx

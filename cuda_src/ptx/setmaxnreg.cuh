// SPDX-License-Identifier: MIT
// PTX setmaxnreg (sm_90a): registers move between the warpgroups of a block, inside the
// pool it was launched with. All warps of a warpgroup must take part.
#pragma once

namespace ptx {

// Gives registers back, down to kRegisters a thread.
template <int kRegisters> __device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(kRegisters % 8 == 0 && 24 <= kRegisters && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits for registers in the pool, up to kRegisters a thread; for ever if the pool is
// too small.
template <int kRegisters> __device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(kRegisters % 8 == 0 && 24 <= kRegisters && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ptx

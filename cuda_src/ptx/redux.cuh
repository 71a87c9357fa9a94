// SPDX-License-Identifier: MIT
// PTX redux.sync (sm_80): a reduction over the lanes of a warp, by one instruction.
#pragma once

namespace ptx {

// The smallest `x` of the 32 lanes. It comes in a uniform register: of a number that is
// the same in all lanes, the compiler then knows that it is.
__device__ __forceinline__ int redux_min(int x) {
  int least;
  asm volatile("redux.sync.min.s32 %0, %1, 0xffffffff;" : "=r"(least) : "r"(x));
  return least;
}

}  // namespace ptx

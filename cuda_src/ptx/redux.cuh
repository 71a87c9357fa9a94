// SPDX-License-Identifier: MIT
// PTX redux.sync (sm_80): a reduction over the lanes of a warp in one instruction.
#pragma once

namespace ptx {

// The smallest `x` of the 32 lanes, in a uniform register: if a number is the same in
// all lanes, this tells the compiler so.
__device__ __forceinline__ int redux_min(int x) {
  int least;
  asm volatile("redux.sync.min.s32 %0, %1, 0xffffffff;" : "=r"(least) : "r"(x));
  return least;
}

}  // namespace ptx

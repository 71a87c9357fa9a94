// SPDX-License-Identifier: MIT
// PTX elect.sync (sm_90): selects one thread of a warp in a way the compiler
// understands.
#pragma once

namespace ptx {

// Whether this lane is the elected one; all lanes take part. In code run by that lane
// alone, the compiler moves TMA coordinates to uniform registers directly; otherwise it
// loops over all values that lanes may have.
__device__ __forceinline__ bool elect() {
  unsigned chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}"
               : "=r"(chosen));
  return chosen;
}

}  // namespace ptx

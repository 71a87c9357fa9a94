// SPDX-License-Identifier: MIT
// PTX elect.sync (sm_90): one thread of a warp, as the compiler understands it.
#pragma once

namespace ptx {

// Whether this lane is the one that is chosen; all lanes take part. What only that one
// runs has coordinates of TMA moved to uniform registers at once, where the
// compiler would else try all values that lanes may have.
__device__ __forceinline__ bool elect() {
  unsigned chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}"
               : "=r"(chosen));
  return chosen;
}

}  // namespace ptx

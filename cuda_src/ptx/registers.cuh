// SPDX-License-Identifier: MIT
// Hints on registers; none of them is an instruction.
#pragma once

namespace ptx {

// The compiler moves no access to memory across this line.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

}  // namespace ptx

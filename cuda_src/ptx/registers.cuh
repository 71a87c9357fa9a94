// SPDX-License-Identifier: MIT
// Hints on registers; none of them is an instruction, but for one branch.
#pragma once

namespace ptx {

// The compiler moves no access to memory across this line.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

// The assembler schedules what stands before this line and what stands behind it apart:
// `never` is false, but it cannot know that. It would fill all registers with fragments
// of the products ahead, and then spill.
__device__ __forceinline__ void end_region(bool never) {
  if (never) asm volatile("exit;");
}

}  // namespace ptx

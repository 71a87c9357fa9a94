// SPDX-License-Identifier: MIT
// Hints about registers; only one of them is an instruction, a branch.
#pragma once

namespace ptx {

// The compiler moves no memory access across this line.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

// Separates two scheduling regions of the assembler: `never` is false, but it does not
// know that. Otherwise it would fill all registers with fragments of later products.
__device__ __forceinline__ void end_region(bool never) {
  if (never) asm volatile("exit;");
}

}  // namespace ptx

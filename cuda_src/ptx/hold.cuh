// SPDX-License-Identifier: MIT
// Tools that keep the assembler from moving instructions.
#pragma once

namespace ptx {

// A branch that is never taken, since `count` is not negative. The assembler does not
// know this, and moves no load across a branch. Each hold() of a kernel needs its own
// `number` from 0 on, otherwise later ones are optimized away.
__device__ __forceinline__ void hold(int count, int number) {
  if (count == ~number) __trap();
}

// A load from shared memory that stays between its two holds; the assembler would move
// an ordinary one to where its result is used.
__device__ __forceinline__ double2 load_here(const double* x) {
  double2 y;
  asm volatile("ld.volatile.shared.v2.f64 {%0, %1}, [%2];"
               : "=d"(y.x), "=d"(y.y)
               : "r"(unsigned(__cvta_generic_to_shared(x)))
               : "memory");
  return y;
}

// The same for one number.
__device__ __forceinline__ double load_one_here(const double* x) {
  double y;
  asm volatile("ld.volatile.shared.f64 %0, [%1];"
               : "=d"(y)
               : "r"(unsigned(__cvta_generic_to_shared(x)))
               : "memory");
  return y;
}

// As hold(count, number), and `x` must have been computed before.
__device__ __forceinline__ void hold(int count, int number, const double (&x)[4]) {
  if (count != ~number) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("st.volatile.shared.f64 [%0], %1;" ::"r"(8 * i), "d"(x[i]));
  }
  __trap();
}

}  // namespace ptx

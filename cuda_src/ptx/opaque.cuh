// SPDX-License-Identifier: MIT
// Empty instructions that the compiler cannot see through.
#pragma once

namespace ptx {

// Makes the compiler forget the origin of `word` and all that it computed from it: it
// recomputes these values rather than keep them in registers.
__device__ __forceinline__ void launder(unsigned& word) {
  asm volatile("" : "+r"(word));
}
__device__ __forceinline__ void launder(long long& word) {
  asm volatile("" : "+l"(word));
}

__device__ __forceinline__ void launder(float& x) { asm volatile("" : "+f"(x)); }

template <typename T> __device__ __forceinline__ void launder(const T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

// The same for what `memory` points to.
__device__ __forceinline__ void launder(float* memory) {
  asm volatile("" ::"l"(memory) : "memory");
}

// Forces a variable into memory, rather than a register or a spilled one.
template <typename T>
__device__ __forceinline__ void keep_in_memory(volatile T* place) {
  asm volatile("" ::"l"(place) : "memory");
}

// The same object, of which the compiler has computed nothing yet.
template <typename T> __device__ __forceinline__ const T& reload(const T& x) {
  const T* p = &x;
  asm volatile("" : "+l"(p));
  return *p;
}

}  // namespace ptx

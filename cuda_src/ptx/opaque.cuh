// SPDX-License-Identifier: MIT
// An empty instruction, behind which the compiler cannot see.
#pragma once

namespace ptx {

// The compiler forgets how `word` came about, and what it has computed from it: rather
// than keep both, it computes the other again.
__device__ __forceinline__ void launder(unsigned& word) {
  asm volatile("" : "+r"(word));
}
__device__ __forceinline__ void launder(long long& word) {
  asm volatile("" : "+l"(word));
}

template <typename T> __device__ __forceinline__ void launder(const T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

// The same of what `memory` points to.
__device__ __forceinline__ void launder(float* memory) {
  asm volatile("" ::"l"(memory) : "memory");
}

// A place that has to be memory: elsewhere in a register, or a spilled one.
template <typename T>
__device__ __forceinline__ void keep_in_memory(volatile T* place) {
  asm volatile("" ::"l"(place) : "memory");
}

// The same object, of which the compiler has computed nothing before.
template <typename T> __device__ __forceinline__ const T& reload(const T& x) {
  const T* p = &x;
  asm volatile("" : "+l"(p));
  return *p;
}

}  // namespace ptx

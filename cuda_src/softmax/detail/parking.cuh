// SPDX-License-Identifier: MIT
// Vectors on their way from global to shared memory, asynchronously from sm_80 on.
#pragma once

#include "common/vector.cuh"
#include "ptx/copy.cuh"

// Starts copying a vector. The thread may read it after wait_for_copies.
template <typename T, int kVector>
__device__ __forceinline__ void copy_vector(vector_t<T, kVector>* to, const T* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(*to) >= 4) {
    ptx::copy_async<sizeof(*to)>(to, from);
    return;
  }
#endif
  *to = load_vector<kVector>(from);
}

// Waits for the copies of this thread.
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  ptx::wait_copies();
#endif
}

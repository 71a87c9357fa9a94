// SPDX-License-Identifier: MIT
// Loads and stores of vectors with an L2 cache policy.
#pragma once

#include "common/vector.cuh"
#include "ptx/cache_hint.cuh"

template <int kCount, typename T>
__device__ __forceinline__ auto load_word(const T* from, unsigned long long policy) {
  using word_t = typename vector_t<T, kCount>::word_t;
  return ptx::load_global(reinterpret_cast<const word_t*>(from), policy);
}

// Stores a vector of a result; element by element if it is not aligned.
template <typename T, int kCount>
__device__ __forceinline__ void store_vector(T* to, const vector_t<T, kCount>& x,
                                             bool in_vectors,
                                             unsigned long long policy) {
  if (in_vectors) {
    using word_t = typename vector_t<T, kCount>::word_t;
    ptx::store_global(reinterpret_cast<word_t*>(to), x.word, policy);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) to[e] = x.element[e];
  }
}

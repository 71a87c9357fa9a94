// SPDX-License-Identifier: MIT
// A row, or a part of one, as whole vectors and unaligned ends.
#pragma once

#include "common/vector.cuh"

// A span of elements as whole vectors, and a head and a tail shorter than a vector.
struct aligned_span_t {
  int head, tail;
  long long num_vectors;

  // For pointers whose element `head` is aligned.
  template <int kVector>
  static __device__ __forceinline__ aligned_span_t of(int head, long long length) {
    aligned_span_t p;
    p.head = head < length ? head : int(length);
    p.num_vectors = (length - p.head) / kVector;
    p.tail = int(length - p.head - p.num_vectors * kVector);
    return p;
  }
  // Position of the i-th element of head and tail together.
  template <int kVector> __device__ __forceinline__ long long edge(int i) const {
    return i < head ? i : i + num_vectors * kVector;
  }
};

// Number of elements before the first one aligned to a vector.
template <int kVector, typename T>
__device__ __forceinline__ int num_before_aligned(const T* p) {
  return int(-reinterpret_cast<unsigned long long>(p) / sizeof(T)) & (kVector - 1);
}

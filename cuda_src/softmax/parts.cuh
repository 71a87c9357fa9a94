// SPDX-License-Identifier: MIT
// Few long rows: each is cut into kParts parts, and a block has one of them.
//
// Parameters PARTS   parts a row
//            LANES, ROWS_PER_BLOCK   as in softmax/group.cuh: a block of LANES threads
#pragma once

#include "common/vector.cuh"
#include "softmax/group.cuh"

#ifndef PARTS
#error "PARTS comes from the host"
#endif
constexpr int kParts = PARTS;

// Elements [begin, end) of the row. Parts are whole vectors of up to 16 elements, so
// that all of them have the alignment of the row.
struct part_t {
  long long row, begin, end;

  __device__ __forceinline__ part_t(long long block, long long length) {
    constexpr int kWhole = 16;
    row = block / kParts;
    const long long size =
        ((length + kParts - 1) / kParts + kWhole - 1) / kWhole * kWhole;
    begin = block % kParts * size;
    begin = begin < length ? begin : length;
    end = begin + size < length ? begin + size : length;
  }
  __device__ __forceinline__ long long length() const { return end - begin; }
};

// A span of elements as whole vectors, and a head and a tail of fewer than a vector.
struct peeled_t {
  int head, tail;
  long long num_vectors;

  // For pointers in which element `head` is aligned.
  template <int kVector>
  static __device__ __forceinline__ peeled_t of(int head, long long length) {
    peeled_t p;
    p.head = head < length ? head : int(length);
    p.num_vectors = (length - p.head) / kVector;
    p.tail = int(length - p.head - p.num_vectors * kVector);
    return p;
  }
  // Position of the i-th element of head and tail together.
  template <int kVector>
  __device__ __forceinline__ long long edge(int i) const {
    return i < head ? i : i + num_vectors * kVector;
  }
};

// Elements before the first that is aligned to a vector.
template <int kVector, typename T>
__device__ __forceinline__ int num_before_aligned(const T* p) {
  return int(-reinterpret_cast<unsigned long long>(p) / sizeof(T)) & (kVector - 1);
}

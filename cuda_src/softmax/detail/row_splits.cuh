// SPDX-License-Identifier: MIT
// Few long rows: each is split into kParts parts, one per block.
//
// Parameters PARTS   parts per row
#pragma once

#include "common/vector.cuh"
#include "softmax/detail/thread_group.cuh"
#include "softmax/detail/aligned_span.cuh"

constexpr int kParts = PARTS;

// Elements [begin, end) of the row. Parts are whole vectors of up to 16 elements, so
// that all have the alignment of the row.
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

// Stores result(0), ..., result(kVector - 1): as a vector, or one by one.
template <int kVector, typename T, typename Result>
__device__ __forceinline__ void store_results(T* to, bool in_vectors, Result result) {
  vector_t<T, kVector> written;
#pragma unroll
  for (int e = 0; e < kVector; ++e) written.element[e] = result(e);
  if (in_vectors) {
    store_vector<kVector>(to, written);
  } else {
#pragma unroll
    for (int e = 0; e < kVector; ++e) to[e] = written.element[e];
  }
}

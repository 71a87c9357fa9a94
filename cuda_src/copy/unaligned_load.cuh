// SPDX-License-Identifier: MIT
// 16-byte loads from rows of any alignment and length.
#pragma once

#include "common/types.cuh"

// Elements [first, first + 16 bytes) of a row, zeros from `dim` on.
template <typename elem_t, typename column_t>
__device__ __forceinline__ uint4 gather(const elem_t* row, column_t first,
                                        column_t dim) {
  constexpr int kElems = 16 / sizeof(elem_t);
  if (sizeof(elem_t) == 2 && first + kElems <= dim) {
    // Whole 4-byte words, which may start one element earlier.
    const auto at = reinterpret_cast<unsigned long long>(row + first);
    const unsigned* const from = reinterpret_cast<const unsigned*>(at & ~3ull);
    const unsigned shift = at % 4 * 8, last = from[shift == 0 ? 3 : 4];
    const unsigned x[4] = {from[0], from[1], from[2], from[3]};
    return make_uint4(
        __funnelshift_r(x[0], x[1], shift), __funnelshift_r(x[1], x[2], shift),
        __funnelshift_r(x[2], x[3], shift), __funnelshift_r(x[3], last, shift));
  }
  union {
    uint4 word;
    elem_t element[kElems];
  } v;
  v.word = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int e = 0; e < kElems; ++e) {
    if (first + e < dim) v.element[e] = row[first + e];
  }
  return v.word;
}

// The same of 16-bit elements by words alone: each that holds one of the row is read
// whole, with its other element, and no lane takes another way than its neighbours.
template <typename elem_t>
__device__ __forceinline__ uint4 gather_words(const elem_t* row, int first, int dim) {
  static_assert(sizeof(elem_t) == 2);
  const int count = min(dim - first, 8);  // elements
  const auto at = reinterpret_cast<unsigned long long>(row + first);
  const unsigned* const from = reinterpret_cast<const unsigned*>(at & ~3ull);
  const int skipped = at % 4 / 2;
  unsigned x[5], y[4];
#pragma unroll
  for (int n = 0; n < 5; ++n) x[n] = 2 * n < skipped + count ? from[n] : 0;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    y[n] = __funnelshift_r(x[n], x[n + 1], 16 * skipped);
    if (2 * n + 1 >= count) y[n] &= 2 * n < count ? 0xffff : 0;
  }
  return make_uint4(y[0], y[1], y[2], y[3]);
}

// A 16-byte vector and its elements.
template <typename elem_t> union vector_t {
  uint4 word;
  elem_t x[16 / sizeof(elem_t)];
};

// The elements of a row from `first` on, a multiple of the elements of a vector; zeros
// from `dim` on.
template <typename elem_t>
__device__ __forceinline__ vector_t<elem_t> load_vector(const elem_t* row, int first,
                                                        int dim) {
  constexpr int kElems = 16 / sizeof(elem_t);
  vector_t<elem_t> v;
  if (reinterpret_cast<unsigned long long>(row) % 16 == 0 && first + kElems <= dim) {
    v.word = *reinterpret_cast<const uint4*>(row + first);
  } else {
    v.word = gather(row, first, dim);
  }
  return v;
}

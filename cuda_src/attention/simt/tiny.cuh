// SPDX-License-Identifier: MIT
// Shared by the kernels for the tiniest entries, in which a thread has a whole row: its
// numbers, and loads and stores of them.
#pragma once

#include "attention/score/score.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(KEYS)
#error "HEAD_DIM, HEAD_DIM_V and KEYS come from the host"
#endif
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;  // padded with zeros
constexpr int kKeys = KEYS;                                 // the most keys
constexpr int kVector = 16 / sizeof(elem_t);                // elements of a vector
static_assert(kHeadDim % kVector == 0 && kHeadDimV % kVector == 0);

template <int kDim> using row_t = accum_t[kDim];

// Whether all rows of a matrix are whole vectors.
__device__ __forceinline__ bool has_vectors(const elem_t* x, index_t row_stride,
                                            index_t dim) {
  return is_aligned<elem_t, kVector>(x) && (row_stride | dim) % kVector == 0;
}

using elems_t = vector_t<elem_t, kVector>;

// Up to kVector numbers one by one: the first `count` at x, then zeros. Not inlined,
// which keeps kernels short; scatter is, since calls of it spill on sm_120.
__device__ __noinline__ elems_t gather(const elem_t* x, int count) {
  elems_t vector = {};
#pragma unroll
  for (int n = 0; n < kVector; ++n) {
    if (n < count) vector.element[n] = x[n];
  }
  return vector;
}
__device__ __forceinline__ void scatter(elem_t* x, index_t stride, elems_t vector,
                                        int count) {
#pragma unroll
  for (int n = 0; n < kVector; ++n) {
    if (n < count) x[n * stride] = vector.element[n];
  }
}

// The first `dim` numbers at x, then zeros.
template <bool kVectors, int kDim>
__device__ __forceinline__ void load_row(row_t<kDim>& row, const elem_t* x, int dim) {
#pragma unroll
  for (int col = 0; col < kDim; col += kVector) {
    elems_t vector = {};
    if (col < dim) {
      vector = kVectors ? load_vector<kVector>(x + col) : gather(x + col, dim - col);
    }
#pragma unroll
    for (int n = 0; n < kVector; ++n) row[col + n] = element_as<accum_t>(vector, n);
  }
}

// The first `num_rows` rows of a matrix, in flight together.
template <bool kVectors, int kDim>
__device__ __forceinline__ void load_rows(row_t<kDim> (&rows)[kKeys], const elem_t* x,
                                          index_t row_stride, index_t num_rows,
                                          int dim) {
#pragma unroll
  for (int n = 0; n < kKeys; ++n) {
    const bool exists = n < num_rows;
    load_row<kVectors>(rows[n], x + (exists ? n * row_stride : 0), exists ? dim : 0);
  }
}

// Stores the first `dim` numbers of a row, times `factor`.
template <int kDim>
__device__ __forceinline__ void store_row(elem_t* x, index_t col_stride,
                                          const row_t<kDim>& row, accum_t factor,
                                          int dim) {
  const bool as_vectors =
      col_stride == 1 && is_aligned<elem_t, kVector>(x) && dim % kVector == 0;
#pragma unroll
  for (int col = 0; col < kDim; col += kVector) {
    if (col >= dim) continue;
    accum_t values[kVector];
#pragma unroll
    for (int n = 0; n < kVector; ++n) values[n] = row[col + n] * factor;
    const elems_t vector = to_vector<elem_t, kVector>::of(values);
    if (as_vectors) {
      store_vector(x + col, vector);
    } else {
      scatter(x + col * col_stride, col_stride, vector, dim - col);
    }
  }
}

template <int kDim>
__device__ __forceinline__ accum_t dot(const row_t<kDim>& a, const row_t<kDim>& b) {
  accum_t sum = 0;
#pragma unroll
  for (int d = 0; d < kDim; ++d) sum += a[d] * b[d];
  return sum;
}

// sum += factor * x
template <int kDim>
__device__ __forceinline__ void add(row_t<kDim>& sum, accum_t factor,
                                    const row_t<kDim>& x) {
#pragma unroll
  for (int d = 0; d < kDim; ++d) sum[d] += factor * x[d];
}

// The weights of a row of scores, at most 1; m and l as everywhere.
__device__ __forceinline__ void weigh(accum_t (&s)[kKeys], accum_t& m, accum_t& l) {
  m = -infinity<accum_t>();
  l = 0;
#pragma unroll
  for (int j = 0; j < kKeys; ++j) m = larger(m, s[j]);
#pragma unroll
  for (int j = 0; j < kKeys; ++j) l += s[j] = weight(s[j], m);
}

// SPDX-License-Identifier: MIT
// attention_copy: copies a matrix with any strides to rows of whole 16-byte vectors.
//
// Grid       one thread per vector of the copy; neighbouring threads take one row, or
//            one column if neighbours in memory are of one column
// Memory     global: all once
// Limits     none
#include "copy/unaligned_load.cuh"
#include "common/strides.cuh"

#if !defined(ELEM_T) || !defined(ROW_DIMS) || !defined(NUM_THREADS)
#error "ELEM_T, ROW_DIMS and NUM_THREADS come from the host"
#endif
using elem_t = ELEM_T;
// A column index.
#ifdef LONG_AXES
using column_t = long long;
#else
using column_t = int;
#endif

// COPY_PARAMS of _attention/gpu/copy_config.py is the same struct on the host.
struct copy_params_t {
  long long num_rows, num_columns, column_stride;
  long long by_columns;  // neighbours in memory belong to one column
  axes_t<ROW_DIMS, 1> rows;
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    attention_copy(const elem_t* __restrict__ x, uint4* __restrict__ copy,
                   const __grid_constant__ copy_params_t params) {
  constexpr int kElems = 16 / sizeof(elem_t);
  const column_t num_columns = params.num_columns;
  const column_t num_vectors = (num_columns + kElems - 1) / kElems;
  const long long block = blockIdx.x + static_cast<long long>(gridDim.x) * blockIdx.y;
  const long long n = block * NUM_THREADS + threadIdx.x;
  if (n >= params.num_rows * num_vectors) return;
  const long long inner = params.by_columns ? params.num_rows : num_vectors;
  const long long outer_index = divide(n, inner), inner_index = n - outer_index * inner;
  const long long row = params.by_columns ? inner_index : outer_index;
  const column_t vector = params.by_columns ? outer_index : inner_index;
  const elem_t* const from = x + locate(params.rows, row).of[0];
  const column_t first = vector * kElems;
  uint4 word;
  if (params.column_stride == 1) {
    const column_t left = num_columns - first;
    if constexpr (sizeof(elem_t) == 2) {
      word = gather_words(from + first, 0, left < kElems ? int(left) : kElems);
    } else {
      word = gather(from, first, num_columns);
    }
  } else {
    union {
      uint4 word;
      elem_t element[kElems];
    } v;
    v.word = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      if (first + e < num_columns)
        v.element[e] = from[(first + e) * params.column_stride];
    }
    word = v.word;
  }
  copy[row * num_vectors + vector] = word;
}

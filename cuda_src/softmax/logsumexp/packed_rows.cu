// SPDX-License-Identifier: MIT
// softmax_logsumexp_span: log sum exp of short contiguous rows.
//
// Algorithm  As softmax_logsumexp_rows. Rows whose log would lose digits (one in
//            twelve, for four normal numbers each) go on a list, so that threads
//            process them in parallel instead of diverging.
// Grid       1-D; a block of kNumThreads takes kSpanRows rows at a time: a contiguous
//            span of memory, whatever the length of a row
// Tiles      the span in shared memory; one row per thread
// Memory     a once, in 16-byte vectors wherever the span starts; one number per row
// Numbers    as softmax_logsumexp_rows
// Limits     contiguous rows of IN_REGISTERS elements; no weights, no mask
#include "softmax/detail/row_log.cuh"
#include "softmax/detail/packed_rows.cuh"

constexpr int kLength = IN_REGISTERS;  // of a row
static_assert(kLanes == 1 && OUTER_AXES == 1 && REDUCED_AXES == 1);

extern __shared__ uint4 memory[];

// The sum of this thread's row; called by all lanes of a warp.
__device__ __forceinline__ total_t sum_of(const a_t* a, const roots_t<acc_t>& roots) {
  acc_t value[IN_REGISTERS];
#pragma unroll
  for (int j = 0; j < IN_REGISTERS; ++j) value[j] = to<acc_t>(a[j]);
  total_t sum;
  sum.template take_in<IN_REGISTERS, 1>([&](int j) { return value[j]; }, roots);
  return sum;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, MIN_BLOCKS)
    softmax_logsumexp_span(const a_t* a,
                           const void*,  // no weights,
                           const void*,  // and no mask
                           out_t* out,
                           out_t* sign,  // written if layout.returns_sign
                           const __grid_constant__ layout_t layout) {
  short* const doubtful = reinterpret_cast<short*>(memory + kSpanBytes<a_t> / 16);
  __shared__ int num_doubtful;
  const roots_t<acc_t> roots;
  const long long step = (long long)gridDim.x * kSpanRows;
  for (long long at = (long long)blockIdx.x * kSpanRows; at < layout.num_rows;
       at += step) {
    const long long rows_left = layout.num_rows - at;
    const int rows = rows_left < kSpanRows ? int(rows_left) : kSpanRows;
    const span_t<a_t> from(const_cast<a_t*>(a) + at * kLength, rows * kLength, memory);
    from.load();
    if (threadIdx.x == 0) num_doubtful = 0;
    wait_for_copies();
    __syncthreads();
#pragma unroll 1
    for (int of_block = 0; of_block < kSpanRows; of_block += kRowsPerBlock) {
      // Beyond the last row this computes on garbage that is not stored.
      const int row = of_block + row_of_group();
      const total_t sum = sum_of(from.shared + row * kLength, roots);
      if (row >= rows) continue;
      if (sum.is_doubtful()) {
        doubtful[atomicAdd(&num_doubtful, 1)] = row;
      } else {
        store(layout, at + row, sum, sum.log(), out, sign);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_doubtful; i += kNumThreads) {
      const int row = doubtful[i];
      total_t finite;
      finite.top = 0;
      const double log = careful_log(from.shared + row * kLength, kLength);
      store(layout, at + row, finite, log, out, sign);
    }
    // All threads have read the span and the list before the next ones load.
    __syncthreads();
  }
}

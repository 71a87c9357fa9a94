// SPDX-License-Identifier: MIT
// softmax_span: short contiguous rows, many at a time.
//
// Algorithm  As softmax_safe, on rows held in registers.
// Grid       1-D; a block of kNumThreads takes kSpanRows rows at a time: a contiguous
//            span of memory, whatever the length of a row
// Tiles      the span in shared memory; a row in kLanes threads, IN_REGISTERS elements
// each Memory     x and out once, in 16-byte vectors wherever the span starts; a row of
// 7
//            numbers alone would leave most of each access unused
//            shared: the spans of x and of out, kSpanRows * kLanes * IN_REGISTERS
//            elements and two vectors each
// Numbers    as softmax_tiled
// Limits     contiguous rows of at most kLanes * IN_REGISTERS elements in x and in out;
// no mask
#include "softmax/detail/packed_rows.cuh"
#include "softmax/detail/row_exp.cuh"
#include "softmax/detail/exp_policy.cuh"

// A scale takes registers as well.
constexpr int kMinBlocks = IN_REGISTERS * sizeof(acc_t) <= (SCALED ? 48 : 64) ? 8 : 5;
static_assert(!kHasWhere && OUTER_AXES == 1 && REDUCED_AXES == 1);

extern __shared__ uint4 memory[];

// One row from shared memory to shared memory, starting at a lane's first element, with
// `left` elements from there on.
__device__ __forceinline__ void softmax_row(const x_t* x, out_t* out, int left,
                                            const layout_t& layout) {
  acc_t value[IN_REGISTERS];
  acc_t m = -infinity<acc_t>();
  const auto has = [&](int j) { return has_element(j, left); };
#pragma unroll
  for (int j = 0; j < IN_REGISTERS; ++j) {
    value[j] = -infinity<acc_t>();
    if (has(j)) {
      value[j] = to<acc_t>(x[j * kLanes]);
      m = largest_t()(m, score_t(value[j], layout).key);
    }
  }
  const acc_t largest = warp_reduce<kLanes>(m, largest_t());
  m = shift_by(largest);

  const exp_of_row_t exp_of_row(m, exp_unit_t(layout));
  part_t sum = exp_of_row.none();
#pragma unroll
  for (int j = 0; j < IN_REGISTERS; ++j) {
    const score_t s =
        !kScaled || has(j) ? score_t(value[j], layout) : score_t::absent(layout);
    const acc_t e = exp_of_row(s);
    exp_of_row.add(sum, e);
    if (!kLog) value[j] = e;  // softmax needs nothing else of x
  }
  sum = exp_of_row.sum_of(sum);
  const finish_t finish(m, total(warp_reduce<kLanes>(sum, plus_t()), largest));
#pragma unroll
  for (int j = 0; j < IN_REGISTERS; ++j) {
    if (has(j)) {
      const acc_t y =
          kLog ? finish(score_t(value[j], layout)) : value[j] * finish.inverse;
      out[j * kLanes] = to<out_t>(y);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    softmax_span(const x_t* x, const bool*, out_t* out,
                 const __grid_constant__ layout_t layout) {
  const int length = int(layout.row_length);
  const long long step = (long long)gridDim.x * kSpanRows;
  void* const second = memory + kSpanBytes<x_t> / 16;
  for (long long at = (long long)blockIdx.x * kSpanRows; at < layout.num_rows;
       at += step) {
    const long long rows_left = layout.num_rows - at;
    const int rows = rows_left < kSpanRows ? int(rows_left) : kSpanRows;
    const span_t<x_t> from(const_cast<x_t*>(x) + at * length, rows * length, memory);
    const span_t<out_t> onto(out + at * length, rows * length, second);
    from.load();
    wait_for_copies();
    __syncthreads();
#pragma unroll 1
    for (int of_block = 0; of_block < kSpanRows; of_block += kRowsPerBlock) {
      const int row = of_block + row_of_group();
      // Beyond the last row this computes on garbage that is not stored.
      const int first = row * length + lane();
      softmax_row(from.shared + first, onto.shared + first, length - lane(), layout);
    }
    __syncthreads();
    onto.store();
    // All threads have read x and out before the next span loads.
    __syncthreads();
  }
}

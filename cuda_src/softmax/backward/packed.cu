// SPDX-License-Identifier: MIT
// softmax_vjp_span: gradients of short contiguous rows, many at a time.
//
// Algorithm  As softmax_vjp, on rows held in registers.
// Grid       1-D; a block of kNumThreads takes kSpanRows rows at a time: a contiguous
//            span of memory, whatever the length of a row
// Tiles      the spans of y, dy and dx in shared memory; a row in kLanes threads,
// IN_REGISTERS
//            elements each
// Memory     y, dy and dx once, in 16-byte vectors wherever the span starts
// Numbers    as softmax_vjp_tiled
// Limits     rows of at most kLanes * IN_REGISTERS elements, contiguous in y, dy and dx
#include "softmax/detail/packed_rows.cuh"
#include "softmax/detail/backward.cuh"

// 8 blocks leave 64 registers per thread.
constexpr int kMinBlocks = IN_REGISTERS * sizeof(acc_t) <= 32 ? 8 : 5;
static_assert(OUTER_AXES == 1 && REDUCED_AXES == 1);

extern __shared__ uint4 memory[];

// One row from shared memory to shared memory, starting at a lane's first element, with
// `left` elements from there on.
__device__ __forceinline__ void vjp_row(const y_t* y, const dy_t* dy, out_t* dx,
                                        int left, const layout_t& layout) {
  acc_t p[IN_REGISTERS], g[IN_REGISTERS];
  sum_t sum;
#pragma unroll
  for (int j = 0; j < IN_REGISTERS; ++j) {
    p[j] = g[j] = 0;
    if (has_element(j, left)) {
      p[j] = to<acc_t>(y[j * kLanes]);
      g[j] = to<acc_t>(dy[j * kLanes]);
      sum += kLog ? double(g[j]) : product(p[j], g[j]);
    }
  }
  const gradient_t gradient(warp_reduce<kLanes>(sum.value, plus_t()), layout);
#pragma unroll
  for (int j = 0; j < IN_REGISTERS; ++j) {
    if (has_element(j, left)) dx[j * kLanes] = to<out_t>(gradient(p[j], g[j]));
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    softmax_vjp_span(const y_t* y, const dy_t* dy, out_t* dx,
                     const __grid_constant__ layout_t layout) {
  const int length = int(layout.row_length);
  const long long step = (long long)gridDim.x * kSpanRows;
  void* const second = memory + kSpanBytes<y_t> / 16;
  void* const third = memory + (kSpanBytes<y_t> + kSpanBytes<dy_t>) / 16;
  for (long long at = (long long)blockIdx.x * kSpanRows; at < layout.num_rows;
       at += step) {
    const long long rows_left = layout.num_rows - at;
    const int size = (rows_left < kSpanRows ? int(rows_left) : kSpanRows) * length;
    const span_t<y_t> from_y(const_cast<y_t*>(y) + at * length, size, memory);
    const span_t<dy_t> from_dy(const_cast<dy_t*>(dy) + at * length, size, second);
    const span_t<out_t> onto(dx + at * length, size, third);
    from_y.load();
    from_dy.load();
    wait_for_copies();
    __syncthreads();
#pragma unroll 1
    for (int of_block = 0; of_block < kSpanRows; of_block += kRowsPerBlock) {
      // Beyond the last row this computes on garbage that is not stored.
      const int first = (of_block + row_of_group()) * length + lane();
      vjp_row(from_y.shared + first, from_dy.shared + first, onto.shared + first,
              length - lane(), layout);
    }
    __syncthreads();
    onto.store();
    // All threads have read the spans before the next ones load.
    __syncthreads();
  }
}

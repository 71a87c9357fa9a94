// SPDX-License-Identifier: MIT
// softmax_logsumexp_single: log sum exp of rows of one element, which is that element.
//
// Grid       1-D; a block of kNumThreads takes kBlockRows rows at a time
// Tiles      a thread has kRows rows, a block's threads apart
// Memory     a once, one number per row is written; any strides
// Numbers    exact
// Limits     rows of one element; no weights, no mask
#include "softmax/detail/thread_group.cuh"
#include "softmax/detail/log_params.cuh"

constexpr int kRows = IN_REGISTERS, kBlockRows = kNumThreads * kRows;
static_assert(kLanes == 1);

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_logsumexp_single(const a_t* a,
                             const void*,  // no weights,
                             const void*,  // and no mask
                             out_t* out,
                             out_t* sign,  // written if layout.returns_sign
                             const __grid_constant__ layout_t layout) {
  const long long step = (long long)gridDim.x * kBlockRows;
  for (long long at = (long long)blockIdx.x * kBlockRows + threadIdx.x;
       at < layout.num_rows; at += step) {
    acc_t score[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const long long row = at + k * kNumThreads;
      if (row < layout.num_rows) {
        score[k] = to<acc_t>(a[locate(layout.outer, row).of[kA]]);
      }
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const long long row = at + k * kNumThreads;
      if (row >= layout.num_rows) continue;
      const auto place = locate(layout.outer, row);
      out[place.of[kOut]] = to<out_t>(score[k] + acc_t(0));  // not -0: log(1) is 0
      if (layout.returns_sign) {
        sign[place.of[kSign]] = to<out_t>(sign_of(score[k]));
      }
    }
  }
}

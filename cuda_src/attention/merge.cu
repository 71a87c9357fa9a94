// SPDX-License-Identifier: MIT
// attention_merge: results over parts of the keys into the result over all of them.
//
// Algorithm  lse = log sum_p exp(lse_p),  out = sum_p exp(lse_p - lse) out_p.
//            A part with lse -inf saw no key and adds nothing, not even a NaN.
// Grid       a warp a row of out; lanes across its columns
// Memory     global: outs and out once, lses twice; any strides
// Numbers    all in accum_t
// Limits     none
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/strides.cuh"

#ifndef ELEM_T
#error "ELEM_T, LSE_T, ACCUM_T, ROW_DIMS and NUM_THREADS come from the host"
#endif
using elem_t = ELEM_T;  // of outs
using lse_t = LSE_T;
using accum_t = ACCUM_T;
#ifdef OUT_T
using out_t = OUT_T;
#else
using out_t = elem_t;
#endif
constexpr int kRowDims = ROW_DIMS, kNumThreads = NUM_THREADS;

enum { kOuts, kLses, kOut, kArrays };

// Mirrored by merge_params_dtype() in _attention_kernels.py.
struct merge_params_t {
  long long num_rows, num_parts, head_dim_v;
  long long outs_part, outs_col, lses_part, out_col;  // strides
  axes_t<kRowDims, kArrays> rows;
};

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_merge(const elem_t* __restrict__ outs,  // (parts, rows, head_dim_v)
                    const lse_t* __restrict__ lses,   // (parts, rows)
                    out_t* __restrict__ out,          // (rows, head_dim_v)
                    lse_t* __restrict__ lse,          // (rows), contiguous, or null
                    const __grid_constant__ merge_params_t params) {
  const long long block = blockIdx.x + static_cast<long long>(gridDim.x) * blockIdx.y;
  const long long row = (block * kNumThreads + threadIdx.x) / kWarpSize;
  if (row >= params.num_rows) return;
  const auto offsets = locate(params.rows, row);
  const int lane = threadIdx.x % kWarpSize;
  const lse_t* row_lses = lses + offsets.of[kLses];

  auto lse_of = [&](long long part) {
    return part < params.num_parts ? to<accum_t>(row_lses[part * params.lses_part])
                                   : -infinity<accum_t>();
  };
  // A lane has every 32nd part; sums take them one by one, in order.
  accum_t m = -infinity<accum_t>();
  for (long long first = 0; first < params.num_parts; first += kWarpSize) {
    const accum_t x = lse_of(first + lane);
    m = x > m ? x : m;
  }
  m = warp_reduce<kWarpSize>(m, [](accum_t a, accum_t b) { return a > b ? a : b; });

  accum_t l = 0;
  for (long long column = lane; column - lane < params.head_dim_v;
       column += kWarpSize) {
    const bool exists = column < params.head_dim_v;
    const elem_t* x =
        outs + offsets.of[kOuts] + (exists ? column : 0) * params.outs_col;
    accum_t sum = 0;
    l = 0;
    for (long long first = 0; first < params.num_parts; first += kWarpSize) {
      const accum_t own_lse = lse_of(first + lane), own = exp_diff(own_lse, m);
      const unsigned seen = __ballot_sync(kFullMask, own_lse != -infinity<accum_t>());
#pragma unroll 8
      for (int n = 0; n < kWarpSize; ++n) {
        const bool counts = seen >> n & 1;
        const accum_t weight = __shfl_sync(kFullMask, own, n);
        l += weight;
        sum += weight *
               (counts ? to<accum_t>(x[(first + n) * params.outs_part]) : accum_t(0));
      }
    }
    if (exists) {
      out[offsets.of[kOut] + column * params.out_col] =
          to<out_t>(l == 0 ? accum_t(0) : sum / l);
    }
  }
  if (lse != nullptr && lane == 0) {
    lse[row] = to<lse_t>(l == 0 ? -infinity<accum_t>() : m + log_of(l));
  }
}

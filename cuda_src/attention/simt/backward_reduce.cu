// SPDX-License-Identifier: MIT
// attention_vjp_sum: sums the terms of a gradient that several blocks computed.
//
// Algorithm  out = sum of terms over some axes
// Grid       kLanes threads per sum: 1, 8, 32 or a whole block, more where a sum has
//            more terms and sums are fewer
// Memory     global: each term once
// Numbers    sums in float64, in a fixed order: the same bits in every run
// Limits     none
#include "common/reduce.cuh"
#include "common/strides.cuh"
#include "common/types.cuh"

#if !defined(ACCUM_T) || !defined(GRAD_T) || !defined(AXES) || !defined(LANES) || \
    !defined(NUM_THREADS)
#error "ACCUM_T, GRAD_T, AXES, LANES and NUM_THREADS come from the host"
#endif
using accum_t = ACCUM_T;
using grad_t = GRAD_T;
constexpr int kAxes = AXES, kLanes = LANES, kNumThreads = NUM_THREADS;
constexpr int kAtOnce = 4;  // loads in flight

// SUM of _attention/gpu/gradient_layout.py is the same struct on the host.
struct sum_t {
  long long num_sums, num_terms;
  axes_t<kAxes, 2> sums;   // offsets among the terms, and in out
  axes_t<kAxes, 1> terms;  // offsets among the terms
};

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_vjp_sum(const accum_t* __restrict__ terms, grad_t* __restrict__ out,
                      const __grid_constant__ sum_t sum) {
  const long long block = blockIdx.x + (long long)gridDim.x * blockIdx.y;
  const long long index = (block * kNumThreads + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes;
  const bool exists = index < sum.num_sums;
  const auto at = locate(sum.sums, exists ? index : 0);
  double total = 0;
#pragma unroll 1
  for (long long first = lane; first < sum.num_terms; first += kAtOnce * kLanes) {
    accum_t x[kAtOnce] = {};
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const long long t = first + n * kLanes;
      if (t < sum.num_terms) x[n] = terms[at.of[0] + locate(sum.terms, t).of[0]];
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) total += static_cast<double>(x[n]);
  }
  total = group_reduce<kLanes>(total, [](double a, double b) { return a + b; });
  if (exists && lane == 0) out[at.of[1]] = to<grad_t>(total);
}

// SPDX-License-Identifier: MIT
// attention_vjp_dscore_finish: the gradient of an array from the words of its elements.
//
// Algorithm  out = high * unit + low * unit / 2^bits, as backward_dscore.cu adds them;
//            what its flags say if terms were not finite
// Grid       1-D, a thread an element
// Memory     global: words and flags once
// Numbers    the sum of both words in float64
// Limits     none
#include "common/math.cuh"
#include "common/types.cuh"

#if !defined(GRAD_T) || !defined(NUM_THREADS)
#error "GRAD_T and NUM_THREADS come from the host"
#endif
using grad_t = GRAD_T;

extern "C" __global__ void __launch_bounds__(NUM_THREADS) attention_vjp_dscore_finish(
    const long long* __restrict__ high, const long long* __restrict__ low,
    const unsigned* __restrict__ flags,
    const unsigned long long* __restrict__ largest,  // of this array
    grad_t* __restrict__ out, const long long size, const long long bits) {
  const long long block = blockIdx.x + static_cast<long long>(gridDim.x) * blockIdx.y;
  const long long n = block * NUM_THREADS + threadIdx.x;
  if (n >= size) return;
  const double top = __longlong_as_double(static_cast<long long>(*largest));
  double sum = 0;
  if (top > 0) {
    const int unit = ilogb(top) + 1 - static_cast<int>(bits);
    sum = ldexp(static_cast<double>(high[n]), unit) +
          ldexp(static_cast<double>(low[n]), unit - static_cast<int>(bits));
  }
  const double infinite = infinity<double>();
  if (flags[n] & 1) sum += infinite;
  if (flags[n] & 2) sum -= infinite;
  if (flags[n] & 4) sum = nan_value<double>();
  out[n] = to<grad_t>(sum);
}

// SPDX-License-Identifier: MIT
// exponentials: how far an exponential of the kernels is from exp, over all floats.
//
// Algorithm  for every bit pattern x of a float: y = EXPONENTIAL(x) beside the double
//            exp(x), whose own error is 2^-29 of the units that are counted; kept are
//            the largest error in units in the last place of y, and its x
// Grid       1-D, any size; a thread takes every so many-th pattern
// Memory     two words
// Numbers    inf counts as 2^128. Below twice the smallest normal number there are no
//            units to count, since kernels flush to zero: y may be anything from 0 to
//            there. A NaN must stay one.
// Limits     functions of one float; of doubles there are too many, see
//            exponentials_of_doubles
//
// Parameters EXPONENTIAL   the function: of common/math.cuh, or one of those below
//            ACC_T         float, for softmax/detail/scaled_sum.cuh
#include "common/math.cuh"
#include "softmax/detail/scaled_sum.cuh"

#ifndef EXPONENTIAL
#error "the parameters above come from the host"
#endif

using word_t = unsigned long long;
constexpr int kNumThreads = 256;
constexpr double kOverflow = 0x1p128, kSmall = 0x1p-125;

// The exponential within a sum of one term, l * 2^shift, before any rounding to float.
template <bool kIsCoarse> __device__ __forceinline__ double sum_of_one(float x) {
  using sum_t = power_sum_t<float, kIsCoarse>;
  if (!(abs_of(x) <= sum_t::kLargestTop)) return exp_of(x);  // not by way of this
  sum_t sum;
  sum.see(x);
  sum.template add<1>([x](int) { return x; });
  return ldexp(sum.l.value, sum.shift);
}
__device__ __forceinline__ double exp_in_sum(float x) { return sum_of_one<false>(x); }
__device__ __forceinline__ double exp_in_sum_fast(float x) {
  return sum_of_one<true>(x);
}

// |y - exp(x)| in units in the last place; infinity where y is not even of the kind.
__device__ __forceinline__ float error_of(float x) {
  const double result = EXPONENTIAL(x);
  if (is_nan(x) || is_nan(result)) {
    return is_nan(x) && is_nan(result) ? 0.0f : infinity<float>();
  }
  const double y = fmin(result, kOverflow);
  const double exact = fmin(exp(double(x)), kOverflow);
  if (exact < kSmall) return 0 <= y && y <= kSmall ? 0.0f : infinity<float>();
  // 2^e of exact = 2^e * [1, 2), and from there 23 bits down.
  const word_t power = static_cast<word_t>(__double_as_longlong(exact)) >> 52 << 52;
  const double unit = __longlong_as_double(power) * 0x1p-23;
  return float(abs_of(y - exact) / unit);
}

// worst[0] of arguments up to 0, as those of softmax are, worst[1] of all others: in
// the upper half of the word the error, whose bits sort as it does, in the lower half
// x.
extern "C" __global__ void __launch_bounds__(kNumThreads) exponentials(word_t* worst) {
  word_t found[2] = {0, 0};
  const word_t step = word_t(gridDim.x) * kNumThreads;
  for (word_t bits = word_t(blockIdx.x) * kNumThreads + threadIdx.x; bits < 1ull << 32;
       bits += step) {
    const float x = __uint_as_float(static_cast<unsigned>(bits));
    const word_t error = word_t(__float_as_uint(error_of(x))) << 32 | bits;
    if (x <= 0) {
      found[0] = error > found[0] ? error : found[0];
    } else {
      found[1] = error > found[1] ? error : found[1];
    }
  }
  atomicMax(&worst[0], found[0]);
  atomicMax(&worst[1], found[1]);
}

// y_i = exp_of(x_i), for the host to judge.
extern "C" __global__ void __launch_bounds__(kNumThreads)
    exponentials_of_doubles(const double* x, double* y, long long size) {
  const long long i = static_cast<long long>(blockIdx.x) * kNumThreads + threadIdx.x;
  if (i < size) y[i] = exp_of(x[i]);
}

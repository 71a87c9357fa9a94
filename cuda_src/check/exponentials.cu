// SPDX-License-Identifier: MIT
// exponentials: the error of an exponential of the kernels against exp, over all
// floats.
//
// Algorithm  for every bit pattern x of a float: compare y = EXPONENTIAL(x) with exp(x)
//            in double, which is accurate to 2^-29 of the ulp that are counted; keep
//            the largest error in ulp of y, and its x
// Grid       1-D, any size; threads take patterns in a fixed stride
// Memory     two words
// Numbers    inf counts as 2^128. Below twice the smallest normal number errors are not
//            counted, since kernels flush to zero: y may be anything from 0 up to that
//            number. A NaN must stay NaN.
// Limits     functions of one float; for doubles, which are too many, see
//            exponentials_of_doubles
//
// Parameters EXPONENTIAL   the function: from common/math.cuh, or one of those below
//            ACC_T         float, for softmax/detail/scaled_sum.cuh
#include "common/math.cuh"
#include "softmax/detail/scaled_sum.cuh"

#ifndef EXPONENTIAL
#error "the parameters above come from the host"
#endif

using word_t = unsigned long long;
constexpr int kNumThreads = 256;
constexpr double kOverflow = 0x1p128, kSmall = 0x1p-125;

// The exponential inside a sum of one term, l * 2^shift, before any rounding to float.
template <bool kIsCoarse> __device__ __forceinline__ double sum_of_one(float x) {
  using sum_t = power_sum_t<float, kIsCoarse>;
  if (!(abs_of(x) <= sum_t::kLargestTop)) return exp_of(x);  // the sum does not take it
  sum_t sum;
  sum.see(x);
  sum.template add<1>([x](int) { return x; });
  return ldexp(sum.l.value, sum.shift);
}
__device__ __forceinline__ double exp_in_sum(float x) { return sum_of_one<false>(x); }
__device__ __forceinline__ double exp_in_sum_fast(float x) {
  return sum_of_one<true>(x);
}

// |y - exp(x)| in ulp; infinity if y is of another kind (NaN, sign).
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

// worst[0] for arguments up to 0, as in softmax, worst[1] for all others: the upper
// half of the word has the error, whose bits sort like it, the lower half x.
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

// y_i = exp_of(x_i), compared by the host.
extern "C" __global__ void __launch_bounds__(kNumThreads)
    exponentials_of_doubles(const double* x, double* y, long long size) {
  const long long i = static_cast<long long>(blockIdx.x) * kNumThreads + threadIdx.x;
  if (i < size) y[i] = exp_of(x[i]);
}

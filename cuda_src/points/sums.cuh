// SPDX-License-Identifier: MIT
// Sums of many terms: exponentials, totals with rounding errors, sums over lanes.
#pragma once

#include "common/math.cuh"
#include "common/reduce.cuh"
#include "ptx/packed.cuh"

// total += part, with the rounding error kept in rest (Kahan).
__device__ __forceinline__ void add(float& total, float& rest, float part) {
  const float y = part - rest;
  const float t = total + y;
  rest = (t - total) - y;
  total = t;
}
__device__ __forceinline__ void add(double& total, double& rest, double part) {
  const double y = __dadd_rn(part, -rest);
  const double t = __dadd_rn(total, y);
  rest = __dadd_rn(__dadd_rn(t, -total), -y);
  total = t;
}

// 2^t by arithmetic: t = n + r with r in [-1/2, 1/2] (Cody and Waite), a polynomial for
// 2^r (relative error 1e-7), and n added to the exponent. Valid for t < 127; below -126
// it returns 2^-126.
__device__ __forceinline__ float exp2_polynomial(float t) {
  constexpr float kToInteger = 12582912.f;  // 1.5 * 2^23
  t = fmaxf(t, -126.f);
  const float m = t + kToInteger;
  const float r = t - (m - kToInteger);
  float p = 1.326472731307149e-3f;
  p = fmaf(p, r, 9.671512991189957e-3f);
  p = fmaf(p, r, 5.550733581185341e-2f);
  p = fmaf(p, r, 2.4022242426872253e-1f);
  p = fmaf(p, r, 6.931470036506653e-1f);
  p = fmaf(p, r, 1.f);
  return __int_as_float((__float_as_int(m) << 23) + __float_as_int(p));
}

// Sums each of kCount values over a group of 2 kOffset lanes, kCount a power of two up
// to that; lane n of the group ends with value n kCount / (2 kOffset).
template <int kOffset, typename T, int kCount>
__device__ __forceinline__ T scattered_sums(const T (&values)[kCount], int lane) {
  if constexpr (kOffset == 0) {
    return values[0];
  } else if constexpr (kCount == 1) {
    const T sum[1] = {values[0] + shuffle_xor(values[0], kOffset)};
    return scattered_sums<kOffset / 2>(sum, lane);
  } else {
    T half[kCount / 2];
    const bool is_upper = lane & kOffset;
#pragma unroll
    for (int k = 0; k < kCount / 2; ++k) {
      const T kept = is_upper ? values[k + kCount / 2] : values[k];
      const T sent = is_upper ? values[k] : values[k + kCount / 2];
      half[k] = kept + shuffle_xor(sent, kOffset);
    }
    return scattered_sums<kOffset / 2>(half, lane);
  }
}

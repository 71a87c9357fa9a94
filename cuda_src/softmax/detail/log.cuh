// SPDX-License-Identifier: MIT
// The log of a sum in two parts.
#pragma once

#include "common/math.cuh"

namespace detail {

// The exponent k of l = 2^k f with sqrt(1/2) <= f < sqrt(2), and f.
__device__ __forceinline__ int power_of(float l, float& f) {
  const int k = (__float_as_int(l) - 0x3f3504f3) >> 23;
  f = __int_as_float(__float_as_int(l) - (k << 23));
  return k;
}
__device__ __forceinline__ int power_of(double l, double& f) {
  const int k = (__double2hiint(l) - 0x3fe6a09e) >> 20;
  f = __hiloint2double(__double2hiint(l) - (k << 20), __double2loint(l));
  return k;
}

}  // namespace detail

// log(l) as k log(2) + log(f), with an error no larger than that of log(f), whose
// magnitude is below 0.35. Half an ulp of a log near 8 would be four ulp near 1: with
// the roundings that follow, more than the error bound of log_softmax.
template <typename T> __device__ __forceinline__ pair_t<T> log_in_parts(T l) {
  // The leading digits of log(2), so few that their product with k is exact.
  constexpr T kHigh = sizeof(T) == 4 ? T(0x1.62ep-1) : T(0x1.62e42feep-1);
  constexpr T kLow = T(sizeof(T) == 4 ? kLn2 - double(kHigh) : 1.9082149292705877e-10);
  T f;
  const int k = detail::power_of(l, f);
  const T log_of_f = log_of(f);
  if (!is_finite(l)) return {l, T(0)};
  if (l == 0) return {-infinity<T>(), T(0)};
  return {T(k) * kHigh, fma_of(T(k), kLow, log_of_f)};
}

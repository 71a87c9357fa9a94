// SPDX-License-Identifier: MIT
// The kernels of points: K = 2^exponent(q) factor(q) of q = scale d^2. The scale is
// chosen so that the exponent needs no constant; the host has a table of it.
//   gaussian, exponential  2^-q, 2^-sqrt(q)
//   matern32, matern52     Matern of smoothness 3/2 and 5/2, with the exponent above
//   cauchy, inverse_multiquadric, energy   1 / (1 + q), 1 / sqrt(1 + q), -sqrt(q)
//   the others             derivatives, summed by the gradients of those above
// kHasExponent: K vanishes far away, so tiles may be skipped. kHasFactor: the factor is
// not 1. kIsSingular: the factor is unbounded near q = 0, and defined as 0 there.
#pragma once

#include "common/math.cuh"

namespace kernels {

__device__ __forceinline__ float root(float q) { return sqrtf(q); }
__device__ __forceinline__ double root(double q) { return sqrt(q); }
// 1 / sqrt(q), and 0 for q = 0.
__device__ __forceinline__ float inverse_root(float q) {
  return q > 0 ? 1 / sqrtf(q) : 0.f;
}
__device__ __forceinline__ double inverse_root(double q) {
  return q > 0 ? 1 / sqrt(q) : 0.;
}

// sqrt(q) in a factor of 2^-sqrt(q): infinity times 0 would be NaN, not 0.
template <typename T> __device__ __forceinline__ T finite_root(T q) {
  const T r = root(q), largest = T(1e18);  // whose square is finite
  return r < largest ? r : largest;
}

struct gaussian {
  static constexpr bool kHasExponent = true, kIsRoot = false;
  static constexpr bool kHasFactor = false, kIsSingular = false;
  template <typename T> static __device__ __forceinline__ T factor(T) { return 1; }
};

struct exponential {
  static constexpr bool kHasExponent = true, kIsRoot = true;
  static constexpr bool kHasFactor = false, kIsSingular = false;
  template <typename T> static __device__ __forceinline__ T factor(T) { return 1; }
};

struct matern32 {
  static constexpr bool kHasExponent = true, kIsRoot = true;
  static constexpr bool kHasFactor = true, kIsSingular = false;
  template <typename T> static __device__ __forceinline__ T factor(T q) {
    return 1 + T(kLn2) * finite_root(q);
  }
};

struct matern52 {
  static constexpr bool kHasExponent = true, kIsRoot = true;
  static constexpr bool kHasFactor = true, kIsSingular = false;
  template <typename T> static __device__ __forceinline__ T factor(T q) {
    const T a = T(kLn2) * finite_root(q);
    return 1 + a + a * a * T(1. / 3);
  }
};

struct cauchy {
  static constexpr bool kHasExponent = false, kIsRoot = false;
  static constexpr bool kHasFactor = true, kIsSingular = false;
  template <typename T> static __device__ __forceinline__ T factor(T q) {
    return 1 / (1 + q);
  }
};

struct inverse_multiquadric {
  static constexpr bool kHasExponent = false, kIsRoot = false;
  static constexpr bool kHasFactor = true, kIsSingular = false;
  template <typename T> static __device__ __forceinline__ T factor(T q) {
    return 1 / root(1 + q);
  }
};

struct energy {
  static constexpr bool kHasExponent = false, kIsRoot = false;
  static constexpr bool kHasFactor = true, kIsSingular = false;
  template <typename T> static __device__ __forceinline__ T factor(T q) {
    return -root(q);
  }
};

struct laplacian_slope {
  static constexpr bool kHasExponent = true, kIsRoot = true;
  static constexpr bool kHasFactor = true, kIsSingular = true;
  template <typename T> static __device__ __forceinline__ T factor(T q) {
    return T(kLog2e) * inverse_root(q);
  }
};

struct cauchy_slope {
  static constexpr bool kHasExponent = false, kIsRoot = false;
  static constexpr bool kHasFactor = true, kIsSingular = false;
  template <typename T> static __device__ __forceinline__ T factor(T q) {
    return 1 / ((1 + q) * (1 + q));
  }
};

struct inverse_multiquadric_slope {
  static constexpr bool kHasExponent = false, kIsRoot = false;
  static constexpr bool kHasFactor = true, kIsSingular = false;
  template <typename T> static __device__ __forceinline__ T factor(T q) {
    return 1 / ((1 + q) * root(1 + q));
  }
};

struct energy_slope {
  static constexpr bool kHasExponent = false, kIsRoot = false;
  static constexpr bool kHasFactor = true, kIsSingular = true;
  template <typename T> static __device__ __forceinline__ T factor(T q) {
    return inverse_root(q);
  }
};

}  // namespace kernels

using kernel_t = kernels::KERNEL;

// rest + exponent(scale d2)
template <typename T> __device__ __forceinline__ T score_of(T d2, T scale, T rest) {
  if constexpr (!kernel_t::kHasExponent) return rest;
  if constexpr (kernel_t::kIsRoot) return rest - kernels::root(scale * d2);
  return fma_of(-scale, d2, rest);
}

// An upper bound of log2 K for pairs at a distance of at least q.
__device__ __forceinline__ float log2_bound(float q) {
  if constexpr (!kernel_t::kHasExponent) return 0;
  if constexpr (kernel_t::kIsSingular) {
    if (q == 0) return infinity<float>();
  }
  const float exponent = kernel_t::kIsRoot ? -kernels::root(q) : -q;
  return kernel_t::kHasFactor ? exponent + log2f(kernel_t::factor(q)) : exponent;
}

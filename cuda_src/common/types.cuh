// SPDX-License-Identifier: MIT
// Element types of arrays, and to<T>(x), the only conversion between them.
//
// float16 and bfloat16 are structs of their bits, so that no CUDA header is needed and
// no 16-bit arithmetic happens unnoticed.
#pragma once

// Whether the host defines an option, as 1. An option that is defined inserts a comma.
#define IS_GIVEN(name) IS_GIVEN_AS(name)
#define IS_GIVEN_AS(value) IS_GIVEN_BY(GIVEN_##value)
#define IS_GIVEN_BY(comma) IS_GIVEN_SECOND(comma true, false, )
#define IS_GIVEN_SECOND(first, second, ...) second
#define GIVEN_1 ,

#include "ptx/convert.cuh"

struct half_t {
  unsigned short bits;
};

struct bfloat16_t {
  unsigned short bits;
};

namespace detail {

template <typename To> struct convert {
  template <typename From> static __device__ __forceinline__ To from(From x) {
    return static_cast<To>(x);
  }
  static __device__ __forceinline__ To from(half_t x) {
    return static_cast<To>(ptx::f32_from_f16(x.bits));
  }
  static __device__ __forceinline__ To from(bfloat16_t x) {
    return static_cast<To>(__uint_as_float(unsigned(x.bits) << 16));
  }
};

template <> struct convert<half_t> {
  static __device__ __forceinline__ half_t from(half_t x) { return x; }
  static __device__ __forceinline__ half_t from(float x) {
    return {ptx::f16_from_f32(x)};
  }
  static __device__ __forceinline__ half_t from(double x) {
    return {ptx::f16_from_f64(x)};
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
template <> struct convert<bfloat16_t> {
  static __device__ __forceinline__ bfloat16_t from(bfloat16_t x) { return x; }
  static __device__ __forceinline__ bfloat16_t from(float x) {
    return {ptx::bf16_from_f32(x)};
  }
  // There is no cvt from float64: first round to odd in float32, so that the second
  // rounding knows on which side of a tie the value was.
  static __device__ __forceinline__ bfloat16_t from(double x) {
    float y = __double2float_rz(x);
    if (static_cast<double>(y) != x && x == x) {
      y = __uint_as_float(__float_as_uint(y) | 1u);
    }
    return {ptx::bf16_from_f32(y)};
  }
};
#endif

}  // namespace detail

// Rounds once, to nearest even, when To is narrower.
template <typename To, typename From> __device__ __forceinline__ To to(From x) {
  return detail::convert<To>::from(x);
}

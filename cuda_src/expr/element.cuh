// SPDX-License-Identifier: MIT
// An element of an array that is not written while the kernel runs, so that
// loop-invariant reads are hoisted out of the loop.
#pragma once

#include "common/types.cuh"

namespace expr {

template <typename T>
__device__ __forceinline__ T element(const T* x, long long place) {
  return __ldg(x + place);
}
__device__ __forceinline__ bool element(const bool* x, long long place) {
  return __ldg(reinterpret_cast<const unsigned char*>(x) + place) != 0;
}
__device__ __forceinline__ half_t element(const half_t* x, long long place) {
  return {__ldg(&x[place].bits)};
}
__device__ __forceinline__ bfloat16_t element(const bfloat16_t* x, long long place) {
  return {__ldg(&x[place].bits)};
}

}  // namespace expr

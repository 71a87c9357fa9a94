// SPDX-License-Identifier: MIT
// Maps floats to unsigned numbers in the same order, for atomicMax; 0 is below all of
// them.
#pragma once

__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(unsigned x) {
  if (x == 0) return -__int_as_float(0x7f800000);
  return __uint_as_float(x >> 31 ? x & 0x7fffffffu : ~x);
}

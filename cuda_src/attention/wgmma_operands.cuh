// SPDX-License-Identifier: MIT
// What wgmma is told of its operands.
#pragma once

#include "ptx/wgmma.cuh"

// --- tiles in shared memory: chunks of 64 columns, each [rows][128 bytes], swizzled

// Describes a tile to wgmma (PTX ISA, "matrix descriptor"): 128-byte swizzle, 8 rows
// are 1024 bytes, `chunk` bytes to the next 64 columns (of a K-major tile not used).
__device__ __forceinline__ unsigned long long descriptor(unsigned address,
                                                         unsigned chunk) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  constexpr unsigned kEightRows = 1024;
  return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(chunk >> 4) << 16 |
         static_cast<unsigned long long>(kEightRows >> 4) << 32 | kSwizzle128;
}

template <int kCount>
__device__ __forceinline__ void keep_order(float (&x)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) ptx::keep_order(x[e]);
}

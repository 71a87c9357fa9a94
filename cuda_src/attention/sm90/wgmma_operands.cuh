// SPDX-License-Identifier: MIT
// Operands of wgmma and TMA: descriptors and coordinates.
#pragma once

#include "attention/score/params.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

// --- tiles in shared memory: chunks of 64 columns, each [rows][128 bytes], swizzled

// The wgmma descriptor of a tile (PTX ISA, "matrix descriptor"): 128-byte swizzle, 1024
// bytes per 8 rows, `chunk` bytes to the next 64 columns (ignored for K-major tiles).
__device__ __forceinline__ unsigned long long descriptor(unsigned address,
                                                         unsigned chunk) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  constexpr unsigned kEightRows = 1024;
  return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(chunk >> 4) << 16 |
         static_cast<unsigned long long>(kEightRows >> 4) << 32 | kSwizzle128;
}

template <int kCount>
__device__ __forceinline__ void compiler_fence(float (&x)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) ptx::compiler_fence(x[e]);
}

// A coordinate in a tensor map, in which broadcast axes have length 1.
__device__ __forceinline__ int coordinate(index_t index, index_t stride) {
  return stride == 0 ? 0 : static_cast<int>(index);
}

// The coordinates of a batch entry, innermost axis first.
__device__ __forceinline__ void batch_coordinates(int (&batch)[2],
                                                  const tile_coord_t& at,
                                                  const operand_t& operand) {
  batch[0] = coordinate(at.batch[kBatchDims - 1], operand.batch[kBatchDims - 1]);
  batch[1] = kBatchDims == 2 ? coordinate(at.batch[0], operand.batch[0]) : 0;
}

// Spins until the phase completes.
__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// A compile-time bool, passed as an argument.
template <bool kValue> struct flag_t {
  static constexpr bool value = kValue;
};

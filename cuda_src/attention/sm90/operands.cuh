// SPDX-License-Identifier: MIT
// Shared by the kernels of sm_90a: tiles as TMA and wgmma see them, and pairs of 16-bit
// numbers.
#pragma once

#include "attention/score/params.cuh"
#include "attention/sm90/wgmma_operands.cuh"
#include "common/reduce.cuh"
#include "ptx/packed.cuh"
#include "ptx/tma.cuh"

// --- tiles in shared memory, as TMA delivers them

// Loads rows [row, row + kRows) of one matrix by TMA, kBoxRows at a time; rows outside
// the matrix arrive as zeros. kReadOnce: L2 need not keep them. A single box may be
// shorter than kRows.
template <int kRows, int kChunks, bool kReadOnce = false, int kBoxRows = kRows,
          int kFilledRows = kRows>
__device__ __forceinline__ void load_tile(unsigned target, const ptx::tensor_map_t& map,
                                          unsigned barrier, int row, int head,
                                          const int (&batch)[2]) {
  static_assert(kRows % kBoxRows == 0 && kBoxRows % 8 == 0);
  static_assert(kFilledRows == kRows || kBoxRows == kRows);
  ptx::mbarrier_arrive_expect_tx(barrier, kFilledRows * kChunks * 128);
#pragma unroll 1
  for (int first = 0; first < kRows; first += kBoxRows) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const unsigned to = target + (chunk * kRows + first) * 128;
      if constexpr (kReadOnce) {
        ptx::cp_async_bulk_tensor_5d(to, map, barrier, chunk * 64, row + first, head,
                                     batch[0], batch[1],
                                     ptx::createpolicy_evict_first());
      } else {
        ptx::cp_async_bulk_tensor_5d(to, map, barrier, chunk * 64, row + first, head,
                                     batch[0], batch[1]);
      }
    }
  }
}

// Blocks take work tiles from `next`; the last block to finish resets both numbers.
struct counter_t {
  int next, finished;

  // Behind the struct: how many splits of each tile are finished. The last one resets
  // its number.
  __device__ int* arrived() { return &finished + 1; }
};

// The shared address of the first tile. Swizzled tiles need 1024-byte alignment, for
// which the host allocates 1024 bytes more.
__device__ __forceinline__ unsigned swizzled_tiles(const void* start) {
  return (ptx::shared_address(start) + 1023) & ~1023u;
}

// --- pairs of 16-bit numbers

// Two numbers of type elem_t in one word, and arithmetic on such words.
template <typename T> struct pair_of;
template <> struct pair_of<half_t> {
  static constexpr unsigned kExponent = 0x7c00;
  static __device__ __forceinline__ unsigned from(float high, float low) {
    return ptx::f16x2_from_f32(high, low);
  }
  static __device__ __forceinline__ unsigned fma(unsigned a, unsigned b, unsigned c) {
    return ptx::fma_f16x2(a, b, c);
  }
};
template <> struct pair_of<bfloat16_t> {
  static constexpr unsigned kExponent = 0x7f80;
  static __device__ __forceinline__ unsigned from(float high, float low) {
    return ptx::bf16x2_from_f32(high, low);
  }
  static __device__ __forceinline__ unsigned fma(unsigned a, unsigned b, unsigned c) {
    return ptx::fma_bf16x2(a, b, c);
  }
};
using pair16_t = pair_of<elem_t>;

// Transposes 4 x 4 words of four neighbouring lanes.
__device__ __forceinline__ void transpose(unsigned (&words)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool high = lane & bit;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int a = bit == 1 ? 2 * n : n, b = a + bit;
      const unsigned got = shuffle_xor(high ? words[a] : words[b], bit);
      if (high) {
        words[a] = got;
      } else {
        words[b] = got;
      }
    }
  }
}

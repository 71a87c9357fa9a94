// SPDX-License-Identifier: MIT
// What kernels of sm_90a share: tiles as tensor maps and wgmma see them, and pairs of
// 16-bit numbers.
#pragma once

#include "attention/score/params.cuh"
#include "attention/sm90/wgmma_operands.cuh"
#include "common/reduce.cuh"
#include "ptx/packed.cuh"
#include "ptx/tma.cuh"

// --- tiles in shared memory, as TMA brings them

// Asks for rows [row, row + kRows) of one matrix, a box of kBoxRows at a time; those
// outside it arrive as zeros. kReadOnce: nobody else will read them. Of a single box
// the last rows may be missing.
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

// Blocks take `next` one after the other; the last to finish sets both numbers back to
// 0.
struct counter_t {
  int next, finished;

  // Behind them: of each tile, how many of its parts are there. The last one sets its
  // number back to 0.
  __device__ int* arrived() { return &finished + 1; }
};

// --- pairs of 16-bit numbers

// Two numbers as elem_t in one word, and arithmetic on such words.
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

// Word t of lane n of four neighbours becomes word n of lane t.
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

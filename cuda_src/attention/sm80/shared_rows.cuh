// SPDX-License-Identifier: MIT
// attention_mma: rows that two warps share.
//
// Each of the two computes the scores of half of the keys and half of the columns of o,
// so that a fragment of k or v serves twice as many rows. They exchange weights through
// shared memory, and compute them before the maximum is known (softmax.cuh).
#pragma once

#include "attention/sm80/softmax.cuh"

static_assert(kWarpsPerRow <= 2);

// What the two warps exchange about their rows.
struct row_exchange_t {
  float number[2][kBlockM];
  int is_large[2][kBlockM];
};

// The thread index, reloaded: there are no registers to keep what depends on it.
__device__ __forceinline__ unsigned reload_thread() {
  unsigned thread = threadIdx.x;
  ptx::launder(thread);
  return thread;
}

// Row r of a thread, within the block.
__device__ __forceinline__ int row_of_block(int r, unsigned thread) {
  return lanes_t::warp_row(thread) + lanes_t::lane(thread) / 4 + 8 * r;
}

// The other warp's value for row r. Called by all threads of the block.
__device__ __forceinline__ float of_other_warp(row_exchange_t& exchange, float x,
                                               int r) {
  const unsigned thread = reload_thread();
  const int row = row_of_block(r, thread), own = lanes_t::warp_of_row(thread);
  exchange.number[own][row] = x;
  __syncthreads();  // both warps have written
  const float other = exchange.number[own ^ 1][row];
  __syncthreads();  // and read
  return other;
}

// The same for all rows of a thread at once. Another barrier must come before
// `exchange` is written again.
__device__ __forceinline__ void add_other_warp(row_exchange_t& exchange,
                                               float (&x)[kRows]) {
  const unsigned thread = reload_thread();
  const int own = lanes_t::warp_of_row(thread);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    exchange.number[own][row_of_block(r, thread)] = x[r];
  }
  __syncthreads();  // both warps have written
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    x[r] += exchange.number[own ^ 1][row_of_block(r, thread)];
  }
}

// Stores weights for both warps.
__device__ __forceinline__ void put_weights(unsigned char* smem_p,
                                            const scores_frag_t& p) {
  using rows_t = tile_t<kBlockN>;
  const unsigned thread = reload_thread();
  const int row = row_of_block(0, thread);
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n) {
    // Rows 8 apart have the same swizzle.
    const int chunk = lanes_t::warp_of_row(thread) * kScoreTiles + n;
    const unsigned at = rows_t::offset(row, chunk) + lanes_t::lane(thread) % 4 * 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      *reinterpret_cast<unsigned*>(smem_p + at + 8 * r * rows_t::kPitch) =
          pair16_t::from(p[r / 2][n][r % 2 * 2], p[r / 2][n][r % 2 * 2 + 1]);
    }
  }
}

// raise_where() for rows that two warps share. Called by all threads of the block.
__device__ __forceinline__ void raise_shared(softmax_t& rows, const scores_frag_t& s,
                                             row_exchange_t& exchange, float to_log2,
                                             const float (&sums)[kRows]) {
  const unsigned thread = reload_thread();
  const int own = lanes_t::warp_of_row(thread);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float largest = largest_of(s, r);
    const bool is_large = has_large_sum(sums[r]);
    exchange.number[own][row_of_block(r, thread)] = largest;
    exchange.is_large[own][row_of_block(r, thread)] = is_large;
  }
  __syncthreads();  // both warps have written
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = row_of_block(r, thread);
    const float largest = fmaxf(exchange.number[0][row], exchange.number[1][row]);
    const bool is_large = exchange.is_large[0][row] | exchange.is_large[1][row];
    move(rows, r, largest, is_large, to_log2);
  }
  __syncthreads();  // and read
}

// weigh() of one tile, interleaved with o += p v of the previous one.
__device__ __forceinline__ void weigh_and_multiply(const softmax_t& rows,
                                                   scores_frag_t& s, float to_log2,
                                                   float (&sums)[kRows], out_frag_t& o,
                                                   const lanes_t& lanes) {
  constexpr int kSteps = kBlockN / 16, kEach = kScoreTiles / kSteps;
  static_assert(kEach * kSteps == kScoreTiles);
  multiply_pv(o, s, lanes, [&](int step) {
    weigh(rows, s, to_log2, sums, step * kEach, (step + 1) * kEach);
  });
}

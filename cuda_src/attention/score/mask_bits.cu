// SPDX-License-Identifier: MIT
// attention_mask_bits: a mask array as bits, in the format of mask_bits.cuh.
//
// Algorithm  A lane reads four keys; four ballots have the bits of a tile
// Grid       one warp per query, over all batch entries and heads that differ
// Memory     global: the mask once, an eighth of that written
// Limits     seqlen_k in 32 bits
#include "common/reduce.cuh"
#include "common/strides.cuh"

#if !defined(BATCH_DIMS) || !defined(NUM_THREADS) || !defined(BLOCK_N)
#error "BATCH_DIMS, NUM_THREADS and BLOCK_N come from the host"
#endif

constexpr int kNumWarps = NUM_THREADS / kWarpSize;
constexpr int kBlockN = BLOCK_N;           // keys of a tile
constexpr int kMaskAxes = BATCH_DIMS + 2;  // batch, head, query
static_assert(kBlockN % 8 == 0 && kBlockN <= 128);

// The mask, with axes of one element where it is the same along them.
struct mask_rows_t {
  long long num_rows, seqlen_k, col;
  long long size[kMaskAxes], step[kMaskAxes];
};

__device__ __forceinline__ uint4 words_of(unsigned shown) {
  // Bit l of ballot n is key 4 l + n of the tile. Even lanes have the first four keys
  // of each eight.
  unsigned ballots[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    ballots[n] = __ballot_sync(kFullMask, (shown >> 8 * n & 0xff) != 0);
  }
  constexpr unsigned kEven = 0x55555555u;
  return {(ballots[0] & kEven) | (ballots[1] & kEven) << 1,
          (ballots[2] & kEven) | (ballots[3] & kEven) << 1,
          (ballots[0] >> 1 & kEven) | (ballots[1] & ~kEven),
          (ballots[2] >> 1 & kEven) | (ballots[3] & ~kEven)};
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    attention_mask_bits(const unsigned char* __restrict__ mask,
                        uint4* __restrict__ bits,  // (rows, tiles)
                        const __grid_constant__ mask_rows_t rows) {
  const int lane = threadIdx.x % kWarpSize;
  const long long row =
      (blockIdx.x + static_cast<long long>(gridDim.x) * blockIdx.y) * kNumWarps +
      threadIdx.x / kWarpSize;
  if (row >= rows.num_rows) return;
  long long rest = row;
#pragma unroll
  for (int axis = kMaskAxes - 1; axis >= 0; --axis) {
    const long long next = divide(rest, rows.size[axis]);
    mask += (rest - next * rows.size[axis]) * rows.step[axis];
    rest = next;
  }
  const int seqlen_k = static_cast<int>(rows.seqlen_k);
  const int num_tiles = (seqlen_k + kBlockN - 1) / kBlockN;
  const bool has_words =
      rows.col == 1 && reinterpret_cast<unsigned long long>(mask) % 4 == 0;
#pragma unroll 4
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int j = tile * kBlockN + 4 * lane;
    const int left = 4 * lane < kBlockN ? seqlen_k - j : 0;
    unsigned shown = 0;  // a byte for each key
    if (has_words && left >= 4) {
      shown = *reinterpret_cast<const unsigned*>(mask + j);
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n < left) shown |= unsigned(mask[(j + n) * rows.col]) << 8 * n;
      }
    }
    const uint4 words = words_of(shown);
    if (lane == 0) bits[row * num_tiles + tile] = words;
  }
}

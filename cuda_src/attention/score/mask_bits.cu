// SPDX-License-Identifier: MIT
// attention_mask_bits: a mask array as bits, in the format of mask_bits.cuh.
//
// Algorithm  A lane reads 16 keys; eight lanes join their bits of a tile
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

// The mask, with axes of one element where it is the same along them.
struct mask_rows_t {
  long long num_rows, seqlen_k, col;
  long long size[kMaskAxes], step[kMaskAxes];
};

// Keys of a lane, and the lanes of a tile.
constexpr int kKeysOfLane = 16, kLanes = 8, kTilesOfWarp = kWarpSize / kLanes;
static_assert(kBlockN % kKeysOfLane == 0 && kBlockN <= kLanes * kKeysOfLane);

// Four bytes as bits that say which are not 0.
__device__ __forceinline__ unsigned bits_of(unsigned bytes) {
  constexpr unsigned kLow = 0x7f7f7f7fu;
  const unsigned flags = ((((bytes & kLow) + kLow) | bytes) & ~kLow) >> 7;
  return flags * 0x01020408u >> 24;  // bits 0, 8, 16 and 24 side by side
}

// The words of a tile, of which each lane has the bits of its keys: word lane % 4.
__device__ __forceinline__ unsigned joined(const unsigned (&words)[4], int lane) {
  const bool is_odd = lane & 1, is_high = lane & 2;
  unsigned halves[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const unsigned even = words[2 * n], odd = words[2 * n + 1];
    halves[n] = (is_odd ? odd : even) | shuffle_xor(is_odd ? even : odd, 1);
  }
  unsigned word = (is_high ? halves[1] : halves[0]) |
                  shuffle_xor(is_high ? halves[0] : halves[1], 2);
  return word | shuffle_xor(word, 4);
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
  const unsigned long long start = reinterpret_cast<unsigned long long>(mask);
  const bool has_words = rows.col == 1 && start % 4 == 0;
  const bool has_vectors = rows.col == 1 && start % 16 == 0;
#pragma unroll 4
  for (int first = 0; first < num_tiles; first += kTilesOfWarp) {
    const int tile = first + lane / kLanes, column = lane % kLanes * kKeysOfLane;
    const int j = tile * kBlockN + column;
    const int left = column < kBlockN ? seqlen_k - j : 0;
    unsigned bytes[4] = {};
    if (has_vectors && left >= kKeysOfLane) {
      const uint4 vector = *reinterpret_cast<const uint4*>(mask + j);
      bytes[0] = vector.x, bytes[1] = vector.y;
      bytes[2] = vector.z, bytes[3] = vector.w;
    } else {
#pragma unroll
      for (int n = 0; n < kKeysOfLane; n += 4) {
        if (has_words && left >= n + 4) {
          bytes[n / 4] = *reinterpret_cast<const unsigned*>(mask + j + n);
        } else {
#pragma unroll
          for (int m = n; m < n + 4; ++m) {
            const unsigned byte = m < left ? mask[(j + m) * rows.col] : 0;
            bytes[n / 4] |= byte << 8 * (m - n);
          }
        }
      }
    }
    // Words 0 and 1 have the first four keys of each eight.
    unsigned words[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const unsigned near = bits_of(bytes[n]), far = bits_of(bytes[n + 2]);
      words[2 * n] = ((near & 3) | (far & 3) << 2) << 4 * (lane % kLanes);
      words[2 * n + 1] = (near >> 2 | (far & 12)) << 4 * (lane % kLanes);
    }
    const unsigned word = joined(words, lane);
    if (tile < num_tiles && lane % kLanes < 4) {
      reinterpret_cast<unsigned*>(bits + row * num_tiles + tile)[lane % 4] = word;
    }
  }
}

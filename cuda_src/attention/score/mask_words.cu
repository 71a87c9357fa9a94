// SPDX-License-Identifier: MIT
// attention_mask_words: what a mask array or a bound on positions hides, in the format
// of mask_words.cuh.
//
// Algorithm  A block copies 64 queries and 128 keys to shared memory; a lane picks the
//            32 bytes of its word
// Grid       one block per 64 queries and 128 keys, for each different head
// Memory     global: the mask once, an eighth of that written
// Limits     seqlen_q and seqlen_k in 32 bits
#include "common/strides.cuh"

#if !defined(BATCH_DIMS) || !defined(NUM_THREADS)
#error "BATCH_DIMS and NUM_THREADS come from the host"
#endif

constexpr int kNumThreads = NUM_THREADS;
constexpr int kQueries = 64, kKeys = 128;  // of a block
constexpr int kMaskAxes = BATCH_DIMS + 1;  // batch, head
static_assert(kNumThreads == kKeys / 16 * 32, "a warp for each 16 keys");

// The mask, with axes of one element where it is the same along them.
struct mask_matrices_t {
  long long num_blocks, seqlen_q, seqlen_k, row, col;
  // Query i sees keys from i + offset - left to i + offset + right.
  long long left, right;
  long long size[kMaskAxes], step[kMaskAxes];
};

// Rows of shared memory are 33 words: those of a warp's queries lie in other banks.
constexpr int kRowWords = kKeys / 4 + 1;

__device__ __forceinline__ int bounded(long long x) {
  return static_cast<int>(x < -1000 ? -1000 : x > 1000 ? 1000 : x);
}

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_mask_words(const unsigned char* __restrict__ mask,
                         unsigned* __restrict__ words,  // (blocks, warps, lanes)
                         const long long offset,
                         const __grid_constant__ mask_matrices_t of) {
  __shared__ unsigned tile[kQueries * kRowWords];
  const long long block = blockIdx.x + static_cast<long long>(gridDim.x) * blockIdx.y;
  if (block >= of.num_blocks) return;
  const long long num_tiles = (of.seqlen_k + kKeys - 1) / kKeys;
  const long long num_parts = (of.seqlen_q + 2 * kQueries - 1) / (2 * kQueries) * 2;
  const long long of_queries = divide(block, num_tiles);
  long long rest = divide(of_queries, num_parts);
  const int j0 = static_cast<int>(block - of_queries * num_tiles) * kKeys;
  const int i0 = static_cast<int>(of_queries - rest * num_parts) * kQueries;
  const int num_queries = min(static_cast<int>(of.seqlen_q) - i0, kQueries);
  const int num_keys = min(static_cast<int>(of.seqlen_k) - j0, kKeys);
#pragma unroll
  for (int axis = kMaskAxes - 1; axis >= 0; --axis) {
    const long long next = divide(rest, of.size[axis]);
    mask += (rest - next * of.size[axis]) * of.step[axis];
    rest = next;
  }
  mask += i0 * of.row + j0 * of.col;
  const unsigned long long start = reinterpret_cast<unsigned long long>(mask);
  const bool has_words = of.col == 1 && start % 4 == 0 && of.row % 4 == 0;
#pragma unroll 8
  for (int n = threadIdx.x; n < kQueries * (kKeys / 4); n += kNumThreads) {
    const int row = n / (kKeys / 4), column = n % (kKeys / 4) * 4;
    unsigned bytes = 0;  // hidden
    if (row < num_queries) {
      const unsigned char* const from = mask + row * of.row + column * of.col;
      if (has_words && column + 4 <= num_keys) {
        bytes = *reinterpret_cast<const unsigned*>(from);
      } else {
        for (int m = 0; m < 4 && column + m < num_keys; ++m) {
          bytes |= static_cast<unsigned>(from[m * of.col]) << 8 * m;
        }
      }
    }
    tile[row * kRowWords + column / 4] = bytes;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32, key = threadIdx.x / 32 * 16 + lane / 4;
  const auto bytes = reinterpret_cast<const unsigned char*>(tile);
  // Keys of the block that its first query sees.
  const long long diagonal = i0 + offset - j0;
  const int low = bounded(diagonal - of.left), high = bounded(diagonal + of.right);
  unsigned hidden = 0;
#pragma unroll
  for (int bit = 0; bit < 32; ++bit) {
    const int query = bit / 4 * 8 + lane % 4 * 2 + bit % 2;
    const int other = key + bit / 2 % 2 * 8, apart = other - query;
    const bool shows = bytes[query * (4 * kRowWords) + other] != 0;
    const bool sees = apart >= low && apart <= high;
    hidden |= static_cast<unsigned>(!shows || !sees) << bit;
  }
  words[block * kNumThreads + threadIdx.x] = hidden;
}

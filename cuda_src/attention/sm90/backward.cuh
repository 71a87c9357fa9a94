// SPDX-License-Identifier: MIT
// Shared by the gradient kernels of sm_90a: tiles, factors, and the arrays that one
// kernel leaves for the next.
//
// stats  (entries, blocks of queries, 2, kBlockM)  float: lse in log2, and delta
// sums   (slots, blocks of queries, kBlockM * kHeadDim)  float: dq before scaling, in
//        register order: for each 64 x 64 part of a block by warp (16 rows), group of 8
//        columns, lane, and the lane's four numbers. A slot is a head of dq; batch
//        entries that share q add to the same slot. Empty if dq needs no sums
// dq_semaphores  (slots, blocks of queries)  int: how many tiles of keys have added to
//        a block of sums, or need not, for a deterministic order
// met    (cut tiles, warps)  int: how many of the parts have finished
// parts  (cut tiles, parts, warps, 2, kSums / 4, lanes, 4)  float: their sums, of dv
//        and dk
#pragma once

#include "attention/sm90/operands.cuh"
#include "attention/product_factors.cuh"
#include "attention/simt/gradients.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/redux.cuh"

#if !defined(HEAD_DIM) || !defined(BLOCK_M)
#error "HEAD_DIM and BLOCK_M come from the host"
#endif

// Head dimension of q, k, v and dO rounded up; zeros pad.
constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockM = BLOCK_M;  // queries per block
constexpr int kPart = 64 * 64;    // numbers of dq of a block per warpgroup

// INPUTS of _attention/gpu/gradient_limits.py is the same struct on the host.
struct alignas(64) inputs_t {
  ptx::tensor_map_t q_map, k_map, v_map, dout_map;
  int num_work_tiles;  // tiles of keys over all kept entries
  int num_tiles;       // per entry
  int num_blocks;      // blocks of queries per entry
  int section;         // kept entries whose q, dO and dq fit into the L2 cache together
  int num_kept, num_summed;  // entries
  index_t slot[2];           // distance in slots of dq between entries of a batch axis
  float to_log2;             // from scores to exponents of 2
  float hidden;              // a score whose weight is 0
  // The last num_split tiles are cut into num_parts of at most `part_blocks` blocks of
  // queries over all summed entries. Each part counts as a work tile; first ones are in
  // the place of their tile, others come last.
  int num_split, part_blocks, num_parts;
};

// Position of the statistics of query i of a block. With 64 columns, the four of a
// thread are adjacent: of each 16, queries 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
__device__ __forceinline__ int place_in_stats(int i) {
  return kHeadDim == 64 ? (i & ~15) + i % 8 / 2 * 4 + i / 8 % 2 * 2 + i % 2 : i;
}

// Tells the compiler that x is the same in all lanes, so that it computes descriptors
// of wgmma in uniform registers. Otherwise each is computed in vector registers and
// moved: 100 instructions per step on the critical path.
__device__ __forceinline__ int uniform(int x) { return ptx::redux_min(x); }

// What the kernels of a call report to later ones. Starts as zeros.
struct found_t {
  int nonfinite;     // nonzero: a gradient is not finite, or overflows elem_t
  unsigned largest;  // max |dO|, as the bits of a float
  int unused[2];
};

// A stage of a ring, and the parity of the round.
template <int kStages> struct ring_t {
  unsigned stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

// dS of 64 queries as rows, in the layout of wgmma's operand A, from P in s and from
// dP, which is multiplied by `factor` if elem_t is float16.
template <int kScores>
__device__ __forceinline__ void weigh_rows(unsigned (&ds)[kScores / 8][4],
                                           const float (&s)[kScores],
                                           float (&dp)[kScores],
                                           const float (&delta)[2], float factor) {
#pragma unroll
  for (int e = 0; e < kScores; e += 2) {
    const int r = e / 2 % 2;
    if constexpr (kNarrow<elem_t>) {
      dp[e] *= factor;
      dp[e + 1] *= factor;
    }
    ds[e / 8][e / 2 % 4] =
        pair16_t::from(s[e + 1] * (dp[e + 1] - delta[r]), s[e] * (dp[e] - delta[r]));
  }
}

// Stores a warpgroup's 64 rows of a gradient, of which `num_rows` exist. Number e of a
// thread is in column e / 4 * 8 + lane % 4 * 2 + e % 2, row e / 2 % 2 * 8 + `row`.
// Returns `nonfinite`, or NaN if a number is not finite.
template <int kSums>
__device__ __forceinline__ float store_rows(const float (&sums)[kSums], float factor,
                                            elem_t* target, index_t row_step, int row,
                                            int num_rows, int dim,
                                            float nonfinite = 0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = row + 8 * r < num_rows;
    elem_t* const to = target + (row + 8 * r) * row_step;
#pragma unroll
    for (int e = 0; e < kSums; e += 16) {
      unsigned words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int from = e + 4 * t + 2 * r;
        words[t] = pair16_t::from(sums[from + 1] * factor, sums[from] * factor);
        if (exists) nonfinite = fmaf(sums[from], 0, fmaf(sums[from + 1], 0, nonfinite));
      }
      transpose(words, lane);  // now a lane has 8 consecutive columns
      const int column = e * 2 + lane % 4 * 8;
      if (exists && column < dim) {
        *reinterpret_cast<uint4*>(to + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
  return nonfinite;
}

// A tile of rows of a kept entry.
struct work_tile_t {
  int tile, kept;
};

// Work tiles in the order of memory, or by sections of entries: within a section, first
// tiles of all entries go first.
template <bool kBySections>
__device__ __forceinline__ work_tile_t tile_of(int number, const inputs_t& inputs) {
  const unsigned n = number, num_tiles = inputs.num_tiles;
  if constexpr (kBySections) {
    const unsigned in_section = inputs.section * num_tiles;
    const unsigned first = n / in_section * inputs.section;
    const unsigned rest = n % in_section;
    const unsigned width = min(inputs.num_kept - first, unsigned(inputs.section));
    return {int(rest / width), int(first + rest % width)};
  } else {
    return {int(n % num_tiles), int(n / num_tiles)};
  }
}

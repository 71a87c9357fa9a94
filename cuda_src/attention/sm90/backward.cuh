// SPDX-License-Identifier: MIT
// What the gradient kernels of sm_90a share: tiles, factors, and what lies between them
// in memory.
//
// stats  (entries, blocks of queries, 2, kBlockM)  float: lse in units of log2, delta
// sums   (slots, blocks of queries, kBlockM * kHeadDim)  float: dq before its factor,
//        in the order of registers: of each 64 x 64 part of a block, by warp (16 rows),
//        then group of 8 columns, lane, and the lane's four numbers. A slot is a head
//        of dq; batch entries that share q add to one
// entries  located_t of all entries: where they lie is found out once a call
// pieces (pieces of items, dk and dv, 2, 64 * 64)  float: sums before their factors, of
//        64 keys, laid out as in `sums`
// turns  (slots, blocks of queries, warps)  int: how many tiles of keys have added to
//        this warp's part of a block of sums, where they do so in one order
// met    (tiles that are cut, warps, 2)  int: how many of the two parts have ended, and
//        whether the sums of the first to end are there
// parts  (tiles that are cut, warps, 2, kSums / 4, lanes, 4)  float: those sums, of dv
//        and of dk
#pragma once

#include "attention/sm90/operands.cuh"
#include "attention/product_factors.cuh"
#include "attention/simt/gradients.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/redux.cuh"

#if !defined(HEAD_DIM) || !defined(BLOCK_M)
#error "HEAD_DIM and BLOCK_M come from the host"
#endif

// The dimension as it is computed with, of q, k, v and dO; zeros fill up.
constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockM = BLOCK_M;  // queries of a block
constexpr int kPart = 64 * 64;    // numbers of dq that a warpgroup makes of a block

// Mirrored by INPUTS in _attention/gpu/gradient_limits.py.
struct alignas(64) inputs_t {
  ptx::tensor_map_t q_map, k_map, v_map, dout_map;
  int num_items;   // tiles of keys of all kept entries; those of a cluster are one
  int num_tiles;   // of one entry
  int num_blocks;  // of queries of one entry
  int section;     // kept entries whose q, dO and dq stay in the L2 cache together
  int num_kept, num_summed;  // entries
  index_t slot[2];  // by how many slots of dq the entries of a batch axis differ
  float to_log2;    // what makes scores exponents of 2
  float hidden;     // a score that makes a weight of 0
  // So many items are cut in two; the first of the two has `first_part` blocks of
  // queries, of all summed entries. Both are items, the second ones the last of all.
  int num_split, first_part;
  // The items from num_whole on are pieces: of one tile, so many.
  int num_whole, num_pieces;
};

// Where the rows of one entry lie: coordinates in a tensor map, and the first of its
// blocks of queries, in sums or stats.
struct alignas(16) rows_t {
  int head, batch[2], block;
};

// An entry, and where its gradients of k and v go. Those that are summed into one
// gradient stand side by side.
struct located_t {
  rows_t q, dout, k, v;
  index_t dk, dv;
};

// Where the statistics of query i of a block stand. At 64 columns those that a thread
// needs stand by fours: of each 16, queries 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
__device__ __forceinline__ int place_in_stats(int i) {
  return kHeadDim == 64 ? (i & ~15) + i % 8 / 2 * 4 + i / 8 % 2 * 2 + i % 2 : i;
}

// A number that is the same in all lanes, for the compiler to know that: descriptors of
// wgmma that depend on it are then made in uniform registers. Else each is made in
// vector registers and moved, 100 instructions a step that products wait for.
__device__ __forceinline__ int uniform(int x) { return ptx::redux_min(x); }

// What the kernels of one call tell those after them. Starts as zeros.
struct found_t {
  int odd;           // not 0: a gradient is not finite, or was too large for elem_t
  unsigned largest;  // dO, without sign, as the bits of a float
  int unused[2];
};

// A stage of several, and whether the ring was gone round an odd number of times.
template <int kStages> struct ring_t {
  unsigned stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

// Writes a warpgroup's 64 rows of a gradient, of which `num_rows` exist. Number e of a
// thread stands in column e / 4 * 8 + lane % 4 * 2 + e % 2, row e / 2 % 2 * 8 + `row`.
// Returns `odd`, or NaN if one is not finite.
template <int kSums>
__device__ __forceinline__ float store_rows(const float (&sums)[kSums], float factor,
                                            elem_t* target, index_t row_step, int row,
                                            int num_rows, int dim, float odd = 0) {
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
        if (exists) odd = fmaf(sums[from], 0, fmaf(sums[from + 1], 0, odd));
      }
      transpose(words, lane);  // 8 columns side by side
      const int column = e * 2 + lane % 4 * 8;
      if (exists && column < dim) {
        *reinterpret_cast<uint4*>(to + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
  return odd;
}

// A tile of rows of a kept entry.
struct work_tile_t {
  int tile, kept;
};

// In the order of memory, or by sections of entries: in a section the first tiles of
// all entries come first, or the last ones.
template <bool kBySections, bool kFromLast>
__device__ __forceinline__ work_tile_t tile_of(int number, const inputs_t& inputs) {
  const unsigned n = number, num_tiles = inputs.num_tiles;
  if constexpr (kBySections) {
    const unsigned in_section = inputs.section * num_tiles;
    const unsigned first = n / in_section * inputs.section;
    const unsigned rest = n % in_section;
    const unsigned width = min(inputs.num_kept - first, unsigned(inputs.section));
    const int tile = rest / width;
    return {kFromLast ? inputs.num_tiles - 1 - tile : tile, int(first + rest % width)};
  } else {
    return {int(n % num_tiles), int(n / num_tiles)};
  }
}

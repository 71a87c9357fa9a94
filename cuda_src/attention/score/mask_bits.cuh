// SPDX-License-Identifier: MIT
// A mask array as bits, in the order in which threads of wgmma hold scores.
//
// A tile of up to 128 keys of a query is four words, one for each lane of a quad: key c
// of the tile is bit c / 8 * 2 + c % 2 of word c % 8 / 2. Keys that do not exist are
// hidden.
#pragma once

#include "attention/score/params.cuh"
#include "ptx/opaque.cuh"

constexpr int kKeysOfBits = 128;  // of a tile, if it has as many

// The bits as a parameter of kernels. Steps are in tiles; 0 for axes that share bits.
struct mask_bits_t {
  const uint4* tiles;  // (batch, heads, queries, tiles of keys)
  operand_t steps;

  // The words of query i and this lane of the quad; four words further for each tile.
  __device__ __forceinline__ const unsigned* of(const tile_coord_t& at, index_t i,
                                                int lane) const {
    return reinterpret_cast<const unsigned*>(at.at(tiles, steps) + i * steps.row) +
           lane % 4;
  }
};

// The bits of queries of a head, for kernels whose lanes read the words that they need.
template <bool kIsGiven> struct bits_of_rows_t {
  __device__ __forceinline__ void begin(const mask_bits_t&, const tile_coord_t&,
                                        index_t, index_t) {}
  __device__ __forceinline__ unsigned word(int, index_t, int) const { return ~0u; }
};
template <> struct bits_of_rows_t<true> {
  const uint4* bits;  // of the first query, from the first key of all on
  index_t stride;
  int last;  // the last query that exists

  // Those of `num_rows` queries from i0 on.
  __device__ __forceinline__ void begin(const mask_bits_t& mask, const tile_coord_t& at,
                                        index_t i0, index_t num_rows) {
    bits = at.at(mask.tiles, mask.steps) + i0 * mask.steps.row;
    stride = mask.steps.row;
    last = static_cast<int>(num_rows) - 1;
  }

  // The bits of keys from j on, a multiple of 8, as lane n of a quad holds scores of
  // query `row`. It loads them here: the compiler would do it where they are used, and
  // wait for them.
  __device__ __forceinline__ unsigned word(int row, index_t j, int n) const {
    // Recompute addresses, rather than keep them in registers.
    unsigned own = row < last ? row : last;
    ptx::launder(own);
    const uint4* const tile = bits + own * stride + j / kKeysOfBits;
    const auto words = reinterpret_cast<const volatile unsigned*>(tile);
    return words[n] >> static_cast<int>(j) % kKeysOfBits / 8 * 2;
  }
};

#if MASK_BITS
#define MASK_BITS_PARAMETER const __grid_constant__ mask_bits_t mask_bits,
#define MASK_BITS_ARGUMENT mask_bits
#else
#define MASK_BITS_PARAMETER
#define MASK_BITS_ARGUMENT \
  mask_bits_t {}
#endif

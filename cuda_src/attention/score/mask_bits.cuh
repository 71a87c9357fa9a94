// SPDX-License-Identifier: MIT
// A mask array as bits, in the order in which threads of wgmma hold scores.
//
// A tile of up to 128 keys of a query is four words, one for each lane of a quad: key c
// of the tile is bit c / 8 * 2 + c % 2 of word c % 8 / 2. Keys that do not exist are
// hidden.
#pragma once

#include "attention/score/params.cuh"

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

#if MASK_BITS
#define MASK_BITS_PARAMETER const __grid_constant__ mask_bits_t mask_bits,
#define MASK_BITS_ARGUMENT mask_bits
#else
#define MASK_BITS_PARAMETER
#define MASK_BITS_ARGUMENT \
  mask_bits_t {}
#endif

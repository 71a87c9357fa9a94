// SPDX-License-Identifier: MIT
// Lists of the tiles that a mask function shows, in the format of tile_lists.cu.
#pragma once

#include "attention/score/params.cuh"

// A list entry: a tile of the other side.
struct listed_tile_t {
  unsigned word;

  __device__ int tile() const { return word >> 8; }
  // Whether part `part` of the owner's tile sees some of it, all, and only some.
  __device__ bool is_seen(int part) const { return (word >> 2 * part & 3) != 0; }
  __device__ bool is_whole(int part) const { return word >> (2 * part + 1) & 1; }
  __device__ bool is_mixed(int part) const { return word >> 2 * part & 1; }
};

// The words before the entries: how many entries lie at the front, and at the end.
constexpr int kListHeader = 2;

struct tile_lists_t {
  const unsigned* words;
  int stride;                   // of a list, in words
  int batch_lists, head_lists;  // from one entry, or head, to the next; 0: shared

  // The list of a tile of a head.
  __device__ __forceinline__ const unsigned* of(const tile_coord_t& at,
                                                int num_heads) const {
    const int entry = static_cast<unsigned>(at.row_of_heads) / num_heads;
    const index_t list = index_t(entry) * batch_lists +
                         static_cast<int>(at.head) * head_lists +
                         static_cast<int>(at.tile);
    return words + list * stride;
  }
  // Entry n of it; -1 is the last one of the group at its end.
  __device__ __forceinline__ listed_tile_t entry(const unsigned* list, int n) const {
    return {__ldg(list + (n < 0 ? n + stride : n + kListHeader))};
  }
};
__device__ __forceinline__ int num_listed(const unsigned* list) {
  return static_cast<int>(__ldg(list));
}
__device__ __forceinline__ int num_at_end(const unsigned* list) {
  return static_cast<int>(__ldg(list + 1));
}
__device__ __forceinline__ listed_tile_t listed_tile(const unsigned* list, int n) {
  return {__ldg(list + kListHeader + n)};
}

// The lists as a parameter of kernels, which without a mask function have none.
#if MASK_FUNCTION
#define LISTS_PARAMETER const __grid_constant__ tile_lists_t tile_lists,
#define LISTS_ARGUMENT tile_lists
#else
#define LISTS_PARAMETER
#define LISTS_ARGUMENT \
  tile_lists_t {}
#endif

// SPDX-License-Identifier: MIT
// Blocks that share a loop: LOOP_SPLITS says that num_splits of them do. Each has some
// of the rows looped over and writes sums of its own, which other kernels add up.
#pragma once

#include "attention/score/params.cuh"

#ifdef LOOP_SPLITS
constexpr bool kSplitsLoop = true;
#define LOOP_PARAMETERS const index_t num_splits,
#else
constexpr bool kSplitsLoop = false;
#define LOOP_PARAMETERS
constexpr index_t num_splits = 1;
#endif

// Which work tile a block has, and which split of its loop.
__device__ __forceinline__ index_t work_index(index_t splits) {
  return kSplitsLoop ? divide(block_index(), splits) : block_index();
}
__device__ __forceinline__ index_t split_index(index_t splits) {
  return kSplitsLoop ? block_index() - work_index(splits) * splits : 0;
}

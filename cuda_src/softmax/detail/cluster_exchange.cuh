// SPDX-License-Identifier: MIT
// How the blocks of a cluster hand each other numbers (sm_90 or newer).
//
// A thread stores a number into the memory of another block, where a barrier counts the
// bytes. The barrier of the cluster itself would wait for all loads and stores under
// way, and empty the L1 cache of the multiprocessor.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/st_async.cuh"

// The blocks of a cluster may start at different times; none may write into the memory
// of another that has not started. All threads call both, in this order.
template <int kCluster> __device__ __forceinline__ void announce_block() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) ptx::cluster_arrive_relaxed();
#endif
}
template <int kCluster> __device__ __forceinline__ void await_blocks() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) ptx::cluster_wait();
#endif
}

#if __CUDA_ARCH__ >= 900
// One meeting after another of all blocks: in each, what is sent to a block amounts to
// as many bytes as it expects.
struct meeting_t {
  unsigned barrier;
  int phase = 0;

  // `place` is shared. One thread of the block sets it up, before announce_block().
  __device__ __forceinline__ meeting_t(unsigned long long* place, bool sets_up)
      : barrier(ptx::shared_address(place)) {
    if (sets_up) {
      ptx::mbarrier_init(barrier, 1);
      ptx::fence_mbarrier_init();
    }
  }
  // One thread says how many bytes will come to this block.
  __device__ __forceinline__ void expect(int bytes) const {
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
  }
  // Where `shared` lies in this block, the values will stand in block `rank`.
  template <typename T, typename... Values>
  __device__ __forceinline__ void send(T* shared, int rank, Values... values) const {
    ptx::store_async(ptx::mapa(ptx::shared_address(shared), rank),
                     ptx::mapa(barrier, rank), values...);
  }
  // A thread that reads what has come waits for all of it. The others go on to a
  // barrier of the block, after which the next meeting may begin.
  __device__ __forceinline__ void wait(bool is_reader) {
    while (is_reader && !ptx::mbarrier_try_wait_parity(barrier, phase)) {
    }
    phase ^= 1;
  }
};
#endif

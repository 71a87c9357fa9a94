// SPDX-License-Identifier: MIT
// Exchange of numbers between the CLUSTER blocks of a cluster (sm_90 or newer).
//
// A thread stores a number to the shared memory of another block, where an mbarrier
// counts the bytes. The barrier of the cluster itself would wait for all loads and
// stores in flight, and flush the L1 cache of the multiprocessor.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/st_async.cuh"

#if CLUSTER > 1
#define CLUSTER_SHAPE __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_SHAPE
#endif

// The blocks of a cluster may start at different times; none may write to the memory of
// one that has not started. All threads call both functions, in this order.
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
// Repeated exchanges between all blocks: in each, a block receives exactly the bytes
// that it expects.
struct meeting_t {
  unsigned barrier;
  int phase = 0;

  // `place` is in shared memory. One thread initializes it, before announce_block().
  __device__ __forceinline__ meeting_t(unsigned long long* place, bool sets_up)
      : barrier(ptx::shared_address(place)) {
    if (sets_up) {
      ptx::mbarrier_init(barrier, 1);
      ptx::fence_mbarrier_init();
    }
  }
  // One thread announces how many bytes this block will receive.
  __device__ __forceinline__ void expect(int bytes) const {
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
  }
  // Stores values to block `rank`, at the address of `shared`.
  template <typename T, typename... Values>
  __device__ __forceinline__ void send(T* shared, int rank, Values... values) const {
    ptx::store_async(ptx::mapa(ptx::shared_address(shared), rank),
                     ptx::mapa(barrier, rank), values...);
  }
  // Threads that read what arrives wait for all of it. The others continue to a barrier
  // of the block, after which the next exchange may start.
  __device__ __forceinline__ void wait(bool is_reader) {
    while (is_reader && !ptx::mbarrier_try_wait_parity(barrier, phase)) {
    }
    phase ^= 1;
  }
};
#endif

// SPDX-License-Identifier: MIT
// PTX mbarrier and st (sm_90) across the blocks of a cluster, by 32-bit addresses.
#pragma once

namespace ptx {

// The address in block `rank` that corresponds to this one here.
__device__ __forceinline__ unsigned mapa(unsigned address, int rank) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Arrives at a barrier of any block, with an address of mapa(). Orders no writes of
// this block, which would take a thousand cycles.
__device__ __forceinline__ void mbarrier_arrive_cluster_relaxed(unsigned barrier) {
  asm volatile(
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
      : "memory");
}

}  // namespace ptx

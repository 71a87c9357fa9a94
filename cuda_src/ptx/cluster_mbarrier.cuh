// SPDX-License-Identifier: MIT
// PTX mbarrier and st (sm_90) across the blocks of a cluster, by 32-bit addresses.
#pragma once

namespace ptx {

// The address in block `rank` of what has this address here.
__device__ __forceinline__ unsigned mapa(unsigned address, int rank) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Arrives at a barrier of any block, with an address of mapa().
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier) {
  asm volatile(
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
      : "memory");
}

// As mbarrier_try_wait_parity, and sees what other blocks did before they arrived.
__device__ __forceinline__ bool mbarrier_try_wait_parity_cluster(unsigned barrier,
                                                                 unsigned parity) {
  unsigned over;
  asm volatile(
      "{.reg .pred p;"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
      "selp.b32 %0, 1, 0, p;}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over;
}

// Stores into shared memory of any block, with an address of mapa().
__device__ __forceinline__ void store_cluster_s32(unsigned address, int x) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

}  // namespace ptx

// SPDX-License-Identifier: MIT
// PTX of thread block clusters (sm_90): rank, barrier, addresses of other blocks.
#pragma once

namespace ptx {

// The index of this block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The same, but the compiler may read it again instead of keeping it in a register.
__device__ __forceinline__ unsigned cluster_rank_again() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));  // not volatile: it never changes
  return rank;
}

// All threads of the cluster arrive, and then wait: shared memory of any block that was
// written before cluster_arrive can be read after cluster_wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// As cluster_arrive, but without ordering memory, which would wait for all loads and
// stores in flight.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of `shared`, a variable in shared memory, in block `rank` of the cluster.
template <typename T> __device__ __forceinline__ T* in_block(T* shared, unsigned rank) {
  unsigned long long address;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(address);
}

}  // namespace ptx

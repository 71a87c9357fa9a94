// SPDX-License-Identifier: MIT
// PTX st.async and mbarrier (sm_90 or newer): stores into the shared memory of another
// block of the cluster, where a barrier counts their bytes.
#pragma once

namespace ptx {

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return unsigned(__cvta_generic_to_shared(p));
}

// The address in block `rank` of what has this address here.
__device__ __forceinline__ unsigned map_to_rank(unsigned address, int rank) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Completes a phase when one thread has announced how many bytes will come, and they
// have.
__device__ __forceinline__ void transaction_barrier_init(unsigned barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// Other blocks see the barriers that this thread has initialised, after the next
// barrier of the cluster.
__device__ __forceinline__ void transaction_barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void transaction_barrier_expect(unsigned barrier,
                                                           int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// Whether the phase of this parity is complete; waits a while for it.
__device__ __forceinline__ bool transaction_barrier_try_wait(unsigned barrier,
                                                             int parity) {
  int complete;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete;
}

// Stores into the memory of another block; `barrier` of that block counts the bytes.
__device__ __forceinline__ void store_async(unsigned address,
                                            unsigned barrier,
                                            float value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          address),
      "f"(value), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(unsigned address,
                                            unsigned barrier,
                                            double value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(
          address),
      "d"(value), "r"(barrier)
      : "memory");
}

// Two numbers side by side, at a multiple of their common size.
__device__ __forceinline__ void store_async(unsigned address,
                                            unsigned barrier,
                                            float first,
                                            float second) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
      "[%3];" ::"r"(address),
      "f"(first), "f"(second), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(unsigned address,
                                            unsigned barrier,
                                            double first,
                                            double second) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%1, %2}, "
      "[%3];" ::"r"(address),
      "d"(first), "d"(second), "r"(barrier)
      : "memory");
}

}  // namespace ptx

// SPDX-License-Identifier: MIT
// PTX st.async (sm_90 or newer): stores to the shared memory of another block of the
// cluster, where a barrier counts the bytes. Addresses are those of mapa().
#pragma once

#include "ptx/cluster_mbarrier.cuh"
#include "ptx/mbarrier.cuh"

namespace ptx {

// Stores to the memory of another block; `barrier` of that block counts the bytes.
__device__ __forceinline__ void store_async(unsigned address, unsigned barrier,
                                            float value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          address),
      "f"(value), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(unsigned address, unsigned barrier,
                                            double value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(
          address),
      "d"(value), "r"(barrier)
      : "memory");
}

// Two adjacent numbers, at a multiple of their total size.
__device__ __forceinline__ void store_async(unsigned address, unsigned barrier,
                                            float first, float second) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
      "[%3];" ::"r"(address),
      "f"(first), "f"(second), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(unsigned address, unsigned barrier,
                                            double first, double second) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%1, %2}, "
      "[%3];" ::"r"(address),
      "d"(first), "d"(second), "r"(barrier)
      : "memory");
}

}  // namespace ptx

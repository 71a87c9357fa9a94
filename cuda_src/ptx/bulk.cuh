// SPDX-License-Identifier: MIT
// PTX cp.async.bulk and cp.reduce.async.bulk (sm_90): TMA copies, or adds, contiguous
// bytes. Addresses and sizes are multiples of 16.
#pragma once

namespace ptx {

// Copies `bytes` from global to shared memory at `target`; `barrier` counts them.
__device__ __forceinline__ void cp_async_bulk(unsigned target, const void* source,
                                              unsigned bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same with an L2 cache policy.
__device__ __forceinline__ void cp_async_bulk(unsigned target, const void* source,
                                              unsigned bytes, unsigned barrier,
                                              unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Adds floats of shared memory to global memory, each atomically. The threads that
// wrote them must call fence_proxy_async() first. Belongs to the thread's open group.
__device__ __forceinline__ void cp_reduce_async_bulk_add(float* target, unsigned source,
                                                         unsigned bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::
          "l"(target),
      "r"(source), "r"(bytes)
      : "memory");
}

// Groups the bulk writes to global memory of this thread so far.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last kPending groups of this thread have read their sources,
// which may then be overwritten.
template <int kPending = 0>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until this thread's groups are complete.
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace ptx

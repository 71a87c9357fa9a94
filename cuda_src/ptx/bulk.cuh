// SPDX-License-Identifier: MIT
// PTX cp.async.bulk and cp.reduce.async.bulk (sm_90): TMA moves, or adds,
// bytes that lie side by side. Addresses and sizes are multiples of 16.
#pragma once

namespace ptx {

// Brings `bytes` from global memory to shared memory at `target`, counted on `barrier`.
__device__ __forceinline__ void cp_async_bulk(unsigned target, const void* source,
                                              unsigned bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Adds floats of shared memory to those of global memory, each sum by itself. Before:
// fence_proxy_async() by the threads that wrote them. Belongs to the thread's open
// group.
__device__ __forceinline__ void cp_reduce_async_bulk_add(float* target, unsigned source,
                                                         unsigned bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::
          "l"(target),
      "r"(source), "r"(bytes)
      : "memory");
}

// The bulk operations of this thread so far that write to global memory become a group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's groups, but for the last kPending, have read what they
// read; it may be overwritten.
template <int kPending = 0>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until this thread's groups are done.
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Adds four floats that lie side by side, each sum by itself.
__device__ __forceinline__ void red_global_add(float* target, float a, float b, float c,
                                               float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

}  // namespace ptx

// SPDX-License-Identifier: MIT
// PTX cp.async (sm_80 or newer): from global to shared memory, past the registers.
#pragma once

namespace ptx {

// kBytes is 4, 8 or 16, and both addresses are multiples of it. The thread itself can
// read what it has copied after wait_copies, others after a barrier more.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const unsigned address = unsigned(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address),
                 "l"(global), "n"(kBytes)
                 : "memory");
  }
}

// kBytes (4 or 16), of which the first `num_bytes` are copied and the others become 0.
template <int kBytes = 16>
__device__ __forceinline__ void copy_async_or_zero(unsigned shared, const void* global,
                                                   unsigned num_bytes) {
  static_assert(kBytes == 4 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(global), "r"(num_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared),
                 "l"(global), "r"(num_bytes)
                 : "memory");
  }
}

// The copies of this thread up to here become a group.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last kPending groups of this thread are under way.
template <int kPending> __device__ __forceinline__ void wait_copy_groups() {
  static_assert(kPending >= 0);
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for all copies of this thread.
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace ptx

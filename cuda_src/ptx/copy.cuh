// SPDX-License-Identifier: MIT
// PTX cp.async (sm_80 or newer): from global to shared memory, bypassing registers.
#pragma once

namespace ptx {

// kBytes is 4, 8 or 16, and both addresses are multiples of it. The thread itself may
// read the copy after wait_copies, other threads only after a further barrier.
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

// Copies the first `num_bytes` of kBytes (4 or 16) and zeroes the rest.
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

// Groups the copies of this thread so far.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last kPending groups of this thread are in flight.
template <int kPending> __device__ __forceinline__ void wait_copy_groups() {
  static_assert(kPending >= 0);
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for all copies of this thread.
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace ptx

// SPDX-License-Identifier: MIT
// PTX cp.async with zero fill, and in groups (sm_80 or newer).
#pragma once

namespace ptx {

// Copies the first `bytes` of kBytes (8 or 16) to an address of shared memory and
// zeroes the rest. Both addresses are multiples of kBytes.
template <int kBytes>
__device__ __forceinline__ void copy_or_fill(unsigned shared, const void* global,
                                             int bytes) {
  static_assert(kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(global), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared),
                 "l"(global), "r"(bytes)
                 : "memory");
  }
}

// Groups the copies since the last call.
__device__ __forceinline__ void commit_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending groups of this thread are in flight.
template <int kPending> __device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ptx

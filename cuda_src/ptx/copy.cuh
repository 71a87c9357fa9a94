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

// Waits for all copies of this thread.
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace ptx

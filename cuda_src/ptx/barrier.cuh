// SPDX-License-Identifier: MIT
// PTX bar: named barriers of a block, for some of its warps. Barrier 0 is that of
// __syncthreads().
#pragma once

namespace ptx {

// Waits until kThreads threads, including this warp's, have arrived at barrier `id`.
template <int kThreads> __device__ __forceinline__ void bar_sync(int id) {
  static_assert(kThreads % 32 == 0);
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// As bar_sync; returns whether `value` is true in any of the threads.
template <int kThreads> __device__ __forceinline__ bool bar_or(int id, bool value) {
  static_assert(kThreads % 32 == 0);
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "bar.red.or.pred p, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(any)
      : "r"(id), "n"(kThreads), "r"(int(value))
      : "memory");
  return any;
}

// Arrives at barrier `id` without waiting.
template <int kThreads> __device__ __forceinline__ void bar_arrive(int id) {
  static_assert(kThreads % 32 == 0);
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// The same for a single thread, which counts as its warp.
template <int kThreads> __device__ __forceinline__ void barrier_arrive(int id) {
  static_assert(kThreads % 32 == 0);
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace ptx

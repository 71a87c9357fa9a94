// SPDX-License-Identifier: MIT
// PTX griddepcontrol (sm_90): a kernel may start while the previous one in the stream
// ends, if the launch allows it (`overlaps` of Launch in _cuda/launch.py). Otherwise
// both instructions do nothing.
#pragma once

namespace ptx {

// Once all blocks of this kernel have called this or ended, the next kernel may start.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel has ended and its writes are visible. Every kernel of
// a chain must wait, so that the end of the last one is the end of all.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same for data read through this pointer: the compiler may move loads from const
// __restrict__ memory ahead of the other form.
template <typename T> __device__ __forceinline__ T* griddepcontrol_wait(T* memory) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : "+l"(memory) : : "memory");
#endif
  return memory;
}

}  // namespace ptx

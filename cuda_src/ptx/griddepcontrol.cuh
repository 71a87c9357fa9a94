// SPDX-License-Identifier: MIT
// PTX griddepcontrol (sm_90): a kernel starts while the one before it in the stream
// ends, where the launch allows it (`overlaps` of Launch in _cuda/launch.py). Elsewhere
// both instructions do nothing.
#pragma once

namespace ptx {

// Once all blocks of this kernel have come here or are done, blocks of the next kernel
// may start.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before this one is done, and its writes are seen. Each kernel
// of a chain has to wait, so that the end of the last is the end of all.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same, for what is read through this pointer: the compiler may move loads from
// const __restrict__ memory in front of the other.
template <typename T> __device__ __forceinline__ T* griddepcontrol_wait(T* memory) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : "+l"(memory) : : "memory");
#endif
  return memory;
}

}  // namespace ptx

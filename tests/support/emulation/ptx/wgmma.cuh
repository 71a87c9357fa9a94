// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/wgmma.cuh: the same functions in C++.
#pragma once

// A product is done when it is issued.
namespace ptx {

inline void wgmma_fence() {}
inline void wgmma_commit_group() {}
template <int kPending> void wgmma_wait_group() {
  static_assert(0 <= kPending && kPending <= 7);
}
inline void compiler_fence(float&) {}
inline void compiler_fence(int&) {}

}  // namespace ptx

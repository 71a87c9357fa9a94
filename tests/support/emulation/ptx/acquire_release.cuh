// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/acquire_release.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline void store_release(int* p, int x) {
  *p = x;
  emu::progress();
}
// Whoever reads may wait for another: the others run first.
inline int load_acquire(const int* p) {
  emu::spin();
  return *p;
}
inline void fence_proxy_async_global() {}

}  // namespace ptx

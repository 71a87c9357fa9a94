// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/relaxed.cuh: the same functions in C++.
#pragma once

namespace ptx {

template <typename T> void store_relaxed(T* p, T x) {
  *p = x;
  emu::progress();
}
// Whoever reads may wait for another: the others run first.
template <typename T> T load_relaxed(const T* p) {
  emu::spin();
  return *p;
}

}  // namespace ptx

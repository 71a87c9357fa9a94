// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/opaque.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline void launder(unsigned&) {}
inline void launder(long long&) {}
inline void launder(float&) {}
template <typename T> void launder(const T*&) {}
inline void launder(float*) {}
template <typename T> void keep_in_memory(volatile T*) {}
template <typename T> const T& reload(const T& x) { return x; }

}  // namespace ptx

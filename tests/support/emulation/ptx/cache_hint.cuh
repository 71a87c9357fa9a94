// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/cache_hint.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline unsigned long long policy_evict_last() { return 0; }
inline unsigned long long policy_evict_first() { return 0; }
template <typename T> T load_global(const T* p, unsigned long long) { return *p; }
template <typename T> void store_global(T* p, T v, unsigned long long) { *p = v; }

}  // namespace ptx

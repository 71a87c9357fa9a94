// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/cluster.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline unsigned cluster_rank() { return emu::cluster_rank(); }
inline unsigned cluster_rank_again() { return emu::cluster_rank(); }
inline void cluster_arrive() { emu::cluster_arrive(); }
inline void cluster_arrive_relaxed() { emu::cluster_arrive(); }
inline void cluster_wait() { emu::cluster_wait(); }
template <typename T> T* in_block(T* shared, unsigned rank) {
  const unsigned at = emu::address_of(shared) % emu::kWindow;
  return static_cast<T*>(emu::shared_at(at + rank * emu::kWindow));
}

}  // namespace ptx

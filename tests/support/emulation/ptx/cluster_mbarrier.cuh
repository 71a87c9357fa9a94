// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/cluster_mbarrier.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline unsigned mapa(unsigned address, int rank) {
  return address % emu::kWindow + unsigned(rank) * emu::kWindow;
}
inline void mbarrier_arrive_cluster_relaxed(unsigned barrier) {
  emu::mbarrier_arrive(emu::shared_at(barrier));
}
inline void store_cluster_s32(unsigned address, int x) {
  emu::shared_as<int>(address) = x;
}

}  // namespace ptx

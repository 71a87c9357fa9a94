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
}  // namespace ptx

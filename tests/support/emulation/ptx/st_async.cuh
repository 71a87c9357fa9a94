// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/st_async.cuh: the same functions in C++.
#pragma once

#include "ptx/cluster_mbarrier.cuh"
#include "ptx/mbarrier.cuh"

namespace ptx {

template <typename T> void store_async(unsigned address, unsigned barrier, T value) {
  emu::shared_as<T>(address) = value;
  emu::mbarrier_complete(emu::shared_at(barrier), sizeof(T));
}
template <typename T>
void store_async(unsigned address, unsigned barrier, T first, T second) {
  if (address % (2 * sizeof(T))) emu::fail("st.async.v2 is not aligned");
  emu::shared_as<T>(address) = first;
  emu::shared_as<T>(address + sizeof(T)) = second;
  emu::mbarrier_complete(emu::shared_at(barrier), 2 * sizeof(T));
}

}  // namespace ptx

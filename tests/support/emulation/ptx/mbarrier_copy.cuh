// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/mbarrier_copy.cuh: the same functions in C++.
#pragma once

namespace ptx {

using copy_barrier_t = unsigned long long;

inline void copy_barrier_init(copy_barrier_t* barrier, int count) {
  emu::mbarrier_init(barrier, unsigned(count));
}
inline void copy_barrier_end(copy_barrier_t* barrier) { emu::mbarrier_end(barrier); }
inline void copy_barrier_arrive(copy_barrier_t* barrier) {
  emu::mbarrier_arrive(barrier);
}
inline void copy_barrier_arrive_after_copies(copy_barrier_t* barrier) {
  emu::wait_copies();
  emu::mbarrier_arrive(barrier);
}
inline bool copy_barrier_test(copy_barrier_t* barrier, int parity) {
  return emu::mbarrier_is_over(barrier, unsigned(parity));
}

}  // namespace ptx

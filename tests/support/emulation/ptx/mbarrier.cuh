// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/mbarrier.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline unsigned shared_address(const void* x) { return emu::address_of(x); }
inline void mbarrier_init(unsigned barrier, unsigned count) {
  emu::mbarrier_init(emu::shared_at(barrier), count);
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(unsigned barrier) {
  emu::mbarrier_arrive(emu::shared_at(barrier));
}
inline void mbarrier_arrive_if(bool condition, unsigned barrier) {
  if (condition) mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  emu::mbarrier_expect(emu::shared_at(barrier), bytes);
  mbarrier_arrive(barrier);
}
inline bool mbarrier_try_wait_parity(unsigned barrier, unsigned parity) {
  return emu::mbarrier_is_over(emu::shared_at(barrier), parity);
}

}  // namespace ptx

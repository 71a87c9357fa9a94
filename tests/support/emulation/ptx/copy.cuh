// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/copy.cuh: the same functions in C++.
#pragma once

namespace ptx {

template <int kBytes> void copy_async(void* shared, const void* global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  emu::copy_async(shared, global, kBytes, kBytes);
}
template <int kBytes = 16>
void copy_async_or_zero(unsigned shared, const void* global, unsigned num_bytes) {
  static_assert(kBytes == 4 || kBytes == 16);
  emu::copy_async(emu::shared_at(shared), global, kBytes, num_bytes);
}
inline void commit_copies() { emu::commit_copies(); }
template <int kPending> void wait_copy_groups() { emu::wait_copy_groups(kPending); }
inline void wait_copies() { emu::wait_copies(); }

}  // namespace ptx

// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/copy_fill.cuh: the same functions in C++.
#pragma once

namespace ptx {

template <int kBytes>
void copy_or_fill(unsigned shared, const void* global, int bytes) {
  static_assert(kBytes == 8 || kBytes == 16);
  emu::copy_async(emu::shared_at(shared), global, kBytes, unsigned(bytes));
}
inline void commit_copy_group() { emu::commit_copies(); }
template <int kPending> void wait_copy_groups() { emu::wait_copy_groups(kPending); }

}  // namespace ptx

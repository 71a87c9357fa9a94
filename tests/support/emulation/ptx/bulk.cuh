// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/bulk.cuh: the same functions in C++.
#pragma once

// What is asked for is done at once.
namespace ptx {

inline void cp_async_bulk(unsigned target, const void* source, unsigned bytes,
                          unsigned barrier) {
  if (target % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(source) % 16) {
    emu::fail("cp.async.bulk is not aligned");
  }
  memcpy(emu::shared_at(target), source, bytes);
  emu::mbarrier_complete(emu::shared_at(barrier), bytes);
}
inline void cp_async_bulk(unsigned target, const void* source, unsigned bytes,
                          unsigned barrier, unsigned long long) {
  cp_async_bulk(target, source, bytes, barrier);
}
inline void cp_reduce_async_bulk_add(float* target, unsigned source, unsigned bytes) {
  if (source % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(target) % 16) {
    emu::fail("cp.reduce.async.bulk is not aligned");
  }
  for (unsigned n = 0; n < bytes / 4; ++n) {
    target[n] += emu::shared_as<float>(source + 4 * n);
  }
}
inline void cp_async_bulk_commit_group() {}
template <int kPending = 0> void cp_async_bulk_wait_group_read() {}
inline void cp_async_bulk_wait_group() {}
}  // namespace ptx

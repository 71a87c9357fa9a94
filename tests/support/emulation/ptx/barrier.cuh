// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/barrier.cuh: the same functions in C++.
#pragma once

namespace ptx {

template <int kThreads> void bar_sync(int id) { emu::barrier(id, kThreads, false); }
template <int kThreads> bool bar_or(int id, bool value) {
  return emu::barrier(id, kThreads, value);
}
template <int kThreads> void bar_arrive(int id) {
  emu::barrier_arrive(id, kThreads, 1);
}
template <int kThreads> void barrier_arrive(int id) {
  emu::barrier_arrive(id, kThreads, 32);
}

}  // namespace ptx

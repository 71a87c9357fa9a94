// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/hold.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline void hold(int count, int number) {
  if (count == ~number) __trap();
}
inline double2 load_here(const double* x) {
  return *reinterpret_cast<const double2*>(x);
}
inline double load_one_here(const double* x) { return *x; }
inline void hold(int count, int number, const double (&)[4]) { hold(count, number); }

}  // namespace ptx

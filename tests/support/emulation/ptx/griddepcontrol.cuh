// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/griddepcontrol.cuh: the same functions in C++.
#pragma once

// One kernel ends before the next begins.
namespace ptx {

inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}
template <typename T> T* griddepcontrol_wait(T* memory) { return memory; }

}  // namespace ptx

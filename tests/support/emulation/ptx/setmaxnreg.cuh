// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/setmaxnreg.cuh: the same functions in C++.
#pragma once

namespace ptx {

template <int kRegisters> void setmaxnreg_dec() {}
template <int kRegisters> void setmaxnreg_inc() {}

}  // namespace ptx

// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/elect.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline bool elect() {
  __syncwarp();
  return emu::self->number % 32 == 0;
}

}  // namespace ptx

// SPDX-License-Identifier: MIT
// With FUNCTION, a kernel that the caller wrote: its text and the numbers that it
// closes over.
//
// The text is made by the host (cupyflash/_expr) as a template `caller_function` of d2
// and a struct `caller_function_args`. With weights (WEIGHTS 1) it is log K, which does
// not underflow far away, else K, which may have any sign. Nothing is known of its
// size, so that no tile is skipped and every tile is watched. A slope
// (`caller_function_skips_cusp`) is 0 where points coincide and it is not finite.
#pragma once

#if FUNCTION
#include "expr/functions.cuh"
#include "generated/functions.cuh"

using kernel_args_t = caller_function_args<double>;

namespace kernels {

struct function {
  static constexpr bool kHasExponent = false, kIsRoot = false;
  static constexpr bool kHasFactor = false, kIsSingular = false;
  template <typename T> static __device__ __forceinline__ T factor(T) { return 1; }
  template <typename T>
  static __device__ __forceinline__ T of(T d2, const kernel_args_t& args) {
    const T k = caller_function<T>(d2, 0, 0, 0, 0, caller_function_args_as<T>(args));
    if (caller_function_skips_cusp && d2 == 0 && !is_finite(k)) return 0;
    return k;
  }
};

}  // namespace kernels
#else
struct kernel_args_t {  // of named kernels
  long long none;
};
#endif

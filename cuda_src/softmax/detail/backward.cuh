// SPDX-License-Identifier: MIT
// Shared by the gradients: a row of the problem, and the last step.
#pragma once

#include "common/math.cuh"
#include "softmax/detail/thread_group.cuh"
#include "softmax/detail/backward_params.cuh"
#include "softmax/detail/scaled_sum.cuh"

// One row of y, dy and dx.
struct row_t : row_of_group_t<layout_t> {
  const y_t* y;
  const dy_t* dy;
  out_t* dx;

  __device__ __forceinline__ row_t(const y_t* y, const dy_t* dy, out_t* dx,
                                   const layout_t& layout, long long block_row)
      : row_of_group_t{layout} {
    const long long row = row_of_lane(block_row);
    const auto at = locate(layout.outer, row);
    this->y = y + at.of[kY];
    this->dy = dy + at.of[kDy];
    this->dx = dx + at.of[kOut];
    length = row < layout.num_rows ? layout.row_length : 0;
  }
};

constexpr int kWiderInput = sizeof(y_t) > sizeof(dy_t) ? sizeof(y_t) : sizeof(dy_t);
// Elements per vector access.
constexpr int kVector =
    16 / (kWiderInput > sizeof(out_t) ? kWiderInput : sizeof(out_t));

// The product of two 16-bit numbers is exact in float.
__device__ __forceinline__ double product(acc_t p, acc_t g) {
  return kWiderInput == 2 ? double(p * g) : double(p) * double(g);
}

// The last step: dx = scale y (dy - c), or scale (dy - exp(y) c).
struct gradient_t {
  acc_t scale, c_high, c_low;

  gradient_t() = default;
  __device__ __forceinline__ gradient_t(double c, const layout_t& layout)
      : scale(acc_t(layout.scale)), c_high(acc_t(c)) {
    c_low = is_finite(c_high) ? acc_t(c - c_high) : acc_t(0);
  }

  // y from log y; for 16-bit results by the fast exponential.
  static __device__ __forceinline__ acc_t exp_of_log(acc_t p) {
    if constexpr (sizeof(out_t) == 2 && sizeof(acc_t) == 4) return exp_fast(p);
    return exp_of(p);
  }

  static __device__ __forceinline__ float exp_of_log(float p, const roots_t<float>&) {
    return exp_of_log(p);
  }
  static __device__ __forceinline__ double exp_of_log(double p,
                                                      const roots_t<double>& roots) {
    constexpr int kFar = 0x4085e000;  // the upper half of 700; that of NaN is larger
    const double e = roots.exp_of(p);
    return (__double2hiint(p) & 0x7fffffff) < kFar ? e : exp_of(p);
  }

  __device__ __forceinline__ acc_t operator()(acc_t p, acc_t g) const {
    if constexpr (kLog) return of_exp(exp_of_log(p), p, g);
    return scale * (p * ((g - c_high) - c_low));
  }
  // The same, computed by a warp together: exponentials of doubles by a table in its
  // lanes.
  __device__ __forceinline__ acc_t operator()(acc_t p, acc_t g,
                                              const roots_t<acc_t>& roots) const {
    if constexpr (kLog) return of_exp(exp_of_log(p, roots), p, g);
    return (*this)(p, g);
  }

 private:
  __device__ __forceinline__ acc_t of_exp(acc_t e, acc_t p, acc_t g) const {
    return scale * (p == -infinity<acc_t>() ? acc_t(0) : fma_of(-e, c_high, g));
  }
};

// SPDX-License-Identifier: MIT
// exp2 of float64 for whole warps: a table in registers and a short polynomial.
#pragma once

#include "common/math.cuh"
#include "common/reduce.cuh"

namespace detail {

// 2^(n / 32)
__device__ const double kRootsOfTwo[32] = {
    0x1.0000000000000p+0, 0x1.059b0d3158574p+0, 0x1.0b5586cf9890fp+0,
    0x1.11301d0125b51p+0, 0x1.172b83c7d517bp+0, 0x1.1d4873168b9aap+0,
    0x1.2387a6e756238p+0, 0x1.29e9df51fdee1p+0, 0x1.306fe0a31b715p+0,
    0x1.371a7373aa9cbp+0, 0x1.3dea64c123422p+0, 0x1.44e086061892dp+0,
    0x1.4bfdad5362a27p+0, 0x1.5342b569d4f82p+0, 0x1.5ab07dd485429p+0,
    0x1.6247eb03a5585p+0, 0x1.6a09e667f3bcdp+0, 0x1.71f75e8ec5f74p+0,
    0x1.7a11473eb0187p+0, 0x1.82589994cce13p+0, 0x1.8ace5422aa0dbp+0,
    0x1.93737b0cdc5e5p+0, 0x1.9c49182a3f090p+0, 0x1.a5503b23e255dp+0,
    0x1.ae89f995ad3adp+0, 0x1.b7f76f2fb5e47p+0, 0x1.c199bdd85529cp+0,
    0x1.cb720dcef9069p+0, 0x1.d5818dcfba487p+0, 0x1.dfc97337b9b5fp+0,
    0x1.ea4afa2a490dap+0, 0x1.f50765b6e4540p+0};

}  // namespace detail

__device__ __forceinline__ unsigned high_word(double x) {
  return static_cast<unsigned>(__double2hiint(x));
}

// The high word of a number as a float: preserves order. Infinities, NaN and numbers
// above 1e306 become NaN.
__device__ __forceinline__ float high_word_as_float(double x) {
  return __int_as_float(__double2hiint(x));
}

// The data of exp2_t, in shared memory.
struct exp2_table_t {
  double unit;
  unsigned lowest;
  double roots[32];

  // Called by the lanes of one warp.
  __device__ void fill(double x_unit) {
    const int lane = threadIdx.x % kWarpSize;
    roots[lane] = detail::kRootsOfTwo[lane];
    if (lane == 0) {
      unit = 32 * x_unit;
      lowest = high_word(-1020 / x_unit);
    }
  }
};

// 2^(unit x) for a given unit > 0, within 2 ulp. Below 2^-1020 and for -inf it is 0;
// for NaN, or an x that overflows, it is undefined. All lanes of the warp must take
// part, since each holds one entry of the table.
//
// 32 unit x = n + f with an integer n and |f| <= 1/2: 2^(unit x) = 2^(n / 32) + 2^(n /
// 32) (2^(f / 32) - 1). 2^(n / 32) is a table entry with n / 32 added to its exponent,
// the bracket a polynomial. 10 float64 instructions, where exp takes 16.
class exp2_t {
 public:
  explicit __device__ exp2_t(const exp2_table_t& table)
      : unit_(table.unit),
        lowest_(table.lowest),
        root_(table.roots[threadIdx.x % kWarpSize]) {}

  __device__ __forceinline__ double operator()(double x) const {
    constexpr double kToInteger = 6755399441055744.0;  // 1.5 * 2^52
    const double shifted = fma_of(x, unit_, kToInteger);
    const int n = __double2loint(shifted);
    const double f = fma_of(x, unit_, kToInteger - shifted);
    // (2^(f / 32) - 1) / f with minimal relative error on [-1/2, 1/2]: 1.4e-16
    double y = 3.9737238568525983e-11;
    y = fma_of(y, f, 9.172607532092245e-09);
    y = fma_of(y, f, 1.6938509724285119e-06);
    y = fma_of(y, f, 0.0002345961981994449);
    y = fma_of(y, f, 0.02166084939249829);
    y *= f;
    const double root = __shfl_sync(kFullMask, root_, n & 31);
    const double power = __hiloint2double(
        __double2hiint(root) + static_cast<int>(unsigned(n >> 5) << 20),
        __double2loint(root));
    y = fma_of(power, y, power);
    return high_word(x) > lowest_ ? 0 : y;  // the sign is the highest bit
  }

 private:
  double unit_;
  unsigned lowest_;
  double root_;
};

// SPDX-License-Identifier: MIT
// The softcap for kernels of sm_90a: tanh of products q.k, a polynomial for small ones.
#pragma once

#include "common/math.cuh"
#include "ptx/math.cuh"
#include "ptx/packed.cuh"

// The softcap as prepared by the host (_attention/gpu/sm90/forward.py); in exponents of
// 2 if it is the only option.
struct cap_t {
  float inverse;          // scale / softcap: from products to y of tanh(y)
  float limit;            // products up to this have |y| <= 0.4
  float softcap;          // from tanh(y) to the score
  float coefficients[4];  // of the odd powers of a product
};

// For |y| <= 0.4, to 1e-7 of the result, with multiplications only.
struct near_t {
  const cap_t& cap;

  // score - m, with a single further rounding.
  __device__ __forceinline__ float operator()(float q_dot_k, float m) const {
    const float square = q_dot_k * q_dot_k;
    float sum = cap.coefficients[3];
#pragma unroll
    for (int n = 2; n >= 0; --n) sum = fmaf(sum, square, cap.coefficients[n]);
    return fmaf(q_dot_k, sum, -m);
  }
};

// For any y. For larger ones, tanh(|y|) = 1 - 2 u / (1 + u) with u = exp(-2 |y|).
struct any_size_t {
  const cap_t& cap;

  __device__ __forceinline__ float operator()(float q_dot_k, float m) const {
    const float y = q_dot_k * cap.inverse;
    const float u = ptx::ex2_approx_ftz(fabsf(y) * float(-2 * kLog2e));
    const float tanh = fmaf(-2 * u, ptx::rcp_approx_ftz(1 + u), 1.f);
    // Written as a select; otherwise the compiler makes a branch for each number.
    return ptx::select(fabsf(q_dot_k) <= cap.limit, near_t{cap}(q_dot_k, m),
                       fmaf(copysignf(tanh, y), cap.softcap, -m));
  }
};

// Applies it to all products of a tile; `near`: none exceeds the limit.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], const cap_t& cap,
                                           bool near) {
  if (near) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] = near_t{cap}(s[e], 0.f);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] = any_size_t{cap}(s[e], 0.f);
  }
}

// SPDX-License-Identifier: MIT
// The softcap for kernels of sm_90a: products q.k through tanh, as a polynomial where
// they are small.
#pragma once

#include "common/math.cuh"
#include "ptx/math.cuh"
#include "ptx/packed.cuh"

// The softcap of a call, as the host prepares it (_attention/gpu/sm90/forward.py); in
// exponents of 2 where it is the only term.
struct cap_t {
  float inverse;          // scale / softcap: products times this are y of tanh(y)
  float limit;            // products up to this size have |y| <= 0.4
  float softcap;          // tanh(y) times this is the score
  float coefficients[4];  // of such a score by the odd powers of a product
};

// For |y| <= 0.4, to 1e-7 of the result: nothing but multiplications.
struct near_t {
  const cap_t& cap;

  // What is left after one rounding more: score - m.
  __device__ __forceinline__ float operator()(float q_dot_k, float m) const {
    const float square = q_dot_k * q_dot_k;
    float sum = cap.coefficients[3];
#pragma unroll
    for (int n = 2; n >= 0; --n) sum = fmaf(sum, square, cap.coefficients[n]);
    return fmaf(q_dot_k, sum, -m);
  }
};

// Of any size. For larger ones, tanh(|y|) = 1 - 2 u / (1 + u) with u = exp(-2 |y|).
struct any_size_t {
  const cap_t& cap;

  __device__ __forceinline__ float operator()(float q_dot_k, float m) const {
    const float y = q_dot_k * cap.inverse;
    const float u = ptx::ex2_approx_ftz(fabsf(y) * float(-2 * kLog2e));
    const float tanh = fmaf(-2 * u, ptx::rcp_approx_ftz(1 + u), 1.f);
    // Without the select by hand each number has a branch of its own.
    return ptx::select(fabsf(q_dot_k) <= cap.limit, near_t{cap}(q_dot_k, m),
                       fmaf(copysignf(tanh, y), cap.softcap, -m));
  }
};

// All products of a tile; `near`: none is beyond the limit.
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

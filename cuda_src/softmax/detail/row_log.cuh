// SPDX-License-Identifier: MIT
// Shared by logsumexp of rows: the problem, an accurate log, the results.
//
// Parameters KEEPS               1 if L2 should keep the results rather than the input:
//                                writes between reads cost several times their bytes
#pragma once

#include "common/vector.cuh"
#include "ptx/cache_hint.cuh"
#include "softmax/detail/thread_group.cuh"
#include "softmax/detail/log_params.cuh"

constexpr bool kKeeps = KEEPS;

// Accurate log of the row's sum, for any values: the largest score plus log1p of all
// other terms, which are never added to the 1 that would swallow them. Called by all
// lanes of a row, and of a warp if these are more.
__device__ __noinline__ double careful_log(const a_t* a, long long length) {
  double m = -infinity<double>();
  for (long long i = lane(); i < length; i += kLanes) {
    m = larger_finite_t()(m, to<double>(a[i]));
  }
  m = row_max(m);
  double top = 0;
  wide_sum_t rest = {};
  for (long long i = lane(); i < length; i += kLanes) {
    const double score = to<double>(a[i]);
    if (score == m) {
      top += 1;
    } else {
      add_exp(rest, score, m);
    }
  }
  rest = group_reduce<kLanes>(rest, plus_t());
  rest += row_sum(top) - 1;
  return log_beside(m, rest);
}

template <typename T> __device__ __forceinline__ void store_result(out_t* place, T x) {
  const out_t result = to<out_t>(x);
#if __CUDA_ARCH__ >= 800
  if constexpr (kKeeps) {
    using word_t = vector_t<out_t, 1>::word_t;
    ptx::store_global(reinterpret_cast<word_t*>(place),
                      reinterpret_cast<const word_t&>(result),
                      ptx::policy_evict_last());
    return;
  }
#endif
  *place = result;
}

__device__ __forceinline__ void store(const layout_t& layout, long long row,
                                      const total_t& sum, double log, out_t* out,
                                      out_t* sign) {
  const auto at = locate(layout.outer, row);
  store_result(out + at.of[kOut], log);
  if (layout.returns_sign) {
    store_result(sign + at.of[kSign], sign_of(sum.top));
  }
}

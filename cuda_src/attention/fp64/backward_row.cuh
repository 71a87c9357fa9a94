// SPDX-License-Identifier: MIT
// The factor of the weights of a query, for gradients in float64.
#pragma once

#include "attention/score/score.cuh"

// Whether a total of weights is 1 up to kMost roundings of lse; if not, lse covers keys
// of other calls.
template <int kMost = 8>
__device__ __forceinline__ bool sums_to_one(double total, double lse) {
  const double roundings = kMost * 0x1p-52 * larger(1.0, abs_of(lse));
  // False if both are infinite, for a row that sees no key.
  return abs_of(log_of(total)) < roundings;
}
__device__ __forceinline__ double factor_of(double total, double lse) {
  return sums_to_one(total, lse) ? 1 / total : 1;
}

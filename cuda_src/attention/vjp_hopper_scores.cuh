// SPDX-License-Identifier: MIT
// Scores with options in the gradient kernels of sm_90a that own one kind of row.
#pragma once

#include "attention/vjp_hopper.cuh"

constexpr int kMany = 1 << 30;  // far more than a tile has rows or columns

// Whether a score is more than a product: then it is made by scores_t, in natural
// units.
constexpr bool kHasTerms = kHasBias || kHasMask || kHasAlibi || kHasSoftcap;

// What makes scores exponents of 2, and a score that makes a weight of 0.
__device__ __forceinline__ float to_log2(const inputs_t& inputs) {
  return kHasTerms ? static_cast<float>(kLog2e) : inputs.to_log2;
}
__device__ __forceinline__ float hidden_score(const inputs_t& inputs) {
  return kHasTerms ? -infinity<float>() : inputs.hidden;
}

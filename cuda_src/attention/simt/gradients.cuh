// SPDX-License-Identifier: MIT
// Shared by the gradient kernels: where gradients go, and sums over entries.
//
// For rows i and keys j, with P = exp(S - lse) and dO the gradient of out:
//     delta_i = sum(dO_i * out_i) - dlse_i,  dP = dO v^T,  dS = P * (dP - delta),
//     dbias = dS,  then dS *= d score / d(scale q.k),
//     dq = scale dS k,  dk = scale dS^T q,  dv = P^T dO,
//     dsink = -sum_i exp(sink - lse_i) delta_i.
//
// An entry is one head of one batch entry. A gradient has its own `kept` entries. Those
// that share one, because the array was broadcast or because query heads share a head
// of k, are its `summed` entries, which a block processes in order.
#pragma once

#include "attention/score/score.cuh"

#ifndef GRAD_T
#error "GRAD_T comes from the host"
#endif
using grad_t = GRAD_T;  // of the gradients that a kernel writes

// Batch axes, heads of k, query heads per group.
constexpr int kEntryAxes = kBatchDims + 2;

// GRADS of _attention/gpu/gradient_layout.py is the same struct on the host.
struct grads_t {
  operand_t dout, lse, dlse;
  index_t num_kept, num_summed;
  // Offsets of a kept entry: among all entries, and in up to two gradients.
  axes_t<kEntryAxes, 3> kept;
  axes_t<kEntryAxes, 1> summed;  // among all entries
  index_t row[2], col[2];        // strides of the gradients

  // The coordinates of summed entry `summed_index` of a kept one.
  __device__ tile_coord_t entry(const params_t& params, index_t kept_entry,
                                index_t summed_index) const {
    return tile_coord_t(params, kept_entry + locate(summed, summed_index).of[0], 1);
  }
};

// The arrays of every gradient kernel, and where they are not combined, two numbers of
// each row of scores.
//   dout   (batch, heads, queries, head_dim_v)
//   lse    (batch, heads, queries)
//   delta  as lse, contiguous
#define BACKWARD_PARAMETERS QKV_PARAMETERS, const elem_t* __restrict__ dout
#define ROW_PARAMETERS \
  const accum_t* __restrict__ lse, const accum_t* __restrict__ delta

// Whether a recomputed lse equals the given one up to rounding. If not, the given one
// covers keys of other calls.
__device__ __forceinline__ bool is_same_lse(accum_t own, accum_t given) {
  constexpr accum_t kUnit = sizeof(accum_t) == 8 ? 0x1p-52 : 0x1p-23;
  return abs_of(own - given) <= 8 * kUnit * larger(accum_t(1), abs_of(given));
}

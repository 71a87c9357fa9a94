// SPDX-License-Identifier: MIT
// attention_vjp_rows: statistics of each row of scores for the gradient kernels.
//
// Algorithm  delta_i = sum(dO_i * out_i) - dlse_i, and with sinks the row's part of
//            their gradient (sink_terms.cuh). If lse was computed from scores with
//            other rounding errors, P = exp(S - lse) would not sum to 1. It is
//            therefore recomputed from the scores of these kernels, and used if it
//            equals the given one up to rounding. If not, lse covers other calls' keys.
// Grid       one warp per row; lanes across head_dim_v
// Memory     global: dO and out once; one or two numbers per row
// Numbers    accum_t. Where out is 0 the product is 0: a row that sees no key
//            contributes to no gradient, even if its dO is NaN
// Limits     none
#include "attention/simt/gradients.cuh"
#include "attention/simt/sink_terms.cuh"
#include "common/reduce.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_vjp_rows(
    const elem_t* __restrict__ out,    // (batch, heads, queries, head_dim_v)
    const elem_t* __restrict__ dout,   // as out
    const accum_t* __restrict__ lse,   // (batch, heads, queries)
    accum_t* __restrict__ own_lse,     // as delta, or null; becomes the lse to use
    const accum_t* __restrict__ dlse,  // as lse, or null
    accum_t* __restrict__ delta,       // as lse, contiguous
    accum_t* __restrict__ sink_terms,  // as delta, or null
    SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  const index_t row =
      block_index() * (kNumThreads / kWarpSize) + threadIdx.x / kWarpSize;
  const tile_coord_t at(params, row, params.seqlen_q);
  if (!at.exists) return;
  const index_t i = at.tile;
  const scores_t scores(at, SCORE_ARGUMENTS);

  const elem_t* const out_row = at.at(out, params.out) + i * params.out.row;
  const elem_t* const dout_row = at.at(dout, grads.dout) + i * grads.dout.row;
  accum_t sum = 0;
  bool has_out = false;
  out_rounding_t rounding;
  for (index_t d = threadIdx.x % kWarpSize; d < params.head_dim_v; d += kWarpSize) {
    const accum_t o = to<accum_t>(out_row[d]), down = to<accum_t>(dout_row[d]);
    if (o != 0) sum = fma_of(o, down, sum);
    has_out |= o != 0;
    rounding.add(o, down);
  }
  sum = warp_reduce(sum, [](accum_t a, accum_t b) { return a + b; });
  if constexpr (kHasSinks) has_out = __any_sync(kFullMask, has_out);
  rounding.reduce();
  if (threadIdx.x % kWarpSize != 0) return;
  accum_t log_sum = at.at(lse, grads.lse)[i * grads.lse.row];
  if (dlse != nullptr) {
    const accum_t down = at.at(dlse, grads.dlse)[i * grads.dlse.row];
    // The lse of a row that sees no key is the sink, which then receives its gradient
    // unless that is not finite.
    const bool is_sink = kHasSinks && !has_out && log_sum == scores.sink();
    if (!is_sink || is_finite(down)) sum -= down;
  }
  if (!scores.is_query(i)) sum = 0;
  delta[row] = sum;
  if (own_lse != nullptr) {
    const accum_t own = own_lse[row];
    if (is_same_lse(own, log_sum)) log_sum = own;
    own_lse[row] = log_sum;
  }
  if (kHasSinks && sink_terms != nullptr) {
    sink_terms[row] = sink_term(scores, i, log_sum, sum, rounding);
  }
}

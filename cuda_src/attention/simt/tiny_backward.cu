// SPDX-License-Identifier: MIT
// attention_vjp_tiny: gradients of entries with the fewest queries, keys and columns,
// in one launch.
//
// Algorithm  A thread computes a row of
//                S = score(q k^T),  P = exp(S - lse),  dP = dO v^T
//                delta = sum P dP - dlse,  dS = P (dP - delta) score'(q k^T)
//                dq = scale dS k
//            and then, from what the threads of a head have exchanged, a row of
//                dv = P^T dO,  dk = scale dS^T q
// Grid       kKeys threads of a warp per head, one for each query and for each key
// Tiles      P, dS  shared, kKeys x kKeys per head
// Memory     global: each array once but for the cache; out only where lse covers keys
//            of other calls
// Numbers    all in accum_t. lse is recomputed from these scores and used if it equals
//            the given one up to rounding, so that P sums to 1. The same bits in every
//            run
// Limits     kKeys queries and keys; head_dim and head_dim_v up to kHeadDim and
//            kHeadDimV; one query head per head of k
#include "attention/simt/gradients.cuh"
#include "attention/simt/tiny.cuh"

static_assert(kWarpSize % kKeys == 0 && kNumThreads % kWarpSize == 0);

// TINY_GRADS of _attention/gpu/simt/tiny_backward.py is the same struct on the host.
struct tiny_grads_t {
  operand_t dout, lse, dlse, dq, dk, dv;
};

// A head in global memory; dlse may be null.
struct head_t {
  const elem_t *q, *k, *v, *dout, *out;
  const accum_t *lse, *dlse;
  elem_t *dq, *dk, *dv;
};

// P and dS of a head, a row for each query.
struct weights_t {
  accum_t p[kKeys][kKeys], ds[kKeys][kKeys];
};

// sum(dO * out); 0 where out is 0, even if dO is NaN.
__device__ __forceinline__ accum_t dot_out(const row_t<kHeadDimV>& dout,
                                           const elem_t* out, index_t col_stride,
                                           int dim) {
  accum_t sum = 0;
#pragma unroll
  for (int d = 0; d < kHeadDimV; ++d) {
    const accum_t o = d < dim ? to<accum_t>(out[d * col_stride]) : accum_t(0);
    if (o != 0) sum += o * dout[d];
  }
  return sum;
}

// dq of query i; P and dS of its keys go to `weights`.
template <bool kVectors>
__device__ __forceinline__ void differentiate(const head_t& head, int i,
                                              const scores_t& scores,
                                              const params_t& params,
                                              const tiny_grads_t& grads,
                                              weights_t& weights) {
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);
  const range_t seen = scores.keys_of(i, i + 1);
  row_t<kHeadDim> q, k[kKeys], dq = {};
  row_t<kHeadDimV> dout, v[kKeys];
  load_row<kVectors>(q, head.q + i * params.q.row, dim);
  load_rows<kVectors>(k, head.k, params.k.row, params.seqlen_k, dim);
  load_row<kVectors>(dout, head.dout + i * grads.dout.row, dim_v);
  load_rows<kVectors>(v, head.v, params.v.row, params.seqlen_k, dim_v);
  const accum_t given = head.lse[i * grads.lse.row];
  accum_t p[kKeys], dp[kKeys], derivatives[kKeys], m, l;
#pragma unroll
  for (int j = 0; j < kKeys; ++j) {
    derivatives[j] = 1;
    const bool sees = seen.first <= j && j < seen.last;
    p[j] = sees ? scores.with_derivative(dot<kHeadDim>(q, k[j]), i, j, derivatives[j])
                : -infinity<accum_t>();
    dp[j] = dot<kHeadDimV>(dout, v[j]);
  }
  weigh(p, m, l);
  const finished_t own = scores.finish(i, m, l);
  const bool is_given = l != 0 && !is_same_lse(own.lse, given);
  const accum_t factor = is_given ? exp_of(m - given) : own.inverse;
  accum_t delta = 0;
#pragma unroll
  for (int j = 0; j < kKeys; ++j) {
    if (is_unseen(p[j])) continue;
    p[j] *= factor;
    delta += p[j] * dp[j];
  }
  if (is_given) {
    delta = dot_out(dout, head.out + i * params.out.row, params.out.col, dim_v);
  }
  if (head.dlse != nullptr) delta -= head.dlse[i * grads.dlse.row];

#pragma unroll
  for (int j = 0; j < kKeys; ++j) {
    accum_t ds = 0;
    if (!is_unseen(p[j])) {
      ds = p[j] * (dp[j] - delta) * derivatives[j];
      add<kHeadDim>(dq, ds, k[j]);
    }
    weights.p[i][j] = p[j];
    weights.ds[i][j] = ds;
  }
  store_row<kHeadDim>(head.dq + i * grads.dq.row, grads.dq.col, dq,
                      static_cast<accum_t>(params.scale), dim);
}

// dk and dv of key j.
template <bool kVectors>
__device__ __forceinline__ void sum_queries(const head_t& head, int j,
                                            const params_t& params,
                                            const tiny_grads_t& grads,
                                            const weights_t& weights) {
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);
  row_t<kHeadDim> q[kKeys], dk = {};
  row_t<kHeadDimV> dout[kKeys], dv = {};
  load_rows<kVectors>(q, head.q, params.q.row, params.seqlen_q, dim);
  load_rows<kVectors>(dout, head.dout, grads.dout.row, params.seqlen_q, dim_v);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const accum_t p = i < params.seqlen_q ? weights.p[i][j] : accum_t(-0.0);
    if (is_unseen(p)) continue;
    add<kHeadDimV>(dv, p, dout[i]);
    add<kHeadDim>(dk, weights.ds[i][j], q[i]);
  }
  store_row<kHeadDimV>(head.dv + j * grads.dv.row, grads.dv.col, dv, 1, dim_v);
  store_row<kHeadDim>(head.dk + j * grads.dk.row, grads.dk.col, dk,
                      static_cast<accum_t>(params.scale), dim);
}

template <bool kVectors>
__device__ __forceinline__ void all_gradients(const head_t& head, int row,
                                              const scores_t& scores,
                                              const params_t& params,
                                              const tiny_grads_t& grads,
                                              weights_t& weights, unsigned lanes) {
  if (row < params.seqlen_q) {
    differentiate<kVectors>(head, row, scores, params, grads, weights);
  }
  __syncwarp(lanes);  // P and dS of the head are complete
  if (row < params.seqlen_k) {
    sum_queries<kVectors>(head, row, params, grads, weights);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_vjp_tiny(QKV_PARAMETERS,
                       const elem_t* __restrict__ dout,   // (.., queries, head_dim_v)
                       const elem_t* __restrict__ out,    // as dout
                       const accum_t* __restrict__ lse,   // (.., queries)
                       const accum_t* __restrict__ dlse,  // as lse, or null
                       grad_t* __restrict__ dq,           // as q
                       grad_t* __restrict__ dk,           // as k
                       grad_t* __restrict__ dv,           // as v
                       SCORE_PARAMETERS, const __grid_constant__ tiny_grads_t grads) {
  __shared__ weights_t weights[kNumThreads / kKeys];
  const int of_block = threadIdx.x / kKeys, row = threadIdx.x % kKeys;
  const tile_coord_t at(params, block_index() * (kNumThreads / kKeys) + of_block);
  if (!at.exists) return;
  const head_t head = {at.at(q, params.q),
                       at.at_kv(k, params.k),
                       at.at_kv(v, params.v),
                       at.at(dout, grads.dout),
                       at.at(out, params.out),
                       at.at(lse, grads.lse),
                       dlse == nullptr ? nullptr : at.at(dlse, grads.dlse),
                       at.at(dq, grads.dq),
                       at.at_kv(dk, grads.dk),
                       at.at_kv(dv, grads.dv)};
  const scores_t scores(at, SCORE_ARGUMENTS);
  // The lanes that have this head.
  const unsigned lanes = ((1u << kKeys) - 1) << threadIdx.x % kWarpSize / kKeys * kKeys;
  if (has_vectors(head.q, params.q.row, params.head_dim) &&
      has_vectors(head.k, params.k.row, params.head_dim) &&
      has_vectors(head.v, params.v.row, params.head_dim_v) &&
      has_vectors(head.dout, grads.dout.row, params.head_dim_v)) {
    all_gradients<true>(head, row, scores, params, grads, weights[of_block], lanes);
  } else {
    all_gradients<false>(head, row, scores, params, grads, weights[of_block], lanes);
  }
}

// SPDX-License-Identifier: MIT
// attention_gemv: forward for many entries with few queries each.
//
// Algorithm  A step of a warp has kSpan keys. The lanes of a key compute, for each
//            query,
//                s = score(q k^T),  m' = max(m, s),  p = exp(s - m')
//                l = l exp(m - m') + p,  o = o exp(m - m') + p v
//            over their own keys, and (m, l, o) of all are combined at the end
// Grid       1-D, one entry per kWarps warps; several in a block if kWarps is 1
// Tiles      q, o   columns of each query   registers, in float32
//            k, v   kSpan keys per warp     registers, as in memory
//            o of the warps                 shared, once at the end
// Memory     global: each array once, out once
// Numbers    all in float32. Sums start at multiples of the keys of a step, so that
//            the bits of a query do not depend on the others
// Limits     kQueries queries, head_dim up to kPartsK vectors of kLanes lanes,
//            head_dim_v up to kPartsV. Each query head has keys of its own
#include "attention/simt/gemv.cuh"

// What a lane knows of a query after some keys.
struct state_t {
  float m, l;
  columns_t<kPartsV> o;

  __device__ __forceinline__ void rescale(float top) {
    const float factor = exp_diff(m, top);
    l *= factor;
#pragma unroll
    for (int c = 0; c < kPartsV * kVector; ++c) o[c] *= factor;
    m = top;
  }
};

// Adds the keys first, first + kKeys and so on to the states of all queries.
__device__ __forceinline__ void add_keys(state_t (&states)[kQueries],
                                         const keys_t& keys, int first,
                                         const columns_t<kPartsK> (&q)[kQueries],
                                         const scores_t& scores, float scale,
                                         const mask_bounds_t& bounds) {
  float s[kUnroll][kQueries];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int key = first + u * kKeys;
    columns_t<kPartsK> k;
    keys.k[u].unpack(k);
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const float product = dot(q[i], k);
      float unused;
      s[u][i] = bounds.sees(i, key)
                    ? keys.score(scores, scale, product, i, u, key, unused)
                    : -infinity<float>();
    }
  }
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    float top = states[i].m;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) top = larger(top, s[u][i]);
    states[i].rescale(top);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    columns_t<kPartsV> v;
    keys.v[u].unpack(v);
    bool all_see = true;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      s[u][i] = weight_of(s[u][i], states[i].m);
      states[i].l += s[u][i];
      all_see &= !is_unseen(s[u][i]);
    }
    if (all_see) {
#pragma unroll
      for (int i = 0; i < kQueries; ++i) add_scaled(states[i].o, s[u][i], v);
    } else {  // v may hold anything
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        if (!is_unseen(s[u][i])) add_scaled(states[i].o, s[u][i], v);
      }
    }
  }
}

// The state over all keys of a warp, in all of its lanes.
__device__ __forceinline__ void combine_keys(state_t& state) {
  state.rescale(over_keys(state.m, [](float a, float b) { return larger(a, b); }));
  state.l = over_keys(state.l, add);
#pragma unroll
  for (int c = 0; c < kPartsV * kVector; ++c) {
    state.o[c] = over_keys(state.o[c], add);
  }
}

// The state of query i over all warps.
__device__ __forceinline__ void combine_warps(state_t& state, int i,
                                              of_warps_t<kPartsV>& shared) {
  float top = -infinity<float>();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    top = larger(top, shared.number[0][warp][i]);
  }
  state = {top, 0, {}};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float factor = exp_diff(shared.number[0][warp][i], top);
    state.l = fmaf(shared.number[1][warp][i], factor, state.l);
#pragma unroll
    for (int c = 0; c < kPartsV * kVector; ++c) {
      state.o[c] = fmaf(shared.at(warp, i, c), factor, state.o[c]);
    }
  }
}

// As store_row() for any address and strides.
__device__ __forceinline__ void store_columns(const matrix_t<elem_t>& target, int i,
                                              index_t col_stride,
                                              const columns_t<kPartsV>& sums,
                                              float factor) {
#pragma unroll
  for (int c = 0; c < kPartsV * kVector; ++c) {
    const int col = column(c / kVector) + c % kVector;
    if (col < target.dim) {
      target.x[i * target.row + col * col_stride] = to<elem_t>(sums[c] * factor);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_gemv(FORWARD_PARAMETERS, SCORE_PARAMETERS) {
  const int warp = warp_of_entry();
  const tile_coord_t at(params, entry_of_grid());
  if (!at.exists) return;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const matrix_t<const elem_t> of_k(at.at_kv(k, params.k), params.k.row,
                                    params.head_dim);
  const matrix_t<const elem_t> of_v(at.at_kv(v, params.v), params.v.row,
                                    params.head_dim_v);
  const matrix_t<const elem_t> of_q(at.at(q, params.q), params.q.row, params.head_dim);
  const mask_bounds_t bounds = scores.mask_bounds(0, 0);
  const range_t range = scores.keys_of(0, kQueries);
  const int last = static_cast<int>(range.last);
  int first = static_cast<int>(range.first) / kStep * kStep + warp * kSpan;

  const float scale = static_cast<float>(params.scale);
  keys_t keys;
  keys.load(of_k, of_v, scores, first + key_of_warp(), last);
  columns_t<kPartsK> q_rows[kQueries];
  state_t states[kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    row_t<kPartsK> row;
    row.load(of_q, i, true);
    row.unpack(q_rows[i]);
    states[i] = {-infinity<float>(), 0, {}};
  }
#pragma unroll 1
  while (first < last) {
    add_keys(states, keys, first + key_of_warp(), q_rows, scores, scale, bounds);
    first += kStep;
    if (first < last) keys.load(of_k, of_v, scores, first + key_of_warp(), last);
  }
#pragma unroll
  for (int i = 0; i < kQueries; ++i) combine_keys(states[i]);

  const matrix_t<elem_t> of_out(at.at(out, params.out), params.out.row,
                                params.head_dim_v);
  const bool has_vectors = params.out.col == 1 &&
                           is_aligned<elem_t, kVector>(of_out.x) &&
                           params.out.row % kVector == 0;
  auto finish = [&](int i, const state_t& state) {
    if (key_of_warp() != 0) return;
    const finished_t finished = scores.finish(i, state.m, state.l);
    if (has_vectors) {
      store_row<kPartsV>(of_out, i, state.o, finished.inverse);
    } else {
      store_columns(of_out, i, params.out.col, state.o, finished.inverse);
    }
    if (lse != nullptr && lane_of_key() == 0) {
      lse[at.row_of_heads * kQueries + i] = finished.lse;
    }
  };
  if constexpr (kWarps == 1) {
#pragma unroll
    for (int i = 0; i < kQueries; ++i) finish(i, states[i]);
  } else {
    __shared__ of_warps_t<kPartsV> shared;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (key_of_warp() != 0) continue;
#pragma unroll
      for (int c = 0; c < kPartsV * kVector; ++c) {
        shared.at(warp, i, c) = states[i].o[c];
      }
      shared.number[0][warp][i] = states[i].m;
      shared.number[1][warp][i] = states[i].l;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < kQueries; i += kWarps) {
      state_t state;
      combine_warps(state, i, shared);
      finish(i, state);
    }
  }
}

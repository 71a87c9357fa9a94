// SPDX-License-Identifier: MIT
// attention_gemv: forward for many entries with few queries each.
//
// Algorithm  A step of a warp has kSpan keys. The lanes of a key compute, for each
//            query,
//                s = score(q k^T),  m' = max(m, s),  p = exp(s - m')
//                l = l exp(m - m') + p,  o = o exp(m - m') + p v
//            over their own keys, and (m, l, o) of all are combined at the end. Where
//            entries are few, KEY_SPLITS lets several blocks share the keys of one;
//            the block that finishes last combines theirs, always in the same order
// Grid       1-D, one entry per kWarps warps; several in a block if kWarps is 1.
//            num_splits blocks for each entry with KEY_SPLITS
// Tiles      q, o   columns of each query   registers, in accum_t
//            k, v   kSpan keys per warp     registers, as in memory
//            o of the warps                 shared, once at the end
// Memory     global: each array once, out once; (m, l, o) of each split
// Numbers    all in accum_t. Sums start at multiples of the keys of a step, so that
//            the bits of a query do not depend on the others
// Limits     kQueries queries, head_dim up to kPartsK vectors of kLanes lanes,
//            head_dim_v up to kPartsV. Each query head has keys of its own
#include "attention/simt/gemv.cuh"

// (m, l, o) of the queries over a split of the keys.
struct part_t {
  accum_t o[kQueries][kPartsV * kVector * kLanes];
  accum_t m[kQueries], l[kQueries];
};
#ifdef KEY_SPLITS
// parts    (entries, splits)
// arrived  how many splits of each entry are finished; the last one leaves a zero
#define SPLIT_PARAMETERS part_t *parts, int *arrived, const index_t num_splits,
#else
#define SPLIT_PARAMETERS
constexpr part_t* parts = nullptr;
constexpr int* arrived = nullptr;
constexpr index_t num_splits = 1;
#endif

// Sums of the largest numbers overflow although their mean does not. So o in float64 is
// that of values times kDown: there are fewer than 1 / kDown keys, and a key weighs at
// most 1. In float32 numbers would become too small.
constexpr accum_t kDown = sizeof(elem_t) == 8 ? accum_t(0x1p-16) : accum_t(1);
constexpr accum_t kUp = 1 / kDown;

// What a lane knows of a query after some keys.
struct state_t {
  accum_t m, l;
  columns_t<kPartsV> o;

  __device__ __forceinline__ void rescale(accum_t top) {
    const accum_t factor = exp_diff(m, top);
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
                                         const scores_t& scores, accum_t scale,
                                         const mask_bounds_t& bounds) {
  accum_t s[kUnroll][kQueries];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int key = first + u * kKeys;
    columns_t<kPartsK> k;
    keys.k[u].unpack(k);
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const accum_t product = dot(q[i], k);
      accum_t unused;
      s[u][i] = bounds.sees(i, key)
                    ? keys.score(scores, scale, product, i, u, key, unused)
                    : -infinity<accum_t>();
    }
  }
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    accum_t top = states[i].m;
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
      for (int i = 0; i < kQueries; ++i) add_scaled(states[i].o, s[u][i] * kDown, v);
    } else {  // v may hold anything
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        if (!is_unseen(s[u][i])) add_scaled(states[i].o, s[u][i] * kDown, v);
      }
    }
  }
}

// The state over all keys of a warp, in all of its lanes.
__device__ __forceinline__ void combine_keys(state_t& state) {
  state.rescale(over_keys(state.m, [](accum_t a, accum_t b) { return larger(a, b); }));
  state.l = over_keys(state.l, add);
#pragma unroll
  for (int c = 0; c < kPartsV * kVector; ++c) {
    state.o[c] = over_keys(state.o[c], add);
  }
}

// The state of query i over all warps.
__device__ __forceinline__ void combine_warps(state_t& state, int i,
                                              of_warps_t<kPartsV>& shared) {
  accum_t top = -infinity<accum_t>();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    top = larger(top, shared.number[0][warp][i]);
  }
  state = {top, 0, {}};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const accum_t factor = exp_diff(shared.number[0][warp][i], top);
    state.l = fma_of(shared.number[1][warp][i], factor, state.l);
#pragma unroll
    for (int c = 0; c < kPartsV * kVector; ++c) {
      state.o[c] = fma_of(shared.at(warp, i, c), factor, state.o[c]);
    }
  }
}

// Stores the state of query i over a split of the keys.
__device__ __forceinline__ void store_part(part_t& part, int i, const state_t& state) {
  if (key_of_warp() != 0) return;
#pragma unroll
  for (int c = 0; c < kPartsV * kVector; ++c) {
    part.o[i][column(c / kVector) + c % kVector] = state.o[c];
  }
  if (lane_of_key() == 0) part.m[i] = state.m, part.l[i] = state.l;
}

// As store_row() for any address and strides.
__device__ __forceinline__ void store_columns(const matrix_t<elem_t>& target, int i,
                                              index_t col_stride,
                                              const columns_t<kPartsV>& sums,
                                              accum_t factor) {
#pragma unroll
  for (int c = 0; c < kPartsV * kVector; ++c) {
    const int col = column(c / kVector) + c % kVector;
    if (col < target.dim) {
      target.x[i * target.row + col * col_stride] = to<elem_t>(sums[c] * factor);
    }
  }
}

// Whether all other blocks of an entry have stored their parts.
__device__ __forceinline__ bool is_last_split(int* arrived, int num_splits) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();  // the part of this block is in memory
  if (threadIdx.x == 0) {
    is_last = atomicAdd(arrived, 1) == num_splits - 1;
    if (is_last) *arrived = 0;  // for the next launch
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// Combines the parts of query i, by all threads. Lanes have parts, and then columns.
__device__ __forceinline__ void combine_splits(const part_t* parts, int num_splits,
                                               int i, const scores_t& scores,
                                               const matrix_t<elem_t>& out,
                                               index_t col_stride, row_lse_t* lse) {
  constexpr int kAhead = 16;  // parts that are loaded before the first is used
  const int lane = threadIdx.x % kWarpSize;
  const auto m_of = [&](int part) {
    return part < num_splits ? __ldcg(&parts[part].m[i]) : -infinity<accum_t>();
  };
  accum_t top = -infinity<accum_t>(), l = 0;
  for (int part = lane; part < num_splits; part += kWarpSize) {
    top = larger(top, m_of(part));
  }
  top = warp_reduce(top, [](accum_t a, accum_t b) { return larger(a, b); });
  for (int part = lane; part < num_splits; part += kWarpSize) {
    l = fma_of(exp_diff(m_of(part), top), __ldcg(&parts[part].l[i]), l);
  }
  const finished_t finished = scores.finish(i, top, warp_reduce(l, add));
  const accum_t factor_of_out = finished.inverse * kUp;
#pragma unroll 1
  for (int first = threadIdx.x - lane; first < out.dim; first += kNumThreads) {
    const int col = first + lane;
    accum_t sum = 0;
#pragma unroll 1
    for (int part = 0; part < num_splits; part += kAhead) {
      const accum_t factor = exp_diff(m_of(part + lane % kAhead), top);
      accum_t x[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const bool is_one = part + n < num_splits && col < out.dim;
        x[n] = is_one ? __ldcg(&parts[part + n].o[i][col]) : 0;
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        sum = fma_of(__shfl_sync(kFullMask, factor, n), x[n], sum);
      }
    }
    if (col < out.dim) {
      out.x[i * out.row + col * col_stride] = to<elem_t>(sum * factor_of_out);
    }
  }
  if (lse != nullptr && threadIdx.x == 0) *lse = finished.lse;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_gemv(FORWARD_PARAMETERS, SPLIT_PARAMETERS SCORE_PARAMETERS) {
  const int warp = warp_of_entry();
  const split_t split(num_splits, params.seqlen_k);
  const tile_coord_t at(params, split.entry);
  if (!at.exists) return;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const matrix_t<const elem_t> of_k(at.at_kv(k, params.k), params.k.row,
                                    params.head_dim);
  const matrix_t<const elem_t> of_v(at.at_kv(v, params.v), params.v.row,
                                    params.head_dim_v);
  const matrix_t<const elem_t> of_q(at.at(q, params.q), params.q.row, params.head_dim);
  const mask_bounds_t bounds = scores.mask_bounds(0, 0);
  const range_t range = scores.keys_of(0, kQueries);
  int last = static_cast<int>(range.last);
  int first = static_cast<int>(range.first) / kStep * kStep;
  if constexpr (kSplitsKeys) {
    last = min(last, split.last);
    first = max(first, split.first);
  }
  first += warp * kSpan;

  const accum_t scale = static_cast<accum_t>(params.scale);
  keys_t keys;
  keys.load(of_k, of_v, scores, first + key_of_warp(), last);
  columns_t<kPartsK> q_rows[kQueries];
  state_t states[kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    row_t<kPartsK> row;
    row.load(of_q, i, true);
    row.unpack(q_rows[i]);
    states[i] = {-infinity<accum_t>(), 0, {}};
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
      store_row<kPartsV>(of_out, i, state.o, finished.inverse * kUp);
    } else {
      store_columns(of_out, i, params.out.col, state.o, finished.inverse * kUp);
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
    part_t* const of_entry = parts + at.row_of_heads * num_splits;
#pragma unroll 1
    for (int i = warp; i < kQueries; i += kWarps) {
      state_t state;
      combine_warps(state, i, shared);
      if constexpr (kSplitsKeys) {
        store_part(of_entry[split.number], i, state);
      } else {
        finish(i, state);
      }
    }
    if constexpr (kSplitsKeys) {
      const int splits = static_cast<int>(num_splits);
      if (!is_last_split(arrived + at.row_of_heads, splits)) return;
#pragma unroll 1
      for (int i = 0; i < kQueries; ++i) {
        combine_splits(of_entry, splits, i, scores, of_out, params.out.col,
                       lse == nullptr ? nullptr : lse + at.row_of_heads * kQueries + i);
      }
    }
  }
}

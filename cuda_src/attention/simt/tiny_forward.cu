// SPDX-License-Identifier: MIT
// attention_tiny: forward for entries with the fewest queries, keys and columns, where
// a tile of tensor cores would be mostly padding.
//
// Algorithm  All scores of a query are available at once:
//                s = score(q k^T),  m = max s,  p = exp(s - m),  l = sum p
//                out = sum p v / l,  lse = m + log l
// Grid       one thread per query, over all heads and batch entries
// Memory     global: q, out and lse once; k and v once per query, from the cache but
//            for the first query of a head
// Numbers    all in accum_t
// Limits     kKeys keys; head_dim and head_dim_v up to kHeadDim and kHeadDimV
#include "attention/simt/tiny.cuh"

// The rows that a query reads, and where its results go.
struct query_t {
  const elem_t *q, *k, *v;
  elem_t* out;
  row_lse_t* lse;
  index_t i;
};

template <bool kVectors>
__device__ __forceinline__ void attend(const query_t& query, const scores_t& scores,
                                       const params_t& params) {
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);
  const range_t seen = scores.keys_of(query.i, query.i + 1);
  row_t<kHeadDim> q, k[kKeys];
  row_t<kHeadDimV> v[kKeys], o = {};
  load_row<kVectors>(q, query.q, dim);
  load_rows<kVectors>(k, query.k, params.k.row, params.seqlen_k, dim);
  load_rows<kVectors>(v, query.v, params.v.row, params.seqlen_k, dim_v);
  accum_t s[kKeys], m, l;
#pragma unroll
  for (int j = 0; j < kKeys; ++j) {
    const bool sees = seen.first <= j && j < seen.last;
    s[j] = sees ? scores(dot<kHeadDim>(q, k[j]), query.i, j) : -infinity<accum_t>();
  }
  weigh(s, m, l);
#pragma unroll
  for (int j = 0; j < kKeys; ++j) {
    if (!is_unseen(s[j])) add<kHeadDimV>(o, s[j], v[j]);
  }
  const finished_t finished = scores.finish(query.i, m, l);
  store_row<kHeadDimV>(query.out, params.out.col, o, finished.inverse, dim_v);
  if (query.lse != nullptr) *query.lse = finished.lse;
}

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_tiny(FORWARD_PARAMETERS, SCORE_PARAMETERS) {
  const tile_coord_t at(params, block_index() * kNumThreads + threadIdx.x,
                        params.seqlen_q);
  if (!at.exists) return;
  const index_t i = at.tile;
  const query_t query = {
      at.at(q, params.q) + i * params.q.row,
      at.at_kv(k, params.k),
      at.at_kv(v, params.v),
      at.at(out, params.out) + i * params.out.row,
      lse == nullptr ? nullptr : lse + at.row_of_heads * params.seqlen_q + i,
      i};
  const scores_t scores(at, SCORE_ARGUMENTS);
  if (has_vectors(query.q, 0, params.head_dim) &&
      has_vectors(query.k, params.k.row, params.head_dim) &&
      has_vectors(query.v, params.v.row, params.head_dim_v)) {
    attend<true>(query, scores, params);
  } else {
    attend<false>(query, scores, params);
  }
}

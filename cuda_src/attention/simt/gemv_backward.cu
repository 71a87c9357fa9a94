// SPDX-License-Identifier: MIT
// attention_vjp_gemv: all gradients of many entries with few queries each, in one
// launch.
//
// Algorithm  delta = sum(dO * out) - dlse of each query, then for kSpan keys at a time
//            of a warp
//                s = score(q k^T),  p = exp(s - lse),  dp = dO v^T
//                ds = p (dp - delta),  dbias = ds,  then ds *= score'(q k^T)
//                dv = sum p dO,  dk = scale sum ds q    over the queries
//                dq += scale ds k
//            With KEEP_WEIGHTS p and ds are kept, and dv and dk follow when the sum of
//            all p is known
// Grid       1-D, one entry per kWarps warps; several in a block if kWarps is 1
// Tiles      q, dO, dq   columns of each query   registers, in accum_t
//            k, v        kSpan keys per warp     registers, as in memory
//            dq of the warps                     shared, once at the end
//            p, ds       with KEEP_WEIGHTS       shared, of all scores
// Memory     global: each array once; k twice in float32, and in float64 without
//            KEEP_WEIGHTS, from L1 or L2
// Splits     gemv_backward.cuh: blocks that share an entry
// Numbers    all in accum_t. In float32 a pass over the keys computes lse from these
//            scores: it is used if it equals the given one up to rounding, so that p
//            sums to 1. In float64 so does a factor of p. The same bits in every run
// Limits     kQueries queries, head_dim up to kPartsK vectors of kLanes lanes,
//            head_dim_v up to kPartsV. Each query head has keys of its own
#include "attention/fp64/backward_row.cuh"
#include "attention/simt/gemv_backward.cuh"

#ifdef KEEP_WEIGHTS
constexpr bool kKeepsWeights = true;
static_assert(kHasFactor && !kSplitsKeys);
// No third number is kept.
static_assert(!kHasBias || !kHasDerivative);
#else
constexpr bool kKeepsWeights = false;
#endif
// Whether the sum of all weights is known before they are used.
constexpr bool kSumsFirst = sizeof(elem_t) >= 4 && !kKeepsWeights;
constexpr bool kIsTf32 = IS_GIVEN(TF32);  // so lse is that of rounded scores

// add_scaled() without numbers that are not finite: they count in scores alone, and dS
// already is what they made of it.
template <int kColumns>
__device__ __forceinline__ void add_finite(accum_t (&sums)[kColumns], accum_t weight,
                                           const accum_t (&x)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    sums[c] = fma_of(weight, is_finite(x[c]) ? x[c] : 0, sums[c]);
  }
}

// The arrays of an entry.
struct entry_t {
  matrix_t<const elem_t> q, k, v, dout, out;
  matrix_t<dq_t> dq;
  matrix_t<elem_t> dk, dv;
  int last_key;  // of this block
  accum_t scale;
};

// Loads query i, and computes delta. A warp has all of it in the lanes of each key.
__device__ __forceinline__ void load_query(query_t& query, const entry_t& entry, int i,
                                           const accum_t* lse, const accum_t* dlse) {
  row_t<kPartsK> q;
  row_t<kPartsV> dout, out;
  q.load(entry.q, i, true);
  dout.load(entry.dout, i, true);
  out.load(entry.out, i, true);
  query.lse = *lse;
  query.set_factor(0, 1);
  query.delta = dlse == nullptr ? 0 : -*dlse;
  q.unpack(query.q);
  dout.unpack(query.dout);
  columns_t<kPartsV> o;
  out.unpack(o);
  accum_t sum = 0;
#pragma unroll
  for (int c = 0; c < kPartsV * kVector; ++c) {
    if (o[c] != 0) sum = fma_of(query.dout[c], o[c], sum);  // even if dO is NaN
  }
#pragma unroll
  for (int c = 0; c < kPartsK * kVector; ++c) query.dq[c] = 0;
  query.delta += warp_reduce<kLanes>(sum, add);
}

// Lets the weights of a query, whose sum is `total`, sum to 1 unless lse covers keys of
// other calls.
__device__ __forceinline__ void correct(query_t& query, accum_t total, accum_t sink) {
  accum_t& lse = query.lse;
  total += exp_diff(sink, lse);
  if constexpr (kHasFactor) {
    query.set_factor(0, factor_of(total, lse));
  } else {
    constexpr accum_t kUnit = kIsTf32 ? 0x1p-11f : 0x1p-20f;
    const accum_t own = lse + log_of(total);
    if (abs_of(own - lse) <= kUnit * larger(accum_t(1), abs_of(lse))) lse = own;
  }
}

struct __align__(16) weight_t {
  accum_t p, ds;  // without the factor
};

// p and ds of all scores of an entry.
__device__ __forceinline__ weight_t* kept_weights(index_t seqlen_k) {
  extern __shared__ __align__(16) unsigned char smem[];
  return reinterpret_cast<weight_t*>(smem) +
         threadIdx.x / (kWarpSize * kWarps) * seqlen_k * kQueries;
}

// Adds a step of keys to the gradients of the queries, and stores those of the keys
// unless weights are kept. `take` gets p and ds of each score.
template <typename Take>
__device__ __forceinline__ void add_gradients(query_t (&queries)[kQueries],
                                              const owned_t& owned, const keys_t& keys,
                                              int first, const entry_t& entry,
                                              const scores_t& scores,
                                              const mask_bounds_t& bounds, Take take) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int key = first + u * kKeys;
    columns_t<kPartsK> k, dk = {};
    columns_t<kPartsV> v, dv = {};
    keys.k[u].unpack(k);
    keys.v[u].unpack(v);
    accum_t qk[kPadded] = {}, dp[kPadded] = {};
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      qk[i] = dot_of_lane(queries[i].q, k);
      dp[i] = dot_of_lane(queries[i].dout, v);
    }
    sum_for_owners(qk);
    sum_for_owners(dp);
    accum_t own_p[kOwned], own_ds[kOwned];
    bool all_finite = true;  // q, k, v and dO
#pragma unroll
    for (int j = 0; j < kOwned; ++j) {
      const int i = owned.query(j);
      all_finite &= is_finite(qk[j]) && is_finite(dp[j]);
      accum_t derivative = 1;
      const accum_t s =
          owned.sees(bounds, j, key)
              ? keys.score(scores, entry.scale, qk[j], i, u, key, derivative)
              : -infinity<accum_t>();
      own_p[j] = weight_of(s, owned.lse[j]);
      if constexpr (kHasFactor && kSumsFirst) own_p[j] *= owned.factor(j);
      own_ds[j] =
          is_unseen(own_p[j]) ? accum_t(0) : own_p[j] * (dp[j] - owned.delta[j]);
      if constexpr (!kKeepsWeights) take(j, i, key, own_p[j], own_ds[j]);
      if (kHasDerivative && !is_unseen(own_p[j])) own_ds[j] *= derivative;
      if constexpr (kKeepsWeights) take(j, i, key, own_p[j], own_ds[j]);
    }
    if constexpr (kOwners > 1) all_finite = __all_sync(kFullMask, all_finite);
    accum_t p[kQueries], ds[kQueries];
    from_owners(p, own_p);
    from_owners(ds, own_ds);
    if (all_finite) {
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        add_scaled(queries[i].dq, ds[i], k);
        if constexpr (!kKeepsWeights) {
          add_scaled(dk, ds[i], queries[i].q);
          add_scaled(dv, p[i], queries[i].dout);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        if (is_unseen(p[i])) continue;
        add_finite(queries[i].dq, ds[i], k);
        if constexpr (!kKeepsWeights) {
          add_finite(dk, ds[i], queries[i].q);
          add_scaled(dv, p[i], queries[i].dout);
        }
      }
    }
    if (!kKeepsWeights && key < entry.last_key) {
      store_row<kPartsK>(entry.dk, key, dk, entry.scale);
      store_row<kPartsV>(entry.dv, key, dv, 1);
    }
  }
}

// Stores the gradients of keys first, first + kKeys and so on from the weights that
// were kept, those of keys below `last`.
template <typename Dbias>
__device__ __forceinline__ void store_gradients(const query_t (&queries)[kQueries],
                                                const weight_t* weights, int first,
                                                int last, const entry_t& entry,
                                                Dbias store_dbias) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int key = first + u * kKeys;
    if (key >= entry.last_key) break;
    columns_t<kPartsK> dk = {};
    columns_t<kPartsV> dv = {};
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      weight_t weight = {accum_t(-0.0), 0};
      if (key < last) weight = weights[key * kQueries + i];
      const accum_t ds = weight.ds * queries[i].factor(0);
      if (lane_of_key() == 0) store_dbias(i, key, ds);
      if (is_unseen(weight.p)) continue;
      add_finite(dk, ds, queries[i].q);
      add_scaled(dv, weight.p * queries[i].factor(0), queries[i].dout);
    }
    store_row<kPartsK>(entry.dk, key, dk, entry.scale);
    store_row<kPartsV>(entry.dv, key, dv, 1);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_gemv(QKV_PARAMETERS,
                       const elem_t* __restrict__ dout,   // (batch, heads, queries, ..)
                       const elem_t* __restrict__ out,    // as dout
                       const accum_t* __restrict__ lse,   // (batch, heads, queries)
                       const accum_t* __restrict__ dlse,  // as lse, or null
                       SPLIT_PARAMETERS dq_t* __restrict__ dq,  // as q, or terms
                       elem_t* __restrict__ dk,                 // as k
                       elem_t* __restrict__ dv,                 // as v
                       bias_t* __restrict__ dbias,              // as scores, or null
                       SCORE_PARAMETERS, const __grid_constant__ gemv_grads_t grads) {
  const int warp = warp_of_entry();
  const split_t split(num_splits, params.seqlen_k);
  const tile_coord_t at(params, split.entry);
  if (!at.exists) return;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const index_t dim = params.head_dim, dim_v = params.head_dim_v;
  const auto dq_of_entry = [&]() -> matrix_t<dq_t> {
    if constexpr (kSplitsKeys) {
      const index_t entries = params.batch_size * params.num_heads;
      const index_t place = split.number * entries + at.row_of_heads;
      return {dq + place * kQueries * dim, dim, dim};
    } else {
      return {at.at(dq, grads.dq), grads.dq.row, dim};
    }
  };
  const entry_t entry = {{at.at(q, params.q), params.q.row, dim},
                         {at.at_kv(k, params.k), params.k.row, dim},
                         {at.at_kv(v, params.v), params.v.row, dim_v},
                         {at.at(dout, grads.dout), grads.dout.row, dim_v},
                         {at.at(out, params.out), params.out.row, dim_v},
                         dq_of_entry(),
                         {at.at_kv(dk, grads.dk), grads.dk.row, dim},
                         {at.at_kv(dv, grads.dv), grads.dv.row, dim_v},
                         split.last,
                         static_cast<accum_t>(params.scale)};
  const mask_bounds_t bounds = scores.mask_bounds(0, 0);
  int last = static_cast<int>(scores.keys_of(0, kQueries).last);
  int begin = warp * kSpan;
  if constexpr (kSplitsKeys) {
    last = min(last, split.last);
    begin += split.first;
  }

  keys_t keys;
  keys.load(entry.k, entry.v, scores, begin + key_of_warp(), last);
  query_t queries[kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    load_query(
        queries[i], entry, i, at.at(lse, grads.lse) + i * grads.lse.row,
        dlse == nullptr ? nullptr : at.at(dlse, grads.dlse) + i * grads.dlse.row);
  }
  __shared__ of_warps_t<kPartsK> shared;
  accum_t own_totals[kOwned] = {};
  const auto correct_all = [&] {
    accum_t totals[kQueries];
    from_owners(totals, own_totals);
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      totals[i] = over_keys(totals[i], add);
      if constexpr (kWarps > 1) shared.number[0][warp][i] = totals[i];
    }
    if constexpr (kWarps > 1) __syncthreads();
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if constexpr (kWarps > 1) totals[i] = shared.sum_of_numbers(i);
      correct(queries[i], totals[i], scores.sink(i));
    }
  };
  if constexpr (kSumsFirst && kSplitsKeys) {
    // Lanes have splits, in the same order in every block.
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const accum_t* const of_query =
          totals + (at.row_of_heads * kQueries + i) * num_splits;
      accum_t total = 0;
      for (index_t n = lane; n < num_splits; n += kWarpSize) total += of_query[n];
      correct(queries[i], warp_reduce<kWarpSize>(total, add), scores.sink(i));
    }
  } else if constexpr (kSumsFirst) {
    const owned_t owned(queries);
    add_weights(own_totals, keys, begin + key_of_warp(), queries, owned, entry.scale,
                scores, bounds);
#pragma unroll 1
    for (int first = begin + kStep; first < last; first += kStep) {
      keys_t next;
      next.load_k(entry.k, scores, first + key_of_warp(), last);
      add_weights(own_totals, next, first + key_of_warp(), queries, owned, entry.scale,
                  scores, bounds);
    }
    correct_all();
  }
  auto store_dbias = [&](int i, int key, accum_t ds) {
    if constexpr (kHasBias) {
      if (dbias != nullptr && key < entry.last_key && i < kQueries &&
          lane_of_key() < kOwners) {
        at.at(dbias, grads.dbias)[i * grads.dbias.row + key * grads.dbias.col] =
            to<bias_t>(ds);
      }
    }
  };
  weight_t* weights = nullptr;
  if constexpr (kKeepsWeights) weights = kept_weights(params.seqlen_k);
  const owned_t owned(queries);
  const auto take = [&](int j, int i, int key, accum_t p, accum_t ds) {
    if constexpr (kKeepsWeights) {
      own_totals[j] += p;
      if (key < last && i < kQueries && lane_of_key() < kOwners) {
        weights[key * kQueries + i] = {p, ds};
      }
    } else {
      store_dbias(i, key, ds);
    }
  };
  const int end = kKeepsWeights ? last : entry.last_key;
  int first = begin;
#pragma unroll 1
  while (first < end) {
    add_gradients(queries, owned, keys, first + key_of_warp(), entry, scores, bounds,
                  take);
    first += kStep;
    if (first < end) {
      keys.load(entry.k, entry.v, scores, first + key_of_warp(), last);
    }
  }
  if constexpr (kKeepsWeights) {
    correct_all();
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
#pragma unroll
      for (accum_t& sum : queries[i].dq) sum *= queries[i].factor(0);
    }
  }

#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
#pragma unroll
    for (int c = 0; c < kPartsK * kVector; ++c) {
      accum_t& sum = queries[i].dq[c];
      sum = over_keys(sum, add);
      if (kWarps > 1 && key_of_warp() == 0) shared.at(warp, i, c) = sum;
    }
    if (kWarps == 1 && key_of_warp() == 0) {
      store_row<kPartsK>(entry.dq, i, queries[i].dq, entry.scale);
    }
  }
  if constexpr (kWarps > 1) {
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < kQueries; i += kWarps) {
      columns_t<kPartsK> sums = {};
#pragma unroll
      for (int c = 0; c < kPartsK * kVector; ++c) {
#pragma unroll
        for (int from = 0; from < kWarps; ++from) sums[c] += shared.at(from, i, c);
      }
      if (key_of_warp() == 0) store_row<kPartsK>(entry.dq, i, sums, entry.scale);
    }
  }
  if constexpr (kKeepsWeights) {
    __syncwarp();  // the lanes of a warp keep the weights of its keys
#pragma unroll 1
    for (first = begin; first < entry.last_key; first += kStep) {
      store_gradients(queries, weights, first + key_of_warp(), last, entry,
                      store_dbias);
    }
  }
}

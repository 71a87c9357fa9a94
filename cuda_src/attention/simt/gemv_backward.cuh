// SPDX-License-Identifier: MIT
// Shared by the kernels of gradients with few queries: queries, and sums of weights.
//
// Where entries are few and have many keys, KEY_SPLITS lets several blocks share an
// entry. Each has some of its keys, and others' weights come from
// gemv_backward_totals.cu. Such blocks write terms of dq, (splits, entries, queries,
// head_dim) of accum_t, which backward_reduce.cu adds up.
//
// totals  (entries, queries, splits)  accum_t: sum of exp(s - lse) over the keys of a
// split
#pragma once

#include "attention/simt/gemv.cuh"

// GEMV_GRADS of _attention/gpu/simt/gemv_backward.py is the same struct on the host.
struct gemv_grads_t {
  operand_t dout, lse, dlse, dq, dk, dv, dbias;
};

#ifdef KEY_SPLITS
using dq_t = accum_t;  // terms
#define SPLIT_PARAMETERS const accum_t *__restrict__ totals, const index_t num_splits,
#else
using dq_t = elem_t;
#define SPLIT_PARAMETERS
constexpr index_t num_splits = 1;
constexpr const accum_t* totals = nullptr;
#endif

// Factors of the weights of queries, which float64 alone has.
constexpr bool kHasFactor = sizeof(elem_t) == 8;
template <bool kExist, int kCount> struct factors_t {
  __device__ __forceinline__ accum_t factor(int) const { return 1; }
  __device__ __forceinline__ void set_factor(int, accum_t) {}
};
template <int kCount> struct factors_t<true, kCount> {
  accum_t x[kCount];

  __device__ __forceinline__ accum_t factor(int j) const { return x[j]; }
  __device__ __forceinline__ void set_factor(int j, accum_t factor) { x[j] = factor; }
};

// A query in registers.
struct query_t : factors_t<kHasFactor, 1> {
  columns_t<kPartsK> q, dq;
  columns_t<kPartsV> dout;
  accum_t lse, delta;
};

// What a lane knows of the queries that it owns.
struct owned_t : factors_t<kHasFactor, kOwned> {
  accum_t lse[kOwned], delta[kOwned];

  __device__ __forceinline__ explicit owned_t(const query_t (&queries)[kQueries])
      : factors_t(), lse(), delta() {
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (i % kOwners == owner()) {
        lse[i / kOwners] = queries[i].lse;
        delta[i / kOwners] = queries[i].delta;
        set_factor(i / kOwners, queries[i].factor(0));
      }
    }
  }
  static __device__ __forceinline__ int query(int j) { return j * kOwners + owner(); }
  // Whether query j of these exists, and sees a key.
  static __device__ __forceinline__ bool sees(const mask_bounds_t& bounds, int j,
                                              int key) {
    const int i = query(j);
    return (kPadded == kQueries || i < kQueries) && bounds.sees(i, key);
  }
};

// Adds the weights of a step of keys to `totals`, one per query of this lane.
__device__ __forceinline__ void add_weights(accum_t (&totals)[kOwned],
                                            const keys_t& keys, int first,
                                            const query_t (&queries)[kQueries],
                                            const owned_t& owned, accum_t scale,
                                            const scores_t& scores,
                                            const mask_bounds_t& bounds) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int key = first + u * kKeys;
    columns_t<kPartsK> k;
    keys.k[u].unpack(k);
    accum_t products[kPadded] = {};
#pragma unroll
    for (int i = 0; i < kQueries; ++i) products[i] = dot_of_lane(queries[i].q, k);
    sum_for_owners(products);
#pragma unroll
    for (int j = 0; j < kOwned; ++j) {
      if (owned.sees(bounds, j, key)) {
        accum_t unused;
        const accum_t score =
            keys.score(scores, scale, products[j], owned.query(j), u, key, unused);
        totals[j] += exp_diff(score, owned.lse[j]);
      }
    }
  }
}

// SPDX-License-Identifier: MIT
// Shared by the kernels of gradients with few queries: queries, and sums of weights.
//
// Where entries are few and have many keys, KEY_SPLITS lets several blocks share an
// entry. Each has some of its keys, and others' weights come from
// gemv_backward_totals.cu. Such blocks write terms of dq, (splits, entries, queries,
// head_dim) in float32, which backward_reduce.cu adds up.
//
// totals  (entries, queries, splits)  float: sum of exp(s - lse) over the keys of a
// split
#pragma once

#include "attention/simt/gemv.cuh"

// GEMV_GRADS of _attention/gpu/simt/gemv_backward.py is the same struct on the host.
struct gemv_grads_t {
  operand_t dout, lse, dlse, dq, dk, dv, dbias;
};

#ifdef KEY_SPLITS
constexpr bool kSplitsKeys = true;
using dq_t = float;  // terms
#define SPLIT_PARAMETERS const float *__restrict__ totals, const index_t num_splits,
static_assert(kEntries == 1 && kWarps > 1);
#else
constexpr bool kSplitsKeys = false;
using dq_t = elem_t;
#define SPLIT_PARAMETERS
constexpr index_t num_splits = 1;
constexpr const float* totals = nullptr;
#endif

// The keys of a block: all of its entry, or a split of them in whole steps.
struct split_t {
  index_t entry, number;
  int first, last;

  __device__ __forceinline__ split_t(index_t splits, index_t seqlen_k)
      : entry(entry_of_grid()), number(0), first(0), last(static_cast<int>(seqlen_k)) {
    if constexpr (kSplitsKeys) {
      entry = divide(block_index(), splits);
      number = block_index() - entry * splits;
      const int steps = (last + kStep - 1) / kStep, n = static_cast<int>(splits);
      const int keys = (steps + n - 1) / n * kStep;
      first = min(static_cast<int>(number) * keys, last);
      last = min(first + keys, last);
    }
  }
};

// A query in registers.
struct query_t {
  columns_t<kPartsK> q, dq;
  columns_t<kPartsV> dout;
  float lse, delta;
};

// What a lane knows of the queries that it owns.
struct owned_t {
  float lse[kOwned], delta[kOwned];

  __device__ __forceinline__ explicit owned_t(const query_t (&queries)[kQueries])
      : lse(), delta() {
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (i % kOwners == owner()) {
        lse[i / kOwners] = queries[i].lse;
        delta[i / kOwners] = queries[i].delta;
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
__device__ __forceinline__ void add_weights(float (&totals)[kOwned], const keys_t& keys,
                                            int first,
                                            const query_t (&queries)[kQueries],
                                            const owned_t& owned, float scale,
                                            const scores_t& scores,
                                            const mask_bounds_t& bounds) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int key = first + u * kKeys;
    columns_t<kPartsK> k;
    keys.k[u].unpack(k);
    float products[kPadded] = {};
#pragma unroll
    for (int i = 0; i < kQueries; ++i) products[i] = dot_of_lane(queries[i].q, k);
    sum_for_owners(products);
#pragma unroll
    for (int j = 0; j < kOwned; ++j) {
      if (owned.sees(bounds, j, key)) {
        float unused;
        const float score =
            keys.score(scores, scale, products[j], owned.query(j), u, key, unused);
        totals[j] += exp_diff(score, owned.lse[j]);
      }
    }
  }
}

// SPDX-License-Identifier: MIT
// Shared by the kernels for few queries: products of a matrix and a vector on CUDA
// cores, which memory bounds.
//
// kLanes lanes of a warp share a key. A lane has the same columns of each row: kParts
// vectors of kVector neighbours, kLanes vectors apart, so that a warp reads whole rows.
// A warp takes kSpan keys at a time, and all of them are loaded before the first is
// used; the warps of an entry take turns.
#pragma once

#include "attention/score/score.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

#if !defined(QUERIES) || !defined(LANES) || !defined(VECTOR) || !defined(PARTS_K) || \
    !defined(PARTS_V) || !defined(UNROLL) || !defined(WARPS) || !defined(ENTRIES) || \
    !defined(MIN_BLOCKS)
#error "QUERIES, LANES, VECTOR, PARTS_K, PARTS_V, UNROLL, WARPS, ENTRIES, MIN_BLOCKS"
#endif
constexpr int kQueries = QUERIES;  // of an entry
constexpr int kLanes = LANES, kVector = VECTOR;
constexpr int kPartsK = PARTS_K, kPartsV = PARTS_V;  // of a row of k, of v
constexpr int kUnroll = UNROLL;
constexpr int kWarps = WARPS;      // of an entry
constexpr int kEntries = ENTRIES;  // of a block
constexpr int kMinBlocks = MIN_BLOCKS;
constexpr int kKeys = kWarpSize / kLanes;  // that a warp reads at once
constexpr int kSpan = kKeys * kUnroll;
constexpr int kStep = kWarps * kSpan;  // keys of an entry at once
static_assert(kWarpSize * kWarps * kEntries == kNumThreads);
static_assert(kWarps == 1 || kEntries == 1);
#ifdef KEY_SPLITS  // several blocks share the keys of an entry
constexpr bool kSplitsKeys = true;
static_assert(kEntries == 1 && kWarps > 1);
#else
constexpr bool kSplitsKeys = false;
#endif

template <int kParts> using columns_t = accum_t[kParts * kVector];

// The index of this thread's lane among those of its key, and of that key in the warp.
__device__ __forceinline__ int lane_of_key() { return threadIdx.x % kLanes; }
__device__ __forceinline__ int key_of_warp() {
  return threadIdx.x % kWarpSize / kLanes;
}
__device__ __forceinline__ int warp_of_entry() {
  return threadIdx.x / kWarpSize % kWarps;
}
__device__ __forceinline__ index_t entry_of_grid() {
  return block_index() * kEntries + threadIdx.x / (kWarpSize * kWarps);
}
__device__ __forceinline__ int column(int part) {
  return (part * kLanes + lane_of_key()) * kVector;
}

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

// --- rows in memory ------------------------------------------------------------------

// Rows of an array of an entry; they start at whole vectors, and end there.
template <typename T> struct matrix_t {
  T* x;
  index_t row;  // stride
  int dim;

  __device__ __forceinline__ matrix_t(T* x, index_t row, index_t dim)
      : x(x), row(row), dim(static_cast<int>(dim)) {}
};

// This lane's part of a row, as it is in memory; zeros from `dim` on.
template <int kParts> struct row_t {
  vector_t<elem_t, kVector> parts[kParts];

  __device__ __forceinline__ void load(const matrix_t<const elem_t>& from, int i,
                                       bool exists) {
    const elem_t* const x = from.x + index_t(i) * from.row;
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      parts[n].word = {};
      if (exists && column(n) < from.dim) {
        parts[n] = load_vector<kVector>(x + column(n));
      }
    }
  }
  __device__ __forceinline__ void unpack(columns_t<kParts>& x) const {
#pragma unroll
    for (int c = 0; c < kParts * kVector; ++c) {
      x[c] = element_as<accum_t>(parts[c / kVector], c % kVector);
    }
  }
};

// A step of keys of a warp.
struct keys_t {
  row_t<kPartsK> k[kUnroll];
  row_t<kPartsV> v[kUnroll];
  accum_t bias[kUnroll][kQueries];  // if that alone is added to scores

  // Keys first, first + kKeys and so on, of those below `last`; zeros beyond.
  __device__ __forceinline__ void load_k(const matrix_t<const elem_t>& from,
                                         const scores_t& scores, int first, int last) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int key = first + u * kKeys;
      k[u].load(from, key, key < last);
    }
    if constexpr (kAddsBiasAlone) {
#pragma unroll
      for (int e = 0; e < kUnroll * kQueries; ++e) {
        const int u = e / kQueries, i = e % kQueries, key = first + u * kKeys;
        bias[u][i] = key < last ? to<accum_t>(*scores.bias_at(i, key)) : 0;
      }
    }
  }
  __device__ __forceinline__ void load(const matrix_t<const elem_t>& from_k,
                                       const matrix_t<const elem_t>& from_v,
                                       const scores_t& scores, int first, int last) {
    load_k(from_k, scores, first, last);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int key = first + u * kKeys;
      v[u].load(from_v, key, key < last);
    }
  }

  // The score of query i and the lane's key u, whose index is `key`, if i sees it.
  __device__ __forceinline__ accum_t score(const scores_t& scores, accum_t scale,
                                           accum_t q_dot_k, int i, int u, int key,
                                           accum_t& derivative) const {
    if constexpr (kAddsBiasAlone) {
      accum_t added = bias[u][0];
#pragma unroll
      for (int n = 1; n < kQueries; ++n) added = n == i ? bias[u][n] : added;
      return fma_of(scale, q_dot_k, added);
    }
    return scores.with_derivative(q_dot_k, i, key, derivative);
  }
};

// Stores this lane's part of row i, times `factor`.
template <int kParts, typename T>
__device__ __forceinline__ void store_row(const matrix_t<T>& target, int i,
                                          const columns_t<kParts>& sums,
                                          accum_t factor) {
  // At most 16 bytes at a time.
  constexpr int kStored = kVector * sizeof(T) > 16 ? 16 / sizeof(T) : kVector;
  T* const x = target.x + index_t(i) * target.row;
#pragma unroll
  for (int n = 0; n < kParts; ++n) {
#pragma unroll
    for (int begin = 0; begin < kVector; begin += kStored) {
      accum_t values[kStored];
#pragma unroll
      for (int e = 0; e < kStored; ++e) {
        values[e] = sums[n * kVector + begin + e] * factor;
      }
      if (column(n) < target.dim) {
        store_vector(x + column(n) + begin, to_vector<T, kStored>::of(values));
      }
    }
  }
}

// --- sums ----------------------------------------------------------------------------

__device__ __forceinline__ accum_t add(accum_t a, accum_t b) { return a + b; }

// x . y over the columns of this lane.
template <int kColumns>
__device__ __forceinline__ accum_t dot_of_lane(const accum_t (&x)[kColumns],
                                               const accum_t (&y)[kColumns]) {
  accum_t sum = x[0] * y[0];
#pragma unroll
  for (int c = 1; c < kColumns; ++c) sum = fma_of(x[c], y[c], sum);
  return sum;
}
// The same over the lanes of a key; each of them gets it.
template <int kColumns>
__device__ __forceinline__ accum_t dot(const accum_t (&x)[kColumns],
                                       const accum_t (&y)[kColumns]) {
  return warp_reduce<kLanes>(dot_of_lane(x, y), add);
}

// Sums of several queries, over the lanes of a key, are made at once: with each step
// half of them end in other lanes, which own these queries and do for them what
// follows. Query i is number i / kOwners of lane i % kOwners.
__host__ __device__ constexpr int owners_of_queries() {
  int owners = 1;
  while (owners < kQueries && owners < kLanes) owners *= 2;
  return owners;
}
constexpr int kOwners = owners_of_queries();
constexpr int kOwned = (kQueries + kOwners - 1) / kOwners;
constexpr int kPadded = kOwners * kOwned;

__device__ __forceinline__ int owner() { return lane_of_key() % kOwners; }

template <int kBit> __device__ __forceinline__ void halve(accum_t (&x)[kPadded]) {
  if constexpr (kBit < kOwners) {
    const bool odd = owner() & kBit;
#pragma unroll
    for (int n = 0; n < kPadded / (2 * kBit); ++n) {
      const accum_t kept = odd ? x[2 * n + 1] : x[2 * n];
      x[n] = kept + shuffle_xor(odd ? x[2 * n] : x[2 * n + 1], kBit);
    }
    halve<2 * kBit>(x);
  }
}
// Sums x over the lanes of a key; the first kOwned are then those of this owner.
__device__ __forceinline__ void sum_for_owners(accum_t (&x)[kPadded]) {
  halve<1>(x);
#pragma unroll
  for (int j = 0; j < kOwned; ++j) {
#pragma unroll
    for (int offset = kLanes / 2; offset >= kOwners; offset /= 2) {
      x[j] += shuffle_xor(x[j], offset);
    }
  }
}
// The number of each query, from its owner.
__device__ __forceinline__ void from_owners(accum_t (&of_queries)[kQueries],
                                            const accum_t (&own)[kOwned]) {
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    of_queries[i] = own[i / kOwners];
    if constexpr (kOwners > 1) {
      const int lane = threadIdx.x % kWarpSize / kLanes * kLanes + i % kOwners;
      of_queries[i] = __shfl_sync(kFullMask, of_queries[i], lane);
    }
  }
}

// sums += weight x.
template <int kColumns>
__device__ __forceinline__ void add_scaled(accum_t (&sums)[kColumns], accum_t weight,
                                           const accum_t (&x)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sums[c] = fma_of(weight, x[c], sums[c]);
}

// Combines the values that lanes of the same columns have for the keys of a warp.
template <typename Combine>
__device__ __forceinline__ accum_t over_keys(accum_t x, Combine combine) {
#pragma unroll
  for (int lanes = kLanes; lanes < kWarpSize; lanes *= 2) {
    x = combine(x, shuffle_xor(x, lanes));
  }
  return x;
}

// exp(s - m); 16-bit results need fewer digits. A hidden key has weight -0, as in
// weight() of score.cuh.
__device__ __forceinline__ accum_t weight_of(accum_t s, accum_t m) {
  accum_t p;
  if constexpr (sizeof(elem_t) == 2) {
    p = exp_fast(s - m);
  } else {
    p = exp_of(s - m);
  }
  return s == -infinity<accum_t>() ? accum_t(-0.0) : p;
}

// Columns of each query, and a number of it, from each warp of an entry.
template <int kParts> struct of_warps_t {
  accum_t columns[kWarps][kQueries][kParts * kVector * kLanes];
  accum_t number[2][kWarps][kQueries];

  __device__ __forceinline__ accum_t& at(int warp, int query, int c) {
    return columns[warp][query][column(c / kVector) + c % kVector];
  }
  __device__ __forceinline__ accum_t sum_of_numbers(int query) const {
    accum_t sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += number[0][warp][query];
    return sum;
  }
};

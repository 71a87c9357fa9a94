// SPDX-License-Identifier: MIT
// What a block of short_backward.cu or short_backward_wide.cu keeps: k and v of an
// entry, tiles of 16 queries, and sums for dv and dk.
#pragma once

#include "attention/fp64/backward_row.cuh"
#include "attention/fp64/short_gradients.cuh"
#include "attention/fp64/weights.cuh"
#include "attention/simt/loop_splits.cuh"
#include "ptx/barrier.cuh"

// The parameters of both kernels, before short_f64_t.
//   out         as dout
//   lse         (batch, heads, queries)
//   dlse        as lse, or null
//   delta       as lse, contiguous
//   sink_terms  as delta, or null
//   dq          as q
//   dk, dv      as k and v, summed over entries
//   found       1: something is not finite
#define SHORT_PARAMETERS                                                 \
  BACKWARD_PARAMETERS, const elem_t *__restrict__ out,                   \
      const accum_t *__restrict__ lse, const accum_t *__restrict__ dlse, \
      accum_t *__restrict__ delta, accum_t *__restrict__ sink_terms,     \
      elem_t *__restrict__ dq, LOOP_PARAMETERS grad_t *dk, grad_t *dv,   \
      int *__restrict__ found, SCORE_PARAMETERS, const __grid_constant__ grads_t grads

// Arrays of the call, or of an entry.
struct arrays_t {
  const double *q, *dout, *out, *lse, *dlse;
  double* dq;
};

// 16 queries; in shared memory, since registers are scarce.
struct tile_t : arrays_t {
  // Of the entry.
  index_t row;  // of its first query in delta
  int summed;   // which of the entries that share k and v
  // Of the tile.
  mask_bounds_t bounds;
  int i0, num_rows;
  bool is_seen;       // whether a query may see a key
  unsigned odd_rows;  // bit n: row n has a number that is not finite
  alignas(16) double lse_of[kWarpRows];
  alignas(16) unsigned char scores_bytes[sizeof(scores_t)];

  __device__ const scores_t& scores() const {
    return *reinterpret_cast<const scores_t*>(scores_bytes);
  }

  // Takes the arrays of an entry from those of the call, by one thread.
  __device__ __forceinline__ void set_entry(const tile_coord_t& at,
                                            const arrays_t& arrays,
                                            const params_t& params,
                                            const grads_t& grads,
                                            const short_f64_t& more) {
    q = at.at(arrays.q, params.q);
    dout = at.at(arrays.dout, grads.dout);
    out = at.at(arrays.out, params.out);
    lse = at.at(arrays.lse, grads.lse);
    dlse = arrays.dlse == nullptr ? nullptr : at.at(arrays.dlse, grads.dlse);
    dq = at.at(arrays.dq, more.dq);
    row = at.row_of_heads * params.seqlen_q;
  }

  // Makes it the tile from query `first` of the entry on, by one thread.
  __device__ __forceinline__ void set_rows(int first, index_t seqlen_q) {
    i0 = first;
    num_rows = static_cast<int>(clamp(seqlen_q - i0, 0, kWarpRows));
    bounds = scores().mask_bounds(i0, 0);
    is_seen = kHasSinks ? min(num_rows, bounds.num_queries) > 0
                        : sees_any(bounds, num_rows, kBlockN);
    odd_rows = 0;
  }

  // Starts a copy of lse of the first `num` queries, by the lanes from 0 on.
  __device__ __forceinline__ void copy_lse(int lane, int num, index_t stride) const {
    if (lane >= kWarpRows) return;
    ptx::copy_or_fill<8>(static_cast<unsigned>(__cvta_generic_to_shared(lse_of + lane)),
                         lse + (lane < num ? (i0 + lane) * stride : 0),
                         lane < num ? 8 : 0);
  }

  // The weight of the sink of a query with this lse; 0 without one.
  __device__ __forceinline__ double sink_of(bool exists, double lse) const {
    if constexpr (kHasSinks) {
      const double score = scores().sink();
      if (exists && score != -infinity<double>()) return exp_diff_exact(score, lse);
    }
    return 0;
  }

  // Writes delta of a query, and its term of dsinks, from the weight of its sink and
  // the factor of its weights.
  __device__ __forceinline__ void write_row(int query, double delta_of, double sink,
                                            double factor, double* delta,
                                            double* sink_terms) const {
    const index_t at = row + i0 + query;
    delta[at] = delta_of;
    if (kHasSinks && sink_terms != nullptr) {
      sink_terms[at] = sink == 0 ? 0 : -sink * factor * delta_of;
    }
  }
};

__device__ __forceinline__ double* shared_keys() {
  extern __shared__ __align__(16) unsigned char smem[];
  return reinterpret_cast<double*>(smem);
}
__device__ __forceinline__ double* shared_values() { return shared_keys() + kKeysSize; }

// Zeroes the numbers of k and v that are not finite, by all warps, and sets the bits of
// their keys: bit n of 16 keys each.
__device__ __forceinline__ void clean_keys(unsigned (&odd_keys)[kStepsN]) {
#pragma unroll 1
  for (int n = thread_t().warp; n < 2 * kStepsN; n += kWarps) {
    const unsigned odd = clean(shared_keys() + n * kRowsSize);
    if (thread_t().lane == 0 && odd != 0) atomicOr(&odd_keys[n % kStepsN], odd);
  }
}

template <int kJobs> __device__ __forceinline__ void zero_sums(sum_t (&sums)[kJobs]) {
#pragma unroll
  for (int n = 0; n < kJobs * kTiles; ++n) {
    double (&sum)[4] = sums[n / kTiles][n % kTiles];
    sum[0] = sum[1] = sum[2] = sum[3] = 0;
  }
}

template <int kJobs>
__device__ __forceinline__ void find_nonfinite(const sum_t (&sums)[kJobs],
                                               bool& nonfinite) {
#pragma unroll
  for (int n = 0; n < kJobs * kTiles * 4; ++n) {
    nonfinite |= !is_finite(sums[n / (4 * kTiles)][n / 4 % kTiles][n % 4]);
  }
}

// Writes the sums of all teams to an entry of dv or dk, which is gradient `side` of
// grads; of a loop that is shared, to the terms of a split. `rows` are those of the
// first team, and the next has its own kStride numbers on.
template <int kStride>
__device__ __forceinline__ void write_sums(grad_t* to, index_t offset,
                                           const double* rows, int side, int cols,
                                           index_t split, const params_t& params,
                                           const grads_t& grads, double scale) {
  to += offset;
  if constexpr (kSplitsLoop) to += split * grads.num_kept * params.seqlen_k * cols;
  const int num_keys = static_cast<int>(params.seqlen_k);
#pragma unroll 1
  for (int n = threadIdx.x; n < num_keys * kDim; n += kNumThreads) {
    const int key = n / kDim, col = n % kDim;
    if (col >= cols) continue;
    const double* const from = rows + place<kDim>(key, col / kVec) + col % kVec;
    double sum = 0;
#pragma unroll
    for (int team = 0; team < kTeams; ++team) sum += from[team * kStride];
    to[key * grads.row[side] + col * grads.col[side]] = sum * scale;
  }
}

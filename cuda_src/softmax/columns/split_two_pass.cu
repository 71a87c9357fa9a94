// SPDX-License-Identifier: MIT
// softmax_split_columns: few long columns in two launches, one for sums, one for
// results.
//
// Algorithm  softmax_split_columns_sum: each block sums the exponentials of its piece
//            of a tile of columns: floats in powers of two
//            (softmax/detail/scaled_sum.cuh); doubles, and columns out of range for
//            that, as softmax_online. softmax_split_columns_write: each block adds the
//            sums of its tile and writes its piece: out_i = exp(s_i - m) / l
//            (log_softmax: (s_i - m) - log l).
// Grid       (tiles, pieces of a column)
// Tiles      kColumns columns of one slab; a thread reads kInRegisters x kVector
// elements at a
//            time and keeps a sum for each of its kVector columns
// Memory     x twice, out once; up to 16 bytes per access, lanes contiguous; between
//            the launches, two doubles per column and piece
// Numbers    as softmax_online
// Limits     the last outer axis has stride 1 in x and out; one reduced axis
#include "softmax/detail/params.cuh"
#include "softmax/detail/column_tile.cuh"
#include "softmax/detail/partial_sum.cuh"

using tile_t = place_t<layout_t, long long>;
static_assert(kSplits && !kInWarp && kCluster == 1, "a block a piece");

// The elements that a thread has at a time.
struct batch_t {
  slots_t<x_t> value;
  unsigned long long selected = 0;  // one bit per slot, if masked
  int rows, columns;                // of this thread

  __device__ __forceinline__ batch_t(const x_t* x, const bool* where,
                                     const tile_t& tile, int first, int rows)
      : rows(rows) {
    value.fill(x_t());
    tile.load_rows(value, x, kX, first, rows);
    if constexpr (kHasWhere) {
      selected = tile.template selected<true>(where, kWhere, first, rows);
    }
  }
  __device__ __forceinline__ bool is_selected(int k, int j) const {
    return kHasWhere ? selected >> (k * kVector + j) & 1 : k < rows;
  }
  __device__ __forceinline__ score_t score(int k, int j, const tile_t& tile) const {
    if (!is_selected(k, j)) return score_t::absent(tile.layout);
    return score_t(to<acc_t>(value.get(k, j)), tile.layout);
  }
};

// Adds all of this thread's rows to the sums of its columns.
template <typename Sum>
__device__ __forceinline__ void add_all(Sum (&sum)[kVector], const x_t* x,
                                        const bool* where, const tile_t& tile) {
#pragma unroll 1
  for (int first = 0; first < tile.rows; first += kInRegisters) {
    const int rows =
        tile.rows - first < kInRegisters ? tile.rows - first : kInRegisters;
    const batch_t batch(x, where, tile, first, rows);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      score_t s[kInRegisters];
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) s[k] = batch.score(k, j, tile);
      take_scores(sum[j], s, keys_t(tile.layout));
    }
  }
}

// This thread's sums of its columns in powers of two; returns one bit per column that
// is in range. If all scores are -inf, the sum is empty.
__device__ __forceinline__ unsigned find_in_powers(partial_t (&found)[kVector],
                                                   const x_t* x, const bool* where,
                                                   const tile_t& tile) {
  powers_t sum[kVector];
  add_all(sum, x, where, tile);
  unsigned reaches = 0;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const bool is_one = is_sum(sum[j]);
    const keys_t keys(tile.layout);
    found[j] = is_one ? partial_of(sum[j], keys) : partial_of(running_t<acc_t>(), keys);
    if (is_one || sum[j].top == -infinity<acc_t>()) reaches |= 1u << j;
  }
  return reaches;
}

// The same as in softmax_online, for any scores, for columns that are not `known`: a
// column's bits must not depend on its neighbours.
__device__ __forceinline__ void find_running(partial_t (&found)[kVector],
                                             unsigned known, const x_t* x,
                                             const bool* where, const tile_t& tile) {
  running_t<acc_t> sum[kVector];
  add_all(sum, x, where, tile);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if (!(known >> j & 1)) found[j] = partial_of(sum[j], keys_t(tile.layout));
  }
}

// Sums of the lanes of a warp are added first; not of doubles, which would lose their
// last digits.
constexpr bool kAddsLanes = kShuffles && kSumsPowers;
constexpr int kSums = kAddsLanes ? kPartials : kDeep;

// Adds sums for their largest m, side by side: one after the other, each would wait for
// the exponential of the one before.
template <typename Place>
__device__ __forceinline__ partial_t add_sums(int count, Place place, keys_t keys) {
  double m = -infinity<double>();
#pragma unroll 4
  for (int i = 0; i < count; ++i) m = larger_finite_t()(m, place(i)->m);
  sum_t l;
#pragma unroll 4
  for (int i = 0; i < count; ++i) l += scaled_to(*place(i), m, keys);
  return {l.value, m};
}

// Adds the sums of the lanes of a warp that have the same columns, in each of them.
__device__ __forceinline__ void add_lanes(partial_t (&sum)[kVector], keys_t keys) {
  double m[kVector], l[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) m[j] = sum[j].m;
  combine_in_warp(m, larger_finite_t());
#pragma unroll
  for (int j = 0; j < kVector; ++j) l[j] = scaled_to(sum[j], m[j], keys);
  combine_in_warp(l, plus_t());
#pragma unroll
  for (int j = 0; j < kVector; ++j) sum[j] = {l[j], m[j]};
}

// The partial sums of column c of tile `at`, from piece 0 on, kColumns apart.
__device__ __forceinline__ partial_t* place_of(partial_t* partial, long long at) {
  return partial + at * gridDim.y * kColumns;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, RESIDENT)
    softmax_split_columns_sum(const x_t* x, const bool* where, out_t* out,
                              partial_t* partial,  // (tiles, pieces, kColumns)
                              const __grid_constant__ layout_t layout) {
  __shared__ partial_t shared[kSums][kColumns];
  const keys_t keys(layout);
  const thread_map how =
      takes_vectors(x, layout, kX) ? thread_map::kVectors : thread_map::kSingles;
  const tile_index_t end = num_tiles(layout);
  for (tile_index_t at = first_tile(); at < end; at += tile_step()) {
    const tile_t tile(layout, how, at);
    partial_t found[kVector];
    const x_t* const x_tile = x + tile.start(kX);
    const bool* const where_tile = where + tile.start(kWhere);
    const unsigned known =
        kSumsPowers ? find_in_powers(found, x_tile, where_tile, tile) : 0;
    if (known != (1u << kVector) - 1) {
      find_running(found, known, x_tile, where_tile, tile);
    }
    __syncthreads();  // all threads have read those of the previous tile
    if (threadIdx.x < kGroup) {
      if constexpr (kAddsLanes) add_lanes(found, keys);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        shared[threadIdx.x * kSums / kGroup][tile.offset(j)] = found[j];
      }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
      place_of(partial, at)[blockIdx.y * kColumns + c] =
          add_sums(kSums, [&](int i) { return &shared[i][c]; }, keys);
    }
  }
}

// The last step for a column, with or without powers of two.
struct either_t {
  finish_t plain;
  finish_in_powers_t powers;
  bool in_powers;

  __device__ __forceinline__ acc_t operator()(score_t s) const {
    return in_powers ? acc_t(powers(s)) : plain(s);
  }
};

// Writes finish[j](score) for this thread's columns.
template <typename Finish>
__device__ __forceinline__ void write(const Finish (&finish)[kVector], const x_t* x,
                                      const bool* where, out_t* out,
                                      const tile_t& tile) {
  // Last rows first: these are most likely still in cache.
#pragma unroll 1
  for (int left = tile.rows; left > 0;) {
    const int rows = left % kInRegisters ? left % kInRegisters : kInRegisters;
    left -= rows;
    const batch_t batch(x, where, tile, left, rows);
    tile.store_rows(out, kOut, left, rows, [&](int k, int j) {
      if (kHasWhere && !batch.is_selected(k, j)) return to<out_t>(unselected());
      return to<out_t>(
          finish[j](score_t(to<acc_t>(batch.value.get(k, j)), tile.layout)));
    });
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, RESIDENT)
    softmax_split_columns_write(const x_t* x, const bool* where, out_t* out,
                                partial_t* partial,
                                const __grid_constant__ layout_t layout) {
  __shared__ partial_t shared[kNumThreads], total[kColumns];
  const keys_t keys(layout);
  const thread_map how =
      takes_vectors(x, layout, kX) && takes_vectors(out, layout, kOut)
          ? thread_map::kVectors
          : thread_map::kSingles;
  const tile_index_t end = num_tiles(layout);
  for (tile_index_t at = first_tile(); at < end; at += tile_step()) {
    const tile_t tile(layout, how, at);
    // Several threads per column add the sums of its pieces.
    constexpr int kJoining = kNumThreads / kColumns;
    static_assert(kJoining >= 1, "a thread a column");
    __syncthreads();  // all threads have read those of the previous tile
    if (threadIdx.x < kJoining * kColumns) {
      const int first = threadIdx.x / kColumns, pieces = gridDim.y;
      const partial_t* const begin =
          place_of(partial, at) + first * kColumns + threadIdx.x % kColumns;
      shared[threadIdx.x] = add_sums(
          first < pieces ? (pieces - first - 1) / kJoining + 1 : 0,
          [&](int i) { return begin + i * kJoining * kColumns; }, keys);
    }
    __syncthreads();
    if (threadIdx.x < kColumns) {
      total[threadIdx.x] = add_sums(
          kJoining, [&](int i) { return &shared[i * kColumns + threadIdx.x]; }, keys);
    }
    __syncthreads();
    running_t<acc_t> sum[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] = sum_of(total[tile.offset(j)]);
    const x_t* const x_tile = x + tile.start(kX);
    const bool* const where_tile = where + tile.start(kWhere);
    out_t* const out_tile = out + tile.start(kOut);
    if constexpr (finish_in_powers_t::kTakes) {
      either_t finish[kVector];
      bool all_in_powers = true;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const double l = sum[j].l.value;
        finish[j].in_powers = finish_in_powers_t::takes(l, sum[j].m);
        if (finish[j].in_powers) {
          finish[j].powers = finish_in_powers_t(l, sum[j].m);
        } else {
          finish[j].plain = finish_t(sum[j].shift(), l);
          all_in_powers = all_in_powers && tile.offset(j) >= tile.columns;
        }
      }
      if (all_in_powers) {
        finish_in_powers_t in_powers[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) in_powers[j] = finish[j].powers;
        write(in_powers, x_tile, where_tile, out_tile, tile);
      } else {
        write(finish, x_tile, where_tile, out_tile, tile);
      }
      continue;
    }
    finish_t finish[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      finish[j] = finish_t(sum[j].shift(), sum[j].l.value);
    }
    write(finish, x_tile, where_tile, out_tile, tile);
  }
}

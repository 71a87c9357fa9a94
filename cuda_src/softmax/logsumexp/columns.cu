// SPDX-License-Identifier: MIT
// softmax_logsumexp_columns: log sum exp along columns in one pass.
//
// Algorithm  sum_i exp(a_i) = l 2^shift (softmax/detail/scaled_sum.cuh),  out = its
//            log. If that would lose digits (results near 0, scores beyond 2^20), the
//            tile is read again:  out = max + log1p(sum of the others).
// Grid       1-D; a block takes kGroupsPerBlock tiles at a time, a cluster takes one
// Tiles      kColumns columns of one slab; a thread reads kInRegisters x kVector
// elements at a
//            time and keeps one sum for each of its kVector columns
// Memory     a once, up to 16 bytes per access, lanes contiguous; one number per column
//            is written; shared: one sum per warp and column
// Numbers    exponentials to half an ulp of acc_t, sums and log in double; for 16-bit
//            results the fast exponential and a float log
// Limits     no weights; the last outer axis has stride 1 in a; one reduced axis
#include "softmax/detail/column_log.cuh"

struct shared_t {
  partial_t sum[kInWarp ? 1 : kPartials][kColumns];
  partial_t piece[kCluster][kColumns];
  partials_t<wide_sum_t> number;
  wide_sum_t careful[kCluster][kColumns];
  int is_doubtful;
};

// The elements that this thread reads at a time; masked ones are -inf.
struct batch_t {
  slots_t<a_t> value;
  unsigned long long absent;

  __device__ __forceinline__ void load(const a_t* a, const bool* where,
                                       const tile_t& tile, int first, int rows) {
    value.fill(a_t());
    tile.load_rows(value, a, kA, first, rows);
    absent = 0;
    if (kHasWhere) {
      const long long side_step = tile.layout.outer.stride[kWhere][OUTER_AXES - 1];
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const int i = tile.offset(j);
          if (k < rows && i < tile.columns &&
              !where[(first + k) * tile.step(kWhere) + i * side_step]) {
            absent |= 1ull << (k * kVector + j);
          }
        }
      }
    }
  }
  template <typename T>
  __device__ __forceinline__ T score(int k, int j, int rows) const {
    const bool takes_part = k < rows && !(kHasWhere && absent >> (k * kVector + j) & 1);
    return takes_part ? to<T>(value.get(k, j)) : -infinity<T>();
  }
};
static_assert(!kHasWhere || kInRegisters * kVector <= 64, "a bit an element");

// Calls take(batch, rows) for all rows of this thread.
template <typename Take>
__device__ __forceinline__ void read_columns(const a_t* a, const bool* where,
                                             const tile_t& tile, Take take) {
  a += tile.start(kA);
  if (kHasWhere) where += tile.start(kWhere);
  for (int first = 0; first < tile.rows; first += kInRegisters) {
    const int rows =
        tile.rows - first < kInRegisters ? tile.rows - first : kInRegisters;
    batch_t batch;
    batch.load(a, where, tile, first, rows);
    take(batch, rows);
  }
}

// Accurate logs of the columns. Called by all threads of the cluster.
__device__ __noinline__ void read_again(const a_t* a, const bool* where,
                                        const tile_t& tile, shared_t& shared,
                                        double (&log)[kVector]) {
  const auto read = [&](auto take) {
    read_columns(a, where, tile, [&](const batch_t& batch, int rows) {
      take([&](int k, int j) { return batch.score<double>(k, j, rows); });
    });
  };
  careful_logs(log, read, [&](auto& value, auto f) {
    combine_columns(shared.number, shared.careful, value, f);
  });
}

// The sum of each of this thread's columns over the tile, in every thread.
__device__ __forceinline__ void join_columns(shared_t& shared,
                                             total_t (&sum)[kVector]) {
  if constexpr (kShuffles) {
    constexpr int kSpan = kInWarp ? kGroup : kWarpSize;
#pragma unroll
    for (int offset = kSide; offset < kSpan; offset *= 2) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        total_t other;
        other.top = shuffle_xor(sum[j].top, offset);
        other.shift = shuffle_xor(sum[j].shift, offset);
        other.l.value = shuffle_xor(sum[j].l.value, offset);
        sum[j].take(other);
      }
    }
  }
  if constexpr (!kInWarp) {
    const int part = threadIdx.x / (kShuffles ? kWarpSize : kSide);
    if (kShuffles ? threadIdx.x % kWarpSize < kSide : threadIdx.x < kGroup) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        shared.sum[part][tile_t::side() * kVector + j] = sum[j].stored();
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
      total_t total = total_t(shared.sum[0][c]);
      for (int part = 1; part < kPartials; ++part)
        total.take_next(total_t(shared.sum[part][c]));
      share(&shared.piece[cluster_rank()][c], total.stored());
    }
    cluster_sync();
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int c = tile_t::side() * kVector + j;
      sum[j] = total_t(shared.piece[0][c]);
      for (int rank = 1; rank < kCluster; ++rank) {
        sum[j].take_next(total_t(shared.piece[rank][c]));
      }
    }
    cluster_sync();  // all have read before the next tile is written
  }
}

// Whether it is true in any thread of the tile; all threads of the cluster agree.
__device__ __forceinline__ bool any_of_tile(bool is_true) {
  return kInWarp ? __any_sync(kFullMask, is_true) : __syncthreads_or(is_true);
}

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(kNumThreads, RESIDENT)
    softmax_logsumexp_columns(const a_t* a,
                              const a_t* b,  // not read
                              const bool* where, out_t* out,
                              out_t* sign,  // written if layout.returns_sign
                              const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
  const thread_map how =
      takes_vectors(a, layout, kA) ? thread_map::kVectors : thread_map::kSingles;
  if (kCluster > 1) cluster_sync();  // no block may be written to before it runs
  const tile_index_t end = num_tiles(layout);
  for (tile_index_t at = first_tile(); at < end; at += tile_step()) {
    const tile_t tile(layout, how, at);
    total_t sum[kVector];
    read_columns(a, where, tile, [&](const batch_t& batch, int rows) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const auto score = [&](int k) { return batch.score<acc_t>(k, j, rows); };
        sum[j].see(total_t::largest<kInRegisters>(score));
        sum[j].add<kInRegisters>(score);
      }
    });
    join_columns(shared, sum);

    // All blocks of a cluster have the same sums and decide alike. Columns beyond the
    // last do not count.
    bool is_doubtful[kVector], any = false;
    double log[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      is_doubtful[j] = tile.offset(j) < tile.columns && sum[j].is_doubtful();
      any = any || is_doubtful[j];
    }
    any = any_of_tile(any);
    const bool writes = tile.is_first() && tile.rows > 0 && cluster_rank() == 0;
    if (any) read_again(a, where, tile, shared, log);
    if (writes) {
      const long long to_out = tile.start(kOut), to_sign = tile.start(kSign);
      const long long out_step = layout.outer.stride[kOut][OUTER_AXES - 1];
      const long long sign_step = layout.outer.stride[kSign][OUTER_AXES - 1];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int i = tile.offset(j);
        if (i >= tile.columns) continue;
        out[to_out + i * out_step] = to<out_t>(is_doubtful[j] ? log[j] : sum[j].log());
        if (layout.returns_sign) {
          sign[to_sign + i * sign_step] = to<out_t>(sign_of(sum[j].top));
        }
      }
    }
  }
}

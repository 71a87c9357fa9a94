// SPDX-License-Identifier: MIT
// softmax_logsumexp_shares: log sum exp of many or long columns, divided evenly over
// warps.
//
// Algorithm  sum_i exp(a_i) = l 2^shift (softmax/detail/column_sum.cuh),  out = its
//            log. If that would lose digits (results near 0, scores beyond 2^20), the
//            tile is read again:  out = max + log1p(sum of the others).
// Grid       softmax_logsumexp_shares_sum: 1-D; each of kShares warps has an equal
//            share of the rows of all tiles, in sequence.
//            softmax_logsumexp_shares_merge adds their sums: one warp per tile of few
//            parts or, if a group is a block, one block per tile.
// Tiles      kColumns columns of one slab; a thread has kInRegisters x kVector elements
// and as
//            many loading, and keeps a sum for each of its kVector columns
// Memory     a once, 16 bytes per access, lanes contiguous; a sum per column and warp
//            between the launches; one number per column is written
// Numbers    exponentials to half an ulp of acc_t, sums and log in double; for 16-bit
//            results the fast exponential, float sums and a float log
// Limits     no weights; the last outer axis has stride 1 in a; one reduced axis
//
// Parameters SHARES        warps that divide the rows
//            WHOLE         1 if shares are whole tiles, with nothing to merge
#include "softmax/detail/column_log.cuh"
#include "softmax/detail/column_sum.cuh"

constexpr int kShares = SHARES;
constexpr bool kWhole = WHOLE;

using sums_t = column_sum_t<acc_t, kCoarse>;
static_assert(kCluster == 1 && !kSplits && kShares > 0);

// What the threads of a block exchange.
struct shared_t {
  union {
    partial_t total[kColumns];
    wide_sum_t careful[kCluster][kColumns];
  };
  bool is_doubtful[kColumns];
  __device__ shared_t() {}
};
extern __shared__ uint4 memory[];

// Missing floats are -inf. Other types have no such number.
constexpr bool kTracks = kHasWhere || !kHasInfinity<a_t>;

// Starts copying an element, if the hardware can copy so few bytes.
__device__ __forceinline__ void copy_element(a_t* to, const a_t* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(a_t) >= 4) {
    ptx::copy_async<sizeof(a_t)>(to, from);
    return;
  }
#endif
  *to = *from;
}

// Two batches of this thread in shared memory: one loading, one in use. No other thread
// reads them, so there is no barrier.
struct ring_t {
  using element_t = vector_t<a_t, kVector>;
  element_t* mine;

  static constexpr int kBytes = 2 * kInRegisters * kNumThreads * int(sizeof(element_t));
  __device__ __forceinline__ ring_t()
      : mine(reinterpret_cast<element_t*>(memory) + threadIdx.x) {}

  __device__ __forceinline__ element_t& at(int half, int k) const {
    return mine[(half * kInRegisters + k) * kNumThreads];
  }
  // Starts to load rows of this thread from number `first` on, with `rows` left; `a` is
  // at their start.
  __device__ __forceinline__ void load(int half, const a_t* a, const tile_t& tile,
                                       int first, int rows) const {
    const long long step = tile.step(kA);
    a += first * step + tile.offset(0);
    const bool takes_vector =
        tile.how == thread_map::kVectors && tile.offset(0) < tile.columns;
    if (takes_vector && rows >= kInRegisters) {
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) copy_vector(&at(half, k), a + k * step);
    } else {
#pragma unroll 1
      for (int k = 0; k < kInRegisters; ++k, a += step) {
        if (takes_vector && k < rows) {
          copy_vector(&at(half, k), a);
          continue;
        }
        const int count =
            tile.how == thread_map::kSingles && k < rows ? tile.columns : 0;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          a_t* const home = &at(half, k).element[j];
          if (tile.offset(j) < count) {
            copy_element(home, a + j * kSide);
          } else {
            *home = padding<a_t>();
          }
        }
      }
    }
#if __CUDA_ARCH__ >= 800
    ptx::commit_copies();
#endif
  }
  // Waits for all batches except the last.
  __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 800
    ptx::wait_copy_groups<1>();
#endif
  }
};

// The elements that this thread works on at a time; masked ones are -inf.
struct batch_t {
  ring_t ring;
  int half;
  unsigned long long selected = 0;  // one bit per element, if kTracks

  template <typename T> __device__ __forceinline__ T score(int k, int j) const {
    const bool takes_part = !kTracks || selected >> (k * kVector + j) & 1;
    return takes_part ? to<T>(ring.at(half, k).element[j]) : -infinity<T>();
  }

  // The largest score of each column, or NaN.
  __device__ __forceinline__ void largest(acc_t (&m)[kVector]) const {
    if constexpr (!kTracks && kMaxInPairs<a_t, kVector>) {
      const auto of_pairs = largest_in_pairs(ring.at(half, 0));
#pragma unroll
      for (int j = 0; j < kVector; ++j) m[j] = to<acc_t>(of_pairs.element[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        m[j] = score<acc_t>(0, j);
#pragma unroll
        for (int k = 1; k < kInRegisters; ++k) {
          m[j] = detail::largest_nan(m[j], score<acc_t>(k, j));
        }
      }
    }
  }

  __device__ __forceinline__ void add_to(sums_t (&sum)[kVector]) const {
    acc_t m[kVector];
    largest(m);
    make_room(sum, m);
    add(sum);
  }

 private:
  template <typename Vector>
  __device__ __forceinline__ Vector largest_in_pairs(Vector m) const {
#pragma unroll
    for (int k = 1; k < kInRegisters; ++k) m = larger_of(m, ring.at(half, k));
    return m;
  }
  static __device__ __forceinline__ void make_room(sums_t (&sum)[kVector],
                                                   const acc_t (&m)[kVector]) {
    bool has_room = true;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sum[j].top = detail::largest_nan(sum[j].top, m[j]);
      has_room = has_room && sum[j].has_room(m[j]);
    }
    if (has_room) return;
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j].make_room(m[j]);
  }
  __device__ __forceinline__ void add(sums_t (&sum)[kVector]) const {
    if constexpr (kCoarse) {
      // Read rows again rather than keep them in registers.
      ptx::compiler_fence();
      float part[kVector] = {};
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) part[j] += sum[j].term(score<acc_t>(k, j));
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j].l += part[j];
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        sum[j].template add<kInRegisters>([&](int k) { return score<acc_t>(k, j); });
      }
    }
  }
};

// Calls take(batch) for all rows of this thread. The next batch loads meanwhile.
template <typename Take>
__device__ __forceinline__ void read_columns(const a_t* a, const bool* where,
                                             const tile_t& tile, Take take) {
  const ring_t ring;
  a += tile.start(kA);
  if (kHasWhere) where += tile.start(kWhere);
  ring.load(0, a, tile, 0, tile.rows);
  int half = 0;
#pragma unroll 1
  for (int first = 0; first < tile.rows; first += kInRegisters, half ^= 1) {
    ring.load(half ^ 1, a, tile, first + kInRegisters,
              tile.rows - first - kInRegisters);
    ring.wait();
    batch_t batch = {ring, half};
    if constexpr (kTracks) {
      batch.selected =
          tile.template selected<kHasWhere>(where, kWhere, first, tile.rows - first);
    }
    take(batch);
  }
}

// Accurate logs of the columns. Called by all threads of the block.
__device__ __noinline__ void read_again(const a_t* a, const bool* where,
                                        const tile_t& tile, shared_t& shared,
                                        double (&log)[kVector]) {
  const auto read = [&](auto take) {
    read_columns(a, where, tile, [&](const batch_t& batch) {
      take([&](int k, int j) { return batch.score<double>(k, j); });
    });
  };
  careful_logs(log, read, [&](auto& value, auto f) {
    if constexpr (!kInWarp) __syncthreads();  // all threads have read their elements
    auto& numbers = *reinterpret_cast<partials_t<wide_sum_t>*>(memory);
    combine_columns(numbers, shared.careful, value, f);
  });
}

// --- sums over many threads ----------------------------------------------------------

// The sum of at(0), ..., at(count - 1) in each of kLanes adjacent lanes; called by all
// lanes of a warp.
template <int kLanes, typename At>
__device__ __forceinline__ total_t join(int count, At at) {
  const int own = threadIdx.x % kLanes;
  total_t sum;
  for (int i = own; i < count; i += kLanes) {
    sum.top = detail::largest_nan(sum.top, at(i).top);
  }
  sum.top = warp_reduce<kLanes>(sum.top, largest_nan_t());
  sum.shift = total_t::shift_of(sum.top);
  for (int i = own; i < count; i += kLanes) sum.l += at(i).in_unit(sum.shift);
  sum.l.value = warp_reduce<kLanes>(sum.l.value, plus_t());
  return sum;
}

// Lanes that add the parts of one column.
__host__ __device__ constexpr int num_joining() {
  int lanes = kWarpSize;
  while (lanes > 1 && lanes * kColumns > kNumThreads) lanes /= 2;
  return lanes;
}

// Calls take(c, sum) for each column of the tile in one thread; sum is that of at(c,
// 0), ..., at(c, count - 1).
template <typename At, typename Take>
__device__ __forceinline__ void join_columns(int count, At at, Take take) {
  constexpr int kLanes = num_joining();
  const int own = threadIdx.x / kLanes;
#pragma unroll 1
  for (int first = 0; first < kColumns; first += kNumThreads / kLanes) {
    const int c = first + own;
    const bool is_column = c < kColumns;
    const total_t sum =
        join<kLanes>(is_column ? count : 0, [&](int i) { return at(c, i); });
    if (is_column && threadIdx.x % kLanes == 0) take(c, sum);
  }
}

// The sum of each of this thread's columns over its group, in each of its lanes.
__device__ __forceinline__ void join_in_warp(const sums_t (&sum)[kVector],
                                             total_t (&joined)[kVector]) {
  static_assert(!kInWarp || kShuffles || kDeep == 1);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const partial_t own = sum[j].stored();
    acc_t top = own.top;
#pragma unroll
    for (int offset = kSide; offset < kGroup; offset *= 2) {
      top = detail::largest_nan(top, shuffle_xor(top, offset));
    }
    joined[j].top = top;
    joined[j].shift = total_t::shift_of(top);
    double l = own.in_unit(joined[j].shift);
#pragma unroll
    for (int offset = kSide; offset < kGroup; offset *= 2) {
      l += shuffle_xor(l, offset);
    }
    joined[j].l.value = l;
  }
}

// --- results -------------------------------------------------------------------------

// Writes the logs of a warp's tile from its `count` parts, part(c, i); a lane has every
// 32nd column.
template <typename Part>
__device__ __forceinline__ void finish_warp(const a_t* a, const bool* where, Part part,
                                            int count, const results_t& results,
                                            shared_t& shared) {
  const tile_t& tile = results.tile;
  const int columns = count > 0 ? tile.columns : 0;
  constexpr int kOwn = (kColumns + kWarpSize - 1) / kWarpSize;  // columns per lane
  const auto column = [](int n) { return threadIdx.x % kWarpSize + n * kWarpSize; };
  // Parts of all its columns load together.
  total_t sum[kOwn];
  for (int i = 0; i < count; ++i) {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (column(n) >= columns) continue;
      sum[n].top = detail::largest_nan(sum[n].top, part(column(n), i).top);
    }
  }
#pragma unroll
  for (int n = 0; n < kOwn; ++n) sum[n].shift = total_t::shift_of(sum[n].top);
  for (int i = 0; i < count; ++i) {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (column(n) >= columns) continue;
      sum[n].l += part(column(n), i).in_unit(sum[n].shift);
    }
  }
  unsigned doubtful = 0;  // one bit per column of this lane
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    if (column(n) >= columns) continue;
    if (sum[n].is_doubtful()) doubtful |= 1u << n;
    results.write(column(n), sum[n].log());
    results.write_sign(column(n), sum[n].top);
  }
  if (!__any_sync(kFullMask, doubtful != 0)) return;
  double log[kVector];
  read_again(a, where, tile, shared, log);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int c = tile.offset(j);
    const unsigned of_lane = __shfl_sync(kFullMask, doubtful, c % kWarpSize);
    const bool is_doubtful = of_lane >> c / kWarpSize & 1;
    if (tile.is_first() && c < columns && is_doubtful) results.write(c, log[j]);
  }
}

// Writes the logs of a block's tile from its `count` parts, as join_columns. Called by
// all threads of the block.
template <typename Join>
__device__ __forceinline__ void finish_block(const a_t* a, const bool* where, Join join,
                                             const results_t& results,
                                             shared_t& shared) {
  const tile_t& tile = results.tile;
  join([&](int c, const total_t& sum) { shared.total[c] = sum.stored(); });
  __syncthreads();
  // All logs in parallel.
  bool any = false;
#pragma unroll 1
  for (int c = threadIdx.x; c < tile.columns; c += kNumThreads) {
    const total_t sum(shared.total[c]);
    const bool is_doubtful = sum.is_doubtful();
    shared.is_doubtful[c] = is_doubtful;
    any = any || is_doubtful;
    results.write(c, sum.log());
    results.write_sign(c, sum.top);
  }
  if (!__syncthreads_or(any)) return;
  double log[kVector];
  read_again(a, where, tile, shared, log);
  if (!tile.is_first()) return;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int i = tile.offset(j);
    if (i < tile.columns && shared.is_doubtful[i]) results.write(i, log[j]);
  }
}

__device__ __forceinline__ void sum_columns(const a_t* a, const bool* where,
                                            const tile_t& tile,
                                            sums_t (&sum)[kVector]) {
  read_columns(a, where, tile, [&](const batch_t& batch) { batch.add_to(sum); });
}

__device__ __forceinline__ thread_map map_of(const a_t* a, const layout_t& layout) {
  return takes_vectors(a, layout, kA) ? thread_map::kVectors : thread_map::kSingles;
}

// --- equal shares --------------------------------------------------------------------

// The rows of a warp, counted over all tiles in sequence.
struct shares_t {
  long long total, share;

  __device__ __forceinline__ explicit shares_t(const layout_t& layout)
      : total((long long)num_tiles(layout) * layout.row_length),
        share((total + kShares - 1) / kShares) {
    if constexpr (kWhole) {
      share = (share + layout.row_length - 1) / layout.row_length * layout.row_length;
    }
  }

  // For a tile: the warp that has its first row, and the number of warps that have
  // some.
  __device__ __forceinline__ int first(const layout_t& layout, long long tile) const {
    return int(tile * layout.row_length / share);
  }
  __device__ __forceinline__ int count(const layout_t& layout, long long tile) const {
    const long long last = (tile + 1) * layout.row_length - 1;
    return int(last / share) - first(layout, tile) + 1;
  }
  __device__ __forceinline__ int most(const layout_t& layout) const {
    return kWhole ? 1 : int((layout.row_length - 1) / share) + 2;
  }
};

// The partial sums of a tile: (most parts, kColumns)
template <typename Partial>
__device__ __forceinline__ Partial* place_of(Partial* partial, long long tile,
                                             int most) {
  return partial + tile * most * kColumns;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, RESIDENT)
    softmax_logsumexp_shares_sum(const a_t* a, const a_t*, const bool* where,
                                 out_t* out, out_t* sign, partial_t* partial,
                                 const __grid_constant__ layout_t layout) {
  if constexpr (kInWarp && kGroup == kWarpSize) {
    __shared__ shared_t shared;
    const thread_map how = map_of(a, layout);
    const shares_t shares(layout);
    const int most = shares.most(layout);
    const int in_block = threadIdx.x / kWarpSize;
    const int warp = blockIdx.x * kGroupsPerBlock + in_block;
    long long at = warp * shares.share;
    const long long end =
        at + shares.share < shares.total ? at + shares.share : shares.total;
#pragma unroll 1
    while (at < end) {
      const tile_index_t number = at / layout.row_length;
      const long long first = at - number * layout.row_length;
      const long long left = layout.row_length - first;
      const long long rows = left < end - at ? left : end - at;
      tile_t tile(layout, how, number - in_block);
      const int own = threadIdx.x % kWarpSize / kSide;
      tile.row = first + own;
      tile.rows = own < rows ? int((rows - own + kDeep - 1) / kDeep) : 0;
      sums_t sum[kVector];
      sum_columns(a, where, tile, sum);
      total_t joined[kVector];
      join_in_warp(sum, joined);
      if (tile.is_first()) {
        const int part = warp - shares.first(layout, number);
        partial_t* const to = place_of(partial, number, most) + part * kColumns;
#pragma unroll
        for (int j = 0; j < kVector; ++j) to[tile.offset(j)] = joined[j].stored();
      }
      if constexpr (kWhole) {
        __syncwarp();  // the sums are read by other lanes
        const partial_t* const sums = place_of(partial, number, most);
        const auto sum_of = [&](int c, int) { return sums[c]; };
        finish_warp(a, where, sum_of, 1, {tile, out, sign}, shared);
      }
      at += rows;
    }
  }
}

// A warp merges a tile of few parts, a block one of many.
extern "C" __global__ void __launch_bounds__(kNumThreads, RESIDENT)
    softmax_logsumexp_shares_merge(const a_t* a, const a_t*, const bool* where,
                                   out_t* out, out_t* sign, const partial_t* partial,
                                   const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
  const thread_map how = map_of(a, layout);
  const shares_t shares(layout);
  const int most = shares.most(layout);
  const tile_index_t end = num_tiles(layout);
  for (tile_index_t at = first_tile(); at < end; at += tile_step()) {
    const tile_t tile(layout, how, at);
    const long long number = at + (kInWarp ? threadIdx.x / kGroup : 0);
    const partial_t* const parts = place_of(partial, number < end ? number : at, most);
    const int count = number < end ? shares.count(layout, number) : 0;
    const auto part = [&](int c, int i) { return parts[i * kColumns + c]; };
    const results_t results = {tile, out, sign};
    if constexpr (kInWarp) {
      finish_warp(a, where, part, count, results, shared);
    } else {
      const auto join = [&](auto take) { join_columns(count, part, take); };
      finish_block(a, where, join, results, shared);
    }
  }
}

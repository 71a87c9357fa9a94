// SPDX-License-Identifier: MIT
// Softmax of rows that no cluster of blocks holds, each element read once: a row lies
// in the shared memory of all multiprocessors, and several rows are under way at a
// time.
//
// Algorithm  A block has a slice of each row, in chunks that pass through a ring in its
//            shared memory. A warp sums a chunk and leaves exponentials in units of a
//            power of two; one warp publishes the sum of a slice, others join those of
//            all blocks; a warp multiplies a chunk by what is left and sends it out.
//            Nobody waits for a whole row but the last of these.
// Grid       1-D, a block a multiprocessor, all at once (a cooperative launch)
// Memory     x once, out once, both by TMA; 16 bytes a block and row
// Numbers    floats; sums of a chunk in floats, those of a row in doubles
// Limits     a slice is a whole number of vectors and has at most kMostChunks chunks,
//            and kRowsUnderWay slices fill the ring
//
// BYTES_ALONE: the same order with nothing computed, to know what memory gives.
constexpr int kWarp = 32, kSummers = 8, kJoiners = 2, kWriters = 8;
// Warps: one that loads, those that sum, one that publishes, those that join, that
// write.
constexpr int kPublisher = 1 + kSummers, kFirstJoiner = kPublisher + 1;
constexpr int kFirstWriter = kFirstJoiner + kJoiners;
constexpr int kNumWarps = kFirstWriter + kWriters;
constexpr int kChunkBytes = 4096, kMostChunks = 32, kRowsUnderWay = 16;
constexpr int kLine = 128;
constexpr int kVectors = kChunkBytes / 16 / kWarp;  // of a lane
constexpr unsigned long long kUnpublished = ~0ull;
constexpr float kLowest = -3.4028235e38f;  // of what is no element

// A sum l 2^unit.
struct sum_t {
  float l;
  int unit;
};
struct total_t {
  float inverse;
  int unit;
};

struct shared_t {
  // Of chunks: they are loaded, summed, free again.
  unsigned long long full[CHUNKS], summed[CHUNKS], empty[CHUNKS];
  // Of rows: all chunks of the slice are summed, the sum of the row is known.
  unsigned long long has_sum[kRowsUnderWay], known[kRowsUnderWay];
  sum_t sums[kRowsUnderWay][kMostChunks];
  total_t totals[kRowsUnderWay];
  int unit[CHUNKS];
};

// What this block has of each row.
struct slice_t {
  long long row_bytes;
  long long first;  // byte of the row
  int bytes, chunks;
  unsigned rows;

  // Slices are whole lines of memory and differ by one at most: all blocks have about
  // as many chunks, so none is so far ahead that a barrier of rows goes round twice.
  __device__ slice_t(long long row_bytes, unsigned rows)
      : row_bytes(row_bytes), first(start(blockIdx.x)), rows(rows) {
    bytes = int(start(blockIdx.x + 1) - first);
    chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
  }
  __device__ long long start(unsigned block) const {
    const long long lines = (row_bytes + kLine - 1) / kLine;
    return min(lines * block / gridDim.x * kLine, row_bytes);
  }
  __device__ long long at(unsigned row, int chunk) const {
    return row * row_bytes + first + chunk * kChunkBytes;
  }
  __device__ int size(int chunk) const {
    return min(kChunkBytes, bytes - chunk * kChunkBytes);
  }
};

// A place in a ring: which slot, and how often it has gone round.
template <int kSlots> struct turn_t {
  unsigned slot, parity;
  __device__ explicit turn_t(unsigned number)
      : slot(number % kSlots), parity(number / kSlots % 2) {}
};

__device__ unsigned barrier_at(const unsigned long long* barrier) {
  return ptx::shared_address(barrier);
}
__device__ void wait(const unsigned long long* barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier_at(barrier), parity)) {
  }
}

// --- the warps -----------------------------------------------------------------------

__device__ void load_all(const char* x, char* ring, shared_t& shared,
                         const slice_t& slice) {
  const unsigned long long policy = ptx::policy_evict_first();
  unsigned number = 0;
  for (unsigned row = 0; row < slice.rows; ++row) {
    for (int c = 0; c < slice.chunks; ++c, ++number) {
      const turn_t<CHUNKS> turn(number);
      wait(&shared.empty[turn.slot], turn.parity ^ 1);
      const unsigned full = barrier_at(&shared.full[turn.slot]);
      ptx::mbarrier_arrive_expect_tx(full, slice.size(c));
      load_bulk(ptx::shared_address(ring + turn.slot * kChunkBytes),
                x + slice.at(row, c), slice.size(c), full, policy);
    }
  }
}

__device__ float exp2_of(float x, float unit) {
  const float rounded = fmaf(x, 1.44269504f, 12582912.0f - unit);
  const float k = rounded - (12582912.0f - unit);
  const float r = fmaf(x, 1.92596303e-8f, fmaf(x, 1.44269504f, -k));
  return __int_as_float((__float_as_int(rounded) << 23) + __float_as_int(exp2f(r)));
}

__device__ sum_t sum_chunk(float4* held_at, int size, int lane) {
#ifdef BYTES_ALONE
  float sum = 0;
  for (int k = 0; k < kVectors; ++k) {
    const int v = k * kWarp + lane;
    if (v * 16 < size) sum += held_at[v].x;
  }
  return {sum == 12345.678f ? 1.0f : 0.0f, 0};
#else
  float4 held[kVectors];
  float m = kLowest;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = k * kWarp + lane;
    held[k] = v * 16 < size ? held_at[v] : float4{kLowest, kLowest, kLowest, kLowest};
    m = fmaxf(m, fmaxf(fmaxf(held[k].x, held[k].y), fmaxf(held[k].z, held[k].w)));
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    m = fmaxf(m, __shfl_xor_sync(~0u, m, step));
  }
  const float unit = rintf(m * 1.44269504f), lowest = (unit - 126.75f) * 0.693147181f;
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float* const elements = reinterpret_cast<float*>(&held[k]);
    float of_vector = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      elements[e] = exp2_of(fmaxf(elements[e], lowest), unit);
      of_vector += elements[e];
    }
    const int v = k * kWarp + lane;
    if (v * 16 < size) {
      held_at[v] = held[k];
      sum += of_vector;
    }
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(~0u, sum, step);
  }
  return {sum, int(unit)};
#endif
}

__device__ void sum_all(char* ring, shared_t& shared, const slice_t& slice, int warp,
                        int lane) {
  const unsigned all = slice.rows * slice.chunks;
  for (unsigned number = warp; number < all; number += kSummers) {
    const turn_t<CHUNKS> turn(number);
    const turn_t<kRowsUnderWay> row(number / slice.chunks);
    const int chunk = number % slice.chunks;
    wait(&shared.full[turn.slot], turn.parity);
    const sum_t sum =
        sum_chunk(reinterpret_cast<float4*>(ring + turn.slot * kChunkBytes),
                  slice.size(chunk), lane);
    __syncwarp();
    if (lane == 0) {
      shared.unit[turn.slot] = sum.unit;
      shared.sums[row.slot][chunk] = sum;
      ptx::mbarrier_arrive(barrier_at(&shared.summed[turn.slot]));
      ptx::mbarrier_arrive(barrier_at(&shared.has_sum[row.slot]));
    }
  }
}

// The sum of what each lane has, in all lanes; units are whole.
__device__ void join(double& l, int& unit) {
  int of_all = unit;
  for (int step = kWarp / 2; step > 0; step /= 2) {
    of_all = max(of_all, __shfl_xor_sync(~0u, of_all, step));
  }
  l = ldexp(l, max(unit - of_all, -2000));
  for (int step = kWarp / 2; step > 0; step /= 2) {
    l += __shfl_xor_sync(~0u, l, step);
  }
  unit = of_all;
}
constexpr int kNoUnit = -(1 << 20);

__device__ void publish_all(unsigned long long* board, shared_t& shared,
                            const slice_t& slice, int lane) {
  for (unsigned row = 0; row < slice.rows; ++row) {
    const turn_t<kRowsUnderWay> turn(row);
    wait(&shared.has_sum[turn.slot], turn.parity);
    const bool has = lane < slice.chunks;
    double l = has ? shared.sums[turn.slot][lane].l : 0;
    int unit = has ? shared.sums[turn.slot][lane].unit : kNoUnit;
    join(l, unit);
    if (lane == 0) {
      unsigned long long* const to = board + 2 * (row * gridDim.x + blockIdx.x);
      ptx::store_relaxed(to, (unsigned long long)__double_as_longlong(l));
      ptx::store_relaxed(to + 1, (unsigned long long)(unit + (1 << 21)));
    }
  }
}

__device__ void join_all(const unsigned long long* board, shared_t& shared,
                         const slice_t& slice, int joiner, int lane) {
  constexpr int kMost = (BLOCKS + kWarp - 1) / kWarp;
  for (unsigned row = joiner; row < slice.rows; row += kJoiners) {
    const turn_t<kRowsUnderWay> turn(row);
    unsigned long long words[kMost][2];
    for (bool is_over = false; !is_over;) {
      is_over = true;
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        const unsigned block = k * kWarp + lane;
        if (block >= gridDim.x) continue;
        const unsigned long long* const from = board + 2 * (row * gridDim.x + block);
        words[k][0] = ptx::load_relaxed(from);
        words[k][1] = ptx::load_relaxed(from + 1);
      }
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (k * kWarp + lane >= gridDim.x) continue;
        is_over &= words[k][0] != kUnpublished && words[k][1] != kUnpublished;
      }
      is_over = __all_sync(~0u, is_over);
    }
    double l = 0;
    int unit = kNoUnit;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (k * kWarp + lane >= gridDim.x) continue;
      const int of_block = int(words[k][1]) - (1 << 21), larger = max(unit, of_block);
      l = ldexp(l, max(unit - larger, -2000)) +
          ldexp(__longlong_as_double(words[k][0]), max(of_block - larger, -2000));
      unit = larger;
    }
    join(l, unit);
    if (lane == 0) {
      shared.totals[turn.slot] = {float(1 / l), unit};
      ptx::mbarrier_arrive(barrier_at(&shared.known[turn.slot]));
    }
  }
}

__device__ void write_all(char* out, char* ring, shared_t& shared, const slice_t& slice,
                          int warp, int lane) {
  const unsigned long long policy = ptx::policy_evict_first();
  const unsigned all = slice.rows * slice.chunks;
  for (unsigned number = warp; number < all; number += kWriters) {
    const turn_t<CHUNKS> turn(number);
    const unsigned row = number / slice.chunks;
    const int chunk = number % slice.chunks, size = slice.size(chunk);
    const turn_t<kRowsUnderWay> of_row(row);
    wait(&shared.summed[turn.slot], turn.parity);
    wait(&shared.known[of_row.slot], of_row.parity);
    char* const held_at = ring + turn.slot * kChunkBytes;
#ifndef BYTES_ALONE
    const total_t total = shared.totals[of_row.slot];
    const float factor =
        ldexpf(total.inverse, max(shared.unit[turn.slot] - total.unit, -400));
    float4* const held = reinterpret_cast<float4*>(held_at);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = k * kWarp + lane;
      if (v * 16 >= size) continue;
      float4 x = held[v];
      x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor;
      held[v] = x;
    }
    fence_shared_writes();
#endif
    __syncwarp();
    if (lane == 0) {
      store_bulk(out + slice.at(row, chunk), ptx::shared_address(held_at), size,
                 policy);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();
      ptx::mbarrier_arrive(barrier_at(&shared.empty[turn.slot]));
    }
    __syncwarp();
  }
  if (lane == 0) ptx::cp_async_bulk_wait_group();
}

// `board` has 16 bytes a block and row, all bits set.
extern "C" __global__ void __launch_bounds__(kNumWarps* kWarp, 1)
    row_relay(const char* x, char* out, unsigned long long* board, long long row_bytes,
              unsigned rows) {
  extern __shared__ __align__(128) char ring[];
  __shared__ shared_t shared;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const slice_t slice(row_bytes, rows);
  if (threadIdx.x == 0) {
    for (int s = 0; s < CHUNKS; ++s) {
      ptx::mbarrier_init(barrier_at(&shared.full[s]), 1);
      ptx::mbarrier_init(barrier_at(&shared.summed[s]), 1);
      ptx::mbarrier_init(barrier_at(&shared.empty[s]), 1);
    }
    for (int r = 0; r < kRowsUnderWay; ++r) {
      ptx::mbarrier_init(barrier_at(&shared.has_sum[r]), slice.chunks);
      ptx::mbarrier_init(barrier_at(&shared.known[r]), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (warp == 0) {
    if (lane == 0) load_all(x, ring, shared, slice);
  } else if (warp < kPublisher) {
    sum_all(ring, shared, slice, warp - 1, lane);
  } else if (warp == kPublisher) {
    publish_all(board, shared, slice, lane);
  } else if (warp < kFirstWriter) {
    join_all(board, shared, slice, warp - kFirstJoiner, lane);
  } else {
    write_all(out, ring, shared, slice, warp - kFirstWriter, lane);
  }
}

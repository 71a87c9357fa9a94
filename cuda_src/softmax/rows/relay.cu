// SPDX-License-Identifier: MIT
// softmax_relay: long rows that are read once; several of them pass through the shared
// memory of all multiprocessors at a time.
//
// Algorithm  softmax_relay_clear resets what blocks publish. In softmax_relay each
//            block has a slice of every row of its group, in chunks that pass through a
//            ring in its shared memory. Warps have roles. One loads chunks. Summers sum
//            one chunk after another. Followers add the sums of a slice, publish the
//            result and wait for that of the row, which one block of the group adds up.
//            Writers write results. A chunk stays in the ring until it is written.
// Grid       (blocks of a group, groups), all resident; a group takes a row at a time
// Tiles      a chunk: kCount 16-byte vectors per lane of a warp
// Memory     x once by TMA; out once; ends of unaligned rows element by element; blocks
//            exchange 16 bytes per row each
// Numbers    as softmax_trail. For softmax of doubles, a summer replaces the scores in
//            the ring by exponentials relative to the largest of the chunk
// Limits     x and out of one floating-point type; reduced axis contiguous in both;
//            rows of less than 2^31 elements, at most kWarpSize chunks of a row per
//            block; no mask, no scale; sm_90 or newer
//
// Parameters BLOCKS             of a group
//            CHUNKS             that the ring holds
//            SUMMERS, FOLLOWERS, WRITERS   warps of each role
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "softmax/detail/aligned_span.cuh"
#include "softmax/detail/long_row.cuh"

constexpr int kBlocks = BLOCKS, kChunks = CHUNKS;
constexpr int kSummers = SUMMERS, kFollowers = FOLLOWERS, kWriters = WRITERS;
constexpr int kFirstFollower = 1 + kSummers;
constexpr int kFirstWriter = kFirstFollower + kFollowers;
static_assert(kLanes == (kFirstWriter + kWriters) * kWarpSize, "a warp has one role");
static_assert(!kHasWhere && !kScaled, "scores are elements");
static_assert(kSame<x_t, out_t>, "one type throughout");

constexpr int kHeld = 8;                             // vectors of a lane
constexpr int kChunk = kWarpSize * kHeld * kVector;  // elements
constexpr int kLine = 128 / sizeof(x_t);
// Rows between their first sum and their last result; the host sees to it that there
// are fewer.
constexpr int kRowsUnderWay = 16;

__device__ __forceinline__ int warp_lane() { return threadIdx.x % kWarpSize; }

// --- rows, slices and chunks ---------------------------------------------------------

// A row, from its first whole vector on.
struct strip_t {
  const x_t* x;
  out_t* out;
  int whole;  // elements in whole vectors
  int head, tail;

  __device__ __forceinline__ strip_t(const x_t* x, out_t* out, const layout_t& layout,
                                     long long row) {
    const auto at = locate(layout.outer, row);
    const auto aligned = aligned_span_t::of<kVector>(
        num_before_aligned<kVector>(x + at.of[kX]), layout.row_length);
    this->x = x + at.of[kX] + aligned.head;
    this->out = out + at.of[kOut] + aligned.head;
    whole = int(aligned.num_vectors) * kVector;
    head = aligned.head;
    tail = aligned.tail;
  }
  // The first block has the elements outside of vectors, a lane one.
  __device__ __forceinline__ bool is_at_edge() const {
    return blockIdx.x == 0 && warp_lane() < head + tail;
  }
  __device__ __forceinline__ int edge() const {
    return warp_lane() < head ? warp_lane() - head : whole + warp_lane() - head;
  }
};

// What this block has of each row of its group: whole lines of memory, as many as the
// others have or one less.
struct slice_t {
  int first, end, chunks;
  unsigned rows;  // of the group
  unsigned all;   // chunks of all rows

  __device__ __forceinline__ explicit slice_t(const layout_t& layout)
      : first(start(layout, blockIdx.x)), end(start(layout, blockIdx.x + 1)) {
    chunks = (end - first + kChunk - 1) / kChunk;
    rows = (unsigned(layout.num_rows) - blockIdx.y + gridDim.y - 1) / gridDim.y;
    all = rows * chunks;
  }
  __device__ __forceinline__ static int start(const layout_t& layout, unsigned block) {
    const long long lines = (layout.row_length + kLine - 1) / kLine;
    return int(min(lines * block / kBlocks * kLine, layout.row_length));
  }
  __device__ __forceinline__ static long long row(unsigned number) {
    return blockIdx.y + (long long)number * gridDim.y;
  }
  // Elements of a chunk.
  __device__ __forceinline__ int size(int chunk, const strip_t& strip) const {
    return max(0, min(kChunk, min(end, strip.whole) - first - chunk * kChunk));
  }
};

// A place in a ring: which, and how often the ring has gone round before.
template <int kPlaces> struct turn_t {
  unsigned place, parity;
  __device__ __forceinline__ explicit turn_t(unsigned number)
      : place(number % kPlaces), parity(number / kPlaces % 2) {}
};
using chunk_turn_t = turn_t<kChunks>;
using row_turn_t = turn_t<kRowsUnderWay>;

// A chunk in the registers of a warp.
struct held_t {
  static constexpr int kCount = kHeld;
  static constexpr bool kHasEdge = false, kKeepsExps = kRoom > 0;
  using vector = vector_t<x_t, kVector>;
  const layout_t& layout;
  vector* from;  // in the ring
  out_t* out;
  int num_vectors;  // of this lane
  vector read[kHeld];

  __device__ __forceinline__ held_t(const layout_t& layout, char* chunk, int size,
                                    out_t* out = nullptr)
      : layout(layout), from(reinterpret_cast<vector*>(chunk) + warp_lane()), out(out) {
    num_vectors = (size / kVector - warp_lane() + kWarpSize - 1) / kWarpSize;
    // No faster way for whole chunks: for max(0, min(kChunk, x)) == kChunk on sm_90,
    // ptxas of CUDA 13.0 tests the predicate of VIMNMX.RELU, which is not that.
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (has(k)) {
        read[k] = from[k * kWarpSize];
      } else {
#pragma unroll
        for (int e = 0; e < kVector; ++e) read[k].element[e] = padding<x_t>();
      }
    }
  }
  __device__ __forceinline__ const vector& at(int k) const { return read[k]; }
  __device__ __forceinline__ bool has(int k) const { return k < num_vectors; }
  __device__ __forceinline__ int position(int k) const {
    return (k * kWarpSize + warp_lane()) * kVector;
  }
  __device__ __forceinline__ void keep(int k, const acc_t (&exps)[kVector]) const {
    if (has(k)) from[k * kWarpSize] = to_vector<x_t, kVector>::of(exps);
  }
  template <typename Visit>
  __device__ __forceinline__ void each_again(Visit visit) const {
#pragma unroll 1
    for (int i = 0; i < num_vectors * kVector; ++i) {
      const int k = i / kVector, e = i % kVector;
      visit(position(k) + e, score_of(*this, from[k * kWarpSize].element[e]));
    }
  }
};

// --- what warps and blocks publish ---------------------------------------------------

struct shared_t {
  unsigned long long full[kChunks], empty[kChunks];
  // All chunks of the slice of a row are summed; the sum of the row is known.
  unsigned long long summed[kRowsUnderWay], known[kRowsUnderWay];
  partial_t sums[kChunks];
  last_step_t steps[kRowsUnderWay];
  __device__ shared_t() {}
};

__device__ __forceinline__ unsigned at(const unsigned long long& barrier) {
  return ptx::shared_address(&barrier);
}
__device__ __forceinline__ void wait(const unsigned long long& barrier,
                                     unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(at(barrier), parity)) {
  }
}

// What blocks publish: the sums of rows, and of slices of rows.
struct board_t {
  unsigned long long* words;
  long long num_rows;

  __device__ __forceinline__ unsigned long long* of_row(long long row) const {
    return words + 2 * row;
  }
  __device__ __forceinline__ unsigned long long* of_slice(long long row,
                                                          unsigned block) const {
    return of_row(num_rows + row * kBlocks + block);
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_relay_clear(const x_t* x, const bool*, out_t* out,
                        unsigned long long* words,
                        const __grid_constant__ layout_t layout) {
  const long long count = 2 * layout.num_rows * (1 + kBlocks);
  const long long step = (long long)gridDim.x * kNumThreads;
  for (long long i = (long long)blockIdx.x * kNumThreads + threadIdx.x; i < count;
       i += step) {
    words[i] = published_t::kUnpublished;
  }
}

// --- the warps -----------------------------------------------------------------------

struct block_t {
  const x_t* const x;
  out_t* const out;
  const layout_t& layout;
  const board_t board;
  const slice_t slice;
  char* const ring;
  shared_t& shared;

  __device__ __forceinline__ strip_t strip(unsigned row) const {
    return strip_t(x, out, layout, slice.row(row));
  }
  __device__ __forceinline__ char* chunk_at(unsigned place) const {
    return ring + place * (kChunk * sizeof(x_t));
  }

  __device__ __forceinline__ void load_all() const {
    const unsigned long long policy = ptx::policy_evict_first();
    unsigned number = 0;
    for (unsigned row = 0; row < slice.rows; ++row) {
      const strip_t strip(this->strip(row));
      for (int chunk = 0; chunk < slice.chunks; ++chunk, ++number) {
        const chunk_turn_t turn(number);
        wait(shared.empty[turn.place], turn.parity ^ 1);
        const unsigned full = at(shared.full[turn.place]);
        const unsigned bytes = slice.size(chunk, strip) * sizeof(x_t);
        ptx::mbarrier_arrive_expect_tx(full, bytes);
        if (bytes > 0) {
          ptx::cp_async_bulk(ptx::shared_address(chunk_at(turn.place)),
                             strip.x + slice.first + chunk * kChunk, bytes, full,
                             policy);
        }
      }
    }
  }

  __device__ __forceinline__ void sum_all(int warp) const {
    for (unsigned number = warp; number < slice.all; number += kSummers) {
      const unsigned row = number / slice.chunks;
      const chunk_turn_t turn(number);
      const int size = slice.size(number - row * slice.chunks, strip(row));
      wait(shared.full[turn.place], turn.parity);
      const held_t held(layout, chunk_at(turn.place), size);
      const partial_t sum = sum_up(held, kHasRoots || kHasPowers ? largest(held) : 0);
      __syncwarp();
      if (warp_lane() == 0) {
        shared.sums[turn.place] = sum;
        ptx::mbarrier_arrive(at(shared.summed[row % kRowsUnderWay]));
      }
    }
  }

  // The sum of a slice: a chunk per lane, and the elements outside of vectors.
  __device__ __forceinline__ partial_t sum_of_slice(unsigned row,
                                                    const strip_t& strip) const {
    partial_t own[2] = {{0, -infinity<double>()}, {0, -infinity<double>()}};
    if (warp_lane() < slice.chunks) {
      own[0] = shared.sums[chunk_turn_t(row * slice.chunks + warp_lane()).place];
    }
    if (strip.is_at_edge()) {
      const double x = to<acc_t>(strip.x[strip.edge()]);
      own[1] = is_finite(x) ? partial_t{power_of_two(kRoom), x}
                            : partial_t{exp_of(x), -infinity<double>()};
    }
    return join(own, keys_t(layout));
  }

  // Adds the published sums of the slices of a row.
  __device__ __forceinline__ partial_t sum_of_row(long long row) const {
    constexpr int kMost = (kBlocks + kWarpSize - 1) / kWarpSize;
    partial_t own[kMost];
    bool is_over;
    do {
      is_over = true;
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        const unsigned block = k * kWarpSize + warp_lane();
        own[k] = {0, -infinity<double>()};
        if (block < kBlocks)
          is_over &= is_published(board.of_slice(row, block), own[k]);
      }
    } while (!__all_sync(kFullMask, is_over));
    return join(own, keys_t(layout));
  }

  __device__ __forceinline__ void follow_all(int warp) const {
    for (unsigned number = warp; number < slice.rows; number += kFollowers) {
      const row_turn_t turn(number);
      const long long row = slice.row(number);
      const strip_t strip(this->strip(number));
      wait(shared.summed[turn.place], turn.parity);
      partial_t sum = sum_of_slice(number, strip);
      if (warp_lane() == 0) publish(board.of_slice(row, blockIdx.x), sum);
      if (number % kBlocks == blockIdx.x) {
        sum = sum_of_row(row);
        if (warp_lane() == 0) publish(board.of_row(row), sum);
      } else {
        sum = wait_for(board.of_row(row));
      }
      const last_step_t step(sum);
      if (warp_lane() == 0) {
        shared.steps[turn.place] = step;
        ptx::mbarrier_arrive(at(shared.known[turn.place]));
      }
      if (strip.is_at_edge()) {
        const int i = strip.edge();
        strip.out[i] = to<out_t>(result(step, score_t(to<acc_t>(strip.x[i]), layout)));
      }
    }
  }
  // Of one score.
  static __device__ __forceinline__ acc_t result(const last_step_t& step, score_t s) {
    if constexpr (finish_in_powers_t::kTakes) {
      if (step.takes_powers) return step.in_powers(s);
    }
    if constexpr (kRoom > 0) {
      return s.exp_minus(step.usual.m) * (step.usual.inverse * power_of_two(kRoom));
    }
    return step.usual(s);
  }

  __device__ __forceinline__ void write_all(int warp) const {
    for (unsigned number = warp; number < slice.all; number += kWriters) {
      const unsigned row = number / slice.chunks;
      const int chunk = number - row * slice.chunks;
      const strip_t strip(this->strip(row));
      const row_turn_t of_row(row);
      const chunk_turn_t turn(number);
      wait(shared.known[of_row.place], of_row.parity);
      const last_step_t step = shared.steps[of_row.place];
      const held_t held(layout, chunk_at(turn.place), slice.size(chunk, strip),
                        strip.out + slice.first + chunk * kChunk);
      if constexpr (held_t::kKeepsExps) {
        // What is kept is exp(score - m) 2^kRoom, and so is the unit of the sum.
        const acc_t m = shared.sums[turn.place].m;
        const double inverse = step.usual.inverse * power_of_two(kRoom);
        const double factor = exp_diff_exact(m, step.usual.m) * inverse;
        write(held, [&](score_t e) { return e.key * factor * power_of_two(-kRoom); });
        ptx::fence_proxy_async();
      } else {
        write(held, step);
      }
      __syncwarp();
      if (warp_lane() == 0) ptx::mbarrier_arrive(at(shared.empty[turn.place]));
    }
  }
};

extern __shared__ uint4 memory[];

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    softmax_relay(const x_t* x,
                  const bool*,  // no mask
                  out_t* out, unsigned long long* words,
                  const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
  const slice_t slice(layout);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kChunks; ++i) {
      ptx::mbarrier_init(at(shared.full[i]), 1);
      ptx::mbarrier_init(at(shared.empty[i]), 1);
    }
    for (int i = 0; i < kRowsUnderWay; ++i) {
      ptx::mbarrier_init(at(shared.summed[i]), slice.chunks);
      ptx::mbarrier_init(at(shared.known[i]), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const board_t board{words, layout.num_rows};
  const block_t block{x,     out, layout, board, slice, reinterpret_cast<char*>(memory),
                      shared};
  const int warp = threadIdx.x / kWarpSize;
  if (warp == 0) {
    if (threadIdx.x == 0) block.load_all();
  } else if (warp < kFirstFollower) {
    block.sum_all(warp - 1);
  } else if (warp < kFirstWriter) {
    block.follow_all(warp - kFirstFollower);
  } else {
    block.write_all(warp - kFirstWriter);
  }
}

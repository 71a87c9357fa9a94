// SPDX-License-Identifier: MIT
// softmax_stream: rows that only many multiprocessors together can hold, read once.
//
// Algorithm  softmax_stream_clear: nothing is told yet. softmax_stream: as
//            softmax_split, whose two launches are one here (softmax/stream.cuh): each
//            block sums the exponentials of its part of a row, tells the blocks of its
//            group, and joins what they have told; out_i = exp(s_i - m) / l
//            (log_softmax: (s_i - m) - log l).
// Grid       (blocks of a group, groups), all at once; a group takes a row at a time
// Tiles      a step of a row: a vector of 16 bytes a thread of the group; a ring of
//            kRing steps in shared memory
// Memory     x and out once; 16 bytes an access where out is aligned as x is; between
//            blocks, two doubles a row and block
// Numbers    as softmax_split
// Limits     rows of at most (kLag + 1) * LANES vectors a block of the group; reduced
//            axis contiguous in x and out; no mask; sm_80 or newer
//
// Parameters as in softmax/score.cuh and softmax/stream.cuh
#include "softmax/long_sum.cuh"
#include "softmax/stream.cuh"

constexpr int kWidest = sizeof(x_t) > sizeof(out_t) ? sizeof(x_t) : sizeof(out_t);
constexpr int kVector = 16 / kWidest;  // elements a vector access
static_assert(!kHasWhere, "a mask would have to be read twice");

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_stream_clear(const x_t* x,
                         const bool* where,
                         out_t* out,
                         unsigned long long* told,
                         const __grid_constant__ layout_t layout) {
  board_t{told}.clear(layout.num_rows);
}

// A row of x and out, in which a thread walks from vector to vector.
struct row_t {
  const x_t* x;
  out_t* out;
  peeled_t peeled;

  __device__ __forceinline__ void enter(const x_t* x,
                                        out_t* out,
                                        const layout_t& layout,
                                        long long row) {
    if (row >= layout.num_rows) return;
    const auto at = locate(layout.outer, row);
    this->x = x + at.of[kX];
    this->out = out + at.of[kOut];
    peeled =
        peeled_t::of<kVector>(num_before_aligned<kVector>(this->x), layout.row_length);
  }
  __device__ __forceinline__ bool has(long long vector) const {
    return vector < peeled.num_vectors;
  }
  __device__ __forceinline__ long long position(long long vector) const {
    return peeled.head + vector * kVector;
  }
  // f(i) for the elements of this thread that are in no whole vector.
  template <typename F>
  __device__ __forceinline__ void for_each_edge(F f) const {
    if (blockIdx.x > 0) return;
    for (int i = lane(); i < peeled.head + peeled.tail; i += kLanes) {
      f(peeled.edge<kVector>(i));
    }
  }
};

// The sum of this thread's part of a row.
template <bool kInPowers>
struct sum_of_thread {
  using type = running_t<acc_t>;
};
template <>
struct sum_of_thread<true> {
  using type = powers_t;
};
using part_sum_t = sum_of_thread<kSumsPowers>::type;

extern __shared__ uint4 memory[];

struct stream_t {
  const x_t* const x;
  out_t* const out;
  const layout_t& layout;
  const board_t board;
  shared_sum_t* const shared;  // 2 of them
  const ring_t<x_t, kVector> ring;
  const int steps;

  walk_t loading, summing, writing;
  row_t loaded, summed, written;
  part_sum_t sum;
  int turn = 0;
  finish_t finish;
  finish_in_powers_t finish_in_powers;
  bool in_powers = false;

  __device__ __forceinline__ stream_t(const x_t* x,
                                      out_t* out,
                                      const layout_t& layout,
                                      unsigned long long* told,
                                      shared_sum_t* shared)
      : x(x), out(out), layout(layout), board{told}, shared(shared), ring(memory),
        steps(num_steps<kVector>(layout.row_length)), finish_in_powers(1, 0) {
    loaded.enter(x, out, layout, loading.row);
    summed = written = loaded;
  }

  // Loads this thread's next vector, if there is one.
  __device__ __forceinline__ void load() {
    if (loading.row < layout.num_rows) {
      if (loaded.has(loading.vector)) {
        ring.load(loading.slot, loaded.x + loaded.position(loading.vector));
      }
      if (loading.next(steps)) loaded.enter(x, out, layout, loading.row);
    }
    ptx::commit_copies();  // a group for each step, even if it is empty
  }

  __device__ __forceinline__ score_t score(x_t element) const {
    return score_t(to<acc_t>(element), layout);
  }

  // Adds the scores of one of this thread's vectors of the row that is summed.
  template <typename Sum>
  __device__ __forceinline__ void add(Sum& sum, int slot, long long vector) const {
    const vector_t<x_t, kVector> read = ring.at(slot);
    score_t s[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      s[e] = summed.has(vector) ? score(read.element[e]) : score_t();
    }
    take_scores(sum, s);
  }
  template <typename Sum>
  __device__ __forceinline__ void add_edges(Sum& sum) const {
    summed.for_each_edge([&](long long i) {
      const score_t s[1] = {score(summed.x[i])};
      take_scores(sum, s);
    });
  }

  // The sum of the block as softmax_online has it, whatever the scores are: all of the
  // row is in the ring still.
  __device__ __forceinline__ running_t<acc_t> running_sum() const {
    running_t<acc_t> sum;
    int slot = summing.slot;
    long long vector = summing.vector;
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      add(sum, slot, vector);
      slot = slot == 0 ? kRing - 1 : slot - 1;
      vector -= (long long)gridDim.x * kLanes;
    }
    add_edges(sum);
    return group_reduce<kLanes>(sum, merge_t());
  }

  // The sum of the block, in each of its threads.
  __device__ __forceinline__ partial_t join(powers_t sum) {
    shared[turn].join(sum);
    turn ^= 1;
    return is_sum(sum) ? partial_of(sum) : partial_of(running_sum());
  }
  __device__ __forceinline__ partial_t join(running_t<acc_t> sum) {
    return partial_of(group_reduce<kLanes>(sum, merge_t()));
  }

  // Tells the sum of the block, when its threads have seen all that they have of a row.
  __device__ __forceinline__ void tell() {
    add_edges(sum);
    const partial_t found = join(sum);
    if (threadIdx.x == 0) board.tell(summing.row, found.l, found.m);
    sum = part_sum_t();
  }

  __device__ __forceinline__ void sum_step() {
    add(sum, summing.slot, summing.vector);
    if (summing.step == steps - 1) tell();
    if (summing.next(steps)) summed.enter(x, out, layout, summing.row);
  }

  // Joins what the blocks of the group tell of the row that is to be written.
  __device__ __forceinline__ void hear() {
    running_t<acc_t> sum;
    for (int block = lane(); block < gridDim.x; block += kLanes) {
      const partial_t told = {board.first_of(writing.row, block),
                              board.second_of(writing.row, block)};
      sum = merge_t()(sum, sum_of(told));
    }
    sum = group_reduce<kLanes>(sum, merge_t());
    if constexpr (finish_in_powers_t::kTakes) {
      in_powers = finish_in_powers_t::takes(sum.l.value, sum.m);
      if (in_powers) finish_in_powers = finish_in_powers_t(sum.l.value, sum.m);
    }
    if (!in_powers) finish = finish_t(sum.shift(), sum.l.value);
  }

  template <typename Finish>
  __device__ __forceinline__ void write(const vector_t<x_t, kVector>& read,
                                        const Finish& finish) const {
    acc_t result[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) result[e] = finish(score(read.element[e]));
    if (!written.has(writing.vector)) return;
    const auto y = to_vector<out_t, kVector>::of(result);
    out_t* const home = written.out + written.position(writing.vector);
    if (is_aligned<out_t, kVector>(home)) {
      store_vector<kVector>(home, y);
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) home[e] = y.element[e];
    }
  }

  __device__ __forceinline__ void write_step() {
    if (writing.step == 0) hear();
    const vector_t<x_t, kVector> read = ring.at(writing.slot);
    if (finish_in_powers_t::kTakes && in_powers) {
      if constexpr (finish_in_powers_t::kTakes) write(read, finish_in_powers);
    } else {
      write(read, finish);
    }
    if (writing.step == steps - 1) {
      written.for_each_edge([&](long long i) {
        const score_t s = score(written.x[i]);
        acc_t y = finish(s);
        if constexpr (finish_in_powers_t::kTakes) {
          if (in_powers) y = finish_in_powers(s);
        }
        written.out[i] = to<out_t>(y);
      });
    }
    if (writing.next(steps)) written.enter(x, out, layout, writing.row);
  }

  __device__ __forceinline__ void run() {
    for (int i = 0; i <= kAhead; ++i) load();
    for (int i = 0; writing.row < layout.num_rows; ++i) {
      ptx::wait_copy_groups<kAhead>();
      if (summing.row < layout.num_rows) sum_step();
      if (i >= kLag) {
        i = kLag;
        write_step();
      }
      load();
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    softmax_stream(const x_t* x,
                   const bool* where,
                   out_t* out,
                   unsigned long long* told,  // (num_rows, gridDim.x, 2)
                   const __grid_constant__ layout_t layout) {
  __shared__ shared_sum_t shared[2];
  stream_t(x, out, layout, told, shared).run();
}

// SPDX-License-Identifier: MIT
// softmax_stream: rows that only many multiprocessors together can hold, read once.
//
// Algorithm  softmax_stream_clear: nothing is told yet. softmax_stream: as
//            softmax_split, whose two launches are one here (softmax/stream.cuh): each
//            warp sums the exponentials of its part of a row, the blocks of a group tell
//            each other, and join what they have told; out_i = exp(s_i - m) / l
//            (log_softmax: (s_i - m) - log l).
// Grid       (blocks of a group, groups), all at once; a group takes a row at a time
// Tiles      a step of a row: kTogether vectors of 16 bytes a thread of the group; a
//            ring of kRing steps in shared memory
// Memory     x and out once; 16 bytes an access where out is aligned as x is; between
//            blocks, two doubles a row and block
// Numbers    as softmax_split
// Limits     rows of at most kMostLag + 1 steps of the group; reduced axis contiguous
//            in x and out; no mask; sm_80 or newer
//
// Parameters as in softmax/score.cuh and softmax/stream.cuh
#include "softmax/partial.cuh"
#include "softmax/stream.cuh"

constexpr int kWidest = sizeof(x_t) > sizeof(out_t) ? sizeof(x_t) : sizeof(out_t);
constexpr int kVector = 16 / kWidest;  // elements a vector access
static_assert(!kHasWhere, "a mask would have to be read twice");

extern "C" __global__ void __launch_bounds__(kBlockThreads)
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
  bool in_vectors;  // of out

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
    in_vectors = num_before_aligned<kVector>(this->out + peeled.head) == 0;
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

// The last step, for all blocks.
struct result_t {
  finish_t finish;
  finish_in_powers_t finish_in_powers;
  bool in_powers;
};

using row_news_t = news_t<running_t<acc_t>, result_t>;

extern __shared__ uint4 memory[];

struct stream_t {
  const x_t* const x;
  out_t* const out;
  const layout_t& layout;
  const ring_t<x_t, kVector> ring;
  row_news_t& news;
  const int steps;

  walk_t loading, summing, writing;
  row_t loaded, summed, written;
  part_sum_t sum;
  result_t result;

  __device__ __forceinline__ stream_t(const x_t* x,
                                      out_t* out,
                                      const layout_t& layout,
                                      row_news_t& news)
      : x(x), out(out), layout(layout), ring(memory), news(news),
        steps(num_steps<kVector>(layout.row_length)) {
    loaded.enter(x, out, layout, loading.row);
    summed = written = loaded;
    result.in_powers = false;
  }

  // Loads this thread's next vectors, if there are any.
  __device__ __forceinline__ void load() {
    if (loading.row < layout.num_rows) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const long long vector = loading.vector + k * walk_t::step_of_vector();
        if (loaded.has(vector)) {
          ring.load(loading.slot, k, loaded.x + loaded.position(vector));
        }
      }
      if (loading.next(steps)) loaded.enter(x, out, layout, loading.row);
    }
    ptx::commit_copies();  // a group for each step, even if it is empty
  }

  __device__ __forceinline__ score_t score(x_t element) const {
    return score_t(to<acc_t>(element), layout);
  }

  // Adds the scores of a step of the row that is summed.
  template <typename Sum>
  __device__ __forceinline__ void add(Sum& sum, int slot, long long vector) const {
    score_t s[kTogether * kVector];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const vector_t<x_t, kVector> read = ring.at(slot, k);
      const bool has = summed.has(vector + k * walk_t::step_of_vector());
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        s[k * kVector + e] = has ? score(read.element[e]) : score_t();
      }
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

  // The sum of the warp as softmax_online has it, whatever the scores are: all of the
  // row is in the ring still.
  __device__ __forceinline__ running_t<acc_t> running_sum() const {
    running_t<acc_t> sum;
    int slot = summing.slot;
    long long vector = summing.vector;
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      add(sum, slot, vector);
      slot = slot == 0 ? kRing - 1 : slot - 1;
      vector -= kTogether * walk_t::step_of_vector();
    }
    add_edges(sum);
    return warp_reduce(sum, merge_t());
  }

  // The sum of the warp, in each of its threads.
  __device__ __forceinline__ running_t<acc_t> join(powers_t sum) const {
    sum.template join<kWarpSize>();
    return is_sum(sum) ? sum_of(partial_of(sum)) : running_sum();
  }
  __device__ __forceinline__ running_t<acc_t> join(running_t<acc_t> sum) const {
    return warp_reduce(sum, merge_t());
  }

  __device__ __forceinline__ void sum_step() {
    add(sum, summing.slot, summing.vector);
    if (summing.step == steps - 1) {
      add_edges(sum);
      news.tell(join(sum));
      sum = part_sum_t();
    }
    if (summing.next(steps)) summed.enter(x, out, layout, summing.row);
  }

  template <typename Finish>
  __device__ __forceinline__ void write(const Finish& finish) const {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const vector_t<x_t, kVector> read = ring.at(writing.slot, k);
      acc_t found[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) found[e] = finish(score(read.element[e]));
      const auto y = to_vector<out_t, kVector>::of(found);
      const long long vector = writing.vector + k * walk_t::step_of_vector();
      if (written.has(vector)) {
        out_t* const home = written.out + written.position(vector);
        if (written.in_vectors) {
          store_vector<kVector>(home, y);
        } else {
#pragma unroll
          for (int e = 0; e < kVector; ++e) home[e] = y.element[e];
        }
      }
    }
    if (writing.step == steps - 1) {
      written.for_each_edge([&](long long i) {
        written.out[i] = to<out_t>(finish(score(written.x[i])));
      });
    }
  }

  __device__ __forceinline__ void write_step() {
    if (writing.step == 0) result = news.hear();
    if (finish_in_powers_t::kTakes && result.in_powers) {
      write(result.finish_in_powers);
    } else {
      write(result.finish);
    }
    if (writing.next(steps)) written.enter(x, out, layout, writing.row);
  }

  __device__ __forceinline__ void run() {
    const int lag = lag_of(steps);
#pragma unroll 1
    for (int i = 0; i <= kAhead; ++i) load();
#pragma unroll 1
    for (int i = 0; writing.row < layout.num_rows; ++i) {
      ptx::wait_copy_groups<kAhead>();
      if (summing.row < layout.num_rows) sum_step();
      if (i >= lag) {
        i = lag;
        write_step();
      }
      load();
    }
  }
};

// The messenger of the block.
__device__ __forceinline__ void carry(row_news_t& news,
                                      const board_t& board,
                                      long long num_rows) {
  news.carry(
      num_rows, merge_t(),
      [&](long long row, const running_t<acc_t>& sum) {
        const partial_t partial = partial_of(sum);
        board.tell(row, partial.l, partial.m);
      },
      [&](long long row, int block) {
        const partial_t partial = {board.first_of(row, block),
                                   board.second_of(row, block)};
        return sum_of(partial);
      },
      [&](const running_t<acc_t>& sum) {
        result_t result;
        result.finish = finish_t(sum.shift(), sum.l.value);
        result.in_powers = finish_in_powers_t::kTakes &&
                           finish_in_powers_t::takes(sum.l.value, sum.m);
        if (result.in_powers) {
          result.finish_in_powers = finish_in_powers_t(sum.l.value, sum.m);
        }
        return result;
      });
}

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    softmax_stream(const x_t* x,
                   const bool* where,
                   out_t* out,
                   unsigned long long* told,  // (num_rows, gridDim.x, 2)
                   const __grid_constant__ layout_t layout) {
  __shared__ row_news_t news;
  if (threadIdx.x < kLanes) {
    stream_t(x, out, layout, news).run();
  } else {
    carry(news, board_t{told}, layout.num_rows);
  }
}

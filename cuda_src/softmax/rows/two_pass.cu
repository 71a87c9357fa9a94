// SPDX-License-Identifier: MIT
// softmax_split: long rows in two launches, one for sums, one for results.
//
// Algorithm  softmax_split_sum: each block sums the exponentials of its part of a row:
//            floats in powers of two (softmax/detail/scaled_sum.cuh); doubles, and
//            parts out of range for that, as softmax_online. softmax_split_write: each
//            block adds the sums of its row and writes its part: out_i = exp(s_i - m) /
//            l (log_softmax: (s_i - m) - log l).
// Grid       1-D, num_rows * kParts blocks of kLanes threads
// Memory     x twice, the second time from L2 where it fits; out once; 16 bytes per
//            access, unaligned ends element by element
// Numbers    as softmax_online
// Limits     reduced axis contiguous in x and out
#include "softmax/detail/split_row_sum.cuh"
#include "softmax/detail/row_splits.cuh"

constexpr int kVector = kRowVector;
// Vectors that a thread loads together.
constexpr int kTogether = kVector >= 8 ? 2 : 4;

// A part of a row of x, where and out.
struct work_t {
  const layout_t& layout;
  const x_t* x;
  const bool* where;
  out_t* out;
  aligned_span_t aligned;

  __device__ __forceinline__ work_t(const x_t* x, const bool* where, out_t* out,
                                    const layout_t& layout, const part_t& part)
      : layout(layout) {
    const auto at = locate(layout.outer, part.row);
    this->x = x + at.of[kX] + part.begin;
    this->where = where + at.of[kWhere] + part.begin * layout.reduced.stride[kWhere][0];
    this->out = out + at.of[kOut] + part.begin;
    aligned = aligned_span_t::of<kVector>(num_before_aligned<kVector>(this->x),
                                          part.length());
  }

  __device__ __forceinline__ bool selected(long long i) const {
    return !kHasWhere || where[i * layout.reduced.stride[kWhere][0]];
  }
  __device__ __forceinline__ score_t score(x_t value, long long i) const {
    return selected(i) ? score_t(to<acc_t>(value), layout) : score_t::absent(layout);
  }

  // Calls visit(first element, vector) for this thread's vectors, then
  // visit_edge(element) for its elements of head and tail. kTogether vectors load at
  // the same time.
  template <typename Visit, typename VisitEdge>
  __device__ __forceinline__ void for_each(Visit visit, VisitEdge visit_edge) const {
    constexpr int kStep = kTogether * kLanes;
    for (long long first = lane(); first < aligned.num_vectors; first += kStep) {
      vector_t<x_t, kVector> read[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const long long v = first + k * kLanes;
        if (v < aligned.num_vectors) {
          read[k] = load_vector<kVector>(x + aligned.head + v * kVector);
        }
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const long long v = first + k * kLanes;
        if (v < aligned.num_vectors) visit(aligned.head + v * kVector, read[k]);
      }
    }
    for (int i = lane(); i < aligned.head + aligned.tail; i += kLanes) {
      visit_edge(aligned.edge<kVector>(i));
    }
  }
};

// Adds the scores of this thread.
template <typename Sum>
__device__ __forceinline__ void add_all(const work_t& work, Sum& sum) {
  work.for_each(
      [&](long long i, const vector_t<x_t, kVector>& read) {
        score_t s[kVector];
#pragma unroll
        for (int e = 0; e < kVector; ++e) s[e] = work.score(read.element[e], i + e);
        take_scores(sum, s, keys_t(work.layout));
      },
      [&](long long i) {
        const score_t s[1] = {work.score(work.x[i], i)};
        take_scores(sum, s, keys_t(work.layout));
      });
}

// The sum over the block as in softmax_online, for any scores.
__device__ __forceinline__ running_t<acc_t> running_sum(const work_t& work) {
  running_t<acc_t> sum;
  add_all(work, sum);
  return group_reduce<kLanes>(sum, combine_t(keys_t(work.layout)));
}

// The sum of the block in each thread; `top` tells whether it is valid.
__device__ __forceinline__ powers_t sum_of_powers(const work_t& work) {
  powers_t sum;
  add_all(work, sum);
  __shared__ shared_sum_t shared;
  shared.join(sum);
  return sum;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 2)
    softmax_split_sum(const x_t* x, const bool* where, out_t* out,
                      partial_t* partial,  // (num_rows, kParts)
                      const __grid_constant__ layout_t layout) {
  const part_t part(blockIdx.x, layout.row_length);
  const work_t work(x, where, out, layout, part);
  if constexpr (kSumsPowers) {
    const powers_t sum = sum_of_powers(work);
    if (is_sum(sum)) {
      const partial_t found = partial_of(sum, keys_t(layout));
      if (lane() == 0) partial[blockIdx.x] = found;
      return;
    }
  }
  const running_t<acc_t> sum = running_sum(work);
  if (lane() == 0) partial[blockIdx.x] = partial_of(sum, keys_t(layout));
}

// Writes finish(score) for the part.
template <typename Finish>
__device__ __forceinline__ void write(const work_t& work, const Finish& finish) {
  const auto result = [&](x_t value, long long i) {
    return to<out_t>(work.selected(i) ? finish(score_t(to<acc_t>(value), work.layout))
                                      : unselected());
  };
  const bool in_vectors =
      num_before_aligned<kVector>(work.out + work.aligned.head) == 0;
  work.for_each(
      [&](long long i, const vector_t<x_t, kVector>& read) {
        store_results<kVector>(work.out + i, in_vectors,
                               [&](int e) { return result(read.element[e], i + e); });
      },
      [&](long long i) { work.out[i] = result(work.x[i], i); });
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 2)
    softmax_split_write(const x_t* x, const bool* where, out_t* out,
                        const partial_t* partial,
                        const __grid_constant__ layout_t layout) {
  // From the last part to the first: what was read last is still in L2.
  const part_t part(gridDim.x - 1 - blockIdx.x, layout.row_length);
  const work_t work(x, where, out, layout, part);
  const combine_t combine{keys_t(layout)};
  running_t<acc_t> sum;
  for (int i = lane(); i < kParts; i += kLanes) {
    sum = combine(sum, sum_of(partial[part.row * kParts + i]));
  }
  sum = group_reduce<kLanes>(sum, combine);
  if constexpr (finish_in_powers_t::kTakes) {
    if (finish_in_powers_t::takes(sum.l.value, sum.m)) {
      write(work, finish_in_powers_t(sum.l.value, sum.m));
      return;
    }
  }
  write(work, finish_t(sum.shift(), sum.l.value));
}

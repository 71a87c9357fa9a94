// SPDX-License-Identifier: MIT
// softmax_tiled: a row is read once, stays in registers, and is written once.
//
// Algorithm  As softmax_safe, on a row that is held on chip:
//                m = max_i s_i,  e_i = exp(s_i - m),  l = sum_i e_i,  out_i = e_i / l
//            (log_softmax: out_i = (s_i - m) - log l), s = scale * x.
// Grid       1-D; a block of kNumThreads takes kRowsPerBlock rows at a time
// Tiles      a row; each of its kLanes threads holds kHeld elements in registers
// Memory     x and out once; 16 bytes an access where both are contiguous and aligned,
//            else element by element with neighbouring lanes side by side
// Numbers    exponentials in acc_t of exact differences, sums in double, one rounding;
//            for results of 16 bits plain differences, the fast exponential, float sums
// Limits     rows of at most kLanes * kHeld elements; any strides
#include "common/vector.cuh"
#include "softmax/row.cuh"

#ifndef HELD
#error "HELD, elements a thread holds, comes from the host"
#endif
constexpr int kHeld = HELD;
constexpr int kWidest = sizeof(x_t) > sizeof(out_t) ? sizeof(x_t) : sizeof(out_t);
constexpr int kVector = 16 / kWidest;  // elements a vector access
constexpr int kNumVectors = kHeld / kVector;
static_assert(kHeld % kVector == 0 && kHeld <= 32,
              "whole vectors, and a bit an element");
// Slots beyond the row hold -inf, which adds nothing to the row; a scale or a mask has
// to be told which slots these are.
constexpr bool kTracksSlots = kHasWhere || kScaled;

// A lane sums few terms here: double is enough for double, and float for 16 bits.
template <bool kIsCoarse>
struct part {
  using type = double;
};
template <>
struct part<true> {
  using type = float;
};
using part_t = part<kCoarse>::type;

// How elements are dealt to the lanes of a row: in whole vectors, or one by one.
enum class deal { kVectors, kSingles };

// The part of a row that one lane holds.
struct held_t {
  acc_t value[kHeld];
  unsigned selected = 0;  // a bit a slot

  // Position in the row of slot j.
  template <deal kDeal>
  static __device__ __forceinline__ int position(int j) {
    return kDeal == deal::kVectors
               ? (j / kVector * kLanes + lane()) * kVector + j % kVector
               : j * kLanes + lane();
  }
  __device__ __forceinline__ bool is_selected(int j) const {
    return !kTracksSlots || (selected >> j & 1);
  }

  template <deal kDeal>
  __device__ __forceinline__ void load(const row_t& row) {
    const int length = int(row.length);
    vector_t<x_t, kVector> read[kNumVectors];
    // All loads are under way before the first is waited for.
    if (kDeal == deal::kVectors) {
#pragma unroll
      for (int v = 0; v < kNumVectors; ++v) {
        const int i = position<kDeal>(v * kVector);
        if (i + kVector <= length) read[v] = load_vector<kVector>(row.x + i);
      }
    }
    if (kDeal == deal::kSingles || length % kVector != 0) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int i = position<kDeal>(j);
        const bool is_read =
            kDeal == deal::kVectors && i - j % kVector + kVector <= length;
        if (i < length && !is_read) {
          read[j / kVector].element[j % kVector] = row.x[row.offset(kX, i)];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int i = position<kDeal>(j);
      if (kTracksSlots && i < length && row.selected(i)) selected |= 1u << j;
      value[j] = i < length ? to<acc_t>(read[j / kVector].element[j % kVector])
                            : -infinity<acc_t>();
    }
  }

  template <deal kDeal>
  __device__ __forceinline__ void store(const row_t& row) const {
    const int length = int(row.length);
#pragma unroll
    for (int v = 0; v < kNumVectors; ++v) {
      vector_t<out_t, kVector> written;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        written.element[k] = to<out_t>(value[v * kVector + k]);
      }
      const int first = position<kDeal>(v * kVector);
      if (kDeal == deal::kVectors && first + kVector <= length) {
        store_vector(row.out + first, written);
      } else {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const int i = position<kDeal>(v * kVector + k);
          if (i < length) row.out[row.offset(kOut, i)] = written.element[k];
        }
      }
    }
  }
};

// Whether a row can be read and written in vectors.
__device__ __forceinline__ bool takes_vectors(const row_t& row) {
  return REDUCED_AXES == 1 && row.layout.reduced.stride[kX][0] == 1 &&
         row.layout.reduced.stride[kOut][0] == 1 && is_aligned<x_t, kVector>(row.x) &&
         is_aligned<out_t, kVector>(row.out);
}

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_tiled(const x_t* x,
                  const bool* where,
                  out_t* out,
                  const __grid_constant__ layout_t layout) {
  for (long long at = first_row(); at < layout.num_rows; at += row_step()) {
    const row_t row(x, where, out, layout, at);
    const bool in_vectors = takes_vectors(row);
    held_t held;
    if (in_vectors) {
      held.load<deal::kVectors>(row);
    } else {
      held.load<deal::kSingles>(row);
    }

    acc_t m = -infinity<acc_t>();
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (held.is_selected(j)) m = larger_t()(m, score_t(held.value[j], layout).high);
    }
    m = shift_by(row_max(m));

    part_t sum = 0;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const acc_t e = score_t(held.value[j], layout).exp_minus(m);
      if (held.is_selected(j)) sum += e;
      if (!kLog) held.value[j] = e;  // softmax needs no more of x than this
    }
    const double l = row_sum(sum);

    const finish_t finish(m, l);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const acc_t value = held.value[j];
      const acc_t y = kLog ? finish(score_t(value, layout)) : value * finish.inverse;
      held.value[j] = held.is_selected(j) ? y : unselected();
    }
    if (in_vectors) {
      held.store<deal::kVectors>(row);
    } else {
      held.store<deal::kSingles>(row);
    }
  }
}

// SPDX-License-Identifier: MIT
// Rows that several blocks share, without a mask: what a warp sums, what blocks
// publish, and the last step.
//
// A warp has a part of a row, and each thread kCount vectors of it:
//   at(k), has(k), position(k)
//       vector k, whether it is in the row, and where it begins; -inf outside of the
//       row
//   edge, has_edge(), edge_position()
//       if kHasEdge: the same for one more element
//   each_again(visit)
//       calls visit(position, score) for each element
//   keep(k, exps)
//       if kKeepsExps: takes the exponentials of vector k
//   out, layout
//       results are written at the same positions, from out on
#pragma once

#include "softmax/detail/hinted.cuh"
#include "softmax/detail/partial_sum.cuh"
#include "softmax/detail/row_exp.cuh"

constexpr int kVector = kRowVector;

// How a part is summed: doubles by a table; floats in powers of two, in the same way as
// they are written if that is cheap.
constexpr bool kHasRoots = sizeof(acc_t) == sizeof(double);
constexpr bool kHasPowers = finish_in_powers_t::kTakes || kCoarse;
constexpr exps kHow = kHasRoots ? exps::kByTable : exps::kOfScore;
// Sums of doubles are in units of 2^-kRoom, but for logs.
constexpr int kRoom = kHasRoots && !kLog ? row_exp_t<exps::kByTable>::kRoom : 0;

__device__ __forceinline__ double power_of_two(int count) {
  return __hiloint2double((1023 + count) << 20, 0);
}

// --- the sum of a warp ---------------------------------------------------------------

template <typename Part>
__device__ __forceinline__ score_t score_of(const Part& part, x_t element) {
  return score_t(to<acc_t>(element), part.layout);
}

// The largest score of a warp; NaN if there is one, except for doubles.
__device__ __forceinline__ acc_t larger(acc_t a, acc_t b) {
  if constexpr (kHasRoots) return larger_finite_t()(a, b);
  return detail::largest_nan(a, b);
}
template <typename Part> __device__ __forceinline__ acc_t largest(const Part& part) {
  acc_t m = -infinity<acc_t>();
  if constexpr (Part::kHasEdge) m = score_of(part, part.edge).key;
  if constexpr (sizeof(x_t) == 2 && kVector % 2 == 0 && !kScaled) {
    auto of_all = part.at(0);  // no conversion needed
#pragma unroll
    for (int k = 1; k < Part::kCount; ++k) of_all = larger_of(of_all, part.at(k));
#pragma unroll
    for (int e = 0; e < kVector; ++e) m = larger(m, to<acc_t>(of_all.element[e]));
  } else {
#pragma unroll
    for (int k = 0; k < Part::kCount; ++k) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        m = larger(m, score_of(part, part.at(k).element[e]).key);
      }
    }
  }
  return warp_reduce(m, [](acc_t a, acc_t b) { return larger(a, b); });
}

// For any scores, one by one.
template <typename Part>
__device__ __forceinline__ partial_t careful_sum(const Part& part) {
  running_t<acc_t> sum;
  part.each_again([&](int, score_t score) {
    const score_t s[1] = {score};
    take_scores(sum, s, keys_t(part.layout));
  });
  return partial_of(warp_reduce(sum, combine_t<>()), keys_t(part.layout));
}

// If the sum is not finite it is invalid. `m` is the largest score.
template <typename Part>
__device__ __forceinline__ partial_t sum_of_roots(const Part& part, acc_t m) {
  const row_exp_t<kHow> exp_of_row(shift_by(m));
  auto sum = exp_of_row.none();
#pragma unroll
  for (int k = 0; k < Part::kCount; ++k) {
    acc_t exps[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      exps[e] = exp_of_row(score_of(part, part.at(k).element[e]));
      exp_of_row.add(sum, exps[e]);
    }
    if constexpr (Part::kKeepsExps) part.keep(k, exps);
  }
  if constexpr (Part::kHasEdge) {
    exp_of_row.add(sum, exp_of_row(score_of(part, part.edge)));
  }
  return {total(warp_reduce(exp_of_row.sum_of(sum), plus_t())), double(m)};
}
template <typename Part>
__device__ __forceinline__ partial_t sum_of_powers(const Part& part, acc_t m) {
  if (m == -infinity<acc_t>()) return {0, double(m)};
  if (!power_t::takes(m)) return {infinity<double>(), 0};
  const power_t power(m);
  const auto term = [&](x_t element) {
    const score_t s = score_of(part, element);
    if constexpr (kCoarse) return exp2f(fmaf(s.key, float(kLog2e), -power.unit));
    return power(s);
  };
  // Four terms are added as floats; for 16-bit results, those of a vector.
  double l = 0;
  if constexpr (Part::kHasEdge) l = term(part.edge);
#pragma unroll
  for (int k = 0; k < Part::kCount; ++k) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum += term(part.at(k).element[e]);
    l += sum;
  }
  l = warp_reduce(l, plus_t());
  return {l * power_sum_t<float, false>::power_about(int(power.unit), m), double(m)};
}
template <typename Part>
__device__ __forceinline__ partial_t sum_of_pairs(const Part& part) {
  powers_t sum;
#pragma unroll
  for (int k = 0; k < Part::kCount; ++k) {
    score_t s[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) s[e] = score_of(part, part.at(k).element[e]);
    take_scores(sum, s, keys_t(part.layout));
  }
  if constexpr (Part::kHasEdge) {
    const score_t s[1] = {score_of(part, part.edge)};
    take_scores(sum, s, keys_t(part.layout));
  }
  sum.template join<kWarpSize>();
  if (!is_sum(sum)) return {infinity<double>(), 0};
  return partial_of(sum, keys_t(part.layout));
}

// The sum of a warp, whose largest score is `m`.
template <typename Part>
__device__ __forceinline__ partial_t sum_up(const Part& part, acc_t m) {
  partial_t sum;
  if constexpr (kHasRoots) {
    sum = sum_of_roots(part, m);
    // The scores are gone, but if the sum is not finite all results of the row are NaN.
    if constexpr (Part::kKeepsExps) return sum;
  } else if constexpr (kHasPowers) {
    sum = sum_of_powers(part, m);
  } else {
    sum = sum_of_pairs(part);
  }
  if (!is_finite(sum.l)) {
    sum = careful_sum(part);
    if constexpr (kRoom > 0) sum.l *= power_of_two(kRoom);
  }
  return sum;
}

// --- results -------------------------------------------------------------------------

// The last step for a row.
struct last_step_t {
  finish_t usual;
  finish_in_powers_t in_powers;
  bool takes_powers;

  last_step_t() = default;
  __device__ __forceinline__ explicit last_step_t(const partial_t& sum)
      : takes_powers(false) {
    const acc_t m = acc_t(sum.m);
    if constexpr (finish_in_powers_t::kTakes) {
      takes_powers = finish_in_powers_t::takes(sum.l, m);
      if (takes_powers) {
        in_powers = finish_in_powers_t(sum.l, m);
        return;
      }
    }
    usual = finish_t(shift_by(m), sum.l);
  }
};

template <typename Part, typename Finish>
__device__ __forceinline__ void write(const Part& part, const Finish& finish) {
  const unsigned long long policy = ptx::policy_evict_first();
  const bool in_vectors = is_aligned<out_t, kVector>(part.out);
#pragma unroll
  for (int k = 0; k < Part::kCount; ++k) {
    acc_t result[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      result[e] = finish(score_of(part, part.at(k).element[e]));
    }
    const auto written = to_vector<out_t, kVector>::of(result);
    if (!part.has(k)) continue;
    store_vector(part.out + part.position(k), written, in_vectors, policy);
  }
  if constexpr (Part::kHasEdge) {
    const acc_t of_edge = finish(score_of(part, part.edge));
    if (part.has_edge()) part.out[part.edge_position()] = to<out_t>(of_edge);
  }
}
template <typename Part>
__device__ __forceinline__ void write(const Part& part, const last_step_t& step) {
  if constexpr (finish_in_powers_t::kTakes) {
    if (step.takes_powers) {
      write(part, step.in_powers);
    } else {
      part.each_again(
          [&](int i, score_t s) { part.out[i] = to<out_t>(step.usual(s)); });
    }
  } else if constexpr (kHasRoots && !kLog) {
    const row_exp_t<kHow> exp_of_row(step.usual.m);
    write(part, [&](score_t s) { return exp_of_row(s) * step.usual.inverse; });
  } else {
    write(part, step.usual);
  }
}

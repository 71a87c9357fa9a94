// SPDX-License-Identifier: MIT
// points_combine: combines the parts of each row into its result, in the original
// order.
//
// Rows whose accuracy the earlier launches cannot guarantee are flagged in `redo`, and
// a repair writes only flagged rows (or all, where sums were too small for skipping).
// The error of a score is about 2^-24 of its terms, 2^-53 in float64: at most `top -
// lse`, since the heaviest keys may be the nearest. A log-sum may be off by 2 ulp, so a
// large one may hide larger scores: by `slack`, which depends on the kernel that
// computed the parts.

#include "common/math.cuh"
#include "points/params.cuh"

using accum_t = ACCUM_T;
using lse_t = LSE_T;

constexpr double kLargeScore = sizeof(accum_t) == 8 ? 64 : 16;  // bits

// What names a group in `redo`: a launch before that left no parts of it, or this one.
constexpr int kNoParts = 1, kDoubtful = 2;

// One thread per row; the second axis of the grid counts chunks of columns.
extern "C" __global__ void points_combine(
    const double* __restrict__ refs,      // part_row
    const accum_t* __restrict__ parts,    // part_row, kSums to each part
    const long long* __restrict__ order,  // (batch, num_rows), or null
    points_facts_t* __restrict__ facts,   // (batch)
    int* __restrict__ redo,               // (batch, groups)
    accum_t* __restrict__ out,            // (batch, num_rows, num_columns), or null
    lse_t* __restrict__ lse,              // (batch, num_rows), or null
    points_params_t params) {
  const long long n = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int entry = static_cast<int>(n / params.padded_rows);
  const int row = static_cast<int>(n % params.padded_rows), chunk = blockIdx.y;
  if (entry >= params.batch || row >= params.num_rows) return;
  int& flag = redo[entry * (params.padded_rows / kGroup) + row / kGroup];
  if (params.repair) {
    bool is_named = flag != 0;
    if (!kHasWeights) {
      const float largest = __uint_as_float(facts[entry].results);
      const float log2_largest = largest > 0 ? log2f(largest) : -infinity<float>();
      is_named |= !(log2_largest >= from_ordered(facts[entry].values) - kSmallSum);
    }
    if (!is_named) return;
  } else if (flag == kNoParts) {
    return;
  }

  const int num_parts =
      params.repair || facts[entry].degree > 0 ? params.num_parts : params.first_part;
  const double inf = infinity<double>();
  const long long first = part_row(params, chunk, entry, 0, row);
  const auto sum_at = [&](int part, int c) {
    const long long of_part =
        first - row + static_cast<long long>(part) * params.padded_rows;
    return parts[of_part * kSums + static_cast<long long>(c) * params.padded_rows +
                 row];
  };
  const auto ref_at = [&](int part) {
    return refs[first + static_cast<long long>(part) * params.padded_rows];
  };
  double top = kHasWeights ? -inf : 0;
  if constexpr (kHasWeights) {
    for (int part = 0; part < num_parts; ++part) {
      const double ref = ref_at(part);
      if (sum_at(part, 0) != 0 && ref > top) top = ref;
    }
  }
  double sums[kSums] = {};
  if (top > -inf) {
    for (int part = 0; part < num_parts; ++part) {
      if (kHasWeights && sum_at(part, 0) == 0) continue;
      const double factor = exp2(ref_at(part) - top);
#pragma unroll
      for (int c = 0; c < kSums; ++c) {
        sums[c] = fma(factor, static_cast<double>(sum_at(part, c)), sums[c]);
      }
    }
  }

  const long long place =
      order != nullptr ? order[static_cast<long long>(entry) * params.num_rows + row]
                       : row;
  const long long at = static_cast<long long>(entry) * params.num_rows + place;
  bool is_good = true;
  double inverse = 1;
  if constexpr (kHasWeights) {
    const double log2_sum = sums[0] > 0 ? top + log2(sums[0]) : -inf;
    if (lse != nullptr && chunk == 0) {
      const double value = sums[0] >= 0 ? log2_sum * kLn2 : nan_value<double>();
      lse[at] = static_cast<lse_t>(value);
    }
    inverse = sums[0] != 0 ? 1 / sums[0] : 0;
    const double largest = from_ordered(facts[entry].top);
    const double promised = kLargeScore + params.slack * fabs(log2_sum);
    is_good =
        largest == -inf || (is_finite(log2_sum) && largest - log2_sum <= promised);
  }
  float greatest = 0;
#pragma unroll
  for (int v = 0; v < kColumns; ++v) {
    const int column = chunk * kColumns + v;
    const double value = sums[kHasWeights + v] * inverse;
    if (column < params.num_columns) {
      out[at * params.num_columns + column] = static_cast<accum_t>(value);
      is_good &= is_finite(value);
      greatest = fmaxf(greatest, fabsf(static_cast<float>(value)));
    }
  }
  if (!params.repair) {
    // Other rows of the group, and other columns, may come later: no repair follows
    // where there is nothing better, and they must not stay unwritten.
    if (!is_good) flag = kDoubtful;
    if (!kHasWeights && greatest > 0) {
      atomicMax(&facts[entry].results, __float_as_uint(greatest));
    }
  }
}

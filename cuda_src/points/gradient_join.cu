// SPDX-License-Identifier: MIT
// points_gradient_join: adds the parts of each row of gradient.cu, and writes them in
// the order of the caller's points.
//
// Without weights it flags what a repair has to make once more, in `redo` and by the
// largest result of a batch entry, and after that writes nothing else.

#include "common/math.cuh"
#include "points/gradient.cuh"

using accum_t = ACCUM_T;

// One thread per row; the second axis of the grid counts chunks of axes.
extern "C" __global__ void points_gradient_join(
    const double* __restrict__ parts,              // part_row, kMoments to each part
    const long long* __restrict__ order,           // (batch, num_rows), or null
    points_facts_t* __restrict__ facts,            // (batch)
    const points_facts_t* __restrict__ row_facts,  // (batch)
    int* __restrict__ redo,                        // (batch, groups)
    accum_t* __restrict__ moments,                 // (batch, num_rows, kDim)
    double* __restrict__ squares,                  // (batch, num_rows, 1 or kDim)
    double factor,                                 // of the moments
    double unit,                                   // of a difference, in bandwidths
    points_params_t params) {
  const long long n = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int entry = static_cast<int>(n / params.padded_rows);
  const int row = static_cast<int>(n % params.padded_rows), chunk = blockIdx.y;
  if (entry >= params.batch || row >= params.num_rows) return;
  int& flag = redo[entry * (params.padded_rows / kGroup) + row / kGroup];
  if (params.repair) {
    const float largest = __uint_as_float(facts[entry].results);
    const float least = from_ordered(facts[entry].values) +
                        from_ordered(row_facts[entry].values) - kSmallSum;
    const float log2_largest = largest > 0 ? log2f(largest) : -infinity<float>();
    if (!flag && log2_largest >= least) return;
  }
  const long long place =
      order != nullptr ? order[static_cast<long long>(entry) * params.num_rows + row]
                       : row;
  const long long at = static_cast<long long>(entry) * params.num_rows + place;
  const auto sum_of = [&](int moment) {
    double sum = 0;
    for (int part = 0; part < params.num_parts; ++part) {
      const long long first = part_row(params, chunk, entry, part, 0) * kMoments;
      sum += parts[first + static_cast<long long>(moment) * params.padded_rows + row];
    }
    return sum;
  };
  bool is_good = true;
  double greatest = 0;
  for (int d = 0; d < kAxes; ++d) {
    const int axis = chunk * kAxes + d;
    if (axis >= kDim) break;
    const double sum = sum_of(d);
    moments[at * kDim + axis] = static_cast<accum_t>(factor * sum);
    if (kSquares == 2) squares[at * kDim + axis] = sum_of(kAxes + d);
    is_good &= is_finite(sum);
    greatest = fmax(greatest, fabs(sum));
  }
  if (kSquares == 1 && chunk == 0) squares[at] = sum_of(kMoments - 1);
  if (!kHasWeights && !params.repair) {
    if (!is_good) flag = 1;
    const float result = static_cast<float>(greatest * unit);
    if (result > 0) atomicMax(&facts[entry].results, __float_as_uint(result));
  }
}

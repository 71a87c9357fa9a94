// SPDX-License-Identifier: MIT
// attention_combine_few: as attention_combine, of many rows in up to PARTS splits.
//
// Algorithm  lse = log sum_p exp(lse_p),  out = sum_p (exp(lse_p - lse)) out_p. With
// the
//            weights divided by their sum first, no sum of products overflows
// Grid       1-D, LANES threads per row of out, 8 columns each
// Memory     global: outs and out once, 16 bytes at a time; lses once per thread,
// mostly
//            from L1. Little else is done than to wait for them, so few registers
//            matter more than shared work: nothing is exchanged between threads
// Numbers    all in float. Rounding errors are not summed as they are there: those of
// so
//            few terms are far below a rounding to 16 bits
// Limits     16 bits, and lses in float; columns are adjacent, and rows whole vectors
#include "attention/combine_params.cuh"
#include "common/math.cuh"

#if !defined(ELEM_T) || !defined(LANES) || !defined(PARTS) || !defined(NUM_THREADS)
#error "ELEM_T, LANES, PARTS and NUM_THREADS come from the host"
#endif
using elem_t = ELEM_T;
constexpr int kLanes = LANES, kParts = PARTS, kNumThreads = NUM_THREADS;

struct alignas(16) eight_t {
  elem_t x[8];
};

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_combine_few(const elem_t* __restrict__ outs,  // (parts, rows, head_dim_v)
                          const float* __restrict__ lses,   // (parts, rows)
                          elem_t* __restrict__ out,         // (rows, head_dim_v)
                          float* __restrict__ lse,          // (rows), contiguous
                          const __grid_constant__ combine_params_t params) {
  const long long block = blockIdx.x + static_cast<long long>(gridDim.x) * blockIdx.y;
  const long long row = (block * kNumThreads + threadIdx.x) / kLanes;
  const int column = threadIdx.x % kLanes * 8;
  if (row >= params.num_rows || column >= params.head_dim_v) return;
  const auto offsets = locate(params.rows, row);

  float weights[kParts], m = -infinity<float>(), l = 0;
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const bool exists = p < params.num_parts;
    weights[p] =
        exists ? lses[offsets.of[kLses] + p * params.lses_part] : -infinity<float>();
  }
  // Splits that saw nothing are not read.
  eight_t values[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const elem_t* const from = outs + offsets.of[kOuts] + p * params.outs_part + column;
    values[p] = weights[p] == -infinity<float>()
                    ? eight_t{}
                    : *reinterpret_cast<const eight_t*>(from);
    m = weights[p] > m ? weights[p] : m;
  }
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    weights[p] = exp_diff(weights[p], m);
    l += weights[p];
  }

  float sum[8] = {};
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const float share = l == 0 ? 0.f : weights[p] / l;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      sum[c] = fmaf(share, to<float>(values[p].x[c]), sum[c]);
    }
  }
  eight_t result;
#pragma unroll
  for (int c = 0; c < 8; ++c) result.x[c] = to<elem_t>(sum[c]);
  *reinterpret_cast<eight_t*>(out + offsets.of[kOut] + column) = result;
  if (column == 0) lse[row] = l == 0 ? -infinity<float>() : m + log_of(l);
}

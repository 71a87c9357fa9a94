// SPDX-License-Identifier: MIT
// attention_hopper_combine: combines the splits of the keys left by attention_hopper.
//
// Algorithm  m = max lse_p,  w_p = exp(lse_p - m),
//            out = sum_p w_p out_p / sum_p w_p,  lse = m + log sum_p w_p
//            A split with lse = -inf saw no key and contributes nothing.
// Grid       one block per row; warps take interleaved splits, lanes 4 columns each
// Memory     global: splits and out once; shared: one sum per warp
// Numbers    lse in double, the rest in float; splits are added in a fixed order
// Limits     head_dim_v is a multiple of 8
#include "attention/score/params.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"

constexpr int kNumWarps = kNumThreads / 32, kMaxColumns = 256;

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_hopper_combine(
    const float* __restrict__ parts,  // (parts, rows, head_dim_v)
    const double* __restrict__ lses,  // (parts, rows)
    elem_t* __restrict__ out,         // (batch, heads, queries, head_dim_v)
    float* __restrict__ lse,          // (batch, heads, queries), or null
    const long long num_splits, const __grid_constant__ params_t params) {
  __shared__ float4 sums[kNumWarps][kMaxColumns / 4];
  const index_t row = block_index();
  const index_t num_rows = params.batch_size * params.num_heads * params.seqlen_q;
  if (row >= num_rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_vectors = static_cast<int>(params.head_dim_v) / 4;

  double m = -infinity<double>();
  for (int part = lane; part < num_splits; part += 32) {
    const double x = lses[part * num_rows + row];
    m = x > m ? x : m;  // NaN enters through its weight instead
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const double x = __shfl_xor_sync(0xffffffffu, m, step);
    m = x > m ? x : m;
  }
  float l = 0;
  for (int part = 0; part < num_splits; ++part) {
    const double x = lses[part * num_rows + row];
    l += x == -infinity<double>() ? 0.f : expf(static_cast<float>(x - m));
  }
  const float inverse = l == 0 ? 0.f : 1 / l;
  if (lse != nullptr && threadIdx.x == 0) {
    lse[row] = l == 0 ? -infinity<float>() : static_cast<float>(m + logf(l));
  }

  const tile_coord_t at(params, row, params.seqlen_q);  // for tiles of one query
  elem_t* const out_row = at.at(out, params.out) + at.tile * params.out.row;
  for (int vector = lane; vector < num_vectors; vector += 32) {
    float4 sum = {};
#pragma unroll 4
    for (int part = warp; part < num_splits; part += kNumWarps) {
      const index_t number = part * num_rows + row;
      const double x = lses[number];
      const float4 y =
          reinterpret_cast<const float4*>(parts)[number * num_vectors + vector];
      if (x == -infinity<double>()) continue;
      const float w = expf(static_cast<float>(x - m));
      sum.x = fmaf(w, y.x, sum.x);
      sum.y = fmaf(w, y.y, sum.y);
      sum.z = fmaf(w, y.z, sum.z);
      sum.w = fmaf(w, y.w, sum.w);
    }
    sums[warp][vector] = sum;
  }
  __syncthreads();
  for (int column = threadIdx.x; column < params.head_dim_v; column += kNumThreads) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kNumWarps; ++n) {
      sum += reinterpret_cast<const float*>(sums[n])[column];
    }
    out_row[column * params.out.col] = to<elem_t>(sum * inverse);
  }
}

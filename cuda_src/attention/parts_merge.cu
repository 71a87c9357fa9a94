// SPDX-License-Identifier: MIT
// attention_parts_merge: what a kernel found for parts of the keys, as one.
//
// Algorithm  Of part p of a row: m_p, l_p = sum exp(s - m_p), o_p = sum exp(s - m_p) v.
//                m = max m_p,  w_p = exp(m_p - m),  l = sum w_p l_p
//                out = sum w_p o_p / l,  lse = m + log l
//            A part with l_p = 0 saw no key and adds nothing.
// Grid       a block a row; its warps take parts by turns, its lanes columns
// Memory     global: parts and out once; shared: the weights, and a sum a warp
// Numbers    m in double, all else in accum_t; parts are added in the same order always
// Limits     head_dim_v up to 256, 256 parts
#include "attention/params.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"

constexpr int kNumWarps = kNumThreads / 32, kMaxColumns = 256, kMaxParts = 256;

// exp(x), for float never 0: an infinity in a part stays one.
__device__ __forceinline__ float weight_of(double x, float) {
  const float w = expf(static_cast<float>(x));
  return w < 1e-38f ? 1e-38f : w;
}
__device__ __forceinline__ double weight_of(double x, double) { return exp(x); }

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_parts_merge(
    const accum_t* __restrict__ parts,  // (parts, rows, head_dim_v)
    const double2* __restrict__ sums,   // (parts, rows): m and l
    elem_t* __restrict__ out,           // (batch, heads, queries, head_dim_v)
    accum_t* __restrict__ lse,          // (batch, heads, queries), or null
    const index_t num_parts,
    const double unit,  // what a unit of m is in units of lse
    const __grid_constant__ params_t params) {
  __shared__ accum_t columns[kNumWarps][kMaxColumns];
  __shared__ accum_t weights[kMaxParts];
  const index_t row = block_index();
  const index_t num_rows = params.batch_size * params.num_heads * params.seqlen_q;
  if (row >= num_rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = static_cast<int>(num_parts);
  const int dim = static_cast<int>(params.head_dim_v);

  double m = -infinity<double>();
  for (int part = lane; part < count; part += 32) {
    const double2 x = sums[part * num_rows + row];
    if (x.y != 0 && x.x > m) m = x.x;  // not a NaN, which comes in by its weight
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const double x = __shfl_xor_sync(0xffffffffu, m, step);
    m = x > m ? x : m;
  }
  for (int part = threadIdx.x; part < count; part += kNumThreads) {
    const double2 x = sums[part * num_rows + row];
    weights[part] = x.y == 0 ? accum_t(0) : weight_of(unit * (x.x - m), accum_t());
  }
  __syncthreads();  // the weights are there

  // All threads add them up alike.
  accum_t l = 0;
  for (int part = 0; part < count; ++part) {
    l = fma_of(weights[part], static_cast<accum_t>(sums[part * num_rows + row].y), l);
  }
  if (lse != nullptr && threadIdx.x == 0) {
    lse[row] = l == 0 ? -infinity<accum_t>() : accum_t(unit * m + log(double(l)));
  }

  for (int column = lane; column < dim; column += 32) {
    accum_t sum = 0;
#pragma unroll 4
    for (int part = warp; part < count; part += kNumWarps) {
      const index_t number = part * num_rows + row;
      // Of a part that saw nothing, nothing was written.
      if (sums[number].y == 0) continue;
      sum = fma_of(weights[part], parts[number * dim + column], sum);
    }
    columns[warp][column] = sum;
  }
  __syncthreads();  // the sums of all warps are there

  const place_t at(params, row, params.seqlen_q);  // its tiles are single queries
  elem_t* const out_row = at.at(out, params.out) + at.tile * params.out.row;
  const accum_t inverse = l == 0 ? accum_t(0) : 1 / l;
  for (int column = threadIdx.x; column < dim; column += kNumThreads) {
    accum_t sum = 0;
#pragma unroll
    for (int n = 0; n < kNumWarps; ++n) sum += columns[n][column];
    out_row[column * params.out.col] = to<elem_t>(l == 0 ? accum_t(0) : sum * inverse);
  }
}

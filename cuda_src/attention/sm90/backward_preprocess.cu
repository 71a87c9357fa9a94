// SPDX-License-Identifier: MIT
// attention_vjp_hopper_rows: statistics of each query for attention_vjp_hopper, and
// zeros for its sums.
//
// Algorithm  delta_i = sum(dO_i * out_i) - dlse_i; for float16 also the largest |dO|
// Grid       1-D; kHeadDim / 8 threads per query
// Memory     global: dO and out once, sums written once; a few numbers per query
// Numbers    float. Where out is 0 the product is 0, as in
//            attention/simt/backward_preprocess.cu
// Limits     head_dim_v up to kHeadDim
#include "copy/unaligned_load.cuh"
#include "attention/sm90/backward.cuh"

constexpr int kRowThreads = kHeadDim / 8, kRows = kNumThreads / kRowThreads;

struct alignas(16) eight_t {
  elem_t x[8];
};

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_vjp_hopper_rows(
    const elem_t* __restrict__ out,   // (batch, heads, queries, head_dim_v)
    const elem_t* __restrict__ dout,  // as out
    const float* __restrict__ lse,    // (batch, heads, queries)
    const float* __restrict__ dlse,   // as lse, or null
    float* __restrict__ stats,        // backward.cuh
    float* __restrict__ delta,        // as lse, contiguous
    float4* __restrict__ sums,        // to be set to 0; or dq
    const index_t num_vectors,        // of these
    found_t* __restrict__ found, const __grid_constant__ params_t params,
    const __grid_constant__ grads_t grads) {
  ptx::griddepcontrol_launch_dependents();
  const index_t num_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const tile_coord_t at(params, block_index(), num_blocks * (kBlockM / kRows));
  const int i = static_cast<int>(at.tile) * kRows + threadIdx.x / kRowThreads;
  const int column = threadIdx.x % kRowThreads * 8;
  const bool is_query = at.exists && i < params.seqlen_q;

  float log_sum = infinity<float>(), sum = 0, largest = 0;
  if (is_query) {
    log_sum = at.at(lse, grads.lse)[i * grads.lse.row];
#ifdef ENDS_INSIDE  // rows end inside a vector: head_dim_v is no multiple of 8
    const int dim = static_cast<int>(params.head_dim_v);
#else
    const index_t dim = params.head_dim_v;
#endif
    if (column < dim) {
#ifdef ENDS_INSIDE
      const auto o8 =
          load_vector(at.at(out, params.out) + i * params.out.row, column, dim);
      const auto d8 =
          load_vector(at.at(dout, grads.dout) + i * grads.dout.row, column, dim);
#else
      const elem_t* const o = at.at(out, params.out) + i * params.out.row + column;
      const elem_t* const d = at.at(dout, grads.dout) + i * grads.dout.row + column;
      eight_t o8;
      const eight_t d8 = *reinterpret_cast<const eight_t*>(d);
      if (reinterpret_cast<unsigned long long>(o) % 16 == 0) {
        o8 = *reinterpret_cast<const eight_t*>(o);
      } else {
#pragma unroll
        for (int n = 0; n < 8; ++n) o8.x[n] = o[n];
      }
#endif
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float x = to<float>(o8.x[n]), y = to<float>(d8.x[n]);
        if (x != 0) sum = fmaf(x, y, sum);
        largest = max_nan(largest, fabsf(y));
      }
    }
  }
  const index_t first = block_index() * kNumThreads + threadIdx.x;
  if (first == 0) found->nonfinite = 0;
  const index_t step = index_t(gridDim.x) * gridDim.y * kNumThreads;
  for (index_t n = first; n < num_vectors; n += step) sums[n] = make_float4(0, 0, 0, 0);

  sum = warp_reduce<kRowThreads>(sum, [](float a, float b) { return a + b; });
  if (at.exists && column == 0) {
    if (is_query) {
      if (dlse != nullptr) sum -= at.at(dlse, grads.dlse)[i * grads.dlse.row];
      delta[at.row_of_heads * params.seqlen_q + i] = sum;
    }
    // If a query sees no key, all its scores are hidden and any finite lse will do.
    // Queries that do not exist get P = 0.
    const bool blind = log_sum == -infinity<float>();
    float* const row = stats +
                       (at.row_of_heads * num_blocks + i / kBlockM) * (2 * kBlockM) +
                       place_in_stats(i % kBlockM);
    row[0] = blind ? 0.f : log_sum * static_cast<float>(kLog2e) - kLog2FactorP;
    row[kBlockM] = sum;
  }
  if constexpr (kNarrow<elem_t>) {
    if (log_sum == -infinity<float>()) largest = 0;  // its gradient does not count
    const unsigned bits =
        warp_reduce(static_cast<unsigned>(__float_as_int(largest)) & 0x7fffffffu,
                    [](unsigned a, unsigned b) { return a > b ? a : b; });
    // All warps share one address, where atomics take turns; few of them raise the
    // maximum. A stale value costs an atomic, no more.
    if (threadIdx.x % kWarpSize == 0 && bits > found->largest) {
      atomicMax(&found->largest, bits);
    }
  }
}

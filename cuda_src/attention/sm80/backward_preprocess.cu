// SPDX-License-Identifier: MIT
// attention_vjp_mma_rows: statistics of each query for the gradient kernels by
// mma.sync, and zeros for their sums.
//
// Algorithm  delta_i = sum(dO_i * out_i) - dlse_i; for float16 also the largest |dO|;
//            with sinks the row's part of their gradient (simt/sink_terms.cuh)
// Grid       1-D; kHeadDim / 8 threads per query
// Memory     global: dO and out once, sums written once; a few numbers per query
// Numbers    float. Where out is 0 the product is 0, as in
//            attention/simt/backward_preprocess.cu
// Limits     head_dim_v up to kHeadDim
#include "attention/simt/sink_terms.cuh"
#include "attention/sm80/backward.cuh"

constexpr int kRowThreads = kHeadDim / 8, kRows = kNumThreads / kRowThreads;
static_assert(kBlockM % kRows == 0 && kRowThreads <= kWarpSize);

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_vjp_mma_rows(
    const elem_t* __restrict__ out,   // (batch, heads, queries, head_dim_v)
    const elem_t* __restrict__ dout,  // as out
    const float* __restrict__ lse,    // (batch, heads, queries)
    const float* __restrict__ dlse,   // as lse, or null
    float* __restrict__ stats,        // backward.cuh
    float* __restrict__ delta,        // as lse, contiguous
    float* __restrict__ sink_terms,   // as delta, or null
    float4* __restrict__ sums,        // to be set to 0
    const index_t num_vectors,        // of sums
    found_t* __restrict__ found, SCORE_PARAMETERS,
    const __grid_constant__ grads_t grads) {
  const index_t num_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const tile_coord_t at(params, block_index(), num_blocks * (kBlockM / kRows));
  const int i = static_cast<int>(at.tile) * kRows + threadIdx.x / kRowThreads;
  const int column = threadIdx.x % kRowThreads * 8;
  const int dim = static_cast<int>(params.head_dim_v);
  const bool exists = at.exists && i < params.seqlen_q;

  float log_sum = infinity<float>(), sum = 0, largest = 0;
  bool has_out = false;
  out_rounding_t rounding;
  if (exists) {
    log_sum = at.at(lse, grads.lse)[i * grads.lse.row];
    if (column < dim) {
      const auto o =
          load_vector(at.at(out, params.out) + i * params.out.row, column, dim);
      const auto d =
          load_vector(at.at(dout, grads.dout) + i * grads.dout.row, column, dim);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float x = to<float>(o.x[n]), y = to<float>(d.x[n]);
        if (x != 0) sum = fmaf(x, y, sum);
        has_out |= x != 0;
        largest = max_nan(largest, fabsf(y));
        rounding.add(x, y);
      }
    }
  }
  const index_t first = block_index() * kNumThreads + threadIdx.x;
  const index_t step = index_t(gridDim.x) * gridDim.y * kNumThreads;
  for (index_t n = first; n < num_vectors; n += step) sums[n] = make_float4(0, 0, 0, 0);

  sum = warp_reduce<kRowThreads>(sum, [](float a, float b) { return a + b; });
  // Gradients of a row that sees no key, or does not exist, do not count: its out is 0.
  const bool counts = warp_reduce<kRowThreads>(static_cast<int>(has_out),
                                               [](int a, int b) { return a | b; }) != 0;
  rounding.reduce<kRowThreads>();
  if (exists) {
    const scores_t scores(at, SCORE_ARGUMENTS);
    if (column == 0) {
      if (dlse != nullptr) {
        const float down = at.at(dlse, grads.dlse)[i * grads.dlse.row];
        // The lse of a row that sees no key is the sink, which then receives its
        // gradient unless that is not finite.
        const bool is_sink = kHasSinks && !counts && log_sum == scores.sink();
        if (!is_sink || is_finite(down)) sum -= down;
      }
      if (!scores.is_query(i)) sum = 0;
      const index_t row = at.row_of_heads * params.seqlen_q + i;
      delta[row] = sum;
      if (kHasSinks && sink_terms != nullptr) {
        sink_terms[row] = sink_term(scores, i, log_sum, sum, rounding);
      }
    }
  }
  if (at.exists && column == 0) {
    // If a query sees no key, all its scores are hidden and any finite lse will do.
    // Queries that do not exist get P = 0.
    const bool blind = log_sum == -infinity<float>();
    float* const row = stats +
                       (at.row_of_heads * num_blocks + i / kBlockM) * (2 * kBlockM) +
                       i % kBlockM;
    row[0] = blind ? 0.f : log_sum * static_cast<float>(kLog2e) - kLog2FactorP;
    row[kBlockM] = sum;
  }
  if constexpr (kNarrow<elem_t>) {
    if (!counts) largest = 0;
    const unsigned bits =
        warp_reduce(static_cast<unsigned>(__float_as_int(largest)) & 0x7fffffffu,
                    [](unsigned a, unsigned b) { return a > b ? a : b; });
    // Atomics on one address take turns; few warps raise the maximum. A stale value
    // costs an atomic, no more.
    if (threadIdx.x % kWarpSize == 0 && bits > found->largest) {
      atomicMax(&found->largest, bits);
    }
  }
}

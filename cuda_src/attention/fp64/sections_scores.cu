// SPDX-License-Identifier: MIT
// attention_vjp_sections_f64_scores: P and dS of a section in float64.
//
// Algorithm  For each tile of queries and keys
//                S = score(q k^T),  P = exp(S - lse),  dP = dO v^T
//                dS = P (dP - delta) score'(q k^T),  total = rowsum P
//            A thread reads its own P again: there are registers for one product
// Grid       1-D, one block per entry of the section and tile; tiles of keys fastest
// Tiles      products.cuh
// Memory     global: q, k, v and dO once per tile, mostly from L2; P and dS once
// Numbers    all in float64, in a fixed order: the same bits in every run. P is without
//            the factor of its row (backward_row.cuh)
// Limits     none
#include "attention/fp64/products.cuh"
#include "attention/fp64/sections.cuh"
#include "attention/fp64/weights.cuh"

struct block_t {
  exp2_table_t exp2;
  double lse[kBlockM], delta[kBlockM];
  // The rows of the tile; in shared memory, since registers are scarce.
  const double *q, *k, *v, *dout;
  double *weights, *score_grads;  // P and dS from its corner on
  int num_rows, num_keys;
  mask_bounds_t bounds;
  alignas(16) unsigned char scores_bytes[sizeof(scores_t)];

  __device__ const scores_t& scores() const {
    return *reinterpret_cast<const scores_t*>(scores_bytes);
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_sections_f64_scores(BACKWARD_PARAMETERS, ROW_PARAMETERS,
                                      double* __restrict__ weights,
                                      double* __restrict__ score_grads,
                                      double* __restrict__ totals, SCORE_PARAMETERS,
                                      const __grid_constant__ grads_t grads,
                                      const __grid_constant__ section_t section) {
  __shared__ block_t block;
  const index_t tiles_k = (params.seqlen_k + kBlockN - 1) / kBlockN;
  const index_t tiles_q = (section.num_rows + kBlockM - 1) / kBlockM;
  const index_t row_tile = divide(block_index(), tiles_k);
  const index_t entry = divide(row_tile, tiles_q);
  if (entry >= section.num_entries()) return;
  const index_t i_own = (row_tile - entry * tiles_q) * kBlockM;
  const index_t i0 = section.first_row + i_own;
  const index_t j0 = (block_index() - row_tile * tiles_k) * kBlockN;
  const tile_coord_t at = entry_of(params, grads, section, entry);
  {
    const scores_t scores(at, SCORE_ARGUMENTS);
    if (!is_written(scores, params, square_of(i0), square_of(j0))) return;
    if (threadIdx.x == 0) {
      block.bounds = scores.mask_bounds(i0, j0);
      if (kTerms) new (block.scores_bytes) scores_t(scores);
      block.q = at.at(q, params.q) + i0 * params.q.row;
      block.k = at.at_kv(k, params.k) + j0 * params.k.row;
      block.v = at.at_kv(v, params.v) + j0 * params.v.row;
      block.dout = at.at(dout, grads.dout) + i0 * grads.dout.row;
      const index_t corner = section.matrix(entry) + i_own * section.cols + j0;
      block.weights = weights + corner;
      block.score_grads = score_grads + corner;
      block.num_rows = static_cast<int>(params.seqlen_q - i0);
      block.num_keys = static_cast<int>(params.seqlen_k - j0);
    }
  }
  if (threadIdx.x < kWarpSize) block.exp2.fill(kLog2e);
  for (int n = threadIdx.x; n < kBlockM; n += kNumThreads) {
    const index_t i = smaller(i0 + n, params.seqlen_q - 1);
    block.lse[n] = at.at(lse, grads.lse)[i * grads.lse.row];
    block.delta[n] = delta[at.row_of_heads * params.seqlen_q + i];
  }

  __syncthreads();  // `block` is complete

  const bool seen = sees_any(block.bounds, kBlockM, kBlockN);
  const int steps = seen ? static_cast<int>(params.head_dim + kStep - 1) / kStep : 0;
  const int steps_v =
      seen ? static_cast<int>(params.head_dim_v + kStep - 1) / kStep : 0;
  copies_t<kBlockM, kStep> first;
  copies_t<kBlockN, kStep> second;
  const auto fetch = [&](double* stage, int step) {
    const bool is_first = step < steps;
    const index_t row = is_first ? params.q.row : grads.dout.row;
    const index_t row_of_second = is_first ? params.k.row : params.v.row;
    if (step == 0 || step == steps) {
      first.begin(is_first ? block.q : block.dout, row);
      second.begin(is_first ? block.k : block.v, row_of_second);
    }
    const int left = static_cast<int>(is_first ? params.head_dim : params.head_dim_v) -
                     kStep * (is_first ? step : step - steps);
    first.copy(stage, row, kStep, block.num_rows, left);
    second.copy(stage + kSecondAt, row_of_second, kStep, block.num_keys, left);
  };
  ring_t ring;
  ring.begin(steps + steps_v, fetch);
  sums_t c;
  clear(c);
  constexpr int kHolds = kTilesM * kTilesN + 1;
  multiply<kByRows, kByRows, false, 0>(c, ring, 0, steps, fetch);

  // Where a thread has row h of tile m in a matrix.
  const auto row_at = [&](double* matrix, int m, int h) {
    const thread_t me;
    return matrix + row_of(me, m, h) * section.cols + me.col + 2 * me.t;
  };
  // P times the derivative of the score.
  double* const product_of = kHasDerivative ? block.score_grads : block.weights;
  {
    const thread_t me;
    const exp2_t exp2(block.exp2);
    const index_t part = (j0 + me.col) / kWarpN;
    double* const own =
        totals + (entry * section.num_parts + part) * section.rows + i_own;
    const mask_bounds_t bounds = block.bounds;
    const auto make = [&](auto check) {
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int query = row_of(me, m, h);
          const double lse_of = block.lse[query];
          double* const to = row_at(block.weights, m, h);
          double total = 0;
#pragma unroll
          for (int n = 0; n < kTilesN; ++n) {
            double p[2], product[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int key = me.col + 8 * n + 2 * me.t + e;
              // The compiler would start the next before the end of this one, and run
              // out of registers.
              if (kHasSoftcap) {
                ptx::hold(steps, 1000 + ((m * kTilesN + n) * 2 + h) * 2 + e);
              }
              double derivative;
              p[e] = weight_of<check.value>(c[m][n][2 * h + e], bounds.sees(query, key),
                                            exp2, block.scores(), params.scale,
                                            i0 + query, j0 + key, lse_of, derivative);
              total += p[e];
              product[e] = kHasDerivative ? p[e] * derivative : p[e];
            }
            *reinterpret_cast<double2*>(to + 8 * n) = {p[0], p[1]};
            if (kHasDerivative) {
              *reinterpret_cast<double2*>(row_at(product_of, m, h) + 8 * n) = {
                  product[0], product[1]};
            }
          }
          total = warp_reduce<4>(total, [](double a, double b) { return a + b; });
          if (me.t == 0) own[query] = total;
        }
      }
    };
    if (!kTerms && bounds.sees_all(kBlockM, kBlockN)) {
      make(flag_t<false>{});
    } else {
      make(flag_t<true>{});
    }
  }

  clear(c);
  multiply<kByRows, kByRows, false, kHolds>(c, ring, steps, steps + steps_v, fetch);
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
    // Read before the first is written: the compiler would wait for each of them.
    double2 p[2][kTilesN];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const double* const from = row_at(product_of, m, h);
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) p[h][n] = load2(from + 8 * n);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const double delta_of = block.delta[row_of(thread_t(), m, h)];
      double* const to = row_at(block.score_grads, m, h);
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        const auto [x, y] = p[h][n];
        const double of_x = x * (c[m][n][2 * h] - delta_of);
        const double of_y = y * (c[m][n][2 * h + 1] - delta_of);
        *reinterpret_cast<double2*>(to + 8 * n) = {is_unseen(x) ? -0.0 : of_x,
                                                   is_unseen(y) ? -0.0 : of_y};
      }
    }
  }
}

// SPDX-License-Identifier: MIT
// attention_vjp_tiled_f64_keys: dk and dv of float64 on tensor cores. A block keeps one
// tile of keys and loops over the queries of all heads and batch entries that use them.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2). For each tile of
//            queries, with transposed scores:
//                S = score(k q^T),  P = exp(S - lse) factor,  dP = v dO^T
//                dS = P (dP - delta) score'(k q^T),  dv += P dO,  dk += scale dS q
//            The first warp of a pair computes S, P and dv, the second dP, dS and dk
// Grid       1-D, one block per entry of k and v and tile of keys; first tiles of all
//            entries first, since causal ones are longest
// Tiles      backward.cuh; k and v are owned, q and dO are looped over
// Memory     global: k, v, dk and dv once per entry that shares k and v; q and dO once
//            per block, mostly from L2
// Numbers    all in float64; the products of a tile are summed on their own before they
//            are added to dk and dv. A fixed order of sums: the same bits in every run.
//            Hidden keys weigh 0: if a gradient shows 0 * NaN, `found` asks for the
//            fallback
// Limits     head dimensions up to kDim
#include "attention/fp64/backward.cuh"

struct block_t : walk_t {
  // Of the first query looped over; lse may have strides of its own.
  const double *lse_rows, *factor_rows, *delta_rows;
  // Of a tile.
  alignas(16) double lse[kBlockN], factor[kBlockN], delta[kBlockN];
};

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_tiled_f64_keys(
        BACKWARD_PARAMETERS, ROW_PARAMETERS,
        const accum_t* __restrict__ factor,  // as delta
        LOOP_PARAMETERS grad_t* dk,          // as k, summed over entries
        grad_t* dv,                          // as v, summed over entries
        int* __restrict__ found,             // 1: something is not finite
        MASK_BITS_PARAMETER SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  __shared__ block_t block;
  [[maybe_unused]] __shared__ index_t split;  // of the loop
  [[maybe_unused]] __shared__ mask_tile_t<kBlockN> mask_tile;

  const index_t num_tiles = (params.seqlen_k + kBlockM - 1) / kBlockM;
  const index_t work = work_index(num_splits);
  const index_t tile = divide(work, grads.num_kept);
  if (tile >= num_tiles) return;
  if (threadIdx.x == 0) {
    block.kept = locate(grads.kept, work - tile * grads.num_kept);
    block.own_first = tile * kBlockM;
    if constexpr (kSplitsLoop) split = split_index(num_splits);
  }
  if (threadIdx.x < kWarpSize) block.exp2.fill(kLog2e);
  const auto num_own = [&] {
    const index_t num = params.seqlen_k - block.own_first - thread_t().first_row();
    return static_cast<int>(clamp(num, 0, kWarpRows));
  };

#pragma unroll 1
  for (index_t summed = 0; summed < grads.num_summed; summed = block.summed + 1) {
    __syncthreads();  // all warps have read what belongs to the previous entry
    begin_walks(block, summed);
    const tile_coord_t at = grads.entry(params, block.kept.of[0], summed);
    const scores_t scores(at, SCORE_ARGUMENTS);
    const index_t j0 = block.own_first;
    const range_t queries =
        scores.queries_of(j0, smaller(j0 + kBlockM, params.seqlen_k));
    // Tiles start at multiples of kBlockN, so that the order of the sums of a key does
    // not depend on its tile of keys.
    index_t first = queries.first / kBlockN * kBlockN, last = queries.last;
    if constexpr (kSplitsLoop) take_split(first, last, split, num_splits);
    if (threadIdx.x == 0) {
      block.rows[0] = {at.at(q, params.q) + first * params.q.row, params.q.row,
                       static_cast<int>(params.head_dim)};
      block.rows[1] = {at.at(dout, grads.dout) + first * grads.dout.row, grads.dout.row,
                       static_cast<int>(params.head_dim_v)};
      block.num_rows = last > first ? static_cast<int>(last - first) : 0;
      block.bounds = scores.mask_bounds(first, j0);
      const index_t row = at.row_of_heads * params.seqlen_q + first;
      block.lse_rows = at.at(lse, grads.lse) + first * grads.lse.row;
      block.factor_rows = factor + row;
      block.delta_rows = delta + row;
      block.first = first;
      if constexpr (kMaskBits) mask_tile.begin(MASK_BITS_ARGUMENT, at, first, j0);
      if (kTerms) block.keep(scores);
    }
    {
      const thread_t me;
      const bool is_k = me.role() == 0;
      const operand_t& operand = is_k ? params.k : params.v;
      copy_own<kDim>(
          own_of(me),
          at.at_kv(is_k ? k : v, operand) + (j0 + me.first_row()) * operand.row,
          operand.row, num_own(),
          static_cast<int>(is_k ? params.head_dim : params.head_dim_v));
    }
    ptx::commit_copy_group();
    __syncthreads();  // `block` is complete

    sums_t sums;
    const auto fetch_row = [&](int tile) {
      if constexpr (kMaskBits) mask_tile.fetch(tile * kBlockN, block.num_rows, 0);
      const int n = threadIdx.x, i = tile * kBlockN + n;
      if (n >= kBlockN) return;
      const int bytes = i < block.num_rows ? 8 : 0;
      const auto copy = [&](double* smem, const double* x) {
        ptx::copy_or_fill<8>(static_cast<unsigned>(__cvta_generic_to_shared(smem + n)),
                             x, bytes);
      };
      copy(block.lse, block.lse_rows + i * grads.lse.row);
      copy(block.factor, block.factor_rows + i);
      copy(block.delta, block.delta_rows + i);
    };
    const auto bounds_of = [&](int tile) {
      return moved(block.bounds, tile * kBlockN, thread_t().first_row());
    };
    const auto exchange = [&](int tile, product_t& c, weights_t<kStepsN>& w) {
      const thread_t me;
      double* const exchange_lane = exchange_of(me);
      if (me.role() == 0) {
        const exp2_t exp2(block.exp2);
        const mask_bounds_t bounds = bounds_of(tile);
        const index_t i0 = block.first + tile * kBlockN,
                      j = block.own_first + me.first_row();
        unsigned shown = 0;  // by the mask; a bit for each number of c
        if constexpr (kMaskBits) {
          const int key = static_cast<int>(j) % kKeysOfBits + me.g();
#pragma unroll
          for (int n = 0; n < 2 * kTiles; ++n) {
            const int query = n / 2 * 8 + 2 * me.t() + n % 2;
            // Keys g and g + 8.
            const unsigned of_two = mask_tile.from(query, key) >> key % 2 & 5;
            shown |= of_two << (n / 2 * 4 + n % 2);
          }
        }
        const auto make = [&](auto check) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const int col = 8 * n + 2 * me.t();
            const double2 lse_of = load2(block.lse + col);
            const double2 factor_of = load2(block.factor + col);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              double product[2];
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const int key = me.g() + 8 * h, query = col + e;
                // A softcap is long: the compiler would start the next before the end
                // of this one, and run out of registers.
                if (kHasSoftcap) ptx::hold(block.num_rows, 1000 + 4 * n + 2 * h + e);
                double derivative;
                const bool sees = bounds.sees(query, key) &&
                                  (!kMaskBits || shown >> (4 * n + 2 * h + e) & 1);
                double p = weight_of<check.value>(
                    c[n][2 * h + e], sees, exp2, block.scores(), params.scale,
                    i0 + query, j + key, e == 0 ? lse_of.x : lse_of.y, derivative);
                p *= e == 0 ? factor_of.x : factor_of.y;
                if (check.value && block.is_exact && !is_unseen(p) &&
                    (block.odd_own[me.first_row() + key] ||
                     block.odd_other[query] == tile)) {
                  *found = 1;
                }
                weight_at<kStepsN>(w, n, 2 * h + e) = p;
                product[e] = kHasDerivative ? p * derivative : p;
              }
              *reinterpret_cast<double2*>(exchange_lane +
                                          (2 * n + h) * 2 * kWarpSize) = {product[0],
                                                                          product[1]};
            }
          }
        };
        if (!kTerms && !kMaskBits && !block.is_exact &&
            bounds.sees_all(kBlockN, kWarpRows)) {
          make(flag_t<false>{});
        } else {
          make(flag_t<true>{});
        }
      }
      sync_pair();  // P is complete
      if (me.role() == 1) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const double2 delta_of = load2(block.delta + 8 * n + 2 * me.t());
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const double2 p = load2(exchange_lane + (2 * n + h) * 2 * kWarpSize);
            const double x = p.x * (c[n][2 * h] - delta_of.x);
            const double y = p.y * (c[n][2 * h + 1] - delta_of.y);
            weight_at<kStepsN>(w, n, 2 * h) = is_unseen(p.x) ? -0.0 : x;
            weight_at<kStepsN>(w, n, 2 * h + 1) = is_unseen(p.y) ? -0.0 : y;
          }
        }
      }
    };
    do {
      clear(sums);
      walk<kStepsN>(
          sums, block, fetch_row,
          [&](int tile) { return sees_any(bounds_of(tile), kBlockN, kWarpRows); },
          exchange);
    } while (walks_again(block, sums, found));

    const bool is_dv = thread_t().role() == 0;
    const index_t row_stride = is_dv ? grads.row[1] : grads.row[0];
    const index_t col_stride = is_dv ? grads.col[1] : grads.col[0];
    grad_t* out = (is_dv ? dv + block.kept.of[2] : dk + block.kept.of[1]) +
                  (block.own_first + thread_t().first_row()) * row_stride;
    const int num_rows = num_own();
    const int dim = static_cast<int>(is_dv ? params.head_dim_v : params.head_dim);
    if constexpr (kSplitsLoop) out += split * grads.num_kept * params.seqlen_k * dim;
    const double scale = is_dv ? 1 : params.scale;
    for_each_sum(sums, [&](int row, int col, double sum, int) {
      if (row >= num_rows || col >= dim) return;
      grad_t& x = out[row * row_stride + col * col_stride];
      // Entries that share k and v are added in order.
      x = block.summed > 0 ? x + sum * scale : sum * scale;
    });
  }
}

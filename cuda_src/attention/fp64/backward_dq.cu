// SPDX-License-Identifier: MIT
// attention_vjp_tiled_f64_queries: dq of float64 on tensor cores, and statistics of
// each query. A block keeps one tile of queries and loops over the keys.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2). For each tile of keys
//                S = score(q k^T),  P = exp(S - lse),  dP = dO v^T
//                dS = P (dP - delta) score'(q k^T),  dq += scale dS k,  l += rowsum P
//            The first warp of a pair computes S, the second dP; each then takes half
//            of the keys. If l is 1 up to the rounding of lse and S, `factor` is 1 / l,
//            so that P times it sums to 1; if not, lse covers keys of other calls, and
//            `factor` is 1. With LOOP_SPLITS backward_dq_finish.cu does that
// Grid       1-D, one block per entry of q and tile of queries; last tiles of all
//            entries first, since causal ones are longest
// Tiles      backward.cuh; q and dO are owned, k and v are looped over
// Memory     global: q and dO once; dq once per entry that shares q; k and v once per
//            block, mostly from L2
// Numbers    all in float64; the products of a tile are summed on their own before they
//            are added to dq. A fixed order of sums: the same bits in every run. Hidden
//            keys weigh 0: if a gradient shows 0 * NaN, `found` asks for the fallback
// Limits     head dimensions up to kDim
#include "attention/fp64/backward.cuh"

struct block_t : walk_t {
  double lse[kBlockM], delta[kBlockM];
};

constexpr int kTilesEach = kTiles / 2, kStepsEach = kStepsN / 2;
static_assert(kBlockN % 32 == 0);

// The bounds on the keys of a tile for the rows of this warp.
__device__ __forceinline__ mask_bounds_t bounds_of(const block_t& block, int tile) {
  return moved(block.bounds, thread_t().first_row(), tile * kBlockN);
}

// Turns the products of a tile into dS of half of its keys; adds the sums of P to l.
__device__ __forceinline__ void weigh(block_t& block,
                                      const mask_tile_t<kBlockM>& mask_tile,
                                      const params_t& params, int* found, int tile,
                                      product_t& c, weights_t<kStepsEach>& w,
                                      pair_t<double> (&l)[2]) {
  const thread_t me;
  double* const exchange_lane = exchange_of(me);
  // A warp keeps its half of the keys and hands over the other.
  double mine[kTilesEach][4], theirs[kTilesEach][4];
#pragma unroll
  for (int n = 0; n < kTilesEach; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      mine[n][e] = me.role() == 0 ? c[n][e] : c[n + kTilesEach][e];
      theirs[n][e] = me.role() == 0 ? c[n + kTilesEach][e] : c[n][e];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = 2 * (me.role() * kTilesEach + n) + h;
      *reinterpret_cast<double2*>(exchange_lane + at * 2 * kWarpSize) = {
          theirs[n][2 * h], theirs[n][2 * h + 1]};
    }
  }
  sync_pair();  // S and dP are complete
#pragma unroll
  for (int n = 0; n < kTilesEach; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = 2 * ((1 - me.role()) * kTilesEach + n) + h;
      const double2 x = load2(exchange_lane + at * 2 * kWarpSize);
      theirs[n][2 * h] = x.x;
      theirs[n][2 * h + 1] = x.y;
    }
  }
  const exp2_t exp2(block.exp2);
  const int start = me.role() * kBlockN / 2;
  const mask_bounds_t bounds = moved(bounds_of(block, tile), 0, start);
  const index_t i = block.own_first + me.first_row(),
                j = block.first + tile * kBlockN + start;
  unsigned shown[2] = {};  // by rows g and g + 8, of keys 8 n + 2 t + e in bit 2 n + e
  if constexpr (kMaskBits) {
    const int key = static_cast<int>(j % kKeysOfBits) + 2 * me.t();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shown[r] = mask_tile.from(me.first_row() + me.g() + 8 * r, key);
    }
  }
  double tile_l[2] = {};
  const auto make = [&](auto check) {
#pragma unroll
    for (int n = 0; n < kTilesEach; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = me.g() + 8 * (e / 2), key = 8 * n + 2 * me.t() + e % 2;
        const double s = me.role() == 0 ? mine[n][e] : theirs[n][e];
        const double dp = me.role() == 0 ? theirs[n][e] : mine[n][e];
        double derivative;
        const bool sees = bounds.sees(query, key) &&
                          (!kMaskBits || shown[e / 2] >> (2 * n + e % 2) & 1);
        const double p = weight_of<check.value>(
            s, sees, exp2, block.scores(), params.scale, i + query, j + key,
            block.lse[me.first_row() + query], derivative);
        tile_l[e / 2] += p;
        double ds = p * (dp - block.delta[me.first_row() + query]);
        if (kHasDerivative) ds *= derivative;
        if (check.value && block.is_exact && !is_unseen(p) &&
            (block.odd_own[me.first_row() + query] ||
             block.odd_other[start + key] == tile)) {
          *found = 1;
        }
        // Avoids 0 * NaN.
        if ((kTerms || check.value) && is_unseen(p)) ds = -0.0;
        weight_at<kStepsEach>(w, n, e) = ds;
      }
    }
  };
  if (!kTerms && !kMaskBits && !block.is_exact &&
      bounds.sees_all(kWarpRows, kBlockN / 2)) {
    make(flag_t<false>{});
  } else {
    make(flag_t<true>{});
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const pair_t<double> sum = exact_sum(l[r].high, tile_l[r]);
    l[r] = {sum.high, l[r].low + sum.low};
  }
}

// The second warp of a pair hands over its sums in the buffer of its dO.
__device__ __forceinline__ void add_second(const thread_t& me, sums_t& sums,
                                           const pair_t<double> (&l)[2],
                                           double (&l_of)[2]) {
  double* const exchange_lane = exchange_of(me);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    l_of[r] =
        warp_reduce<4>(l[r].high + l[r].low, [](double a, double b) { return a + b; });
  }
  sync_pair();  // the first warp has read the previous exchange
  double* const handed =
      shared_tiles() + kOwnSize + me.pair() * kWarpOwnSize + me.lane() * kVec;
  if (me.role() == 1) {
#pragma unroll
    for (int n = 0; n < 4 * kChunks; ++n) {
      const double (&sum)[4] = sums[n / 4][n % 4 / 2];
      *reinterpret_cast<double2*>(handed + n * 2 * kWarpSize) = {sum[n % 2 * 2],
                                                                 sum[n % 2 * 2 + 1]};
    }
    *reinterpret_cast<double2*>(exchange_lane) = {l_of[0], l_of[1]};
  }
  sync_pair();  // the sums are complete
  if (me.role() == 1) return;
#pragma unroll
  for (int n = 0; n < 4 * kChunks; ++n) {
    const double2 x = load2(handed + n * 2 * kWarpSize);
    double (&sum)[4] = sums[n / 4][n % 4 / 2];
    sum[n % 2 * 2] += x.x;
    sum[n % 2 * 2 + 1] += x.y;
  }
  const double2 theirs = load2(exchange_lane);
  l_of[0] += theirs.x;
  l_of[1] += theirs.y;
}

// Computes the factors with which P of a row sums to 1, and terms of dsinks.
__device__ __forceinline__ void close_rows(const thread_t& me, const block_t& block,
                                           const scores_t& scores,
                                           const params_t& params, index_t row,
                                           index_t entry, const double (&l_of)[2],
                                           double (&own_factor)[2], accum_t* factor,
                                           accum_t* sink_terms) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int n = me.g() + 8 * r;
    const double lse_i = block.lse[me.first_row() + n];
    const bool counts =
        scores.is_query(row + n) && scores.sink() != -infinity<double>();
    const double sink = counts ? exp_diff_exact(scores.sink(), lse_i) : 0;
    own_factor[r] = factor_of(l_of[r] + sink, lse_i);
    if (me.t() == 0 && row + n < params.seqlen_q) {
      factor[entry + n] = own_factor[r];
      if (kHasSinks && sink_terms != nullptr) {
        const double delta_i = block.delta[me.first_row() + n];
        sink_terms[entry + n] = counts ? -sink * own_factor[r] * delta_i : 0;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_tiled_f64_queries(
        BACKWARD_PARAMETERS, ROW_PARAMETERS,
        accum_t* __restrict__ factor,      // as delta; or totals of each split
        accum_t* __restrict__ sink_terms,  // as delta, or null
        LOOP_PARAMETERS grad_t* dq,        // as q, summed over entries
        int* __restrict__ found,           // 1: something is not finite
        MASK_BITS_PARAMETER SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  __shared__ block_t block;
  [[maybe_unused]] __shared__ index_t split;  // of the loop
  [[maybe_unused]] __shared__ mask_tile_t<kBlockM> mask_tile;

  const index_t num_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const index_t work = work_index(num_splits);
  const index_t from_last = divide(work, grads.num_kept);
  if (from_last >= num_tiles) return;
  if (threadIdx.x == 0) {
    block.kept = locate(grads.kept, work - from_last * grads.num_kept);
    block.own_first = (num_tiles - 1 - from_last) * kBlockM;
    if constexpr (kSplitsLoop) split = split_index(num_splits);
  }
  if (threadIdx.x < kWarpSize) block.exp2.fill(kLog2e);
  const auto num_own = [&] {
    const index_t num = params.seqlen_q - block.own_first - thread_t().first_row();
    return static_cast<int>(clamp(num, 0, kWarpRows));
  };

#pragma unroll 1
  for (index_t summed = 0; summed < grads.num_summed; summed = block.summed + 1) {
    __syncthreads();  // all warps have read what belongs to the previous entry
    begin_walks(block, summed);
    const tile_coord_t at = grads.entry(params, block.kept.of[0], summed);
    const scores_t scores(at, SCORE_ARGUMENTS);
    const index_t i0 = block.own_first;
    const range_t keys = scores.keys_of(i0, smaller(i0 + kBlockM, params.seqlen_q));
    index_t first = keys.first / kBlockN * kBlockN, last = keys.last;
    if constexpr (kSplitsLoop) take_split(first, last, split, num_splits);
    if (threadIdx.x == 0) {
      block.rows[0] = {at.at_kv(k, params.k) + first * params.k.row, params.k.row,
                       static_cast<int>(params.head_dim)};
      block.rows[1] = {at.at_kv(v, params.v) + first * params.v.row, params.v.row,
                       static_cast<int>(params.head_dim_v)};
      block.num_rows = last > first ? static_cast<int>(last - first) : 0;
      block.bounds = scores.mask_bounds(i0, first);
      block.first = first;
      if constexpr (kMaskBits) mask_tile.begin(MASK_BITS_ARGUMENT, at, i0, 0);
      if (kTerms) block.keep(scores);
    }
    if (threadIdx.x < kBlockM) {
      const index_t i = smaller(i0 + threadIdx.x, params.seqlen_q - 1);
      block.lse[threadIdx.x] = at.at(lse, grads.lse)[i * grads.lse.row];
      block.delta[threadIdx.x] = delta[at.row_of_heads * params.seqlen_q + i];
    }
    {
      const thread_t me;
      const bool is_q = me.role() == 0;
      const operand_t& operand = is_q ? params.q : grads.dout;
      copy_own<kDim>(
          own_of(me),
          at.at(is_q ? q : dout, operand) + (i0 + me.first_row()) * operand.row,
          operand.row, num_own(),
          static_cast<int>(is_q ? params.head_dim : params.head_dim_v));
    }
    ptx::commit_copy_group();
    __syncthreads();  // `block` is complete

    sums_t sums;
    pair_t<double> l[2];  // over the lane's own columns
    do {
      clear(sums);
      l[0] = l[1] = {0, 0};
      walk<kStepsEach>(
          sums, block,
          [&](int tile) {
            if constexpr (kMaskBits) {
              const index_t num = params.seqlen_q - block.own_first;
              mask_tile.fetch(0, static_cast<int>(smaller(num, kBlockM)),
                              (block.first + tile * kBlockN) / kKeysOfBits);
            }
          },
          [&](int tile) {
            return sees_any(bounds_of(block, tile), kWarpRows, kBlockN);
          },
          [&](int tile, product_t& c, weights_t<kStepsEach>& w) {
            weigh(block, mask_tile, params, found, tile, c, w, l);
          });
    } while (walks_again(block, sums, found));

    const thread_t me;
    double l_of[2];
    add_second(me, sums, l, l_of);
    if (me.role() == 1) continue;

    const tile_coord_t at_end = grads.entry(params, block.kept.of[0], block.summed);
    const scores_t scores_end(at_end, SCORE_ARGUMENTS);
    const index_t row = block.own_first + me.first_row();
    const index_t entry = at_end.row_of_heads * params.seqlen_q + row;
    double own_factor[2] = {1, 1};
    if constexpr (kSplitsLoop) {
      accum_t* const totals = factor + split * grads.num_kept * params.seqlen_q + entry;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = me.g() + 8 * r;
        if (me.t() == 0 && row + n < params.seqlen_q) totals[n] = l_of[r];
      }
    } else {
      close_rows(me, block, scores_end, params, row, entry, l_of, own_factor, factor,
                 sink_terms);
    }
    // A lane's rows of the sums are others.
    double factor_of[4];  // of rows 2 t + (0, 1), then + 8
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      factor_of[n] =
          __shfl_sync(kFullMask, own_factor[n / 2], 4 * (2 * me.t() + n % 2));
    }
    grad_t* out = dq + block.kept.of[1] + row * grads.row[0];
    if constexpr (kSplitsLoop) {
      out += split * grads.num_kept * params.seqlen_q * params.head_dim;
    }
    const int num_rows = num_own();
    for_each_sum(sums, [&](int i, int col, double sum, int n) {
      if (i >= num_rows || col >= params.head_dim) return;
      grad_t& x = out[i * grads.row[0] + col * grads.col[0]];
      // Entries that share q are added in order, each with its own factors.
      const double term = sum * factor_of[n] * params.scale;
      x = block.summed > 0 ? x + term : term;
    });
  }
}

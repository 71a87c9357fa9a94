// SPDX-License-Identifier: MIT
// attention_vjp_sinks: terms of dsinks that a float16 `out` has lost (sink_terms.cuh).
//
// Algorithm  For each tile of queries with such a row, over tiles of keys:
//                dP = dO v^T,  P = exp(score(q k^T) - lse),  delta += sum(P * dP)
//            `out` and lse may cover keys of other calls. So the new delta counts where
//            lse is that of these scores, and the delta of `out` the new one but for
//            the rounding of `out`. If not, the delta of `out` does.
// Grid       1-D; a few blocks loop over all tiles of queries, and most find none to do
// Tiles      tile.cuh; q and dO are owned, k and v are looped over
// Memory     global: all terms once; for such a tile q, dO, k and v once
// Numbers    accum_t, in a fixed order
// Limits     none
#include "attention/simt/tile.cuh"
#include "attention/simt/sink_terms.cuh"

// Sums over the keys that a row sees.
struct row_sums_t {
  accum_t p = 0, p_dp = 0, sizes = 0;  // the last of |P * dP|
  bool sees = false;

  __device__ void add(accum_t weight, accum_t dp) {
    sees = true;
    p += weight;
    p_dp += weight * dp;
    sizes += weight * abs_of(dp);
  }
  __device__ void reduce() {
    const auto plus = [](accum_t a, accum_t b) { return a + b; };
    p = warp_reduce<kColThreads>(p, plus);
    p_dp = warp_reduce<kColThreads>(p_dp, plus);
    sizes = warp_reduce<kColThreads>(sizes, plus);
    sees = warp_reduce<kColThreads>(static_cast<int>(sees),
                                    [](int a, int b) { return a | b; }) != 0;
  }
};

// The sum of |dO| over a row, by the threads of the row.
__device__ __forceinline__ accum_t size_of_dout(const rows_t& dout, int row) {
  accum_t size = 0;
  for (column_t d = thread_col(); d < dout.dim; d += kColThreads) {
    size += abs_of(to<accum_t>(dout.x[row * dout.stride + d]));
  }
  return warp_reduce<kColThreads>(size, [](accum_t a, accum_t b) { return a + b; });
}

// delta of a row: from its sums, or `given` if `out` and lse are not those of its keys.
__device__ __forceinline__ accum_t delta_of(const row_sums_t& sums, accum_t dout,
                                            accum_t given, accum_t down, accum_t lse,
                                            accum_t sink) {
  accum_t delta = sums.p_dp;
  if (sums.sees || is_finite(down)) delta -= down;
  const accum_t own_lse = lse + log_of(sums.p + exp_diff(sink, lse));
  // P was rounded before it met v, and so was out; twice that.
  const accum_t rounding = 2 * (kSubnormalRounding * dout + kRounding * sums.sizes) +
                           0x1p-20f * abs_of(down);
  const bool is_same = !(abs_of(delta - given) > rounding);
  return is_same && is_same_lse(own_lse, lse) ? delta : given;
}

// Whether one of the tiles of this block has a row that is lost; for all threads.
__device__ __forceinline__ bool has_lost(const accum_t* sink_terms, index_t num_tiles,
                                         const params_t& params) {
  constexpr int kTilesAtOnce = kNumThreads / kBlockM;
  static_assert(kTilesAtOnce * kBlockM == kNumThreads);
  const index_t num_rows = params.batch_size * params.num_heads * params.seqlen_q;
  bool found = false;
  for (index_t tile = block_index() + threadIdx.x / kBlockM * index_t(gridDim.x);;
       tile += kTilesAtOnce * index_t(gridDim.x)) {
    const index_t head = divide(tile, num_tiles);
    const index_t i = (tile - head * num_tiles) * kBlockM + threadIdx.x % kBlockM;
    const index_t row = head * params.seqlen_q + i;
    if (row >= num_rows) break;
    found |= i < params.seqlen_q && is_lost(sink_terms[row]);
  }
  return __syncthreads_or(found);
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_sinks(BACKWARD_PARAMETERS, ROW_PARAMETERS,
                        const accum_t* __restrict__ dlse,  // as lse, or null
                        accum_t* __restrict__ sink_terms,  // as delta
                        SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(16) unsigned char smem[];
  accum_t* const smem_q = reinterpret_cast<accum_t*>(smem);
  accum_t* const smem_dout = smem_q + (kSingle ? kBlockM * kStride : 0);
  accum_t* const smem_kv = smem_dout + kBlockM * kStride;

  const index_t num_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  if (!has_lost(sink_terms, num_tiles, params)) return;
  for (index_t tile = block_index();; tile += gridDim.x) {
    const tile_coord_t at(params, tile, num_tiles);
    if (!at.exists) return;
    const index_t i0 = at.tile * kBlockM;
    const int num_rows = static_cast<int>(smaller(kBlockM, params.seqlen_q - i0));
    const index_t first = at.row_of_heads * params.seqlen_q + i0;
    unsigned lost = 0;  // a bit for each row of the thread
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool exists = own_row(r) < num_rows;
      if (exists && is_lost(sink_terms[first + own_row(r)])) lost |= 1u << r;
    }
    if (!__syncthreads_or(lost)) continue;

    const scores_t scores(at, SCORE_ARGUMENTS);
    const rows_t q_rows(at.at(q, params.q) + i0 * params.q.row, params.q.row, num_rows,
                        params.head_dim);
    const rows_t dout_rows(at.at(dout, grads.dout) + i0 * grads.dout.row,
                           grads.dout.row, num_rows, params.head_dim_v);
    if (kSingle) {
      load_rows<kBlockM>(smem_q, q_rows, 0);
      load_rows<kBlockM>(smem_dout, dout_rows, 0);
    }
    accum_t row_lse[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const index_t i = i0 + smaller(own_row(r), num_rows - 1);
      row_lse[r] = at.at(lse, grads.lse)[i * grads.lse.row];
    }

    row_sums_t sums[kRows];
    const range_t keys = scores.keys_of(i0, i0 + num_rows);
    for (index_t j0 = keys.first / kBlockN * kBlockN; j0 < keys.last; j0 += kBlockN) {
      if (scores.shown(i0, i0 + num_rows, j0, j0 + kBlockN) == kShowsNone) continue;
      const mask_bounds_t bounds = scores.mask_bounds(i0, j0);
      if constexpr (kHidesKeys) {  // rows that see no key have out = 0, too
        bool sees = false;
#pragma unroll 1
        for (int n = 0; n < kRows * kCols && !sees; ++n) {
          const int r = n / kCols, row = own_row(r), col = other_row(n % kCols);
          sees = (lost >> r & 1) && bounds.sees(row, col) &&
                 !scores.hides(i0 + row, j0 + col);
        }
        if (!__syncthreads_or(sees)) continue;
      }
      const rows_t k_rows(at.at_kv(k, params.k) + j0 * params.k.row, params.k.row,
                          keys.last - j0, params.head_dim);
      const rows_t v_rows(at.at_kv(v, params.v) + j0 * params.v.row, params.v.row,
                          keys.last - j0, params.head_dim_v);
      tile_t s, dp;
      dot<kSingle>(dp, dout_rows, smem_dout, v_rows, smem_kv);
      dot<kSingle>(s, q_rows, smem_q, k_rows, smem_kv);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
          if (!bounds.sees(own_row(r), other_row(c))) continue;
          const accum_t p =
              weight(scores(s[r][c], i0 + own_row(r), j0 + other_row(c)), row_lse[r]);
          if (!is_unseen(p)) sums[r].add(p, dp[r][c]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r].reduce();
      const int row = static_cast<int>(smaller(own_row(r), num_rows - 1));
      const index_t i = i0 + row;
      const accum_t size = size_of_dout(dout_rows, row);
      if (!(lost >> r & 1) || thread_col() != 0) continue;
      const accum_t down =
          dlse == nullptr ? 0 : at.at(dlse, grads.dlse)[i * grads.dlse.row];
      const accum_t own =
          delta_of(sums[r], size, delta[first + row], down, row_lse[r], scores.sink());
      sink_terms[first + row] = sink_term(scores, i, row_lse[r], own);
    }
  }
}

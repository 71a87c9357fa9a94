// SPDX-License-Identifier: MIT
// attention_vjp_mma_split_queries: dq of float32 by mma.sync, and statistics of each
// query for the kernel of dk and dv.
//
// Algorithm  FlashAttention-2 backward (Dao 2023, algorithm 2), the part of a tile of
//            queries, over granules of keys from first to last:
//                S = q k^T,  P = exp(scale S - lse),  dP = dO v^T,  dS = P (dP - delta)
//                dq += dS k,  total += P
//            lse came from scores with other rounding errors, so P does not sum to 1.
//            If the total, with the sink, is 1 up to rounding, P is divided by it: dq
//            here, P in the other kernel. If it is not, lse covers keys of other calls.
//            With LOOP_SPLITS fp32_backward_dq_finish.cu does that
// Grid       1-D, one block per tile of queries of an entry; last tiles first, since
//            causal ones are longest
// Tiles      q, dO    kBlockM / kGranule operands   shared, loaded once
//            k, v     one of each            shared, kStages of them
//            S, dP, dq  a warp has 16 kRowTiles queries, and kColumns of dq
//            S, dP    of each warp           shared, where two share queries
//            With one stage v comes while the other products are computed, and k during
//            dP
// Memory     global: q, dO and dq once; k and v once per tile of queries, mostly L2
// Numbers    fp32_backward.cuh; a fixed order of sums: the same bits in every run
// Limits     head_dim and head_dim_v up to kHeadDim, padded with zeros; fewer than 2^29
//            queries and keys; sm_80 or newer
#include "attention/sm80/fp32_backward.cuh"

constexpr int kRowTiles = kBlockM / (16 * kRowWarps), kKeyTiles = kGranule / 8;
constexpr int kGranules = kBlockM / kGranule;
static_assert(kRowTiles * 16 * kRowWarps == kBlockM && kGranules * kGranule == kBlockM);
static_assert(kRowTiles <= 2 && kBlockN == kGranule && kLargestTile % kBlockM == 0);

// Scores are off by up to 2^-38 of scale * head_dim * max |q| * max |k| in addition to
// their rounding: 2^-20 where that product is below kLargestScore. Above
// kSmallestProduct, dP has parts and units in range.
constexpr float kLargestScore = 0x1p18f, kSmallestProduct = 0x1p-60f;

// What all threads need of a block; in shared memory for lack of registers.
struct view_t : bits_of_rows_t<kMaskBits> {
  split_operands_t operands;
  index_t kept, row_of_heads;  // the kept entry, and the entry among all
  int i0, first, last;         // first query; range of keys
  seen_t seen;
};

// The first of this lane's queries, within the tile.
__device__ __forceinline__ int row() {
  return row_warp() * (16 * kRowTiles) + lane_index() / 4;
}

// Whether positions let some query of a granule see some key of another.
__device__ __forceinline__ bool sees_any(const mask_bounds_t& bounds) {
  const int rows = min(bounds.num_queries, kGranule),
            cols = min(bounds.num_keys, kGranule);
  return rows > 0 && cols > 0 && bounds.low < cols && bounds.high > 1 - rows;
}

// Whether a query of the granule at i0 sees a key of the one at j0, and one of the two
// holds a nonfinite number.
__device__ __forceinline__ bool sees_marked(const view_t& view, const scores_t& scores,
                                            unsigned marked_queries,
                                            unsigned marked_keys, index_t i0,
                                            index_t j0) {
  const mask_bounds_t bounds = scores.mask_bounds(i0, j0);
#pragma unroll 1
  for (int n = 0; n < kGranule * kGranule; ++n) {
    const int i = n / kGranule, j = n % kGranule;
    if (((marked_queries >> i | marked_keys >> j) & 1) && bounds.sees(i, j) &&
        !scores.hides(i0 + i, j0 + j) &&
        (view.word(static_cast<int>(i0) - view.i0 + i, j0 + j / 8 * 8, j % 8 / 2) >>
             j % 2 &
         1)) {
      return true;
    }
  }
  return false;
}

// Whether parts cannot represent some pairs of the block; its threads divide the work.
__device__ __forceinline__ bool has_nonfinite_pairs(const view_t& view,
                                                    const scores_t& scores,
                                                    const params_t& params) {
  const float factor =
      fabsf(static_cast<float>(params.scale)) * static_cast<float>(params.head_dim);
  const int num_keys = view.last - view.first;
  bool nonfinite = false;
#pragma unroll 1
  for (int n = threadIdx.x; n < (num_keys + kGranule - 1) / kGranule * kGranules;
       n += kNumThreads) {
    const int own = n % kGranules * kGranule, i0 = view.i0 + own;
    const int j0 = view.first + n / kGranules * kGranule;
    if (!sees_any(scores.mask_bounds(i0, j0))) continue;
    auto look_up = [&](const unsigned char* operands, int at) {
      return tile_stats_of(operands + index_t(at / kGranule) * kBytesOperand);
    };
    const tile_stats_t of_q = look_up(view.operands.q, own),
                       of_k = look_up(view.operands.k, j0);
    const tile_stats_t of_dout = look_up(view.operands.dout, own),
                       of_v = look_up(view.operands.v, j0);
    const float score = of_q.largest * of_k.largest * factor;
    const float product = of_dout.largest * of_v.largest;
    nonfinite |= of_q.is_uneven || of_k.is_uneven || of_dout.is_uneven ||
                 of_v.is_uneven || score > kLargestScore ||
                 (product != 0 && product < kSmallestProduct);
    const unsigned marked_q = of_q.marked | of_dout.marked;
    const unsigned marked_k = of_k.marked | of_v.marked;
    if ((marked_q | marked_k) != 0) {
      nonfinite |= sees_marked(view, scores, marked_q, marked_k, i0, j0);
    }
  }
  return nonfinite;
}

// What all threads need of the tile of queries from i0 on.
__device__ __forceinline__ void begin(view_t& view, const work_tile_t& work, int i0,
                                      const tile_coord_t& at, const scores_t& scores,
                                      const params_t& params,
                                      const unsigned char* operands,
                                      index_t num_splits) {
  const range_t keys = scores.keys_of(i0, min(index_t(i0) + kBlockM, params.seqlen_q));
  view.operands = split_operands_t(operands, params, at);
  view.operands.q += index_t(i0 / kGranule) * kBytesOperand;
  view.operands.dout += index_t(i0 / kGranule) * kBytesOperand;
  view.kept = work.kept;
  view.row_of_heads = at.row_of_heads;
  view.i0 = i0;
  view.first = static_cast<int>(keys.first) / kGranule * kGranule;
  view.last = static_cast<int>(keys.last);
  if (keys.first >= keys.last) view.first = view.last;
  if constexpr (kSplitsLoop) {
    take_split(view.first, view.last, split_index(num_splits), num_splits);
  }
  view.seen = seen_t(scores.mask_bounds(i0, 0));
}

constexpr int kRows = 2 * kRowTiles;  // per thread

// What the mask shows of a granule of keys to each row: 8 n + 2 t + e in bit 2 n + e.
using shown_bits_t = unsigned[kRows];

__device__ __forceinline__ void load_shown(shown_bits_t& shown, const view_t& view,
                                           int j0) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    shown[r] = view.word(row() + 8 * r, j0, lane_index() % 4);
  }
}

__device__ __forceinline__ void store_stats(float* stats, index_t granule, int i,
                                            float log_sum, float delta, float factor) {
  float* const to = stats + granule * (3 * kGranule) + i;
  to[0] = log_sum;
  to[kGranule] = delta;
  to[2 * kGranule] = factor;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_mma_split_queries(
        const unsigned char* __restrict__ operands,  // fp32_backward.cuh
        const float* __restrict__ lse,               // (batch, heads, queries)
        const float* __restrict__ delta,             // as lse, contiguous
        float* __restrict__ stats,  // fp32_backward.cuh; or totals of each split
        found_t* __restrict__ found,
        const index_t section,  // entries whose k and v fit into L2 together
        LOOP_PARAMETERS grad_t* __restrict__ dq, MASK_BITS_PARAMETER SCORE_PARAMETERS,
        const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ __align__(16) unsigned char view_memory[sizeof(view_t)];
  view_t& view = reinterpret_cast<view_t&>(view_memory);
  unsigned char* const smem_q = smem;
  unsigned char* const smem_dout = smem_q + kGranules * kBytesOperand;
  unsigned char* const stages = smem_dout + kGranules * kBytesOperand;
  const exchange_t<2, kRowTiles, kKeyTiles> exchange = {
      reinterpret_cast<float4*>(stages + kStages * 2 * kBytesOperand)};

  const index_t num_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const work_tile_t work(work_index(num_splits), section, grads.num_kept, num_tiles);
  // Another block may just set the flag: make all threads of this one agree.
  if (__syncthreads_or(!work.exists || found->nonfinite != 0)) return;
  const tile_coord_t at = grads.entry(params, locate(grads.kept, work.kept).of[0], 0);
  const scores_t scores(at, SCORE_ARGUMENTS);
  if (threadIdx.x == 0) {
    const int i0 = static_cast<int>(num_tiles - 1 - work.tile) * kBlockM;
    begin(view, work, i0, at, scores, params, operands, num_splits);
    view.bits_of_rows_t<kMaskBits>::begin(MASK_BITS_ARGUMENT, at, i0,
                                          params.seqlen_q - i0);
  }
  __syncthreads();  // the view is complete
  copy_bytes<kGranules * kBytesOperand>(smem_q, view.operands.q);
  copy_bytes<kGranules * kBytesOperand>(smem_dout, view.operands.dout);
  auto load = [&](const unsigned char* from, int j0, int which) {
    unsigned char* const to = stages + j0 / kGranule % kStages * (2 * kBytesOperand);
    if (j0 < view.last) {
      copy_bytes<kBytesOperand>(to + which * kBytesOperand,
                                from + index_t(j0 / kGranule) * kBytesOperand);
    }
  };
  auto load_keys = [&](int j0) {
    load(view.operands.k, j0, 0);
    if constexpr (kStages == 2) load(view.operands.v, j0, 1);
    ptx::commit_copies();
  };
  auto load_values = [&](int j0) {
    load(view.operands.v, j0, 1);
    ptx::commit_copies();
  };
  auto shown = [&](int j) {
    return scores.shown(view.i0, min(index_t(view.i0 + kBlockM), params.seqlen_q), j,
                        j + kGranule);
  };
  shown_tiles_t<kGranule> tiles;
  if constexpr (kStages == 2) {
    load_keys(tiles.next(view.first, view.last, shown));
  } else {
    load_values(tiles.next(view.first, view.last, shown));
  }
  if (__syncthreads_or(has_nonfinite_pairs(view, scores, params))) {
    ptx::wait_copy_groups<0>();
    if (threadIdx.x == 0) found->nonfinite = 1;
    return;
  }

  const differentiate_t differentiate(params, found);
  float log_sum[kRows], delta_of[kRows], total[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int i = view.i0 + row() + 8 * r;
    const bool exists = i < params.seqlen_q;
    const float x = exists ? at.at(lse, grads.lse)[i * grads.lse.row] : 0.f;
    log_sum[r] = exists ? log_sum_of(x) : infinity<float>();
    delta_of[r] = exists ? delta[at.row_of_heads * params.seqlen_q + i] : 0.f;
    total[r] = 0;
  }

  frag_t<kRowTiles, kColumns / 8> sums;
  clear(sums);
  two_level_sum_t<float, decltype(sums)> two_level;
  two_level_sum_t<float, decltype(total)> two_level_total;
  two_level.begin();
  two_level_total.begin();
  // The first tile is found again: kept across the copies it costs registers.
#pragma unroll 1
  for (int j0 = tiles.next(view.first, view.last, shown); j0 < view.last;
       j0 += tiles.distance) {
    tiles.step<kStages == 2>(j0, view.last, shown);
    ptx::wait_copy_groups<0>();
    __syncthreads();  // this granule has arrived; the previous one has been read
    load_keys(kStages == 2 ? j0 + tiles.distance : j0);
    const unsigned char* const operand_k =
        stages + j0 / kGranule % kStages * (2 * kBytesOperand);
    const unsigned char* const operand_v = operand_k + kBytesOperand;
    const int own = row_warp() * (16 * kRowTiles);
    const unsigned operand = own / kGranule * kBytesOperand;

    shown_bits_t shown_keys;
    load_shown(shown_keys, view, j0);
    frag_t<kRowTiles, kKeyTiles> s, dp;
    auto multiply_values = [&] {
      multiply_scores_in_parts<false>(
          dp, left<kColumns>(columns_of(smem_dout) + operand, own % kGranule),
          right<kColumns>(columns_of(operand_v), 0),
          tile_stats_of(smem_dout + operand).from_parts *
              tile_stats_of(operand_v).from_parts);
      exchange.publish(1, dp);
    };
    if constexpr (kStages == 1) {
      multiply_values();
      ptx::wait_copy_groups<0>();
      __syncthreads();  // k has arrived; v has been read
      load_values(j0 + tiles.distance);
    }
    const float unit_k = tile_stats_of(operand_k).from_parts;
    multiply_scores_in_parts<false>(
        s, left<kColumns>(columns_of(smem_q) + operand, own % kGranule),
        right<kColumns>(columns_of(operand_k), 0),
        tile_stats_of(smem_q + operand).from_parts * unit_k);
    exchange.publish(0, s);
    if constexpr (kStages == 2) multiply_values();
    exchange.wait();
    exchange.add(0, s);
    exchange.add(1, dp);

    const int first_row = row(), first_column = lane_index() % 4 * 2;
    const mask_bounds_t bounds = view.seen.at(0, j0);
    float sum[kRows] = {};
    auto finish = [&](auto sees) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        if constexpr (kHasTerms) ptx::compiler_fence();  // no prefetch
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int r = 2 * m + e / 2;
            const int i = first_row + 8 * r, j = first_column + 8 * n + e % 2;
            const bool is_shown = !kMaskBits || shown_keys[r] >> (2 * n + e % 2) & 1;
            differentiate(s[m][n][e], dp[m][n][e], sees(i, j) && is_shown, scores,
                          index_t(view.i0 + i), index_t(j0 + j), log_sum[r],
                          delta_of[r]);
            sum[r] += s[m][n][e];
          }
        }
      }
    };
    if (kHasTwoWays && bounds.sees_all(kBlockM, kGranule)) {
      finish([](int, int) { return true; });
    } else {
      finish([&](int i, int j) { return bounds.sees(i, j); });
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) total[r] += sum[r];
    parts_t<kRowTiles> ds[kApart];
    const auto from_ds = as_parts(ds, dp);
    add_product_in_parts(sums, ds, summed<kColumns>(columns_of(operand_k), 0),
                         from_ds * kLift * unit_k);
    if (run_ends_between(j0, j0 + tiles.distance, view.last)) {
      two_level.end(sums);
      two_level_total.end(total);
    }
  }
  ptx::wait_copy_groups<0>();
  two_level.finish(sums);
  two_level_total.finish(total);

  const int granules = granules_of(params.seqlen_q);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float& x = total[r];
    x += shuffle_xor(x, 1);
    x += shuffle_xor(x, 2);
    if constexpr (kSplitsLoop) {
      const int i = view.i0 + row() + 8 * r;
      const index_t of_entry =
          split_index(num_splits) * grads.num_kept + view.row_of_heads;
      if (column_warp() == 0 && lane_index() % 4 == 0 && i < params.seqlen_q) {
        stats[of_entry * params.seqlen_q + i] = x;
      }
      continue;
    }
    if constexpr (kHasSinks) x += total_of_sink(scores, log_sum[r]);
    const float factor = factor_of(x, log_sum[r]);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      sums[r / 2][n][r % 2 * 2] *= factor;
      sums[r / 2][n][r % 2 * 2 + 1] *= factor;
    }
    if (column_warp() == 0 && lane_index() % 4 == 0) {
      const int i = view.i0 + row() + 8 * r;
      store_stats(stats, view.row_of_heads * granules + i / kGranule, i % kGranule,
                  log_sum[r], delta_of[r], factor);
    }
  }
  const int i0 = view.i0;
  const int num_rows = static_cast<int>(min(params.seqlen_q - i0, index_t(kBlockM)));
  if constexpr (kSplitsLoop) {
    const index_t rows = split_index(num_splits) * grads.num_kept * params.seqlen_q;
    dq += rows * params.head_dim;
  }
  const float nonfinite = store_sums(
      dq + locate(grads.kept, view.kept).of[1] + i0 * grads.row[0], grads.row[0],
      grads.col[0], sums, static_cast<float>(params.scale) / kLift,
      row_warp() * (16 * kRowTiles), column_warp() * kColumns, num_rows,
      static_cast<int>(params.head_dim));
  if (nonfinite != 0) found->nonfinite = 1;
}

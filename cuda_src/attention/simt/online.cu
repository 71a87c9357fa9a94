// SPDX-License-Identifier: MIT
// attention_online: one pass over the keys for each query, without tiles.
//
// Algorithm  The state of a row is its maximum m, sum d and output o so far. A key is a
//            state as well, (s_j, 1, v_j), and two states combine into
//                m' = max(m1, m2),  w = d e^(m - m'),  d' = w1 + w2,
//                o' = o1 w1 / d' + o2 w2 / d',
//            for a key: o_j = o_(j-1) d_(j-1) e^(m_(j-1) - m_j) / d_j
//                             + e^(s_j - m_j) / d_j v_j.
// Grid       one warp per query and kBlockDv columns of v; lanes across head_dim
// Memory     global: k and v once per query and column block; out and lse once
// Numbers    all in accum_t. Each run of kRun keys first combines into a state of its
//            own: o is rounded at each key, and short runs keep those roundings few.
//            With many keys (long_sums.cuh), so do runs of such states
// Limits     none: any head_dim, any strides
#include "attention/simt/long_sums.cuh"
#include "attention/score/score.cuh"
#include "common/reduce.cuh"

#if !defined(BLOCK_M) || !defined(BLOCK_DV)
#error "BLOCK_M (rows of a block) and BLOCK_DV come from the host"
#endif
constexpr int kBlockM = BLOCK_M, kBlockDv = BLOCK_DV;
constexpr int kColumns = kBlockDv / kWarpSize;  // per lane
static_assert(kBlockDv % kWarpSize == 0 && kBlockM * kWarpSize == kNumThreads);

constexpr int kRun = 64;

struct state_t {
  accum_t m = -infinity<accum_t>(), d = 0, o[kColumns] = {};

  // Combines with another state, or with a key: (its score, 1, its value).
  __device__ void join(accum_t m2, accum_t d2, const accum_t (&o2)[kColumns]) {
    const accum_t top = larger(m, m2);
    const accum_t w1 = d * exp_diff(m, top), w2 = d2 * exp_diff(m2, top);
    const accum_t sum = w1 + w2;
    const accum_t share1 = w1 / sum, share2 = w2 / sum;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) o[c] = o[c] * share1 + o2[c] * share2;
    m = top;
    d = sum;
  }
};

__device__ __forceinline__ accum_t dot(const elem_t* q, const elem_t* k,
                                       index_t head_dim) {
  accum_t sum = 0;
  for (index_t d = threadIdx.x % kWarpSize; d < head_dim; d += kWarpSize) {
    sum += to<accum_t>(q[d]) * to<accum_t>(k[d]);
  }
  return warp_reduce(sum, [](accum_t a, accum_t b) { return a + b; });
}

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_online(FORWARD_PARAMETERS, SCORE_PARAMETERS) {
  const index_t column_blocks = (params.head_dim_v + kBlockDv - 1) / kBlockDv;
  const index_t row_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const tile_coord_t at(params, block_index(), row_blocks * column_blocks);
  const index_t column_block = divide(at.tile, row_blocks);
  const index_t i =
      (at.tile - column_block * row_blocks) * kBlockM + threadIdx.x / kWarpSize;
  if (!at.exists || i >= params.seqlen_q) return;

  const scores_t scores(at, SCORE_ARGUMENTS);
  const index_t first_column = column_block * kBlockDv + threadIdx.x % kWarpSize;
  const elem_t* q_row = at.at(q, params.q) + i * params.q.row;
  const elem_t* k_rows = at.at_kv(k, params.k);
  const elem_t* v_rows = at.at_kv(v, params.v);

  // With many keys, kRun runs combine first, and so do kRun of their results.
  state_t row, part, whole;
  const range_t keys = scores.keys_of(i, i + 1);
  index_t num_runs = 0;
  for (index_t start = keys.first; start < keys.last; start += kRun) {
    state_t run;
    const index_t stop = start + kRun < keys.last ? start + kRun : keys.last;
    for (index_t j = start; j < stop; ++j) {
      const accum_t s =
          scores(dot(q_row, k_rows + j * params.k.row, params.head_dim), i, j);
      if (s == -infinity<accum_t>()) continue;  // hidden: not even a NaN in v counts
      accum_t v_row[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const index_t column = first_column + c * kWarpSize;
        v_row[c] = column < params.head_dim_v
                       ? to<accum_t>(v_rows[j * params.v.row + column])
                       : accum_t(0);
      }
      run.join(s, 1, v_row);
    }
    if constexpr (!kTwoLevelSums) {
      if (run.d != 0) row.join(run.m, run.d, run.o);
      continue;
    }
    if (run.d != 0) part.join(run.m, run.d, run.o);
    ++num_runs;
    if (num_runs % kRun == 0 || stop == keys.last) {
      if (part.d != 0) whole.join(part.m, part.d, part.o);
      part = state_t();
    }
    if (num_runs % (kRun * kRun) == 0 || stop == keys.last) {
      if (whole.d != 0) row.join(whole.m, whole.d, whole.o);
      whole = state_t();
    }
  }

  // o is normalized except for the sink, which has no value: o d / (d + e^(sink - m)).
  const finished_t finished = scores.finish(i, row.m, row.d);
  elem_t* out_row = at.at(out, params.out) + i * params.out.row;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const index_t column = first_column + c * kWarpSize;
    if (column < params.head_dim_v) {
      const accum_t o = kHasSinks ? row.o[c] * row.d * finished.inverse : row.o[c];
      out_row[column * params.out.col] = to<elem_t>(o);
    }
  }
  if (lse != nullptr && first_column == 0) {
    lse[at.row_of_heads * params.seqlen_q + i] = finished.lse;
  }
}

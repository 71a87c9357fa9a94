// SPDX-License-Identifier: MIT
// attention_tiled: a block keeps one tile of q and loops over tiles of k and v.
//
// Algorithm  FlashAttention-2 forward (Dao 2023, algorithm 1). For each tile of keys
//                s = score(q k^T),  m' = max(m, rowmax s),  p = exp(s - m')
//                l = l exp(m - m') + rowsum p,  o = o exp(m - m') + p v
//            and at the end  out = o / l,  lse = m + log l.
//            Tiles that no query of the block sees are skipped; tiles that all queries
//            see completely need no mask.
// Grid       1-D, one block per tile of queries of one head; last tiles first, since
//            causal ones are longest
// Tiles      q     kBlockM x kHeadDim                    shared, loaded once
//            k, v  kBlockN x kHeadDim (kHeadDimV)        shared, in the same buffer
//            p     kBlockM x kBlockN                     shared
//            s, o  registers. The threads form kRowThreads rows of kColThreads;
//                  a thread owns kRows rows of s and o: every kRowThreads-th
// Memory     global: q and out once; k and v once per block, mostly from L2
// Numbers    all in accum_t (shared memory too). p v of a tile is summed on its own
//            before it is added to o, and so are runs of tiles (long_sums.cuh). Scores
//            of more than 256 columns are summed in parts of 32
// Limits     the host rounds kHeadDim and kHeadDimV up; zeros pad
#include "attention/simt/long_sums.cuh"
#include "attention/simt/products.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V)
#error "HEAD_DIM and HEAD_DIM_V come from the host"
#endif
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kStrideQ = padded(kHeadDim), kStrideK = kStrideQ;
constexpr int kStrideV = padded(kHeadDimV), kStrideP = padded(kBlockN);
constexpr int kStrideKv = kStrideK > kStrideV ? kStrideK : kStrideV;

// A thread's columns of o: kChunks groups of kWide adjacent ones.
constexpr int kWide = wide_of(kHeadDimV);
constexpr int kChunks = kHeadDimV / (kColThreads * kWide);
static_assert(kChunks * kColThreads * kWide == kHeadDimV && kHeadDim % kVec == 0);

// What a thread owns.
struct rows_t {
  using o_t = accum_t[kRows][kChunks * kWide];
  using l_t = accum_t[kRows];

  tile_t s;
  o_t o;
  accum_t m[kRows];
  l_t l;
};

// The rounding error of one long sum grows like the root of its length. Wide heads sum
// kColumnsApart columns at a time, and keep the rounding errors of adding these sums.
constexpr bool kSumsApart = kHeadDim > 256;
constexpr int kColumnsApart = 32;
static_assert(!kSumsApart || kHeadDim % kColumnsApart == 0);

// s = q k^T
__device__ __forceinline__ void dot(rows_t& rows, const accum_t* q, const accum_t* k) {
  q += thread_row() * kStrideQ;
  k += thread_col() * kStrideK;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) rows.s[r][c] = 0;
  }
  if constexpr (!kSumsApart) {
    add_products<kStrideQ>(rows.s, q, k, 0, kHeadDim);
  } else {
    tile_t low = {};
#pragma unroll 1
    for (int first = 0; first < kHeadDim; first += kColumnsApart) {
      tile_t sum = {};
      add_products<kStrideQ>(sum, q, k, first, first + kColumnsApart);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
          const pair_t<accum_t> total = exact_sum(rows.s[r][c], sum[r][c]);
          rows.s[r][c] = total.high;
          low[r][c] += total.low;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        // If a sum is not finite, `low` is meaningless.
        if (is_finite(rows.s[r][c])) rows.s[r][c] += low[r][c];
      }
    }
  }
}

// Turns raw scores into final ones. With kCheck hidden keys get -inf; without it all
// queries must see the whole tile.
template <bool kCheck>
__device__ __forceinline__ void score(rows_t& rows, const scores_t& scores,
                                      const mask_bounds_t& bounds, index_t i0,
                                      index_t j0) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = r * kRowThreads + thread_row();
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const int col = c * kColThreads + thread_col();
      accum_t& s = rows.s[r][c];
      if constexpr (!kCheck) {
        s = scores.of<true>(s, i0 + row, j0 + col);
      } else {
        s = bounds.sees(row, col) ? scores(s, i0 + row, j0 + col)
                                  : -infinity<accum_t>();
      }
    }
  }
}

// Updates the maximum and rescales o and l; puts p into shared memory, where the
// threads of the row read it.
__device__ __forceinline__ void softmax(rows_t& rows, accum_t* p) {
  p += thread_row() * kStrideP + thread_col();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    accum_t m = rows.s[r][0];
#pragma unroll
    for (int c = 1; c < kCols; ++c) m = larger(m, rows.s[r][c]);
    m = warp_reduce<kColThreads>(m, [](accum_t a, accum_t b) { return larger(a, b); });
    m = larger(m, rows.m[r]);
    const accum_t alpha = exp_diff(rows.m[r], m);
    rows.m[r] = m;
#pragma unroll
    for (int n = 0; n < kChunks * kWide; ++n) rows.o[r][n] *= alpha;
    accum_t l = 0;
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const accum_t weight_c = weight(rows.s[r][c], m);
      l += weight_c;
      p[r * kRowThreads * kStrideP + c * kColThreads] = weight_c;
    }
    // The sum over this thread's columns; finish() adds those of the other threads.
    rows.l[r] = rows.l[r] * alpha + l;
  }
}

// Two-level sums of o and l over many keys.
class two_level_rows_t {
 public:
  __device__ __forceinline__ void begin() {
    o_.begin();
    l_.begin();
  }

  // A tile was added; the next one starts at key `next`.
  __device__ __forceinline__ void end_tile(rows_t& rows, index_t next, index_t last) {
    if constexpr (kTwoLevelSums) {
      if (next % (kRunTiles * kBlockN) != 0 || next >= last) return;
      accum_t alpha[kRows];
      follow(rows, alpha);
      o_.end(rows.o, [&](int n) { return alpha[n / (kChunks * kWide)]; });
      l_.end(rows.l, [&](int n) { return alpha[n]; });
    }
  }

  __device__ __forceinline__ void finish(rows_t& rows) {
    if constexpr (kTwoLevelSums) {
      if (!o_.any()) return;
      accum_t alpha[kRows];
      follow(rows, alpha);
      o_.finish(rows.o, [&](int n) { return alpha[n / (kChunks * kWide)]; });
      l_.finish(rows.l, [&](int n) { return alpha[n]; });
    }
  }

 private:
  // Factors from the scale of the last run to the current one.
  __device__ __forceinline__ void follow(const rows_t& rows, accum_t (&alpha)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const accum_t before = m_[r];
      alpha[r] = o_.any() ? exp_diff(before, rows.m[r]) : accum_t(0);
      m_[r] = rows.m[r];
    }
  }

  two_level_sum_t<accum_t, rows_t::o_t> o_;
  two_level_sum_t<accum_t, rows_t::l_t> l_;
  volatile accum_t m_[kTwoLevelSums ? kRows : 1];  // at the end of the last run
};

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_tiled(FORWARD_PARAMETERS, SCORE_PARAMETERS) {
  extern __shared__ __align__(16) unsigned char smem[];
  accum_t* const smem_q = reinterpret_cast<accum_t*>(smem);
  accum_t* const smem_kv = smem_q + kBlockM * kStrideQ;
  accum_t* const smem_p = smem_kv + kBlockN * kStrideKv;

  const index_t num_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const tile_coord_t at(params, block_index(), num_tiles);
  if (!at.exists) return;
  const index_t i0 = (num_tiles - 1 - at.tile) * kBlockM;
  const index_t num_rows =
      params.seqlen_q - i0 < kBlockM ? params.seqlen_q - i0 : kBlockM;

  const scores_t scores(at, SCORE_ARGUMENTS);
  const elem_t* const k_rows = at.at_kv(k, params.k);
  const elem_t* const v_rows = at.at_kv(v, params.v);
  load_rows<kBlockM, kHeadDim, kStrideQ, 4>(smem_q,
                                            at.at(q, params.q) + i0 * params.q.row,
                                            params.q.row, num_rows, params.head_dim);

  rows_t rows = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows.m[r] = -infinity<accum_t>();
  two_level_rows_t two_level;
  two_level.begin();

  const range_t keys = scores.keys_of(i0, i0 + num_rows);
  // Tiles start at multiples of kBlockN, so that the order of summation of a row does
  // not depend on its tile of queries.
  for (index_t j0 = keys.first / kBlockN * kBlockN; j0 < keys.last; j0 += kBlockN) {
    const index_t num_keys = keys.last - j0;
    const shown_t shown = scores.shown(i0, i0 + num_rows, j0, j0 + kBlockN);
    if (shown == kShowsNone) {
      two_level.end_tile(rows, j0 + kBlockN, keys.last);
      continue;
    }
    load_rows<kBlockN, kHeadDim, kStrideK, 4>(smem_kv, k_rows + j0 * params.k.row,
                                              params.k.row, num_keys, params.head_dim);
    __syncthreads();  // the tiles of q and k are complete
    dot(rows, smem_q, smem_kv);
    __syncthreads();  // all threads have read k before v replaces it

    const accum_t nonfinite = load_rows<kBlockN, kHeadDimV, kStrideV, 4>(
        smem_kv, v_rows + j0 * params.v.row, params.v.row, num_keys, params.head_dim_v);
    const mask_bounds_t bounds = scores.mask_bounds(i0, j0);
    if (shown == kShowsAll && bounds.sees_all(kBlockM, kBlockN)) {
      score<false>(rows, scores, bounds, i0, j0);
    } else {
      score<true>(rows, scores, bounds, i0, j0);
    }
    softmax(rows, smem_p);
    // The tiles of v and p are complete; vote on whether v contains an infinity or NaN.
    if (__syncthreads_or(nonfinite != 0)) {
      accumulate_tile<true, kStrideP, kStrideV, kWide>(rows.o, smem_p, smem_kv);
    } else {
      accumulate_tile<false, kStrideP, kStrideV, kWide>(rows.o, smem_p, smem_kv);
    }
    __syncthreads();  // all threads have read v and p
    two_level.end_tile(rows, j0 + kBlockN, keys.last);
  }
  two_level.finish(rows);

  elem_t* const out_rows = at.at(out, params.out);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const index_t i = i0 + r * kRowThreads + thread_row();
    const accum_t l =
        warp_reduce<kColThreads>(rows.l[r], [](accum_t a, accum_t b) { return a + b; });
    if (i >= params.seqlen_q) continue;
    const finished_t finished = scores.finish(i, rows.m[r], l);
#pragma unroll
    for (int n = 0; n < kChunks * kWide; ++n) {
      const int column = (n / kWide * kColThreads + thread_col()) * kWide + n % kWide;
      if (column < params.head_dim_v) {
        out_rows[i * params.out.row + column * params.out.col] =
            to<elem_t>(rows.o[r][n] * finished.inverse);
      }
    }
    if (lse != nullptr && thread_col() == 0) {
      lse[at.row_of_heads * params.seqlen_q + i] = finished.lse;
    }
  }
}

// SPDX-License-Identifier: MIT
// attention_vjp_few_f64: all gradients of few float64 queries on tensor cores.
//
// Algorithm  delta = sum(dO * out) - dlse of each query, then for tiles of 16 keys
//                S = score(k q^T),  P = exp(S - lse) factor,  dP = v dO^T
//                dS = P (dP - delta) score'(k q^T)
//                dv = P dO,  dk = scale dS q,  dq += scale dS^T k
//            The factor, with which P of a query sums to 1, comes from the totals of
//            all splits, or from a first pass over the keys
// Grid       1-D, one block per split of an entry
// Tiles      few_backward.cuh; a warp has 16 keys at a time, and dq of all queries in
//            registers. Its next v loads while S is computed, its next k while dk and
//            dv are stored
// Memory     global: q, dO and out once per split; k twice, of which one may be from
//            L2; v, dk and dv once. dq, or terms (splits, entries, queries, head_dim)
// Numbers    all in float64. A fixed order of sums: the same bits in every run. Hidden
//            keys weigh 0, whatever they are. If a key that is seen is not finite, or a
//            gradient, `found` asks for the fallback
// Limits     kRows queries, head dimensions up to kDim. Each query head has keys of its
//            own. Rows are whole vectors unless UNALIGNED
#include "attention/fp64/few_backward.cuh"

#ifdef KEY_SPLITS
constexpr bool kSplitsKeys = true;
#define SPLIT_PARAMETERS const accum_t *__restrict__ totals, const index_t num_splits,
#else
constexpr bool kSplitsKeys = false;
#define SPLIT_PARAMETERS
constexpr index_t num_splits = 1;
constexpr const accum_t* totals = nullptr;
#endif

// delta of query i, by a warp.
__device__ __forceinline__ double delta_of(const double* dout, const double* out,
                                           index_t dim, const double* dlse) {
  double sum = 0;
  for (index_t d = threadIdx.x % kWarpSize; d < dim; d += kWarpSize) {
    if (out[d] != 0) sum = fma_of(out[d], dout[d], sum);  // even if dO is NaN
  }
  sum = warp_reduce(sum, [](double a, double b) { return a + b; });
  return dlse == nullptr ? sum : sum - *dlse;
}

// Zeroes the numbers of `count` rows that are not finite, by `threads` threads; notes
// their rows unless `odd` is null.
__device__ __forceinline__ void clean(double* x, int count, int thread, int threads,
                                      bool* odd) {
#pragma unroll 1
  for (int n = thread; n < count * kDim; n += threads) {
    if (is_finite(x[n])) continue;
    x[n] = 0;
    if (odd != nullptr) odd[n / kDim] = true;
  }
}

// keys rows^T, where the rows are finite. Keys that are not leave no finite product:
// then their numbers become 0, and bits of `odd`, of keys g and g + 8, are set.
__device__ __forceinline__ void multiply_clean(product_t& c, double* keys,
                                               const double* rows, unsigned& odd) {
  multiply(c, keys, rows);
  unsigned lanes[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    bool finite = true;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      finite &= is_finite(c[n][2 * h]) && is_finite(c[n][2 * h + 1]);
    }
    lanes[h] = __ballot_sync(kFullMask, !finite);
  }
  if ((lanes[0] | lanes[1]) == 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if ((lanes[h] >> 4 * lane_g() & 15) != 0) odd |= 1u << h;
  }
  __syncwarp();  // the keys are read
  clean(keys, kKeys, threadIdx.x % kWarpSize, kWarpSize, nullptr);
  __syncwarp();
  multiply(c, keys, rows);
}

// Stores w rows of a tile of keys: scale times sums over the queries, of which column
// chunks are fragments; whether all are finite.
__device__ __forceinline__ bool store_keys(const weights_t& w, const double* rows,
                                           double* out, index_t row_stride,
                                           int num_keys, int dim, double scale) {
  bool finite = true;
  const int g = lane_g(), t = lane_t();
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    double sums[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      double a[8];
      load_columns<kRows>(a, rows + 16 * step * kDim, chunk);
#pragma unroll
      for (int h = 0; h < 2; ++h) add_product(sums[h], a, w[step][h]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const double (&c)[4] = sums[h];
      const int col = 16 * chunk + 2 * g;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = 8 * h + 2 * t + e;
        const double2 x = {scale * c[e], scale * c[2 + e]};
        finite &= is_finite(x.x) && is_finite(x.y);
        if (key >= num_keys || col >= dim) continue;
        double* const to = out + key * row_stride + col;
        if constexpr (kUnaligned) {
          to[0] = x.x;
          if (col + 1 < dim) to[1] = x.y;
        } else {
          *reinterpret_cast<double2*>(to) = x;
        }
      }
    }
  }
  return finite;
}

// Adds dS^T k of a tile to dq; dS is by queries.
__device__ __forceinline__ void add_dq(sums_t& dq, const double* ds,
                                       const double* keys) {
  double b[kRowTiles][4];
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const double2 x =
          load2(ds + (8 * n + lane_g()) * kKeyPitch + 8 * i + 2 * lane_t());
      b[n][2 * i] = x.x;
      b[n][2 * i + 1] = x.y;
    }
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    double a[8];
    load_columns<kKeys>(a, keys, chunk);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) add_product(dq[chunk][n], a, b[n]);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_few_f64(
        QKV_PARAMETERS,
        const elem_t* __restrict__ dout,           // (batch, heads, queries, ..)
        const elem_t* __restrict__ out,            // as dout
        const accum_t* __restrict__ lse,           // (batch, heads, queries)
        const accum_t* __restrict__ dlse,          // as lse, or null
        accum_t* __restrict__ delta,               // as lse, contiguous
        SPLIT_PARAMETERS elem_t* __restrict__ dq,  // as q, or terms
        elem_t* __restrict__ dk,                   // as k
        elem_t* __restrict__ dv,                   // as v
        int* __restrict__ found,                   // 1: something is not finite
        SCORE_PARAMETERS, const __grid_constant__ few_grads_t grads) {
  __shared__ rows_t rows;
  __shared__ exp2_table_t table;
  __shared__ double of_warps[kWarps][kRows];
  __shared__ bool odd_rows[kRows];  // a number of q or dO was not finite
  split_t split(num_splits, params.seqlen_k);
  const tile_coord_t at(params, split.entry);
  if (!at.exists) return;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const int queries = static_cast<int>(params.seqlen_q);
  split.last_key = static_cast<int>(scores.keys_of(0, queries).last);
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);
  copy_rows<kRows, kDim>(shared_rows(0), at.at(q, params.q), params.q.row, queries,
                         dim);
  copy_rows<kRows, kDim>(shared_rows(1), at.at(dout, grads.dout), grads.dout.row,
                         queries, dim_v);
  ptx::commit_copy_group();
  if (threadIdx.x < kWarpSize) table.fill(kLog2e);
  const index_t first_row = at.row_of_heads * queries;
#pragma unroll 1
  for (int i = warp_index(); i < kRows; i += kWarps) {
    double lse_i = kNoRow, delta_i = 0;
    if (i < queries) {
      const double* const of_dlse =
          dlse == nullptr ? nullptr : at.at(dlse, grads.dlse) + i * grads.dlse.row;
      lse_i = at.at(lse, grads.lse)[i * grads.lse.row];
      delta_i = delta_of(at.at(dout, grads.dout) + i * grads.dout.row,
                         at.at(out, params.out) + i * params.out.row, dim_v, of_dlse);
      if (!scores.is_query(i)) delta_i = 0;
    }
    double total = 0;
    if constexpr (kSplitsKeys) {
      // Lanes have splits, in the same order in every block.
      if (i < queries) {
        const double* const of_row = totals + (first_row + i) * num_splits;
        for (index_t n = threadIdx.x % kWarpSize; n < num_splits; n += kWarpSize) {
          total += of_row[n];
        }
      }
      total = warp_reduce(total, [](double a, double b) { return a + b; });
    }
    if (threadIdx.x % kWarpSize == 0) {
      rows.lse[i] = lse_i;
      rows.delta[i] = delta_i;
      of_warps[0][i] = total;
      odd_rows[i] = false;
      if (i < queries && split.number == 0) delta[first_row + i] = delta_i;
    }
  }
  ptx::wait_copy_groups<0>();
  __syncthreads();  // q, dO and `rows` are complete
#pragma unroll 1
  for (int n = 0; n < 2; ++n) {
    clean(shared_rows(n), kRows, threadIdx.x, kNumThreads, odd_rows);
  }
  __syncthreads();  // q and dO are finite

  const exp2_t exp2(table);
  const mask_bounds_t bounds = scores.mask_bounds(0, 0);
  const double* const k_rows = at.at_kv(k, params.k);
  const double* const v_rows = at.at_kv(v, params.v);
  if constexpr (!kSplitsKeys) {
    double sums[kRowTiles][2] = {};
    walk_totals(sums, split, k_rows, rows, scores, bounds, params, exp2);
    sum_totals(sums, of_warps);
  }
  if (threadIdx.x < kRows) {
    const int i = threadIdx.x;
    const double lse_i = rows.lse[i];
    const bool counts =
        i < queries && scores.is_query(i) && scores.sink(i) != -infinity<double>();
    const double sink = counts ? exp_diff_exact(scores.sink(i), lse_i) : 0;
    rows.factor[i] = factor_of(of_warps[0][i] + sink, lse_i);
  }
  __syncthreads();  // the factors are known

  sums_t sums = {};
  bool finite = true;
  double* const exchange = exchange_of_warp();
  const auto fetch = [&](int n, int tile) {
    if (tile < split.last) {
      const int j0 = tile * kKeys;
      const index_t stride = n == 0 ? params.k.row : params.v.row;
      copy_tile(shared_keys(n), (n == 0 ? k_rows : v_rows) + j0 * stride, stride,
                split.last_key - j0, n == 0 ? dim : dim_v);
    }
    ptx::commit_copy_group();
  };
  int tile = split.first + warp_index();
  fetch(1, tile);
  fetch(0, tile);
#pragma unroll 1
  for (; tile < split.last; tile += kWarps) {
    product_t c, dp;
    ptx::wait_copy_groups<1>();
    __syncwarp();      // v has arrived
    unsigned odd = 0;  // of this lane's keys
    multiply_clean(dp, shared_keys(1), shared_rows(1), odd);
    __syncwarp();  // and is read
    fetch(1, tile + kWarps);
    ptx::wait_copy_groups<1>();
    __syncwarp();  // k has arrived
    multiply_clean(c, shared_keys(0), shared_rows(0), odd);
    weights_t p = {};
    const int j0 = tile * kKeys;
    weigh(c, rows, scores, bounds, params, exp2, j0,
          [&](int n, int e, double weight, double derivative) {
            const int query = 8 * n + 2 * lane_t() + e % 2;
            const bool unseen = is_unseen(weight);
            weight *= rows.factor[query];
            double x = weight * (dp[n][e] - rows.delta[query]);
            if (kHasDerivative) x *= derivative;
            if (unseen) x = -0.0;  // avoids 0 * NaN
            finite &= unseen || !(odd >> e / 2 & 1 || odd_rows[query]);
            weight_at(p, n, e) = weight;
            exchange[query * kKeyPitch + lane_g() + 8 * (e / 2)] = x;
          });
    __syncwarp();  // dS is complete
    add_dq(sums, exchange, shared_keys(0));
    __syncwarp();  // k and dS are read
    fetch(0, tile + kWarps);
    const int num_keys = static_cast<int>(smaller(params.seqlen_k - j0, kKeys));
    finite &= store_keys(p, shared_rows(1), at.at_kv(dv, grads.dv) + j0 * grads.dv.row,
                         grads.dv.row, num_keys, dim_v, 1);
    weights_t ds = {};  // of this lane: again, as there are few registers
#pragma unroll
    for (int n = 0; n < 4 * kRowTiles; ++n) {
      const int query = 8 * (n / 4) + 2 * lane_t() + n % 2;
      weight_at(ds, n / 4, n % 4) =
          exchange[query * kKeyPitch + lane_g() + 8 * (n / 2 % 2)];
    }
    finite &= store_keys(ds, shared_rows(0), at.at_kv(dk, grads.dk) + j0 * grads.dk.row,
                         grads.dk.row, num_keys, dim, params.scale);
  }
  ptx::wait_copy_groups<0>();
  __syncthreads();  // all warps have read k and v

  // The sums of all warps, in the memory of their keys: (rows, kDim) of each.
  double* const of_warp = shared_rows(2);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int query = 8 * n + 2 * lane_t() + e, col = 16 * chunk + 2 * lane_g();
        *reinterpret_cast<double2*>(of_warp + warp_index() * kOfRows + query * kDim +
                                    col) = {sums[chunk][n][e], sums[chunk][n][2 + e]};
      }
    }
  }
  __syncthreads();  // the sums are complete
  const index_t entries = params.batch_size * params.num_heads;
  double* const dq_rows =
      kSplitsKeys ? dq + (split.number * entries + at.row_of_heads) * queries * dim
                  : at.at(dq, grads.dq);
  const index_t dq_stride = kSplitsKeys ? dim : grads.dq.row;
#pragma unroll 1
  for (int n = threadIdx.x; n < queries * kDim; n += kNumThreads) {
    const int i = n / kDim, col = n % kDim;
    double sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += of_warp[warp * kOfRows + n];
    finite &= is_finite(sum);
    if (col < dim) dq_rows[i * dq_stride + col] = sum * params.scale;
  }
  if (!finite) *found = 1;
}

// SPDX-License-Identifier: MIT
// attention_vjp_mma_few: gradients of few queries over many keys, in one launch.
//
// Algorithm  All queries of a head are on chip, with lse and
//                delta = rowsum(dO * out) - dlse
//            and a block loops over tiles of keys. A warp has 16 of them:
//                S = score(k q^T),  P = exp(S - lse),  dP = v dO^T
//                dS = P (dP - delta) score'(k q^T)
//                dv = P dO,  dk = scale dS q
//            and, once dS of all keys of the tile is complete, some columns of
//                dq += scale dS^T k
// Grid       1-D, one block of kWarps warps per head; with LOOP_SPLITS several share
//            the keys of a head, and write terms of dq
// Tiles      q, dO   kBlockM x kHeadDim (kHeadDimV)  shared, once per block
//            k, v    kBlockN x kHeadDim (kHeadDimV)  shared; the next v loads after dP,
//                                                    the next k after dq
//            dS      kBlockN x kBlockM               shared, as elem_t
//            S, P    a warp has 16 keys and all queries in registers: the accumulators
//                    are the left operand of the next product
//            dq      registers, transposed: a warp has some columns of all queries
// Memory     global: k, v, dk and dv once; q, dO and out once per block
// Numbers    S, P, dP, dS and sums in float32; P and dS rounded to 16 bits before
//            products. The same bits in every run
// Limits     kBlockM queries; head_dim and head_dim_v up to kHeadDim and kHeadDimV,
//            padded with zeros; one query head per head of k; sm_80 or newer.
//            Infinities and NaN that a query does not see still turn into NaN, as does
//            a dS too large for elem_t: *nonfinite then asks for another kernel
#include "attention/simt/loop_splits.cuh"
#include "attention/sm80/short_backward.cuh"

static_assert(kBlockN == kRows * kWarps && kBlockM <= kBlockN && kBlockM % kRows == 0);
#ifdef LOOP_SPLITS
using grad_q_t = float;  // terms: (splits, heads, queries, head_dim)
#else
using grad_q_t = elem_t;
#endif

// FEW_GRADS of _attention/gpu/sm80/few_backward.py is the same struct on the host.
struct few_grads_t {
  operand_t dout, lse, dlse, dq, dk, dv;
};

static_assert(!kSplits);                  // 16 bits
constexpr int kQueryTiles = kBlockM / 8;  // accumulators over the queries
// Accumulators of dq: 16 columns by 8 queries.
constexpr int kOfWarp = (kHeadDim / kRows + kWarps - 1) / kWarps;

// Shared memory, in memory order.
struct smem_t {
  matrix_q q, k;
  matrix_v dout, v;
  matrix_t<kBlockM> ds;  // a row for each key
  float *lse, *delta;    // of each query
  unsigned* largest;     // max |dO| of 16 queries, as the bits of a float

  __device__ __forceinline__ explicit smem_t(unsigned char* bytes) {
    q.rows = bytes;
    k.rows = q.rows + matrix_q::bytes(kBlockM);
    dout.rows = k.rows + matrix_q::bytes(kBlockN);
    v.rows = dout.rows + matrix_v::bytes(kBlockM);
    ds.rows = v.rows + matrix_v::bytes(kBlockN);
    lse = reinterpret_cast<float*>(ds.rows + matrix_t<kBlockM>::bytes(kBlockN));
    delta = lse + kBlockM;
    largest = reinterpret_cast<unsigned*>(delta + kBlockM);
  }
};

// sums[n] = sum(dO_i * out_i) of query i = warp + n kWarps, by a warp; 0 where out is
// 0, even if dO is NaN. The loads of all its queries are under way at a time.
constexpr int kQueriesOfWarp = kBlockM / kWarps;
__device__ __forceinline__ void dot_out(float (&sums)[kQueriesOfWarp],
                                        const elem_t* out, const operand_t& of_out,
                                        const matrix_v& dout, int num_queries,
                                        int dim) {
#pragma unroll
  for (float& sum : sums) sum = 0;
#pragma unroll 1
  for (int d = lane_index(); d < dim; d += kWarpSize) {
    float loaded[kQueriesOfWarp];
#pragma unroll
    for (int n = 0; n < kQueriesOfWarp; ++n) {
      const int i = warp_index() + n * kWarps;
      loaded[n] = i < num_queries ? to<float>(out[i * of_out.row + d * of_out.col]) : 0;
    }
#pragma unroll
    for (int n = 0; n < kQueriesOfWarp; ++n) {
      const float o = loaded[n];
      const elem_t down = *dout.at(warp_index() + n * kWarps, d);
      if (o != 0) sums[n] = fmaf(o, to<float>(down), sums[n]);
    }
  }
#pragma unroll
  for (float& sum : sums) {
    sum = warp_reduce(sum, [](float a, float b) { return a + b; });
  }
}

// keys queries^T for 16 keys of a tile, from `row` on.
template <int kCols>
__device__ __forceinline__ void multiply(sums_t<kQueryTiles>& sums,
                                         const matrix_t<kCols>& keys, int row,
                                         const matrix_t<kCols>& queries) {
#pragma unroll
  for (int e = 0; e < 4 * kQueryTiles; ++e) sums[e / 4][e % 4] = 0;
  add_products<kCols / kStep, true>(
      sums, [&](int step) { return left(keys, row, step); },
      [&](int tile, int step, right_t(&pair)[2]) { right(queries, tile, step, pair); });
}

// Stores weights^T rows times `factor`: 16 rows of dk or dv. Returns whether a number
// is not finite.
template <int kCols>
__device__ __forceinline__ bool store_weighted(const sums_t<kQueryTiles>& weights,
                                               const matrix_t<kCols>& rows,
                                               const target_t<elem_t>& target,
                                               float factor) {
  bool found = false;
#pragma unroll 1
  for (int col = 0; col < kCols; col += kChunk<kCols>) {
    sums_t<kChunk<kCols> / 8> sums = {};
    add_products<kBlockM / kStep, false>(
        sums, [&](int step) { return left_of<kQueryTiles>(weights, step); },
        [&](int tile, int step, right_t(&pair)[2]) {
          right_trans(rows, col / 8 + tile, step, pair);
        });
    found |= any_nonfinite(sums);
    store_rows(target.from(col), sums, {factor, factor});
  }
  return found;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_mma_few(
        QKV_PARAMETERS,
        const elem_t* __restrict__ dout,            // (batch, heads, queries, ..)
        const elem_t* __restrict__ out,             // as dout
        const float* __restrict__ lse,              // (batch, heads, queries)
        const float* __restrict__ dlse,             // as lse, or null
        float* __restrict__ delta,                  // as lse, contiguous
        LOOP_PARAMETERS grad_q_t* __restrict__ dq,  // as q, or terms
        elem_t* __restrict__ dk,                    // as k
        elem_t* __restrict__ dv,                    // as v
        int* __restrict__ nonfinite,                // 1: a gradient is not finite
        SCORE_PARAMETERS, const __grid_constant__ few_grads_t grads) {
  extern __shared__ __align__(128) unsigned char bytes[];
  const smem_t smem(bytes);
  const index_t split = split_index(num_splits);
  const tile_coord_t at(params, work_index(num_splits));
  if (!at.exists) return;
  const int thread = threadIdx.x, lane = lane_index(), warp = warp_index();
  const int seqlen_q = static_cast<int>(params.seqlen_q);
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);
  const float scale = static_cast<float>(params.scale);
  const scores_t scores(at, SCORE_ARGUMENTS);
  // No query sees keys from here on: they count as zeros, whatever they are.
  const index_t last_key = scores.keys_of(0, seqlen_q).last;
  const index_t tiles = (params.seqlen_k + kBlockN - 1) / kBlockN;
  const index_t begin = divide(tiles * split, num_splits);
  const index_t end = divide(tiles * (split + 1), num_splits);

  const auto keys_of = [&](index_t tile) {
    return static_cast<int>(clamp(last_key - tile * kBlockN, 0, kBlockN));
  };
  const auto load_k = [&](index_t tile) {
    smem.k.load<kBlockN, kNumThreads>(
        at.at_kv(k, params.k) + tile * kBlockN * params.k.row, params.k.row,
        keys_of(tile), dim, thread);
  };
  const auto load_v = [&](index_t tile) {
    smem.v.load<kBlockN, kNumThreads>(
        at.at_kv(v, params.v) + tile * kBlockN * params.v.row, params.v.row,
        keys_of(tile), dim_v, thread);
  };
  smem.dout.load<kBlockM, kNumThreads>(at.at(dout, grads.dout), grads.dout.row,
                                       seqlen_q, dim_v, thread);
  ptx::commit_copies();
  smem.q.load<kBlockM, kNumThreads>(at.at(q, params.q), params.q.row, seqlen_q, dim,
                                    thread);
  load_k(begin);
  load_v(begin);
  ptx::commit_copies();
  ptx::wait_copy_groups<1>();
  sync_warps();  // dO has arrived
  float sums_of_out[kQueriesOfWarp];
  dot_out(sums_of_out, at.at(out, params.out), params.out, smem.dout, seqlen_q, dim_v);
#pragma unroll
  for (int n = 0; n < kQueriesOfWarp; ++n) {
    const int i = warp + n * kWarps;
    if (lane != 0) continue;
    float lse_i = infinity<float>(), delta_i = 0;  // where there is no query, P is 0
    if (i < seqlen_q) {
      lse_i = at.at(lse, grads.lse)[i * grads.lse.row];
      delta_i = sums_of_out[n];
      if (dlse != nullptr) delta_i -= at.at(dlse, grads.dlse)[i * grads.dlse.row];
      if (!scores.is_query(i)) delta_i = 0;
      if (split == 0) delta[at.row_of_heads * seqlen_q + i] = delta_i;
    }
    // A query that sees no key has hidden scores alone, and any finite lse will do.
    smem.lse[i] = lse_i == -infinity<float>() ? 0 : lse_i;
    smem.delta[i] = delta_i;
  }
  if (kNarrow && warp < kBlockM / kRows) {
    smem.largest[warp] = largest_of_rows(smem.dout, warp * kRows);
  }

  sums_t<kQueryTiles> sums_q[kOfWarp] = {};
  float factor = 1;
  bool found = false;
#pragma unroll 1
  for (index_t tile = begin; tile < end; ++tile) {
    ptx::wait_copies();
    sync_warps();  // k and v have arrived
    if (kNarrow && tile == begin) factor = factor_of_ds(smem.largest);
    const int row = warp * kRows;
    const index_t j0 = tile * kBlockN + row;
    sums_t<kQueryTiles> p, ds;
    multiply(p, smem.k, row, smem.q);
    multiply(ds, smem.v, row, smem.dout);
    const mask_bounds_t bounds = scores.mask_bounds(0, j0);
    const bool sees_all = bounds.sees_all(seqlen_q, kRows);
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      const int query = 8 * n + lane % 4 * 2;
      const float2 of_lse = *reinterpret_cast<const float2*>(smem.lse + query);
      const float2 of_delta = *reinterpret_cast<const float2*>(smem.delta + query);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = query + e % 2, key = lane / 4 + e / 2 * 8;
        float derivative = 1, s = -infinity<float>();
        if (sees_all || bounds.sees(i, key)) {
          s = scores.with_derivative(p[n][e], smaller(i, seqlen_q - 1), j0 + key,
                                     derivative);
        }
        const float weight = weight_of(s, e % 2 ? of_lse.y : of_lse.x);
        const float x = weight * (ds[n][e] - (e % 2 ? of_delta.y : of_delta.x));
        p[n][e] = weight * kFactorP;
        ds[n][e] = is_unseen(weight) ? 0.f : x * derivative * factor;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        elem_t* const to_pair = smem.ds.at(row + lane / 4 + 8 * r, query);
        *reinterpret_cast<unsigned*>(to_pair) =
            pair16_t::from(ds[n][2 * r], ds[n][2 * r + 1]);
      }
    }
    sync_warps();  // dS is complete, and v was read
    const bool has_next = tile + 1 < end;
    if (has_next) load_v(tile + 1);
#pragma unroll
    for (int n = 0; n < kOfWarp; ++n) {
      const int col = (warp + n * kWarps) * kRows;
      if (col >= kHeadDim) break;
      sums_t<kQueryTiles> sums = {};
      add_products<kBlockN / kStep, true>(
          sums, [&](int step) { return left_trans(smem.k, col, step); },
          [&](int tile_of_queries, int step, right_t(&pair)[2]) {
            right_trans(smem.ds, tile_of_queries, step, pair);
          });
#pragma unroll
      for (int e = 0; e < 4 * kQueryTiles; ++e)
        sums_q[n][e / 4][e % 4] += sums[e / 4][e % 4];
    }
    sync_warps();  // k and dS were read
    if (has_next) load_k(tile + 1);
    const int num_keys = static_cast<int>(clamp(params.seqlen_k - j0, 0, kRows));
    const auto target_of = [&](elem_t* x, const operand_t& of, int columns) {
      return target_t<elem_t>{at.at_kv(x, of) + j0 * of.row, of.row, of.col, num_keys,
                              columns};
    };
    found |= store_weighted(p, smem.dout, target_of(dv, grads.dv, dim_v), 1 / kFactorP);
    found |= store_weighted(ds, smem.q, target_of(dk, grads.dk, dim), scale / factor);
  }

  const index_t heads = params.batch_size * params.num_heads;
  grad_q_t* const rows_q = kSplitsLoop
                               ? dq + (split * heads + at.row_of_heads) * seqlen_q * dim
                               : at.at(dq, grads.dq);
  const index_t row_stride = kSplitsLoop ? dim : grads.dq.row;
  const index_t col_stride = kSplitsLoop ? 1 : grads.dq.col;
#pragma unroll
  for (int n = 0; n < kOfWarp; ++n) {
    const int first = (warp + n * kWarps) * kRows;
    if (first >= kHeadDim) break;
    found |= any_nonfinite(sums_q[n]);
#pragma unroll
    for (int e = 0; e < 4 * kQueryTiles; ++e) {
      const int query = e / 4 * 8 + lane % 4 * 2 + e % 2;
      const int col = first + lane / 4 + e % 4 / 2 * 8;
      if (query < seqlen_q && col < dim) {
        rows_q[query * row_stride + col * col_stride] =
            to<grad_q_t>(sums_q[n][e / 4][e % 4] * (scale / factor));
      }
    }
  }
  if (found) *nonfinite = 1;
}

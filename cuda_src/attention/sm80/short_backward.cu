// SPDX-License-Identifier: MIT
// attention_vjp_mma_short: gradients of thousands of entries with few queries and keys
// each, or with few keys alone, in one launch.
//
// Algorithm  All keys of a head and kBlockM of its queries are on chip. A warp computes
//            16 rows of
//                S = score(q k^T),  P = exp(S - lse),  dP = dO v^T
//                delta = rowsum P dP - dlse,  dS = P (dP - delta) score'(q k^T)
//                dq = scale dS k
//            and, once P and dS of all rows are complete, some columns for 16 keys of
//                dv = P^T dO,  dk = scale dS^T q
//            Several warps share the rows of more than 128 columns: each multiplies
//            some columns, and all add the sums of all
// Grid       1-D, one block of kWarps warps per head of k and v; it loops over tiles of
//            kBlockM queries of the heads of a group and sums dk and dv. With two
//            stages, the next tile is loaded meanwhile. With LOOP_SPLITS several blocks
//            share the loop, and write terms of dk and dv
// Tiles      k, v   kBlockN x kHeadDim (kHeadDimV)  shared, once per head
//            q, dO  kBlockM x kHeadDim (kHeadDimV)  shared, kStages of them
//            P, dS  kBlockM x kBlockN               shared, as elem_t; in float32 where
//                                                   v and k were
//            S or dP of each warp                   shared, where several share rows
//            dk, dv of several tiles of queries     registers or shared, in float32
//            S, dP, dq, dk, dv                      registers, laid out as in short.cuh
// Memory     global: each array once, except out, which is read for delta only where
//            lse covers keys of other calls
// Numbers    S, P, dP, dS and sums in float32; P and dS rounded to 16 bits before
//            products, float32 split into tf32 numbers. lse is recomputed from these
//            scores and used if it equals the given one up to rounding, so that P sums
//            to 1. The same bits in every run
// Limits     kBlockN keys; head_dim and head_dim_v up to kHeadDim
//            and kHeadDimV, padded with zeros; sm_80 or newer. Infinities and NaN that
//            a query does not see still turn into NaN, as does a dS too large for
//            elem_t: *nonfinite then asks for another kernel, which reads delta
#include "attention/simt/loop_splits.cuh"
#include "attention/sm80/short_backward.cuh"
#include "ptx/barrier.cuh"

#ifndef GROUPED
#error "GROUPED comes from the host"
#endif
#ifndef STAGES
#define STAGES 1
#endif
constexpr bool kGrouped = GROUPED;  // several tiles of queries share k and v
constexpr int kStages = STAGES;     // tiles of queries on chip
static_assert(kBlockM <= 16 * kWarps && kBlockN <= 16 * kWarps);
static_assert(kGrouped || !kSplitsLoop);
#ifdef LOOP_SPLITS
using grad_kv_t = float;  // terms: (splits, heads of k and v, keys, head_dim)
#else
using grad_kv_t = elem_t;
#endif

// SHORT_GRADS of _attention/gpu/sm80/short_backward.py is the same struct on the host.
struct short_grads_t {
  operand_t dout, lse, dlse, dq, dk, dv;
};

using matrix_p = matrix_t<(kBlockN + 15) / 16 * 16>;

// Warps that share 16 queries of wide heads.
__host__ __device__ constexpr int warps_of_rows() {
  int warps = kHeadDim > 128 || kHeadDimV > 128 ? kWarps / (kBlockM / kRows) : 1;
  while (warps > 1 && (kHeadDim % (16 * warps) != 0 || kHeadDimV % (16 * warps) != 0)) {
    warps -= 1;
  }
  return warps;
}
constexpr int kSharing = warps_of_rows();

// float32 needs so much shared memory that few blocks fit: dS takes the place of v, and
// P that of k, once these have been read for the last time.
constexpr bool kReuses = kSplits && !kGrouped &&
                         matrix_p::bytes(kBlockM) <= matrix_q::bytes(kBlockN) &&
                         matrix_p::bytes(kBlockM) <= matrix_v::bytes(kBlockN);

// Shared memory of the warps of a head, in memory order.
struct smem_t {
  matrix_q k;
  matrix_v v;
  unsigned char* stages;
  matrix_p p, ds;
  unsigned* largest;  // max |dO| of 16 rows, as the bits of a float
  float4* exchanged;  // of each warp
  float4* kept;       // of kept_t

  static constexpr unsigned kStageBytes =
      matrix_q::bytes(kBlockM) + matrix_v::bytes(kBlockM);

  __device__ __forceinline__ explicit smem_t(unsigned char* bytes) {
    k.rows = bytes;
    v.rows = k.rows + matrix_q::bytes(kBlockN);
    stages = v.rows + matrix_v::bytes(kBlockN);
    unsigned char* const weights = stages + kStages * kStageBytes;
    constexpr unsigned kBytes = kReuses ? 0 : matrix_p::bytes(kBlockM);
    p.rows = kReuses ? k.rows : weights;
    ds.rows = kReuses ? v.rows : weights + kBytes;
    largest = reinterpret_cast<unsigned*>(weights + 2 * kBytes);
    exchanged = reinterpret_cast<float4*>(largest + 4 * kWarps);
    kept = exchanged + (kSharing > 1 ? kNumThreads * kKeyTiles : 0);
  }
  // A tile of queries.
  __device__ __forceinline__ matrix_q q(int stage) const {
    return {stages + stage * kStageBytes};
  }
  __device__ __forceinline__ matrix_v dout(int stage) const {
    return {q(stage).rows + matrix_q::bytes(kBlockM)};
  }
};

// Whether a recomputed lse is the given one up to the rounding of two kernels.
__device__ __forceinline__ bool is_same_lse(float own, float given) {
  constexpr float kUnits = kParts == 2 ? 0x1p-22f : kSplits ? 0x1p-11f : 0x1p-16f;
  return fabsf(own - given) <= kUnits * fmaxf(1.f, fabsf(given));
}

// sum(dO_i * out_i), by a warp; 0 where out is 0, even if dO is NaN. All loads are
// under way at a time, unless float32 with many keys has no registers for them.
__device__ __forceinline__ float dot_out(const elem_t* out, index_t col_stride,
                                         const elem_t* dout, int dim) {
  constexpr int kLoads =
      kSplits && kKeyTiles > 4 ? 1 : (kHeadDimV + kWarpSize - 1) / kWarpSize;
  float sum = 0;
#pragma unroll 1
  for (int first = lane_index(); first < dim; first += kLoads * kWarpSize) {
    float loaded[kLoads];
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int d = first + n * kWarpSize;
      loaded[n] = d < dim ? to<float>(out[d * col_stride]) : 0.f;
    }
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const float o = loaded[n];
      if (o != 0) sum = fmaf(o, to<float>(dout[first + n * kWarpSize]), sum);
    }
  }
  return warp_reduce(sum, [](float a, float b) { return a + b; });
}

// s = x y^T for the rows that kSharing warps share, of which this one is number
// `sharer`. All have the same bits. `exchanged` is free again after a barrier.
template <int kCols>
__device__ __forceinline__ void multiply_shared_rows(sums_t<kKeyTiles>& s,
                                                     const matrix_t<kCols>& x, int row,
                                                     const matrix_t<kCols>& y,
                                                     int sharer, float4* exchanged) {
  if constexpr (kSharing == 1) return multiply_rows(s, x, row, y);
  constexpr int kSteps = kCols / kSharing / kStep;
  multiply_columns<kSteps>(s, x, row, y, sharer * kSteps);
  constexpr int kOfSharer = kBlockM / kRows * kKeyTiles * kWarpSize;
  float4* const of_row = exchanged + row / kRows * kKeyTiles * kWarpSize + lane_index();
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
    of_row[sharer * kOfSharer + n * kWarpSize] =
        make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
  }
  ptx::bar_sync<kSharing * kWarpSize>(1 + row / kRows);
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
    for (int other = 0; other < kSharing; ++other) {
      const float4 sums = of_row[other * kOfSharer + n * kWarpSize];
      const float numbers[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = other == 0 ? numbers[e] : s[n][e] + numbers[e];
      }
    }
  }
  mend_nonfinite(s, x, row, y);
}

// Stores accumulators, times `factor`, as 16 rows of P or dS.
__device__ __forceinline__ void store_weights(const matrix_p& matrix, int row,
                                              const sums_t<kKeyTiles>& x,
                                              float factor) {
#pragma unroll
  for (int n = 0; n < (kBlockN + 15) / 16 * 2; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = n < kKeyTiles;  // not so after an odd number of tiles
      const float low = exists ? x[n][2 * r] * factor : 0.f;
      const float high = exists ? x[n][2 * r + 1] * factor : 0.f;
      elem_t* const to_pair =
          matrix.at(row + lane_index() / 4 + 8 * r, 8 * n + lane_index() % 4 * 2);
      if constexpr (kSplits) {
        *reinterpret_cast<float2*>(to_pair) = make_float2(low, high);
      } else {
        *reinterpret_cast<unsigned*>(to_pair) = pair16_t::from(low, high);
      }
    }
  }
}

// With many keys, float32 has no registers for dS as the left operand of all steps:
// each lane reads again what it has stored.
constexpr bool kReadsDs = kSplits && kKeyTiles > 4;
static_assert(!kReadsDs || kSharing == 1);

// Stored rows [row, row + 16) as left_of() has them.
__device__ __forceinline__ left_t left_stored(const matrix_p& weights, int row,
                                              int step) {
  const elem_t* const from =
      weights.at(row + lane_index() / 4, kStep * step + lane_index() % 4 * 2);
  const uint2 upper = *reinterpret_cast<const uint2*>(from);
  const uint2 lower =
      *reinterpret_cast<const uint2*>(from + kRows / 2 * matrix_p::kNextRow);
  const unsigned words[4] = {upper.x, lower.x, upper.y, lower.y};
  left_t operand;
  split_words(words, operand.parts);
  return operand;
}

// The 16 queries of this warp: in global memory, if they exist, and in smem_t.
struct rows_t {
  const elem_t* out;
  const float *lse, *dlse;
  float* delta;
  int i0, num_rows;
  int in_tile;  // the first of them there

  // A row, or the last one in place of one that does not exist.
  __device__ __forceinline__ int existing(int row) const {
    return min(row, (kGrouped ? max(num_rows, 1) : num_rows) - 1);
  }
};

// Turns products q k^T and dO v^T of 16 queries into P and dS.
__device__ __forceinline__ void differentiate(sums_t<kKeyTiles>& s,
                                              sums_t<kKeyTiles>& dp,
                                              const scores_t& scores,
                                              const rows_t& rows, const matrix_v& dout,
                                              const params_t& params,
                                              const short_grads_t& grads) {
  const int lane = lane_index();
  const seen_t sees(scores.mask_bounds(rows.i0, 0));
  float derivatives[kHasDerivative ? kKeyTiles : 1][4];
#pragma unroll
  for (int e = 0; e < 4 * kKeyTiles; ++e) {
    const int row = lane / 4 + e % 4 / 2 * 8, key = e / 4 * 8 + lane % 4 * 2 + e % 2;
    float& score = s[e / 4][e % 4];
    float derivative = 1;
    score = sees(e % 4 / 2, key) ? scores.with_derivative(score, index_t(rows.i0 + row),
                                                          index_t(key), derivative)
                                 : -infinity<float>();
    if constexpr (kHasDerivative) derivatives[e / 4][e % 4] = derivative;
  }
  float m[2], l[2], factor[2], delta[2];
  bool is_given[2];  // whether lse covers keys of other calls
  weigh(s, m, l);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = rows.existing(lane / 4 + 8 * r);
    const float given = rows.lse[row * grads.lse.row];
    const finished_t own = scores.finish(rows.i0 + row, m[r], l[r]);
    is_given[r] = l[r] != 0 && !is_same_lse(own.lse, given);
    factor[r] = is_given[r] ? exp_of(m[r] - given) : own.inverse;
    delta[r] = 0;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        s[n][e] *= factor[r];
        delta[r] += is_unseen(s[n][e]) ? 0.f : s[n][e] * dp[n][e];
      }
    }
    delta[r] = over_row(delta[r], [](float a, float b) { return a + b; });
  }
  // Of one key some rows are taken for such by the rounding of their score: few, so
  // that these alone are read.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    unsigned left = __ballot_sync(kFullMask, is_given[r] && lane % 4 == 0);
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int n = (__ffs(static_cast<int>(left)) - 1) / 4;
      const int row = rows.existing(n + 8 * r);
      const float sum =
          dot_out(rows.out + row * params.out.row, params.out.col,
                  dout.at(rows.in_tile + row, 0), static_cast<int>(params.head_dim_v));
      if (lane / 4 == n) delta[r] = sum;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    if (row < rows.num_rows) {
      if (rows.dlse != nullptr) delta[r] -= rows.dlse[row * grads.dlse.row];
      if (!scores.is_query(rows.i0 + row)) delta[r] = 0;
      if (lane % 4 == 0) rows.delta[row] = delta[r];
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        dp[n][e] = s[n][e] * (dp[n][e] - delta[r]);
        if constexpr (kHasDerivative) dp[n][e] *= derivatives[n][e];
      }
    }
  }
}

// A job is 16 keys and some columns of dk or dv: as many as a warp computes at a time,
// or fewer if some warps would have none.
constexpr int kTilesOfKeys = (kBlockN + kRows - 1) / kRows;
template <int kCols> __host__ __device__ constexpr int columns_of_job() {
  int columns = kChunk<kCols>;
  while ((kGrouped || kSplits) && kTilesOfKeys * (kCols / columns) < kWarps &&
         columns % 32 == 0) {
    columns /= 2;
  }
  return columns;
}
template <int kCols>
constexpr int kJobs = kTilesOfKeys * (kCols / columns_of_job<kCols>());
// Accumulators of a thread over all its jobs.
template <int kCols>
constexpr int kKept =
    (kJobs<kCols> + kWarps - 1) / kWarps * (columns_of_job<kCols>() / 8);

// dk or dv of the tiles of queries before, as accumulators of this thread: in
// registers, if they and those of S and dP are few.
constexpr int kMostNumbers = kHeadDim > 128 || kHeadDimV > 128 ? 168 : 72;
constexpr bool kInRegisters =
    kGrouped &&
    8 * kKeyTiles + 4 * (kKept<kHeadDim> + kKept<kHeadDimV>) <= kMostNumbers;
template <int kCols> struct kept_t {
  float4 numbers[kInRegisters ? kKept<kCols> : 1];
  float4* shared;

  __device__ __forceinline__ float4& operator[](int n) {
    if constexpr (kInRegisters) return numbers[n];
    return shared[n * kNumThreads];
  }
};

// Computes weights^T rows times `unit` for all keys, of which warp `warp` takes some
// columns, and stores them to `target`. With several tiles of queries, they are first
// summed in `kept`. Returns whether a number is not finite.
template <int kCols>
__device__ __forceinline__ bool add_weighted(const matrix_p& weights, int warp,
                                             const matrix_t<kCols>& rows,
                                             const target_t<grad_kv_t>& target,
                                             float unit, kept_t<kCols>& kept,
                                             bool is_first, bool is_last) {
  constexpr int kColumns = columns_of_job<kCols>(), kTiles = kColumns / 8;
  bool found = false;
  // With as many warps as tiles of keys, a warp has all columns of a tile.
  constexpr bool kOwnsKeys = kTilesOfKeys == kWarps;
  constexpr int kOfWarp = (kJobs<kCols> + kWarps - 1) / kWarps;
#pragma unroll(kInRegisters ? kOfWarp : 1)
  for (int n = 0; n < kOfWarp; ++n) {
    const int job = warp + n * kWarps;
    if (job >= kJobs<kCols>) break;
    const int key = (kOwnsKeys ? warp : job % kTilesOfKeys) * kRows;
    const int col = (kOwnsKeys ? n : job / kTilesOfKeys) * kColumns;
    sums_t<kTiles> sums = {};
    add_products<kBlockM / kStep, true>(
        sums, [&](int step) { return left_trans(weights, key, step); },
        [&](int tile, int step, right_t(&pair)[2]) {
          right_trans(rows, col / 8 + tile, step, pair);
        });
    if constexpr (kGrouped) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float4& place = kept[n * kTiles + tile];
        const float4 before = is_first ? make_float4(0, 0, 0, 0) : place;
        float (&sum)[4] = sums[tile];
        sum[0] = fmaf(sum[0], unit, before.x);
        sum[1] = fmaf(sum[1], unit, before.y);
        sum[2] = fmaf(sum[2], unit, before.z);
        sum[3] = fmaf(sum[3], unit, before.w);
        if (!is_last) place = make_float4(sum[0], sum[1], sum[2], sum[3]);
      }
    }
    if (kGrouped && !is_last) continue;
    found |= any_nonfinite(sums);
    const float factor = kGrouped ? 1.f : unit;
    const target_t<grad_kv_t> of_keys = {target.x + key * target.row, target.row,
                                         target.col, min(target.num_rows - key, kRows),
                                         target.dim};
    store_rows(of_keys.from(col), sums, {factor, factor});
  }
  return found;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_mma_short(
        QKV_PARAMETERS,
        const elem_t* __restrict__ dout,          // (batch, heads, queries, head_dim_v)
        const elem_t* __restrict__ out,           // as dout
        const float* __restrict__ lse,            // (batch, heads, queries)
        const float* __restrict__ dlse,           // as lse, or null
        float* __restrict__ delta,                // as lse, contiguous
        LOOP_PARAMETERS elem_t* __restrict__ dq,  // as q
        grad_kv_t* __restrict__ dk,               // as k, or terms
        grad_kv_t* __restrict__ dv,               // as v, or terms
        int* __restrict__ nonfinite,  // set to 1 if a gradient is not finite
        SCORE_PARAMETERS, const __grid_constant__ short_grads_t grads) {
  extern __shared__ __align__(128) unsigned char bytes[];
  const smem_t smem(bytes);
  const int group = kGrouped ? static_cast<int>(params.group_size) : 1;
  const int seqlen_q = static_cast<int>(params.seqlen_q);
  const int seqlen_k = static_cast<int>(params.seqlen_k);
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);
  const float scale = static_cast<float>(params.scale);
  tile_coord_t at(params, work_index(num_splits) * group);
  if (!at.exists) return;
  const int thread = threadIdx.x;
  constexpr int kRowTiles = kBlockM / kRows;
  const int sharer = kSharing == 1 ? 0 : warp_index() / kRowTiles;
  const int first = (kSharing == 1 ? warp_index() : warp_index() % kRowTiles) * kRows;

  // Tiles of queries over the heads of a group: of these a block has `begin` to `end`.
  const int tiles = kGrouped ? (seqlen_q + kBlockM - 1) / kBlockM : 1;  // of a head
  int begin = 0, end = group * tiles, i0 = 0;
  if constexpr (kSplitsLoop) {
    const index_t split = split_index(num_splits), units = end;
    begin = static_cast<int>(divide(units * split, num_splits));
    end = static_cast<int>(divide(units * (split + 1), num_splits));
    const int head = begin / tiles;
    i0 = (begin - head * tiles) * kBlockM;
    at.head += head, at.row_of_heads += head;
  }
  const auto load_q = [&](const tile_coord_t& of, int i0, int stage) {
    smem.q(stage).load<kBlockM, kNumThreads>(of.at(q, params.q) + i0 * params.q.row,
                                             params.q.row, min(seqlen_q - i0, kBlockM),
                                             dim, thread);
    ptx::commit_copies();
  };
  const auto load_dout = [&](const tile_coord_t& of, int i0, int stage) {
    smem.dout(stage).load<kBlockM, kNumThreads>(
        of.at(dout, grads.dout) + i0 * grads.dout.row, grads.dout.row,
        min(seqlen_q - i0, kBlockM), dim_v, thread);
    ptx::commit_copies();
  };
  // What the first product reads is loaded first.
  smem.k.load<kBlockN, kNumThreads>(at.at_kv(k, params.k), params.k.row, seqlen_k, dim,
                                    thread);
  load_q(at, i0, 0);
  smem.v.load<kBlockN, kNumThreads>(at.at_kv(v, params.v), params.v.row, seqlen_k,
                                    dim_v, thread);
  load_dout(at, i0, 0);
  kept_t<kHeadDim> kept_k;
  kept_t<kHeadDimV> kept_v;
  kept_k.shared = smem.kept + thread;
  kept_v.shared = kept_k.shared + kKept<kHeadDim> * kNumThreads;
  bool found = false;
  for (int unit = begin; unit < end; ++unit) {
    const int num_queries = min(seqlen_q - i0, kBlockM);
    if (kStages == 1 && unit > begin) {
      sync_warps();  // all warps have read the tile before
      load_q(at, i0, 0);
      load_dout(at, i0, 0);
    }
    const int stage = (unit - begin) % kStages;
    const matrix_q smem_q = smem.q(stage);
    const matrix_v smem_dout = smem.dout(stage);
    const bool has_queries = kSharing == 1 ? first < kBlockM : sharer < kSharing;
    sums_t<kKeyTiles> s, dp;
    ptx::wait_copy_groups<1>();
    sync_warps();  // q and k have arrived
    if (has_queries) {
      multiply_shared_rows(s, smem_q, first, smem.k, sharer, smem.exchanged);
    }
    ptx::wait_copies();
    sync_warps();  // v and dO have arrived, and all warps have read the tile before
    if (kStages > 1 && unit + 1 < end) {
      tile_coord_t next = at;
      if (i0 + kBlockM >= seqlen_q) ++next.head;
      const int next_i0 = next.head == at.head ? i0 + kBlockM : 0;
      load_q(next, next_i0, (stage + 1) % kStages);
      load_dout(next, next_i0, (stage + 1) % kStages);
    }
    if (has_queries) {
      if constexpr (kNarrow) {
        smem.largest[first / kRows] = largest_of_rows(smem_dout, first);
      }
      multiply_shared_rows(dp, smem_dout, first, smem.v, sharer, smem.exchanged);
      const scores_t scores(at, SCORE_ARGUMENTS);
      const int row = kGrouped ? min(i0 + first, seqlen_q - 1) : first;
      const rows_t rows = {
          at.at(out, params.out) + row * params.out.row,
          at.at(lse, grads.lse) + row * grads.lse.row,
          dlse == nullptr ? nullptr : at.at(dlse, grads.dlse) + row * grads.dlse.row,
          delta + at.row_of_heads * seqlen_q + row,
          i0 + first,
          min(num_queries - first, kRows),
          first};
      differentiate(s, dp, scores, rows, smem_dout, params, grads);
    }
    if constexpr (kNarrow || kReuses) sync_warps();  // maxima are stored, v was read
    const float factor = factor_of_ds(smem.largest);
    if (has_queries) {
      if constexpr (kNarrow) {
#pragma unroll
        for (int e = 0; e < 4 * kKeyTiles; ++e) dp[e / 4][e % 4] *= factor;
      }
      if (kSharing == 1 || sharer == 0) {
        store_weights(smem.ds, first, dp, 1);
        if constexpr (!kReuses) store_weights(smem.p, first, s, kFactorP);
      }
      const target_t<elem_t> target = {
          at.at(dq, grads.dq) + (i0 + first) * grads.dq.row, grads.dq.row, grads.dq.col,
          min(num_queries - first, kRows), dim};
#pragma unroll 1
      for (int col = sharer * kChunk<kHeadDim>; col < kHeadDim;
           col += kSharing * kChunk<kHeadDim>) {
        sums_t<kChunk<kHeadDim> / 8> sums_q = {};
        add_products<kBlockN / kStep, kReadsDs>(
            sums_q,
            [&](int step) {
              if constexpr (kReadsDs) return left_stored(smem.ds, first, step);
              return left_of<kKeyTiles>(dp, step);
            },
            [&](int tile, int step, right_t(&pair)[2]) {
              right_trans(smem.k, col / 8 + tile, step, pair);
            });
        found |= any_nonfinite(sums_q);
        store_rows(target.from(col), sums_q, {scale / factor, scale / factor});
      }
    }
    sync_warps();  // dS is complete, and k was read
    if constexpr (kReuses) {
      if (has_queries && (kSharing == 1 || sharer == 0)) {
        store_weights(smem.p, first, s, kFactorP);
      }
    }
    const bool is_first = unit == begin, is_last = unit == end - 1;
    const auto target_of = [&](grad_kv_t* x, const operand_t& of, int columns) {
      using keys_t = target_t<grad_kv_t>;
      if constexpr (kSplitsLoop) {
        const index_t heads_kv = divide(params.batch_size * params.num_heads, group);
        const index_t head =
            split_index(num_splits) * heads_kv + work_index(num_splits);
        return keys_t{x + head * seqlen_k * columns, columns, 1, seqlen_k, columns};
      } else {
        return keys_t{at.at_kv(x, of), of.row, of.col, seqlen_k, columns};
      }
    };
    const auto of_k = target_of(dk, grads.dk, dim);
    found |= add_weighted(smem.ds, warp_index(), smem_q, of_k, scale / factor, kept_k,
                          is_first, is_last);
    if constexpr (kReuses) sync_warps();  // P is complete
    const auto of_v = target_of(dv, grads.dv, dim_v);
    // Warps that had fewer columns of dk begin.
    constexpr int kMore = kJobs<kHeadDim> % kWarps;
    const int warp = warp_index() - kMore + (warp_index() < kMore ? kWarps : 0);
    found |= add_weighted(smem.p, warp, smem_dout, of_v, 1 / kFactorP, kept_v, is_first,
                          is_last);
    i0 += kBlockM;
    if (i0 >= seqlen_q) {
      i0 = 0;
      ++at.head, ++at.row_of_heads;
    }
  }
  if (found) *nonfinite = 1;
}

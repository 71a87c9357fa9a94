// SPDX-License-Identifier: MIT
// attention_vjp_mma_bias: dbias by mma.sync. A block computes one tile of it, from all
// the scores that share it.
//
// Algorithm  dbias = sum of dS,  S = q k^T,  P = exp(scale S + bias - lse),
//            dP = dO v^T,  dS = P (dP - delta), over the entries that share the bias,
//            and over queries (SUM_QUERIES) or keys (SUM_KEYS) where all share it
// Grid       1-D, one block per entry of the bias and tile of queries and keys, without
//            the axis that is summed
// Tiles      q, dO  kBlockM x kHeadDim,  k, v  kBlockN x kHeadDim   shared, kStages
//            S, dP, sums   registers; a warp has 32 x 32
// Memory     global: four tiles per tile of scores, mostly from L2; dbias once
// Numbers    S, P, dP and sums in float, in a fixed order: the same bits in every run
// Limits     as attention_vjp_mma
#include "attention/sm80/backward.cuh"
#include "ptx/registers.cuh"

#if !defined(STAGES) || !defined(WARPS_M) || !defined(SUM_QUERIES) || !defined(SUM_KEYS)
#error "STAGES, WARPS_M, SUM_QUERIES and SUM_KEYS come from the host"
#endif
constexpr int kStages = STAGES;
constexpr int kWarpsM = WARPS_M, kWarpsN = kNumWarps / kWarpsM;
constexpr bool kSumQueries = SUM_QUERIES, kSumKeys = SUM_KEYS;
static_assert(!(kSumQueries && kSumKeys));
static_assert(kBlockM == 32 * kWarpsM && kBlockN == 32 * kWarpsN);
static_assert(kStages == 1 || kStages == 2);
// Tiles of 16 x 8 per warp; rows and columns per lane.
constexpr int kRowTiles = 2, kKeyTiles = 4, kRows = 2 * kRowTiles,
              kCols = 2 * kKeyTiles;
constexpr unsigned kBytesM = kBlockM * kHeadDim * 2, kBytesN = kBlockN * kHeadDim * 2;
constexpr unsigned kBytes = 2 * (kBytesM + kBytesN);  // per stage

// If the bias is the only option, fully visible tiles get a loop of their own and the
// bias a base address; with other options both would take too many registers.
static_assert(kHasBias);

// A tile of scores that contributes to the tile of the block.
struct work_tile_t {
  tile_coord_t at;
  int i0, j0;  // first query and key
};
// The next ones, in order, without those in which no query sees a key.
struct list_t {
  work_tile_t work[kWarpSize];
  int count;
  bool is_last;
};

struct alignas(2 * sizeof(grad_t)) pair_of_grads_t {
  grad_t x, y;
};

// Stores two adjacent sums.
__device__ __forceinline__ void store_pair(grad_t* target, index_t col_step, float x,
                                           float y, int columns_left) {
  const pair_of_grads_t pair = {to<grad_t>(x), to<grad_t>(y)};
  const bool is_aligned =
      reinterpret_cast<unsigned long long>(target) % sizeof(pair) == 0;
  if (columns_left > 1 && col_step == 1 && is_aligned) {
    *reinterpret_cast<pair_of_grads_t*>(target) = pair;
    return;
  }
  if (columns_left > 0) target[0] = pair.x;
  if (columns_left > 1) target[col_step] = pair.y;
}

// This lane's rows and columns of the tile.
__device__ __forceinline__ int row_of(int r) {
  return warp_index() % kWarpsM * 32 + lane_index() / 4 + 8 * r;
}
__device__ __forceinline__ int column_of(int c) {
  return warp_index() / kWarpsM * 32 + lane_index() % 4 * 2 + c / 2 * 8 + c % 2;
}

using tile_frag_t = frag_t<kRowTiles, kKeyTiles>;
using stats_tile_t = float[2][2][kBlockM];  // lse and delta of two work tiles

struct dbias_t {
  const params_t& params;
  const grads_t& grads;
  unsigned char* const smem;
  const list_t& list;
  stats_tile_t& stats_of;

  __device__ __forceinline__ unsigned char* stage_of(int n) const {
    return smem + (kStages == 2 ? n % 2 : 0) * kBytes;
  }

  template <int kCount>
  static __device__ __forceinline__ void load_rows(unsigned char* target,
                                                   const elem_t* from, index_t row_step,
                                                   index_t num_rows, index_t dim) {
    load_tile<kCount, kHeadDim>(
        target, from, row_step, static_cast<int>(min(num_rows, index_t(kCount))),
        static_cast<int>(dim), has_aligned_rows(from, row_step, dim),
        tile_t<kHeadDim>::offset);
  }

  // Loads work tile n of the list.
  __device__ __forceinline__ void load(int n, const elem_t* q, const elem_t* k,
                                       const elem_t* v, const elem_t* dout,
                                       const float* stats, index_t stats_m) const {
    if (n < list.count) {
      const work_tile_t& work = list.work[n];
      unsigned char* const to_q = stage_of(n);
      unsigned char* const to_k = to_q + 2 * kBytesM;
      for (int row = threadIdx.x; row < kBlockM; row += kNumThreads) {
        const int i = work.i0 + row, of_block = static_cast<int>(stats_m);
        const int num_rows = static_cast<int>(params.seqlen_q);
        const index_t num_blocks = (num_rows + of_block - 1) / of_block;
        const float* const from =
            stats + (work.at.row_of_heads * num_blocks + i / of_block) * 2 * of_block +
            i % of_block;
        const bool exists = i < num_rows;
        for (int of = 0; of < 2; ++of) {
          ptx::copy_async_or_zero<4>(shared_address(&stats_of[n % 2][of][row]),
                                     exists ? from + of * of_block : stats,
                                     exists ? 4 : 0);
        }
      }
      const index_t i0 = work.i0, j0 = work.j0;
      load_rows<kBlockM>(to_q, work.at.at(q, params.q) + i0 * params.q.row,
                         params.q.row, params.seqlen_q - i0, params.head_dim);
      load_rows<kBlockN>(to_k, work.at.at_kv(k, params.k) + j0 * params.k.row,
                         params.k.row, params.seqlen_k - j0, params.head_dim);
      load_rows<kBlockM>(to_q + kBytesM,
                         work.at.at(dout, grads.dout) + i0 * grads.dout.row,
                         grads.dout.row, params.seqlen_q - i0, params.head_dim_v);
      load_rows<kBlockN>(to_k + kBytesN, work.at.at_kv(v, params.v) + j0 * params.v.row,
                         params.v.row, params.seqlen_k - j0, params.head_dim_v);
    }
    ptx::commit_copies();
  }

  // S = q k^T, dP = dO v^T.
  __device__ __forceinline__ void multiply(tile_frag_t& s, tile_frag_t& dp,
                                           int n) const {
    const unsigned of_q = shared_address(stage_of(n)), of_k = of_q + 2 * kBytesM;
    multiply_scores(s, left<kHeadDim>(of_q, warp_index() % kWarpsM * 32),
                    right<kHeadDim>(of_k, warp_index() / kWarpsM * 32));
    multiply_scores(dp, left<kHeadDim>(of_q + kBytesM, warp_index() % kWarpsM * 32),
                    right<kHeadDim>(of_k + kBytesN, warp_index() / kWarpsM * 32));
  }

  // Adds dS of work tile n to the sums.
  __device__ __forceinline__ void add(tile_frag_t& sums, const tile_frag_t& s,
                                      const tile_frag_t& dp, const scores_t& scores,
                                      int n) const {
    const int i0 = list.work[n].i0, j0 = list.work[n].j0;
    const mask_bounds_t bounds = scores.mask_bounds(i0, j0);
    const bias_t* const bias_tile = scores.bias_at(i0 + row_of(0), j0 + column_of(0));
    auto add_where = [&](auto sees) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int i = row_of(r);
        const float lse = stats_of[n % 2][0][i], delta = stats_of[n % 2][1][i];
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
          const int m = r / 2, tile = c / 2, e = r % 2 * 2 + c % 2, j = column_of(c);
          // Do not prefetch other scores.
          if constexpr (!kAddsBiasAlone) ptx::compiler_fence();
          if (!sees(i, j)) continue;
          float x;
          if constexpr (kAddsBiasAlone) {
            const float bias_of_score =
                to<float>(bias_tile[8 * r * params.bias.row +
                                    (c / 2 * 8 + c % 2) * params.bias.col]);
            x = static_cast<float>(params.scale) * s[m][tile][e] + bias_of_score;
          } else {
            x = scores(s[m][tile][e], i0 + i, j0 + j);
          }
          if (x == -infinity<float>()) continue;
          const float p = ptx::ex2_approx_ftz(fmaf(x, float(kLog2e), -lse));
          sums[m][tile][e] = fmaf(p, dp[m][tile][e] - delta, sums[m][tile][e]);
        }
      }
    };
    if (kAddsBiasAlone && bounds.sees_all(kBlockM, kBlockN)) {
      add_where([](int, int) { return true; });
    } else {
      add_where([&](int i, int j) { return bounds.sees(i, j); });
    }
  }

  // --- stores ------------------------------------------------------------------------

  static constexpr float kUnfactor = 1 / kFactorP;

  // Stores the tile itself.
  __device__ __forceinline__ void store_tile(grad_t* target, const tile_frag_t& sums,
                                             int first_i, int first_j, int rows_left,
                                             int columns_left) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = row_of(r);
      if (i >= rows_left) continue;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        const int j = column_of(2 * n);
        const float* const x = &sums[r / 2][n][r % 2 * 2];
        store_pair(target + (first_i + i) * grads.row[0] + (first_j + j) * grads.col[0],
                   grads.col[0], x[0] * kUnfactor, x[1] * kUnfactor, columns_left - j);
      }
    }
  }

  // Stores the sum of each row, or column: over lanes that share it, then over warps.
  __device__ __forceinline__ void store_line(grad_t* target, const tile_frag_t& sums,
                                             int first_i, int first_j, int rows_left,
                                             int columns_left) const {
    __syncthreads();  // all warps have read the tiles
    float* const of_warps = reinterpret_cast<float*>(smem);
    constexpr int kOwn = kSumQueries ? kBlockN : kBlockM;
    constexpr int kOthers = kSumQueries ? kWarpsM : kWarpsN;
    const int other = kSumQueries ? warp_index() % kWarpsM : warp_index() / kWarpsM;
#pragma unroll
    for (int own = 0; own < (kSumQueries ? kCols : kRows); ++own) {
      float sum = 0;
#pragma unroll
      for (int n = 0; n < (kSumQueries ? kRows : kCols); ++n) {
        const int r = kSumQueries ? n : own, c = kSumQueries ? own : n;
        sum += sums[r / 2][c / 2][r % 2 * 2 + c % 2];
      }
#pragma unroll
      for (int lanes = kSumQueries ? 4 : 1; lanes < (kSumQueries ? kWarpSize : 4);
           lanes *= 2) {
        sum += shuffle_xor(sum, lanes);
      }
      of_warps[other * kOwn + (kSumQueries ? column_of(own) : row_of(own))] = sum;
    }
    __syncthreads();  // the sums of all warps are stored
    for (int n = threadIdx.x; n < (kSumQueries ? columns_left : rows_left);
         n += kNumThreads) {
      float sum = 0;
#pragma unroll
      for (int other = 0; other < kOthers; ++other) sum += of_warps[other * kOwn + n];
      const index_t at =
          kSumQueries ? (first_j + n) * grads.col[0] : (first_i + n) * grads.row[0];
      target[at] = to<grad_t>(sum * kUnfactor);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_mma_bias(
        BACKWARD_PARAMETERS,
        const float* __restrict__ stats,  // backward.cuh
        const index_t stats_m,            // queries per block of stats
        grad_t* __restrict__ dbias,       // as the bias, summed over entries
        SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ __align__(16) unsigned char list_memory[sizeof(list_t)];
  list_t& list = reinterpret_cast<list_t&>(list_memory);

  const index_t all_row_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const index_t all_key_tiles = (params.seqlen_k + kBlockN - 1) / kBlockN;
  const index_t row_tiles = kSumQueries ? 1 : all_row_tiles;
  const index_t key_tiles = kSumKeys ? 1 : all_key_tiles;
  const index_t kept_index = divide(block_index(), row_tiles * key_tiles);
  if (kept_index >= grads.num_kept) return;
  const index_t tile = block_index() - kept_index * row_tiles * key_tiles;
  const index_t row_tile = divide(tile, key_tiles);
  const int first_i = static_cast<int>(row_tile) * kBlockM;
  const int first_j = static_cast<int>(tile - row_tile * key_tiles) * kBlockN;
  const auto kept = locate(grads.kept, kept_index);

  // Lists work tiles; `next` is the first one not yet considered. Run by one warp.
  const index_t walk = kSumQueries ? all_row_tiles : kSumKeys ? all_key_tiles : 1;
  const index_t num_tiles = grads.num_summed * walk;
  index_t next = 0;
  auto make_list = [&] {
    unsigned those;
    do {
      const index_t number = next + threadIdx.x;
      work_tile_t work;
      bool counts = number < num_tiles;
      if (counts) {
        const index_t summed = divide(number, walk);
        const int step = static_cast<int>(number - summed * walk);
        work.at = grads.entry(params, kept.of[0], summed);
        work.i0 = kSumQueries ? step * kBlockM : first_i;
        work.j0 = kSumKeys ? step * kBlockN : first_j;
        const scores_t scores(work.at, SCORE_ARGUMENTS);
        const range_t keys = scores.keys_of(work.i0, work.i0 + kBlockM);
        counts = keys.first < keys.last && keys.first < work.j0 + kBlockN &&
                 work.j0 < keys.last;
      }
      those = __ballot_sync(kFullMask, counts);
      const unsigned before = those & ((1u << threadIdx.x) - 1);
      if (counts) list.work[__popc(before)] = work;
      next += kWarpSize;
    } while (those == 0 && next < num_tiles);
    if (threadIdx.x == 0) {
      list.count = __popc(those);
      list.is_last = next >= num_tiles;
    }
  };
  __shared__ stats_tile_t stats_of;
  const dbias_t block = {params, grads, smem, list, stats_of};
  auto load = [&](int n) { block.load(n, q, k, v, dout, stats, stats_m); };
  tile_frag_t sums;
  clear(sums);
  bool is_last;
  do {
    __syncthreads();  // all warps have read the tiles and the previous list
    if (threadIdx.x < kWarpSize) make_list();
    __syncthreads();  // the list is complete
    const int count = list.count;
    is_last = list.is_last;
    load(0);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      ptx::wait_copy_groups<0>();
      __syncthreads();  // this work tile has arrived; the previous one has been read
      if constexpr (kStages == 2) load(n + 1);
      tile_frag_t s, dp;
      block.multiply(s, dp, n);
      if constexpr (kStages == 1) __syncthreads();  // all warps have read the tiles
      if constexpr (kStages == 1) load(n + 1);
      block.add(sums, s, dp, scores_t(list.work[n].at, SCORE_ARGUMENTS), n);
    }
  } while (!is_last);

  grad_t* const target = dbias + kept.of[1];
  const int rows_left =
      static_cast<int>(min(params.seqlen_q - first_i, index_t(kBlockM)));
  const int columns_left =
      static_cast<int>(min(params.seqlen_k - first_j, index_t(kBlockN)));
  if constexpr (!kSumQueries && !kSumKeys) {
    block.store_tile(target, sums, first_i, first_j, rows_left, columns_left);
  } else {
    block.store_line(target, sums, first_i, first_j, rows_left, columns_left);
  }
}

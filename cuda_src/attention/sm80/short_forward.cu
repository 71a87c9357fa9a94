// SPDX-License-Identifier: MIT
// attention_mma_short: forward for thousands of entries with few queries and keys each,
// and for any number of queries with few keys.
//
// Algorithm  All keys of a head are on chip, so a whole row of scores is available at
//            once:
//                s = score(q k^T),  m = rowmax s,  p = exp(s - m),  l = rowsum p
//                out = p v / l,  lse = m + log l
// Grid       1-D, one block of kWarps warps per head of k and v, or one for every
//            kTilesOfBlock tiles of 16 queries of such a head. A warp has one tile at a
//            time, and loads the next one as soon as it has the products q k^T
// Tiles      k, v   kBlockN x kHeadDim (kHeadDimV)  shared, once per head
//            q      16 x kHeadDim                   shared, one per warp
//            s, o   registers, in the layout of short.cuh
// Memory     global: each array once; k and v once per block
// Numbers    s, m, l, o in float32; p is rounded to 16 bits before p v, float32 split
//            into tf32 numbers
// Limits     kBlockN keys; head_dim and head_dim_v up to kHeadDim and kHeadDimV, padded
//            with zeros; sm_80 or newer. An o that is not finite is computed again key
//            by key, since hidden keys may have contributed 0 * NaN
#include "attention/sm80/short.cuh"

#ifndef TILES_OF_BLOCK
#define TILES_OF_BLOCK 0
#endif
constexpr int kTilesOfBlock = TILES_OF_BLOCK;  // 0: all of a head of k and v
// A warp has several tiles. Where it has one, the code for a next one would cost 1 to 2
// %.
constexpr bool kLoadsAhead = IS_GIVEN(LOADS_AHEAD);

// float32 has no registers for more.
constexpr int kOutColumns = kChunk < kHeadDimV, kSplits ? 32 : 64 > ;
constexpr int kOutTiles = kOutColumns / 8;

// o = p v one key at a time, leaving out hidden keys; columns of v from `col` on.
__device__ __forceinline__ void add_seen_values(sums_t<kOutTiles>& o,
                                                const sums_t<kKeyTiles>& p,
                                                const matrix_t<kHeadDimV>& v, int col) {
  const int lane = lane_index();
#pragma unroll
  for (int e = 0; e < 4 * kOutTiles; ++e) o[e / 4][e % 4] = 0;
#pragma unroll
  for (int n = 0; n < 2 * kKeyTiles; ++n) {
#pragma unroll 1
    for (int owner = 0; owner < 4; ++owner) {
      const int from = (lane & ~3) | owner;
      const elem_t* const values =
          v.at(n / 2 * 8 + owner * 2 + n % 2, col + lane % 4 * 2);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float weight = __shfl_sync(kFullMask, p[n / 2][2 * r + n % 2], from);
        if (is_unseen(weight)) continue;
#pragma unroll
        for (int e = 0; e < 2 * kOutTiles; ++e) {
          float& sum = o[e / 2][2 * r + e % 2];
          sum = fmaf(weight, to<float>(values[e / 2 * 8 + e % 2]), sum);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_mma_short(FORWARD_PARAMETERS, SCORE_PARAMETERS) {
  using matrix_q = matrix_t<kHeadDim>;
  using matrix_v = matrix_t<kHeadDimV>;
  extern __shared__ __align__(128) unsigned char bytes[];
  const matrix_q smem_k = {bytes};
  const matrix_q smem_q = {smem_k.rows +
                           matrix_q::bytes(kBlockN + warp_index() * kRows)};
  const matrix_v smem_v = {smem_k.rows + matrix_q::bytes(kBlockN + kWarps * kRows)};

  const int group = static_cast<int>(params.group_size);
  const int seqlen_q = static_cast<int>(params.seqlen_q);
  const int seqlen_k = static_cast<int>(params.seqlen_k);
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);

  // Tiles of 16 queries over the heads of a group: this block has [first, last).
  const int tiles = (seqlen_q + kRows - 1) / kRows;
  index_t head_of_k = block_index();
  int first = 0, last = group * tiles;
  if constexpr (kTilesOfBlock > 0) {
    const int blocks = (last + kTilesOfBlock - 1) / kTilesOfBlock;  // per head of k
    head_of_k = divide(head_of_k, blocks);
    first = static_cast<int>(block_index() - head_of_k * blocks) * kTilesOfBlock;
    last = min(last, first + kTilesOfBlock);
  }
  const tile_coord_t first_head(params, head_of_k * group);
  if (!first_head.exists) return;
  const auto load_queries = [&](int unit) {
    if (unit >= last) return;
    const int head = unit / tiles, i0 = (unit - head * tiles) * kRows;
    const elem_t* const rows = first_head.at(q, params.q) + head * params.q.head;
    smem_q.template load<kRows, kWarpSize>(rows + i0 * params.q.row, params.q.row,
                                           min(seqlen_q - i0, kRows), dim,
                                           lane_index());
  };
  // Rows [i0, i0 + num_rows) of a head, whose queries are in smem_q.
  const auto attend = [&](const tile_coord_t& at, int i0, int num_rows,
                          auto after_products) {
    const scores_t scores(at, SCORE_ARGUMENTS);
    sums_t<kKeyTiles> s;
    multiply_rows(s, smem_q, 0, smem_k);
    after_products();
    const seen_t sees(scores.mask_bounds(i0, 0));
#pragma unroll
    for (int e = 0; e < 4 * kKeyTiles; ++e) {
      const int row = lane_index() / 4 + e % 4 / 2 * 8;
      const int key = e / 4 * 8 + lane_index() % 4 * 2 + e % 2;
      float& score = s[e / 4][e % 4];
      score = sees(e % 4 / 2, key) ? scores(score, index_t(i0 + row), index_t(key))
                                   : -infinity<float>();
    }
    float m[2], l[2];
    weigh(s, m, l);

    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_index() / 4 + 8 * r;
      const finished_t finished = scores.finish(i0 + row, m[r], l[r]);
      inverse[r] = finished.inverse;
      if (lse != nullptr && lane_index() % 4 == 0 && row < num_rows) {
        lse[at.row_of_heads * seqlen_q + i0 + row] = finished.lse;
      }
    }
    const target_t<elem_t> target = {at.at(out, params.out) + i0 * params.out.row,
                                     params.out.row, params.out.col, num_rows, dim_v};
#pragma unroll 1
    for (int col = 0; col < kHeadDimV; col += kOutColumns) {
      sums_t<kOutTiles> o = {};
      add_products<kBlockN / kStep, false>(
          o, [&](int step) { return left_of<kKeyTiles>(s, step); },
          [&](int tile, int step, right_t(&pair)[2]) {
            right_trans(smem_v, col / 8 + tile, step, pair);
          });
      if (__any_sync(kFullMask, any_nonfinite(o))) add_seen_values(o, s, smem_v, col);
      store_rows(target.from(col), o, inverse);
    }
  };

  smem_k.template load<kBlockN, kNumThreads>(first_head.at_kv(k, params.k),
                                             params.k.row, seqlen_k, dim, threadIdx.x);
  if constexpr (kLoadsAhead) load_queries(first + warp_index());
  smem_v.template load<kBlockN, kNumThreads>(
      first_head.at_kv(v, params.v), params.v.row, seqlen_k, dim_v, threadIdx.x);
  if constexpr (kLoadsAhead) {
    ptx::wait_copies();
    sync_warps();  // k, v and the first tiles of q have arrived
    for (int unit = first + warp_index(); unit < last; unit += kWarps) {
      tile_coord_t at = first_head;
      const int head = unit / tiles, i0 = (unit - head * tiles) * kRows;
      at.head += head;
      at.row_of_heads += head;
      attend(at, i0, min(seqlen_q - i0, kRows), [&] {
        __syncwarp();  // all lanes have read the tile of q
        load_queries(unit + kWarps);
      });
      ptx::wait_copies();
      __syncwarp();  // the next tile of q has arrived
    }
  } else {
    bool is_first = true;
    for (int unit = first + warp_index(); unit < max(last, first + kWarps);
         unit += kWarps) {
      tile_coord_t at = first_head;
      const int head = unit / tiles, i0 = (unit - head * tiles) * kRows;
      at.head += head;
      at.row_of_heads += head;
      const int num_rows = head < group ? min(seqlen_q - i0, kRows) : 0;
      if (num_rows > 0) {
        smem_q.template load<kRows, kWarpSize>(at.at(q, params.q) + i0 * params.q.row,
                                               params.q.row, num_rows, dim,
                                               lane_index());
      }
      ptx::wait_copies();
      if (is_first) sync_warps();  // k and v have arrived
      is_first = false;
      if (num_rows == 0) return;
      __syncwarp();  // the tile of q has arrived
      attend(at, i0, num_rows, [] {});
      __syncwarp();  // before the next tile of q replaces this one
    }
  }
}

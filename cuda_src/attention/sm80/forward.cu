// SPDX-License-Identifier: MIT
// attention_mma: FlashAttention-2 forward by tensor core products of warps (mma.sync).
//
// Algorithm  Online softmax as in attention_tiled. For each tile of keys
//                s = score(q k^T),  m' = max(m, rowmax s),  p = exp(s - m')
//                l = l exp(m - m') + rowsum p,  o = o exp(m - m') + p v
//            and at the end  out = o / l,  lse = m + log l.
//            m follows the maximum only once that exceeds it by 8 in log2. float32 is
//            split into float16 numbers (fp32_forward.cuh).
// Grid       (blocks per head, heads). A block has one tile of queries. With PERSISTENT
//            it has several of one head, and loads the next one while it stores; last
//            tiles first, since causal ones are longest
// Tiles      q     kBlockM x kHeadDim                 shared, loaded once
//            k, v  kBlockN x kHeadDim (kHeadDimV)     shared, kStages of each; float32
//                                                     goes through a staging tile
//            s, o  registers; warp w owns rows [16 kRowTiles w, 16 kRowTiles (w + 1)),
//                  or two warps share twice as many (shared_rows.cuh)
// Memory     global: q and out once; k and v once per block, mostly from L2 (cp.async)
//            shared: see smem_bytes() in _attention/gpu/sm80/forward.py
// Numbers    s, m, l, o in float32; p is rounded to 16 bits before p v, or split
// Limits     head_dim and head_dim_v up to 256, padded with zeros; fewer than 2^29
//            keys; sm_80 or newer. A block starts over on a slower path if nonfinite
//            values of hidden keys reached its result (nonfinite_values.cuh), or if
//            scores were too large (large_scores.cuh).
#include "attention/sm80/forward_mainloop.cuh"
#include "attention/sm80/forward_epilogue.cuh"

// Nonzero if a result is not finite: hidden keys may have contributed 0 * NaN.
__device__ __forceinline__ float find_nonfinite(const out_frag_t& o) {
  float found[4] = {};
  if constexpr (!kSplits) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) found[e] = fmaf(o[m][n][e], 0, found[e]);
      }
    }
  }
  return (found[0] + found[1]) + (found[2] + found[3]);
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks) attention_mma(
    // Tiles of k and v, already split, (batch, kv heads, tiles); or null.
    const unsigned char* __restrict__ operands, FORWARD_PARAMETERS, SCORE_PARAMETERS) {
  extern __shared__ __align__(128) unsigned char bytes[];
  const smem_t smem(bytes);
  block_state_t& state = *smem.state;
  const int num_tiles = static_cast<int>((params.seqlen_q + kBlockM - 1) / kBlockM);
  const tile_coord_t at(params, blockIdx.y + index_t(gridDim.y) * blockIdx.z);
  if (!at.exists) return;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);

  const elem_t* const q_head = at.at(q, params.q);
  const elem_t* const k_rows = at.at_kv(k, params.k);
  const elem_t* const v_rows = at.at_kv(v, params.v);
  mask_bounds_t head(scores.mask_bounds(0, 0));
  int first_of_part = 0;
  if constexpr (kHasParts) {
    const range_t part = scores.part();
    first_of_part = static_cast<int>(part.first);
    head.num_keys = static_cast<int>(part.last);
  }
  work_tile_t work(head, q_head, params.q.row, query_of_turn(0, num_tiles),
                   first_of_part);
  shown_tiles_t<kBlockN> tiles;
  if constexpr (kHasMaskFunction) {
    work.first = tiles.next(work.first, work.last, shown_to(scores, params, work.i0));
  }
  const bool aligned_q = kAligned || has_aligned_rows(q_head, params.q.row, dim);
  const bool aligned_k = kAligned || has_aligned_rows(k_rows, params.k.row, dim);
  const bool aligned_v = kAligned || has_aligned_rows(v_rows, params.v.row, dim_v);
  const double scale = kHasTerms ? 1.0 : params.scale * kGivenBack;
  const float to_log2 = static_cast<float>(scale * kLog2e);

  mainloop_t loop({params, smem, state, k_rows, v_rows, aligned_k, aligned_v, dim,
                   dim_v, work.first, work.last},
                  scores, work.i0, to_log2, num_tiles, tiles);
  // Start the copies before computing anything else.
  if constexpr (!kSplits) {
    loop.begin(work, aligned_q, k_rows, aligned_k, v_rows, aligned_v);
  }
  if (threadIdx.x == 0) {
    state.at = at;
    state.q_head = q_head;
    state.k_rows = k_rows;
    state.v_rows = v_rows;
    if constexpr (kPrepared) {
      const index_t num_operands = (params.seqlen_k + kBlockN - 1) / kBlockN;
      index_t row = at.row_of_heads;
      // All splits of the keys read the same operands.
      if constexpr (kHasParts) row -= at.batch[0] * params.part.head;
      state.operands =
          operands + divide(row, params.group_size) * num_operands * kBytesOperands;
    }
    state.head = head;
    state.work = work;
    state.turn = 0;
    state.special = false;
    state.aligned_q = aligned_q;
    state.aligned_k = aligned_k;
    state.aligned_v = aligned_v;
    // The scale again, in double: to_log2 was rounded, and lse needs to know how.
    state.from_log2 = scale / to_log2;
  }
  if constexpr (kSplits) __syncthreads();  // the state is stored
  if constexpr (kWarpsPerRow > 1) loop.move_weights(0, loop.weights_of(work.first));

#pragma unroll 1
  for (;;) {  // work tiles of this block
    if constexpr (!kSplits) loop.lanes.launder();
    // The state is stored; other variants have another barrier before they read it.
    if constexpr (!kSplits && kWarpsPerRow == 1 && !kKeepQ) __syncthreads();
    out_frag_t o;
    softmax_t rows;
    centers_t centers;
    two_level_out_t two_level;
    bool careful = false, begun = false;
#pragma unroll 1
    for (;; careful = true) {
      const result_t result = {o, rows, centers, two_level, careful, begun};
      loop.reset(result);
      queries_t<kKeepQ> q_frags;
      split_queries_t split_q;
      loop.load_first(q_frags, split_q, result);
      if constexpr (kWarpsPerRow > 1) {
        loop.attend_shared_rows(q_frags, result);
      } else {
        loop.attend(q_frags, split_q, result);
      }
      loop.finish_sums(result);
      if (careful) {
        __syncthreads();  // all warps have read the tiles
        break;
      }
      bool again = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) again |= is_huge(rows.reference[r]);
      if (again) {
        again = take_centers(centers, rows, scores_t(state.at, SCORE_ARGUMENTS),
                             state.work.i0);
      }
      const bool any_nonfinite = find_nonfinite(o) != 0;
      if (!__syncthreads_or(again | any_nonfinite)) break;  // all have read the tiles
    }

    const result_t result = {o, rows, centers, two_level, careful, begun};
    unsigned char* smem_out;
    const work_tile_t next = loop.begin_next(smem_out, result);
    const scores_t scores(state.at, SCORE_ARGUMENTS);
    elem_t* const out_rows = state.at.at(out, params.out);
    const bool as_pairs = params.out.col == 1 && params.out.row % 2 == 0 &&
                          params.head_dim_v % 2 == 0 &&
                          reinterpret_cast<unsigned long long>(out_rows) % 8 == 0;
    const float inverse = close_rows(result, state, scores, params, lse, scale);
    if constexpr (kSplits) {
      store_fp32(out_rows, result, inverse, state, scores, params, as_pairs);
    } else {
      store_16bit(out_rows, result, inverse, state, scores, params, smem_out);
    }
    if (next.i0 < 0) return;
    if constexpr (kPersistent) loop.advance(next);
  }
}

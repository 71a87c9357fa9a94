// SPDX-License-Identifier: MIT
// attention_mma: from products q.k to final scores.
#pragma once

#include "attention/score/shown_tiles.cuh"
#include "attention/sm80/forward_state.cuh"

// Sets the scores of hidden keys to -inf.
__device__ __forceinline__ void mask_scores(scores_frag_t& s,
                                            const block_bounds_t& block, int j0) {
  const int row_0 = lanes_t::warp_row() + lanes_t::lane() / 4;
  const int column_0 = lanes_t::warp_key() + lanes_t::lane() % 4 * 2;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = row_0 + 8 * r;
    const int first = block.low + row - j0 - column_0;
    const int last = min(block.high + row, block.num_keys) - j0 - column_0;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * n + e;
        float& x = s[r / 2][n][r % 2 * 2 + e];
        if (column < first || column >= last) x = -infinity<float>();
      }
    }
  }
}

// Which tiles of keys a mask function shows to the queries of the block.
__device__ __forceinline__ auto shown_to(const scores_t& scores, const params_t& params,
                                         index_t i0) {
  return [&scores, &params, i0](int j0) {
    return scores.shown(i0, min(i0 + kBlockM, params.seqlen_q), j0, j0 + kBlockN);
  };
}

// Turns products into final scores, except for masks by position. With kShown the mask
// function shows the whole tile.
template <bool kShown>
__device__ __forceinline__ void finish_scores(scores_frag_t& s, const scores_t& scores,
                                              const params_t& params, index_t i0,
                                              int j0) {
  const int lane = lanes_t::lane();
  const int row_0 = lanes_t::warp_row() + lane / 4, column_0 = lane % 4 * 2;
  if constexpr (kHasTerms) {
    auto finish = [&](float x, int row, int column) {
      const index_t i = i0 + row, j = j0 + column;
      // There may be nothing to read past the last query or key; functions clamp
      // indices themselves.
      if constexpr (kHasBias || kHasMask || !(kHasScoreFunction || kHasMaskFunction)) {
        return scores.of<kShown>(x * static_cast<float>(kGivenBack),
                                 min(i, params.seqlen_q - 1),
                                 min(j, params.seqlen_k - 1));
      }
      return scores.of<kShown>(x * static_cast<float>(kGivenBack), i, j);
    };
    if constexpr (kHeadDimV > 128) {
      // o occupies the registers: handle a few scores at a time, through the stack.
      float on_stack[kRowTiles * kScoreTiles * 4];
      put<kScoreTiles>(on_stack, s);
#pragma unroll 1
      for (int n = 0; n < kRowTiles * kScoreTiles * 4; ++n) {
        const int row = n / (kScoreTiles * 4) * 16 + n / 2 % 2 * 8;
        const int column = n / 4 % kScoreTiles * 8 + n % 2;
        on_stack[n] = finish(on_stack[n], row_0 + row, column_0 + column);
      }
      ptx::launder(on_stack);
      get<kScoreTiles>(s, on_stack);
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          // Split operands leave no registers to prefetch other columns.
          if constexpr (kParts == 2) ptx::compiler_fence();
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[r / 2][n][r % 2 * 2 + e];
            x = finish(x, row_0 + 8 * r, column_0 + 8 * n + e);
          }
        }
      }
    }
  }
}

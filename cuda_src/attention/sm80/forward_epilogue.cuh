// SPDX-License-Identifier: MIT
// attention_mma: final scaling and stores.
#pragma once

#include "attention/sm80/forward_state.cuh"
#include "attention/sm80/nonfinite_values.cuh"

// Stores a thread's part of a float32 row. One branch per row: this code runs once per
// block, so instruction fetch dominates, and jumps over rare code make that slow.
__device__ __forceinline__ void store_row(elem_t* row, const float (&x)[2 * kOutTiles],
                                          int dim, index_t step, bool as_pairs) {
  if (as_pairs) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const int column = lanes_t::out_column(n);
      if (column < dim) {
        *reinterpret_cast<float2*>(row + column) = make_float2(x[2 * n], x[2 * n + 1]);
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < 2 * kOutTiles; ++n) {
      const int column = lanes_t::out_column(n / 2) + n % 2;
      if (column < dim) row[column * step] = to<elem_t>(x[n]);
    }
  }
}

// Puts rows of o, scaled by 1 / l, into shared memory as 16-bit numbers. Lane n holds
// the factor of row n % kRows.
__device__ __forceinline__ void put_rows(unsigned char* tile, out_frag_t& o,
                                         float own_inverse, int round) {
  constexpr int kRowsOfRound = kRows / kOutRounds;
  unsigned thread = threadIdx.x;
  ptx::launder(thread);  // derived values would occupy registers during the loop
  const int lane = lanes_t::lane(thread);
  float inverse[kRows];
  bool any_empty = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    inverse[r] = __shfl_sync(kFullMask, own_inverse, (lane & ~3) + r);
    any_empty |= inverse[r] == 0;
  }
  if (any_empty) {  // whatever the sums are; one branch for all rows
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
        for (int e = r % 2 * 2; e < r % 2 * 2 + 2; ++e) {
          if (inverse[r] == 0) o[r / 2][n][e] = 0;
        }
      }
    }
  }
  const tile_t<kHeadDimV> to(lane % 4 * 4,
                             lanes_t::warp_row(thread) / kOutRounds + lane / 4,
                             lanes_t::warp_of_row(thread) * 4);
#pragma unroll
  for (int n_row = 0; n_row < kRowsOfRound; ++n_row) {
    const int r = round * kRowsOfRound + n_row;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const float (&x)[4] = o[r / 2][n];
      *reinterpret_cast<unsigned*>(tile + to.at(8 * n_row, lanes_t::out_tile(n))) =
          pair16_t::from(x[r % 2 * 2] * inverse[r], x[r % 2 * 2 + 1] * inverse[r]);
    }
  }
}

// Stores a chunk of 8 elements from shared memory.
__device__ __forceinline__ void store_chunk(elem_t* to, const unsigned char* from,
                                            index_t step, int count, bool as_vector) {
  const uint4 word = *reinterpret_cast<const uint4*>(from);
  if (as_vector) {
    *reinterpret_cast<uint4*>(to) = word;
    return;
  }
  const unsigned words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const unsigned short bits = static_cast<unsigned short>(words[e / 2] >> e % 2 * 16);
    if (e < count) *reinterpret_cast<unsigned short*>(to + e * step) = bits;
  }
}

// Stores this warp's part of out from 16-bit rows in shared memory, in chunks of 16
// bytes: storing pairs from registers would take four times as many instructions.
__device__ __forceinline__ void store_tile(elem_t* out, const unsigned char* tile,
                                           int num_rows, int dim, const operand_t& to,
                                           int round) {
  constexpr int kOwnRows = 16 * kRowTiles / kOutRounds;
  using rows_t = tile_t<kHeadDimV>;
  constexpr int kChunks = kOutTiles, kElems = 8;
  unsigned thread = threadIdx.x;
  ptx::launder(thread);
  const int lane = lanes_t::lane(thread);
  const bool as_vectors =
      ((to.row | dim) % kElems | reinterpret_cast<unsigned long long>(out) % 16) == 0 &&
      to.col == 1;
  __syncwarp();  // the warp's rows are written
  if constexpr (kWarpSize % kChunks == 0 && kWarpSize / kChunks <= 8) {
    // A lane has the same chunk of each of its rows.
    constexpr int kStep = kWarpSize / kChunks;
    const int row = lanes_t::warp_row(thread) + round * kOwnRows + lane / kChunks;
    const int place = lanes_t::warp_row(thread) / kOutRounds + lane / kChunks;
    const int chunk =
        lanes_t::out_tile(lane % kChunks) + lanes_t::warp_of_row(thread) * 4;
    const int count = dim - chunk * kElems;
    if (count <= 0) return;
    elem_t* at = out + row * to.row + chunk * kElems * to.col;
    if (as_vectors) {
#pragma unroll
      for (int n = 0; n < kOwnRows / kStep; ++n) {
        const unsigned from = rows_t::offset(place + n * kStep, chunk);
        if (row + n * kStep < num_rows) store_chunk(at, tile + from, 1, kElems, true);
        at += kStep * to.row;
      }
    } else {
#pragma unroll 1
      for (int n = 0; n < kOwnRows / kStep; ++n) {
        const unsigned from = rows_t::offset(place + n * kStep, chunk);
        if (row + n * kStep < num_rows) {
          store_chunk(at, tile + from, to.col, count, false);
        }
        at += kStep * to.row;
      }
    }
  } else {
#pragma unroll 4
    for (int n = lane; n < kOwnRows * kChunks; n += kWarpSize) {
      const int row = lanes_t::warp_row(thread) + round * kOwnRows + n / kChunks;
      const int place = lanes_t::warp_row(thread) / kOutRounds + n / kChunks;
      const int chunk =
          lanes_t::out_tile(n % kChunks) + lanes_t::warp_of_row(thread) * 4;
      if (row >= num_rows || chunk * kElems >= dim) continue;
      store_chunk(out + row * to.row + chunk * kElems * to.col,
                  tile + rows_t::offset(place, chunk), to.col, dim - chunk * kElems,
                  as_vectors);
    }
  }
}

// --- the end of rows -----------------------------------------------------------------

// The query of row r of this thread.
__device__ __forceinline__ index_t query_of(const block_state_t& state, int r) {
  return state.work.i0 + lanes_t::warp_row() + 8 * r + lanes_t::lane() / 4;
}

// Stores lse and returns 1 / l of row lane % kRows. Finishing a row takes long and is
// the same for the four lanes that share it, so each of them finishes another row.
__device__ __forceinline__ float close_rows(const result_t& at,
                                            const block_state_t& state,
                                            const scores_t& scores,
                                            const params_t& params, row_lse_t* lse,
                                            double scale) {
  static_assert(kRows <= 4);
  const int own = lanes_t::lane() % kRows;
  float reference = at.rows.reference[0], l = at.rows.l[0];
#pragma unroll
  for (int r = 1; r < kRows; ++r) {
    if (own == r) {
      reference = at.rows.reference[r];
      l = at.rows.l[r];
    }
  }
  // lse needs the reference exactly as it was subtracted; what does not fit into `high`
  // goes into l. Beyond a million the rest is below one ulp of lse.
  double m = reference * state.from_log2;
  if (at.careful && at.centers.has(own)) m += scale * at.centers.at[own];
  const maximum_t high = l == 0 ? -infinity<maximum_t>() : static_cast<maximum_t>(m);
  const float low = abs_of(high) < 1e6f ? static_cast<float>(m - high) : 0.f;
  const index_t i = query_of(state, own);
  const finished_t finished = scores.finish(i, high, l * (1 + low));
  const float own_inverse = finished.inverse * (1 + low);
  if (lse != nullptr && i < params.seqlen_q && lanes_t::lane() % 4 < kRows &&
      lanes_t::warp_of_row() == 0) {
    lse[state.at.row_of_heads * params.seqlen_q + i] = finished.lse;
  }
  return own_inverse;
}

// Stores rows of float32.
__device__ __forceinline__ void store_fp32(elem_t* out_rows, const result_t& at,
                                           float own_inverse,
                                           const block_state_t& state,
                                           const scores_t& scores,
                                           const params_t& params, bool as_pairs) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float inverse =
        __shfl_sync(kFullMask, own_inverse, (lanes_t::lane() & ~3) + r);
    const index_t i = query_of(state, r);
    if (i >= params.seqlen_q) continue;
    elem_t* const out_row = out_rows + i * params.out.row;
    if constexpr (!kHasSinks) {
      // A row that sees one key equals its value exactly, which the parts may not.
      const range_t seen = scores.keys_of(i, i + 1);
      if (seen.last - seen.first == 1 && inverse > 0 && is_finite(at.rows.l[r])) {
        const elem_t* const only = state.v_rows + seen.first * params.v.row;
#pragma unroll 1
        for (int n = lanes_t::lane() % 4; n < params.head_dim_v; n += 4) {
          out_row[n * params.out.col] = only[n];
        }
        continue;
      }
    }
    float x[2 * kOutTiles];
#pragma unroll
    for (int n = 0; n < 2 * kOutTiles; ++n) {
      x[n] = at.o[r / 2][n / 2][r % 2 * 2 + n % 2] * inverse;
    }
    if (inverse == 0) {
#pragma unroll
      for (int n = 0; n < 2 * kOutTiles; ++n) x[n] = 0;
    }
    const int dim = static_cast<int>(params.head_dim_v);
    store_row(out_row, x, dim, params.out.col, as_pairs);
    if constexpr (!kHasSinks) {
      // So does a huge row whose largest score takes all the weight.
      if (at.careful && at.centers.has(r) && at.rows.l[r] == kLargestWeight) {
        const elem_t* const top = state.v_rows + at.centers.key[r] * params.v.row;
#pragma unroll 1
        for (int n = 0; n < 2 * kOutTiles; ++n) {
          const int column = n / 2 * 8 + lanes_t::lane() % 4 * 2 + n % 2;
          if (column >= dim) continue;
          elem_t& stored = out_row[column * params.out.col];
          if (is_finite(to<float>(stored))) stored = top[column];
        }
      }
    }
  }
}

// Stores rows of 16 bits through shared memory.
__device__ __forceinline__ void store_16bit(
    elem_t* out_rows, const result_t& at, float own_inverse, const block_state_t& state,
    const scores_t& scores, const params_t& params, unsigned char* smem_out) {
#pragma unroll
  for (int round = 0; round < kOutRounds; ++round) {
    if (round > 0) __syncwarp();  // the previous rows have been stored
    put_rows(smem_out, at.o, own_inverse, round);
    store_tile(out_rows + state.work.i0 * params.out.row, smem_out,
               static_cast<int>(min(params.seqlen_q - state.work.i0, index_t(kBlockM))),
               static_cast<int>(params.head_dim_v), params.out, round);
  }
  if (state.special) {
    const index_t i_first = state.work.i0 + lanes_t::warp_row();
    add_specials(out_rows, state.v_rows, scores, params, i_first,
                 min(i_first + 16 * kRowTiles, scores.num_queries()), state.work.first,
                 state.work.last);
  }
}

// SPDX-License-Identifier: MIT
// attention_vjp_hopper_dq: dq from the sums of the previous kernel, and dk and dv of
// tiles that were cut into pieces.
//
// Algorithm  gradient = factor * sums, reordered from register layout to rows; pieces
//            are added up in their order
// Grid       1-D, one block per 64 x 64 part: first of the tiles that were cut, then of
//            the blocks of queries of all slots
// Memory     global: sums and gradients once
// Numbers    float, rounded once
// Limits     rows of gradients are whole 16-byte vectors (copy/trim_rows.cu)
#include "attention/sm90/backward.cuh"

static_assert(kNumThreads * 16 == kPart && kBlockM * kHeadDim == 2 * kPart);

// The tiles that were cut: the last ones of each kept entry.
struct cut_t {
  const float* pieces;
  elem_t *dk, *dv;
  int num_work_tiles, num_pieces, first_work_tile, num_tiles;
};

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_vjp_hopper_dq(
    const float* __restrict__ sums,  // backward.cuh
    elem_t* __restrict__ dq,         // (slots / heads, heads, queries, head_dim)
    const index_t num_slots,
    const index_t batch_step,  // strides of dq
    const index_t head_step, const index_t row_step, const __grid_constant__ cut_t cut,
    found_t* __restrict__ found, const __grid_constant__ params_t params,
    const __grid_constant__ grads_t grads) {
  ptx::griddepcontrol_launch_dependents();
  sums = ptx::griddepcontrol_wait(sums);
  const int group = threadIdx.x % 8, row = threadIdx.x / 8 % 8, warp = threadIdx.x / 64;
  // A thread takes 8 columns of two rows: the numbers of four lanes.
  auto load = [&](const float* part, float4(&x)[4]) {
    const float4* const from =
        reinterpret_cast<const float4*>(part) + warp * 256 + group * 32 + row * 4;
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = from[n];
  };
  // Stores rows `i` and `i + 8` of `num_rows` of a gradient of `dim` columns.
  auto store = [&](const float4(&x)[4], float factor, elem_t* matrix, index_t row_step,
                   index_t i, index_t num_rows, int column, index_t dim) {
    if (column >= dim) return;
    float nonfinite = 0;
    if (i < num_rows) {
      *reinterpret_cast<uint4*>(matrix + i * row_step + column) =
          make_uint4(pair16_t::from(x[0].y * factor, x[0].x * factor),
                     pair16_t::from(x[1].y * factor, x[1].x * factor),
                     pair16_t::from(x[2].y * factor, x[2].x * factor),
                     pair16_t::from(x[3].y * factor, x[3].x * factor));
    }
    if (i + 8 < num_rows) {
      *reinterpret_cast<uint4*>(matrix + (i + 8) * row_step + column) =
          make_uint4(pair16_t::from(x[0].w * factor, x[0].z * factor),
                     pair16_t::from(x[1].w * factor, x[1].z * factor),
                     pair16_t::from(x[2].w * factor, x[2].z * factor),
                     pair16_t::from(x[3].w * factor, x[3].z * factor));
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      nonfinite = fmaf(x[n].x, 0, nonfinite);
      nonfinite = fmaf(x[n].y, 0, nonfinite);
      nonfinite = fmaf(x[n].z, 0, nonfinite);
      nonfinite = fmaf(x[n].w, 0, nonfinite);
    }
    if (nonfinite != 0) found->nonfinite = 1;
  };
  const float factor = unfactor_of(factor_of(found), static_cast<float>(params.scale));
  float4 x[4];
  constexpr int kChunks = kHeadDim / 64, kParts = 4 * kChunks;
  if (block_index() < cut.num_work_tiles * kParts) {
    const int work_tile = static_cast<int>(block_index()) / kParts;
    const int part = static_cast<int>(block_index()) % kParts;
    const int of_v = part / (2 * kChunks), half = part / kChunks % 2;
    const float* from =
        cut.pieces + (index_t(work_tile) * cut.num_pieces * kParts + part) * kPart;
    load(from, x);
    for (int piece = 1; piece < cut.num_pieces; ++piece) {
      float4 more[4];
      load(from += kParts * kPart, more);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        x[n].x += more[n].x;
        x[n].y += more[n].y;
        x[n].z += more[n].z;
        x[n].w += more[n].w;
      }
    }
    const int kept = (cut.first_work_tile + work_tile) / cut.num_tiles;
    const int tile = cut.first_work_tile + work_tile - kept * cut.num_tiles;
    const auto at = locate(grads.kept, kept);
    const index_t key = index_t(tile) * 128 + half * 64 + warp * 16 + row;
    store(x, of_v ? 1 / kFactorP : factor, of_v ? cut.dv + at.of[2] : cut.dk + at.of[1],
          grads.row[of_v], key, params.seqlen_k, part % kChunks * 64 + group * 8,
          of_v ? params.head_dim_v : params.head_dim);
    return;
  }
  const index_t number = block_index() - cut.num_work_tiles * kParts;
  const index_t num_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const index_t part = number % 2;
  const index_t slot = divide(number / 2, num_blocks);
  const index_t block = number / 2 - slot * num_blocks;
  if (slot >= num_slots) return;
  load(sums + number * kPart, x);
  constexpr bool kByRows = kHeadDim == 64;  // the parts are 64 rows, or 64 columns
  const index_t i = block * kBlockM + (kByRows ? part * 64 : 0) + warp * 16 + row;
  const int column = (kByRows ? 0 : static_cast<int>(part) * 64) + group * 8;
  const index_t entry = divide(slot, params.num_heads);
  store(x, factor,
        dq + entry * batch_step + (slot - entry * params.num_heads) * head_step,
        row_step, i, params.seqlen_q, column, params.head_dim);
}

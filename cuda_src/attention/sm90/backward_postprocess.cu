// SPDX-License-Identifier: MIT
// attention_vjp_hopper_dq: dq from the sums of the previous kernel.
//
// Algorithm  gradient = factor * sums, reordered from register layout to rows
// Grid       1-D, one block per 64 x 64 part of the blocks of queries of all slots
// Memory     global: sums and gradients once
// Numbers    float, rounded once
// Limits     rows of gradients are whole 16-byte vectors (copy/trim_rows.cu)
#include "attention/sm90/backward.cuh"

static_assert(kNumThreads * 16 == kPart && kBlockM * kHeadDim == 2 * kPart);

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_vjp_hopper_dq(
    const float* __restrict__ sums,  // backward.cuh
    elem_t* __restrict__ dq,         // (slots / heads, heads, queries, head_dim)
    const index_t num_slots,
    const index_t batch_step,  // strides of dq
    const index_t head_step, const index_t row_step, found_t* __restrict__ found,
    const __grid_constant__ params_t params, const __grid_constant__ grads_t grads) {
  ptx::griddepcontrol_launch_dependents();
  sums = ptx::griddepcontrol_wait(sums);
  const index_t num_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const index_t part = block_index() % 2;
  const index_t slot = divide(block_index() / 2, num_blocks);
  const index_t block = block_index() / 2 - slot * num_blocks;
  if (slot >= num_slots) return;
  // A thread takes 8 columns of two rows: the numbers of four lanes.
  const int group = threadIdx.x % 8, row = threadIdx.x / 8 % 8, warp = threadIdx.x / 64;
  const float4* const from = reinterpret_cast<const float4*>(sums) +
                             block_index() * (kPart / 4) + warp * 256 + group * 32 +
                             row * 4;
  float4 x[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) x[n] = from[n];
  constexpr bool kByRows = kHeadDim == 64;  // the parts are 64 rows, or 64 columns
  const index_t i = block * kBlockM + (kByRows ? part * 64 : 0) + warp * 16 + row;
  const int column = (kByRows ? 0 : static_cast<int>(part) * 64) + group * 8;
  if (column >= params.head_dim) return;
  const float factor = unfactor_of(factor_of(found), static_cast<float>(params.scale));
  const index_t entry = divide(slot, params.num_heads);
  elem_t* const to = dq + entry * batch_step +
                     (slot - entry * params.num_heads) * head_step + i * row_step +
                     column;
  if (i < params.seqlen_q) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(pair16_t::from(x[0].y * factor, x[0].x * factor),
                   pair16_t::from(x[1].y * factor, x[1].x * factor),
                   pair16_t::from(x[2].y * factor, x[2].x * factor),
                   pair16_t::from(x[3].y * factor, x[3].x * factor));
  }
  if (i + 8 < params.seqlen_q) {
    *reinterpret_cast<uint4*>(to + 8 * row_step) =
        make_uint4(pair16_t::from(x[0].w * factor, x[0].z * factor),
                   pair16_t::from(x[1].w * factor, x[1].z * factor),
                   pair16_t::from(x[2].w * factor, x[2].z * factor),
                   pair16_t::from(x[3].w * factor, x[3].z * factor));
  }
  float nonfinite = 0;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    nonfinite = fmaf(x[n].x, 0, nonfinite);
    nonfinite = fmaf(x[n].y, 0, nonfinite);
    nonfinite = fmaf(x[n].z, 0, nonfinite);
    nonfinite = fmaf(x[n].w, 0, nonfinite);
  }
  if (nonfinite != 0) found->nonfinite = 1;
}

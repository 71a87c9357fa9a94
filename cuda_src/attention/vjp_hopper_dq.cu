// SPDX-License-Identifier: MIT
// attention_vjp_hopper_dq: dq from what attention_vjp_hopper has summed.
//
// Algorithm  dq = factor * sums, from the order of registers to rows
// Grid       1-D, a block a part (64 x 64) of a block of queries of a slot
// Memory     global: sums and dq once
// Numbers    float, rounded once
// Limits     head_dim a multiple of 8
#include "attention/vjp_hopper.cuh"

static_assert(kNumThreads * 16 == kPart && kBlockM * kHeadDim == 2 * kPart);

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_vjp_hopper_dq(
    const float* __restrict__ sums,  // vjp_hopper.cuh
    elem_t* __restrict__ dq,         // (slots / heads, heads, queries, head_dim)
    const index_t num_slots,
    const index_t batch_step,  // strides of dq
    const index_t head_step,
    const index_t row_step,
    found_t* __restrict__ found,
    const __grid_constant__ params_t params) {
  ptx::griddepcontrol_launch_dependents();
  sums = ptx::griddepcontrol_wait(sums);
  const index_t num_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const index_t part = block_index() % 2;
  const index_t slot = divide(block_index() / 2, num_blocks);
  const index_t block = block_index() / 2 - slot * num_blocks;
  if (slot >= num_slots) return;
  const int group = threadIdx.x % 8, row = threadIdx.x / 8 % 8, warp = threadIdx.x / 64;
  // A thread takes 8 columns of two rows: what four lanes had.
  const float4* const from = reinterpret_cast<const float4*>(sums) +
                             block_index() * (kPart / 4) + warp * 256 + group * 32 +
                             row * 4;
  const float4 x[4] = {from[0], from[1], from[2], from[3]};
  const float factor = unfactor_of(factor_of(found), static_cast<float>(params.scale));
  constexpr bool kByRows = kHeadDim == 64;  // whether the parts are 64 rows or columns
  const index_t i = block * kBlockM + (kByRows ? part * 64 : 0) + warp * 16 + row;
  const int column = (kByRows ? 0 : static_cast<int>(part) * 64) + group * 8;
  const index_t entry = divide(slot, params.num_heads);
  elem_t* const target =
      dq + entry * batch_step + (slot - entry * params.num_heads) * head_step + column;
  if (column >= params.head_dim) return;
  float odd = 0;
  if (i < params.seqlen_q) {
    *reinterpret_cast<uint4*>(target + i * row_step) =
        make_uint4(pair16_t::from(x[0].y * factor, x[0].x * factor),
                   pair16_t::from(x[1].y * factor, x[1].x * factor),
                   pair16_t::from(x[2].y * factor, x[2].x * factor),
                   pair16_t::from(x[3].y * factor, x[3].x * factor));
  }
  if (i + 8 < params.seqlen_q) {
    *reinterpret_cast<uint4*>(target + (i + 8) * row_step) =
        make_uint4(pair16_t::from(x[0].w * factor, x[0].z * factor),
                   pair16_t::from(x[1].w * factor, x[1].z * factor),
                   pair16_t::from(x[2].w * factor, x[2].z * factor),
                   pair16_t::from(x[3].w * factor, x[3].z * factor));
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    odd = fmaf(x[n].x, 0, odd);
    odd = fmaf(x[n].y, 0, odd);
    odd = fmaf(x[n].z, 0, odd);
    odd = fmaf(x[n].w, 0, odd);
  }
  if (odd != 0) found->odd = 1;
}

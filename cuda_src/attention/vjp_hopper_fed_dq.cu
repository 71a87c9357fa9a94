// SPDX-License-Identifier: MIT
// attention_vjp_hopper_fed_dq: dq from what attention_vjp_hopper_fed has summed as dq^T.
//
// Algorithm  dq = factor * sums, from the order of registers to rows
// Grid       1-D, a block a part (64 columns) of a block of queries of a slot
// Memory     global: sums and dq once
// Numbers    float, rounded once
// Limits     head_dim a multiple of 8
#include "attention/vjp_hopper.cuh"

static_assert(kNumThreads * 32 == kPart && kBlockM % 8 == 0);

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_vjp_hopper_fed_dq(
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
  // A thread takes 16 columns of two rows: what eight lanes had.
  constexpr int kPairs = kBlockM / 2;  // of rows
  const int warp = threadIdx.x / kPairs, pair = threadIdx.x % kPairs;
  const float4* const from = reinterpret_cast<const float4*>(sums) +
                             block_index() * (kPart / 4) + warp * (kPart / 16) +
                             pair / 4 * 32 + pair % 4;
  float4 x[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) x[n] = from[4 * n];
  const float factor = unfactor_of(factor_of(found), static_cast<float>(params.scale));
  float odd = 0;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    odd = fmaf(x[n].x, 0, fmaf(x[n].y, 0, fmaf(x[n].z, 0, fmaf(x[n].w, 0, odd))));
  }
  if (odd != 0) found->odd = 1;
  const index_t row = block * kBlockM + 2 * pair, entry = divide(slot, params.num_heads);
  const int column = static_cast<int>(part) * 64 + warp * 16;
  elem_t* const target = dq + entry * batch_step +
                         (slot - entry * params.num_heads) * head_step + column;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + r >= params.seqlen_q) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (column + 8 * half >= params.head_dim) continue;
      unsigned words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        auto of = [&](const float4& v) {
          return half == 0 ? (r == 0 ? v.x : v.y) : (r == 0 ? v.z : v.w);
        };
        words[n] = pair16_t::from(of(x[2 * n + 1]) * factor, of(x[2 * n]) * factor);
      }
      *reinterpret_cast<uint4*>(target + (row + r) * row_step + 8 * half) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

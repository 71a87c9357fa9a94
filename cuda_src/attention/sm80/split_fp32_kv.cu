// SPDX-License-Identifier: MIT
// attention_mma_prepare: splits float32 keys and values into the float16 tiles that
// attention_mma multiplies.
//
// Algorithm  fp32_forward.cuh. Done once here, instead of once per tile of queries
// Grid       1-D, one block per tile of keys of a head
// Memory     global: k and v twice (the second time from L2), the parts once
// Numbers    see fp32_forward.cuh; keys past the key length are zeros
// Limits     those of attention_mma
#include "attention/sm80/fp32_forward.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads) attention_mma_prepare(
    unsigned char* __restrict__ operands,  // (batch, kv heads, tiles) of kBytesOperands
                                           // bytes
    const elem_t* __restrict__ k,          // (batch, kv heads, keys, head_dim)
    const elem_t* __restrict__ v,          // (batch, kv heads, keys, head_dim_v)
    SCORE_PARAMETERS) {
  __shared__ tile_stats_t tile_stats[2];
  const index_t num_tiles = (params.seqlen_k + kBlockN - 1) / kBlockN;
  const index_t number = divide(block_index(), num_tiles);
  const index_t tile = block_index() - number * num_tiles;
  // The first query head that uses this head of keys.
  const tile_coord_t at(params, number * params.group_size * num_tiles + tile,
                        num_tiles);
  if (!at.exists) return;
  const index_t j0 = tile * kBlockN;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const int num_keys =
      static_cast<int>(clamp(scores.mask_bounds(0, j0).num_keys, 0, kBlockN));
  const elem_t* const k_rows = at.at_kv(k, params.k) + j0 * params.k.row;
  const elem_t* const v_rows = at.at_kv(v, params.v) + j0 * params.v.row;
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);
  const bool aligned_k = has_aligned_rows(k_rows, params.k.row, dim);
  const bool aligned_v = has_aligned_rows(v_rows, params.v.row, dim_v);
  auto chunk_of_k = [&](int n) {
    return load_chunk<kHeadDim>(k_rows, params.k.row, num_keys, dim, n, aligned_k);
  };
  auto chunk_of_v = [&](int n) {
    return load_chunk<kHeadDimV>(v_rows, params.v.row, num_keys, dim_v, n, aligned_v);
  };

  if (threadIdx.x < 2) tile_stats[threadIdx.x].clear();
  __syncthreads();  // the statistics are cleared
  inspect<kHeadDim>(tile_stats[0], chunk_of_k);
  inspect<kHeadDimV>(tile_stats[1], chunk_of_v);
  __syncthreads();  // the statistics are complete

  unsigned char* const operand_k =
      operands + (number * num_tiles + tile) * kBytesOperands;
  unsigned char* const operand_v = operand_k + kBytesOperandK;
  split_tile<kHeadDim>(operand_k, scale_t(tile_stats[0].largest).to_parts, chunk_of_k);
  split_tile<kHeadDimV>(operand_v, values_t(tile_stats[1]).to_parts, chunk_of_v);
  // All bytes of the statistics, because attention_mma copies them whole.
  constexpr int kWords = kBytesTileStats / 4, kUsed = sizeof(tile_stats_t) / 4;
  if (threadIdx.x < 2 * kWords) {
    const int of_v = threadIdx.x / kWords, word = threadIdx.x % kWords;
    unsigned char* const to =
        of_v ? operand_v + kParts * kBytesV : operand_k + kParts * kBytesK;
    const unsigned* const from = reinterpret_cast<const unsigned*>(tile_stats + of_v);
    reinterpret_cast<unsigned*>(to)[word] = word < kUsed ? from[word] : 0;
  }
}

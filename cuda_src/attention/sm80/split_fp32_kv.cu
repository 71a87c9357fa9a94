// SPDX-License-Identifier: MIT
// attention_mma_prepare: splits float32 keys and values into the float16 tiles that
// attention_mma multiplies.
//
// Algorithm  fp32_forward.cuh. Done once here, instead of once per tile of queries
// Grid       1-D, one block per tile of keys of a head
// Memory     global: k, v and the parts once
// Numbers    see fp32_forward.cuh; keys past the key length are zeros
// Limits     those of attention_mma
#include "attention/sm80/fp32_forward.cuh"

// The chunks of a tile that a thread splits, in registers.
template <int kDim> struct chunks_t {
  static constexpr int kChunks = kDim / kElemsOfChunk;
  static constexpr int kCount = kBlockN * kChunks / kNumThreads;
  static_assert(kCount * kNumThreads == kBlockN * kChunks);

  float4 chunks[kCount];

  __device__ __forceinline__ chunks_t(const elem_t* rows, index_t row_stride,
                                      int num_rows, int dim) {
    // A choice for each chunk would load one after the other.
    if (has_aligned_rows(rows, row_stride, dim)) {
      load(rows, row_stride, num_rows, dim, true);
    } else {
      load(rows, row_stride, num_rows, dim, false);
    }
  }
  __device__ __forceinline__ void inspect(tile_stats_t& tile_stats) const {
    found_t found;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      found.see(tile_stats, (threadIdx.x + i * kNumThreads) / kChunks, chunks[i]);
    }
    found.publish(tile_stats);
  }
  __device__ __forceinline__ void put(unsigned char* tile, float to_parts) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int n = threadIdx.x + i * kNumThreads;
      put_parts<kDim>(tile, kBlockN * kDim * 2, n / kChunks, n % kChunks, chunks[i],
                      to_parts);
    }
  }

 private:
  __device__ __forceinline__ void load(const elem_t* rows, index_t row_stride,
                                       int num_rows, int dim, bool aligned) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      chunks[i] = load_chunk<kDim>(rows, row_stride, num_rows, dim,
                                   threadIdx.x + i * kNumThreads, aligned);
    }
  }
};

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
  const chunks_t<kHeadDim> chunks_k(k_rows, params.k.row, num_keys, dim);
  const chunks_t<kHeadDimV> chunks_v(v_rows, params.v.row, num_keys, dim_v);

  if (threadIdx.x < 2) tile_stats[threadIdx.x].clear();
  __syncthreads();  // the statistics are cleared
  chunks_k.inspect(tile_stats[0]);
  chunks_v.inspect(tile_stats[1]);
  __syncthreads();  // the statistics are complete

  unsigned char* const operand_k =
      operands + (number * num_tiles + tile) * kBytesOperands;
  unsigned char* const operand_v = operand_k + kBytesOperandK;
  chunks_k.put(operand_k, scale_t(tile_stats[0].largest).to_parts);
  chunks_v.put(operand_v, values_t(tile_stats[1]).to_parts);
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

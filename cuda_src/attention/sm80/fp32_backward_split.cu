// SPDX-License-Identifier: MIT
// attention_vjp_mma_split_prepare: splits float32 inputs into the float16 operands that
// the gradient kernels multiply.
//
// Algorithm  fp32_backward.cuh. Done once here, instead of once per block that needs
//            the granule
// Grid       1-D, one block per granule of q, dO, k or v
// Memory     global: inputs and operands once
// Numbers    rows past the lengths, and nonfinite numbers, become zeros
// Limits     head_dim and head_dim_v up to kHeadDim
#include "attention/sm80/fp32_backward.cuh"

// How many powers of 2 the largest number of a row or column may lie below that of its
// granule; the row then loses 2^-19 of it.
constexpr int kSpread = 20;
// Range of the largest number in which units and their products are finite.
constexpr int kMostExponent = 40;

constexpr int kChunks = kHeadDim / kElemsOfChunk;
// Of a row: whole rows need not be whole warps.
constexpr int kLanes = kChunks % kWarpSize == 0 ? kWarpSize : 16;
constexpr int kEach = kGranule * kChunks / kNumThreads;
static_assert(kEach * kNumThreads == kGranule * kChunks && kNumThreads % kChunks == 0 &&
              kChunks % kLanes == 0);
constexpr int kChunksOfWarp = kColumns / 8;  // of 16 bytes

// The chunks of a granule that a thread splits. A choice for each of them would load
// one after the other.
__device__ __forceinline__ void load_chunks(float4 (&chunks)[kEach], const elem_t* rows,
                                            index_t row_stride, int num_rows, int dim,
                                            bool aligned) {
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    chunks[n] = load_chunk<kHeadDim>(rows, row_stride, num_rows, dim,
                                     n * kNumThreads + threadIdx.x, aligned);
  }
}

// Gathered by all threads: bits of magnitudes.
struct gathered_t {
  int largest, smallest;  // over all; over nonzero rows and columns
  unsigned marked;
  int rows[kGranule], columns[kHeadDim];
};

// Blocks of a multiprocessor, whose loads and barriers hide each other's.
constexpr int kResident = 768 / kNumThreads;

extern "C" __global__ void __launch_bounds__(kNumThreads, kResident)
    attention_vjp_mma_split_prepare(unsigned char* __restrict__ operands,
                                    BACKWARD_PARAMETERS, SCORE_PARAMETERS,
                                    const __grid_constant__ grads_t grads) {
  __shared__ gathered_t gathered;
  const index_t heads = params.batch_size * params.num_heads;
  const int granules_q = granules_of(params.seqlen_q);
  const int granules_k = granules_of(params.seqlen_k);
  index_t number = block_index();
  const bool of_queries = number < 2 * heads * granules_q;
  if (!of_queries) number -= 2 * heads * granules_q;
  const int granules = of_queries ? granules_q : granules_k;
  const index_t num_heads = of_queries ? heads : divide(heads, params.group_size);
  const bool has_values = number >= num_heads * granules;
  if (has_values) number -= num_heads * granules;
  const index_t head = divide(number, granules);
  if (head >= num_heads) return;
  const int i0 = static_cast<int>(number - head * granules) * kGranule;
  // For keys, the first query head that uses them.
  const tile_coord_t at(params, of_queries ? head : head * params.group_size, 1);
  const scores_t scores(at, SCORE_ARGUMENTS);
  const index_t length = of_queries ? scores.num_queries() : scores.num_keys();
  const int num_rows = static_cast<int>(clamp(length - i0, 0, kGranule));
  const int dim = static_cast<int>(has_values ? params.head_dim_v : params.head_dim);
  const operand_t& operand = of_queries   ? has_values ? grads.dout : params.q
                             : has_values ? params.v
                                          : params.k;
  const elem_t* const x = of_queries ? at.at(has_values ? dout : q, operand)
                                     : at.at_kv(has_values ? v : k, operand);
  const elem_t* const rows = x + i0 * operand.row;

  float4 chunks[kEach];
  if (has_aligned_rows(rows, operand.row, dim)) {
    load_chunks(chunks, rows, operand.row, num_rows, dim, true);
  } else {
    load_chunks(chunks, rows, operand.row, num_rows, dim, false);
  }
  for (int n = threadIdx.x; n < kHeadDim; n += kNumThreads) gathered.columns[n] = 0;
  if (threadIdx.x < kGranule) gathered.rows[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    gathered.largest = 0;
    gathered.smallest = kInfinityBits;
    gathered.marked = 0;
  }
  __syncthreads();  // the statistics are cleared

  float chunk[kEach][4];
  int columns[4] = {};
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int place = n * kNumThreads + threadIdx.x, row = place / kChunks;
    const float numbers[4] = {chunks[n].x, chunks[n].y, chunks[n].z, chunks[n].w};
    int largest = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool is_number = size_bits(numbers[e]) < kInfinityBits;
      if (!is_number) atomicOr(&gathered.marked, 1u << row);
      chunk[n][e] = is_number ? numbers[e] : 0.f;
      columns[e] = max(columns[e], size_bits(chunk[n][e]));
      largest = max(largest, size_bits(chunk[n][e]));
    }
    if constexpr (kLanes == kWarpSize) {
      largest = __reduce_max_sync(kFullMask, largest);
    } else {
      largest = warp_reduce<kLanes>(largest, [](int a, int b) { return max(a, b); });
    }
    if (threadIdx.x % kLanes == 0) atomicMax(gathered.rows + row, largest);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    atomicMax(gathered.columns + threadIdx.x % kChunks * 4 + e, columns[e]);
  }
  __syncthreads();  // rows and columns are complete
  // Of whole warps: the numbers of rows and of columns are multiples of 32.
  static_assert(kGranule % kWarpSize == 0 && kHeadDim % kWarpSize == 0);
  for (int n = threadIdx.x; n < kGranule + kHeadDim; n += kNumThreads) {
    const int size = n < kGranule ? gathered.rows[n] : gathered.columns[n - kGranule];
    const int most = __reduce_max_sync(kFullMask, size);
    const int least = __reduce_min_sync(kFullMask, size == 0 ? kInfinityBits : size);
    if (n % kWarpSize == 0) {
      atomicMax(&gathered.largest, most);
      atomicMin(&gathered.smallest, least);
    }
  }
  __syncthreads();  // and so are the statistics

  const int largest = gathered.largest;
  const int exponent = largest == 0 ? 0 : (largest >> 23) - 127;
  const bool fits = exponent >= -kMostExponent && exponent <= kMostExponent;
  const int up = fits ? 14 - exponent : 0;
  // Zeros if the numbers do not fit, because hidden pairs are multiplied, too.
  const float to_parts = fits ? __int_as_float((127 + up) << 23) : 0.f;
  const index_t first =
      of_queries ? 0 : 2 * heads * granules_q;  // operands of queries before these
  unsigned char* const parts =
      operands +
      (first + (has_values ? num_heads * granules : 0) + number) * kBytesOperand;
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int place = n * kNumThreads + threadIdx.x, row = place / kChunks;
    const int column = place % kChunks;
    unsigned low[kParts], high[kParts];
    split(low, chunk[n][0] * to_parts, chunk[n][1] * to_parts);
    split(high, chunk[n][2] * to_parts, chunk[n][3] * to_parts);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      unsigned char* const columns =
          parts + part * kBytesPart + column / 2 / kChunksOfWarp * kBytesColumns;
      *reinterpret_cast<uint2*>(
          columns + tile_t<kColumns>::offset(row, column / 2 % kChunksOfWarp) +
          column % 2 * 8) = make_uint2(low[part], high[part]);
    }
  }
  if (threadIdx.x < kBytesTileStats / sizeof(tile_stats_t)) {
    const bool is_uneven =
        largest != 0 && (largest >> 23) - (gathered.smallest >> 23) > kSpread;
    const tile_stats_t tile_stats = {__int_as_float((127 - up) << 23),
                                     __int_as_float(largest), gathered.marked,
                                     is_uneven || !fits};
    // The whole slot is copied later, although only the first numbers are read.
    reinterpret_cast<tile_stats_t*>(parts + kParts * kBytesPart)[threadIdx.x] =
        tile_stats;
  }
}

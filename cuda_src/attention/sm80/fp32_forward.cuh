// SPDX-License-Identifier: MIT
// attention_mma: float32 on tensor cores, with numbers split into float16.
//
// A tile is multiplied by a power of 2 that brings its largest number to [2^14, 2^15).
// Then x = high + low, both float16, is off by at most 2^-23 of x or 2^-39 of the
// largest number, and q k = high high + high low + low high by 2^-22 of q k.
// precision="tf32" uses only high, which has the 11 significant bits of that format. If
// 2^-39 of its largest number is not small enough, or if numbers are not finite, the
// scores or values of a tile are computed one by one instead (`whole`, `marked`).
#pragma once

#include "attention/sm80/softmax.cuh"
#include "ptx/registers.cuh"

// The keys of a tile, one bit each.
constexpr int kKeyWords = kBlockN / 32;

// Statistics of a tile of k or v, gathered by all threads.
struct tile_stats_t {
  int largest;   // bits of the largest finite magnitude
  int smallest;  // the smallest nonzero maximum over 4 neighbours, likewise
  unsigned marked[kKeyWords];  // keys with nonfinite numbers

  __device__ void clear() {
    largest = 0;
    smallest = kInfinityBits;
#pragma unroll
    for (int i = 0; i < kKeyWords; ++i) marked[i] = 0;
  }
};

// The power of 2 of a tile; 1 where the tile cannot be split.
struct scale_t {
  // Keeps products of two such powers finite; for tf32 also o in the unit of one tile
  // after another.
  static constexpr int kMost = kParts == 2 ? 60 : 30;

  float to_parts, from_parts;
  bool fits;

  __device__ __forceinline__ explicit scale_t(int largest) {
    const int exponent = (largest >> 23) - 127;
    fits = largest == 0 || (exponent >= -kMost && exponent <= kMost);
    const int up = fits && largest != 0 ? 14 - exponent : 0;
    to_parts = __int_as_float((127 + up) << 23);
    from_parts = __int_as_float((127 - up) << 23);
  }
};

// Scores have an error of up to 2^-39 (high alone 2^-25) of scale * head_dim * max |q|
// * max |k|, which is 2^-25 (2^-11) below this bound.
constexpr float kLargestScore = kParts == 2 ? 16384.f : 16777216.f;
// How many powers of 2 a value may lie below the largest of its tile.
constexpr int kSpread = kParts == 2 ? 16 : 28;

template <int kDim> struct staging_t {
  static constexpr int kChunks = kDim / kElemsOfChunk;
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return (row * kChunks + chunk) * 16;
  }
};

// What a thread finds in its chunks of a tile.
struct found_t {
  int largest = 0, smallest = kInfinityBits;

  // Sees a chunk of a row.
  __device__ __forceinline__ void see(tile_stats_t& tile_stats, int row, float4 x) {
    const int top =
        max(max(size_bits(x.x), size_bits(x.y)), max(size_bits(x.z), size_bits(x.w)));
    if (top >= kInfinityBits) {
      atomicOr(tile_stats.marked + row / 32, 1u << row % 32);
      const float numbers[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int size = size_bits(numbers[i]);
        if (size < kInfinityBits) largest = max(largest, size);
      }
    } else {
      largest = max(largest, top);
      if (top != 0) smallest = min(smallest, top);
    }
  }
  __device__ __forceinline__ void publish(tile_stats_t& tile_stats) {
    largest = __reduce_max_sync(kFullMask, largest);
    smallest = __reduce_min_sync(kFullMask, smallest);
    if (lanes_t::lane() == 0) {
      atomicMax(&tile_stats.largest, largest);
      atomicMin(&tile_stats.smallest, smallest);
    }
  }
};

// Gathers the statistics of a tile; `load(n)` returns its chunk n.
template <int kDim, typename Load>
__device__ __forceinline__ void inspect(tile_stats_t& tile_stats, Load load) {
  using staging_rows = staging_t<kDim>;
  found_t found;
#pragma unroll 4
  for (int n = threadIdx.x; n < kBlockN * staging_rows::kChunks; n += kNumThreads) {
    found.see(tile_stats, n / staging_rows::kChunks, load(n));
  }
  found.publish(tile_stats);
}

// Stores 4 numbers of a row as kParts tiles of float16; nonfinite ones become 0.
template <int kDim>
__device__ __forceinline__ void put_parts(unsigned char* tile, unsigned bytes, int row,
                                          int chunk, float4 x, float to_parts) {
  float numbers[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    numbers[i] = size_bits(numbers[i]) < kInfinityBits ? numbers[i] * to_parts : 0.f;
  }
  unsigned low[kParts], high[kParts];
  split(low, numbers[0], numbers[1]);
  split(high, numbers[2], numbers[3]);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    *reinterpret_cast<uint2*>(tile + part * bytes +
                              tile_t<kDim>::offset(row, chunk / 2) + chunk % 2 * 8) =
        make_uint2(low[part], high[part]);
  }
}

// Splits the chunks of a tile into parts.
template <int kDim, typename Load>
__device__ __forceinline__ void split_tile(unsigned char* tile, float to_parts,
                                           Load load) {
  using staging_rows = staging_t<kDim>;
#pragma unroll 4
  for (int n = threadIdx.x; n < kBlockN * staging_rows::kChunks; n += kNumThreads) {
    put_parts<kDim>(tile, kBlockN * kDim * 2, n / staging_rows::kChunks,
                    n % staging_rows::kChunks, load(n), to_parts);
  }
}

// Splits rows of q; returns the largest magnitude, infinity if one is not finite.
__device__ __forceinline__ float split_q(unsigned char* tile, int* largest_of_block,
                                         const elem_t* q, index_t row_stride,
                                         int num_rows, int dim, bool aligned,
                                         float& from_parts) {
  constexpr int kChunks = kHeadDim / kElemsOfChunk;
  int largest = 0;
  bool nonfinite = false;
  // A second pass recomputes these: there are no registers to keep them.
  unsigned thread = threadIdx.x;
  ptx::launder(thread);
#pragma unroll 4
  for (int n = thread; n < kBlockM * kChunks; n += kNumThreads) {
    const float4 x = load_chunk<kHeadDim>(q, row_stride, num_rows, dim, n, aligned);
    const float numbers[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int size = size_bits(numbers[i]);
      nonfinite |= size >= kInfinityBits;
      if (size < kInfinityBits) largest = max(largest, size);
    }
  }
  largest = __reduce_max_sync(kFullMask, largest);
  if (lanes_t::lane() == 0) atomicMax(largest_of_block, largest);
  nonfinite = __syncthreads_or(nonfinite);  // and largest_of_block is complete
  largest = *largest_of_block;
  const scale_t scale(largest);
  from_parts = scale.from_parts;
#pragma unroll 4
  for (int n = thread; n < kBlockM * kChunks; n += kNumThreads) {
    const float4 x = load_chunk<kHeadDim>(q, row_stride, num_rows, dim, n, aligned);
    put_parts<kHeadDim>(tile, kBytesQ, n / kChunks, n % kChunks, x, scale.to_parts);
  }
  return nonfinite || !scale.fits ? infinity<float>() : __int_as_float(largest);
}

// A tile of k or v in global memory, split in advance: its parts in the layout of
// shared memory, and its statistics.
constexpr unsigned kBytesTileStats = 128;  // tiles start at multiples of it
static_assert(sizeof(tile_stats_t) <= kBytesTileStats);
constexpr unsigned kBytesOperandK = kParts * kBytesK + kBytesTileStats;
constexpr unsigned kBytesOperandV = kParts * kBytesV + kBytesTileStats;
constexpr unsigned kBytesOperands = kBytesOperandK + kBytesOperandV;

// How the values of a tile are multiplied.
struct values_t {
  float to_parts, from_parts;  // to_parts is 0 where parts are not used
  float to_unit;               // 1 / from_parts
  bool whole;                  // one by one

  __device__ __forceinline__ explicit values_t(const tile_stats_t& tile_stats) {
    const scale_t scale(tile_stats.largest);
    whole = !scale.fits || (tile_stats.largest >>
                            23) - (min(tile_stats.smallest, tile_stats.largest) >> 23) >
                               kSpread;
    to_parts = whole ? 0.f : scale.to_parts;
    to_unit = whole ? 1.f : scale.to_parts;
    from_parts = whole ? 1.f : scale.from_parts;
  }
};

__device__ __forceinline__ bool any_marked(const tile_stats_t& tile_stats) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < kKeyWords; ++i) any |= tile_stats.marked[i] != 0;
  return any;
}

// --- products ------------------------------------------------------------------------

// Tensor cores, which truncate, sum this many steps of 16; the sums are added with
// rounding.
constexpr int kApart = kHeadDim <= 128 ? 2 : 1;
// Tiles of 8 columns computed side by side.
constexpr int kGroup = kRowTiles == 1 && kHeadDimV <= 128 ? 4 : 2;

template <int kCount>
__device__ __forceinline__ void clear(float (&x)[kRowTiles][kCount][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][n][e] = 0;
    }
  }
}

// sum += a b over all parts, small ones first; b holds two tiles of 8 columns.
__device__ __forceinline__ void multiply_parts(float (&sum)[2][4],
                                               const unsigned (&a)[kParts][4],
                                               const unsigned (&b)[kParts][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if constexpr (kParts == 2) {
      pair16_t::mma(sum[n], a[1], b[0][2 * n], b[0][2 * n + 1]);
      pair16_t::mma(sum[n], a[0], b[1][2 * n], b[1][2 * n + 1]);
    }
    pair16_t::mma(sum[n], a[0], b[0][2 * n], b[0][2 * n + 1]);
  }
}

// Tiles `first` on of `to` += unit * sum, with rounding.
using group_t = float[kRowTiles][kGroup / 2][2][4];
template <int kCount>
__device__ __forceinline__ void add_times(float (&to)[kRowTiles][kCount][4],
                                          const group_t& sum, int first, float unit) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        to[m][first + i][e] = fmaf(sum[m][i / 2][i % 2][e], unit, to[m][first + i][e]);
      }
    }
  }
}

// s = unit * q k^T
__device__ __forceinline__ void multiply_qk_split(scores_frag_t& s,
                                                  const lanes_t& lanes, float unit) {
  clear<kScoreTiles>(s);
#pragma unroll
  for (int first = 0; first < kSteps; first += kApart) {
    unsigned a[kApart][kRowTiles][kParts][4];
#pragma unroll
    for (int step = 0; step < kApart && first + step < kSteps; ++step) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          ptx::ldmatrix_x4(a[step][m][part],
                           lanes.q.at(16 * m, 2 * (first + step)) + part * kBytesQ);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kScoreTiles; n += kGroup) {
      group_t sum = {};
#pragma unroll
      for (int step = 0; step < kApart && first + step < kSteps; ++step) {
#pragma unroll
        for (int pair = 0; pair < kGroup / 2; ++pair) {
          unsigned b[kParts][4];
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            ptx::ldmatrix_x4(
                b[part],
                lanes.k.at(8 * (n + 2 * pair), 2 * (first + step)) + part * kBytesK);
          }
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            multiply_parts(sum[m][pair], a[step][m], b);
          }
        }
      }
      add_times(s, sum, n, unit);
    }
  }
}

// o += unit * p v
__device__ __forceinline__ void multiply_pv_split(out_frag_t& o, const scores_frag_t& p,
                                                  const lanes_t& lanes, float unit) {
  unsigned a[kBlockN / 16][kRowTiles][kParts][4];
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float (&tile)[4] = p[m][2 * step + n / 2];
        unsigned words[kParts];
        split(words, tile[n % 2 * 2], tile[n % 2 * 2 + 1]);
#pragma unroll
        for (int part = 0; part < kParts; ++part) a[step][m][part][n] = words[part];
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kOutTiles; n += kGroup) {
    group_t sum = {};
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < kGroup / 2; ++pair) {
        unsigned b[kParts][4];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          ptx::ldmatrix_x4_trans(b[part],
                                 lanes.v.at(16 * step, n + 2 * pair) + part * kBytesV);
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_parts(sum[m][pair], a[step][m], b);
        }
      }
    }
    add_times(o, sum, n, unit);
  }
}

// --- products of wide heads ----------------------------------------------------------

// o of more than 128 columns leaves few registers: the compiler must neither keep
// addresses from one tile of keys to the next nor begin many sums at a time. Products
// of a step alternate between 4 sums, since each waits for the one before it in its
// sum.
constexpr int kSums = 4;

// sum += a b over all parts, small ones first; b holds pairs of tiles of 8 columns.
template <int kPairs>
__device__ __forceinline__ void multiply_wide(float (&sum)[2 * kPairs][4],
                                              const unsigned (&a)[kParts][4],
                                              const unsigned (&b)[kParts][kPairs][4]) {
#pragma unroll
  for (int product = kParts == 2 ? 0 : 2; product < 3; ++product) {
    const int part_a = product == 0, part_b = product == 1;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const unsigned (&of)[4] = b[part_b][n / 2];
      pair16_t::mma(sum[n], a[part_a], of[n % 2 * 2], of[n % 2 * 2 + 1]);
    }
  }
}

// to += unit * sum, before what follows.
__device__ __forceinline__ void add_wide(float (&to)[4], const float (&sum)[4],
                                         float unit) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    to[e] = fmaf(sum[e], unit, to[e]);
    ptx::launder(to[e]);
  }
}

// s = unit * q k^T. Each step loads the operands of the next one.
__device__ __forceinline__ void multiply_qk_wide(scores_frag_t& s,
                                                 const unsigned char* smem_q,
                                                 const unsigned char* smem_k,
                                                 float unit) {
  // Steps until the exchange of chunks repeats.
  constexpr int kTurn = (lane_of_t<kHeadDim>::rows_t::kMask + 1) / 2;
  static_assert(!kWide || (kSteps % kTurn == 0 && kOutTiles % kSums == 0));
  unsigned thread = threadIdx.x;
  ptx::launder(thread);
  const int lane = lanes_t::lane(thread);
  lane_of_t<kHeadDim> q(shared_address(smem_q), lanes_t::warp_row(thread) + lane % 16,
                        lane / 16);
  lane_of_t<kHeadDim> k(shared_address(smem_k), lane % 8 + lane / 16 * 8, lane / 8 % 2);
  unsigned a[2][kParts][4], b[2][kParts][kScoreTiles / 2][4];
  auto load = [&](int step, int to) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      ptx::ldmatrix_x4(a[to][part], q.at(0, 2 * step) + part * kBytesQ);
#pragma unroll
      for (int pair = 0; pair < kScoreTiles / 2; ++pair) {
        ptx::ldmatrix_x4(b[to][part][pair], k.at(16 * pair, 2 * step) + part * kBytesK);
      }
    }
  };
  load(0, 0);
  clear<kScoreTiles>(s);
#pragma unroll 1
  for (int turn = 0; turn < kSteps / kTurn; ++turn) {
#pragma unroll
    for (int step = 0; step < kTurn; ++step) {
      if (step == kTurn - 1) {
        const unsigned by = turn + 1 < kSteps / kTurn ? kTurn * 32 : 0;
        q.base += by;
        k.base += by;
      }
      // After the last step the last turn once more, for nothing.
      load((step + 1) % kTurn, (step + 1) % 2);
      float sum[kScoreTiles][4] = {};
      multiply_wide(sum, a[step % 2], b[step % 2]);
#pragma unroll
      for (int i = 0; i < kScoreTiles; ++i) add_wide(s[0][i], sum[i], unit);
    }
  }
}

// o += unit * p v, likewise
__device__ __forceinline__ void multiply_pv_wide(out_frag_t& o, const scores_frag_t& p,
                                                 const unsigned char* smem_v,
                                                 float unit) {
  constexpr int kStepsOfTile = kBlockN / 16;
  unsigned thread = threadIdx.x;
  ptx::launder(thread);
  const int lane = lanes_t::lane(thread);
  const lane_of_t<kHeadDimV> v(shared_address(smem_v), lane % 16, lane / 16);
  unsigned a[kStepsOfTile][kParts][4], b[2][kParts][kSums / 2][4];
  auto load = [&](int n, int step, int to) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int pair = 0; pair < kSums / 2; ++pair) {
        ptx::ldmatrix_x4_trans(b[to][part][pair],
                               v.at(16 * step, n + 2 * pair) + part * kBytesV);
      }
    }
  };
  load(0, 0, 0);
#pragma unroll
  for (int step = 0; step < kStepsOfTile; ++step) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float (&tile)[4] = p[0][2 * step + n / 2];
      unsigned words[kParts];
      split(words, tile[n % 2 * 2], tile[n % 2 * 2 + 1]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) a[step][part][n] = words[part];
    }
  }
#pragma unroll
  for (int n = 0; n < kOutTiles; n += kSums) {
    float sum[kSums][4] = {};
#pragma unroll
    for (int step = 0; step < kStepsOfTile; ++step) {
      const int next = step + 1 < kStepsOfTile ? n : n + kSums;
      const int at = n / kSums * kStepsOfTile + step;
      if (next < kOutTiles) load(next, (step + 1) % kStepsOfTile, (at + 1) % 2);
      multiply_wide(sum, a[step], b[at % 2]);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) add_wide(o[0][n + i], sum[i], unit);
    // Never: a unit is a positive power of 2. But the assembler, which moves no product
    // past a branch, would otherwise begin so many that other numbers are spilled.
    if (unit == -1.f - n) return;
  }
}

// --- what parts cannot represent -----------------------------------------------------

// Rare, so not inlined: a thread's numbers go through its stack, and the surrounding
// loops need no registers for it.

// Computes scores with marked keys, or all with `whole`, one by one in float32.
__device__ __forceinline__ void compute_marked_scores(float* s, const unsigned* marked,
                                                      bool whole, const elem_t* q_rows,
                                                      const elem_t* k_rows,
                                                      const params_t& params,
                                                      int num_rows, int j0) {
  const int lane = lanes_t::lane();
#pragma unroll 1
  for (int number = 0; number < kRowTiles * kScoreTiles * 4; ++number) {
    const int e = number % 4, n = number / 4 % kScoreTiles,
              m = number / 4 / kScoreTiles;
    const int key = 8 * n + lane % 4 * 2 + e % 2, j = j0 + key;
    if (!whole && !(marked[key / 32] >> key % 32 & 1)) continue;
    const int row = lanes_t::warp_row() + 16 * m + e / 2 * 8 + lane / 4;
    float sum = 0;
    if (row < num_rows && j < params.seqlen_k) {
      const elem_t* const q_row = q_rows + row * params.q.row;
      const elem_t* const k_row = k_rows + j * params.k.row;
#pragma unroll 1
      for (int d = 0; d < params.head_dim; ++d) {
        sum = fmaf(to<float>(q_row[d]), to<float>(k_row[d]), sum);
      }
    }
    s[number] = sum;
  }
}

// o += p v one by one: nonfinite values of marked keys, for each row that sees the key;
// or all keys and values with `whole`. In shared memory nonfinite values were replaced
// by 0, because 0 * NaN of a hidden key would be NaN. o is in units of 1 / to_unit.
__device__ __forceinline__ void add_marked_values(float* o, const float* s,
                                                  const float* reference, float to_log2,
                                                  float to_unit, const unsigned* marked,
                                                  bool whole, const elem_t* v_rows,
                                                  const params_t& params, int j0,
                                                  int last) {
  const int lane = lanes_t::lane(), dim = static_cast<int>(params.head_dim_v);
#pragma unroll 1
  for (int key = 0; key < kBlockN && j0 + key < last; ++key) {
    if (!whole && !(marked[key / 32] >> key % 32 & 1)) continue;
    const elem_t* const v_row = v_rows + (j0 + key) * params.v.row;
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      // The score is held by the lane of four that owns the column.
      float x = s[(r / 2 * kScoreTiles + key / 8) * 4 + r % 2 * 2 + key % 2];
      x = __shfl_sync(kFullMask, x, (lane & ~3) | (key % 8 / 2));
      if (x == -infinity<float>()) continue;
      const float weight = ptx::ex2_approx_ftz(exponent(x, to_log2, reference[r]));
#pragma unroll 1
      for (int n = 0; n < 2 * kOutTiles; ++n) {
        const int column = n / 2 * 8 + lane % 4 * 2 + n % 2;
        const float value = column < dim ? to<float>(v_row[column]) : 0.f;
        if (!whole && is_finite(value)) continue;
        float& sum = o[(r / 2 * kOutTiles + n / 2) * 4 + r % 2 * 2 + n % 2];
        sum = fmaf(weight, value * to_unit, sum);
      }
    }
  }
}

// SPDX-License-Identifier: MIT
// Shared by the gradient kernels of float32 by mma.sync: inputs split into float16
// numbers, and products of such tiles.
//
// 32 rows of q, dO, k or v (a granule) are multiplied by a power of 2 that brings their
// largest number to [2^14, 2^15). Then x = high + low, both float16, is off by at most
// 2^-23 of x or 2^-39 of the largest number, and a product takes three of float16: high
// high + high low + low high. P and dS are split in registers, each row of a tile with
// its own power of 2. precision="tf32" uses only high.
//
// operands  (tensor, entries, granules) of kBytesOperand: kParts tiles of kGranule rows
//         in the layout of shared memory, and their statistics. First q and dO of all
//         heads, then k and v of theirs. Nonfinite numbers are replaced by 0. A tile of
//         more than 128 columns is kColumnWarps tiles, one after the other
// stats   (entries, granules of queries, 3, kGranule)  float: lse in log2, delta, and
//         the factor of the weights of the row
//
// Two warps share the rows of more than 128 columns: each multiplies half of the
// columns and adds the other's sums to its own, so that both have the same S and dP.
//
// Where few blocks have long loops, several share one (loop_splits.cuh). Sums of splits
// are (splits, entries, rows, columns).
//
// Pairs of granules with numbers that parts cannot represent set found->nonfinite, and
// the portable kernels compute all gradients again in plain float32. So do pairs of a
// query and a key that see each other with a nonfinite number.
#pragma once

#include "attention/sm80/fp32_split.cuh"
#include "attention/simt/long_sums.cuh"
#include "attention/simt/loop_splits.cuh"
#include "attention/sm80/backward.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"

#ifndef STAGES
#error "STAGES comes from the host"
#endif
static_assert(kSplits);

constexpr int kGranule = 32;     // rows
constexpr int kStages = STAGES;  // granules of the rows walked over, in shared memory
static_assert(kStages == 1 || kStages == 2);
// Warps that share rows, and the columns of each.
constexpr int kColumnWarps = kHeadDim > 128 ? 2 : 1;
constexpr int kColumns = kHeadDim / kColumnWarps;
constexpr int kRowWarps = kNumWarps / kColumnWarps;
constexpr unsigned kBytesColumns = kGranule * kColumns * 2;  // their part of a part
// The granules of an array are rounded up to those of the largest tile.
constexpr int kLargestTile = kHeadDim > 128 ? 64 : 128;
constexpr unsigned kBytesPart = kGranule * kHeadDim * 2;
constexpr unsigned kBytesTileStats = 128;
constexpr unsigned kBytesOperand = kParts * kBytesPart + kBytesTileStats;
constexpr unsigned kBytesStats = 3 * kGranule * 4;

__device__ __forceinline__ int granules_of(index_t num_rows) {
  return static_cast<int>((num_rows + kLargestTile - 1) / kLargestTile) *
         (kLargestTile / kGranule);
}

// The rows of this warp, and its columns.
__device__ __forceinline__ int row_warp() {
  return kColumnWarps == 1 ? warp_index() : warp_index() % kRowWarps;
}
__device__ __forceinline__ int column_warp() {
  return kColumnWarps == 1 ? 0 : warp_index() / kRowWarps;
}
// The columns of this warp in an operand.
__device__ __forceinline__ unsigned columns_of(const unsigned char* operand) {
  return shared_address(operand) + column_warp() * kBytesColumns;
}

// Statistics of a granule.
struct tile_stats_t {
  float from_parts;  // inverse of its power of 2
  float largest;     // largest finite magnitude
  unsigned marked;   // rows with nonfinite numbers, one bit each
  int is_uneven;     // some rows or columns are so small that parts lose bits
};

__device__ __forceinline__ const tile_stats_t& tile_stats_of(
    const unsigned char* operand) {
  return *reinterpret_cast<const tile_stats_t*>(operand + kParts * kBytesPart);
}

// Where the operands of an entry start.
struct split_operands_t {
  const unsigned char *q, *dout, *k, *v;

  __device__ __forceinline__ split_operands_t(const unsigned char* operands,
                                              const params_t& params,
                                              const tile_coord_t& at) {
    const index_t heads = params.batch_size * params.num_heads;
    const index_t heads_kv = divide(heads, params.group_size);
    const index_t head_kv = divide(at.row_of_heads, params.group_size);
    const index_t of_q = granules_of(params.seqlen_q) * index_t(kBytesOperand);
    const index_t of_k = granules_of(params.seqlen_k) * index_t(kBytesOperand);
    q = operands + at.row_of_heads * of_q;
    dout = q + heads * of_q;
    k = operands + 2 * heads * of_q + head_kv * of_k;
    v = k + heads_kv * of_k;
  }
};

// The tile of a block, by the index of the block. Sections of entries whose other rows
// fit into the L2 cache follow each other; within one, tiles are sorted by length.
struct work_tile_t {
  index_t tile, kept;
  bool exists;  // the grid is rounded up

  __device__ __forceinline__ work_tile_t(index_t number, index_t section,
                                         index_t num_kept, index_t num_tiles) {
    const index_t of_section = divide(number, section * num_tiles);
    const index_t first = of_section * section;
    const index_t rest = number - first * num_tiles;
    const index_t width = min(section, num_kept - first);
    exists = width > 0;
    tile = exists ? divide(rest, width) : 0;
    kept = first + rest - tile * width;
    exists = exists && tile < num_tiles;
  }
};

// Leaves the granules of a block's split of a loop.
__device__ __forceinline__ void take_split(int& first, int& last, index_t split,
                                           index_t splits) {
  const unsigned granules = (last - first + kGranule - 1) / kGranule;
  const unsigned each = (granules + unsigned(splits) - 1) / unsigned(splits);
  const unsigned before = min(unsigned(split) * each, granules);
  first = min(first + static_cast<int>(before) * kGranule, last);
  last = min(first + static_cast<int>(each) * kGranule, last);
}

// 1 / total if that is 1 up to roundings of lse; if not, lse covers keys of other
// calls.
__device__ __forceinline__ float factor_of(float total, float log_sum) {
  // Within 8 ulp of lse, or of 1.
  const float roundings =
      8 * 0x1p-23f * fmaxf(1, fabsf(log_sum) * static_cast<float>(kLn2));
  // Rows that do not exist have an infinite lse and no total.
  return total > 0 && fabsf(total - 1) <= roundings ? 1 / total : 1.f;
}
// What the sink of a row adds to its total.
__device__ __forceinline__ float total_of_sink(const scores_t& scores, float log_sum) {
  return ptx::ex2_approx_ftz(scores.sink() * static_cast<float>(kLog2e) - log_sum);
}
// lse in log2. If a query sees no key, any finite one will do.
__device__ __forceinline__ float log_sum_of(float lse) {
  return lse == -infinity<float>() ? 0.f : lse * static_cast<float>(kLog2e);
}

// Starts copying kBytes.
template <unsigned kBytes>
__device__ __forceinline__ void copy_bytes(unsigned char* smem, const void* from) {
  static_assert(kBytes % 16 == 0);
  constexpr unsigned kStep = 16 * kNumThreads;
  const unsigned first = thread_index() * 16, to = shared_address(smem) + first;
  const char* const bytes = static_cast<const char*>(from) + first;
#pragma unroll
  for (unsigned n = 0; n < kBytes; n += kStep) {
    if (n + kStep <= kBytes || first < kBytes - n) {
      ptx::copy_async_or_zero(to + n, bytes + n, 16);
    }
  }
}

// Whether a run of a two-level sum ends between rows `first` and `next`; the last run
// ends after the loop.
__device__ __forceinline__ bool run_ends_between(int first, int next, int last) {
  constexpr int kRun = kRunTiles * kGranule;
  const bool ends = kHasMaskFunction ? next / kRun != first / kRun : next % kRun == 0;
  return kTwoLevelSums && (ends || next >= last);
}

// --- products ------------------------------------------------------------------------

// Tensor cores truncate: they sum 32 columns or rows; sums are added with rounding.
constexpr int kApart = 2;
constexpr int kSteps = kColumns / 16;
static_assert(kSteps % kApart == 0 && kGranule == 16 * kApart);

// Pairs of tiles of 8 columns computed side by side; with two, 128 columns spill.
constexpr int kPairs = 1;

template <int kRows>
using parts_t = unsigned[kRows][kParts][4];  // 16 columns of an A operand

// sum += a b over all parts, small ones first. With kMirrored the roles of a and b are
// exchanged, so that (a b)^T = b^T a^T to the bit.
template <bool kMirrored, int kRows>
__device__ __forceinline__ void multiply_parts(float (&sum)[kRows][2 * kPairs][4],
                                               const unsigned (&a)[kRows][kParts][4],
                                               const unsigned (&b)[kPairs][kParts][4]) {
  auto multiply = [&](int of_a, int of_b) {
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        pair16_t::mma(sum[m][n], a[m][of_a], b[n / 2][of_b][n % 2 * 2],
                      b[n / 2][of_b][n % 2 * 2 + 1]);
      }
    }
  };
  if constexpr (kParts == 2) {
    multiply(kMirrored ? 0 : 1, kMirrored ? 1 : 0);
    multiply(kMirrored ? 1 : 0, kMirrored ? 0 : 1);
  }
  multiply(0, 0);
}

// One number per row of this lane, in kRows tiles of 16.
template <int kRows> struct units_t {
  float of[kRows][2];

  __device__ __forceinline__ units_t operator*(float x) const {
    units_t product;
#pragma unroll
    for (int r = 0; r < 2 * kRows; ++r) product.of[r / 2][r % 2] = of[r / 2][r % 2] * x;
    return product;
  }
  __device__ __forceinline__ units_t operator*(const units_t& x) const {
    units_t product;
#pragma unroll
    for (int r = 0; r < 2 * kRows; ++r) {
      product.of[r / 2][r % 2] = of[r / 2][r % 2] * x.of[r / 2][r % 2];
    }
    return product;
  }
};

// to += sum times the unit that `unit(m, e)` returns.
template <int kRows, int kCols, int kTiles, typename Unit>
__device__ __forceinline__ void add_times(float (&to)[kRows][kCols][4],
                                          const float (&sum)[kRows][kTiles][4],
                                          int first, Unit unit) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        to[m][first + n][e] = fmaf(sum[m][n][e], unit(m, e), to[m][first + n][e]);
      }
    }
  }
}

// s = a b^T times `unit`, over the columns of this warp.
template <bool kMirrored, int kRows, int kCols>
__device__ __forceinline__ void multiply_scores_in_parts(float (&s)[kRows][kCols][4],
                                                         const tile_t<kColumns>& a,
                                                         const tile_t<kColumns>& b,
                                                         float unit) {
  static_assert(kCols % (2 * kPairs) == 0);
  clear(s);
#pragma unroll 1
  for (int first = 0; first < kSteps; first += kApart) {
    parts_t<kRows> x[kApart];
#pragma unroll
    for (int step = 0; step < kApart; ++step) {
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          ptx::ldmatrix_x4(x[step][m][part],
                           a.at(16 * m, 2 * (first + step)) + part * kBytesPart);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kCols; n += 2 * kPairs) {
      float sum[kRows][2 * kPairs][4] = {};
#pragma unroll
      for (int step = 0; step < kApart; ++step) {
        unsigned y[kPairs][kParts][4];
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            ptx::ldmatrix_x4(
                y[pair][part],
                b.at(8 * (n + 2 * pair), 2 * (first + step)) + part * kBytesPart);
          }
        }
        multiply_parts<kMirrored>(sum, x[step], y);
      }
      add_times(s, sum, n, [&](int, int) { return unit; });
    }
  }
}

// What warps that share rows publish to each other: kSlots arrays of accumulators of
// each. A slot is written again only after a barrier of the block.
template <int kSlots, int kRows, int kCols> struct exchange_t {
  static constexpr int kEach = kRows * kCols;
  static constexpr unsigned kBytes =
      kColumnWarps == 1 ? 0 : kSlots * kNumWarps * kEach * kWarpSize * sizeof(float4);
  float4* memory;

  __device__ __forceinline__ float4* of(int slot, int warp) const {
    return memory + (slot * kNumWarps + warp) * (kEach * kWarpSize) + lane_index();
  }
  // Publishes the sums over this warp's columns.
  template <int kOwn>
  __device__ __forceinline__ void publish(int slot,
                                          const float (&x)[kRows][kOwn][4]) const {
    if constexpr (kColumnWarps == 1) return;
    float4* const to = of(slot, warp_index());
#pragma unroll
    for (int n = 0; n < kRows * kOwn; ++n) {
      const float (&own)[4] = x[n / kOwn][n % kOwn];
      to[n * kWarpSize] = make_float4(own[0], own[1], own[2], own[3]);
    }
  }
  // Keeps words of this lane where it published sums, once the other warp has read
  // them.
  template <typename Words>
  __device__ __forceinline__ void keep(int slot, const Words& words) const {
    static_assert(sizeof(words) <= kEach * sizeof(float4));
    uint4* const to = reinterpret_cast<uint4*>(of(slot, warp_index()));
    const unsigned* const x = reinterpret_cast<const unsigned*>(&words);
#pragma unroll
    for (int n = 0; n < sizeof(words) / sizeof(uint4); ++n) {
      to[n * kWarpSize] =
          make_uint4(x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]);
    }
  }
  template <typename Words>
  __device__ __forceinline__ void take_back(int slot, Words& words) const {
    const uint4* const from = reinterpret_cast<const uint4*>(of(slot, warp_index()));
    unsigned* const x = reinterpret_cast<unsigned*>(&words);
#pragma unroll
    for (int n = 0; n < sizeof(words) / sizeof(uint4); ++n) {
      const uint4 word = from[n * kWarpSize];
      x[4 * n] = word.x, x[4 * n + 1] = word.y;
      x[4 * n + 2] = word.z, x[4 * n + 3] = word.w;
    }
  }
  // Waits for the warp that shares the rows.
  __device__ __forceinline__ void wait() const {
    if constexpr (kColumnWarps > 1) {
      ptx::bar_sync<kColumnWarps * kWarpSize>(1 + row_warp());
    }
  }
  // Adds what it published.
  template <int kOwn>
  __device__ __forceinline__ void add(int slot, float (&x)[kRows][kOwn][4]) const {
    if constexpr (kColumnWarps == 1) return;
    static_assert(kColumnWarps <= 2);
    const float4* const from = of(slot, (warp_index() + kRowWarps) % kNumWarps);
#pragma unroll
    for (int n = 0; n < kRows * kOwn; ++n) {
      const float4 other = from[n * kWarpSize];
      float (&own)[4] = x[n / kOwn][n % kOwn];
      own[0] += other.x, own[1] += other.y, own[2] += other.z, own[3] += other.w;
    }
  }
};

// sums += a b times the units of rows, over 16 kSummed rows of a granule b. The
// compiler may fetch fragments of kRegion tiles of columns ahead.
template <int kRegion = 8, int kSummed, int kRows, int kCols>
__device__ __forceinline__ void add_product_in_parts(
    float (&sums)[kRows][kCols][4], const unsigned (&a)[kSummed][kRows][kParts][4],
    const tile_t<kColumns>& b, const units_t<kRows>& unit) {
  static_assert(kCols % (2 * kPairs) == 0);
#pragma unroll
  for (int n = 0; n < kCols; n += 2 * kPairs) {
    float sum[kRows][2 * kPairs][4] = {};
#pragma unroll
    for (int step = 0; step < kSummed; ++step) {
      unsigned y[kPairs][kParts][4];
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          ptx::ldmatrix_x4_trans(y[pair][part],
                                 b.at(16 * step, n + 2 * pair) + part * kBytesPart);
        }
      }
      multiply_parts<false>(sum, a[step], y);
    }
    add_times(sums, sum, n, [&](int m, int e) { return unit.of[m][e / 2]; });
    // Keeps the compiler from holding fragments of more columns in registers.
    if (n % kRegion == kRegion - 2) ptx::end_region(unit.of[0][0] < 0);
  }
}

// Sums are scaled by this, so that the units of small numbers do not underflow.
constexpr float kLift = 0x1p40f;

// Splits a warp's accumulators into parts of an A operand, each row scaled by a power
// of 2. Returns the inverses of these powers.
template <int kSummed, int kRows, int kCols>
__device__ __forceinline__ units_t<kRows> as_parts(
    unsigned (&a)[kSummed][kRows][kParts][4], const float (&x)[kRows][kCols][4]) {
  static_assert(kCols == 2 * kSummed);
  units_t<kRows> from_parts;
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = 0;
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        largest = fmaxf(largest, fabsf(x[m][n][2 * r]));
        largest = fmaxf(largest, fabsf(x[m][n][2 * r + 1]));
      }
      // Four lanes share a row.
      largest = fmaxf(largest, shuffle_xor(largest, 1));
      largest = fmaxf(largest, shuffle_xor(largest, 2));
      // The inverse, times kLift and the unit of a granule (at least 2^-54), is finite.
      constexpr int kLeast = (127 - 98) << 23, kMost = (127 + 100) << 23;
      const int exponent =
          min(max(__float_as_int(largest) & kInfinityBits, kLeast), kMost);
      const float to_parts = __int_as_float(((2 * 127 + 14) << 23) - exponent);
      from_parts.of[m][r] = __int_as_float(exponent - (14 << 23));
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        unsigned words[kParts];
        split(words, x[m][n][2 * r] * to_parts, x[m][n][2 * r + 1] * to_parts);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          a[n / 2][m][part][n % 2 * 2 + r] = words[part];
        }
      }
    }
  }
  return from_parts;
}

// Number e of accumulator (m, n) reassembled, scaled as its row is.
template <int kSummed, int kRows>
__device__ __forceinline__ float of_parts(
    const unsigned (&a)[kSummed][kRows][kParts][4], int m, int n, int e) {
  auto number = [&](int part) {
    const unsigned word = a[n / 2][m][part][n % 2 * 2 + e / 2];
    return ptx::f32_from_f16(static_cast<unsigned short>(e % 2 ? word >> 16 : word));
  };
  if constexpr (kParts == 2) return number(0) + number(1);
  return number(0);
}

// SPDX-License-Identifier: MIT
// points_gradient: gradients by the points of a cloud, as sums of differences.
//
// Algorithm  q_ij = scale |x_i - y_j|^2,  c_ij = 2^(r_i + h_j) K(q_ij) (a_i . b_j),
//            m_i = sum_j c_ij (x_i - y_j), and sums of squares (gradient.cuh).
//            K is the derivative of a kernel. Of means r_i is minus the log-sum, so
//            that weights are known at once; sums without weights have r = h = 0.
// Grid       (batch x row blocks, splits of the keys, chunks of axes)
// Tiles      the threads form 16 x 16 and own kRows rows and kKeys keys each: 16 kRows
//            rows and kStep keys at a time, with coordinates in shared memory. Up to 8
//            axes a thread adds its own pairs to the moments of its rows. Above, kChunk
//            axes are in shared memory at a time; c goes there too, and a thread then
//            has all keys of kRows rows and one axis of each chunk.
// Skipping   up to 8 axes, by the boxes of tiles (tiles.cuh)
// Numbers    differences, distances and scores in wide_t, exponentials and sums in
//            sum_t. Differences of axes with bandwidths of their own (SCALED) are
//            scaled after the subtraction. A thread sums 16 to 32 terms, then threads
//            are added, and totals keep their rounding errors.
// Precision  With weights a launch takes pairs of a block and a tile whose terms r + h
//            are up to `limit`, which bounds the distances that count; `repair` takes
//            the others. Without weights a repair makes all sums once more if they are
//            small relative to the values, or the blocks flagged in `redo`.

#include "common/exp2_f64.cuh"
#include "points/function.cuh"
#include "points/gradient.cuh"
#include "points/sums.cuh"
#include "points/tiles.cuh"
#include "ptx/opaque.cuh"

using coord_t = COORD_T;
using wide_t = WIDE_T;
using accum_t = ACCUM_T;  // of values
using sum_t = SUM_T;      // of exponentials and sums

constexpr bool kIsScaled = SCALED;
constexpr bool kIsFunction = FUNCTION;
constexpr bool kIsMany = MANY;  // kColumns of them are in shared memory at a time
constexpr int kSide = 16;
constexpr int kThreads = kSide * kSide;
constexpr int kRows = ROWS;
constexpr int kKeys = KEYS;
constexpr int kBlockRows = kSide * kRows;
constexpr int kStep = kSide * kKeys;
constexpr int kChunk = kIsWhole ? kDim : kSide;
constexpr int kAxisChunks = (kAxes + kChunk - 1) / kChunk;
constexpr int kLoaded = kIsWhole ? kTileKeys : kStep;
constexpr int kLoadedValues = kIsMany ? kStep : kTileKeys;
constexpr int kLanesOfRow = kSide / kRows;  // lanes that get its sums; one keeps them
// Moments that threads have of their own pairs, to be added for each row.
constexpr bool kKeepsRest = sizeof(sum_t) == 4;  // float64 needs no rounding errors
constexpr int kRowSums = kIsWhole ? kMoments : 1;
// Where threads of one axis each read a column, rows are longer than a bank's period.
constexpr int kRowPadding = kIsWhole ? 0 : 16 / sizeof(wide_t);
constexpr int kKeyPadding = kIsWhole ? 0 : 1;
constexpr int kStoredRows = kBlockRows + 16 / sizeof(sum_t);
constexpr double kHighestScore = 1000;  // exponentials of float64 overflow above
// Rows whose largest r tells which launch takes a tile: all must agree.
constexpr int kRuleRows = RULE_ROWS;
static_assert(kRuleRows % kBlockRows == 0 && kRuleRows <= kThreads);
static_assert(kBlockRows % kGroup == 0 && kTileKeys % kStep == 0);

struct exponential_t {
  __device__ __forceinline__ explicit exponential_t(const exp2_table_t& table)
      : exp2(table) {}
  __device__ __forceinline__ float operator()(float x) const {
    return ptx::ex2_approx_ftz(x);
  }
  __device__ __forceinline__ double operator()(double x) const {
    return exp2(x > kHighestScore ? kHighestScore : x);
  }
  exp2_t exp2;
};

struct smem_t {
  wide_t x[kChunk][kBlockRows + kRowPadding];
  wide_t y[kChunk][kLoaded + kKeyPadding];
  wide_t scale[kIsScaled ? kChunk : 1];  // of each axis
  wide_t r[kBlockRows];                  // relative to minus the tile's largest h
  wide_t h[kTileKeys];                   // relative to it
  sum_t a[kColumns][kBlockRows];
  sum_t b[kColumns][kLoadedValues];
  sum_t c[kIsWhole ? 1 : kStep][kStoredRows];
  // Sums of rows, with their rounding errors: of all moments, or of the last alone.
  sum_t total[kRowSums][kBlockRows], rest[kKeepsRest ? kRowSums : 1][kBlockRows];
  exp2_table_t table;
  float tops[kThreads / kWarpSize];
  tile_list_t<1, kThreads> list;
};

// Sums of this thread above 8 axes: of kRows rows and an axis of each chunk.
struct state_t {
  sum_t total[kAxisChunks][kRows], rest[kAxisChunks][kRows];
  sum_t squares[kAxisChunks][kRows], squares_rest[kAxisChunks][kRows];
};

// Position of this thread, and the block's part of each array.
struct block_t {
  const coord_t *x, *y;
  const double* h;
  const accum_t *a, *b;
  const double* scales;  // of each axis: 1 / bandwidth
  const float* boxes;
  int tx, ty;
  int first_axis;
  int rule_row;  // place of its rows among kRuleRows
  double r;      // of the row threadIdx.x of these, in bits
};

__device__ __forceinline__ wide_t gap_of(wide_t x, wide_t y, wide_t scale) {
  return kIsScaled ? (x - y) * scale : x - y;
}

// The k-th key of a lane among kStep. Above 8 axes neighbours are of other lanes, which
// write c without bank conflicts.
__device__ __forceinline__ int key_of(const block_t& block, int k) {
  return kIsWhole ? block.tx * kKeys + k : k * kSide + block.tx;
}

__device__ __forceinline__ int own_row(const block_t& block) {
  return block.ty * kRows + block.tx / kLanesOfRow;
}
__device__ __forceinline__ bool owns_row(const block_t& block) {
  return block.tx % kLanesOfRow == 0;
}

__device__ __forceinline__ void load_rows(smem_t& smem, const block_t& block,
                                          const points_params_t& params,
                                          int first_axis) {
  for (int n = threadIdx.x; n < kChunk * kBlockRows; n += kThreads) {
    const int d = first_axis + n / kBlockRows, i = n % kBlockRows;
    const long long at = static_cast<long long>(d) * params.padded_rows + i;
    smem.x[n / kBlockRows][i] = d < kDim ? wide_t(block.x[at]) : wide_t(0);
  }
  if constexpr (kIsScaled) {
    const int d = first_axis + threadIdx.x;
    if (threadIdx.x < kChunk) {
      smem.scale[threadIdx.x] = d < kDim ? wide_t(block.scales[d]) : wide_t(0);
    }
  }
}

__device__ __forceinline__ void load_keys(smem_t& smem, const block_t& block,
                                          const points_params_t& params, int first_axis,
                                          int first) {
  for (int n = threadIdx.x; n < kChunk * kLoaded; n += kThreads) {
    const int d = first_axis + n / kLoaded, j = n % kLoaded;
    const long long at = static_cast<long long>(d) * params.padded_keys + first + j;
    smem.y[n / kLoaded][j] = d < kDim ? wide_t(block.y[at]) : wide_t(0);
  }
}

// `count` values of each of kColumns columns.
template <int kCount, int kStride>
__device__ __forceinline__ void load_values(sum_t (&to)[kColumns][kStride],
                                            const accum_t* from, int padded,
                                            int column) {
  for (int n = threadIdx.x; n < kColumns * kCount; n += kThreads) {
    const int v = n / kCount, i = n % kCount;
    to[v][i] = from[static_cast<long long>(column + v) * padded + i];
  }
}

// The data of a tile other than coordinates.
__device__ __forceinline__ void load_terms(smem_t& smem, const block_t& block,
                                           const points_params_t& params, int first,
                                           float top) {
  if constexpr (kHasWeights) {
    const double base = is_finite(top) ? top : 0;
    const int n = threadIdx.x;
    smem.h[n] = wide_t(block.h[first + n] * kLog2e - base);
    const int i = n - block.rule_row;
    if (i >= 0 && i < kBlockRows) smem.r[i] = wide_t(block.r + base);
  }
  if constexpr (!kIsMany) {
    load_values<kTileKeys>(smem.b, block.b + first, params.padded_keys, 0);
  }
}

// Squared distances of kStep keys, those from `start` of the tile at `first`.
__device__ __forceinline__ void distances(wide_t (&d2)[kRows][kKeys], smem_t& smem,
                                          const block_t& block,
                                          const points_params_t& params, int first,
                                          int start, int same) {
  const int row = block.ty * kRows + same;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kKeys; ++k) d2[r][k] = 0;
  }
  const auto add_chunk = [&](wide_t(&sum)[kRows][kKeys], int from) {
#pragma unroll
    for (int d = 0; d < kChunk; ++d) {
      wide_t x[kRows], y[kKeys];
#pragma unroll
      for (int r = 0; r < kRows; ++r) x[r] = smem.x[d][row + r];
#pragma unroll
      for (int k = 0; k < kKeys; ++k) y[k] = smem.y[d][from + key_of(block, k)];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < kKeys; ++k) {
          const wide_t gap = gap_of(x[r], y[k], smem.scale[kIsScaled ? same + d : 0]);
          sum[r][k] = fma_of(gap, gap, sum[r][k]);
        }
      }
    }
  };
  if constexpr (kIsWhole) {
    add_chunk(d2, start);
  } else {
#pragma unroll 1
    for (int axis = 0; axis < kDim; axis += kChunk) {
      __syncthreads();  // the previous chunk has been read
      load_rows(smem, block, params, axis);
      load_keys(smem, block, params, axis, first + start);
      __syncthreads();
      wide_t sum[kRows][kKeys] = {};
      add_chunk(sum, 0);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < kKeys; ++k) d2[r][k] += sum[r][k];
      }
    }
  }
}

// a . b of many columns
__device__ __forceinline__ void multiply(sum_t (&c)[kRows][kKeys], smem_t& smem,
                                         const block_t& block,
                                         const points_params_t& params, int first,
                                         int start) {
#pragma unroll 1
  for (int column = 0; column < params.num_columns; column += kColumns) {
    __syncthreads();  // the previous columns have been read
    load_values<kBlockRows>(smem.a, block.a, params.padded_rows, column);
    load_values<kStep>(smem.b, block.b + first + start, params.padded_keys, column);
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kColumns; ++v) {
      sum_t b[kKeys];
#pragma unroll
      for (int k = 0; k < kKeys; ++k) b[k] = smem.b[v][key_of(block, k)];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const sum_t a = smem.a[v][block.ty * kRows + r];
#pragma unroll
        for (int k = 0; k < kKeys; ++k) c[r][k] = fma_of(a, b[k], c[r][k]);
      }
    }
  }
}

// 2^rest K(scale d2)
template <typename K>
__device__ __forceinline__ sum_t weight_of(wide_t d2, wide_t scale, wide_t rest,
                                           const kernel_args_t& args,
                                           const exponential_t& exp2) {
  if constexpr (kIsFunction) {
    const wide_t k = K::of(scale * d2, args);
    if constexpr (!kHasWeights) return sum_t(k);
    const wide_t w = exp2(rest);
    return k == 0 ? sum_t(0) : sum_t(w * k);
  } else {
    sum_t w = 1;
    if constexpr (K::kHasExponent || kHasWeights) {
      w = exp2(sum_t(score_of(d2, scale, rest)));
    }
    if constexpr (K::kHasFactor) w *= K::factor(sum_t(scale * d2));
    return w;
  }
}

// Moments of an axis, of c that is in shared memory.
__device__ __forceinline__ void add_moments(state_t& state, smem_t& smem,
                                            const block_t& block,
                                            const points_params_t& params, int first) {
#pragma unroll
  for (int m = 0; m < kAxisChunks; ++m) {
    if constexpr (kDim > kChunk) {
      __syncthreads();  // the previous chunk has been read
      load_rows(smem, block, params, block.first_axis + m * kChunk);
      load_keys(smem, block, params, block.first_axis + m * kChunk, first);
    }
    __syncthreads();
    const wide_t scale = smem.scale[kIsScaled ? block.tx : 0];
    wide_t x[kRows];
    sum_t sums[kRows] = {}, squares[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = smem.x[block.tx][block.ty * kRows + r];
#pragma unroll 4
    for (int k = 0; k < kStep; ++k) {
      const wide_t y = smem.y[block.tx][k];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const sum_t c = smem.c[k][block.ty * kRows + r];
        const sum_t gap = sum_t(gap_of(x[r], y, scale));
        if constexpr (kSquares == 2) {
          const sum_t part = c * gap;
          sums[r] += part;
          squares[r] = fma_of(part, gap, squares[r]);
        } else {
          sums[r] = fma_of(c, gap, sums[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      add(state.total[m][r], state.rest[m][r], sums[r]);
      if constexpr (kSquares == 2) {
        add(state.squares[m][r], state.squares_rest[m][r], squares[r]);
      }
    }
  }
}

// Adds kStep keys of the tile in shared memory to the sums.
__device__ __forceinline__ void attend(sum_t (&sums)[kRowSums][kRows], state_t& state,
                                       smem_t& smem, const block_t& block,
                                       const points_params_t& params,
                                       const kernel_args_t& args,
                                       const exponential_t& exp2, int first,
                                       int start) {
  const wide_t scale = wide_t(params.scale);
  // The compiler would keep what is the same in each step in registers, and then all
  // differences. `same` and `zero` are 0, but it does not know.
  unsigned laundered = start;
  ptx::launder(laundered);
  const int same = laundered >> 31, zero = params.num_tiles >> 31;
  const int row = block.ty * kRows + same;
  sum_t c[kRows][kKeys] = {};
  if constexpr (kIsMany) multiply(c, smem, block, params, first, start);
  wide_t d2[kRows][kKeys];
  distances(d2, smem, block, params, first, start, same);
#pragma unroll
  for (int k = 0; k < kKeys; ++k) {
    wide_t h = 0;
    if constexpr (kHasWeights) h = smem.h[start + key_of(block, k)];
    if constexpr (!kIsMany) {
#pragma unroll
      for (int v = 0; v < kColumns; ++v) {
        const sum_t b = smem.b[v][start + key_of(block, k)];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          c[r][k] = fma_of(smem.a[v][row + r], b, c[r][k]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      wide_t rest = 0;
      if constexpr (kHasWeights) rest = smem.r[row + r] + h;
      c[r][k] *= weight_of<kernel_t>(d2[r][k], scale, rest, args, exp2);
      if constexpr (kSquares == 1) {
        sum_t& square = sums[kRowSums - 1][r];
        square = fma_of(c[r][k], sum_t(d2[r][k]), square);
      }
      if constexpr (!kIsWhole) {
        smem.c[key_of(block, k)][block.ty * kRows + r] = c[r][k];
      }
    }
  }
  if constexpr (!kIsWhole) {
    add_moments(state, smem, block, params, first + start);
    return;
  }
#pragma unroll
  for (int d = 0; d < kAxes; ++d) {
    wide_t x[kRows], y[kKeys];
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = smem.x[d][zero + row + r];
#pragma unroll
    for (int k = 0; k < kKeys; ++k) y[k] = smem.y[d][zero + start + key_of(block, k)];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        const sum_t gap =
            sum_t(gap_of(x[r], y[k], smem.scale[kIsScaled ? zero + same + d : 0]));
        if constexpr (kSquares == 2) {
          const sum_t part = c[r][k] * gap;
          sums[d][r] += part;
          sum_t& square = sums[kOfAxes - kAxes + d][r];
          square = fma_of(part, gap, square);
        } else {
          sums[d][r] = fma_of(c[r][k], gap, sums[d][r]);
        }
      }
    }
  }
}

// Adds 256 keys to the totals.
__device__ __forceinline__ void visit(int tile, float top, state_t& state, smem_t& smem,
                                      const block_t& block,
                                      const points_params_t& params,
                                      const kernel_args_t& args,
                                      const exponential_t& exp2) {
  const int first = tile * kTileKeys;
  __syncthreads();  // the previous tile has been read
  if constexpr (kIsWhole) load_keys(smem, block, params, 0, first);
  load_terms(smem, block, params, first, top);
  __syncthreads();
  sum_t sums[kRowSums][kRows] = {};
#pragma unroll 1
  for (int start = 0; start < kTileKeys; start += kStep) {
    attend(sums, state, smem, block, params, args, exp2, first, start);
  }
  if constexpr (kIsWhole || kSquares == 1) {
    const int row = own_row(block);
#pragma unroll
    for (int n = 0; n < kRowSums; ++n) {
      const sum_t sum = scattered_sums<kSide / 2>(sums[n], block.tx);
      if (!owns_row(block)) continue;
      if constexpr (kKeepsRest) {
        add(smem.total[n][row], smem.rest[n][row], sum);
      } else {
        smem.total[n][row] += sum;
      }
    }
  }
}

// The largest r of the block's rows; NaN counts as infinity. Called by all threads.
__device__ __forceinline__ float highest(float r, smem_t& smem) {
  r = r == r ? r : infinity<float>();
  r = warp_reduce(r, [](float a, float b) { return fmaxf(a, b); });
  if (threadIdx.x % kWarpSize == 0) smem.tops[threadIdx.x / kWarpSize] = r;
  __syncthreads();
  float top = smem.tops[0];
  for (int w = 1; w < kThreads / kWarpSize; ++w) top = fmaxf(top, smem.tops[w]);
  return top;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) points_gradient(
    const coord_t* __restrict__ x,                 // (batch, kDim, padded_rows)
    const coord_t* __restrict__ y,                 // (batch, kDim, padded_keys)
    const double* __restrict__ r,                  // (batch, padded_rows), natural
    const double* __restrict__ h,                  // (batch, padded_keys), natural
    const accum_t* __restrict__ a,                 // (batch, num_columns, padded_rows)
    const accum_t* __restrict__ b,                 // (batch, num_columns, padded_keys)
    const float* __restrict__ row_boxes,           // (batch, groups, kBoxSize)
    const float* __restrict__ key_boxes,           // (batch, num_tiles, kBoxSize)
    const points_facts_t* __restrict__ facts,      // (batch)
    const points_facts_t* __restrict__ row_facts,  // (batch)
    const int* __restrict__ redo,                  // (batch, groups), of a repair
    const double* __restrict__ scales,             // (2, kDim), if SCALED
    double* __restrict__ parts,                    // part_row, kMoments to each part
    points_params_t params,
    kernel_args_t args) {  // numbers that a caller's function closes over
  __shared__ __align__(16) smem_t smem;
  const int row_blocks = params.padded_rows / kBlockRows;
  const int entry = blockIdx.x / row_blocks, at = blockIdx.x % row_blocks;
  const int groups = params.padded_rows / kGroup;
  const float inf = infinity<float>();
  constexpr int kParts = kBlockRows / kGroup;

  float floor = kHasWeights ? -inf : from_ordered(facts[entry].values);
  if (!kHasWeights && params.repair) {
    bool is_named = false;
    for (int n = 0; n < kParts; ++n) is_named |= redo[entry * groups + at * kParts + n];
    const float largest = __uint_as_float(facts[entry].results);
    const float of_rows = from_ordered(row_facts[entry].values);
    const float log2_largest = largest > 0 ? log2f(largest) - of_rows : -inf;
    if (!is_named && log2_largest >= floor - kSmallSum) return;
    floor = log2_largest;
  }

  const long long entry_key = static_cast<long long>(entry) * params.padded_keys;
  const long long entry_row = static_cast<long long>(entry) * params.padded_rows;
  block_t block;
  block.x = x + entry_row * kDim + at * kBlockRows;
  block.y = y + entry_key * kDim;
  block.h = h + entry_key;
  block.a = a + entry_row * params.num_columns + at * kBlockRows;
  block.b = b + entry_key * params.num_columns;
  block.boxes = key_boxes + static_cast<long long>(entry) * params.num_tiles * kBoxSize;
  block.scales = scales;
  block.tx = threadIdx.x % kSide;
  block.ty = threadIdx.x / kSide;
  block.first_axis = blockIdx.z * kAxes;
  block.r = -infinity<double>();

  if (threadIdx.x < kWarpSize) smem.table.fill(1);
  float row_top = 0;
  if constexpr (kHasWeights) {
    const int i = threadIdx.x;
    block.rule_row = at * kBlockRows % kRuleRows;
    const long long rule = entry_row + at * kBlockRows - block.rule_row;
    if (i < kRuleRows) block.r = r[rule + i] * kLog2e;
    row_top = highest(float(block.r), smem);
    floor = -row_top;
  }
  smem.list.template load<kParts>(
      row_boxes + (static_cast<long long>(entry) * groups + at * kParts) * kBoxSize,
      floor);
  const exponential_t exp2(smem.table);
  if constexpr (kIsWhole) load_rows(smem, block, params, 0);
  if constexpr (!kIsMany) {
    load_values<kBlockRows>(smem.a, block.a, params.padded_rows, 0);
  }

  state_t state = {};
  for (int n = threadIdx.x; n < kRowSums * kBlockRows; n += kThreads) {
    smem.total[n / kBlockRows][n % kBlockRows] = 0;
    if (kKeepsRest) smem.rest[n / kBlockRows][n % kBlockRows] = 0;
  }
  const int first = blockIdx.y * params.tiles_per_split;
  const int last = min(first + params.tiles_per_split, params.num_tiles);
  for (int run = first; run < last; run += kThreads) {
    const int count =
        smem.list.list(block.boxes, run, last, -1, params, 0.f, -1.f, false);
    for (int n = 0; n < count; ++n) {
      const int tile = smem.list.tiles[n].tile;
      const float top = block.boxes[static_cast<long long>(tile) * kBoxSize + kTop];
      if constexpr (kHasWeights) {
        const bool is_far = row_top + top > params.limit;
        if (is_far != (params.repair != 0)) continue;
      }
      visit(tile, top, state, smem, block, params, args, exp2);
    }
    __syncthreads();  // the list has been read
  }

  const int part = params.first_part + blockIdx.y;
  const int first_row = at * kBlockRows;
  const long long place = part_row(params, blockIdx.z, entry, part, 0) * kMoments;
  const auto write = [&](int n, int row, sum_t total, sum_t rest) {
    parts[place + static_cast<long long>(n) * params.padded_rows + first_row + row] =
        double(total) - double(rest);
  };
  if constexpr (kIsWhole || kSquares == 1) {
    __syncthreads();
    constexpr int kFirst = kMoments - kRowSums;
    for (int n = threadIdx.x; n < kRowSums * kBlockRows; n += kThreads) {
      const int sum = n / kBlockRows, row = n % kBlockRows;
      write(kFirst + sum, row, smem.total[sum][row],
            kKeepsRest ? smem.rest[sum][row] : sum_t(0));
    }
  }
  if constexpr (!kIsWhole) {
#pragma unroll
    for (int m = 0; m < kAxisChunks; ++m) {
      const int axis = m * kChunk + block.tx;
      if (axis >= kAxes) break;
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        const int row = block.ty * kRows + n;
        write(axis, row, state.total[m][n], state.rest[m][n]);
        if constexpr (kSquares == 2) {
          write(kAxes + axis, row, state.squares[m][n], state.squares_rest[m][n]);
        }
      }
    }
  }
}

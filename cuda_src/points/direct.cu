// SPDX-License-Identifier: MIT
// points_direct: sums over all keys from differences of coordinates, for any data.
//
// Algorithm  q_ij = scale sum_d (x_id - y_jd)^2,  s_ij = h_j + exponent(q_ij) - m_i,
//            l_i += 2^s_ij factor(q_ij),  o_i += 2^s_ij factor(q_ij) b_j
//            Sums without weights (WEIGHTS 0) have h_j = 0, a common m and no l_i.
// Grid       (batch x row blocks, splits of the keys, chunks of columns)
// Tiles      the threads form 16 x 16 and own kRows rows and kKeys keys each: 16 kRows
//            rows and kStep keys at a time, with coordinates in shared memory. Up to 8
//            axes a tile of 256 keys is loaded whole; above, kChunk axes at a time.
// Skipping   up to 8 axes, by the boxes of tiles (tiles.cuh)
// Numbers    differences, distances and scores in wide_t until the reference is
//            subtracted, with CAREFUL in twice the digits of float64; exponentials and
//            sums in sum_t. A lane sums 8 to 32 terms, then lanes are added, and totals
//            keep their rounding errors. Differences of axes with bandwidths of their
//            own (SCALED) are scaled after the subtraction.
// References m_i is the largest score of the first tile that a row sees. It moves if
// the bound of
//            a tile allows a sum to overflow, and if a sum is large.
// Repair     only blocks flagged in `redo`, or sums too small, relative to the values,
//            for what the first launch skipped. Sums of float32 without weights are
//            float64 then: a small weight times a large value may count.

#include "common/exp2_f64.cuh"
#include "points/function.cuh"
#include "points/sums.cuh"
#include "points/tiles.cuh"
#include "points/twofold.cuh"

using coord_t = COORD_T;
using wide_t = WIDE_T;
using accum_t = ACCUM_T;  // of values and parts
using sum_t = SUM_T;      // of exponentials and sums

// Distances and scores with all digits that they have here.
constexpr bool kIsCareful = CAREFUL;
#if CAREFUL
using exact_t = twofold_t;
#else
using exact_t = wide_t;
#endif
constexpr bool kHasRoom = sizeof(sum_t) > sizeof(accum_t);  // no sum is too small
constexpr bool kIsScaled = SCALED;
constexpr bool kIsFunction = FUNCTION;
constexpr float kLowestRef = -100;  // without weights: a near key must not overflow
constexpr int kSide = 16;
constexpr int kThreads = kSide * kSide;
constexpr int kRows = ROWS;
// A function of the caller needs registers of its own, and so do twice the digits.
constexpr int kKeys =
    sizeof(exact_t) == 16 || (kIsFunction && sizeof(wide_t) == 8) ? 2 : 4;
constexpr int kBlockRows = kSide * kRows;
constexpr int kStep = kSide * kKeys;
constexpr bool kIsWhole = kBoxDim > 0;
constexpr int kChunk = kIsWhole ? kDim : 16;
constexpr int kLoaded = kIsWhole ? kTileKeys : kStep;
constexpr int kLanesOfRow = kSide / kRows;  // lanes that own its totals
static_assert(kBlockRows % kGroup == 0 && kTileKeys % kStep == 0);

struct exponential_t {
  __device__ __forceinline__ explicit exponential_t(const exp2_table_t& table)
      : exp2(table) {}
  __device__ __forceinline__ float operator()(float x) const {
    return ptx::ex2_approx_ftz(x);
  }
  __device__ __forceinline__ double operator()(double x) const { return exp2(x); }
  exp2_t exp2;
};

__device__ __forceinline__ float log2_of(float x) { return log2f(x); }
__device__ __forceinline__ double log2_of(double x) { return log2(x); }
__device__ __forceinline__ float power_of_2(float x) { return exp2f(x); }
__device__ __forceinline__ double power_of_2(double x) { return exp2(x); }

struct smem_t {
  wide_t x[kChunk][kBlockRows];
  wide_t y[kChunk][kLoaded];
  exact_t scale[kIsScaled ? kChunk : 1];  // of each axis
  exact_t h[kTileKeys];
  sum_t b[kColumns > 0 ? kColumns : 1][kTileKeys];
  exp2_table_t table;
  float least[kThreads / kWarpSize];  // of the results of each warp so far
  tile_list_t<1, kThreads> list;
};

struct state_t {
  wide_t ref[kRows];                // of the rows of this thread; -inf: no key seen
  sum_t total[kSums], rest[kSums];  // of the row that this lane owns
};

// Position of this thread, and the block's part of each array.
struct block_t {
  const coord_t *x, *y;
  const double* h;
  const accum_t* b;
  const double* scales;  // of each axis: 1 / bandwidth, and what that was rounded by
  const float* boxes;
  int tx, ty;
  double base;  // natural log, subtracted from log weights before they are rounded
};

// high + low in the digits that scores have here.
__device__ __forceinline__ exact_t exact_of(double high, double low) {
#if CAREFUL
  return twofold(high, low);
#else
  return wide_t(high);
#endif
}

__device__ __forceinline__ wide_t high_of(wide_t x) { return x; }
__device__ __forceinline__ wide_t high_of(twofold_t x) { return x.high; }

// (x - y) scale
__device__ __forceinline__ wide_t gap_of(wide_t x, wide_t y, wide_t scale) {
  return kIsScaled ? (x - y) * scale : x - y;
}
__device__ __forceinline__ twofold_t gap_of(wide_t x, wide_t y, twofold_t scale) {
  const twofold_t gap = difference_of(x, y);
  return kIsScaled ? product_of(gap, scale) : gap;
}

template <typename T> __device__ __forceinline__ void add_square(T& total, T a) {
  total = fma_of(a, a, total);
}

__device__ __forceinline__ int owned_row(const block_t& block) {
  return block.tx / kLanesOfRow;
}

__device__ __forceinline__ void load_rows(smem_t& smem, const block_t& block,
                                          const points_params_t& params, int chunk) {
  for (int n = threadIdx.x; n < kChunk * kBlockRows; n += kThreads) {
    const int d = chunk * kChunk + n / kBlockRows, i = n % kBlockRows;
    const long long at = static_cast<long long>(d) * params.padded_rows + i;
    smem.x[n / kBlockRows][i] = d < kDim ? wide_t(block.x[at]) : wide_t(0);
  }
  if constexpr (kIsScaled) {
    const int d = chunk * kChunk + threadIdx.x;
    if (threadIdx.x < kChunk) {  // axes that are not there have a difference of 0
      smem.scale[threadIdx.x] =
          d < kDim ? exact_of(block.scales[d], block.scales[kDim + d]) : exact_t{};
    }
  }
}

__device__ __forceinline__ void load_keys(smem_t& smem, const block_t& block,
                                          const points_params_t& params, int chunk,
                                          int first) {
  for (int n = threadIdx.x; n < kChunk * kLoaded; n += kThreads) {
    const int d = chunk * kChunk + n / kLoaded, j = n % kLoaded;
    const long long at = static_cast<long long>(d) * params.padded_keys + first + j;
    smem.y[n / kLoaded][j] = d < kDim ? wide_t(block.y[at]) : wide_t(0);
  }
}

// The data of a tile other than coordinates.
__device__ __forceinline__ void load_terms(smem_t& smem, const block_t& block,
                                           const points_params_t& params, int first) {
  const int j = threadIdx.x;
  if constexpr (kHasWeights) {
    const double h = block.h[first + j];
#if CAREFUL
    smem.h[j] = product_of(twofold(h, 0), {kLog2e, kLog2eLow});
#else
    smem.h[j] = wide_t((h - block.base) * kLog2e);
#endif
  }
#pragma unroll
  for (int v = 0; v < kColumns; ++v) {
    const long long at = static_cast<long long>(v) * params.padded_keys + first + j;
    smem.b[v][j] = block.b[at];
  }
}

// h - ref + exponent(scale d2), relative to a reference near it.
template <typename K>
__device__ __forceinline__ double kernel_score(twofold_t d2, twofold_t scale,
                                               twofold_t h, double ref,
                                               const kernel_args_t& args) {
  if (!is_finite(h.high)) return h.high;
  twofold_t q = product_of(scale, d2);
  if (K::kIsRoot) q = root_of(q);
  const twofold_t s = difference_of(h.high, q.high);
  return (s.high - ref) + (s.low + (h.low - q.low));
}

// rest + log2 of the part of K that is an exponential; for a caller's function of all
// of it where weights are summed.
template <typename K, typename T>
__device__ __forceinline__ T kernel_score(T d2, T scale, T h, T ref,
                                          const kernel_args_t& args) {
  const T rest = h - ref;
  if constexpr (!kIsFunction) return score_of(d2, scale, rest);
  if constexpr (kIsFunction && kHasWeights) {
    return rest + T(kLog2e) * K::of(scale * d2, args);
  }
  return rest;
}

// The rest of K.
template <typename K, typename T>
__device__ __forceinline__ T kernel_factor(T q, const kernel_args_t& args) {
  if constexpr (!kIsFunction) return K::factor(q);
  if constexpr (kIsFunction && !kHasWeights) return K::of(q, args);
  return 1;
}

// Squared distances of kStep keys, those from `start` of the tile at `first`.
__device__ __forceinline__ void distances(exact_t (&d2)[kRows][kKeys], smem_t& smem,
                                          const block_t& block,
                                          const points_params_t& params, int first,
                                          int start) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kKeys; ++k) d2[r][k] = {};
  }
  const auto add_chunk = [&](int from) {
#pragma unroll
    for (int d = 0; d < kChunk; ++d) {
      wide_t x[kRows], y[kKeys];
#pragma unroll
      for (int r = 0; r < kRows; ++r) x[r] = smem.x[d][block.ty * kRows + r];
#pragma unroll
      for (int k = 0; k < kKeys; ++k) y[k] = smem.y[d][from + block.tx * kKeys + k];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < kKeys; ++k) {
          add_square(d2[r][k], gap_of(x[r], y[k], smem.scale[kIsScaled ? d : 0]));
        }
      }
    }
  };
  if constexpr (kIsWhole) {
    add_chunk(start);
  } else {
    for (int chunk = 0; chunk * kChunk < kDim; ++chunk) {
      __syncthreads();  // the previous chunk has been read
      load_rows(smem, block, params, chunk);
      load_keys(smem, block, params, chunk, first + start);
      __syncthreads();
      add_chunk(0);
    }
  }
}

// Sets new references if a row has none or a score is far above it; rescales totals.
__device__ __forceinline__ void watch(const wide_t (&score)[kRows][kKeys],
                                      state_t& state, sum_t (&sums)[kSums][kRows],
                                      const block_t& block) {
  const wide_t inf = infinity<wide_t>();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    wide_t top = score[r][0];
#pragma unroll
    for (int k = 1; k < kKeys; ++k) top = score[r][k] > top ? score[r][k] : top;
    top = warp_reduce<kSide>(top, [](wide_t a, wide_t b) { return a > b ? a : b; });
    const wide_t old = state.ref[r];
    if (!(top > old + 20 || (old == -inf && top > -inf))) continue;
    if (kIsCareful) top = rint(top);  // parts are put together by whole bits
    const sum_t factor = old == -inf ? sum_t(0) : power_of_2(sum_t(old - top));
    state.ref[r] = top;
#pragma unroll
    for (int c = 0; c < kSums; ++c) {
      sums[c][r] *= factor;
      if (owned_row(block) == r) {
        state.total[c] *= factor;
        state.rest[c] *= factor;
      }
    }
  }
}

// Adds kStep keys of the tile in shared memory to the sums.
__device__ __forceinline__ void attend(sum_t (&sums)[kSums][kRows], state_t& state,
                                       smem_t& smem, const block_t& block,
                                       const points_params_t& params,
                                       const kernel_args_t& args,
                                       const exponential_t& exp2, int first, int start,
                                       bool is_watched) {
  exact_t d2[kRows][kKeys];
  distances(d2, smem, block, params, first, start);
  const exact_t scale = exact_of(params.scale, params.scale_low);
  if constexpr (kHasWeights) {
    bool none_seen = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) none_seen |= state.ref[r] == -infinity<wide_t>();
    if (is_watched || __any_sync(kFullMask, none_seen)) {
      wide_t score[kRows][kKeys];
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        const exact_t h = smem.h[start + block.tx * kKeys + k];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          score[r][k] = kernel_score<kernel_t>(d2[r][k], scale, h, wide_t(0), args);
        }
      }
      watch(score, state, sums, block);
    }
  }
#pragma unroll
  for (int k = 0; k < kKeys; ++k) {
    const int j = start + block.tx * kKeys + k;
    exact_t h = {};
    if constexpr (kHasWeights) h = smem.h[j];
    sum_t b[kColumns > 0 ? kColumns : 1];
#pragma unroll
    for (int v = 0; v < kColumns; ++v) b[v] = smem.b[v][j];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const wide_t ref = state.ref[r] > -infinity<wide_t>() ? state.ref[r] : 0;
      sum_t w = exp2(sum_t(kernel_score<kernel_t>(d2[r][k], scale, h, ref, args)));
      if constexpr (kernel_t::kHasFactor || kIsFunction) {
        const wide_t q = high_of(scale) * high_of(d2[r][k]);
        w *= kernel_factor<kernel_t>(sum_t(q), args);
      }
      if constexpr (kHasWeights) sums[0][r] += w;
#pragma unroll
      for (int v = 0; v < kColumns; ++v) {
        sums[kHasWeights + v][r] = fma_of(w, b[v], sums[kHasWeights + v][r]);
      }
    }
  }
}

// Adds the sums of all lanes to the totals; a large total moves its reference.
__device__ __forceinline__ void join(const sum_t (&sums)[kSums][kRows], state_t& state,
                                     const block_t& block) {
#pragma unroll
  for (int c = 0; c < kSums; ++c) {
    const sum_t sum = scattered_sums<kSide / 2>(sums[c], block.tx);
    add(state.total[c], state.rest[c], sum);
  }
  if constexpr (kHasWeights) {
    const bool is_tall = state.total[0] > sum_t(kTall);
    if (!__any_sync(kFullMask, is_tall)) return;
    const wide_t up = is_tall ? ceil(wide_t(log2_of(state.total[0]))) : wide_t(0);
    const sum_t factor = power_of_2(sum_t(-up));
#pragma unroll
    for (int c = 0; c < kSums; ++c) {
      state.total[c] *= factor;
      state.rest[c] *= factor;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int owner = (threadIdx.x & kSide) | (r * kLanesOfRow);
      state.ref[r] += __shfl_sync(kFullMask, up, owner);
    }
  }
}

__device__ __forceinline__ wide_t owned_ref(const state_t& state,
                                            const block_t& block) {
  wide_t ref = state.ref[0];
#pragma unroll
  for (int r = 1; r < kRows; ++r) ref = owned_row(block) == r ? state.ref[r] : ref;
  return ref;
}

// Adds 256 keys to the totals.
__device__ __forceinline__ void visit(int tile, bool is_watched, state_t& state,
                                      smem_t& smem, const block_t& block,
                                      const points_params_t& params,
                                      const kernel_args_t& args,
                                      const exponential_t& exp2) {
  const int first = tile * kTileKeys;
  __syncthreads();  // the previous tile has been read
  if constexpr (kIsWhole) load_keys(smem, block, params, 0, first);
  load_terms(smem, block, params, first);
  __syncthreads();
  sum_t sums[kSums][kRows] = {};
#pragma unroll 1
  for (int start = 0; start < kTileKeys; start += kStep) {
    attend(sums, state, smem, block, params, args, exp2, first, start,
           is_watched || kIsFunction);
  }
  join(sums, state, block);
  if constexpr (kHasWeights) {
    const float ref = static_cast<float>(owned_ref(state, block) + block.base * kLog2e);
    const float low = ref + static_cast<float>(log2_of(state.total[0]));
    const float least = -warp_reduce(state.total[0] > 0 ? -low : infinity<float>(),
                                     [](float a, float b) { return fmaxf(a, b); });
    if (threadIdx.x % kWarpSize == 0) {
      smem.least[threadIdx.x / kWarpSize] = least;
    }
  }
}

// After a run of tiles: updates the lowest result of the block so far.
__device__ __forceinline__ void raise_floor(smem_t& smem) {
  if constexpr (!kHasWeights) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    float least = smem.least[0];
    for (int w = 1; w < kThreads / kWarpSize; ++w) least = fminf(least, smem.least[w]);
    smem.list.floor_[0] = fmaxf(smem.list.floor_[0], least - 1e-3f * fabsf(least));
  }
  __syncthreads();
}

// The exponent of the largest of the sums.
__device__ __forceinline__ int bits_of(const sum_t (&sums)[kSums]) {
  sum_t largest = 0;
#pragma unroll
  for (int c = 0; c < kSums; ++c) {
    largest = abs_of(sums[c]) > largest ? abs_of(sums[c]) : largest;
  }
  return largest > 0 && is_finite(largest) ? ilogb(largest) : 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) points_direct(
    const coord_t* __restrict__ x,             // (batch, kDim, padded_rows)
    const coord_t* __restrict__ y,             // (batch, kDim, padded_keys)
    const double* __restrict__ h,              // (batch, padded_keys), natural
    const accum_t* __restrict__ b,             // (batch, chunks, kColumns, padded_keys)
    const float* __restrict__ row_boxes,       // (batch, groups, kBoxSize)
    const float* __restrict__ key_boxes,       // (batch, num_tiles, kBoxSize)
    const points_facts_t* __restrict__ facts,  // (batch)
    const int* __restrict__ redo,              // (batch, groups), of a repair
    const double* __restrict__ scales,         // (2, kDim), if SCALED
    double* __restrict__ refs,                 // part_row
    accum_t* __restrict__ parts,               // part_row, kSums to each part
    points_params_t params,
    kernel_args_t args) {  // numbers that a caller's function closes over
  __shared__ __align__(16) smem_t smem;
  const int row_blocks = params.padded_rows / kBlockRows;
  const int entry = blockIdx.x / row_blocks, at = blockIdx.x % row_blocks;
  const int groups = params.padded_rows / kGroup;
  const float inf = infinity<float>();
  constexpr int kParts = kBlockRows / kGroup;

  float floor = kHasWeights ? -inf : from_ordered(facts[entry].values);
  if (params.repair) {
    bool is_named = false;
    for (int n = 0; n < kParts; ++n) is_named |= redo[entry * groups + at * kParts + n];
    if (!kHasWeights) {
      const float largest = __uint_as_float(facts[entry].results);
      const float log2_largest = largest > 0 ? log2f(largest) : -inf;
      if (!is_named && log2_largest >= floor - kSmallSum) return;
      floor = log2_largest;
    } else if (!is_named) {
      return;
    }
  }

  const long long entry_key = static_cast<long long>(entry) * params.padded_keys;
  const long long entry_row = static_cast<long long>(entry) * params.padded_rows;
  const int stored_columns = gridDim.z * kColumns;
  block_t block;
  block.x = x + entry_row * kDim + at * kBlockRows;
  block.y = y + entry_key * kDim;
  block.h = h + entry_key;
  block.b = b + entry_key * stored_columns +
            static_cast<long long>(blockIdx.z) * kColumns * params.padded_keys;
  block.boxes = key_boxes + static_cast<long long>(entry) * params.num_tiles * kBoxSize;
  block.scales = scales;
  block.tx = threadIdx.x % kSide;
  block.ty = threadIdx.x / kSide;
  const float top = from_ordered(facts[entry].top);
  block.base = kHasWeights && !kIsCareful && is_finite(top) ? top * kLn2 : 0;

  if (threadIdx.x < kWarpSize) smem.table.fill(1);
  if (threadIdx.x < kThreads / kWarpSize) smem.least[threadIdx.x] = -inf;
  smem.list.template load<kParts>(
      row_boxes + (static_cast<long long>(entry) * groups + at * kParts) * kBoxSize,
      floor);
  const exponential_t exp2(smem.table);
  if constexpr (kIsWhole) load_rows(smem, block, params, 0);

  state_t state = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    state.ref[r] = kHasWeights ? -infinity<wide_t>() : wide_t(0);

  const int first = blockIdx.y * params.tiles_per_split;
  const int last = min(first + params.tiles_per_split, params.num_tiles);
  int start = -1;
  if constexpr (kHasWeights && kIsWhole && kernel_t::kHasExponent) {
    float score;
    start =
        smem.list.find_best(block.boxes, params.num_tiles, float(params.scale), score);
    if (is_finite(score) && !kIsCareful) block.base = score * kLn2;
    if (start >= 0) {
      visit(start, true, state, smem, block, params, args, exp2);
      raise_floor(smem);
      if (start < first || start >= last) {  // another split has its sum
#pragma unroll
        for (int c = 0; c < kSums; ++c) state.total[c] = state.rest[c] = 0;
      }
    }
  }
  if constexpr (!kHasWeights && kIsWhole && kernel_t::kHasExponent && !kHasRoom) {
    if (params.repair) {  // subnormal weights times large values
      float score;
      smem.list.find_best(block.boxes, params.num_tiles, float(params.scale), score);
      const float ref = score - from_ordered(facts[entry].values);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        state.ref[r] = is_finite(ref) ? fmaxf(fminf(ref, 0.f), kLowestRef) : 0.f;
      }
    }
  }
  for (int run = first; run < last; run += kThreads) {
    const int count =
        smem.list.list(block.boxes, run, last, start, params, 0.f, -1.f, false);
    for (int n = 0; n < count; ++n) {
      const listed_tile_t listed = smem.list.tiles[n];
      visit(listed.tile, listed.watched_by, state, smem, block, params, args, exp2);
    }
    raise_floor(smem);
  }

  if (block.tx % kLanesOfRow == 0) {
    const int row = at * kBlockRows + block.ty * kRows + owned_row(block);
    const int part = params.first_part + blockIdx.y;
    const long long place = part_row(params, blockIdx.z, entry, part, row);
    const wide_t ref = owned_ref(state, block);
    const int up = kHasRoom ? bits_of(state.total) : 0;
    refs[place] = ref > -infinity<wide_t>() ? block.base * kLog2e + ref + up : 0;
    const long long of_part = place - row;
#pragma unroll
    for (int c = 0; c < kSums; ++c) {
      parts[of_part * kSums + static_cast<long long>(c) * params.padded_rows + row] =
          kHasRoom ? scalbn(state.total[c], -up) : state.total[c];
    }
  }
}

// SPDX-License-Identifier: MIT
// points_series: sums over tiles of keys that are smooth for a block of rows.
//
// Algorithm  With X and Y relative to the middles of their tiles, in units of the
//            scale, and G from the keys' middle to the rows', a gaussian score is
//              [h_j - |Y_j - G|^2] + [-2 G . X_i - |X_i|^2] + 2 X_i . Y_j.
//            If both tiles are small, 2^(2 X.Y) is for all pairs a polynomial of degree
//            SERIES in X.Y (Chebyshev, relative error 1.5e-7): a sum of products of a
//            monomial of X and one of Y. A tile of 256 keys becomes kTerms moments for
//            512 rows, and a row needs kTerms products per tile, without exponentials.
// Choice     points_choose samples pairs of tiles and sets `cut` and the degree of an
//            entry where this is faster than all pairs on tensor cores.
// Grid       (batch x row blocks, splits of the keys, chunks of columns)
// Numbers    |Y - G|^2 in float64, moments and polynomials in float32, totals with
//            their rounding errors. Rows and limits as in mma.cu, which adds the other
//            tiles as parts of its own.

#include "points/sums.cuh"
#include "points/tiles.cuh"

using coord_t = COORD_T;

constexpr int kDegree = SERIES;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlockRows = kWarps * kGroup;
constexpr int kRows = kGroup / kWarpSize;  // per lane
constexpr int kKeysOfLane = kTileKeys / kWarpSize;
constexpr int kDegreeY = kDim > 1 ? kDegree : 0;
constexpr int kDegreeZ = kDim > 2 ? kDegree : 0;
static_assert(kDim <= 3);

constexpr int least(int a, int b) { return a < b ? a : b; }

constexpr int count_terms() {
  int n = 0;
  for (int i = 0; i <= kDegree; ++i) {
    for (int j = 0; j <= least(kDegreeY, kDegree - i); ++j) {
      n += least(kDegreeZ, kDegree - i - j) + 1;
    }
  }
  return n;
}
constexpr int kTerms = count_terms(), kPadded = (kTerms + 3) / 4 * 4;

constexpr int power_of_two(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// Coefficients of the monomials of 2^(2 X.Y), in the order of Horner's scheme.
struct series_t {
  float coefficient[TERMS];
};
static_assert(TERMS == kTerms);

struct smem_t {
  float moments[kWarps][kSums][kPadded];
  float about[kWarps][kDim + 1];  // 2 G, and the reference of a tile
  tile_list_t<kWarps, kThreads> list;
};

struct block_t {
  const coord_t* y;
  const double* h;
  const float *b, *boxes;
  int keys;  // padded
  int lane, warp;
  float mid[kDim];
  double root;
  double base;  // natural log
};

struct state_t {
  float x[kRows][kDim], squared[kRows], ref[kRows];
  float total[kSums][kRows], rest[kSums][kRows];
};

// Like scattered_sums over a warp, but selects by bits: a conditional would make the
// compiler use indexed memory.
template <int kOffset = 16, int kCount>
__device__ __forceinline__ float warp_sums(const float (&values)[kCount], int lane) {
  if constexpr (kOffset == 0) {
    return values[0];
  } else if constexpr (kCount == 1) {
    const float sum[1] = {values[0] + shuffle_xor(values[0], kOffset)};
    return warp_sums<kOffset / 2>(sum, lane);
  } else {
    float half[kCount / 2];
    const int upper = lane & kOffset ? -1 : 0;
#pragma unroll
    for (int k = 0; k < kCount / 2; ++k) {
      const int u = __float_as_int(values[k]);
      const int v = __float_as_int(values[k + kCount / 2]);
      const float kept = __int_as_float((u & ~upper) | (v & upper));
      const float sent = __int_as_float((u & upper) | (v & ~upper));
      half[k] = kept + shuffle_xor(sent, kOffset);
    }
    return warp_sums<kOffset / 2>(half, lane);
  }
}

// Adds the monomials of a key times its weight to the moments, the last term first.
__device__ __forceinline__ void add_monomials(float (&moments)[kTerms], float weight,
                                              const float (&y)[kDim]) {
  int at = kTerms;
  float a = weight;
#pragma unroll
  for (int i = 0; i <= kDegree; ++i) {
    float b = a;
#pragma unroll
    for (int j = 0; j <= least(kDegreeY, kDegree - i); ++j) {
      float c = b;
#pragma unroll
      for (int l = 0; l <= least(kDegreeZ, kDegree - i - j); ++l) {
        moments[--at] += c;
        c *= y[kDim > 2 ? 2 : 0];
      }
      b *= y[kDim > 1 ? 1 : 0];
    }
    a *= y[0];
  }
}

// Evaluates the polynomial with these coefficients at the rows, by Horner's scheme.
__device__ __forceinline__ void evaluate(float (&values)[kRows],
                                         const float (&moments)[kPadded],
                                         const float (&x)[kRows][kDim]) {
  float a[kRows] = {};
  float4 four = {};
  int at = 0;
#pragma unroll
  for (int i = kDegree; i >= 0; --i) {
    float b[kRows] = {};
#pragma unroll
    for (int j = least(kDegreeY, kDegree - i); j >= 0; --j) {
      float c[kRows] = {};
#pragma unroll
      for (int l = least(kDegreeZ, kDegree - i - j); l >= 0; --l) {
        if (at % 4 == 0) four = *reinterpret_cast<const float4*>(&moments[at]);
        const float moment = at % 4 == 0   ? four.x
                             : at % 4 == 1 ? four.y
                             : at % 4 == 2 ? four.z
                                           : four.w;
        ++at;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          c[r] = fmaf(c[r], x[r][kDim > 2 ? 2 : 0], moment);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) b[r] = fmaf(b[r], x[r][kDim > 1 ? 1 : 0], c[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) a[r] = fmaf(a[r], x[r][0], b[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) values[r] = a[r];
}

// Stores moments, summed over the warp and times their coefficients, in shared memory.
__device__ __forceinline__ void store_moments(float (&to)[kPadded],
                                              const float (&moments)[kTerms],
                                              const series_t& series, int lane) {
  constexpr int kWhole = kTerms / 32 * 32, kLeft = kTerms - kWhole;
#pragma unroll
  for (int first = 0; first < kWhole; first += 32) {
    float values[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) values[i] = moments[first + i];
    to[first + lane] = warp_sums(values, lane) * series.coefficient[first + lane];
  }
  if constexpr (kLeft > 0) {
    constexpr int kWidth = power_of_two(kLeft);
    float values[kWidth] = {};
#pragma unroll
    for (int i = 0; i < kLeft; ++i) values[i] = moments[kWhole + i];
    const float sum = warp_sums(values, lane);
    const int i = lane * kWidth / 32;
    if (i < kLeft) to[kWhole + i] = sum * series.coefficient[kWhole + i];
  }
}

// One warp computes the moments of one tile.
__device__ __forceinline__ void make_moments(smem_t& smem, const block_t& block,
                                             const series_t& series, int tile) {
  const float* box = block.boxes + static_cast<long long>(tile) * kBoxSize;
  float middle[kDim], y[kKeysOfLane][kDim], weight[kKeysOfLane];
#pragma unroll
  for (int d = 0; d < kDim; ++d) middle[d] = 0.5f * (box[d] + box[kBoxDim + d]);
  float top = -infinity<float>();
#pragma unroll
  for (int q = 0; q < kKeysOfLane; ++q) {
    const int j = tile * kTileKeys + q * kWarpSize + block.lane;
    double score = kHasWeights ? (block.h[j] - block.base) * kLog2e : 0;
#pragma unroll
    for (int d = 0; d < kDim; ++d) {
      const coord_t a = block.y[static_cast<long long>(d) * block.keys + j];
      const double from_rows = (double(a) - double(block.mid[d])) * block.root;
      y[q][d] = float((a - coord_t(middle[d])) * coord_t(block.root));
      score = fma(-from_rows, from_rows, score);
    }
    weight[q] = float(score);
    top = fmaxf(top, weight[q]);
  }
  top = warp_reduce(top, [](float a, float b) { return fmaxf(a, b); });
  if (!(top > -infinity<float>())) top = 0;
  if (block.lane == 0) {
    smem.about[block.warp][kDim] = top;
#pragma unroll
    for (int d = 0; d < kDim; ++d) {
      smem.about[block.warp][d] =
          float(2 * (double(block.mid[d]) - double(middle[d])) * block.root);
    }
  }
#pragma unroll
  for (int q = 0; q < kKeysOfLane; ++q)
    weight[q] = ptx::ex2_approx_ftz(weight[q] - top);
#pragma unroll 1
  for (int c = 0; c < kSums; ++c) {
    float moments[kTerms] = {};
#pragma unroll
    for (int q = 0; q < kKeysOfLane; ++q) {
      float w = weight[q];
      if (c >= kHasWeights) {
        const long long at = static_cast<long long>(c - kHasWeights) * block.keys;
        w *= block.b[at + tile * kTileKeys + q * kWarpSize + block.lane];
      }
      add_monomials(moments, w, y[q]);
    }
    store_moments(smem.moments[block.warp][c], moments, series, block.lane);
  }
}

// Adds the tile whose moments are in a slot to the totals of the warp's rows.
__device__ __forceinline__ void attend(state_t& state, const smem_t& smem, int slot) {
  float factor[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float e = smem.about[slot][kDim];
#pragma unroll
    for (int d = 0; d < kDim; ++d) e = fmaf(-smem.about[slot][d], state.x[r][d], e);
    if (kHasWeights && e > state.ref[r] + 20) {
      const float change = ptx::ex2_approx_ftz(state.ref[r] - e);
#pragma unroll
      for (int c = 0; c < kSums; ++c) {
        state.total[c][r] *= change;
        state.rest[c][r] *= change;
      }
      state.ref[r] = e;
    }
    factor[r] = ptx::ex2_approx_ftz(e - state.ref[r]);
  }
#pragma unroll
  for (int c = 0; c < kSums; ++c) {
    float values[kRows];
    evaluate(values, smem.moments[slot][c], state.x);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      add(state.total[c][r], state.rest[c][r], factor[r] * values[r]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) points_series(
    const coord_t* __restrict__ x,             // (batch, kDim, padded_rows)
    const coord_t* __restrict__ y,             // (batch, kDim, padded_keys)
    const double* __restrict__ h,              // (batch, padded_keys), natural
    const float* __restrict__ b,               // (batch, chunks, kColumns, padded_keys)
    const float* __restrict__ row_boxes,       // (batch, groups, kBoxSize)
    const float* __restrict__ key_boxes,       // (batch, num_tiles, kBoxSize)
    const points_facts_t* __restrict__ facts,  // (batch)
    double* __restrict__ refs,                 // part_row
    float* __restrict__ parts,                 // part_row, kSums to each part
    points_params_t params, series_t series) {
  __shared__ __align__(16) smem_t smem;
  const int row_blocks = params.padded_rows / kBlockRows;
  const int entry = blockIdx.x / row_blocks;
  const int first_row = blockIdx.x % row_blocks * kBlockRows;
  const float cut = facts[entry].cut;
  if (facts[entry].degree != kDegree) return;
  const long long entry_row = static_cast<long long>(entry) * params.padded_rows;
  const long long entry_key = static_cast<long long>(entry) * params.padded_keys;
  const long long group = (entry_row + first_row) / kGroup;

  smem.list.template load<1>(
      row_boxes + group * kBoxSize,
      kHasWeights ? -infinity<float>() : from_ordered(facts[entry].values));
  float mid[kBoxDim + 1];
  const float reach = smem.list.middle(mid);
  // mma.cu has flagged the block in this case.
  if (!(rounded_product(reach, float(params.scale)) <= params.limit)) return;

  block_t block;
  block.y = y + entry_key * kDim;
  block.h = h + entry_key;
  block.b = b + (entry_key * gridDim.z +
                 static_cast<long long>(blockIdx.z) * params.padded_keys) *
                    kColumns;
  block.boxes = key_boxes + static_cast<long long>(entry) * params.num_tiles * kBoxSize;
  block.keys = params.padded_keys;
  block.lane = threadIdx.x % kWarpSize;
  block.warp = threadIdx.x / kWarpSize;
  block.root = sqrt(params.scale);
  block.base = 0;
#pragma unroll
  for (int d = 0; d < kDim; ++d) block.mid[d] = mid[d];

  if constexpr (kHasWeights) {
    float score;
    const int start =
        smem.list.find_best(block.boxes, params.num_tiles, float(params.scale), score);
    if (is_finite(score)) block.base = score * kLn2;
    if (start >= 0 && threadIdx.x < kWarps) {
      const float* keys = block.boxes + static_cast<long long>(start) * kBoxSize;
      smem.list.floor_[threadIdx.x] =
          least_score(smem.list.rows[threadIdx.x], keys, float(params.scale));
    }
    __syncthreads();
  }

  state_t state = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + block.warp * kGroup + r * kWarpSize + block.lane;
    double squared = 0;
#pragma unroll
    for (int d = 0; d < kDim; ++d) {
      const coord_t a =
          x[entry_row * kDim + static_cast<long long>(d) * params.padded_rows + row];
      state.x[r][d] = float((a - coord_t(mid[d])) * coord_t(block.root));
      squared = fma(double(state.x[r][d]), double(state.x[r][d]), squared);
    }
    state.squared[r] = float(squared);
    state.ref[r] = kHasWeights ? -infinity<float>() : 0.f;
  }

  const int first = blockIdx.y * params.tiles_per_split;
  const int last = min(first + params.tiles_per_split, params.num_tiles);
  for (int run = first; run < last; run += kThreads) {
    __syncthreads();
    const int count =
        smem.list.list(block.boxes, run, last, -1, params, reach, cut, true);
    for (int n = 0; n < count; n += kWarps) {
      if (n + block.warp < count) {
        make_moments(smem, block, series, smem.list.tiles[n + block.warp].tile);
      }
      __syncthreads();
#pragma unroll 1
      for (int slot = 0; slot < kWarps && n + slot < count; ++slot) {
        if (smem.list.tiles[n + slot].needed_by >> block.warp & 1) {
          attend(state, smem, slot);
        }
      }
      __syncthreads();
    }
    if constexpr (kHasWeights) {
      float low = infinity<float>();
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        low = fminf(low, __log2f(state.total[0][r]) + state.ref[r] - state.squared[r]);
      }
      low += float(block.base * kLog2e);
      smem.list.raise(block.warp, low - 1e-3f * fabsf(low));
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + block.warp * kGroup + r * kWarpSize + block.lane;
    const int part = params.first_part + blockIdx.y;
    const long long place = part_row(params, blockIdx.z, entry, part, row);
    const bool has_ref = state.ref[r] > -infinity<float>();
    refs[place] = has_ref ? block.base * kLog2e + state.ref[r] - state.squared[r] : 0;
#pragma unroll
    for (int c = 0; c < kSums; ++c) {
      const long long sums = (place - row) * kSums;
      parts[sums + static_cast<long long>(c) * params.padded_rows + row] =
          state.total[c][r];
    }
  }
}

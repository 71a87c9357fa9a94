// SPDX-License-Identifier: MIT
// points_mma: sums over all keys with gaussian scores computed entirely by tensor
// cores.
//
// Algorithm  With points relative to the middle of the block's rows and scaled by
//            sqrt(scale), s_ij = (h_j - |y_j|^2) + 2 x_i . y_j - |x_i|^2. The last term
//            is added at the end. 2 x and y are split into two float16 parts each (22
//            bits); all four products of an axis are four columns of one product, and
//            four more hold h_j - |y_j|^2 in three parts and minus the reference m_i:
//              row  xh xh xl xl ..., 1 1 1 -m      key  yh yl yh yl ..., p1 p2 p3 1
//            So a score is one mma.m16n8k16 for up to 3 axes, and two for up to 7.
// Grid       (batch x row blocks, splits of the keys, chunks of columns)
// Tiles      8 warps own 64 rows each; 256 keys in shared memory, two buffers
// Numbers    |x|^2, |y|^2 and h in float64, then as above. POLY of 16 exponentials are
//            polynomials, because the special function unit alone is slower. A lane
//            sums 64 terms, four lanes are added, and totals keep their rounding
//            errors.
// References No maximum per pair: the bounds of tiles tell where a sum could overflow,
// and the
//            scores of such a tile are checked first. A large sum moves its reference.
// Limits     sm_80; rows within sqrt(limit) of their middle, in units of the scale. A
//            wider block, or one with a nonfinite sum, is flagged in `redo`.

#include "points/sums.cuh"
#include "points/tiles.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

using coord_t = COORD_T;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlockRows = kWarps * kGroup;
constexpr int kRowTiles = 4;             // of 16 rows, per warp
constexpr int kSteps = (kDim + 4) / 4;   // products of 16 columns
constexpr int kPolynomials = POLY;       // of 16 exponentials
constexpr unsigned short kOne = 0x3c00;  // float16
constexpr float kNoWeight = -60000.f;    // the score of a key without weight
constexpr float kFarthest = -30000.f;    // scores below it have no weight
constexpr float kLowestRef = -16000.f;   // neither have they relative to this
static_assert(kThreads == kTileKeys);

struct smem_t {
  uint2 columns[2][kSteps][kTileKeys][4];
  float b[2][kColumns > 0 ? kColumns : 1][kTileKeys];
  tile_list_t<kWarps, kThreads> list;
};

struct block_t {
  const coord_t *x, *y;
  const double* h;
  const float* b;
  int rows, keys;  // padded
  int lane, warp, g, t;
  coord_t mid[kDim];
  double root;  // of the scale
  double base;  // natural log, subtracted from log weights before they are rounded
};

// A lane's rows: in fragments, rows g and g + 8 of each tile; in totals, rows g and g +
// 8 of tile t.
struct state_t {
  unsigned a[kRowTiles][kSteps][4];
  float ref[2], squared[2];
  float total[kSums][2], rest[kSums][2];
};

__device__ __forceinline__ unsigned pair_of(unsigned short low, unsigned short high) {
  return unsigned(low) | unsigned(high) << 16;
}

// The two float16 parts of a number, the high part in the low half.
__device__ __forceinline__ unsigned split(float x) {
  const unsigned short high = ptx::f16_from_f32(x);
  return pair_of(high, ptx::f16_from_f32(x - ptx::f32_from_f16(high)));
}

// The sum of the parts: squared norms are computed from it, so that a point has
// distance 0 from itself.
__device__ __forceinline__ float whole(unsigned parts) {
  return ptx::f32_from_f16(parts & 0xffff) + ptx::f32_from_f16(parts >> 16);
}

__device__ __forceinline__ int owned_row(const block_t& block, int half) {
  return block.warp * kGroup + block.t * 16 + block.g + 8 * half;
}

__device__ __forceinline__ void load_rows(state_t& state, const block_t& block) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int d = k * 4 + block.t;
      coord_t middle = block.mid[0];
#pragma unroll
      for (int e = 1; e < kDim; ++e) middle = d == e ? block.mid[e] : middle;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = block.warp * kGroup + m * 16 + block.g + 8 * half;
        unsigned parts = 0;
        if (d < kDim) {
          const coord_t from =
              block.x[static_cast<long long>(d) * block.rows + row] - middle;
          parts = split(2 * float(from * coord_t(block.root)));
        }
        const unsigned short high = parts & 0xffff, low = parts >> 16;
        const bool is_term = d == kDim;
        state.a[m][k][half] = is_term ? pair_of(kOne, kOne) : pair_of(high, high);
        state.a[m][k][2 + half] = is_term ? pair_of(kOne, 0) : pair_of(low, low);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    double squared = 0;
#pragma unroll
    for (int d = 0; d < kDim; ++d) {
      const long long at =
          static_cast<long long>(d) * block.rows + owned_row(block, half);
      const coord_t from = block.x[at] - block.mid[d];
      const double z = 0.5 * whole(split(2 * float(from * coord_t(block.root))));
      squared = fma(z, z, squared);
    }
    state.squared[half] = float(squared);
  }
}

// A key on its way from global to shared memory, one per thread.
struct key_t {
  coord_t y[kDim];
  double h;
  float b[kColumns > 0 ? kColumns : 1];
};

__device__ __forceinline__ void load_key(key_t& key, const block_t& block, int tile) {
  const int j = tile * kTileKeys + threadIdx.x;
#pragma unroll
  for (int d = 0; d < kDim; ++d)
    key.y[d] = block.y[static_cast<long long>(d) * block.keys + j];
  if constexpr (kHasWeights) key.h = block.h[j];
#pragma unroll
  for (int v = 0; v < kColumns; ++v) {
    key.b[v] = block.b[static_cast<long long>(v) * block.keys + j];
  }
}

__device__ __forceinline__ void store_key(smem_t& smem, int buffer, const key_t& key,
                                          const block_t& block) {
  double term = kHasWeights ? (key.h - block.base) * kLog2e : 0;
  unsigned split_y[kDim];
#pragma unroll
  for (int d = 0; d < kDim; ++d) {
    split_y[d] = split(float((key.y[d] - block.mid[d]) * coord_t(block.root)));
    const double z = whole(split_y[d]);
    term = fma(-z, z, term);
  }
  float p = float(term);
  const bool is_far = !(p > kFarthest);
  if (is_far) p = kNoWeight;
  const unsigned short p1 = ptx::f16_from_f32(p);
  const float rest = p - ptx::f32_from_f16(p1);
  const unsigned short p2 = ptx::f16_from_f32(rest);
  const unsigned short p3 = ptx::f16_from_f32(rest - ptx::f32_from_f16(p2));
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint2 columns[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int d = k * 4 + t;
      const unsigned parts = d < kDim && !is_far ? split_y[d < kDim ? d : 0] : 0;
      columns[t] = make_uint2(parts, parts);
      if (d == kDim) columns[t] = make_uint2(pair_of(p1, p2), pair_of(p3, kOne));
    }
    uint4* to = reinterpret_cast<uint4*>(smem.columns[buffer][k][threadIdx.x]);
    to[0] = make_uint4(columns[0].x, columns[0].y, columns[1].x, columns[1].y);
    to[1] = make_uint4(columns[2].x, columns[2].y, columns[3].x, columns[3].y);
  }
#pragma unroll
  for (int v = 0; v < kColumns; ++v) smem.b[buffer][v][threadIdx.x] = key.b[v];
}

// Scores of the warp's rows with keys 8 n .. 8 n + 7 of the tile.
__device__ __forceinline__ void scores_of(float (&s)[kRowTiles][4],
                                          const state_t& state, const smem_t& smem,
                                          const block_t& block, int buffer, int n) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const uint2 b = smem.columns[buffer][k][n * 8 + block.g][block.t];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if (k == 0) {
        ptx::mma_m16n8k16_f16_from_zero(s[m], state.a[m][k], b.x, b.y);
      } else {
        ptx::mma_m16n8k16_f16(s[m], state.a[m][k], b.x, b.y);
      }
    }
  }
}

// Sets new references, as float16; updates totals and fragments.
__device__ __forceinline__ void move(state_t& state, const block_t& block,
                                     const float (&to)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float ref = ptx::f32_from_f16(ptx::f16_from_f32(to[half]));
    const float factor = ptx::ex2_approx_ftz(state.ref[half] - ref);
#pragma unroll
    for (int c = 0; c < kSums; ++c) {
      if (state.total[c][half] != 0) {
        state.total[c][half] *= factor;
        state.rest[c][half] *= factor;
      }
    }
    state.ref[half] = ref;
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float ref = __shfl_sync(kFullMask, state.ref[half], (block.lane & ~3) | m);
      if (block.t == kDim % 4) {
        state.a[m][kDim / 4][2 + half] = pair_of(kOne, ptx::f16_from_f32(-ref));
      }
    }
  }
}

// Raises the reference of each row to its largest score in the tile, or sets the first
// one.
__device__ __forceinline__ void watch(state_t& state, const smem_t& smem,
                                      const block_t& block, int buffer, bool is_first) {
  float top[2 * kRowTiles];
#pragma unroll
  for (int q = 0; q < 2 * kRowTiles; ++q) top[q] = -infinity<float>();
#pragma unroll 1
  for (int n = 0; n < kTileKeys / 8; ++n) {
    float s[kRowTiles][4];
    scores_of(s, state, smem, block, buffer, n);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        top[2 * m + e / 2] = fmaxf(top[2 * m + e / 2], s[m][e]);
    }
  }
  float to[2] = {};
#pragma unroll
  for (int q = 0; q < 2 * kRowTiles; ++q) {
    const float largest =
        warp_reduce<4>(top[q], [](float a, float b) { return fmaxf(a, b); });
    if (block.t == q / 2) {
      to[q & 1] = state.ref[q & 1] + (is_first ? largest : fmaxf(largest, 0.f));
    }
  }
  move(state, block, to);
}

// Adds the tile to the totals.
__device__ __forceinline__ void attend(state_t& state, const smem_t& smem,
                                       const block_t& block, int buffer) {
  float sums[kSums][2 * kRowTiles] = {};
#pragma unroll 1
  for (int n = 0; n < kTileKeys / 8; ++n) {
    float s[kRowTiles][4];
    scores_of(s, state, smem, block, buffer, n);
    float2 b[kColumns > 0 ? kColumns : 1];
#pragma unroll
    for (int v = 0; v < kColumns; ++v) {
      b[v] = *reinterpret_cast<const float2*>(&smem.b[buffer][v][n * 8 + 2 * block.t]);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int m = i / 4, e = i % 4, q = 2 * m + e / 2;
      // The polynomials are spread evenly among the sixteen.
      const bool by_polynomial = i * kPolynomials / 16 != (i + 1) * kPolynomials / 16;
      const float w =
          by_polynomial ? exp2_polynomial(s[m][e]) : ptx::ex2_approx_ftz(s[m][e]);
      if constexpr (kHasWeights) sums[0][q] += w;
#pragma unroll
      for (int v = 0; v < kColumns; ++v) {
        float& sum = sums[kHasWeights + v][q];
        sum = fmaf(w, e & 1 ? b[v].y : b[v].x, sum);
      }
    }
  }
  bool is_tall = false;
#pragma unroll
  for (int c = 0; c < kSums; ++c) {
    // Lane t of four ends with rows g and g + 8 of tile t.
    float even[kRowTiles], odd[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
      even[m] = sums[c][2 * m], odd[m] = sums[c][2 * m + 1];
    add(state.total[c][0], state.rest[c][0], scattered_sums<2>(even, block.lane));
    add(state.total[c][1], state.rest[c][1], scattered_sums<2>(odd, block.lane));
    if (c == 0) is_tall = state.total[0][0] > kTall || state.total[0][1] > kTall;
  }
  if (kHasWeights && __any_sync(kFullMask, is_tall)) {
    float to[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = state.total[0][half];
      to[half] = state.ref[half] + (total > kTall ? __log2f(total) : 0.f);
    }
    move(state, block, to);
  }
}

// Raises the lower bound of the results of the warp.
__device__ __forceinline__ void raise_floor(smem_t& smem, const state_t& state,
                                            const block_t& block) {
  if constexpr (!kHasWeights) return;
  float low = infinity<float>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = state.total[0][half];
    // A reference is a score, rounded.
    const float above = total > 0 ? __log2f(total) : -1e-3f * fabsf(state.ref[half]);
    low = fminf(low, state.ref[half] - state.squared[half] + above);
  }
  low += float(block.base * kLog2e);
  smem.list.raise(block.warp, low - 1e-3f * fabsf(low));
}

__device__ __forceinline__ void store_part(const state_t& state, const block_t& block,
                                           const points_params_t& params, int entry,
                                           int first_row, double* refs, float* parts,
                                           int* redo, bool has_start) {
  const int part = params.first_part + blockIdx.y;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + owned_row(block, half);
    const long long place = part_row(params, blockIdx.z, entry, part, row);
    const long long of_part = place - row;
    refs[place] =
        block.base * kLog2e + double(state.ref[half]) - double(state.squared[half]);
    bool is_odd = state.ref[half] < kLowestRef;
    is_odd |= has_start && !(state.total[0][half] > 0);
#pragma unroll
    for (int c = 0; c < kSums; ++c) {
      const float total = state.total[c][half];
      parts[of_part * kSums + static_cast<long long>(c) * block.rows + row] = total;
      is_odd |= !is_finite(total);
    }
    if (is_odd) redo[(static_cast<long long>(entry) * block.rows + row) / kGroup] = 1;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    points_mma(const coord_t* __restrict__ x,  // (batch, kDim, padded_rows)
               const coord_t* __restrict__ y,  // (batch, kDim, padded_keys)
               const double* __restrict__ h,   // (batch, padded_keys), natural
               const float* __restrict__ b,    // (batch, chunks, kColumns, padded_keys)
               const float* __restrict__ row_boxes,  // (batch, groups, kBoxSize)
               const float* __restrict__ key_boxes,  // (batch, num_tiles, kBoxSize)
               const points_facts_t* __restrict__ facts,  // (batch)
               int* __restrict__ redo,                    // (batch, groups)
               double* __restrict__ refs,                 // part_row
               float* __restrict__ parts,  // part_row, kSums to each part
               points_params_t params) {
  __shared__ __align__(16) smem_t smem;
  const int row_blocks = params.padded_rows / kBlockRows;
  const int entry = blockIdx.x / row_blocks;
  const int first_row = blockIdx.x % row_blocks * kBlockRows;
  const long long entry_row = static_cast<long long>(entry) * params.padded_rows;
  const long long entry_key = static_cast<long long>(entry) * params.padded_keys;
  const float* boxes =
      key_boxes + static_cast<long long>(entry) * params.num_tiles * kBoxSize;
  const int group = static_cast<int>((entry_row + first_row) / kGroup);
  const float inf = infinity<float>();

  const float floor = kHasWeights ? -inf : from_ordered(facts[entry].values);
  const float cut = facts[entry].cut;
  smem.list.template load<1>(row_boxes + static_cast<long long>(group) * kBoxSize,
                             floor);
  float mid[kBoxDim + 1];
  const float reach = smem.list.middle(mid);
  if (!(rounded_product(reach, float(params.scale)) <= params.limit)) {
    if (threadIdx.x < kWarps) redo[group + threadIdx.x] = 1;
    return;
  }

  block_t block;
  block.x = x + entry_row * kDim + first_row;
  block.y = y + entry_key * kDim;
  block.h = h + entry_key;
  block.b = b + (entry_key * gridDim.z +
                 static_cast<long long>(blockIdx.z) * params.padded_keys) *
                    kColumns;
  block.rows = params.padded_rows;
  block.keys = params.padded_keys;
  block.lane = threadIdx.x % kWarpSize;
  block.warp = threadIdx.x / kWarpSize;
  block.g = block.lane / 4;
  block.t = block.lane % 4;
#pragma unroll
  for (int d = 0; d < kDim; ++d) block.mid[d] = mid[d];
  block.root = sqrt(params.scale);
  block.base = 0;

  state_t state = {};
  load_rows(state, block);
  key_t key;
  const int first = blockIdx.y * params.tiles_per_split;
  const int last = min(first + params.tiles_per_split, params.num_tiles);
  int start = -1;
  bool has_start = false;
  if constexpr (kHasWeights) {
    float score;
    start = smem.list.find_best(boxes, params.num_tiles, float(params.scale), score);
    if (is_finite(score)) block.base = score * kLn2;
    if (start >= 0) {
      load_key(key, block, start);
      store_key(smem, 0, key, block);
      __syncthreads();
      watch(state, smem, block, 0, true);
      has_start = start >= first && start < last &&
                  !is_smooth(reach, boxes + start * kBoxSize, cut);
      if (has_start) attend(state, smem, block, 0);
      raise_floor(smem, state, block);
    }
  }
  for (int run = first; run < last; run += kThreads) {
    __syncthreads();
    const int count =
        smem.list.list(boxes, run, last, start, params, reach, cut, false);
    if (count > 0) {
      load_key(key, block, smem.list.tiles[0].tile);
      store_key(smem, 0, key, block);
    }
    __syncthreads();
    for (int n = 0; n < count; ++n) {
      const listed_tile_t listed = smem.list.tiles[n];
      if (n + 1 < count) load_key(key, block, smem.list.tiles[n + 1].tile);
      if (listed.needed_by >> block.warp & 1) {
        if (kHasWeights && (listed.watched_by >> block.warp & 1)) {
          watch(state, smem, block, n & 1, false);
        }
        attend(state, smem, block, n & 1);
      }
      if (n + 1 < count) store_key(smem, (n + 1) & 1, key, block);
      __syncthreads();
    }
    raise_floor(smem, state, block);
  }
  store_part(state, block, params, entry, first_row, refs, parts, redo, has_start);
}

// SPDX-License-Identifier: MIT
// attention_short_f64: float64 attention of entries with few keys. A block keeps the
// keys of an entry, and its warps stream the queries.
//
// Algorithm  All keys of an entry are on chip, so a warp has whole rows of scores:
//                s = score(q k^T),  m = rowmax s,  p = exp(s - m),  l = rowsum p
//                out = p v / l,  lse = m + log l
// Grid       1-D, one block for every kTilesOfBlock tiles of 16 queries of a head of k
//            and v. A warp has one tile at a time, and no warp waits for another.
//            With few tiles for each block, kTeam warps share
//            one: each makes the scores of some keys, all exchange them, and each
//            writes some columns of out, with the same bits
// Shared     k, v   kBlockN x kHeadDim (kHeadDimV)  once
//            s      16 x kBlockN                    of each team of several warps
//            q      kStages x 16 x kUnit            of each team, a ring of parts of
//                   tiles: copies run kStages - 1 parts ahead, into the next tile
// Memory     global: each array once; k and v once per block. Queries that see no key
//            are not read
// Schedule   as in forward.cu, holds enclose the products. Up to 32 keys, memory is the
//            limit: for 16 queries of 64 columns it takes 860 clocks of a
//            multiprocessor of an H200, the products 64 for each 4 keys
// Numbers    all in float64, in a fixed order: the same bits in every run. Weights of
//            hidden keys are -0; an o that is not finite is computed again, with
//            finite values alone, to which the others that are seen are added
// Limits     kBlockN keys; head dimensions up to kHeadDim and kHeadDimV, padded with
//            zeros
#include "attention/fp64/tile.cuh"
#include "common/exp2_f64.cuh"
#include "ptx/barrier.cuh"
#include "ptx/hold.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_N) || \
    !defined(UNIT) || !defined(STAGES) || !defined(TILES_OF_BLOCK) ||  \
    !defined(MIN_BLOCKS)
#error \
    "HEAD_DIM, .. BLOCK_N, UNIT, STAGES, TILES_OF_BLOCK, MIN_BLOCKS come from the host"
#endif
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kBlockN = BLOCK_N;
constexpr int kUnit = UNIT;      // columns of a part of a tile of q
constexpr int kStages = STAGES;  // parts of a team
constexpr int kTilesOfBlock = TILES_OF_BLOCK;
#ifndef TEAM
#define TEAM 1
#endif
constexpr int kTeam = TEAM;             // warps that share a tile of queries
constexpr int kMinBlocks = MIN_BLOCKS;  // blocks per multiprocessor; limits registers
// Whether scores are finished one by one; otherwise they are q.k, and the scale is
// applied in the exponential.
constexpr bool kTerms = IS_GIVEN(SCALE_SCORES) || kChangesScores;

constexpr int kWarps = kNumThreads / kWarpSize;
constexpr int kUnits = kHeadDim / kUnit;
constexpr int kUnitSize = kWarpRows * kUnit;
constexpr int kTiles = kBlockN / 8;                  // of s, 8 keys each
constexpr int kSlots = kBlockN < 16 ? kBlockN : 16;  // keys of a product of weights
constexpr int kStepsN = kBlockN / kSlots;            // of a sum over keys
constexpr int kTeams = kWarps / kTeam;
constexpr int kOwnTiles = kTiles / kTeam;             // of s, by a warp
constexpr int kOwnChunks = kHeadDimV / (16 * kTeam);  // of columns of out, by a warp
static_assert(kWarps % kTeam == 0 && kTiles % kTeam == 0);
static_assert(kHeadDimV % (16 * kTeam) == 0);
static_assert(kHeadDim % kUnit == 0 && kUnit % 16 == 0 && kUnit <= 64);
static_assert(kHeadDimV % 16 == 0 && kStages >= 2);
static_assert(kBlockN == 8 || kBlockN % 16 == 0);

// Fragments c: of queries g + (0, 0, 8, 8), keys 2 t + (0, 1, 0, 1) of a tile.
using scores_of_tile_t = double[kTiles][4];
// Fragments c of the transposed product, for 8 queries each: queries 2 t + (0, 1, 0,
// 1), columns 2 g + (0, 0, 1, 1) of a chunk.
using sums_t = double[2][4];

__device__ __forceinline__ int team_index() {
  return threadIdx.x / (kTeam * kWarpSize);
}
__device__ __forceinline__ int member_of_team() {
  return threadIdx.x / kWarpSize % kTeam;
}

// Waits for all lanes of the team.
__device__ __forceinline__ void sync_team() {
  if constexpr (kTeam == 1) {
    __syncwarp();
  } else {
    ptx::bar_sync<kTeam * kWarpSize>(1 + team_index());
  }
}

// Position of a lane in fragments, computed anew rather than kept in registers.
struct thread_t {
  int g, t;

  __device__ __forceinline__ thread_t() {
    unsigned index = threadIdx.x % kWarpSize;
    ptx::launder(index);
    g = index / 4;
    t = index % 4;
  }
};

// Whether some of the first `rows` queries may see some key.
__device__ __forceinline__ bool sees_any(const mask_bounds_t& bounds, int rows) {
  rows = min(rows, bounds.num_queries);
  const int keys = min(kBlockN, bounds.num_keys);
  return rows > 0 && keys > 0 && bounds.low < keys && 1 - rows < bounds.high;
}

// Starts copies of kUnit columns of 16 queries by a team; rows from `num_rows` and
// columns from `dim` on are zeros.
__device__ __forceinline__ void copy_unit(double* smem, const double* x, index_t stride,
                                          int num_rows, int dim) {
  constexpr int kLanes = kTeam * kWarpSize;
  constexpr int kVectors = kUnit / kVec, kStep = kLanes / kVectors;  // rows at once
  static_assert(kStep <= kWarpRows);
  unsigned lane = threadIdx.x % kLanes;
  ptx::launder(lane);  // recompute addresses, rather than keep them in registers
  const int first = lane / kVectors, vector = lane % kVectors;
  const bool aligned = (reinterpret_cast<unsigned long long>(x) % 16 | stride % 2) == 0;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(smem));
  const double* from = x + first * stride + vector * kVec;
  if (aligned && num_rows >= kWarpRows && dim >= kUnit) {
    // swizzle(row + first) is swizzle(row) ^ swizzle(first).
    const int near = vector ^ swizzle(first);
#pragma unroll
    for (int row = 0; row < kWarpRows; row += kStep, from += kStep * stride) {
      const int at = (row + first) * kUnit + (near ^ swizzle(row)) * kVec;
      ptx::copy_or_fill<16>(to + at * 8, from, 16);
    }
    return;
  }
  const int left = 8 * (dim - vector * kVec);
#pragma unroll 1
  for (int row = first; row < kWarpRows; row += kStep, from += kStep * stride) {
    const unsigned at = to + place<kUnit>(row, vector) * 8;
    const int bytes = row < num_rows ? left : 0;
    if (aligned) {
      ptx::copy_or_fill<16>(at, bytes > 0 ? from : x, min(max(bytes, 0), 16));
    } else {
      ptx::copy_or_fill<8>(at, bytes > 0 ? from : x, bytes > 0 ? 8 : 0);
      ptx::copy_or_fill<8>(at + 8, bytes > 8 ? from + 1 : x, bytes > 8 ? 8 : 0);
    }
  }
}

// s += q k^T over kUnit columns; `keys` starts at the first of them. `count` is any
// number >= 0.
__device__ __forceinline__ void add_products(scores_of_tile_t& s, const double* rows,
                                             const double* keys, int count) {
  const thread_t me;
  const int near = place<kUnit>(me.g, me.t), far = place<kUnit>(me.g, 4 + me.t);
  const int near_key = place<kHeadDim>(me.g, me.t);
  const int far_key = place<kHeadDim>(me.g, 4 + me.t);
  constexpr int kSteps = kUnit / 16, kProducts = kSteps * kOwnTiles;
  // With several tiles, a fragment a serves so many products that it needs no second
  // place.
  constexpr int kPlaces = kOwnTiles > 1 ? 1 : 2;
  double a[kPlaces][8], b[2][4];
  const auto load_a = [&](int step) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const double2 x = ptx::load_here(rows + near + 8 * h * kUnit + 16 * step);
      const double2 y = ptx::load_here(rows + far + 8 * h * kUnit + 16 * step);
      double (&to)[8] = a[step % kPlaces];
      to[h] = x.x, to[2 + h] = x.y, to[4 + h] = y.x, to[6 + h] = y.y;
    }
  };
  const auto load_b = [&](int product) {
    const int at = 8 * (product % kOwnTiles) * kHeadDim + 16 * (product / kOwnTiles);
    const double2 x = ptx::load_here(keys + near_key + at);
    const double2 y = ptx::load_here(keys + far_key + at);
    double (&to)[4] = b[product % 2];
    to[0] = x.x, to[1] = x.y, to[2] = y.x, to[3] = y.y;
  };
  load_a(0);
  load_b(0);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int step = i / kOwnTiles, n = i % kOwnTiles;
    ptx::hold(count, i);
    if (i + 1 < kProducts) load_b(i + 1);
    if (kPlaces == 2 && step + 1 < kSteps) load_a(step + 1);
    if (kPlaces == 1 && n == 0 && step > 0) load_a(step);
    add_product(s[n], a[step % kPlaces], b[i % 2]);
  }
}

// Makes scores of a tile of those that each warp of its team has, first in its s.
__device__ __forceinline__ void gather(scores_of_tile_t& s, double* exchange) {
  if constexpr (kTeam > 1) {
    double2* const of_lane =
        reinterpret_cast<double2*>(exchange) + threadIdx.x % kWarpSize;
    const int first = 2 * kOwnTiles * member_of_team();
#pragma unroll
    for (int i = 0; i < 2 * kOwnTiles; ++i) {
      of_lane[(first + i) * kWarpSize] = {s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]};
    }
    sync_team();
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const double2 x = of_lane[i * kWarpSize];
      s[i / 2][i % 2 * 2] = x.x;
      s[i / 2][i % 2 * 2 + 1] = x.y;
    }
  }
}

// Turns scores of 16 queries into weights. Returns of rows g and g + 8 the maximum and,
// of the lane's own keys, the sum.
__device__ __forceinline__ void weigh(scores_of_tile_t& s, double (&m)[2],
                                      double (&l)[2], const exp2_t& exp2,
                                      const scores_t& scores,
                                      const mask_bounds_t& bounds, int i0,
                                      double unit) {
  bool nonfinite[2] = {};
  m[0] = m[1] = -infinity<double>();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = lane_g() + 8 * (e / 2), key = 8 * n + 2 * lane_t() + e % 2;
      double& x = s[n][e];
      if (!bounds.sees(row, key)) {
        x = -infinity<double>();
      } else if constexpr (kTerms) {
        x = scores(x, i0 + row, key);
      }
      m[e / 2] = x > m[e / 2] ? x : m[e / 2];
      nonfinite[e / 2] |= !(x < infinity<double>());
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    m[r] = warp_reduce<4>(m[r], [](double a, double b) { return a > b ? a : b; });
    // From a NaN or +inf on, the sum of a row is NaN.
    l[r] = nonfinite[r] ? nan_value<double>() : 0;
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const double top = m[e / 2] == -infinity<double>() ? 0 : m[e / 2];
      const double x = s[n][e] - top;
      double p = exp2(x);
      // Weights can be told apart as in weight() of attention/score/score.cuh: -0 for a
      // hidden key, 0 for a weight of 0, and small numbers.
      constexpr double kSmallest = 4.9406564584124654e-324;  // 2^-1074
      if (p == 0 && x * unit > -1074 * kLn2) p = kSmallest;
      if (s[n][e] == -infinity<double>()) p = -0.0;
      l[e / 2] += p;
      s[n][e] = p;
    }
  }
}

// Where out of 16 queries goes; the factors of queries 2 t + e + 8 h.
struct target_t {
  double* out;
  const operand_t& strides;
  int num_rows, dim;
  bool is_aligned;  // to vectors
  thread_t me;
  double inverse[2][2];

  // A chunk of columns of the 8 queries of half h.
  __device__ __forceinline__ void store(int chunk, int h, const double (&sums)[4],
                                        double up = 1) const {
    const int col = 16 * chunk + 2 * me.g;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * h + 2 * me.t + e;
      if (row >= num_rows || col >= dim) continue;
      const double factor = inverse[h][e] * up;
      double* const to = out + row * strides.row + col * strides.col;
      const double x = sums[e] * factor, y = sums[2 + e] * factor;
      if (is_aligned) {
        *reinterpret_cast<double2*>(to) = {x, y};
      } else {
        to[0] = x;
        if (col + 1 < dim) to[strides.col] = y;
      }
    }
  }
};

// The columns of a chunk in kSlots keys, as fragment a: rows g and g + 8 of it are
// columns 2 g and 2 g + 1, slots are keys.
__device__ __forceinline__ void load_columns(double (&a)[kSlots / 2],
                                             const double* values, int step, int chunk,
                                             const thread_t& me) {
#pragma unroll
  for (int i = 0; i < kSlots / 4; ++i) {
    const double2 x =
        ptx::load_here(values + place<kHeadDimV>(2 * me.t + i % 2, me.g) +
                       (kSlots * step + 8 * (i / 2)) * kHeadDimV + 16 * chunk);
    a[2 * i] = x.x;
    a[2 * i + 1] = x.y;
  }
}

// c += a b of 16 rows, 8 columns and 8 slots.
__device__ __forceinline__ void add_product(double (&c)[4], const double (&a)[4],
                                            const double (&b)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::mma_m8n8k4(c[i % 2 * 2], c[i % 2 * 2 + 1], a[i], b[i / 2]);
  }
}

// sum += p v of 16 columns, kSlots keys and the 8 queries of half h.
__device__ __forceinline__ void add_values(double (&sum)[4],
                                           const double (&a)[kSlots / 2],
                                           const scores_of_tile_t& p, int step, int h) {
  double b[kSlots / 4];
#pragma unroll
  for (int i = 0; i < kSlots / 4; ++i) b[i] = p[2 * step + i / 2][2 * h + i % 2];
  add_product(sum, a, b);
}

// Writes o = p v; returns whether a sum of this lane is not finite.
__device__ __forceinline__ bool write_out(const target_t& target,
                                          const scores_of_tile_t& p,
                                          const double* values, int count) {
  constexpr int kProducts = kOwnChunks * kStepsN * 2;
  double a[2][kSlots / 2];
  sums_t sums;
  bool nonfinite = false;
  load_columns(a[0], values, 0, 0, target.me);
#pragma unroll
  for (int i = 0; i <= kProducts; ++i) {
    const int fragment = i / 2, h = i % 2;
    ptx::hold(count, 1000 + i);
    if (h == 1 && i + 1 < kProducts) {
      const int next = fragment + 1;
      load_columns(a[next % 2], values, next % kStepsN, next / kStepsN, target.me);
    }
    if (i < kProducts) {
      double (&sum)[4] = sums[h];
      if (fragment % kStepsN == 0) sum[0] = sum[1] = sum[2] = sum[3] = 0;
      add_values(sum, a[fragment % 2], p, fragment % kStepsN, h);
    }
    // The sum of the other half, if the product before was its last one.
    const int done = (i - 1) / 2;
    if (i > 0 && done % kStepsN == kStepsN - 1) {
      const double (&sum)[4] = sums[1 - h];
#pragma unroll
      for (int n = 0; n < 4; ++n) nonfinite |= !is_finite(sum[n]);
      target.store(done / kStepsN, 1 - h, sum);
    }
  }
  return nonfinite;
}

// Sums of the largest numbers overflow although their means do not: here, o is that of
// values times kDown.
constexpr double kDown = 0x1p-64, kUp = 0x1p64;

// The same where values or sums are not finite: a hidden key adds nothing, not even 0 *
// NaN. Finite values are summed as above, others that are seen are added one by one.
__device__ __forceinline__ void write_exactly(const target_t& target,
                                              const scores_of_tile_t& p,
                                              const double* values) {
#pragma unroll 1
  for (int chunk = 0; chunk < kOwnChunks; ++chunk) {
    sums_t sums = {};
#pragma unroll
    for (int step = 0; step < kStepsN; ++step) {
      double a[kSlots / 2];
      load_columns(a, values, step, chunk, target.me);
#pragma unroll
      for (int n = 0; n < kSlots / 2; ++n) a[n] = is_finite(a[n]) ? a[n] * kDown : 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) add_values(sums[h], a, p, step, h);
    }
#pragma unroll 1
    for (int owner = 0; owner < 4; ++owner) {
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) {
        const int key = n / 2 * 8 + 2 * owner + n % 2;
        const double2 x = load2(values + place<kHeadDimV>(key, lane_g()) + 16 * chunk);
#pragma unroll
        for (int of = 0; of < 4; ++of) {
          const int h = of / 2, e = of % 2;
          const double weight = __shfl_sync(kFullMask, p[n / 2][2 * h + n % 2],
                                            4 * (2 * lane_t() + e) + owner);
          if (is_unseen(weight)) continue;
          if (!is_finite(x.x)) sums[h][e] += weight * x.x;
          if (!is_finite(x.y)) sums[h][2 + e] += weight * x.y;
        }
      }
    }
    target.store(chunk, 0, sums[0], kUp);
    target.store(chunk, 1, sums[1], kUp);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_short_f64(FORWARD_PARAMETERS, SCORE_PARAMETERS) {
  extern __shared__ __align__(16) unsigned char smem[];
  double* const smem_k = reinterpret_cast<double*>(smem);
  double* const smem_v = smem_k + kBlockN * kHeadDim;
  double* const exchange = smem_v + kBlockN * kHeadDimV;  // of scores of a team
  constexpr int kExchange = kTeam == 1 ? 0 : kWarpRows * kBlockN;
  double* const ring =
      exchange + kTeams * kExchange + team_index() * kStages * kUnitSize;
  __shared__ exp2_table_t exp2_table;

  const int seqlen_q = static_cast<int>(params.seqlen_q);
  const int dim = static_cast<int>(params.head_dim);
  // Tiles of 16 queries over the heads of a group: this block has [first, last).
  const int tiles = (seqlen_q + kWarpRows - 1) / kWarpRows;
  const int all = static_cast<int>(params.group_size) * tiles;
  const int blocks = (all + kTilesOfBlock - 1) / kTilesOfBlock;  // per head of k
  const index_t head_of_k = divide(block_index(), blocks);
  const int first =
      static_cast<int>(block_index() - head_of_k * blocks) * kTilesOfBlock;
  const int last = min(all, first + kTilesOfBlock);
  const tile_coord_t first_head(params, head_of_k * params.group_size);
  if (!first_head.exists) return;

  if (threadIdx.x < kWarpSize) {
    exp2_table.fill((kTerms ? 1 : params.scale) * kLog2e);
  }
  copy_rows<kBlockN, kHeadDim>(smem_k, first_head.at_kv(k, params.k), params.k.row,
                               params.seqlen_k, dim);
  copy_rows<kBlockN, kHeadDimV>(smem_v, first_head.at_kv(v, params.v), params.v.row,
                                params.seqlen_k, static_cast<int>(params.head_dim_v));
  ptx::commit_copy_group();

  // The next part of a tile to copy.
  const double* const q_of_group = first_head.at(q, params.q);
  const double* next_q = q_of_group;
  int next_tile = first + team_index(), next_unit = 0, next_rows = 0, next_stage = 0;
  // The bounds of all heads of the entry are the same.
  const scores_t scores_of_entry(first_head, SCORE_ARGUMENTS);
  const auto fetch = [&] {
    if (next_tile < last) {
      if (next_unit == 0) {
        const int head = next_tile / tiles;
        const int i0 = (next_tile - head * tiles) * kWarpRows;
        const mask_bounds_t bounds = scores_of_entry.mask_bounds(i0, 0);
        next_q = q_of_group + head * params.q.head + i0 * params.q.row;
        next_rows = sees_any(bounds, min(seqlen_q - i0, kWarpRows))
                        ? min(bounds.num_queries, seqlen_q - i0)
                        : 0;
      }
      if (next_rows > 0) {
        copy_unit(ring + next_stage * kUnitSize, next_q + next_unit * kUnit,
                  params.q.row, next_rows, dim - next_unit * kUnit);
      }
      if (++next_unit == kUnits) {
        next_unit = 0;
        next_tile += kTeams;
      }
    }
    ptx::commit_copy_group();
    next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;
  };
#pragma unroll
  for (int n = 0; n < kStages - 1; ++n) fetch();
  ptx::wait_copy_groups<kStages - 1>();
  __syncthreads();  // k, v and the table have arrived

  const exp2_t exp2(exp2_table);
  const double unit = kTerms ? 1 : params.scale;  // of scores
  int stage = 0;
#pragma unroll 1
  for (int tile = first + team_index(); tile < last; tile += kTeams) {
    const int head = tile / tiles, i0 = (tile - head * tiles) * kWarpRows;
    tile_coord_t at = first_head;
    at.head += head;
    at.row_of_heads += head;
    const scores_t scores(at, SCORE_ARGUMENTS);
    const mask_bounds_t bounds = scores.mask_bounds(i0, 0);
    const int num_rows = min(seqlen_q - i0, kWarpRows);
    const bool is_seen = sees_any(bounds, num_rows);
    scores_of_tile_t s = {};
#pragma unroll 1
    for (int part = 0; part < kUnits; ++part) {
      ptx::wait_copy_groups<kStages - 2>();
      sync_team();  // the part has arrived; all lanes have read the one before
      fetch();
      if (is_seen) {
        const double* const keys =
            smem_k + 8 * kOwnTiles * member_of_team() * kHeadDim + part * kUnit;
        add_products(s, ring + stage * kUnitSize, keys, num_rows);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    double m[2] = {-infinity<double>(), -infinity<double>()}, l[2] = {};
    if (is_seen) {
      gather(s, exchange + team_index() * kExchange);
      weigh(s, m, l, exp2, scores, bounds, i0, unit);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        l[r] = warp_reduce<4>(l[r], [](double a, double b) { return a + b; });
      }
    }
    // Lanes t < 2 have row g + 8 t.
    const int of_lane = lane_t() % 2, row = lane_g() + 8 * of_lane;
    const finished_t finished = scores.finish(
        i0 + row, (of_lane == 0 ? m[0] : m[1]) * unit, of_lane == 0 ? l[0] : l[1]);
    if (lse != nullptr && member_of_team() == 0 && lane_t() < 2 && row < num_rows) {
      lse[at.row_of_heads * seqlen_q + i0 + row] = finished.lse;
    }
    const int col = 16 * kOwnChunks * member_of_team();  // of out, this warp's first
    target_t target = {
        at.at(out, params.out) + i0 * params.out.row + col * params.out.col, params.out,
        num_rows, static_cast<int>(params.head_dim_v) - col};
    target.is_aligned = params.out.col == 1 && target.dim % 2 == 0 &&
                        params.out.row % 2 == 0 &&
                        reinterpret_cast<unsigned long long>(target.out) % 16 == 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      target.inverse[n / 2][n % 2] =
          __shfl_sync(kFullMask, finished.inverse, 4 * (2 * lane_t() + n % 2) + n / 2);
    }
    if (!is_seen) {
#pragma unroll 1
      for (int chunk = 0; chunk < kOwnChunks; ++chunk) {
        target.store(chunk, 0, {});
        target.store(chunk, 1, {});
      }
    } else if (__any_sync(kFullMask, write_out(target, s, smem_v + col, num_rows))) {
      write_exactly(target, s, smem_v + col);
    }
  }
}

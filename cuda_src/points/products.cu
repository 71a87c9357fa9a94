// SPDX-License-Identifier: MIT
// points_products: sums over all keys with gaussian scores from products, for many
// dimensions.
//
// Algorithm  s_ij = (h_j - |y_j|^2) + 2 x_i . y_j - |x_i|^2 - m_i with points relative
//            to a common middle, in units of the scale; |x_i|^2 is added at the end.
//            The product consists of float16 parts (parts.cu): high high, high low, low
//            high, or with PARTS = 1 of high high alone, the norms being those of the
//            rounded points. A row's reference m_i is raised to the largest score of a
//            tile whose sums are large.
// Grid       (batch x row blocks, splits of the keys, chunks of columns)
// Tiles      128 rows by 128 keys; each of 8 warps has 32 rows and 64 keys, and writes
//            a part of its own. Parts of points load in chunks of 128 bytes, keys
//            double-buffered; rows stay if shared memory can hold them (RESIDENT). With
//            PARTS = 1 and up to 64 axes a warp has its rows in registers, and makes
//            products of 8 keys while it takes exponentials of those before; where
//            references have to be raised it makes them again.
// Numbers    products of 16 axes summed by tensor cores, small ones first, and added up
//            in float32; h - |y|^2 in two floats. With PARTS = 1 tensor cores sum all
//            axes, and start from it less the reference, in one.
// Limits     sm_80. Rows with a squared norm above `limit` would lose accuracy: their
//            groups are flagged in `redo`.

#include "points/params.cuh"
#include "points/sums.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"

constexpr int kThreads = 256;
constexpr int kBlockRows = 128, kBlockKeys = 128;
constexpr int kWarpRows = 32, kWarpKeys = 64;
constexpr int kRowTiles = kWarpRows / 16, kKeyTiles = kWarpKeys / 8;
constexpr int kRows = 2 * kRowTiles;  // per lane
constexpr int kParts = PARTS;
constexpr int kChunkAxes = 64 / kParts;
constexpr int kChunks = (kDim + kChunkAxes - 1) / kChunkAxes;
constexpr int kSteps = ((kDim < kChunkAxes ? kDim : kChunkAxes) + 15) / 16;
// More would spill.
constexpr int kUnrolled = kChunks == 1 ? kSteps : 3 - kParts;
constexpr bool kIsResident = RESIDENT;
constexpr int kRowBuffers = kIsResident ? kChunks : 2;
constexpr int kUnits = 8;  // 16-byte units per chunk of a point
constexpr bool kIsHeld = kParts == 1 && kChunks == 1;  // a warp's rows, in registers
// A lane's sum above kLargeSum has a score kFarAbove its reference, or more.
constexpr float kFarAbove = 16;
constexpr float kLargeSum = (1 << 16) * 2 * kKeyTiles;

struct smem_t {
  uint4 x[kRowBuffers][kBlockRows][kUnits];
  uint4 y[2][kBlockKeys][kUnits];
  float2 terms[2][kBlockKeys];
  float b[2][kColumns > 0 ? kColumns : 1][kBlockKeys];
};

struct block_t {
  const uint4 *x, *y;
  const float2* terms;
  const float* b;
  int lane, first_row, first_key;
};

struct state_t {
  float ref[kRows];
  unsigned unseen;                  // rows, one bit each, that have seen no key
  float total[kSums], rest[kSums];  // of row `lane % 4` of the four
};

// Swizzles the units of a row so that ldmatrix has no bank conflicts.
__device__ __forceinline__ int swizzled(int row, int unit) { return unit ^ (row & 7); }

__device__ __forceinline__ void copy_points(uint4 (&to)[128][kUnits],
                                            const uint4* points, int chunk) {
  constexpr int kAtOnce = kThreads / kUnits;  // a multiple of 8: one swizzle a thread
  const int row = threadIdx.x / kUnits, unit = threadIdx.x % kUnits;
  const uint4* from = points + (row * kChunks + chunk) * kUnits + unit;
#pragma unroll
  for (int n = 0; n < 128; n += kAtOnce) {
    ptx::copy_async<16>(&to[n + row][swizzled(row, unit)], from + n * kChunks * kUnits);
  }
}

// Copies what comes with the keys of a tile.
__device__ __forceinline__ void copy_terms(smem_t& smem, const block_t& block, int tile,
                                           int padded_keys) {
  const long long key = static_cast<long long>(tile) * kBlockKeys;
  const int n = threadIdx.x;
  if (n < kBlockKeys / 2) {
    ptx::copy_async<16>(&smem.terms[tile & 1][2 * n], block.terms + key + 2 * n);
  }
#pragma unroll
  for (int v = 0; v < kColumns; ++v) {
    if (n >= kBlockKeys / 4) break;
    const long long from = static_cast<long long>(v) * padded_keys + key + 4 * n;
    ptx::copy_async<16>(&smem.b[tile & 1][v][4 * n], block.b + from);
  }
}

__device__ __forceinline__ unsigned address_of(const uint4* p) {
  return unsigned(__cvta_generic_to_shared(p));
}

// What the products of a tile are added to.
__device__ __forceinline__ void start(float (&s)[kRowTiles][kKeyTiles][4],
                                      const state_t& state,
                                      const float2 (&terms)[kBlockKeys],
                                      const block_t& block) {
  const int first = block.first_key + 2 * (block.lane % 4);
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float term = kParts == 1 ? terms[first + 8 * n + e % 2].x : 0.f;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        s[m][n][e] = kParts == 1 ? term - state.ref[2 * m + e / 2] : 0.f;
      }
    }
  }
}

// d += x y over 16 axes of a chunk, for the warp.
__device__ __forceinline__ void multiply(float (&d)[kRowTiles][kKeyTiles][4],
                                         const uint4 (&x)[kBlockRows][kUnits],
                                         const uint4 (&y)[kBlockKeys][kUnits],
                                         const block_t& block, int step) {
  const int lane = block.lane;
  unsigned a[kParts][kRowTiles][4];  // high and low parts
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int row = block.first_row + 16 * m + lane % 16;
      const int unit = 4 * part + 2 * step + lane / 16;
      ptx::ldmatrix_x4(a[part][m], address_of(&x[row][swizzled(row, unit)]));
    }
  }
#pragma unroll
  for (int n = 0; n < kKeyTiles; n += 2) {
    unsigned b[kParts][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int key = block.first_key + 8 * n + lane % 8 + lane / 16 * 8;
      const int unit = 4 * part + 2 * step + lane / 8 % 2;
      ptx::ldmatrix_x4(b[part], address_of(&y[key][swizzled(key, unit)]));
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float (&sum)[4] = d[m][n + k];
        const unsigned (&high)[4] = b[0], (&low)[4] = b[kParts - 1];
        if constexpr (kParts == 1) {
          ptx::mma_m16n8k16_f16(sum, a[0][m], high[2 * k], high[2 * k + 1]);
        } else {
          // Tensor cores cut terms off at digits of the largest one: the sum so far is
          // none of them. Small products first.
          float more[4];
          ptx::mma_m16n8k16_f16_from_zero(more, a[0][m], low[2 * k], low[2 * k + 1]);
          ptx::mma_m16n8k16_f16(more, a[1][m], high[2 * k], high[2 * k + 1]);
          ptx::mma_m16n8k16_f16(more, a[0][m], high[2 * k], high[2 * k + 1]);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[e] += more[e];
        }
      }
    }
  }
}

// A score without its row's norm, relative to `ref`, which with PARTS = 1 is in s.
__device__ __forceinline__ float score(float s, float2 term, float ref) {
  return kParts == 1 ? s : s + ((term.x - ref) + term.y);
}

// Raises the reference of row r if its largest score, of this lane's, is far above it.
__device__ __forceinline__ bool raise(float top, int r, state_t& state,
                                      const block_t& block) {
  top = warp_reduce<4>(top, [](float a, float b) { return fmaxf(a, b); });
  const float old = state.ref[r];
  const bool is_first = state.unseen >> r & 1;
  if (!(is_first ? top > -infinity<float>() : top > old + kFarAbove)) return false;
  state.ref[r] = top;
  state.unseen &= ~(1u << r);
  if (block.lane % 4 == r) {
    const float factor = is_first ? 0.f : ptx::ex2_approx_ftz(old - top);
#pragma unroll
    for (int c = 0; c < kSums; ++c) state.total[c] *= factor, state.rest[c] *= factor;
  }
  return true;
}

// Raises references by the scores of a tile.
__device__ __forceinline__ void follow(float (&s)[kRowTiles][kKeyTiles][4],
                                       state_t& state,
                                       const float2 (&terms)[kBlockKeys],
                                       const block_t& block) {
  const float inf = infinity<float>();
  const int first = block.first_key + 2 * (block.lane % 4);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float top = -inf;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 term = terms[first + 8 * n + e];
        top = fmaxf(top, score(s[r / 2][n][r % 2 * 2 + e], term, 0.f));
      }
    }
    const float from = kParts == 1 ? state.ref[r] : 0.f;
    if (!raise(top + from, r, state, block)) continue;
    if constexpr (kParts == 1) {
      const float up = state.ref[r] - from;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) s[r / 2][n][r % 2 * 2 + e] -= up;
      }
    }
  }
}

// Adds kCount tiles of keys, the first being `from`, to the sums of a lane.
template <int kCount>
__device__ __forceinline__ void weigh(const float (&s)[kRowTiles][kCount][4], int from,
                                      float (&sums)[kSums][kRows], const state_t& state,
                                      const smem_t& smem, const block_t& block,
                                      int tile) {
  const int first = block.first_key + 8 * from + 2 * (block.lane % 4);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = 2 * m + e / 2, j = first + 8 * n + e % 2;
        const float ref = state.ref[r];
        const float w =
            ptx::ex2_approx_ftz(score(s[m][n][e], smem.terms[tile & 1][j], ref));
        if constexpr (kHasWeights) sums[0][r] += w;
#pragma unroll
        for (int v = 0; v < kColumns; ++v) {
          float& sum = sums[kHasWeights + v][r];
          sum = fmaf(w, smem.b[tile & 1][v][j], sum);
        }
      }
    }
  }
}

// The rows of a warp, as operands of products.
using held_t = unsigned[kSteps][kRowTiles][4];

__device__ __forceinline__ void hold_rows(held_t& a,
                                          const uint4 (&x)[kBlockRows][kUnits],
                                          const block_t& block) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int row = block.first_row + 16 * m + block.lane % 16;
      const int unit = 2 * step + block.lane / 16;
      ptx::ldmatrix_x4(a[step][m], address_of(&x[row][swizzled(row, unit)]));
    }
  }
}

// Scores of 8 of a tile's keys, from `start` on, relative to the references.
__device__ __forceinline__ void scores_of_8(float (&s)[kRowTiles][1][4], int start,
                                            const held_t& a, const state_t& state,
                                            const smem_t& smem, const block_t& block,
                                            int tile) {
  const int first = block.first_key + start, lane = block.lane;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float term = smem.terms[tile & 1][first + 2 * (lane % 4) + e % 2].x;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      s[m][0][e] = term - state.ref[2 * m + e / 2];
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; step += 2) {
    const int key = first + lane % 8, unit = 2 * step + lane / 8;
    unsigned b[4];  // of two steps
    ptx::ldmatrix_x4(b, address_of(&smem.y[tile & 1][key][swizzled(key, unit)]));
#pragma unroll
    for (int k = 0; k < 2 && step + k < kSteps; ++k) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16_f16(s[m][0], a[step + k][m], b[2 * k], b[2 * k + 1]);
      }
    }
  }
}

// Raises references by the scores of a tile, which are made for that alone.
__device__ __forceinline__ void follow_held(const held_t& a, state_t& state,
                                            const smem_t& smem, const block_t& block,
                                            int tile) {
  float top[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) top[r] = -infinity<float>();
#pragma unroll 1
  for (int n = 0; n < kKeyTiles; ++n) {
    float s[kRowTiles][1][4];
    scores_of_8(s, 8 * n, a, state, smem, block, tile);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int e = 0; e < 2; ++e) top[r] = fmaxf(top[r], s[r / 2][0][r % 2 * 2 + e]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    raise(top[r] + state.ref[r], r, state, block);
  }
}

// Products of 8 keys go on beside exponentials of the 8 before.
__device__ __forceinline__ void weigh_held(const held_t& a, float (&sums)[kSums][kRows],
                                           const state_t& state, const smem_t& smem,
                                           const block_t& block, int tile) {
  float s[2][kRowTiles][1][4];
  scores_of_8(s[0], 0, a, state, smem, block, tile);
  const auto step = [&](int n) {
    scores_of_8(s[1], 8 * (n + 1), a, state, smem, block, tile);
    weigh(s[0], n, sums, state, smem, block, tile);
  };
#pragma unroll 1
  for (int n = 0; n < kKeyTiles - 2; n += 2) {
    step(n);
    scores_of_8(s[0], 8 * (n + 2), a, state, smem, block, tile);
    weigh(s[1], n + 1, sums, state, smem, block, tile);
  }
  step(kKeyTiles - 2);
  weigh(s[1], kKeyTiles - 1, sums, state, smem, block, tile);
}

// Adds the keys of a tile to the totals. `follow` raises references by its scores, and
// `weigh` adds up its weights.
template <typename Follow, typename Weigh>
__device__ __forceinline__ void attend(state_t& state, const block_t& block,
                                       Follow follow, Weigh weigh) {
  float sums[kSums][kRows];
  const auto sum_up = [&] {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kSums; ++c) sums[c][r] = 0;
    }
    weigh(sums);
  };
  if constexpr (kHasWeights) {
    bool follows = __any_sync(kFullMask, state.unseen != 0);
    // References are seldom raised: the sums tell when, and then are made once more.
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (follows) follow();
      sum_up();
      follows = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) follows |= !(sums[0][r] <= kLargeSum);
      follows = __any_sync(kFullMask, follows);
      if (!follows) break;
    }
  } else {
    sum_up();
  }
#pragma unroll
  for (int c = 0; c < kSums; ++c) {
    add(state.total[c], state.rest[c], scattered_sums<2>(sums[c], block.lane));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) points_products(
    const uint4* __restrict__ x,       // (batch, padded_rows, kChunks, kUnits)
    const uint4* __restrict__ y,       // (batch, padded_keys, kChunks, kUnits)
    const double* __restrict__ norms,  // (batch, padded_rows)
    const float2* __restrict__ terms,  // (batch, padded_keys)
    const float* __restrict__ b,       // (batch, chunks, kColumns, padded_keys)
    int* __restrict__ redo,            // (batch, groups)
    double* __restrict__ refs,         // part_row
    float* __restrict__ parts,         // part_row, kSums to each part
    points_params_t params) {
  extern __shared__ __align__(128) char memory[];
  smem_t& smem = *reinterpret_cast<smem_t*>(memory);
  const int row_blocks = params.padded_rows / kBlockRows;
  const int entry = blockIdx.x / row_blocks;
  const int first_row = blockIdx.x % row_blocks * kBlockRows;
  const long long entry_row = static_cast<long long>(entry) * params.padded_rows;
  const long long entry_key = static_cast<long long>(entry) * params.padded_keys;
  const int warp = threadIdx.x / kWarpSize;
  block_t block;
  block.x = x + (entry_row + first_row) * kChunks * kUnits;
  block.y = y + entry_key * kChunks * kUnits;
  block.terms = terms + entry_key;
  block.b = b + (entry_key * gridDim.z +
                 static_cast<long long>(blockIdx.z) * params.padded_keys) *
                    kColumns;
  block.lane = threadIdx.x % kWarpSize;
  block.first_row = warp % 4 * kWarpRows;
  block.first_key = warp / 4 * kWarpKeys;

  state_t state = {};
  if (kHasWeights) state.unseen = (1u << kRows) - 1;
  constexpr int kTilesOfTile = kTileKeys / kBlockKeys;
  const int first = blockIdx.y * params.tiles_per_split * kTilesOfTile;
  const int last = min(first + params.tiles_per_split * kTilesOfTile,
                       params.num_tiles * kTilesOfTile);
  const auto copy_chunk = [&](int turn) {
    const int tile = first + turn / kChunks, chunk = turn % kChunks;
    if (tile < last) {
      const long long key = static_cast<long long>(tile) * kBlockKeys;
      copy_points(smem.y[turn & 1], block.y + key * kChunks * kUnits, chunk);
      if (!kIsResident) copy_points(smem.x[turn & 1], block.x, chunk);
      if (chunk == 0) copy_terms(smem, block, tile, params.padded_keys);
    }
    ptx::commit_copies();
  };
  if constexpr (kIsResident) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      copy_points(smem.x[chunk], block.x, chunk);
    }
  }
  copy_chunk(0);
  held_t rows;
  if constexpr (kIsHeld) {
    ptx::wait_copies();
    __syncthreads();
    hold_rows(rows, smem.x[0], block);
  }
  for (int tile = first, turn = 0; tile < last; ++tile) {
    if constexpr (kIsHeld) {
      ptx::wait_copies();
      __syncthreads();  // the tile has arrived, and the previous one has been read
      copy_chunk(tile - first + 1);
      attend(
          state, block, [&] { follow_held(rows, state, smem, block, tile); },
          [&](float (&sums)[kSums][kRows]) {
            weigh_held(rows, sums, state, smem, block, tile);
          });
      continue;
    }
    float s[kRowTiles][kKeyTiles][4];
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk, ++turn) {
      ptx::wait_copies();
      __syncthreads();  // the chunk has arrived, and the previous one has been read
      copy_chunk(turn + 1);
      if (chunk == 0) start(s, state, smem.terms[tile & 1], block);
#pragma unroll(kUnrolled)
      for (int step = 0; step < kSteps; ++step) {
        multiply(s, smem.x[kIsResident ? chunk : turn & 1], smem.y[turn & 1], block,
                 step);
      }
    }
    attend(
        state, block, [&] { follow(s, state, smem.terms[tile & 1], block); },
        [&](float (&sums)[kSums][kRows]) {
          weigh(s, 0, sums, state, smem, block, tile);
        });
  }
  ptx::wait_copies();

  const int part = params.first_part + 2 * blockIdx.y + warp / 4;
  const int r = block.lane % 4;
  float ref = state.ref[0];
#pragma unroll
  for (int n = 1; n < kRows; ++n) ref = r == n ? state.ref[n] : ref;
  const int row = first_row + block.first_row + r / 2 * 16 + r % 2 * 8 + block.lane / 4;
  const long long place = part_row(params, blockIdx.z, entry, part, row);
  const double norm = norms[entry_row + row];
  refs[place] = state.unseen >> r & 1 ? 0 : double(ref) - norm;
  bool is_odd = !(norm <= params.limit);
#pragma unroll
  for (int c = 0; c < kSums; ++c) {
    const long long at =
        (place - row) * kSums + static_cast<long long>(c) * params.padded_rows;
    parts[at + row] = state.total[c];
    is_odd |= !is_finite(state.total[c]);
  }
  if (is_odd) redo[(entry_row + row) / kGroup] = 1;
}

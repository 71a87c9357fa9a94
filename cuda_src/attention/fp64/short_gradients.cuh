// SPDX-License-Identifier: MIT
// Gradients of float64 for entries with few keys (short_backward.cu,
// short_backward_wide.cu): copies of 16 rows, products over the queries of a tile, and
// dq of them.
#pragma once

#include "attention/fp64/tile.cuh"
#include "attention/simt/gradients.cuh"
#include "ptx/hold.cuh"

#if !defined(DIM) || !defined(BLOCK_N) || !defined(TEAM) || !defined(MIN_BLOCKS)
#error "DIM, BLOCK_N, TEAM and MIN_BLOCKS come from the host"
#endif
constexpr int kDim = DIM;  // of all rows, padded with zeros
constexpr int kBlockN = BLOCK_N;
constexpr int kTeam = TEAM;             // warps that share dk and dv
constexpr int kMinBlocks = MIN_BLOCKS;  // blocks per multiprocessor; limits registers
constexpr int kWarps = kNumThreads / kWarpSize, kTeams = kWarps / kTeam;

constexpr int kTiles = kBlockN / 8;    // of 8 keys
constexpr int kStepsN = kBlockN / 16;  // of a sum over keys
constexpr int kChunks = kDim / 16;     // of columns, and steps of a sum over them

// Numbers in shared memory.
constexpr int kRowsSize = kWarpRows * kDim, kKeysSize = kBlockN * kDim;
constexpr int kWeightsSize = kBlockN * kWarpRows;

// SHORT_F64 of _attention/gpu/fp64/short_backward.py is the same struct on the host.
struct short_f64_t {
  operand_t dq;
};

using product_t = double[kTiles][4];  // fragments c: 16 queries, 8 keys each
// Of dv or dk. Rows 2 g + (0, 0, 1, 1), which are columns of a chunk; columns 2 t + (0,
// 1, 0, 1), which are keys.
using sum_t = double[kTiles][4];

struct thread_t {
  int warp, lane, g, t;

  __device__ __forceinline__ thread_t() {
    unsigned index = threadIdx.x;
    ptx::launder(index);  // recompute what depends on it
    warp = index / kWarpSize;
    lane = index % kWarpSize;
    g = lane / 4;
    t = lane % 4;
  }
  __device__ __forceinline__ int team() const { return warp / kTeam; }
  __device__ __forceinline__ int member() const { return warp % kTeam; }
};

// The weight of a query and a key.
__device__ __forceinline__ int weight_at(int query, int key) {
  return place<kWarpRows>(key, query / kVec) + query % kVec;
}

// Starts copies of 16 rows by kLanes threads; rows from `num_rows` and columns from
// `dim` on are zeros.
template <int kLanes>
__device__ __forceinline__ void copy_16_rows(double* smem, const double* x,
                                             index_t stride, int num_rows, int dim,
                                             int lane) {
  constexpr int kVectors = kDim / kVec;
  const bool aligned = (reinterpret_cast<unsigned long long>(x) % 16 | stride % 2) == 0;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(smem));
  if (aligned && num_rows >= kWarpRows && dim == kDim) {
#pragma unroll 8
    for (int n = lane; n < kWarpRows * kVectors; n += kLanes) {
      const int row = n / kVectors, vector = n % kVectors;
      ptx::copy_or_fill<16>(to + place<kDim>(row, vector) * 8,
                            x + row * stride + vector * kVec, 16);
    }
    return;
  }
#pragma unroll 1
  for (int n = lane; n < kWarpRows * kVectors; n += kLanes) {
    const int row = n / kVectors, col = n % kVectors * kVec;
    const int left = row < num_rows ? 8 * (dim - col) : 0;
    const unsigned at = to + place<kDim>(row, n % kVectors) * 8;
    const double* const from = left > 0 ? x + row * stride + col : x;
    if (aligned) {
      ptx::copy_or_fill<16>(at, from, min(max(left, 0), 16));
    } else {
      ptx::copy_or_fill<8>(at, from, left > 0 ? 8 : 0);
      ptx::copy_or_fill<8>(at + 8, left > 8 ? from + 1 : x, left > 8 ? 8 : 0);
    }
  }
}

// Two vectors of a row as a fragment b.
__device__ __forceinline__ void load_b(double (&b)[4], const double* near,
                                       const double* far) {
  const double2 x = ptx::load_here(near), y = ptx::load_here(far);
  b[0] = x.x, b[1] = x.y, b[2] = y.x, b[3] = y.y;
}

// The columns of a chunk in 16 rows, as fragment a: rows 2 g and 2 g + 1 of it are
// columns, slots are rows. `lane_rows` are rows 2 t and 2 t + 1 from vector g on.
__device__ __forceinline__ void load_columns(double (&a)[8],
                                             const double* const (&lane_rows)[2],
                                             int at) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const double2 x = ptx::load_here(lane_rows[i % 2] + 8 * (i / 2) * kDim + at);
    a[2 * i] = x.x;
    a[2 * i + 1] = x.y;
  }
}

// sums[kFirst ...] += (weights rows)^T in kCount chunks of columns, over 16 queries.
template <int kFirst, int kCount, int kJobs>
__device__ __forceinline__ void add_transposed(sum_t (&sums)[kJobs],
                                               const double* weights,
                                               const double* rows, int chunk,
                                               int count) {
  const thread_t me;
  const double* const lane_rows[2] = {
      rows + place<kDim>(2 * me.t, me.g) + 16 * chunk,
      rows + place<kDim>(2 * me.t + 1, me.g) + 16 * chunk};
  const double* const near = weights + place<kWarpRows>(me.g, me.t);
  const double* const far = weights + place<kWarpRows>(me.g, 4 + me.t);
  // A sum is added kDelay products later: it is complete by then. Two tiles of weights
  // stay in registers, of more each product loads one.
  constexpr int kProducts = kCount * kTiles, kDelay = 2;
  double a[2][8], b[2][4], sum[kDelay + 1][4];
  const auto load_weights = [&](int product) {
    if (kTiles == 2 && product >= 2) return;
    const int at = product % kTiles * 8 * kWarpRows;
    load_b(b[product % 2], near + at, far + at);
  };
  load_columns(a[0], lane_rows, 0);
  load_weights(0);
#pragma unroll
  for (int i = 0; i < kProducts + kDelay; ++i) {
    const int done = i - kDelay;
    if (done >= 0) {
      double (&total)[4] = sums[kFirst + done / kTiles][done % kTiles];
      ptx::hold(count, 2 * i);
#pragma unroll
      for (int e = 0; e < 4; ++e) total[e] += sum[done % (kDelay + 1)][e];
      // Otherwise the assembler moves all additions behind all products.
      ptx::hold(count, 2 * i + 1, total);
    } else {
      ptx::hold(count, 2 * i + 1);
    }
    if (i >= kProducts) continue;
    const int c = i / kTiles, n = i % kTiles;
    if (i + 1 < kProducts) load_weights(i + 1);
    if (n == 1 && c + 1 < kCount) {
      load_columns(a[(c + 1) % 2], lane_rows, 16 * (c + 1));
    }
    double (&own)[4] = sum[i % (kDelay + 1)];
    own[0] = own[1] = own[2] = own[3] = 0;
    add_product(own, a[c % 2], b[n % 2]);
  }
}

// sum(dO * out) of a row, by a warp; 0 where out is 0, even if dO is NaN.
__device__ __forceinline__ double dot_out(const double* out, index_t col_stride,
                                          const double* dout, int dim, bool& has_out) {
  double sum = 0;
#pragma unroll 1
  for (int d = thread_t().lane; d < dim; d += kWarpSize) {
    const double o = out[d * col_stride];
    if (o != 0) sum = fma_of(o, dout[d], sum);
    has_out |= o != 0;
  }
  has_out = __any_sync(kFullMask, has_out);
  return warp_reduce(sum, [](double a, double b) { return a + b; });
}

// Zeroes the numbers of 16 rows that are not finite, by a warp; returns the rows that
// had some, as bits, to lane 0.
__device__ __forceinline__ unsigned clean(double* rows) {
  unsigned odd = 0;
#pragma unroll 1
  for (int n = thread_t().lane; n < kRowsSize; n += kWarpSize) {
    if (is_finite(rows[n])) continue;
    rows[n] = 0;
    odd |= 1u << n / kDim;
  }
  return warp_reduce(odd, [](unsigned a, unsigned b) { return a | b; });
}

// Writes kCount chunks of dq of 16 queries, from dS and k; returns whether a number is
// not finite.
template <int kCount>
__device__ __forceinline__ bool write_dq(double* dq, const volatile double* score_grads,
                                         const double* keys, const operand_t& strides,
                                         int first, int num_rows, bool is_seen, int dim,
                                         double scale) {
  const thread_t me;
  const bool aligned =
      strides.col == 1 && dim % 2 == 0 &&
      (reinterpret_cast<unsigned long long>(dq) % 16 | strides.row % 2) == 0;
  bool nonfinite = false;
  const auto store = [&](int chunk, const double (&sums)[2][4]) {
    const int col = 16 * (first + chunk) + 2 * me.g;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int row = 8 * (n / 2) + 2 * me.t + n % 2;
      const double x = sums[n / 2][n % 2] * scale, y = sums[n / 2][2 + n % 2] * scale;
      nonfinite |= !is_finite(x) || !is_finite(y);
      if (row >= num_rows || col >= dim) continue;
      double* const to = dq + row * strides.row + col * strides.col;
      if (aligned) {
        *reinterpret_cast<double2*>(to) = {x, y};
      } else {
        to[0] = x;
        if (col + 1 < dim) to[strides.col] = y;
      }
    }
  };
  if (!is_seen) {
    const double zeros[2][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < kCount; ++chunk) store(chunk, zeros);
    return false;
  }
  keys += 16 * first;
  const double* const lane_rows[2] = {keys + place<kDim>(2 * me.t, me.g),
                                      keys + place<kDim>(2 * me.t + 1, me.g)};
  // Key 2 t + e, query g + 8 h.
  int near[2][2];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    near[n / 2][n % 2] = weight_at(me.g + 8 * (n / 2), 2 * me.t + n % 2);
  }
  // Up to 16 keys, dS stays in registers.
  constexpr bool kStays = kStepsN == 1;
  constexpr int kProducts = kCount * kStepsN * 2;
  double a[2][8], b[kStays ? 2 * kStepsN : 2][4], sums[2][2][4];
  const auto load_grads = [&](int product) {
    if (kStays && product >= 2 * kStepsN) return;
    const int step = product / 2 % kStepsN, h = product % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (16 * step + 8 * (i / 2)) * kWarpRows;
      b[kStays ? product : h][i] = score_grads[near[h][i % 2] + at];
    }
  };
  load_columns(a[0], lane_rows, 0);
  load_grads(0);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int fragment = i / 2, h = i % 2;
    const int chunk = fragment / kStepsN, step = fragment % kStepsN;
    ptx::hold(num_rows, i);
    if (i + 1 < kProducts) load_grads(i + 1);
    if (h == 1 && i + 1 < kProducts) {
      const int next = fragment + 1;
      load_columns(a[next % 2], lane_rows,
                   next % kStepsN * 16 * kDim + next / kStepsN * 16);
    }
    double (&sum)[4] = sums[chunk % 2][h];
    if (step == 0) sum[0] = sum[1] = sum[2] = sum[3] = 0;
    add_product(sum, a[fragment % 2], b[kStays ? 2 * step + h : h]);
    // The sums of the chunk before are complete by now.
    if (step == kStepsN - 1 && h == 1 && chunk > 0) {
      store(chunk - 1, sums[(chunk - 1) % 2]);
    }
  }
  store(kCount - 1, sums[(kCount - 1) % 2]);
  return nonfinite;
}

// SPDX-License-Identifier: MIT
// softmax_vjp_columns: the gradient of a softmax or log_softmax along columns.
//
// Algorithm  As softmax_vjp, along an axis that is not the contiguous one:
//            softmax       c = sum_i y_i dy_i,  dx_i = scale y_i (dy_i - c)
//            log_softmax   c = sum_i dy_i,      dx_i = scale (dy_i - exp(y_i) c),
//                          and 0 where y_i is -inf (an element that took no part)
// Grid       1-D; a block takes kGroupsPerBlock tiles at a time, a cluster takes one
// Tiles      kColumns columns of one slab; a thread holds kHeld x kVector elements of
//            y and of dy
// Memory     y, dy and dx once, up to 16 bytes an access, neighbouring lanes side by
//            side; shared: a number a warp and column; between blocks: one a column
// Numbers    sums in double, dy - c in acc_t with c to twice its digits, one rounding;
//            for results of 16 bits a thread sums in float
// Limits     columns of at most kCluster * kDeep * kHeld elements; the last outer axis
//            has stride 1 in y, dy and dx, and there is one reduced axis
//
// Parameters Y_T, DY_T, OUT_T   element types of y, dy and dx
//            LOG                1 for log_softmax
//            and those of softmax/columns.cuh
#include "softmax/columns.cuh"

#ifndef Y_T
#error "the parameters above come from the host"
#endif
using y_t = Y_T;
using dy_t = DY_T;
using out_t = OUT_T;
constexpr bool kLog = LOG;

// Products of 16 bits are exact in float, and few of them are added before double.
constexpr bool kCoarse =
    sizeof(y_t) == 2 && sizeof(dy_t) == 2 && sizeof(out_t) == 2 && sizeof(acc_t) == 4;
using part_t = part<kCoarse>::type;

enum { kY, kDy, kOut, kNumArrays };

// The problem, as packed by the host.
struct layout_t {
  long long num_rows, row_length;
  double scale;
  axes_t<OUTER_AXES, kNumArrays> outer;
  axes_t<REDUCED_AXES, kNumArrays> reduced;
};
using tile_t = place_t<layout_t>;

struct shared_t {
  partials_t<part_t> sum;
  double piece[kCluster][kColumns];
};

// The sum of each of this thread's columns, from its own part of them.
__device__ __forceinline__ void sum_columns(shared_t& shared,
                                            part_t (&part)[kVector],
                                            double (&sum)[kVector]) {
  if constexpr (kInWarp) {
    combine_in_warp(part, plus_t());
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] = part[j];
  } else {
    write_partials(shared.sum, part, plus_t());
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
      share(&shared.piece[cluster_rank()][c], sum_of_partials(shared.sum, c));
    }
    cluster_sync();
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sum[j] = 0;
#pragma unroll
      for (int rank = 0; rank < kCluster; ++rank) {
        sum[j] += shared.piece[rank][tile_t::side() * kVector + j];
      }
    }
    // The next tile may be written when all have read this one.
    cluster_sync();
  }
}

__device__ __forceinline__ void softmax_vjp(slots_t<y_t>& held_y,
                                            slots_t<dy_t>& held_dy,
                                            out_t* dx,
                                            const tile_t& tile,
                                            shared_t& shared) {
  const unsigned zero = unsigned(tile.layout.row_length >> 32);
  part_t part[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) part[j] = 0;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const part_t g = to<part_t>(held_dy.get(k, j));
      part[j] += kLog ? g : to<part_t>(held_y.get(k, j)) * g;
    }
  }
  double sum[kVector];
  sum_columns(shared, part, sum);
  held_y.forget(zero);
  held_dy.forget(zero);

  acc_t c_high[kVector], c_low[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    c_high[j] = acc_t(sum[j]);
    c_low[j] = is_finite(c_high[j]) ? acc_t(sum[j] - c_high[j]) : acc_t(0);
  }
  const acc_t scale = acc_t(tile.layout.scale);
  tile.store(dx, kOut, [&](int k, int j) {
    const acc_t p = to<acc_t>(held_y.get(k, j)), g = to<acc_t>(held_dy.get(k, j));
    acc_t value;
    if (kLog) {
      value = p == -infinity<acc_t>() ? acc_t(0) : fma_of(-exp_of(p), c_high[j], g);
    } else {
      value = p * ((g - c_high[j]) - c_low[j]);
    }
    return to<out_t>(scale * value);
  });
}

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(kNumThreads, RESIDENT)
    softmax_vjp_columns(const y_t* y,
                        const dy_t* dy,
                        out_t* dx,
                        const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
  const deal how = takes_vectors(y, layout, kY) && takes_vectors(dy, layout, kDy) &&
                           takes_vectors(dx, layout, kOut)
                       ? deal::kVectors
                       : deal::kSingles;
  if (kCluster > 1) cluster_sync();  // no block is written to before it runs
  const tile_index_t end = num_tiles(layout);
  for (tile_index_t at = first_tile(); at < end; at += tile_step()) {
    const tile_t tile(layout, how, at);
    slots_t<y_t> held_y;
    slots_t<dy_t> held_dy;
    held_y.fill(y_t());
    held_dy.fill(dy_t());
    tile.load(held_y, y, kY);
    tile.load(held_dy, dy, kDy);
    softmax_vjp(held_y, held_dy, dx, tile, shared);
  }
}

// SPDX-License-Identifier: MIT
// softmax_vjp_columns: the gradient of a softmax or log_softmax along columns.
//
// Algorithm  As softmax_vjp, along an axis that is not contiguous:
//            softmax       c = sum_i y_i dy_i,  dx_i = scale y_i (dy_i - c)
//            log_softmax   c = sum_i dy_i,      dx_i = scale (dy_i - exp(y_i) c),
//                          and 0 where y_i is -inf (a masked element)
// Grid       1-D; a block takes kGroupsPerBlock tiles at a time, a cluster takes one
//            (or a team of blocks anywhere on the card: softmax/detail/column_team.cuh)
// Tiles      kColumns columns of one slab; a thread has kInRegisters x kVector elements
// of y
//            and of dy in registers and kInSmem x kVector in shared memory
// Memory     y, dy and dx once, up to 16 bytes per access, lanes contiguous; shared:
//            one number per warp and column; blocks exchange one number per column
// Numbers    sums in double, dy - c in acc_t with c to twice its digits, rounded once;
//            for 16 bits, float sums per thread, c as a float, the fast exponential
// Limits     columns of at most kDeep * (kInRegisters + kInSmem) elements per block;
// the last
//            outer axis has stride 1 in y, dy and dx, and there is one reduced axis
#include "softmax/detail/column_tile.cuh"
#include "softmax/detail/backward_params.cuh"
#if TEAMS
#include "softmax/detail/column_team.cuh"
#endif

// Products of 16-bit numbers are exact in float, and only few are added before double.
constexpr bool kCoarse =
    sizeof(y_t) == 2 && sizeof(dy_t) == 2 && sizeof(out_t) == 2 && sizeof(acc_t) == 4;
using part_t = conditional<kCoarse, float, double>::type;

using tile_t = place_t<layout_t, int>;

struct shared_t {
  partials_t<part_t> sum;
  double total[kColumns];
#if CLUSTER > 1
  // Two sets that alternate: one is written while the other may still be read.
  double piece[2][kCluster][kColumns];
  unsigned long long barrier[2];
#endif
};

#if CLUSTER > 1
struct meetings_t {
  meeting_t even, odd;
  int count = 0;

  __device__ __forceinline__ explicit meetings_t(shared_t& shared)
      : even(&shared.barrier[0], threadIdx.x == 0),
        odd(&shared.barrier[1], threadIdx.x == 0) {}
};

// The sum of a column over all blocks of the cluster.
__device__ __forceinline__ void join_blocks(shared_t& shared, meetings_t& meetings) {
  const int turn = meetings.count++ % 2;
  meeting_t& meeting = turn ? meetings.odd : meetings.even;
  if (threadIdx.x == 0) meeting.expect(int(sizeof(shared.piece[0])));
#pragma unroll 1
  for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) {
      meeting.send(&shared.piece[turn][cluster_rank()][c], rank, shared.total[c]);
    }
  }
  meeting.wait(threadIdx.x < kColumns);
#pragma unroll 1
  for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
    double sum = 0;
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) sum += shared.piece[turn][rank][c];
    shared.total[c] = sum;
  }
}
#elif TEAMS
using meetings_t = team_t;

// The sum of a column over all blocks of the team.
__device__ __forceinline__ void join_blocks(shared_t& shared, meetings_t& meetings) {
#pragma unroll 1
  for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
    meetings.publish(c, {shared.total[c], 0});
  }
  meetings.add([](const auto& own) {
    double sum = 0;
    for (const partial_t& x : own) sum += x.l;
    return partial_t{warp_reduce(sum, plus_t()), 0};
  });
#pragma unroll 1
  for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
    shared.total[c] = meetings.total(c).l;
  }
}
#else
struct meetings_t {
  __device__ __forceinline__ explicit meetings_t(shared_t&) {}
};
__device__ __forceinline__ void join_blocks(shared_t&, meetings_t&) {}
#endif

// The sum of each of this thread's columns, from its own part of them.
__device__ __forceinline__ void sum_columns(shared_t& shared, meetings_t& meetings,
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
      shared.total[c] = sum_of_partials(shared.sum, c);
    }
    join_blocks(shared, meetings);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sum[j] = shared.total[tile_t::side() * kVector + j];
    }
  }
}

__device__ __forceinline__ void softmax_vjp(rows_t<y_t>& on_chip_y,
                                            rows_t<dy_t>& on_chip_dy, out_t* dx,
                                            const tile_t& tile, shared_t& shared,
                                            meetings_t& meetings) {
  part_t part[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) part[j] = 0;
  each_of_two(on_chip_y, on_chip_dy,
              [&](const auto& of_y, const auto& of_dy, int k, int) {
#pragma unroll
                for (int j = 0; j < kVector; ++j) {
                  const part_t g = to<part_t>(of_dy.get(k, j));
                  part[j] += kLog ? g : to<part_t>(of_y.get(k, j)) * g;
                }
              });
  double sum[kVector];
  sum_columns(shared, meetings, part, sum);
  on_chip_y.in_registers.launder();
  on_chip_dy.in_registers.launder();

  // For 16-bit results, float has all the digits that c needs.
  acc_t c_high[kVector], c_low[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    c_high[j] = acc_t(sum[j]);
    c_low[j] = kCoarse || !is_finite(c_high[j]) ? acc_t(0) : acc_t(sum[j] - c_high[j]);
  }
  const acc_t scale = acc_t(tile.layout.scale);
  const auto result = [&](y_t y, dy_t dy, int j) {
    const acc_t p = to<acc_t>(y), g = to<acc_t>(dy);
    acc_t value;
    if (kLog) {
      const acc_t e = kCoarse ? acc_t(exp_fast(float(p))) : exp_of(p);
      value = p == -infinity<acc_t>() ? acc_t(0) : fma_of(-e, c_high[j], g);
    } else {
      const acc_t d = g - c_high[j];
      value = p * (kCoarse ? d : d - c_low[j]);
    }
    return to<out_t>(scale * value);
  };
  tile.store_each(dx, kOut, [&](auto write) {
    each_of_two(
        on_chip_y, on_chip_dy,
        [&](const auto& of_y, const auto& of_dy, int k, int row) {
          write(row, [&](int j) { return result(of_y.get(k, j), of_dy.get(k, j), j); });
        });
  });
}

extern __shared__ uint4 parking[];

#if TEAMS
#define WORDS unsigned long long *words,
// Clears what the blocks of softmax_vjp_columns publish; of the same grid.
extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_vjp_columns_clear(const y_t*, const dy_t*, out_t*,
                              WORDS const __grid_constant__ layout_t layout) {
  team_t{words}.clear(num_tiles(layout));
}
#else
#define WORDS
#endif

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(kNumThreads, RESIDENT)
    softmax_vjp_columns(const y_t* y, const dy_t* dy, out_t* dx,
                        WORDS const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
#if TEAMS
  meetings_t meetings{words};
#else
  meetings_t meetings(shared);
#endif
  announce_block<kCluster>();
  bool has_started = false;
  const thread_map how = takes_vectors(y, layout, kY) &&
                                 takes_vectors(dy, layout, kDy) &&
                                 takes_vectors(dx, layout, kOut)
                             ? thread_map::kVectors
                             : thread_map::kSingles;
  const tile_index_t end = num_tiles(layout);
  for (tile_index_t at = first_tile(); at < end; at += tile_step()) {
    const tile_t tile(layout, how, at);
#if TEAMS
    meetings.tile = at;
#endif
    rows_t<y_t> on_chip_y(parking);
    rows_t<dy_t> on_chip_dy(reinterpret_cast<char*>(parking) + rows_t<y_t>::kBytes);
    tile.load(on_chip_y, y, kY, y_t());
    tile.load(on_chip_dy, dy, kDy, dy_t());
    if (!has_started) await_blocks<kCluster>();
    has_started = true;
    if (kInSmem > 0) wait_for_copies();
    softmax_vjp(on_chip_y, on_chip_dy, dx, tile, shared, meetings);
  }
}

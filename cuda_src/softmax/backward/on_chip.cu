// SPDX-License-Identifier: MIT
// softmax_vjp_tiled: the gradient of a softmax or log_softmax, y and dy read once.
//
// Algorithm  As softmax_vjp, on rows of y and dy held on chip.
// Grid       1-D; a block of kNumThreads takes kRowsPerBlock rows at a time, or
//            kCluster blocks take one
// Tiles      a row; each of its kCluster * kLanes threads holds IN_REGISTERS elements
// of y and
//            of dy in registers and IN_SMEM in shared memory
//            (softmax/detail/row_tile.cuh)
// Memory     y, dy and dx once; 16 bytes per access where rows are contiguous
// Numbers    sums in double, dy - c in acc_t with c to twice its digits, rounded once
// Limits     rows of at most kCluster * kLanes * (IN_REGISTERS + IN_SMEM) elements; any
// strides
#include "softmax/detail/row_tile.cuh"
#include "softmax/detail/backward.cuh"

using row_map_t = thread_map_t<kVector>;

extern __shared__ __align__(128) uint4 parking[];

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(kNumThreads, kMinBlocks)
    softmax_vjp_tiled(const y_t* y, const dy_t* dy, out_t* dx,
                      const __grid_constant__ layout_t layout) {
  // Two sets that alternate: one is written while the other may still be read.
  __shared__ shared_parts_t<double> sums[2];
  combiner_t<double, 2> combine_sum(sums);
  announce_block<kCluster>();
  bool has_started = false;

  on_chip_t<y_t, kVector> on_chip_y(parking);
  on_chip_t<dy_t, kVector> on_chip_dy(reinterpret_cast<char*>(parking) +
                                      kSharedBytes<y_t, kVector>);
  const long long first = (long long)(blockIdx.x / kCluster) * kRowsPerBlock;
  const long long step = (long long)(gridDim.x / kCluster) * kRowsPerBlock;
  for (long long at = first; at < layout.num_rows; at += step) {
    const row_t row(y, dy, dx, layout, at);
    const row_map_t map(row.dx, row.length);
    on_chip_y.load(map, address_in(row, row.y, kY), y_t());
    on_chip_dy.load(map, address_in(row, row.dy, kDy), dy_t());
    if (!has_started) await_blocks<kCluster>();
    has_started = true;
    if (IN_SMEM > 0) wait_for_copies();

    sum_t sum;
    each_pair(map, on_chip_y, on_chip_dy,
              [&](acc_t p, acc_t g) { sum += kLog ? double(g) : product(p, g); });
    const gradient_t gradient(combine_sum(sum.value, 0.0, plus_t()), layout);

    on_chip_y.launder();
    on_chip_dy.launder();
    store_pair<out_t>(map, on_chip_y, on_chip_dy, address_in(row, row.dx, kOut),
                      gradient);
  }
}

// SPDX-License-Identifier: MIT
// softmax_columns: columns are read once, stay on chip, and are written once.
//
// Algorithm  As softmax_tiled, along an axis that is not the contiguous one:
//                m = max_i s_i,  e_i = exp(s_i - m),  l = sum_i e_i,  out_i = e_i / l
//            (log_softmax: out_i = (s_i - m) - log l), s = scale * x. In a cluster each
//            block takes its own m' and l' from its piece of a column; they are merged
//                m = max m',  l = sum l' exp(m' - m),  out_i = e_i exp(m' - m) / l
// Grid       1-D; a block takes kGroupsPerBlock tiles at a time, a cluster takes one
// Tiles      kColumns columns of one slab; a thread has kHeld x kVector elements in
//            registers and kParked x kVector in shared memory
// Memory     x and out once, up to 16 bytes an access, neighbouring lanes side by side;
//            shared: a number a warp and column; between blocks: two numbers a column
// Numbers    exponentials in acc_t of exact differences, sums in double, one rounding;
//            for results of 16 bits plain differences, the fast exponential, float sums
// Limits     columns of at most kCluster * kDeep * (kHeld + kParked) elements; the last
//            outer axis has stride 1 in x and out, and there is one reduced axis
//
// Parameters as in softmax/score.cuh and softmax/columns.cuh
#include "softmax/held_columns.cuh"

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(kNumThreads, RESIDENT)
    softmax_columns(const x_t* x,
                    const bool* where,
                    out_t* out,
                    const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
  exchange_t exchange(shared);
  announce_block<kCluster>();
  bool has_started = false;
  const deal how = deal_of(x, out, layout);
  const tile_index_t end = num_tiles(layout);
  for (tile_index_t at = first_tile(); at < end; at += tile_step()) {
    const tile_t tile(layout, how, at);
    held_t held(parking);
    held.load(x, where, tile);
    if (!has_started) await_blocks<kCluster>();
    has_started = true;
    wait_for_copies();
    softmax(held, out, tile, shared, exchange);
    // No block may write its next numbers to one that still reads these.
    if (kCluster > 1 && at + tile_step() < end) cluster_sync();
  }
}

// SPDX-License-Identifier: MIT
// softmax_team_columns: long columns are read once and stay on many multiprocessors.
//
// Algorithm  softmax_team_columns_clear: nothing is told yet. softmax_team_columns: as
//            softmax_columns; the blocks of a column tell each other m' and l' through
//            memory. Where l' has to be a double they tell m' first, and all subtract
//            m.
// Grid       (blocks of a team, teams), all at once; a team takes a tile at a time
// Tiles      kColumns columns of one slab; a thread has kHeld x kVector elements in
//            registers and kParked x kVector in shared memory
// Memory     x and out once, up to 16 bytes an access, neighbouring lanes side by side;
//            between blocks, a word or two a column and block
// Numbers    as softmax_columns; floats tell l' as a float
// Limits     columns of at most kTeam * kDeep * (kHeld + kParked) elements; as
//            softmax_columns
//
// Parameters as in softmax/score.cuh and softmax/columns.cuh
#include "softmax/held_columns.cuh"

static_assert(kTeam > 1, "blocks share a column");
constexpr int kNumbers = kSharesMax ? 2 : 1;  // that a block tells of a column

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_team_columns_clear(const x_t*,
                               const bool*,
                               out_t*,
                               unsigned long long* words,
                               const __grid_constant__ layout_t layout) {
  board_t::clear(words, (long long)num_tiles(layout) * kNumbers * board_t::kWords);
}

extern "C" __global__ void __launch_bounds__(kNumThreads, RESIDENT)
    softmax_team_columns(const x_t* x,
                         const bool* where,
                         out_t* out,
                         unsigned long long* words,
                         const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
  const deal how = deal_of(x, out, layout);
  const tile_index_t end = num_tiles(layout);
  for (tile_index_t at = first_tile(); at < end; at += tile_step()) {
    const tile_t tile(layout, how, at);
    exchange_t exchange = {{words + (long long)at * kNumbers * board_t::kWords}};
    held_t held(parking);
    held.load(x, where, tile);
    wait_for_copies();
    softmax(held, out, tile, shared, exchange);
    __syncthreads();  // all have read what they heard before the next tile
  }
}

// SPDX-License-Identifier: MIT
// attention_diagonals: what a score function adds to the scores of each diagonal, where
// it is s plus something that depends on i - j and the head.
//
// Algorithm  The function of s = 0 and j = 0: i is the distance then
// Grid       one thread per element
// Memory     global: the table once, (heads, diagonals) of accum_t
// Numbers    as in the score function
#include "attention/score/score.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_diagonals(accum_t* __restrict__ table,  // (heads, diagonals)
                        const __grid_constant__ functions_t<accum_t> functions,
                        const index_t first,  // the least distance
                        const index_t num_diagonals, const index_t num_heads) {
  const index_t place = block_index() * kNumThreads + threadIdx.x;
  if (place >= num_heads * num_diagonals) return;
  const index_t head = divide(place, num_diagonals);
  const auto distance = static_cast<expr::int_t>(first + place - head * num_diagonals);
  table[place] = score_mod<accum_t>(0, 0, static_cast<expr::int_t>(head), distance, 0,
                                    functions.score);
}

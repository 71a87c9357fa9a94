// SPDX-License-Identifier: MIT
// The score and the mask function of a call. The host makes score_mod and mask_mod, and
// gives them as the text of "generated/functions.cuh", which is empty without them.
#pragma once

#include "attention/score/options.cuh"
#include "generated/functions.cuh"

// What a mask function shows of a tile of scores.
enum shown_t { kShowsNone = 0, kShowsAll = 1, kShowsSome = 2 };  // or it is not known

#if SCORE_FUNCTION || MASK_FUNCTION
// Their arguments at run time. Packed by _attention/gpu/functions.py.
template <typename T> struct alignas(8) functions_t {
#if SCORE_FUNCTION
  score_mod_args<T> score;
#endif
#if MASK_FUNCTION
  mask_mod_args<T> mask;
#endif
};
#endif

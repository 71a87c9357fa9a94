// SPDX-License-Identifier: MIT
// The score and mask functions of a call. The host generates score_mod and mask_mod as
// the text of "generated/functions.cuh", which is empty without them.
#pragma once

#include "attention/score/options.cuh"
#include "generated/functions.cuh"

// How much of a tile of scores a mask function shows.
enum shown_t { kShowsNone = 0, kShowsAll = 1, kShowsSome = 2 };  // 2: or unknown

#if SCORE_FUNCTION || MASK_FUNCTION
// Their run-time arguments. Packed by _attention/gpu/functions.py.
template <typename T> struct alignas(8) functions_t {
#if SCORE_FUNCTION
  score_mod_args<T> score;
#endif
#if MASK_FUNCTION
  mask_mod_args<T> mask;
#endif
};
#endif

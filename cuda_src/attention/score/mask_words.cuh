// SPDX-License-Identifier: MIT
// What a mask array or a bound on positions hides, as bits in the order in which
// threads of wgmma hold scores whose rows are keys.
//
// 64 queries and 16 keys are 32 words, one for each lane of a warp: bit n * 4 + r * 2 +
// e of lane 4 g + t is query n * 8 + t * 2 + e and key g + 8 r. Keys and queries that
// do not exist are hidden. Words of 64 queries and all keys follow each other, in
// whole tiles of 128 of both.
#pragma once

#include "attention/score/params.cuh"

constexpr int kQueriesOfWords = 64, kKeysOfWords = 16;

// The words as a parameter of kernels. Steps are in words, those of rows from 64
// queries to the next; 0 for axes that share them.
struct mask_words_t {
  const unsigned* words;  // (batch, heads, 64 queries, 16 keys, lanes)
  operand_t steps;
};

#if MASK_WORDS
#define MASK_WORDS_PARAMETER const __grid_constant__ mask_words_t mask_words,
#define MASK_WORDS_ARGUMENT mask_words
#else
#define MASK_WORDS_PARAMETER
#define MASK_WORDS_ARGUMENT \
  mask_words_t {}
#endif

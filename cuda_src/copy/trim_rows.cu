// SPDX-License-Identifier: MIT
// attention_narrow: copies matrices whose rows end in whole 16-byte vectors without the
// padding columns.
//
// Grid       one thread per 16 bytes of a result; blocks of one matrix after those of
//            another
// Memory     global: all once
// Limits     rows of a result are whole words, and shorter than the padded ones
#include "common/strides.cuh"

#if !defined(WORD_T) || !defined(NUM_THREADS)
#error "WORD_T and NUM_THREADS come from the host"
#endif
using word_t = WORD_T;
constexpr int kMatrices = 3;
constexpr int kWords = 16 / sizeof(word_t);

// TRIM_PARAMS of _attention/gpu/copy_config.py is the same struct on the host; counts
// words.
struct narrow_params_t {
  const word_t* wide[kMatrices];
  word_t* narrow[kMatrices];
  long long num_words[kMatrices];    // per result
  long long columns[kMatrices];      // per row of it
  long long pitch[kMatrices];        // from row to row of the padded matrix
  long long first_block[kMatrices];  // of those that make this result
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    attention_narrow(const __grid_constant__ narrow_params_t params) {
  const long long block = blockIdx.x + static_cast<long long>(gridDim.x) * blockIdx.y;
  const int n = (block >= params.first_block[1]) + (block >= params.first_block[2]);
  const long long first =
      ((block - params.first_block[n]) * NUM_THREADS + threadIdx.x) * kWords;
  const long long left = params.num_words[n] - first;
  if (left <= 0) return;
  const int columns = static_cast<int>(params.columns[n]);
  const int skipped = static_cast<int>(params.pitch[n]) - columns;
  const long long row = divide(first, columns);
  int column = static_cast<int>(first - row * columns);
  const word_t* from = params.wide[n] + first + row * skipped;
  union {
    uint4 vector;
    word_t word[kWords];
  } x;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if (w < left) x.word[w] = *from;
    ++from;
    if (++column == columns) {
      column = 0;
      from += skipped;
    }
  }
  word_t* const to = params.narrow[n] + first;
  if (left >= kWords) {
    *reinterpret_cast<uint4*>(to) = x.vector;
  } else {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (w < left) to[w] = x.word[w];
    }
  }
}

// SPDX-License-Identifier: MIT
// A float32 as the sum of kParts float16 numbers, for tensor cores.
#pragma once

#include "attention/sm80/tile.cuh"

// Two, or only the high one (tf32).
#ifdef PARTS
constexpr int kParts = PARTS;
#else
constexpr int kParts = 1;
#endif
static_assert(kParts == 1 || (kParts == 2 && kSplits));

constexpr int kInfinityBits = 0x7f800000;

__device__ __forceinline__ int size_bits(float x) {
  return __float_as_int(x) & 0x7fffffff;
}

// Splits two floats into kCount words of two float16 each, which add up to them.
template <int kCount>
__device__ __forceinline__ void split(unsigned (&words)[kCount], float x, float y) {
  words[0] = pair16_t::from(x, y);
  if constexpr (kCount == 2) {
    words[1] = pair16_t::from(
        x - ptx::f32_from_f16(static_cast<unsigned short>(words[0])),
        y - ptx::f32_from_f16(static_cast<unsigned short>(words[0] >> 16)));
  }
}

// Numbers of a row per chunk of load_tile().
constexpr int kElemsOfChunk = 4;

// Chunk n of a matrix (num_rows, dim), zeros beyond it.
template <int kDim>
__device__ __forceinline__ float4 load_chunk(const elem_t* x, index_t row_stride,
                                             int num_rows, int dim, int n,
                                             bool aligned) {
  constexpr int kChunks = kDim / kElemsOfChunk;
  const int row = n / kChunks, column = n % kChunks * kElemsOfChunk;
  uint4 word = make_uint4(0, 0, 0, 0);
  if (row < num_rows) {
    const elem_t* const from = x + row * row_stride;
    if (!aligned) {
      word = gather(from, column, dim);
    } else if (column < dim) {
      word = *reinterpret_cast<const uint4*>(from + column);
    }
  }
  return make_float4(__uint_as_float(word.x), __uint_as_float(word.y),
                     __uint_as_float(word.z), __uint_as_float(word.w));
}

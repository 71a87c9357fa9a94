// SPDX-License-Identifier: MIT
// What the kernels of sm_90a share whose blocks own keys and make all three gradients:
// backward.cu and backward_producer.cu.
//
// Tiles  k, v   kBlockN x kHeadDim  shared, 64 rows a warpgroup
//        q, dO  kBlockM x kHeadDim  shared
//        dS     kBlockN x kBlockM   shared, columns are keys
#pragma once

#include "attention/sm90/backward.cuh"
#include "ptx/wgmma_shapes.cuh"

#ifndef BOUNDS
#error "BOUNDS comes from the host"
#endif
constexpr int kBlockN = 128;  // keys of a tile
// Which queries see a key by its position: 0 all, 1 from a first one on, 2 from a first
// one to a last one.
constexpr int kBounds = BOUNDS;
constexpr int kMaxSummed = 128;
constexpr int kMany = 1 << 30;

// A tile: chunks of 64 columns, each [rows][128 bytes], swizzled.
constexpr int kChunks = kHeadDim / 64;
constexpr int kChunkN = kBlockN * 128, kChunkM = kBlockM * 128;
constexpr int kBytesN = kChunks * kChunkN, kBytesM = kChunks * kChunkM;
constexpr int kBytesDs = 2 * kChunkM;  // columns are keys: a chunk a warpgroup
constexpr int kBytesStats = 2 * kBlockM * 4;

constexpr int kScores = kBlockM / 2;  // of S, P, dP and dS, numbers of a thread
constexpr int kSums = kHeadDim / 2;   // of dk and dv
constexpr int kSumsQ = kPart / 128;   // of dq

// A number that the compiler knows, as an argument.
template <int kNumber>
struct number_t {
  static constexpr int value = kNumber;
};

// S = k q^T or dP = v dO^T. A step is 16 columns: 32 bytes of a row of 128.
__device__ __forceinline__ void multiply_scores(float (&s)[kScores],
                                                unsigned long long kv,
                                                unsigned long long qd) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    ptx::wgmma_t<elem_t, kBlockM>::ss(s, kv + (chunk * kChunkN + inside) / 16,
                                      qd + (chunk * kChunkM + inside) / 16, step > 0);
  }
}

// dv += P dO or dk += dS q, steps kBegin to kEnd. A step is 16 rows of dO or q, of 128
// bytes.
template <int kBegin = 0, int kEnd = kBlockM / 16>
__device__ __forceinline__ void multiply_sums(float (&sums)[kSums],
                                              const unsigned (&p)[kBlockM / 16][4],
                                              unsigned long long qd,
                                              bool accumulate) {
#pragma unroll
  for (int step = kBegin; step < kEnd; ++step) {
    ptx::wgmma_t<elem_t, kHeadDim>::rs(sums, p[step], qd + step * (16 * 128 / 16),
                                       step > 0 || accumulate);
  }
}

// This warpgroup's part of dq = dS^T k. A step is 16 keys.
__device__ __forceinline__ void multiply_dq(float (&dq)[kSumsQ],
                                            unsigned long long ds,
                                            unsigned long long k) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    ptx::wgmma_t<elem_t, 64>::ss_mn(dq, ds + (chunk * kChunkM + inside) / 16,
                                    k + step * (16 * 128 / 16), step > 0);
  }
}

// A tile of keys of a kept entry.
struct item_t {
  int tile, kept;
};

// In the order of memory, or by sections of entries: in a section the first tiles of
// all entries come first, or the last ones.
template <bool kBySections, bool kFromLast>
__device__ __forceinline__ item_t item_of(int number, const inputs_t& inputs) {
  const unsigned n = number, num_tiles = inputs.num_tiles;
  if constexpr (kBySections) {
    const unsigned in_section = inputs.section * num_tiles;
    const unsigned first = n / in_section * inputs.section;
    const unsigned rest = n % in_section;
    const unsigned width = min(inputs.num_kept - first, unsigned(inputs.section));
    const int tile = rest / width;
    return {kFromLast ? inputs.num_tiles - 1 - tile : tile, int(first + rest % width)};
  } else {
    return {int(n % num_tiles), int(n / num_tiles)};
  }
}

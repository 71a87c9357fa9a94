// SPDX-License-Identifier: MIT
// Points: what the kernels share of numbers, of the layout of clouds, and of parts.
//
// Scores are in bits: K = 2^exponent(q) factor(q) with q = scale |x - y|^2, and log
// weights are log2. Clouds are stored one array an axis, (batch, kDim, padded), in the
// order of a curve, padded to whole tiles with copies of the last point, which weigh
// nothing. A launch writes a part of each result: for each split of the keys and each
// chunk of columns a reference, and the sums of the weights over 2^reference.
#pragma once

#include "common/types.cuh"
#include "points/ordered.cuh"

constexpr int kDim = DIM;
constexpr int kColumns = COLUMNS;      // of values, in one chunk
constexpr bool kHasWeights = WEIGHTS;  // the sum of the weights stands before them
constexpr int kSums = kColumns + kHasWeights;

constexpr int kGroup = 64;      // rows that share a box and a flag
constexpr int kTileKeys = 256;  // keys that share a box
constexpr int kMaxBoxDim = 8;   // above it boxes have no corners
constexpr int kBoxDim = kDim <= kMaxBoxDim ? kDim : 0;
// low corner, high corner, largest log weight, lowest finite one, squared reach
constexpr int kBoxSize = 2 * kBoxDim + 3;
constexpr int kTop = 2 * kBoxDim, kBottom = kTop + 1, kReach = kTop + 2;

// Bits by which all sums may be below the values before they are made once more.
constexpr float kSmallSum = 16;

struct points_params_t {
  double scale;
  int batch, num_rows, num_keys;
  int padded_rows, padded_keys;
  int num_tiles, tiles_per_split;
  int first_part, num_parts;  // of this launch (to combine: of the series); of all
  int num_columns;            // of values, in all chunks
  int repair;                 // only what the launches before could not promise
  float drop;   // a tile whose best score is so many bits below a row's is skipped
  float slack;  // share of its own size that a log-sum may be made of beside 16 bits
  float limit;  // scale times squared reach up to which rows may be centred together
};

// What is known of all keys of an entry of the batch, and of all of its results. The
// host clears it.
struct points_facts_t {
  unsigned top;      // largest log weight, as ordered()
  unsigned values;   // log2 of the largest |value|, likewise
  unsigned results;  // largest |result|, as the bits of a float
  float cut;         // product of squared reaches below which a pair is smooth; 0: none
  int degree;        // of the series that takes smooth pairs; 0: none
};

// Where a row of a part lies: parts are (chunk, batch, part, row), and of the sums
// (chunk, batch, part, sum, row).
__device__ __forceinline__ long long part_row(const points_params_t& params, int chunk,
                                              int batch, int part, int row) {
  const long long entry = static_cast<long long>(chunk) * params.batch + batch;
  return (entry * params.num_parts + part) * params.padded_rows + row;
}

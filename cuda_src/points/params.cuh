// SPDX-License-Identifier: MIT
// Parameters of points, the layout of clouds, and parts.
//
// Scores are in bits: K = 2^exponent(q) factor(q) with q = scale |x - y|^2, and log
// weights are log2. Clouds are stored as one array per axis, (batch, kDim, padded), in
// curve order, padded to whole tiles with copies of the last point, which have no
// weight. A launch writes a part of each result: for each split of the keys and each
// chunk of columns a reference, and the sums of the weights over 2^reference.
#pragma once

#include "common/types.cuh"
#include "points/ordered.cuh"

constexpr int kDim = DIM;
constexpr int kColumns = COLUMNS;      // of values, per chunk
constexpr bool kHasWeights = WEIGHTS;  // the sum of the weights comes before them
constexpr int kSums = kColumns + kHasWeights;

constexpr int kGroup = 64;      // rows that share a box and a flag
constexpr int kTileKeys = 256;  // keys that share a box
constexpr int kMaxBoxDim = 8;   // with more axes, boxes have no corners
constexpr int kBoxDim = kDim <= kMaxBoxDim ? kDim : 0;
// low corner, high corner, largest log weight, lowest finite one, squared reach
constexpr int kBoxSize = 2 * kBoxDim + 3;
constexpr int kTop = 2 * kBoxDim, kBottom = kTop + 1, kReach = kTop + 2;

// If all sums are this many bits below the values, they are computed again.
constexpr float kSmallSum = 16;

struct points_params_t {
  double scale, scale_low;  // what the first was rounded by
  int batch, num_rows, num_keys;
  int padded_rows, padded_keys;
  int num_tiles, tiles_per_split;
  int first_part, num_parts;  // of this launch (for combine: of the series); of all
  int num_columns;            // of values, over all chunks
  int repair;                 // compute only what earlier launches could not guarantee
  float drop;   // skip tiles whose best score is this many bits below a row's
  float slack;  // relative size of the terms beyond 16 bits of a row
  float limit;  // largest scale times squared reach of rows with a common middle
};

// Facts about all keys of a batch entry and all of its results. The host clears them.
struct points_facts_t {
  unsigned top;      // largest log weight, as ordered()
  unsigned values;   // log2 of the largest |value|, as ordered()
  unsigned results;  // largest |result|, as the bits of a float
  float cut;   // pairs are smooth if the product of squared reaches is below; 0: none
  int degree;  // of the series for smooth pairs; 0: none
};

// Index of a row of a part: parts are (chunk, batch, part, row), their sums (chunk,
// batch, part, sum, row).
__device__ __forceinline__ long long part_row(const points_params_t& params, int chunk,
                                              int batch, int part, int row) {
  const long long entry = static_cast<long long>(chunk) * params.batch + batch;
  return (entry * params.num_parts + part) * params.padded_rows + row;
}

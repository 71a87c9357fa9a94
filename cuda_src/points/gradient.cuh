// SPDX-License-Identifier: MIT
// What gradient.cu leaves of each row: sums over all keys of c (x - y), the moments,
// and with SQUARES the same of the squares of differences: of all axes together (1), or
// of each (2). The grid's third axis counts chunks of axes.
#pragma once

#include "points/params.cuh"

constexpr int kSquares = SQUARES;
constexpr bool kIsWhole = kBoxDim > 0;  // all axes in one chunk
constexpr int kMostAxes = kSquares == 2 ? 32 : 64;
constexpr int kAxes = kIsWhole ? kDim : kDim < kMostAxes ? kDim : kMostAxes;
constexpr int kOfAxes = kSquares == 2 ? 2 * kAxes : kAxes;
constexpr int kMoments = kOfAxes + (kSquares == 1);

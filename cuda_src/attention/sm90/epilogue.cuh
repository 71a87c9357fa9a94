// SPDX-License-Identifier: MIT
// attention_hopper: each warp stores its 16 rows of out through shared memory, a few
// columns at a time. Lanes then write whole cache lines, with all stores in flight.
#pragma once

#include "attention/sm90/tile_scheduler.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"

// Columns staged at a time, if shared memory has room for them.
#ifdef STAGED_COLUMNS
constexpr bool kStagesOut = true;
constexpr int kStagedColumns = STAGED_COLUMNS;
static_assert(kHeadDimV % kStagedColumns == 0 && kPack == 1 && !kSplit);
#else
constexpr bool kStagesOut = false;
constexpr int kStagedColumns = 64;
#endif
// Bytes per staged row: 16 bytes of padding spread 8 rows over all banks.
constexpr int kStagedPitch = kStagedColumns * int(sizeof(elem_t)) + 16;
constexpr int kStagedBytes = 16 * kStagedPitch;  // per warp

// The address of a lane for stmatrix: rows 0 to 7, rows 8 to 15, then the same for the
// next 8 columns.
__device__ __forceinline__ unsigned staged_row(unsigned staged, int lane) {
  return staged + lane % 16 * kStagedPitch + lane / 16 * 16;
}

// Stores the staged rows below `num_rows` and columns below `num_columns`; `out` points
// to the first row.
__device__ __forceinline__ void store_staged(unsigned staged, elem_t* out,
                                             const operand_t& strides, bool aligned,
                                             int num_rows, int num_columns, int lane) {
  if (aligned) {
    constexpr int kVectors = kStagedColumns / 8;  // of 16 bytes, per row
    constexpr int kRows = kWarpSize / kVectors;   // stored by the warp at a time
    const int first = lane / kVectors, column = lane % kVectors * 8;
    staged += first * kStagedPitch + column * 2;
    uint4 x[16 / kRows];
#pragma unroll
    for (int n = 0; n < 16 / kRows; ++n) {
      x[n] = ptx::load_shared_u32x4(staged + n * kRows * kStagedPitch);
    }
    out += first * strides.row + column;
#pragma unroll
    for (int n = 0; n < 16 / kRows; ++n) {
      if (first + n * kRows < num_rows && column < num_columns) {
        ptx::store_global(reinterpret_cast<uint4*>(out + n * (kRows * strides.row)),
                          x[n]);
      }
    }
  } else {
#pragma unroll 1
    for (int n = lane; n < 16 * kStagedColumns; n += kWarpSize) {
      const int row = n / kStagedColumns, column = n % kStagedColumns;
      const unsigned short bits =
          ptx::load_shared_u16(staged + row * kStagedPitch + column * 2);
      if (row < num_rows && column < num_columns) {
        out[row * strides.row + column * strides.col] = elem_t{bits};
      }
    }
  }
}

// Stores 32 columns of a row from `first` on, 8 per lane of a group of four. Word t has
// columns 8 t + lane % 4 * 2 and the next one. Uses 16-byte vectors on aligned rows.
__device__ __forceinline__ void store_words(elem_t* out_row, unsigned (&words)[4],
                                            const operand_t& strides, int first,
                                            bool aligned, bool exists,
                                            index_t num_columns, int lane) {
  if (aligned) {
    transpose(words, lane);  // now a lane has 8 consecutive columns
    const int column = first + lane % 4 * 8;
    if (exists && column < num_columns) {
      *reinterpret_cast<uint4*>(out_row + column) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  } else if (exists) {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const int column = first + t / 2 * 8 + lane % 4 * 2 + t % 2;
      const unsigned short bits = words[t / 2] >> (t % 2 * 16);
      if (column < num_columns) out_row[column * strides.col] = elem_t{bits};
    }
  }
}

// SPDX-License-Identifier: MIT
// softmax_short: short rows of whole vectors that lie back to back.
//
// Algorithm  As softmax_safe, on rows that are held in registers.
// Grid       1-D; a block of kNumThreads takes kSets * kRowsPerBlock rows at a time
// Tiles      a row in kLanes threads, kHeld vectors of 16 bytes each; a thread has a
//            part of kSets rows, whose loads are under way together
// Memory     x and out once; the lanes of a row are neighbours, so that a warp's
//            accesses lie side by side
// Numbers    as softmax_tiled, bit for bit
// Limits     rows of kLanes * HELD elements, none fewer, with the next row behind the
//            last in x and in out, which are of one type; no mask and no scale. Where
//            one of them does not begin at a whole vector, accesses are of single
//            elements
#include "common/vector.cuh"
#include "softmax/group.cuh"
#include "softmax/row_exp.cuh"
#include "softmax/terms.cuh"

#ifndef HELD
#error "HELD, elements of a row that a thread holds, SETS and MIN_BLOCKS: of the host"
#endif
constexpr int kVector = 16 / sizeof(x_t), kHeld = HELD / kVector, kSets = SETS;
constexpr int kLength = kLanes * HELD;
static_assert(HELD % kVector == 0 && kLanes <= kWarpSize, "whole vectors in a warp");
static_assert(kSame<x_t, out_t> && !kHasWhere && !kScaled && OUTER_AXES == 1);

using vector = vector_t<x_t, kVector>;

__device__ __forceinline__ vector load(const x_t* from, bool is_aligned) {
  if (is_aligned) return load_vector<kVector>(from);
  vector v;
#pragma unroll
  for (int k = 0; k < kVector; ++k) v.element[k] = from[k];
  return v;
}
__device__ __forceinline__ void store(x_t* to, const vector& v, bool is_aligned) {
  if (is_aligned) return store_vector(to, v);
#pragma unroll
  for (int k = 0; k < kVector; ++k) to[k] = v.element[k];
}

// The largest score of a row, of which this thread has `part`.
__device__ __forceinline__ acc_t largest_of(const vector (&part)[kHeld]) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(x_t) == 2) {  // two at a time
    vector m = part[0];
#pragma unroll
    for (int v = 1; v < kHeld; ++v) m = larger_of(m, part[v]);
    vector_t<x_t, 4> four = larger_of(vector_t<x_t, 4>{{m.word.x, m.word.y}},
                                      vector_t<x_t, 4>{{m.word.z, m.word.w}});
    const auto two = larger_of(vector_t<x_t, 2>{four.word.x},
                               vector_t<x_t, 2>{four.word.y});
    const auto of_row = warp_reduce<kLanes>(two.word, [](unsigned a, unsigned b) {
      return larger_of(vector_t<x_t, 2>{a}, vector_t<x_t, 2>{b}).word;
    });
    const vector_t<x_t, 2> pair = {of_row};
    return largest_t()(to<acc_t>(pair.element[0]), to<acc_t>(pair.element[1]));
  }
#endif
  acc_t m = -infinity<acc_t>();
#pragma unroll
  for (int v = 0; v < kHeld; ++v) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) m = largest_t()(m, to<acc_t>(part[v].element[k]));
  }
  return warp_reduce<kLanes>(m, largest_t());
}

// The results of a row in place of its scores.
__device__ __forceinline__ void softmax_row(vector (&part)[kHeld],
                                            const layout_t& layout) {
  const acc_t largest = largest_of(part);
  const acc_t m = shift_by(largest);
  const exp_of_row_t exp_of_row(m);
  acc_t value[kHeld][kVector];
  part_t sum = exp_of_row.none();
#pragma unroll
  for (int v = 0; v < kHeld; ++v) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const acc_t x = to<acc_t>(part[v].element[k]);
      const acc_t e = exp_of_row(score_t(x, layout));
      exp_of_row.add(sum, e);
      value[v][k] = kLog ? x : e;
    }
  }
  sum = warp_reduce<kLanes>(exp_of_row.sum_of(sum), plus_t());
  const finish_t finish(m, total(sum, largest));
#pragma unroll
  for (int v = 0; v < kHeld; ++v) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      if constexpr (kLog) {
        value[v][k] = finish(score_t(value[v][k], layout));
      } else {
        value[v][k] *= finish.inverse;
      }
    }
    part[v] = to_vector<out_t, kVector>::of(value[v]);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, MIN_BLOCKS) softmax_short(
    const x_t* x, const bool*, out_t* out, const __grid_constant__ layout_t layout) {
  const bool in_vectors = is_aligned<x_t, kVector>(x) && is_aligned<x_t, kVector>(out);
  const long long step = (long long)gridDim.x * (kSets * kRowsPerBlock);
  long long row = (long long)blockIdx.x * (kSets * kRowsPerBlock) + threadIdx.x / kLanes;
  // Of all rows of the block, so that warps stay together.
  for (; row - threadIdx.x / kLanes < layout.num_rows; row += step) {
    const long long first = row * kLength + lane() * kVector;
    const auto has = [&](int s) { return row + s * kRowsPerBlock < layout.num_rows; };
    vector part[kSets][kHeld];
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        part[s][v].word = {};
        if (has(s)) {
          part[s][v] = load(
              x + first + s * (kRowsPerBlock * kLength) + v * (kLanes * kVector),
              in_vectors);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      softmax_row(part[s], layout);
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        if (has(s)) {
          store(out + first + s * (kRowsPerBlock * kLength) + v * (kLanes * kVector),
                part[s][v], in_vectors);
        }
      }
    }
  }
}

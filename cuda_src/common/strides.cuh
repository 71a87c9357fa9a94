// SPDX-License-Identifier: MIT
// Where the elements of several arrays lie: one shape, and a stride an axis and array.
#pragma once

// Axes that kArrays arrays of one shape share. Strides count elements; they are 0 where
// an array is broadcast and may be negative. The host packs this struct (int64 fields).
template <int kAxes, int kArrays> struct axes_t {
  static_assert(kAxes >= 1 && kArrays >= 1);
  long long size[kAxes];
  long long stride[kArrays][kAxes];
};

// One offset an array, in elements.
template <int kArrays> struct offsets_t {
  long long of[kArrays];
};

// 64-bit division is a long subroutine; most indices are small.
__device__ __forceinline__ long long divide(long long a, long long b) {
  if (((a | b) >> 32) == 0) return unsigned(a) / unsigned(b);
  return a / b;
}

// The offsets of element `index`, which counts in the order of the axes, last fastest.
template <int kAxes, int kArrays>
__device__ __forceinline__ offsets_t<kArrays> locate(const axes_t<kAxes, kArrays>& axes,
                                                     long long index) {
  offsets_t<kArrays> at = {};
#pragma unroll
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    const long long next = axis > 0 ? divide(index, axes.size[axis]) : 0;
    const long long i = index - next * axes.size[axis];
#pragma unroll
    for (int array = 0; array < kArrays; ++array) {
      at.of[array] += i * axes.stride[array][axis];
    }
    index = next;
  }
  return at;
}

// The offset in one array of element `index` of few enough that all sizes are below
// 2^31: that of a row which is held on chip.
template <int kAxes, int kArrays>
__device__ __forceinline__ long long locate_in_row(const axes_t<kAxes, kArrays>& axes,
                                                   int array, int index) {
  long long at = 0;
#pragma unroll
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    const int size = int(axes.size[axis]);
    const int next = axis > 0 ? int(unsigned(index) / unsigned(size)) : 0;
    at += (index - next * size) * axes.stride[array][axis];
    index = next;
  }
  return at;
}

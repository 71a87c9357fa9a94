// SPDX-License-Identifier: MIT
// Offsets of the elements of several arrays: one shape, and a stride per axis and
// array.
#pragma once

// The axes that kArrays arrays of one shape share. Strides count elements; they are 0
// where an array is broadcast and may be negative. The host packs this struct (int64
// fields).
template <int kAxes, int kArrays> struct axes_t {
  static_assert(kAxes >= 1 && kArrays >= 1);
  long long size[kAxes];
  long long stride[kArrays][kAxes];
};

// One offset per array, in elements.
template <int kArrays> struct offsets_t {
  long long of[kArrays];
};

// 64-bit division is a long subroutine, and most indices are small.
__device__ __forceinline__ long long divide(long long a, long long b) {
  if (((a | b) >> 32) == 0) return unsigned(a) / unsigned(b);
  return a / b;
}

// The offsets of element `index`, counted in the order of the axes, last fastest.
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

// The offset of element `index` in one array, if all sizes are below 2^31: for rows
// that are held on chip.
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

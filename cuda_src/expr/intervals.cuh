// SPDX-License-Identifier: MIT
// Evaluates a mask function on a whole tile: its operations on intervals of integers,
// with booleans as 0 and 1. Floats are unknown. Sums far beyond any sequence length may
// wrap around, as they do in the function itself.
#pragma once

#include "expr/functions.cuh"

namespace expr {

struct interval_t {
  long long low, high;
  bool known;
};

__device__ __forceinline__ interval_t point(long long x) { return {x, x, true}; }
__device__ __forceinline__ interval_t unknown() { return {0, 0, false}; }
// The result of a comparison: whether it holds everywhere, and anywhere.
__device__ __forceinline__ interval_t truth(bool surely, bool maybe, bool known) {
  return {known && surely, !known || maybe, true};
}
__device__ __forceinline__ bool is_point(interval_t a) {
  return a.known && a.low == a.high;
}

namespace tile {

__device__ __forceinline__ interval_t op_neg(interval_t a) {
  return {-a.high, -a.low, a.known};
}
__device__ __forceinline__ interval_t op_not(interval_t a) {
  return {1 - a.high, 1 - a.low, a.known};
}
__device__ __forceinline__ interval_t op_int(interval_t a) { return a; }
__device__ __forceinline__ interval_t op_min(interval_t a, interval_t b) {
  return {minimum(a.low, b.low), minimum(a.high, b.high), a.known && b.known};
}
__device__ __forceinline__ interval_t op_max(interval_t a, interval_t b) {
  return {maximum(a.low, b.low), maximum(a.high, b.high), a.known && b.known};
}
__device__ __forceinline__ interval_t op_abs(interval_t a) {
  return {maximum(maximum(a.low, -a.high), 0ll), maximum(-a.low, a.high), a.known};
}
__device__ __forceinline__ interval_t op_sign(interval_t a) {
  return {sign(a.low), sign(a.high), a.known};
}
__device__ __forceinline__ interval_t op_add(interval_t a, interval_t b) {
  return {a.low + b.low, a.high + b.high, a.known && b.known};
}
__device__ __forceinline__ interval_t op_sub(interval_t a, interval_t b) {
  return op_add(a, op_neg(b));
}
__device__ __forceinline__ interval_t corners(long long p, long long q, long long r,
                                              long long s, bool known) {
  return {minimum(minimum(p, q), minimum(r, s)), maximum(maximum(p, q), maximum(r, s)),
          known};
}
__device__ __forceinline__ interval_t op_mul(interval_t a, interval_t b) {
  return corners(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high,
                 a.known && b.known);
}
__device__ __forceinline__ interval_t op_floordiv(interval_t a, interval_t b) {
  return corners(floor_div(a.low, b.low), floor_div(a.low, b.high),
                 floor_div(a.high, b.low), floor_div(a.high, b.high),
                 a.known && b.known && (b.low > 0 || b.high < 0));
}
__device__ __forceinline__ interval_t op_mod(interval_t a, interval_t b) {
  const long long m = b.low;
  const bool known = a.known && is_point(b) && m > 0;
  if (known && floor_div(a.low, m) == floor_div(a.high, m)) {
    return {floor_mod(a.low, m), floor_mod(a.high, m), true};
  }
  return {0, m - 1, known};
}
__device__ __forceinline__ interval_t op_lt(interval_t a, interval_t b) {
  return truth(a.high < b.low, a.low < b.high, a.known && b.known);
}
__device__ __forceinline__ interval_t op_le(interval_t a, interval_t b) {
  return truth(a.high <= b.low, a.low <= b.high, a.known && b.known);
}
__device__ __forceinline__ interval_t op_eq(interval_t a, interval_t b) {
  return truth(a.low == a.high && b.low == b.high && a.low == b.low,
               a.low <= b.high && b.low <= a.high, a.known && b.known);
}
__device__ __forceinline__ interval_t op_ne(interval_t a, interval_t b) {
  return op_not(op_eq(a, b));
}
__device__ __forceinline__ interval_t op_and(interval_t a, interval_t b) {
  return op_min(a, b);
}
__device__ __forceinline__ interval_t op_or(interval_t a, interval_t b) {
  return op_max(a, b);
}
__device__ __forceinline__ interval_t op_xor(interval_t a, interval_t b) {
  return op_ne(a, b);
}
__device__ __forceinline__ interval_t op_where(interval_t test, interval_t a,
                                               interval_t b) {
  if (is_point(test)) return test.low ? a : b;
  return {minimum(a.low, b.low), maximum(a.high, b.high), a.known && b.known};
}

}  // namespace tile
}  // namespace expr

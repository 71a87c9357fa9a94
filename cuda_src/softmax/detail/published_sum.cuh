// SPDX-License-Identifier: MIT
// Sums l exp(m) that blocks of one launch publish to each other, as two numbers each.
#pragma once

#include "softmax/detail/published.cuh"

// A block's part of a row: the sum is l exp(m), for a key m.
struct partial_t {
  double l;
  double m;
};

__device__ __forceinline__ void publish(unsigned long long* at, const partial_t& sum) {
  published_t::publish(at, sum.l);
  published_t::publish(at + 1, sum.m);
}
// Whether it is published; then also what.
__device__ __forceinline__ bool is_published(const unsigned long long* at,
                                             partial_t& sum) {
  const unsigned long long l = ptx::load_relaxed(at), m = ptx::load_relaxed(at + 1);
  sum = {__longlong_as_double(l), __longlong_as_double(m)};
  return l != published_t::kUnpublished && m != published_t::kUnpublished;
}
__device__ __forceinline__ partial_t wait_for(const unsigned long long* at) {
  partial_t sum;
  while (true) {
    if (is_published(at, sum)) return sum;
    __nanosleep(64);
  }
}

// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/pack.cuh: the same functions in C++.
#pragma once

namespace ptx {
namespace detail {

template <typename F> unsigned of_both(unsigned a, unsigned b, F f) {
  return unsigned(f(a >> 16, b >> 16)) << 16 | unsigned(f(a & 0xffff, b & 0xffff));
}

}  // namespace detail

inline unsigned f16x2_from_f32(float low, float high) {
  return unsigned(emu::f16_from(high)) << 16 | emu::f16_from(low);
}
inline unsigned bf16x2_from_f32(float low, float high) {
  return unsigned(emu::bf16_from_f32(high)) << 16 | emu::bf16_from_f32(low);
}
inline unsigned max_f16x2(unsigned a, unsigned b) {
  return detail::of_both(a, b, [](unsigned x, unsigned y) -> unsigned {
    const float u = emu::f32_from_f16(x), v = emu::f32_from_f16(y);
    return u != u || v != v ? 0x7fff : (u > v ? x : y);
  });
}
inline unsigned max_bf16x2(unsigned a, unsigned b) {
  return detail::of_both(a, b, [](unsigned x, unsigned y) -> unsigned {
    const float u = emu::f32_from_bf16(x), v = emu::f32_from_bf16(y);
    return u != u || v != v ? 0x7fff : (u > v ? x : y);
  });
}

}  // namespace ptx

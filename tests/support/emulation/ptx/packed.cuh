// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/packed.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline float ex2_approx_ftz(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0 : y;
}
inline unsigned f16x2_from_f32(float high, float low) {
  return unsigned(emu::f16_from(high)) << 16 | emu::f16_from(low);
}
inline unsigned bf16x2_from_f32(float high, float low) {
  return unsigned(emu::bf16_from_f32(high)) << 16 | emu::bf16_from_f32(low);
}
inline unsigned fma_f16x2(unsigned a, unsigned b, unsigned c) {
  const auto of = [](unsigned x, unsigned y, unsigned z) {
    return unsigned(emu::f16_from(
        fma(double(emu::f32_from_f16(x)), emu::f32_from_f16(y), emu::f32_from_f16(z))));
  };
  return of(a >> 16, b >> 16, c >> 16) << 16 | of(a & 0xffff, b & 0xffff, c & 0xffff);
}
inline unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
  const auto of = [](unsigned x, unsigned y, unsigned z) {
    const double exact = fma(double(emu::f32_from_bf16(x)), emu::f32_from_bf16(y),
                             emu::f32_from_bf16(z));
    // Rounded to odd first, so that two roundings are as one.
    float once = emu::narrowed(exact, kEmuTowardZero);
    if (double(once) != exact && exact == exact) {
      once = emu::bits_of<float>(emu::bits_of<unsigned>(once) | 1u);
    }
    return unsigned(emu::bf16_from_f32(once));
  };
  return of(a >> 16, b >> 16, c >> 16) << 16 | of(a & 0xffff, b & 0xffff, c & 0xffff);
}

}  // namespace ptx

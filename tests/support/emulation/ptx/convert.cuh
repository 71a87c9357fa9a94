// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/convert.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline float f32_from_f16(unsigned short bits) { return emu::f32_from_f16(bits); }
inline unsigned short f16_from_f32(float value) { return emu::f16_from(value); }
inline unsigned short f16_from_f64(double value) { return emu::f16_from(value); }
inline double f64_from_f32(float value) { return value; }
inline unsigned short bf16_from_f32(float value) { return emu::bf16_from_f32(value); }

}  // namespace ptx

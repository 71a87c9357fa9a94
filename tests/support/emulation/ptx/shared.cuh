// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/shared.cuh: the same functions in C++.
#pragma once

namespace ptx {

inline float load_shared_f32(unsigned address) {
  return emu::shared_as<float>(address);
}
inline unsigned short load_shared_u16(unsigned address) {
  return emu::shared_as<unsigned short>(address);
}
inline unsigned load_shared_u8(unsigned address) {
  return emu::shared_as<unsigned char>(address);
}
inline float2 load_shared_f32x2(unsigned address) {
  return emu::shared_as<float2>(address);
}
inline float4 load_shared_f32x4(unsigned address) {
  return emu::shared_as<float4>(address);
}
inline int4 load_shared_s32x4(unsigned address) {
  return emu::shared_as<int4>(address);
}
inline int load_shared_s32(unsigned address) { return emu::shared_as<int>(address); }
inline uint4 load_shared_u32x4(unsigned address) {
  return emu::shared_as<uint4>(address);
}
inline void store_shared_s32(unsigned address, int x) {
  emu::shared_as<int>(address) = x;
}
inline void store_shared_s32x2(unsigned address, int x, int y) {
  emu::shared_as<int2>(address) = {x, y};
}
inline void store_shared_f32x4(unsigned address, float a, float b, float c, float d) {
  emu::shared_as<float4>(address) = {a, b, c, d};
}

namespace detail {

struct stored_lane_t {
  void* row;
  unsigned word[4];
};

template <bool kTransposed>
void store_matrices(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  if (address % 16) emu::fail("stmatrix at %u is not aligned", address);
  stored_lane_t mine{emu::shared_at(address), {a, b, c, d}};
  emu::meet(0xffffffffu, &mine, [](void** of, unsigned) {
    unsigned short rows[32][8];
    for (int n = 0; n < 32; ++n) {
      const auto& lane = *static_cast<stored_lane_t*>(of[n]);
      for (int m = 0; m < 4; ++m) {
        for (int e = 0; e < 2; ++e) {
          const int row = n / 4, column = 2 * (n % 4) + e;
          const auto bits = static_cast<unsigned short>(lane.word[m] >> 16 * e);
          (kTransposed ? rows[8 * m + column][row] : rows[8 * m + row][column]) = bits;
        }
      }
    }
    for (int n = 0; n < 32; ++n) {
      memcpy(static_cast<stored_lane_t*>(of[n])->row, rows[n], 16);
    }
  });
}

}  // namespace detail

inline void stmatrix_x4(unsigned address, unsigned a, unsigned b, unsigned c,
                        unsigned d) {
  detail::store_matrices<false>(address, a, b, c, d);
}
inline void stmatrix_x4_trans(unsigned address, unsigned a, unsigned b, unsigned c,
                              unsigned d) {
  detail::store_matrices<true>(address, a, b, c, d);
}

}  // namespace ptx

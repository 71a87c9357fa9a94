// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/wgmma_shapes.cuh: the same functions in C++.
#pragma once

#include "common/types.cuh"

namespace ptx {
namespace detail {

// A tile in shared memory as its descriptor says, swizzled by 128 bytes.
struct tile_t {
  const unsigned char* block;
  unsigned start, leading, stride;

  explicit tile_t(unsigned long long descriptor)
      : block(emu::self->shared),
        start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) emu::fail("wgmma of a tile without a swizzle of 128");
    if (descriptor >> 49 & 7) emu::fail("wgmma of a tile with a base offset");
  }

  unsigned short at(unsigned offset) const {
    const unsigned address = start + offset;
    unsigned short bits;
    memcpy(&bits, block + (address ^ (address >> 7 & 7) << 4), 2);
    return bits;
  }
  // Slots of the sum side by side; the others in rows of 128 bytes.
  unsigned short by_slots(int row, int slot) const {
    return at(row / 8 * stride + row % 8 * 128 + slot * 2);
  }
  // Columns side by side, 64 of them in a row of 128 bytes.
  unsigned short by_columns(int column, int slot) const {
    return at(column / 64 * leading + slot / 8 * stride + slot % 8 * 128 +
              column % 64 * 2);
  }
};

template <typename T> float value_of(unsigned short bits);
template <> inline float value_of<half_t>(unsigned short bits) {
  return emu::f32_from_f16(bits);
}
template <> inline float value_of<bfloat16_t>(unsigned short bits) {
  return emu::f32_from_bf16(bits);
}

struct wgmma_thread_t {
  float* d;
  const unsigned* a;  // nullptr: in shared memory
  unsigned long long a_tile, b_tile;
  int accumulate;
};

template <typename T, int kColumns, bool kByColumns> void multiply_tiles(void** of) {
  static double a[64][16], b[16][kColumns];
  const auto thread = [&](int t) { return static_cast<wgmma_thread_t*>(of[t]); };
  const wgmma_thread_t& first = *thread(0);
  const tile_t b_tile(first.b_tile);
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < kColumns; ++n) {
      b[k][n] =
          value_of<T>(kByColumns ? b_tile.by_columns(n, k) : b_tile.by_slots(n, k));
    }
  }
  if (first.a == nullptr) {
    const tile_t a_tile(first.a_tile);
    for (int m = 0; m < 64; ++m) {
      for (int k = 0; k < 16; ++k) a[m][k] = value_of<T>(a_tile.by_slots(m, k));
    }
  }
  for (int t = 0; t < 128; ++t) {
    const wgmma_thread_t& x = *thread(t);
    if (x.b_tile != first.b_tile || (x.a == nullptr && x.a_tile != first.a_tile) ||
        x.accumulate != first.accumulate) {
      emu::fail("threads of a warpgroup with different tiles of wgmma");
    }
    if (x.a == nullptr) continue;
    for (int i = 0; i < 8; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2);
      const int slot = 2 * (t % 4) + i % 2 + 8 * (i / 4);
      a[row][slot] =
          value_of<T>(static_cast<unsigned short>(x.a[i / 2] >> 16 * (i % 2)));
    }
  }
  for (int t = 0; t < 128; ++t) {
    float* const d = thread(t)->d;
    for (int i = 0; i < kColumns / 2; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2);
      const int column = 8 * (i / 4) + 2 * (t % 4) + i % 2;
      double sum = first.accumulate ? d[i] : 0;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      d[i] = static_cast<float>(sum);
    }
  }
}

}  // namespace detail

template <typename T, int kColumns> struct wgmma_t {
  using sums_t = float (&)[kColumns / 2];
  using tile = unsigned long long;

  static void ss(sums_t d, tile a, tile b, int accumulate) {
    product<false>(d, nullptr, a, b, accumulate);
  }
  static void rs(sums_t d, const unsigned (&a)[4], tile b, int accumulate) {
    product<true>(d, a, 0, b, accumulate);
  }
  static void ss_mn(sums_t d, tile a, tile b, int accumulate) {
    product<true>(d, nullptr, a, b, accumulate);
  }
  static void rs_k(sums_t d, const unsigned (&a)[4], tile b, int accumulate) {
    product<false>(d, a, 0, b, accumulate);
  }

 private:
  template <bool kByColumns>
  static void product(float* d, const unsigned* a, tile a_tile, tile b_tile,
                      int accumulate) {
    detail::wgmma_thread_t mine{d, a, a_tile, b_tile, accumulate};
    emu::meet_warpgroup(&mine, detail::multiply_tiles<T, kColumns, kByColumns>);
  }
};

}  // namespace ptx

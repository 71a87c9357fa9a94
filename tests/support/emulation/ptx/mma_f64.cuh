// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/mma_f64.cuh: the same functions in C++.
#pragma once

namespace ptx {
namespace detail {

// Slots of a lane: kHalves rows of a, kSlots numbers of each.
template <int kHalves, int kSlots> struct product_f64_t {
  double* c;
  const double *a, *b;
  static void multiply(void** of, unsigned) {
    double a[8 * kHalves][4 * kSlots], b[4 * kSlots][8];
    for (int n = 0; n < 32; ++n) {
      const auto& lane = *static_cast<product_f64_t*>(of[n]);
      const int g = n / 4, t = n % 4;
      for (int i = 0; i < kSlots; ++i) {
        for (int h = 0; h < kHalves; ++h) {
          a[g + 8 * h][t + 4 * i] = lane.a[kHalves * i + h];
        }
        b[t + 4 * i][g] = lane.b[i];
      }
    }
    for (int n = 0; n < 32; ++n) {
      const auto& lane = *static_cast<product_f64_t*>(of[n]);
      for (int i = 0; i < 2 * kHalves; ++i) {
        const int row = n / 4 + 8 * (i / 2), column = 2 * (n % 4) + i % 2;
        double sum = lane.c[i];
        for (int k = 0; k < 4 * kSlots; ++k) sum = fma(a[row][k], b[k][column], sum);
        lane.c[i] = sum;
      }
    }
  }
};

}  // namespace detail

inline void mma_m8n8k4(double& c0, double& c1, double a, double b) {
  using product_t = detail::product_f64_t<1, 1>;
  double c[2] = {c0, c1};
  product_t mine{c, &a, &b};
  emu::meet(0xffffffffu, &mine, product_t::multiply);
  c0 = c[0];
  c1 = c[1];
}
inline void mma_m16n8k16(double (&c)[4], const double (&a)[8], const double (&b)[4]) {
  using product_t = detail::product_f64_t<2, 4>;
  product_t mine{c, a, b};
  emu::meet(0xffffffffu, &mine, product_t::multiply);
}

}  // namespace ptx

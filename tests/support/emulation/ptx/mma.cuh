// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/mma.cuh: the same functions in C++.
#pragma once

// A tensor core aligns the terms of a sum to the largest one, cuts off what lies more
// than two bits below float32's last digit there, and cuts the sum to float32, as an
// H100 does with 16-bit numbers (Khattak and Mikaitis, "Accurate models of NVIDIA
// tensor cores"). Sums of tf32 are exact but for one rounding an instruction.
namespace ptx {
namespace detail {

struct matrix_lane_t {
  const void* row;  // ldmatrix, stmatrix
  unsigned* word;
};

inline unsigned short bits_at(const unsigned* words, int n) {
  return static_cast<unsigned short>(words[n / 2] >> 16 * (n % 2));
}

template <bool kTransposed> void load_matrices(unsigned (&x)[4], unsigned address) {
  if (address % 16) emu::fail("ldmatrix at %u is not aligned", address);
  matrix_lane_t mine{emu::shared_at(address), x};
  emu::meet(0xffffffffu, &mine, [](void** of, unsigned) {
    unsigned short rows[32][8];
    for (int n = 0; n < 32; ++n) {
      memcpy(rows[n], static_cast<matrix_lane_t*>(of[n])->row, 16);
    }
    for (int n = 0; n < 32; ++n) {
      unsigned* const word = static_cast<matrix_lane_t*>(of[n])->word;
      for (int m = 0; m < 4; ++m) {
        const int a = n / 4, b = 2 * (n % 4);
        const unsigned low = kTransposed ? rows[8 * m + b][a] : rows[8 * m + a][b];
        const unsigned high =
            kTransposed ? rows[8 * m + b + 1][a] : rows[8 * m + a][b + 1];
        word[m] = high << 16 | low;
      }
    }
  });
}

struct product_lane_t {
  float* d;
  const unsigned* a;
  unsigned b[2];
  bool adds;
};

struct of_f16 {
  static float value(unsigned short bits) { return emu::f32_from_f16(bits); }
};
struct of_bf16 {
  static float value(unsigned short bits) { return emu::f32_from_bf16(bits); }
};

constexpr int kExtraBits = 2;

inline float cut_sum(float start, const double* row, const double (*columns)[8],
                     int column) {
  double terms[17], sum = start;
  terms[16] = start;
  for (int k = 0; k < 16; ++k) sum += terms[k] = row[k] * columns[k][column];
  double largest = 0;
  for (double term : terms) largest = fmax(largest, fabs(term));
  if (!(fabs(sum) < INFINITY) || largest == 0) return static_cast<float>(sum);
  const int last = ilogb(largest) - 23 - kExtraBits;
  const double unit = ldexp(1, last), per_unit = ldexp(1, -last);
  double units = 0;
  for (double term : terms) units += trunc(term * per_unit);
  sum = units * unit;
  const float found = static_cast<float>(sum);
  return fabs(found) > fabs(sum) ? nextafterf(found, 0) : found;
}

// d (16 x 8) of a (16 x 16) and b (16 x 8), from the lanes' fragments.
template <typename Of> void multiply_16_bits(void** of, unsigned) {
  double a[16][16], b[16][8];
  for (int n = 0; n < 32; ++n) {
    const auto& lane = *static_cast<product_lane_t*>(of[n]);
    const int g = n / 4, t = n % 4;
    for (int i = 0; i < 8; ++i) {  // a0, a1 of row g, a2, a3 of row g + 8, ...
      const int row = g + 8 * (i / 2 % 2), column = 2 * t + i % 2 + 8 * (i / 4);
      a[row][column] = Of::value(bits_at(lane.a, i));
    }
    for (int i = 0; i < 4; ++i) {
      b[2 * t + i % 2 + 8 * (i / 2)][g] = Of::value(bits_at(lane.b, i));
    }
  }
  for (int n = 0; n < 32; ++n) {
    const auto& lane = *static_cast<product_lane_t*>(of[n]);
    for (int i = 0; i < 4; ++i) {
      const int row = n / 4 + 8 * (i / 2), column = 2 * (n % 4) + i % 2;
      lane.d[i] = cut_sum(lane.adds ? lane.d[i] : 0, a[row], b, column);
    }
  }
}

inline void multiply_tf32(void** of, unsigned) {
  double a[16][8], b[8][8];
  const auto value = [](unsigned word) {
    return emu::bits_of<float>(word & 0xffffe000u);  // the rest is not read
  };
  for (int n = 0; n < 32; ++n) {
    const auto& lane = *static_cast<product_lane_t*>(of[n]);
    const int g = n / 4, t = n % 4;
    for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][t + 4 * (i / 2)] = value(lane.a[i]);
    for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = value(lane.b[i]);
  }
  for (int n = 0; n < 32; ++n) {
    const auto& lane = *static_cast<product_lane_t*>(of[n]);
    for (int i = 0; i < 4; ++i) {
      const int row = n / 4 + 8 * (i / 2), column = 2 * (n % 4) + i % 2;
      double sum = lane.d[i];
      for (int k = 0; k < 8; ++k) sum += a[row][k] * b[k][column];
      lane.d[i] = static_cast<float>(sum);
    }
  }
}

inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                     bool adds, emu::act_t act) {
  product_lane_t mine{d, a, {b0, b1}, adds};
  emu::meet(0xffffffffu, &mine, act);
}

}  // namespace detail

inline void ldmatrix_x4(unsigned (&x)[4], unsigned address) {
  detail::load_matrices<false>(x, address);
}
inline void ldmatrix_x4_trans(unsigned (&x)[4], unsigned address) {
  detail::load_matrices<true>(x, address);
}
inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                             unsigned b1) {
  detail::multiply(d, a, b0, b1, true, detail::multiply_16_bits<detail::of_f16>);
}
inline void mma_m16n8k16_f16_from_zero(float (&d)[4], const unsigned (&a)[4],
                                       unsigned b0, unsigned b1) {
  detail::multiply(d, a, b0, b1, false, detail::multiply_16_bits<detail::of_f16>);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                              unsigned b1) {
  detail::multiply(d, a, b0, b1, true, detail::multiply_16_bits<detail::of_bf16>);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                             unsigned b1) {
  detail::multiply(d, a, b0, b1, true, detail::multiply_tf32);
}
inline unsigned tf32_from_f32(float x) {
  const unsigned word = emu::bits_of<unsigned>(x);
  if ((word & 0x7f800000u) == 0x7f800000u) return word;
  return (word + 0x1000u) & 0xffffe000u;  // ties away from zero
}

}  // namespace ptx

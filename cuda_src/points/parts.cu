// SPDX-License-Identifier: MIT
// points_parts: prepares points of many dimensions for products.cu.
//
// A coordinate relative to `centre`, in units of the scale, becomes two float16 parts
// (22 bits), or with PARTS = 1 one (11 bits). 128 bytes hold the high parts of 32 axes,
// then their low ones, or the high parts of 64. Rows are doubled. Each row gets its
// squared norm, each key log weight - squared norm in two floats, both of the parts.
//
// Grid       (ceil(padded / block), batch)

#include "common/math.cuh"
#include "ptx/convert.cuh"

constexpr int kDim = DIM;
constexpr int kParts = PARTS;
constexpr int kChunkAxes = 64 / kParts;
constexpr int kChunks = (kDim + kChunkAxes - 1) / kChunkAxes;
constexpr bool kIsRow = IS_ROW;

using coord_t = COORD_T;
using weight_t = WEIGHT_T;

extern "C" __global__ void points_parts(
    const coord_t* __restrict__ x,         // (batch, num_points, kDim)
    const weight_t* __restrict__ weights,  // (batch, num_points), natural log, or null
    const double* __restrict__ centre,     // (batch, kDim)
    uint4* __restrict__ parts,             // (batch, padded, kChunks, 8)
    double* __restrict__ norms,            // of rows: (batch, padded)
    float2* __restrict__ terms,            // of keys: (batch, padded)
    long long num_points, long long padded, double root) {
  const long long j = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (j >= padded) return;
  const long long entry = blockIdx.y;
  const bool exists = j < num_points;
  const long long i = entry * num_points + (exists ? j : num_points - 1);
  uint4* to = parts + (entry * padded + j) * kChunks * 8;
  double norm = 0;
#pragma unroll 1
  for (int first = 0; first < kChunks * kChunkAxes; first += 8) {
    unsigned high[4], low[4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int d = first + n;
      float z = 0;
      if (d < kDim) {
        z = float((double(x[i * kDim + d]) - centre[entry * kDim + d]) * root);
      }
      const unsigned short h = ptx::f16_from_f32(z);
      const unsigned short l =
          kParts == 1 ? 0 : ptx::f16_from_f32(z - ptx::f32_from_f16(h));
      const double held = double(ptx::f32_from_f16(h)) + double(ptx::f32_from_f16(l));
      norm = fma(held, held, norm);
      // Doubling is exact except for subnormal parts, which it improves.
      const unsigned short h2 =
          kIsRow ? ptx::f16_from_f32(2 * ptx::f32_from_f16(h)) : h;
      const unsigned short l2 =
          kIsRow ? ptx::f16_from_f32(2 * ptx::f32_from_f16(l)) : l;
      high[n / 2] = n % 2 ? high[n / 2] | unsigned(h2) << 16 : h2;
      low[n / 2] = n % 2 ? low[n / 2] | unsigned(l2) << 16 : l2;
    }
    uint4* chunk = to + first / kChunkAxes * 8 + first % kChunkAxes / 8;
    chunk[0] = make_uint4(high[0], high[1], high[2], high[3]);
    if (kParts == 2) chunk[4] = make_uint4(low[0], low[1], low[2], low[3]);
  }
  if constexpr (kIsRow) {
    norms[entry * padded + j] = norm;
  } else {
    double term = weights != nullptr ? kLog2e * static_cast<double>(weights[i]) : 0;
    if (!exists) term = -infinity<double>();
    term -= norm;
    const float above = float(term);
    const float below = float(term - double(above));
    terms[entry * padded + j] = make_float2(above, is_finite(above) ? below : 0.f);
  }
}

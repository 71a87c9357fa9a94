// SPDX-License-Identifier: MIT
// PTX mma of float64 (sm_80 or newer): matrix products of a warp on tensor cores.
//
// With g = lane / 4 and t = lane % 4, a lane holds these parts of a product c += a b
// (PTX ISA, "matrix fragments for mma with .f64"):
//   a[2 i + h]   row g + 8 h, slot t + 4 i of the sum
//   b[i]         slot t + 4 i, column g
//   c[2 h + e]   row g + 8 h, column 2 t + e
#pragma once

namespace ptx {

// 8 rows, 8 columns, 4 slots; h and i are 0.
__device__ __forceinline__ void mma_m8n8k4(double& c0, double& c1, double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(c0), "+d"(c1)
      : "d"(a), "d"(b));
}

// 16 rows, 8 columns, 16 slots (sm_90 or newer).
__device__ __forceinline__ void mma_m16n8k16(double (&c)[4], const double (&a)[8],
                                             const double (&b)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]),
        "d"(a[7]), "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

}  // namespace ptx

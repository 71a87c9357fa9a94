// SPDX-License-Identifier: MIT
// PTX mma.sync and ldmatrix (sm_80 or newer): products of matrices of 16-bit numbers,
// or of tf32, by one warp.
//
// None has a memory clobber: a barrier of the block separates the last write to a tile
// from the first ldmatrix.
#pragma once

namespace ptx {

// Four 8 x 8 matrices of 16-bit numbers: lane n gives the address of row n % 8 of
// matrix n / 8 and receives numbers 2 (n % 4) and the next of row n / 4 of each.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&x)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

// The same for the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&x)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

// d += a b with a 16 x 16, b 16 x 8 and d 16 x 8. Lane n holds columns 2 (n % 4) and
// the next of rows n / 4 and n / 4 + 8 of d (PTX ISA, "matrix fragments for
// mma.m16n8k16").
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4],
                                                 unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d = a b
__device__ __forceinline__ void mma_m16n8k16_f16_from_zero(float (&d)[4],
                                                           const unsigned (&a)[4],
                                                           unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4],
                                                  unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b of tf32, with a 16 x 8, b 8 x 8 and d 16 x 8. Lane n holds columns n % 4 and
// n % 4 + 4 of rows n / 4 and n / 4 + 8 of a, the same rows of column n / 4 of b, and
// of d the same as above (PTX ISA, "matrix fragments for mma.m16n8k8").
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4],
                                                 unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x rounded to tf32: the 11 most significant bits.
__device__ __forceinline__ unsigned tf32_from_f32(float x) {
  unsigned word;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
  return word;
}

}  // namespace ptx

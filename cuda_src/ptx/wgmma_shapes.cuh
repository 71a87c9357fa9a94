// SPDX-License-Identifier: MIT
// PTX wgmma.mma_async (sm_90a): 64 rows, 16-bit inputs, float32 sums.
//
// wgmma_t<type, columns>::ss takes A and B from shared memory (both K-major), ::rs
// takes A from registers and B from shared memory (MN-major, the layout of V), ::ss_mn
// both from shared memory (A K-major, B MN-major), ::rs_k A from registers and B from
// shared memory (K-major). With accumulate = 0 the old d is ignored. Before:
// wgmma_fence(). After: wgmma_commit_group() and wgmma_wait_group(), before which d and
// a must not be touched.
#pragma once

#include "common/types.cuh"

namespace ptx {

template <typename T, int kColumns> struct wgmma_t;

// clang-format off

// Accumulators as asm operands: a constraint each, and the operand numbers.
#define D8(i)                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]),        \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D16 D8(0), D8(8)
#define D24 D16, D8(16)
#define D32 D24, D8(24)
#define D40 D32, D8(32)
#define D48 D40, D8(40)
#define D56 D48, D8(48)
#define D64 D56, D8(56)
#define D96 D64, D8(64), D8(72), D8(80), D8(88)
#define D128 D96, D8(96), D8(104), D8(112), D8(120)

#define N16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define N24 N16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define N32 N24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define N40 N32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define N48 N40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define N56 N48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define N64 N56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define N96 N64 ", %64, %65, %66, %67, %68, %69, %70, %71" \
                ", %72, %73, %74, %75, %76, %77, %78, %79" \
                ", %80, %81, %82, %83, %84, %85, %86, %87" \
                ", %88, %89, %90, %91, %92, %93, %94, %95"
#define N128 N96 ", %96, %97, %98, %99, %100, %101, %102, %103" \
                 ", %104, %105, %106, %107, %108, %109, %110, %111" \
                 ", %112, %113, %114, %115, %116, %117, %118, %119" \
                 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA(columns, elem, count, accumulate, operands)                            \
  "{.reg .pred p; setp.ne.b32 p, %" #accumulate ", 0;"                               \
  "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #elem "." #elem            \
  " {" N##count "}, " operands "}"

// A from shared memory, or in registers. `majors`: which operands in shared memory are
// MN-major; the numbers are those of the operands after the accumulators.
#define WGMMA_SS(name, majors, columns, elem, count, i0, i1, i2)                     \
  static __device__ __forceinline__ void name(float (&d)[count],                     \
      unsigned long long a, unsigned long long b, int accumulate) {                  \
    asm volatile(                                                                    \
        WGMMA(columns, elem, count, i2, "%" #i0 ", %" #i1 ", p, 1, 1, " majors ";")  \
        : D##count : "l"(a), "l"(b), "r"(accumulate));                               \
  }
#define WGMMA_RS(name, majors, columns, elem, count, i0, i1, i2, i3, i4, i5)         \
  static __device__ __forceinline__ void name(float (&d)[count],                     \
      const unsigned (&a)[4], unsigned long long b, int accumulate) {                \
    asm volatile(                                                                    \
        WGMMA(columns, elem, count, i5, "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3       \
              "}, %" #i4 ", p, 1, 1, " majors ";")                                   \
        : D##count                                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));      \
  }

#define WGMMA_TYPE(type, elem, columns, count, i0, i1, i2, ...)                      \
  template <>                                                                        \
  struct wgmma_t<type, columns> {                                                    \
    WGMMA_SS(ss, "0, 0", columns, elem, count, i0, i1, i2)                           \
    WGMMA_RS(rs, "1", columns, elem, count, i0, i1, i2, __VA_ARGS__)                 \
    WGMMA_SS(ss_mn, "0, 1", columns, elem, count, i0, i1, i2)                        \
    WGMMA_RS(rs_k, "0", columns, elem, count, i0, i1, i2, __VA_ARGS__)               \
  };
#define WGMMA_SHAPE(...)                  \
  WGMMA_TYPE(half_t, f16, __VA_ARGS__)    \
  WGMMA_TYPE(bfloat16_t, bf16, __VA_ARGS__)

// Columns, accumulators per thread, and numbers of the operands after them. Any
// multiple of 8 columns up to 256 exists; these are the ones in use.
WGMMA_SHAPE(32, 16, 16, 17, 18, 19, 20, 21)
WGMMA_SHAPE(48, 24, 24, 25, 26, 27, 28, 29)
WGMMA_SHAPE(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_SHAPE(80, 40, 40, 41, 42, 43, 44, 45)
WGMMA_SHAPE(96, 48, 48, 49, 50, 51, 52, 53)
WGMMA_SHAPE(112, 56, 56, 57, 58, 59, 60, 61)
WGMMA_SHAPE(128, 64, 64, 65, 66, 67, 68, 69)
WGMMA_SHAPE(192, 96, 96, 97, 98, 99, 100, 101)
WGMMA_SHAPE(256, 128, 128, 129, 130, 131, 132, 133)
// clang-format on

}  // namespace ptx

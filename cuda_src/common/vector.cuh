// SPDX-License-Identifier: MIT
// Several neighbouring elements in one access of up to 16 bytes.
#pragma once

#include "common/types.cuh"
#include "ptx/global.cuh"
#include "ptx/pack.cuh"

namespace detail {

template <int kBytes> struct word;
template <> struct word<1> {
  using type = unsigned char;
};
template <> struct word<2> {
  using type = unsigned short;
};
template <> struct word<4> {
  using type = unsigned int;
};
template <> struct word<8> {
  using type = uint2;
};
template <> struct word<16> {
  using type = uint4;
};

}  // namespace detail

// kCount adjacent elements of T, aligned to their total size.
template <typename T, int kCount> union vector_t {
  using word_t = typename detail::word<sizeof(T) * kCount>::type;
  word_t word;
  T element[kCount];
};

template <typename T, int kCount>
__device__ __forceinline__ bool is_aligned(const T* p) {
  return reinterpret_cast<unsigned long long>(p) % (sizeof(T) * kCount) == 0;
}

template <int kCount, typename T>
__device__ __forceinline__ vector_t<T, kCount> load_vector(const T* p) {
  vector_t<T, kCount> v;
  v.word = *reinterpret_cast<const typename vector_t<T, kCount>::word_t*>(p);
  return v;
}

template <int kCount, typename T>
__device__ __forceinline__ void store_vector(T* p, vector_t<T, kCount> v) {
  using word_t = typename vector_t<T, kCount>::word_t;
  if constexpr (sizeof(word_t) >= 8) {
    ptx::store_global(reinterpret_cast<word_t*>(p), v.word);
  } else {
    *reinterpret_cast<word_t*>(p) = v.word;
  }
}

// Element i of a vector as another type.
template <typename To, typename T, int kCount>
__device__ __forceinline__ To element_as(const vector_t<T, kCount>& v, int i) {
  return to<To>(v.element[i]);
}
// Rounds kCount numbers to T, once each.
template <typename T, int kCount> struct to_vector {
  template <typename From>
  static __device__ __forceinline__ vector_t<T, kCount> of(
      const From (&values)[kCount]) {
    vector_t<T, kCount> v;
#pragma unroll
    for (int i = 0; i < kCount; ++i) v.element[i] = to<T>(values[i]);
    return v;
  }
};

#if __CUDA_ARCH__ >= 800
// Converts floats to 16 bits in pairs; doubles, like all others, one by one.
template <> struct to_vector<half_t, 8> {
  template <typename From>
  static __device__ __forceinline__ vector_t<half_t, 8> of(const From (&values)[8]) {
    vector_t<half_t, 8> v;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      if constexpr (sizeof(From) == sizeof(float)) {
        reinterpret_cast<unsigned*>(&v)[i / 2] =
            ptx::f16x2_from_f32(values[i], values[i + 1]);
      } else {
        v.element[i] = to<half_t>(values[i]);
        v.element[i + 1] = to<half_t>(values[i + 1]);
      }
    }
    return v;
  }
};
template <> struct to_vector<bfloat16_t, 8> {
  template <typename From>
  static __device__ __forceinline__ vector_t<bfloat16_t, 8> of(
      const From (&values)[8]) {
    vector_t<bfloat16_t, 8> v;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      if constexpr (sizeof(From) == sizeof(float)) {
        reinterpret_cast<unsigned*>(&v)[i / 2] =
            ptx::bf16x2_from_f32(values[i], values[i + 1]);
      } else {
        v.element[i] = to<bfloat16_t>(values[i]);
        v.element[i + 1] = to<bfloat16_t>(values[i + 1]);
      }
    }
    return v;
  }
};

// The larger elements of two vectors; NaN if either is NaN.
template <int kCount>
__device__ __forceinline__ vector_t<half_t, kCount> larger_of(
    vector_t<half_t, kCount> a, const vector_t<half_t, kCount>& b) {
  unsigned* const words = reinterpret_cast<unsigned*>(&a);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    words[i] = ptx::max_f16x2(words[i], reinterpret_cast<const unsigned*>(&b)[i]);
  }
  return a;
}
template <int kCount>
__device__ __forceinline__ vector_t<bfloat16_t, kCount> larger_of(
    vector_t<bfloat16_t, kCount> a, const vector_t<bfloat16_t, kCount>& b) {
  unsigned* const words = reinterpret_cast<unsigned*>(&a);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    words[i] = ptx::max_bf16x2(words[i], reinterpret_cast<const unsigned*>(&b)[i]);
  }
  return a;
}
#endif

// SPDX-License-Identifier: MIT
// Several neighbouring elements in one access of up to 16 bytes.
#pragma once

namespace detail {

template <int kBytes>
struct word;
template <>
struct word<1> {
  using type = unsigned char;
};
template <>
struct word<2> {
  using type = unsigned short;
};
template <>
struct word<4> {
  using type = unsigned int;
};
template <>
struct word<8> {
  using type = uint2;
};
template <>
struct word<16> {
  using type = uint4;
};

}  // namespace detail

// kCount elements of T that lie side by side, aligned to their common size.
template <typename T, int kCount>
union vector_t {
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
  *reinterpret_cast<typename vector_t<T, kCount>::word_t*>(p) = v.word;
}

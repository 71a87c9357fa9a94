// SPDX-License-Identifier: MIT
// CUDA's part of CUDA C++, for a host compiler: what a kernel's text needs beside C++.
//
// A CUDA thread is a fiber. Whatever threads do together (barriers, shuffles, votes,
// matrix products) is a point where a fiber waits until the others have come;
// runtime.cpp has the fibers. Between two such points a thread runs alone, so that what
// threads do without waiting for each other happens in one of the orders that a GPU may
// take.
#pragma once

// A type of the system that kernels have one of their own by the name of.
#define key_t system_key_t
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>
#undef key_t

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define CUDART_INF_F __builtin_inff()

// --- vectors
// ----------------------------------------------------------------------------

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// --- the machine
// ------------------------------------------------------------------------

namespace emu {

struct dim_t {
  unsigned x, y, z;
};

struct block_t;

// What the text of a kernel may know of the thread that runs.
struct thread_t {
  dim_t thread, block;
  unsigned number;        // in its block
  unsigned char* shared;  // shared memory of its block
  block_t* of;
};

extern thread_t* self;
extern dim_t grid_dim, block_dim;

// Where shared memory of the blocks of a cluster begins; an address of 32 bits counts
// from here. That of block `rank` begins at rank * kWindow.
extern unsigned char* cluster_memory;
constexpr unsigned kWindow = 1u << 18;
extern unsigned dynamic_start;  // of dynamic shared memory, in that of a block

// Ends the launch with an error that names kernel, block and thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Lets other threads run: one that waits for what others write calls it in its loop.
void spin();
// Tells that something has happened which a thread that spins may wait for.
void progress();

// Waits until all lanes of `mask` have called with the same `act`; the last one calls
// it with the arguments of each.
using act_t = void (*)(void** arguments, unsigned mask);
void meet(unsigned mask, void* arguments, act_t act);
// The same of 128 threads that lie side by side.
void meet_warpgroup(void* arguments, void (*act)(void** arguments));

// Numbered barriers. `num_threads` of 0 are all that have not ended.
bool barrier(int id, unsigned num_threads, bool value);
void barrier_arrive(int id, unsigned num_threads, unsigned weight);
void cluster_arrive();
void cluster_wait();
unsigned cluster_rank();

// Barriers in shared memory that count arrivals and bytes.
void mbarrier_init(void* barrier, unsigned count);
void mbarrier_end(void* barrier);
void mbarrier_arrive(void* barrier);
void mbarrier_expect(void* barrier, unsigned bytes);
void mbarrier_complete(void* barrier, unsigned bytes);
bool mbarrier_is_over(void* barrier, unsigned parity);

// cp.async: the copy is made at the wait, and its target is poisoned until then.
void copy_async(void* shared, const void* global, unsigned bytes, unsigned copied);
void commit_copies();
void wait_copy_groups(unsigned pending);
void wait_copies();

// Shared memory: static variables get their places one after another.
unsigned reserve_shared(unsigned& reserved, unsigned bytes, unsigned alignment);

inline void* shared_at(unsigned address) { return cluster_memory + address; }
inline unsigned address_of(const void* p) {
  const long long at = static_cast<const unsigned char*>(p) - cluster_memory;
  if (at < 0 || at >= 16ll * kWindow) fail("an address that is not of shared memory");
  return static_cast<unsigned>(at);
}
template <typename T> T& shared_as(unsigned address) {
  if (address % alignof(T)) fail("shared address %u is not aligned", address);
  return *static_cast<T*>(shared_at(address));
}

// `extern __shared__ T name[]` outside of functions.
template <typename T> struct dynamic_shared_t {
  operator T*() const { return reinterpret_cast<T*>(self->shared + dynamic_start); }
};

// A lane's arguments of a shuffle or vote.
template <typename T> struct lane_t {
  T given, got;
  int lane, width;
};

template <typename T, typename Source>
T shuffle(unsigned mask, T value, int lane, int width, Source) {
  lane_t<T> mine{value, value, lane, width};
  meet(mask, &mine, [](void** of, unsigned mask) {
    for (int n = 0; n < 32; ++n) {
      if (!(mask >> n & 1)) continue;
      auto& x = *static_cast<lane_t<T>*>(of[n]);
      const int from = Source::of(n, x.lane, x.width);
      if (from == n) continue;
      if (mask >> from & 1) {
        x.got = static_cast<lane_t<T>*>(of[from])->given;
      } else {
        memset(static_cast<void*>(&x.got), 0xff, sizeof(T));  // undefined
      }
    }
  });
  return mine.got;
}
struct by_index {
  static int of(int n, int lane, int width) {
    return (n & ~(width - 1)) | (lane & (width - 1));
  }
};
struct by_xor {
  static int of(int n, int mask, int width) {
    const int from = n ^ mask;
    return from < (n & ~(width - 1)) + width ? from : n;
  }
};
struct by_up {
  static int of(int n, int delta, int width) {
    return n - delta >= (n & ~(width - 1)) ? n - delta : n;
  }
};
struct by_down {
  static int of(int n, int delta, int width) {
    return n + delta < (n & ~(width - 1)) + width ? n + delta : n;
  }
};

// Every lane gets what `Combine` makes of the numbers of all.
template <typename T, typename Combine> T reduce(unsigned mask, T value, Combine) {
  lane_t<T> mine{value, value, 0, 0};
  meet(mask, &mine, [](void** of, unsigned mask) {
    bool is_first = true;
    T all{};
    for (int n = 0; n < 32; ++n) {
      if (!(mask >> n & 1)) continue;
      const T x = static_cast<lane_t<T>*>(of[n])->given;
      all = is_first ? Combine::from(x, n) : Combine::of(all, Combine::from(x, n));
      is_first = false;
    }
    for (int n = 0; n < 32; ++n) {
      if (mask >> n & 1) static_cast<lane_t<T>*>(of[n])->got = all;
    }
  });
  return mine.got;
}
struct lane_bits {
  static unsigned from(unsigned x, int n) { return unsigned(x != 0) << n; }
  static unsigned of(unsigned a, unsigned b) { return a | b; }
};
template <typename T> struct largest {
  static T from(T x, int) { return x; }
  static T of(T a, T b) { return a > b ? a : b; }
};
template <typename T> struct least {
  static T from(T x, int) { return x; }
  static T of(T a, T b) { return a < b ? a : b; }
};
template <typename T> struct total {
  static T from(T x, int) { return x; }
  static T of(T a, T b) { return a + b; }
};

template <typename To, typename From> To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}

// Roundings other than to nearest.
double rounded(double a, double b, char operation, int mode);
float narrowed(double x, int mode);

// float16 and bfloat16 by their bits, rounded to nearest even.
inline float f32_from_f16(unsigned short bits) {
  return static_cast<float>(bits_of<_Float16>(bits));
}
inline unsigned short f16_from(double x) {
  return x != x ? 0x7fff : bits_of<unsigned short>(static_cast<_Float16>(x));
}
inline float f32_from_bf16(unsigned short bits) {
  return bits_of<float>(static_cast<unsigned>(bits) << 16);
}
inline unsigned short bf16_from_f32(float x) {
  if (x != x) return 0x7fff;
  const unsigned word = bits_of<unsigned>(x);
  return static_cast<unsigned short>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

// The kernel with arguments as the driver gets them, in memory of any alignment.
template <typename T> T argument(const void* given) {
  alignas(T) unsigned char bytes[sizeof(T)];
  memcpy(bytes, given, sizeof(T));
  return *reinterpret_cast<T*>(bytes);
}
template <typename... Args, size_t... n>
void call_with(void (*kernel)(Args...), void** arguments, std::index_sequence<n...>) {
  kernel(argument<std::remove_cv_t<Args>>(arguments[n])...);
}
template <typename... Args> void call(void (*kernel)(Args...), void** arguments) {
  call_with(kernel, arguments, std::index_sequence_for<Args...>());
}

struct launch_t {
  const char* name;
  dim_t grid, block;
  unsigned smem, cluster;
  int all_at_once;     // all blocks start before any ends
  int last_first;      // who became ready last runs first
  unsigned* reserved;  // bytes of static shared memory
};
// nullptr, or what went wrong.
extern "C" const char* emu_run(const launch_t*, void (*kernel)(void**),
                               void** arguments);

}  // namespace emu

#define threadIdx (emu::self->thread)
#define blockIdx (emu::self->block)
#define gridDim (emu::grid_dim)
#define blockDim (emu::block_dim)

// --- together
// ---------------------------------------------------------------------------

inline void __syncthreads() { emu::barrier(0, 0, false); }
inline int __syncthreads_or(int x) { return emu::barrier(0, 0, x != 0); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emu::meet(mask, nullptr, [](void**, unsigned) {});
}
template <typename T> T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
  return emu::shuffle(mask, x, lane, width, emu::by_index());
}
template <typename T> T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32) {
  return emu::shuffle(mask, x, lanes, width, emu::by_xor());
}
template <typename T> T __shfl_up_sync(unsigned mask, T x, unsigned n, int width = 32) {
  return emu::shuffle(mask, x, int(n), width, emu::by_up());
}
template <typename T>
T __shfl_down_sync(unsigned mask, T x, unsigned n, int width = 32) {
  return emu::shuffle(mask, x, int(n), width, emu::by_down());
}
inline unsigned __ballot_sync(unsigned mask, int x) {
  return emu::reduce(mask, unsigned(x != 0), emu::lane_bits());
}
inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(unsigned mask, int x) { return __ballot_sync(mask, x) == mask; }
template <typename T> T __reduce_max_sync(unsigned mask, T x) {
  return emu::reduce(mask, x, emu::largest<T>());
}
template <typename T> T __reduce_min_sync(unsigned mask, T x) {
  return emu::reduce(mask, x, emu::least<T>());
}
template <typename T> T __reduce_add_sync(unsigned mask, T x) {
  return emu::reduce(mask, x, emu::total<T>());
}
inline unsigned __activemask() { return 0xffffffffu; }

template <typename T, typename U> T atomicAdd(T* p, U x) {
  const T old = *p;
  *p = old + T(x);
  emu::progress();
  return old;
}
template <typename T, typename U> T atomicMax(T* p, U x) {
  const T old = *p;
  if (T(x) > old) *p = T(x);
  emu::progress();
  return old;
}
template <typename T, typename U> T atomicMin(T* p, U x) {
  const T old = *p;
  if (T(x) < old) *p = T(x);
  emu::progress();
  return old;
}
template <typename T, typename U> T atomicOr(T* p, U x) {
  const T old = *p;
  *p = old | T(x);
  emu::progress();
  return old;
}
template <typename T, typename U> T atomicAnd(T* p, U x) {
  const T old = *p;
  *p = old & T(x);
  emu::progress();
  return old;
}
template <typename T, typename U> T atomicExch(T* p, U x) {
  const T old = *p;
  *p = T(x);
  emu::progress();
  return old;
}
template <typename T, typename U, typename V> T atomicCAS(T* p, U expected, V x) {
  const T old = *p;
  if (old == T(expected)) *p = T(x);
  emu::progress();
  return old;
}
inline void __threadfence() { emu::progress(); }
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emu::spin(); }
[[noreturn]] inline void __trap() { emu::fail("__trap()"); }

inline size_t __cvta_generic_to_shared(const void* p) { return emu::address_of(p); }
inline void* __cvta_shared_to_generic(size_t address) {
  return emu::shared_at(static_cast<unsigned>(address));
}
template <typename T> T __ldg(const T* p) { return *p; }
template <typename T> T __ldcg(const T* p) { return *p; }
template <typename T> T __ldcs(const T* p) { return *p; }

// --- numbers
// ----------------------------------------------------------------------------

template <typename A, typename B> inline std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
  return T(b) < T(a) ? T(b) : T(a);
}
template <typename A, typename B> inline std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
  return T(a) < T(b) ? T(b) : T(a);
}
using std::abs;
using std::isfinite;
using std::isinf;
using std::isnan;

inline int __float_as_int(float x) { return emu::bits_of<int>(x); }
inline unsigned __float_as_uint(float x) { return emu::bits_of<unsigned>(x); }
inline float __int_as_float(int x) { return emu::bits_of<float>(x); }
inline float __uint_as_float(unsigned x) { return emu::bits_of<float>(x); }
inline long long __double_as_longlong(double x) { return emu::bits_of<long long>(x); }
inline double __longlong_as_double(long long x) { return emu::bits_of<double>(x); }
inline int __double2hiint(double x) { return int(emu::bits_of<uint64_t>(x) >> 32); }
inline int __double2loint(double x) { return int(emu::bits_of<uint64_t>(x)); }
inline double __hiloint2double(int high, int low) {
  return emu::bits_of<double>(uint64_t(unsigned(high)) << 32 | unsigned(low));
}
inline unsigned __double2uint_rz(double x) {
  return x >= 4294967295.0 ? 4294967295u : (x > 0 ? unsigned(x) : 0u);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned picks) {
  const uint64_t both = uint64_t(y) << 32 | x;
  unsigned word = 0;
  for (int n = 0; n < 4; ++n) {
    word |= unsigned(both >> 8 * (picks >> 4 * n & 7) & 0xff) << 8 * n;
  }
  return word;
}

// Sums and products that no compiler may merge.
__attribute__((noinline)) inline float __fmul_rn(float a, float b) { return a * b; }
__attribute__((noinline)) inline float __fadd_rn(float a, float b) { return a + b; }
__attribute__((noinline)) inline double __dmul_rn(double a, double b) { return a * b; }
__attribute__((noinline)) inline double __dadd_rn(double a, double b) { return a + b; }
enum { kEmuDown, kEmuUp, kEmuTowardZero };
inline float __fsub_ru(float a, float b) {
  return float(emu::rounded(a, b, 'f', kEmuUp));
}
inline float __fsub_rd(float a, float b) {
  return float(emu::rounded(a, b, 'f', kEmuDown));
}
inline float __double2float_ru(double x) { return emu::narrowed(x, kEmuUp); }
inline float __double2float_rd(double x) { return emu::narrowed(x, kEmuDown); }
inline float __double2float_rz(double x) { return emu::narrowed(x, kEmuTowardZero); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float __frcp_rn(float x) { return 1 / x; }

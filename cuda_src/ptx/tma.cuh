// SPDX-License-Identifier: MIT
// PTX cp.async.bulk.tensor (sm_90): TMA loads boxes of an array.
#pragma once

namespace ptx {

// An opaque CUtensorMap, made by _cuda/tensor_map.py.
struct alignas(64) tensor_map_t {
  unsigned long long words[16];
};

// Loads the box at (c0, .., c4), innermost first, to shared memory at `target`;
// `barrier` counts its bytes. Elements outside the array are zero and count as well.
__device__ __forceinline__ void cp_async_bulk_tensor_5d(unsigned target,
                                                        const tensor_map_t& map,
                                                        unsigned barrier, int c0,
                                                        int c1, int c2, int c3,
                                                        int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Prefetches the box into the L2 cache.
__device__ __forceinline__ void prefetch_bulk_tensor_5d(const tensor_map_t& map, int c0,
                                                        int c1, int c2, int c3,
                                                        int c4) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::
          "l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// A cache policy: L2 evicts what is read this way first.
__device__ __forceinline__ unsigned long long createpolicy_evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Loads a box with an L2 cache policy.
__device__ __forceinline__ void cp_async_bulk_tensor_5d(unsigned target,
                                                        const tensor_map_t& map,
                                                        unsigned barrier, int c0,
                                                        int c1, int c2, int c3, int c4,
                                                        unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

// Prefetches a tensor map before it is used.
__device__ __forceinline__ void prefetch_tensormap(const tensor_map_t& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Makes this thread's writes to shared memory visible to TMA and to tensor core
// products that start later.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ptx

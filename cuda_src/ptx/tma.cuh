// SPDX-License-Identifier: MIT
// PTX cp.async.bulk.tensor (sm_90): TMA reads boxes of an array.
#pragma once

namespace ptx {

// A CUtensorMap, opaque; made by _cuda/tensor_map.py.
struct alignas(64) tensor_map_t {
  unsigned long long words[16];
};

// Brings the box at (c0, .., c4), innermost first, to shared memory at `target` and
// counts its bytes on `barrier`. What lies outside the array is zero and counts too.
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

// Asks for the box to be in the L2 cache when it will be needed.
__device__ __forceinline__ void prefetch_bulk_tensor_5d(const tensor_map_t& map, int c0,
                                                        int c1, int c2, int c3,
                                                        int c4) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::
          "l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// How the L2 cache treats what is read: the first to leave it.
__device__ __forceinline__ unsigned long long createpolicy_evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A box, which the L2 cache treats by `policy`.
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

// Brings a tensor map near, before it is used.
__device__ __forceinline__ void prefetch_tensormap(const tensor_map_t& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A box to the same place in each block of the cluster that has its bit in
// `blocks`; the barrier of each counts the bytes that arrive there.
__device__ __forceinline__ void cp_async_bulk_tensor_5d_multicast(
    unsigned target, const tensor_map_t& map, unsigned barrier, unsigned short blocks,
    int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(blocks)
      : "memory");
}

// What this thread has written to shared memory is seen by TMA and by
// tensor cores that start later.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ptx

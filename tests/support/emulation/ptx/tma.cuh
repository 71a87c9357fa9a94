// SPDX-License-Identifier: MIT
// Stands in for cuda_src/ptx/tma.cuh: the same functions in C++.
#pragma once

// A box is there when it is asked for.
namespace ptx {

// As _encode() of emulation/__init__.py makes it.
struct alignas(64) tensor_map_t {
  unsigned long long words[16];
};

namespace detail {

inline void bring_box(unsigned target, const tensor_map_t& map, unsigned barrier,
                      const int (&at)[5]) {
  constexpr unsigned kBytesOf[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  constexpr unsigned kSwizzle128 = 3, kSwizzle64 = 2;
  const auto* const source = reinterpret_cast<const unsigned char*>(map.words[0]);
  const auto* const sizes = map.words + 1;
  const auto* const strides = map.words + 6;
  unsigned box[5];
  memcpy(box, map.words + 10, sizeof(box));
  const unsigned bytes = kBytesOf[map.words[14]], swizzle = map.words[13];
  if (target % 128) emu::fail("TMA to %u, no multiple of 128", target);
  if (box[0] * bytes % 16) emu::fail("TMA of rows that are no multiple of 16 bytes");
  unsigned place = target;
  for (unsigned d = 0; d < box[4]; ++d) {
    for (unsigned c = 0; c < box[3]; ++c) {
      for (unsigned b = 0; b < box[2]; ++b) {
        for (unsigned r = 0; r < box[1]; ++r) {
          const long long rest[4] = {at[1] + (long long)r, at[2] + (long long)b,
                                     at[3] + (long long)c, at[4] + (long long)d};
          const unsigned char* row = source;
          bool is_inside = true;
          for (int n = 0; n < 4; ++n) {
            is_inside &= rest[n] >= 0 && rest[n] < (long long)sizes[n + 1];
            row += rest[n] * (long long)strides[n];
          }
          for (unsigned x = 0; x < box[0]; ++x, place += bytes) {
            const long long column = at[0] + (long long)x;
            unsigned where = place;
            if (swizzle == kSwizzle128) where ^= (place >> 7 & 7) << 4;
            if (swizzle == kSwizzle64) where ^= (place >> 7 & 3) << 4;
            void* const to = emu::shared_at(where);
            if (is_inside && column >= 0 && column < (long long)sizes[0]) {
              memcpy(to, row + column * bytes, bytes);
            } else {
              memset(to, 0, bytes);
            }
          }
        }
      }
    }
  }
  emu::mbarrier_complete(emu::shared_at(barrier), place - target);
}

}  // namespace detail

inline void cp_async_bulk_tensor_5d(unsigned target, const tensor_map_t& map,
                                    unsigned barrier, int c0, int c1, int c2, int c3,
                                    int c4) {
  detail::bring_box(target, map, barrier, {c0, c1, c2, c3, c4});
}
inline void cp_async_bulk_tensor_5d(unsigned target, const tensor_map_t& map,
                                    unsigned barrier, int c0, int c1, int c2, int c3,
                                    int c4, unsigned long long) {
  detail::bring_box(target, map, barrier, {c0, c1, c2, c3, c4});
}
inline void prefetch_bulk_tensor_5d(const tensor_map_t&, int, int, int, int, int) {}
inline unsigned long long createpolicy_evict_first() { return 0; }
inline void prefetch_tensormap(const tensor_map_t&) {}
inline void fence_proxy_async() {}

}  // namespace ptx

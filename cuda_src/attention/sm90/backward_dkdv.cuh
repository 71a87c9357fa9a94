// SPDX-License-Identifier: MIT
// Products, P and dS of a consumer warpgroup of backward.cu.
//
// Tiles  k, v   kBlockN x kHeadDim  shared, 64 rows per warpgroup
//        q, dO  kBlockM x kHeadDim  shared
//        dS     kBlockN x kBlockM   shared, columns are keys
#pragma once

#include "attention/sm90/backward.cuh"
#include "attention/sm90/score_function.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma_shapes.cuh"

#ifndef BOUNDS
#error "BOUNDS comes from the host"
#endif
constexpr int kBlockN = 128;  // keys per tile
// Position bounds on the queries that see a key: 0 none, 1 a lower bound, 2 both.
constexpr int kBounds = BOUNDS;
constexpr int kMaxSummed = 128;
constexpr int kMany = 1 << 30;

// A tile: chunks of 64 columns, each [rows][128 bytes], swizzled.
constexpr int kChunks = kHeadDim / 64;
constexpr int kChunkN = kBlockN * 128, kChunkM = kBlockM * 128;
constexpr int kBytesN = kChunks * kChunkN, kBytesM = kChunks * kChunkM;
constexpr int kBytesDs = 2 * kChunkM;  // columns are keys: one chunk per warpgroup
constexpr int kBytesStats = 2 * kBlockM * 4;

constexpr int kScores = kBlockM / 2;  // numbers of S, P, dP and dS per thread
constexpr int kSums = kHeadDim / 2;   // of dk and dv
constexpr int kSumsQ = kPart / 128;   // of dq

// S = k q^T or dP = v dO^T, or those of a part of the queries. A step covers 16
// columns, 32 bytes of each 128-byte row.
template <int kCount>
__device__ __forceinline__ void multiply_scores(float (&s)[kCount],
                                                unsigned long long kv,
                                                unsigned long long qd) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    ptx::wgmma_t<elem_t, 2 * kCount>::ss(s, kv + (chunk * kChunkN + inside) / 16,
                                         qd + (chunk * kChunkM + inside) / 16,
                                         step > 0);
  }
}

// dv += P dO or dk += dS q, steps kBegin to kEnd of 16 rows of dO or q, 128 bytes each.
template <int kBegin = 0, int kEnd = kBlockM / 16>
__device__ __forceinline__ void multiply_sums(float (&sums)[kSums],
                                              const unsigned (&p)[kBlockM / 16][4],
                                              unsigned long long qd, bool accumulate) {
#pragma unroll
  for (int step = kBegin; step < kEnd; ++step) {
    ptx::wgmma_t<elem_t, kHeadDim>::rs(sums, p[step], qd + step * (16 * 128 / 16),
                                       step > 0 || accumulate);
  }
}

// This warpgroup's part of dq = dS^T k. A step covers 16 keys.
__device__ __forceinline__ void multiply_dq(float (&dq)[kSumsQ], unsigned long long ds,
                                            unsigned long long k) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    const int chunk = step / 4, inside = step % 4 * 32;
    ptx::wgmma_t<elem_t, 64>::ss_mn(dq, ds + (chunk * kChunkM + inside) / 16,
                                    k + step * (16 * 128 / 16), step > 0);
  }
}

// A work tile as published by the producer.
struct tile_info_t {
  int count;     // blocks of queries over all summed entries; 0: no tile left
  float factor;  // of dP, if dS has one
  int num_keys;  // from the first key on; may exceed the tile
  // Query i sees key j, relative to the first key, if low <= j - i < high. Blocks whose
  // first query lies in [whole_first, whole_last] see all keys.
  int low, high, whole_first, whole_last;

  // Whether all queries of the block that starts at `origin()` see all keys.
  template <typename Origin>
  __device__ __forceinline__ bool is_whole(const Origin& origin) const volatile {
    if constexpr (kBounds == 0) return num_keys >= kBlockN;
    const int first = origin();
    return first >= whole_first && (kBounds < 2 || first <= whole_last);
  }
};

// A bit for each of 32 scores of a thread that a mask function hides, or positions: the
// first query at position `i`, the first key `j`; hidden are queries before column
// `first` and after `last`, for a row 8 further on those columns plus 8, and rows from
// `num_keys` on. A loop rather than 32 copies of the function.
__device__ __forceinline__ unsigned hidden_scores(const score_function_t& function,
                                                  int b, int h, int i, int j, int first,
                                                  int last, int num_keys) {
  const function_head_t head = function.of_head<false, true>(b, h);
  const function_key_t keys[2] = {function.of_key<false, true>(head, j),
                                  function.of_key<false, true>(head, j + 8)};
  unsigned hidden = 0;
#pragma unroll 2
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int column = n * 8 + odd;
      const function_query_t query = function.of_query<false, true>(head, i + column);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int apart = i + column - j - r * 8, place = column - r * 8;
        const bool shows = function.shows(
            head, query, keys[r],
            function.of_diagonal<false, true>(head, apart, static_cast<float>(apart)));
        const bool in_bounds = place >= first && place <= last && r * 8 < num_keys;
        if (!shows || !in_bounds) hidden |= 1u << (n * 4 + r * 2 + odd);
      }
    }
  }
  return hidden;
}

// State of a consumer warpgroup: its sums, the scores of one block of queries, and
// tiles as operands of wgmma. Number e of a thread's scores is in column e / 4 * 8 +
// lane % 4 * 2 + e % 2, row e / 2 % 2 * 8.
struct mma_t {
  float sums_k[kSums], sums_v[kSums], s[kScores], dp[kScores];
  unsigned p[kBlockM / 16][4], ds[kBlockM / 16][4];

  int group, warp, lane;  // warp within the warpgroup
  // A operands: rows of this warpgroup; B operands; and operands whose rows are summed.
  unsigned long long k_rows, v_rows, q_rows, dout_rows, q_sums, dout_sums;
  unsigned long long ds_rows, k_sums;  // for this warpgroup's part of dq
  unsigned ds_target, lane_stats;

  __device__ __forceinline__ mma_t(int group, unsigned smem_k, unsigned smem_v,
                                   unsigned smem_q, unsigned smem_dout,
                                   unsigned smem_ds, unsigned smem_stats)
      : group(group), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {
    // A warpgroup computes 64 of 128 rows of dq, or 64 of 128 columns.
    constexpr bool kByRows = kBlockM == 128;
    k_rows = descriptor(smem_k + group * 8192, 16);
    v_rows = descriptor(smem_v + group * 8192, 16);
    q_rows = descriptor(smem_q, 16);
    dout_rows = descriptor(smem_dout, 16);
    q_sums = descriptor(smem_q, kChunkM);
    dout_sums = descriptor(smem_dout, kChunkM);
    ds_rows = descriptor(smem_ds + (kByRows ? group * 8192 : 0), 16);
    k_sums = descriptor(smem_k + (kByRows ? 0 : group * kChunkN), kChunkN);
    // For stmatrix each lane addresses one row of a matrix: queries n and n + 8 of two
    // groups of 8 keys. The swizzle XORs address bits 4 to 6 with bits 7 to 9.
    ds_target = smem_ds + group * kChunkM + (lane / 16 * 8 + lane % 8) * 128 +
                ((32 * warp + 16 * (lane / 8 % 2)) ^ (lane % 8 * 16));
    lane_stats = smem_stats + lane % 4 * 8;
  }

  __device__ __forceinline__ void start_s(unsigned q_stage) {
    ptx::wgmma_fence();
    multiply_scores(s, k_rows, q_rows + q_stage * (kBytesM / 16));
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void start_dp(unsigned dout_stage) {
    ptx::wgmma_fence();
    multiply_scores(dp, v_rows, dout_rows + dout_stage * (kBytesM / 16));
    ptx::wgmma_commit_group();
  }
  template <int kBegin = 0, int kEnd = kBlockM / 16>
  __device__ __forceinline__ void start_dv(unsigned dout_stage, bool accumulate) {
    ptx::wgmma_fence();
    multiply_sums<kBegin, kEnd>(sums_v, p, dout_sums + dout_stage * (kBytesM / 16),
                                accumulate);
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void start_dk(unsigned q_stage, bool accumulate) {
    ptx::wgmma_fence();
    multiply_sums(sums_k, ds, q_sums + q_stage * (kBytesM / 16), accumulate);
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void start_dq(float (&dq)[kSumsQ], unsigned ds_stage) {
    ptx::wgmma_fence();
    multiply_dq(dq, ds_rows + ds_stage * (kBytesDs / 16), k_sums);
    ptx::wgmma_commit_group();
  }

  // Sets the scores of hidden keys to `hidden`; `origin()` is the first query.
  template <typename Origin>
  __device__ __forceinline__ void mask(const volatile tile_info_t& info, float hidden,
                                       const Origin& origin) {
    // The key of a row is hidden from queries before `first` and after `last`.
    const int num_keys = info.num_keys;
    const int row_thread = group * 64 + warp * 16 + lane / 4;
    int first[2] = {-kMany, -kMany}, last = kMany;
    if constexpr (kBounds > 0) {
      const int corner = row_thread - origin() - lane % 4 * 2;
      first[0] = corner - info.high + 1;
      first[1] = first[0] + 8;
      if (kBounds == 2) last = corner - info.low;
    }
    if (row_thread >= num_keys) first[0] = kMany;
    if (row_thread + 8 >= num_keys) first[1] = kMany;
#pragma unroll
    for (int e = 0; e < kScores; ++e) {
      const int column = e / 4 * 8 + e % 2, row = e / 2 % 2;
      bool hides = column < first[row];
      if (kBounds == 2) hides |= column > last + row * 8;
      if (hides) s[e] = hidden;
    }
  }

  // The same for those of 32 scores from `begin` on whose bit is set.
  __device__ __forceinline__ void hide(unsigned bits, int begin, float hidden) {
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      if (bits >> e & 1) s[begin + e] = hidden;
    }
  }

  // s becomes P; `lse(n)` is pair n of lse.
  template <int kBegin, int kEnd, typename Lse>
  __device__ __forceinline__ void exponentiate(float to_log2, const Lse& lse) {
#pragma unroll
    for (int e = kBegin; e < kEnd; e += 4) {
      const float2 l = lse(e / 4);
      s[e] = ptx::ex2_approx_ftz(s[e] * to_log2 - l.x);
      s[e + 1] = ptx::ex2_approx_ftz(s[e + 1] * to_log2 - l.y);
      s[e + 2] = ptx::ex2_approx_ftz(s[e + 2] * to_log2 - l.x);
      s[e + 3] = ptx::ex2_approx_ftz(s[e + 3] * to_log2 - l.y);
    }
  }

  // The same with alibi, whose `slope` is multiplied by log2 e; `distance` is that of
  // number 0. Rows 8 apart and columns 8 apart share distances.
  template <int kBegin, int kEnd, typename Lse>
  __device__ __forceinline__ void exponentiate(float to_log2, const Lse& lse,
                                               float slope, float distance) {
#pragma unroll
    for (int e = kBegin; e < kEnd; ++e) {
      const int apart = e / 4 * 8 + e % 2 - e / 2 % 2 * 8;
      const float2 l = lse(e / 4);
      const float minus = fmaf(slope, fabsf(distance + static_cast<float>(apart)),
                               e % 2 == 0 ? l.x : l.y);
      s[e] = ptx::ex2_approx_ftz(s[e] * to_log2 - minus);
    }
  }

  // p becomes P, which is in s, as an A operand.
  template <int kBegin, int kEnd> __device__ __forceinline__ void round_p() {
#pragma unroll
    for (int e = kBegin; e < kEnd; e += 2) {
      p[e / 8][e / 2 % 4] = pair16_t::from(s[e + 1], s[e]);
    }
  }

  // Computes dS from P in s and from dP; `delta(n)` is pair n of delta.
  template <int kBegin, int kEnd, typename Delta>
  __device__ __forceinline__ void make_ds(float factor, const Delta& delta) {
#pragma unroll
    for (int e = kBegin; e < kEnd; e += 4) {
      float2 d = delta(e / 4);
      if constexpr (kNarrow<elem_t>) {
        d.x *= factor;
        d.y *= factor;
#pragma unroll
        for (int f = e; f < e + 4; ++f) dp[f] *= factor;
      }
      ds[e / 8][e / 2 % 4] =
          pair16_t::from(s[e + 1] * (dp[e + 1] - d.y), s[e] * (dp[e] - d.x));
      ds[e / 8][e / 2 % 4 + 1] =
          pair16_t::from(s[e + 3] * (dp[e + 3] - d.y), s[e + 2] * (dp[e + 2] - d.x));
    }
  }
  // Stores dS for dq in shared memory; wgmma reads it after a fence.
  __device__ __forceinline__ void store_ds(unsigned ds_stage) {
#pragma unroll
    for (int m = 0; m < kBlockM / 16; ++m) {
      ptx::stmatrix_x4_trans(ds_target + ds_stage * kBytesDs + m * 2048, ds[m][0],
                             ds[m][1], ds[m][2], ds[m][3]);
    }
  }
};

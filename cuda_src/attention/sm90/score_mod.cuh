// SPDX-License-Identifier: MIT
// attention_hopper: score options (scale, softcap, bias, alibi, mask) for a whole tile.
//
// attention/score/score.cuh computes one score. Here each option is applied to all
// numbers of a thread, with common parts hoisted: rows become pointers, columns
// constant offsets from them. If bias and mask are the same for all queries, a warp of
// the producer warpgroup reads them once per tile into shared memory, as floats. Of
// other biases, TMA loads tiles if it can; otherwise each thread reads its own numbers.
#pragma once

#include "attention/score/softcap.cuh"
#include "attention/sm90/score_arguments.cuh"
#include "attention/sm90/score_function.cuh"
#include "attention/sm90/softmax.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared.cuh"

static_assert(kChangesScores == (kHasSoftcap || kHasBias || kHasAlibi || kHasMask ||
                                 kHasScoreFunction || kHasMaskFunction),
              "an option that is not applied here");

// --- softcap

// For raise(): products to which the softcap has not been applied yet.
struct capped_t {
  const cap_t& cap;

  static constexpr bool kHasLimit = true;
  // NaN exceeds every limit.
  __device__ bool is_passed(const extremes_t& extremes) const {
    const unsigned limit = __float_as_uint(cap.limit);
    return (max(extremes.top[0], extremes.top[1]) > static_cast<int>(limit)) |
           (extremes.bottom > (limit | 0x80000000u));
  }
  __device__ float bound(float x) const {
    return fminf(x * cap.coefficients[0], cap.softcap);
  }
  __device__ float operator()(float x) const { return any_size_t{cap}(x, 0.f); }
};

// Whether no number of the warp exceeds `cap.limit`. Below the limit both forms of the
// softcap give the same bits, so a score does not depend on its neighbours.
__device__ __forceinline__ bool all_near(const float (&s)[kScores], const cap_t& cap) {
  return !__any_sync(kFullMask, capped_t{cap}.is_passed(extremes_t(s)));
}

// exponentiate() for products to which the softcap has not been applied; `near`: none
// exceeds the limit.
__device__ __forceinline__ void exponentiate_capped(softmax_t& row, float (&s)[kScores],
                                                    const cap_t& cap, bool near) {
  if (near) {
    exponentiate(row, s, near_t{cap});
  } else {
    exponentiate(row, s, any_size_t{cap});
  }
}

// --- key terms: bias and mask per key of a tile

// Their slots in shared memory. A single warpgroup needs it for more stages of keys.
// A bias that is added after the products shares the barriers of its tile of k, which
// saves a wait and an arrival per step.
constexpr bool kHasKeyRing = kTermsOfKeys && !kBiasBehind;
constexpr int kKeySlots = kBiasBehind                      ? kStages
                          : kPresetBias && kNumGroups == 1 ? 2
                                                           : 4;
struct alignas(16) key_terms_t {
  float terms[kTermsOfKeys ? kBlockN : 1];
  // With kPresetBias: biases too large to preset, to be added after the products, and
  // whether there are any.
  float late[kPresetBias ? kBlockN : 1];
  bool some_late;
};

// A key that the mask hides. A NaN bias is stored with other bits.
constexpr unsigned kHiddenKey = 0xffffffffu;

// The key terms that a lane of the reading warp fetches: keys j0 + lane, j0 + lane +
// 32, and so on. Fetched one tile ahead, since a load takes about as long as a tile.
constexpr int kTermsOfLane = (kBlockN + kWarpSize - 1) / kWarpSize;
struct read_terms_t {
  float bias[kTermsOfLane];
  bool visible[kTermsOfLane];

  __device__ __forceinline__ void read(const scores_t& scores, int j0, int seqlen_k,
                                       int lane) {
#pragma unroll
    for (int n = 0; n < kTermsOfLane; ++n) {
      const int j = j0 + n * kWarpSize + lane;
      bias[n] = 0;
      visible[n] = true;
      if (j < seqlen_k) {
        if constexpr (kHasBias) bias[n] = to<float>(*scores.bias_at(0, j));
        if constexpr (kHasMask && !kMaskBits) visible[n] = *scores.mask_at(0, j);
      }
    }
  }
};

// Whether the n-th key of a lane lies in the tile.
__device__ __forceinline__ bool is_in_tile(int n, int lane) {
  return n * kWarpSize + lane < kBlockN;
}

__device__ __forceinline__ void write_key_terms(volatile key_terms_t& slot,
                                                const read_terms_t& read, int lane) {
#pragma unroll
  for (int n = 0; n < kTermsOfLane; ++n) {
    float term = read.bias[n];
    if (is_nan(term)) term = __uint_as_float(0x7fffffffu);
    if (!read.visible[n]) term = __uint_as_float(kHiddenKey);
    if (is_in_tile(n, lane)) slot.terms[n * kWarpSize + lane] = term;
  }
}

// A product of 16 columns truncates bits that lie below those of its accumulator. Up to
// this size a preset bias keeps lse within its error bound; larger ones are added late.
constexpr float kPresetLimit = 512.f / kHeadDim;

// 1 / scale as two floats. Conversions from double would compete with the exponentials
// of the consumers for the same unit.
struct inverse_t {
  float high, low;

  __device__ explicit inverse_t(double scale) {
    high = static_cast<float>(1 / scale);
    low = static_cast<float>(1 / scale - high);
  }
  // x / scale, rounded once; infinities and NaN are kept.
  __device__ float operator()(float x) const {
    const float product = rounded_product(x, high);
    const float lost = fmaf(x, low, fmaf(x, high, -product));
    return is_finite(product) ? product + lost : product;
  }
};

// With kKeyBias, in the unit of q.k.
__device__ __forceinline__ void write_key_bias(volatile key_terms_t& slot,
                                               const read_terms_t& read,
                                               const inverse_t& inverse_scale,
                                               int lane) {
  constexpr float kMost = 3e38f;
  bool some_late = false;
#pragma unroll
  for (int n = 0; n < kTermsOfLane; ++n) {
    const float bias = read.bias[n];
    float term = inverse_scale(bias);
    if (is_finite(bias)) term = fminf(fmaxf(term, -kMost), kMost);
    const bool late = kPresetBias && fabsf(bias) > kPresetLimit && is_finite(bias);
    if (is_in_tile(n, lane)) {
      const int column = n * kWarpSize + lane;
      slot.terms[column] = late ? 0.f : term;
      if constexpr (kPresetBias) slot.late[column] = late ? term : 0.f;
      some_late |= late;
    }
  }
  if constexpr (kPresetBias) {
    some_late = __any_sync(kFullMask, some_late);
    if (lane == 0) slot.some_late = some_late;
  }
}

// With kBiasBehind: the bias of a thread's columns, in pairs. As many as registers
// allow are loaded while the product is in flight.
struct key_bias_t {
  static constexpr int kPairs = kScores / 4, kAhead = kPairs < 4 ? kPairs : 4;
  unsigned terms;
  float2 pairs[kPairs];

  __device__ __forceinline__ void load(const float* of_thread) {
    terms = ptx::shared_address(of_thread);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load_pair(n);
  }
  __device__ __forceinline__ void add_to(float (&s)[kScores]) {
#pragma unroll
    for (int n = kAhead; n < kPairs; ++n) load_pair(n);
#pragma unroll
    for (int e = 0; e < kScores; e += 2) {
      s[e] += pairs[e / 4].x;
      s[e + 1] += pairs[e / 4].y;
    }
    __syncwarp();  // all lanes have read the bias of this tile
  }
  __device__ __forceinline__ void load_pair(int n) {
    pairs[n] = ptx::load_shared_f32x2(terms + column_of(4 * n) * sizeof(float));
  }
};

// Calls f(number, its key term) for all numbers of a thread.
template <typename Function>
__device__ __forceinline__ void for_keys(float (&s)[kScores], const float* terms,
                                         const Function& f) {
#pragma unroll
  for (int e = 0; e < kScores; e += 4) {  // two rows of two columns
    const float2 pair = *reinterpret_cast<const float2*>(terms + column_of(e));
    f(s[e], pair.x);
    f(s[e + 1], pair.y);
    f(s[e + 2], pair.x);
    f(s[e + 3], pair.y);
  }
}
__device__ __forceinline__ void set_terms(float (&s)[kScores], const float* terms) {
  for_keys(s, terms, [](float& x, float term) { x = term; });
}
__device__ __forceinline__ void add_late_terms(float (&s)[kScores], const float* late) {
  for_keys(s, late, [](float& x, float term) { x += term; });
}

// Whether an option lies between the scale and the key terms.
constexpr bool kScalesApart = kHasSoftcap || kHasAlibi || kHasScoreFunction;

__device__ __forceinline__ void add_key_terms(float (&s)[kScores], const float* terms,
                                              float scale) {
  for_keys(s, terms, [=](float& x, float term) {
    if constexpr (kHasBias) {
      x = kScalesApart ? x + term : fmaf(x, scale, term);
    } else if constexpr (!kScalesApart) {
      x *= scale;
    }
    if constexpr (kHasMask && !kMaskBits) {
      if (__float_as_uint(term) == kHiddenKey) x = -infinity<float>();
    }
  });
}

// --- tiles of the bias

// With kBiasTiles: the bias of a thread's numbers, two neighbouring columns per word.
struct bias_tile_t {
  unsigned words[kBiasTiles ? kScores / 2 : 1];

  // Where a lane reads a tile that starts at `tile`: its row of four 8 x 8 matrices,
  // two below each other and two beside them. `row`: first of the warp's 16 rows.
  static __device__ __forceinline__ unsigned start(unsigned tile, int row, int lane) {
    return tile + (row + lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
  }
  __device__ __forceinline__ void load(unsigned start) {
#pragma unroll
    for (int n = 0; n < kBlockN / 16; ++n) {  // 16 columns; the swizzle is an XOR
      unsigned matrices[4];
      ptx::ldmatrix_x4(matrices, (start ^ n % 4 * 32) + n / 4 * (kBlockM * 128));
#pragma unroll
      for (int m = 0; m < 4; ++m) words[4 * n + m] = matrices[m];
    }
  }
  __device__ __forceinline__ float operator[](int e) const {
    const unsigned word = words[e / 2];
    return to<float>(bias_t{static_cast<unsigned short>(e % 2 ? word >> 16 : word)});
  }
};

// --- all options

// Pointers to bias and mask of this thread's two queries, at key 0.
struct score_rows_t {
  const bias_t* bias[2];
  const bool* mask[2];
  const unsigned* bits[2];  // with kMaskBits

  __device__ __forceinline__ void set(const scores_t& scores, const int (&i)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kHasBias && !kTermsOfKeys && !kBiasTiles) {
        bias[r] = scores.bias_at(i[r], 0);
        ptx::launder(
            bias[r]);  // keep the full address, computed before the loop over keys
      }
      if constexpr (kHasMask && !kTermsOfKeys && !kMaskBits) {
        mask[r] = scores.mask_at(i[r], 0);
        ptx::launder(mask[r]);
      }
    }
  }
  __device__ __forceinline__ void set(const mask_bits_t& mask_bits,
                                      const tile_coord_t& at, const int (&i)[2],
                                      int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kMaskBits) bits[r] = mask_bits.of(at, i[r], lane);
    }
  }
};

// Hides the scores of which `shown` has no bit: a word for each row, a bit for each of
// its columns.
__device__ __forceinline__ void hide_unshown(float (&s)[kScores],
                                             const unsigned (&shown)[2]) {
  static_assert(kScores <= 64, "a row of a thread has more columns than a word bits");
#pragma unroll
  for (int e = 0; e < kScores; ++e) {
    const int bit = e / 4 * 2 + e % 2;
    if ((shown[row_of(e)] >> bit & 1) == 0) s[e] = -infinity<float>();
  }
}

// What score and mask functions computed once for a head and this thread's rows.
struct function_rows_t {
  function_head_t head;
  function_query_t queries[2];

  template <bool kScore, bool kMask>
  __device__ __forceinline__ void set(const score_arguments_t& score,
                                      const scores_t& scores, const int (&i)[2]) {
    if constexpr ((kScore && kHasScoreFunction) || (kMask && kHasMaskFunction)) {
      const score_function_t function = score.function();
      head = function.of_head<kScore, kMask>(scores.entry(), scores.query_head());
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        queries[r] = function.of_query<kScore, kMask>(head, scores.diagonal(i[r]));
      }
    }
  }
};

// What functions precompute for the diagonals of a thread's first row and first column.
template <bool kScore, bool kMask> struct diagonals_t {
  const score_function_t& function;
  const function_rows_t& rows;
  int apart;
  float apart_float;

  __device__ __forceinline__ diagonals_t(const score_function_t& function,
                                         const function_rows_t& rows, int j)
      : function(function),
        rows(rows),
        apart(static_cast<int>(rows.queries[0].i) - j),
        apart_float(static_cast<float>(apart)) {}
  __device__ __forceinline__ function_diagonal_t of(int further) const {
    return function.of_diagonal<kScore, kMask>(
        rows.head, apart + further, apart_float + static_cast<float>(further));
  }
};

// Calls f(number, query, key, diagonal) for all numbers of a thread, whose first column
// is key j. The second row lies 8 below the first: on the same diagonals as the first
// row 8 columns earlier.
template <typename Function>
__device__ __forceinline__ void for_pairs(float (&s)[kScores],
                                          const score_function_t& function,
                                          const function_rows_t& rows, int j,
                                          const Function& f) {
  const diagonals_t<true, false> diagonals(function, rows, j);
  function_diagonal_t before[2] = {diagonals.of(8), diagonals.of(7)};
#pragma unroll
  for (int e = 0; e < kScores; e += e % 4 == 0 ? 1 : 3) {  // the columns
    const int column = column_of(e);
    const function_key_t key = function.of_key<true, false>(rows.head, j + column);
    const function_diagonal_t now = diagonals.of(-column);
    f(s[e], rows.queries[0], key, now);
    f(s[e + 2], rows.queries[1], key, before[e % 4]);
    before[e % 4] = now;
  }
}
__device__ __forceinline__ void call_score(float (&s)[kScores],
                                           const score_arguments_t& score,
                                           const function_rows_t& rows, int j) {
  const score_function_t function = score.function();
  for_pairs(s, function, rows, j,
            [&](float& x, const function_query_t& query, const function_key_t& key,
                const function_diagonal_t& diagonal) {
              x = function.score(x, rows.head, query, key, diagonal);
            });
}
// The columns below `end`, as bits for hide_unshown().
__device__ __forceinline__ unsigned bits_below(int end) {
  end = max(end, 0);
  const int count = end / 8 * 2 + min(end % 8, 2);
  return count < 32 ? (1u << count) - 1 : ~0u;
}

// What the mask function shows of a tile, for hide_unshown(). Few tiles need this, so
// that the parts of a row are computed again for each. It is called before there are
// scores, and stays a loop, since a function may need many registers.
__device__ __forceinline__ void find_shown(unsigned (&shown)[2],
                                           const score_arguments_t& score,
                                           const tile_coord_t& at, const int (&i)[2],
                                           int j) {
  const score_function_t function = score.function();
  function_rows_t rows;
  rows.set<false, true>(score, score.scores_of(at), i);
  const diagonals_t<false, true> diagonals(function, rows, j);
  shown[0] = shown[1] = 0;
  function_diagonal_t before[2] = {diagonals.of(8), diagonals.of(7)};
#pragma unroll 2
  for (int n = 0; n < kScores / 4; ++n) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int column = n * 8 + odd;
      const function_key_t key = function.of_key<false, true>(rows.head, j + column);
      const function_diagonal_t now = diagonals.of(-column);
      const unsigned bit = 1u << (2 * n + odd);
      if (function.shows(rows.head, rows.queries[0], key, now)) shown[0] |= bit;
      if (function.shows(rows.head, rows.queries[1], key, before[odd])) shown[1] |= bit;
      before[odd] = now;
    }
  }
}

// Turns products q.k of a tile into final scores; every score passes through here
// before the softmax. Number e belongs to query i[row_of(e)] and key j + column_of(e).
// With kTail, keys from j + left on do not exist.
template <bool kTail>
__device__ __forceinline__ void score_mod(
    float (&s)[kScores], const scores_t& scores, const score_rows_t& rows,
    const params_t& params, float scale, const cap_t& cap, const float* key_terms,
    const int (&i)[2], int j, int left, const score_arguments_t& score,
    const function_rows_t& functions, const bias_tile_t& bias_tile) {
  constexpr bool kAlibiFirst = kHasAlibi && !kHasSoftcap && !kHasScoreFunction;
  if constexpr (kHasSoftcap) {
    cap_scores(s, cap, all_near(s, cap));
  } else if constexpr (!kAlibiFirst &&
                       (kScalesApart || !(kTermsOfKeys || kBiasTiles))) {
#pragma unroll
    for (int e = 0; e < kScores; ++e) s[e] *= scale;
  }
  if constexpr (kHasScoreFunction) call_score(s, score, functions, j);
  if constexpr (kHasAlibi) {
    // Distances are exact up to 2^24 and rounded twice beyond. The second row lies 8
    // below the first: it has the distances that the first had 8 columns earlier.
    const float distance = static_cast<float>(scores.diagonal(i[0]) - j);
    auto add_terms = [&](const auto& term_of) {
      auto add = [&](float& x, float term) {
        x = kAlibiFirst ? fmaf(x, scale, term) : x + term;
      };
      float before[2] = {term_of(8), term_of(7)};
#pragma unroll
      for (int e = 0; e < kScores; e += e % 4 == 0 ? 1 : 3) {  // the columns
        const float now = term_of(-column_of(e));
        add(s[e], now);
        add(s[e + 2], before[e % 4]);
        before[e % 4] = now;
      }
    };
    // Where all keys lie on one side of the queries, a term is linear in the column, if
    // it is not infinite.
    const bool has_both_sides = distance > -8 && distance < kBlockN - 7;
    const bool is_infinite = fabsf(scores.slope()) == infinity<float>();
    if (__any_sync(kFullMask, has_both_sides || is_infinite)) {
      add_terms([&](int further) {
        return -scores.slope() * fabsf(distance + static_cast<float>(further));
      });
    } else {
      const float slope = distance > 0 ? -scores.slope() : scores.slope();
      const float first = slope * distance;
      add_terms(
          [=](int further) { return fmaf(slope, static_cast<float>(further), first); });
    }
  }
  if constexpr (kTermsOfKeys) {
    add_key_terms(s, key_terms, scale);
    return;
  }
  if constexpr (kBiasTiles) {
#pragma unroll
    for (int e = 0; e < kScores; ++e) {
      s[e] = kScalesApart ? s[e] + bias_tile[e] : fmaf(s[e], scale, bias_tile[e]);
    }
  }
  auto exists = [&](int e) { return !kTail || column_of(e) < left; };
  // Do not keep multiples of a stride in registers across tiles.
  auto fresh = [](index_t stride) {
    if constexpr (kUnitColumns) return index_t(1);
    ptx::launder(stride);
    return stride;
  };
  if constexpr (kHasBias && !kBiasTiles) {
    const index_t at_j = kUnitColumns ? j : j * params.bias.col;
    const bias_t* const from[2] = {rows.bias[0] + at_j, rows.bias[1] + at_j};
    const index_t step = fresh(params.bias.col);
#pragma unroll
    for (int e = 0; e < kScores; ++e) {
      if (exists(e)) s[e] += to<float>(from[row_of(e)][column_of(e) * step]);
    }
  }
  if constexpr (kHasMask && !kMaskBits) {
    const index_t at_j = kUnitColumns ? j : j * params.mask.col;
    const bool* const from[2] = {rows.mask[0] + at_j, rows.mask[1] + at_j};
    const index_t step = fresh(params.mask.col);
#pragma unroll
    for (int e = 0; e < kScores; ++e) {
      if (exists(e) && !from[row_of(e)][column_of(e) * step]) s[e] = -infinity<float>();
    }
  }
}

// SPDX-License-Identifier: MIT
// Score options of attention_vjp_hopper_wide_keys and _queries: as
// attention/score/score.cuh, but for a whole tile of scores, as exponents of 2:
//
//     exponent = softcap(scale q.k) + bias - slope |i + offset - j| - lse
//
// Bias and mask that are the same for all queries (kTermsOfKeys) are read from global
// memory; others are loaded by TMA, in tiles of 64 queries and 64 keys.
#pragma once

#include "attention/score/softcap.cuh"
#include "attention/score/tile_lists.cuh"
#include "attention/sm90/backward_wide.cuh"
#include "attention/sm90/score_arguments.cuh"
#include "ptx/shared.cuh"

constexpr bool kTermsOfKeys = IS_GIVEN(TERMS_OF_KEYS) && (kHasBias || kHasMask);
#ifdef STAGES_TERMS
constexpr int kStagesTerms = STAGES_TERMS;
#else
constexpr int kStagesTerms = kTermsOfKeys ? 4 : 1;
#endif
constexpr bool kHasTerms = kHasBias || kHasMask || kHasAlibi || kHasSoftcap;
static_assert(kChangesScores == (kHasSoftcap || kHasBias || kHasAlibi || kHasMask ||
                                 kHasScoreFunction || kHasMaskFunction),
              "an option that is not applied here");

// Whether the bounds on keys differ between entries of the batch.
constexpr bool kBoundsPerEntry = kHasQueryOffsets || kHasQueryLengths || kHasKeyLengths;
enum : bool { kHasFunctions = kHasScoreFunction || kHasMaskFunction };
constexpr bool kHasOptions = kHasTerms || kBoundsPerEntry || kHasFunctions;
// Whether the derivative of a score with respect to scale * q.k is not always 1.
enum : bool { kHasChain = kHasSoftcap || kScoreHasDerivative };
// A mask function hides whole tiles: work tiles walk over lists of the others.
enum : bool { kListsTiles = kHasMaskFunction };
constexpr bool kBiasTiles = kHasBias && !kTermsOfKeys;
constexpr bool kMaskTiles = kHasMask && !kTermsOfKeys;
constexpr bool kHasTiles = kBiasTiles || kMaskTiles;
// Whether to compute what is added to the products while these are in flight. That
// takes registers, and pays where it is a lot.
constexpr bool kAhead = (kHasTiles || kHasSoftcap || kHasAlibi) && kHeadDim <= 128;
// setmaxnreg redistributes the registers of the block, 168 per thread. Options need
// some of the producer's, and narrow heads leave some over.
constexpr bool kNeedsMany = kHasOptions && kHeadDim <= 192;
constexpr int kProducerRegisters = kNeedsMany ? 72 : 40;
constexpr int kConsumerRegisters = kNeedsMany ? 216 : 232;
constexpr int kBytesBias = kBiasTiles ? 64 * 64 * sizeof(bias_t) : 0;
constexpr int kBytesMask = kMaskTiles ? 64 * 64 : 0;

// INPUTS of _attention/gpu/sm90/backward_wide.py is the same struct on the host.
struct with_terms_t : inputs_t {
  ptx::tensor_map_t bias_map, mask_map;  // of tiles of bias and mask
  cap_t cap;                             // in exponents of 2
  float inverse_cap;                     // 1 / cap.softcap
};
template <bool> struct inputs_of {
  using type = inputs_t;
};
template <> struct inputs_of<true> {
  using type = with_terms_t;
};
using all_inputs_t = inputs_of<kHasTerms>::type;

// How many tiles of a list are visible.
__device__ __forceinline__ int num_seen(const unsigned* list) {
  const int count = num_listed(list);
  return count == 1 && listed_tile(list, 0).word == 0 ? 0 : count;
}

// Where functions are evaluated: batch entry, head, first query (as a position among
// the keys) and first key; and whether the mask function hides a part of the tile.
struct function_place_t {
  int b, h, i, j;
  bool is_mixed;

  __device__ __forceinline__ void set(const scores_t& scores, index_t row,
                                      index_t col) {
    b = static_cast<int>(scores.entry());
    h = static_cast<int>(scores.query_head());
    i = static_cast<int>(scores.diagonal(row));
    j = static_cast<int>(col);
  }
  // The same for a tile that starts `rows` and `cols` further.
  __device__ __forceinline__ function_place_t shifted(int rows, int cols) const
      volatile {
    return {b, h, i + rows, j + cols, is_mixed};
  }
};

// The options of an entry for a tile, relative to its first row.
struct entry_t {
  mask_bounds_t bounds;
  index_t diagonal;
  float slope;
  const bias_t* bias;  // key 0, with kTermsOfKeys; so is the mask
  const bool* mask;
  matrix_t bias_matrix, mask_matrix;

  __device__ __forceinline__ void set(const scores_t& scores, const tile_coord_t& at,
                                      const params_t& params, index_t i, index_t j) {
    bounds = scores.mask_bounds(i, j);
    if constexpr (kHasAlibi) {
      slope = scores.slope();
      diagonal = scores.diagonal(i) - j;
    }
    if constexpr (kTermsOfKeys && kHasBias) bias = scores.bias_at(0, 0);
    if constexpr (kTermsOfKeys && kHasMask) mask = scores.mask_at(0, 0);
    if constexpr (kBiasTiles) bias_matrix = matrix_of(at, at.head, params.bias);
    if constexpr (kMaskTiles) mask_matrix = matrix_of(at, at.head, params.mask);
  }
};

// The bounds for a tile that starts `rows` and `cols` further.
__device__ __forceinline__ mask_bounds_t shifted(const volatile mask_bounds_t& bounds,
                                                 int rows, int cols) {
  return {bounds.low + rows - cols, bounds.high + rows - cols,
          bounds.num_queries - rows, bounds.num_keys - cols};
}
// What consumers need of it, for a tile that starts `rows` queries further.
__device__ __forceinline__ void publish(entry_t& to, const entry_t& from, int rows) {
  to.bounds = shifted(from.bounds, rows, 0);
  if constexpr (kHasAlibi) {
    to.diagonal = from.diagonal + rows;
    to.slope = from.slope;
  }
  if constexpr (kTermsOfKeys && kHasBias) to.bias = from.bias;
  if constexpr (kTermsOfKeys && kHasMask) to.mask = from.mask;
}

// Whether positions hide any of 64 keys from any of 64 queries.
__device__ __forceinline__ bool hides_some(const mask_bounds_t& bounds) {
  return bounds.low > 1 - 64 || bounds.high < 64 || bounds.num_queries < 64 ||
         bounds.num_keys < 64;
}

// --- key terms: bias log2(e), or -inf where the mask hides a key

__device__ __forceinline__ float term_of_key(const bias_t* bias, const bool* mask,
                                             const params_t& params, int j) {
  // Keys past the end are hidden by their position.
  const index_t key = min(j, static_cast<int>(params.seqlen_k) - 1);
  float term = 0;
  if constexpr (kHasBias) {
    term = to<float>(bias[key * params.bias.col]) * float(kLog2e);
  }
  if constexpr (kHasMask) {
    if (!mask[key * params.mask.col]) term = -infinity<float>();
  }
  return term;
}

// --- tiles of bias and mask: rows are queries. A chunk has 128 bytes of each row of
// the bias, swizzled; rows of a mask have 64 bytes, swizzled.

constexpr int kBiasColumns = 128 / sizeof(bias_t);  // per chunk

// Loads the tile at query i and key j; its bytes are already expected.
template <typename Inputs>
__device__ __forceinline__ void load_terms(unsigned bias, unsigned mask,
                                           const Inputs& inputs, const entry_t& entry,
                                           unsigned barrier, int i, int j) {
  if constexpr (kBiasTiles) {
    const matrix_t& at = entry.bias_matrix;
#pragma unroll
    for (int chunk = 0; chunk < kBlockN / kBiasColumns; ++chunk) {
      ptx::cp_async_bulk_tensor_5d(bias + chunk * (64 * 128), inputs.bias_map, barrier,
                                   j + chunk * kBiasColumns, i, at.head, at.batch[0],
                                   at.batch[1]);
    }
  }
  if constexpr (kMaskTiles) {
    const matrix_t& at = entry.mask_matrix;
    ptx::cp_async_bulk_tensor_5d(mask, inputs.mask_map, barrier, j, i, at.head,
                                 at.batch[0], at.batch[1]);
  }
}

// Bias and mask for a thread's numbers. With kKeysAreRows, number e is at key row + e /
// 2 % 2 * 8 and query e / 4 * 8 + lane % 4 * 2 + e % 2; otherwise transposed. An
// address has one part that depends on the thread, one on e, and one on both, which the
// swizzle combines by XOR.
template <bool kKeysAreRows> class tile_terms_t {
  static constexpr int kSize = sizeof(bias_t), kVector = 16 / kSize;

 public:
  __device__ __forceinline__ tile_terms_t(int row, int lane) {
    const int pair = lane % 4, column = pair * 2;
    if constexpr (kKeysAreRows) {
      bias_ = row / kBiasColumns * (64 * 128) + column * 128 + row % kVector * kSize;
      bias_swizzle_ = ((row / kVector % 8) ^ column) * 16;
      mask_ = column * 64 + ((row / 16) ^ pair) * 16 + row % 16;
    } else {
      bias_ = row * 128 + column % kVector * kSize;
      bias_swizzle_ = ((column / kVector) ^ (row % 8)) * 16;
      mask_ = row * 64 + column;
      mask_swizzle_ = row / 2 % 4 * 16;
    }
  }

  // For the tiles at these addresses.
  __device__ __forceinline__ tile_terms_t at(unsigned bias, unsigned mask) const {
    tile_terms_t terms = *this;
    terms.bias_ += bias;
    terms.mask_ += mask;
    return terms;
  }

  __device__ __forceinline__ float operator()(int e) const {
    const int chunk = e / 4, odd = e % 2, far = e / 2 % 2;  // far: row + 8
    float term = 0;
    if constexpr (kBiasTiles) {
      const unsigned at = kKeysAreRows
                              ? chunk * 1024 + odd * 128 +
                                    (bias_swizzle_ ^ ((far * 8 / kVector) ^ odd) * 16)
                              : far * 1024 + chunk * 8 / kBiasColumns * (64 * 128) +
                                    odd * kSize +
                                    (bias_swizzle_ ^ chunk * 8 / kVector % 8 * 16);
      term = load_term<bias_t>(bias_ + at) * float(kLog2e);
    }
    if constexpr (kMaskTiles) {
      const unsigned at = kKeysAreRows ? chunk * 512 + odd * 64 + far * 8
                                       : far * 512 + chunk % 2 * 8 + odd +
                                             (mask_swizzle_ ^ chunk / 2 * 16);
      if (ptx::load_shared_u8(mask_ + at) == 0) term = -infinity<float>();
    }
    return term;
  }

 private:
  template <typename T>
  static __device__ __forceinline__ float load_term(unsigned address) {
    if constexpr (sizeof(T) == 4) {
      return ptx::load_shared_f32(address);
    } else {
      return to<float>(T{ptx::load_shared_u16(address)});
    }
  }

  unsigned bias_, bias_swizzle_, mask_, mask_swizzle_;
};

// --- from products to exponents of the weights

// Applies the softcap to products s; the results are exponents of 2. A small product
// has the same bits by either form, so a score does not depend on its neighbours.
__device__ __forceinline__ void cap_scores(float (&s)[kScores], const cap_t& cap) {
  float largest = 0;
#pragma unroll
  for (int e = 0; e < kScores; ++e) largest = fmaxf(largest, fabsf(s[e]));
  cap_scores(s, cap, !__any_sync(kFullMask, largest > cap.limit));
}

// Computes what bias, mask, alibi and lse add to the exponents and calls `use(e, x)`
// for each. `lse(e)` and `key_term(e)` belong to number e, `tile` holds bias and mask
// that queries do not share, `slope` and `distance` are of alibi.
template <bool kKeysAreRows, typename Lse, typename KeyTerm, typename Use>
__device__ __forceinline__ void find_rest(const tile_terms_t<kKeysAreRows>& tile,
                                          float slope, float distance, const Lse& lse,
                                          const KeyTerm& key_term, const Use& use) {
#pragma unroll
  for (int e = 0; e < kScores; ++e) {
    float x = -lse(e);
    if constexpr (kTermsOfKeys) x += key_term(e);
    if constexpr (kHasTiles) x += tile(e);
    if constexpr (kHasAlibi) {
      constexpr auto apart = fragment_t<kKeysAreRows>::distance_of;
      x = fmaf(-slope, fabsf(distance + static_cast<float>(apart(e))), x);
    }
    use(e, x);
  }
}

// --- score and mask functions

// Their precomputed parts for the head and the two rows of a thread, queries or keys.
template <bool kKeysAreRows, bool kScore, bool kMask> struct function_rows_t {
  function_place_t place;
  function_head_t head;
  function_query_t queries[kKeysAreRows ? 1 : 2];
  function_key_t keys[kKeysAreRows ? 2 : 1];

  __device__ __forceinline__ void set(const score_function_t& function,
                                      const function_place_t& at,
                                      const fragment_t<kKeysAreRows>& fragment) {
    place = at;
    head = function.of_head<kScore, kMask>(place.b, place.h);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = fragment.row + 8 * r;
      if constexpr (kKeysAreRows) {
        keys[r] = function.of_key<kScore, kMask>(head, place.j + row);
      } else {
        queries[r] = function.of_query<kScore, kMask>(head, place.i + row);
      }
    }
  }

  // Calls f(e, query, key, diagonal) for all numbers. The second row lies on the
  // diagonals that the first had 8 columns earlier.
  template <typename Function>
  __device__ __forceinline__ void for_pairs(const score_function_t& function,
                                            const fragment_t<kKeysAreRows>& fragment,
                                            const Function& f) {
    const int apart = place.i - place.j + fragment.distance();
    const float apart_float = static_cast<float>(apart);
    auto diagonal_of = [&](int further) {
      return function.of_diagonal<kScore, kMask>(
          head, apart + further, apart_float + static_cast<float>(further));
    };
    constexpr auto distance = fragment_t<kKeysAreRows>::distance_of;
    function_diagonal_t before[2] = {diagonal_of(distance(2)),
                                     diagonal_of(distance(3))};
#pragma unroll
    for (int e = 0; e < kScores; e += e % 4 == 0 ? 1 : 3) {  // the columns
      const int column = fragment.column_of(e);
      if constexpr (kKeysAreRows) {
        queries[0] = function.of_query<kScore, kMask>(head, place.i + column);
      } else {
        keys[0] = function.of_key<kScore, kMask>(head, place.j + column);
      }
      const function_diagonal_t now = diagonal_of(distance(e));
      f(e, queries[0], keys[0], now);
      f(e + 2, queries[kKeysAreRows ? 0 : 1], keys[kKeysAreRows ? 1 : 0],
        before[e % 4]);
      before[e % 4] = now;
    }
  }
};

constexpr int kDerivatives = kHasChain ? kScores : 1;

// Applies the score function to products, or to what the softcap made of them, and
// multiplies its derivative into that of the softcap.
template <bool kKeysAreRows, typename Inputs>
__device__ __forceinline__ void call_score(
    function_rows_t<kKeysAreRows, true, false>& rows,
    const fragment_t<kKeysAreRows>& fragment, float (&s)[kScores],
    float (&derivatives)[kDerivatives], const Inputs& inputs, const params_t& params) {
  const score_function_t function(params);
  const float scale = kHasSoftcap ? float(kLn2) : static_cast<float>(params.scale);
  rows.for_pairs(function, fragment,
                 [&](int e, const function_query_t& query, const function_key_t& key,
                     const function_diagonal_t& diagonal) {
                   float by_s = 1, before = 1;
                   if constexpr (kHasSoftcap) {
                     const float tanh = s[e] * inputs.inverse_cap;
                     before = fmaf(-tanh, tanh, 1.f);
                   }
                   s[e] = function.score(s[e] * scale, rows.head, query, key, diagonal,
                                         by_s);
                   if constexpr (kHasChain) {
                     // Weight 0 of hidden keys must not meet an infinite derivative.
                     derivatives[e] = s[e] == -infinity<float>() ? 0.f : before * by_s;
                   }
                 });
}
// Sets the exponents of keys that the mask function hides to -inf.
template <bool kKeysAreRows>
__device__ __forceinline__ void hide_keys(const fragment_t<kKeysAreRows>& fragment,
                                          float (&s)[kScores],
                                          const function_place_t& place,
                                          const params_t& params) {
  const score_function_t function(params);
  function_rows_t<kKeysAreRows, false, true> rows;
  rows.set(function, place, fragment);
  rows.for_pairs(function, fragment,
                 [&](int e, const function_query_t& query, const function_key_t& key,
                     const function_diagonal_t& diagonal) {
                   if (!function.shows(rows.head, query, key, diagonal)) {
                     s[e] = -infinity<float>();
                   }
                 });
}

// The score of fragment.query(e) and fragment.key(e), both relative to the tile, after
// the softcap. Every score of the backward passes through here; with a softcap so does
// its derivative with respect to scale * q.k.
template <bool kKeysAreRows, typename Inputs>
__device__ __forceinline__ void score_mod(int e,
                                          const fragment_t<kKeysAreRows>& fragment,
                                          float (&s)[kScores],
                                          float (&derivatives)[kDerivatives],
                                          const Inputs& inputs, float rest) {
  if constexpr (kHasScoreFunction) {
    s[e] = fmaf(s[e], float(kLog2e), rest);
  } else if constexpr (kHasSoftcap) {
    const float tanh = s[e] * inputs.inverse_cap;
    derivatives[e] = fmaf(-tanh, tanh, 1.f);
    s[e] += rest;
  } else {
    s[e] = fmaf(s[e], inputs.to_log2, rest);
  }
}

// Turns the products of a tile into exponents of the weights, -inf for hidden keys.
// What is added is in `rest`, or computed by `find_rest`.
template <bool kKeysAreRows, typename Inputs, typename FindRest>
__device__ __forceinline__ void add_terms(
    const fragment_t<kKeysAreRows>& fragment, float (&s)[kScores],
    float (&derivatives)[kDerivatives], const Inputs& inputs, const params_t& params,
    function_rows_t<kKeysAreRows, true, false>& rows, const float (&rest)[kScores],
    const FindRest& find_rest) {
  if constexpr (kHasSoftcap) cap_scores(s, inputs.cap);
  if constexpr (kHasScoreFunction) {
    call_score(rows, fragment, s, derivatives, inputs, params);
  }
  if constexpr (kAhead) {
#pragma unroll
    for (int e = 0; e < kScores; ++e) {
      score_mod(e, fragment, s, derivatives, inputs, rest[e]);
    }
  } else {
    find_rest(
        [&](int e, float x) { score_mod(e, fragment, s, derivatives, inputs, x); });
  }
}
template <bool kKeysAreRows>
__device__ __forceinline__ void mask(const fragment_t<kKeysAreRows>& fragment,
                                     float (&s)[kScores], const mask_bounds_t& bounds) {
  if (hides_some(bounds)) {
#pragma unroll
    for (int e = 0; e < kScores; ++e) {
      if (!bounds.sees(fragment.query(e), fragment.key(e))) s[e] = -infinity<float>();
    }
  }
}

// SPDX-License-Identifier: MIT
// From q.k to the final score, which keys a query sees, and the end of a row. Every
// attention kernel includes this file; each option is implemented once, here.
//
//     s = scale * q.k,  s = softcap * tanh(s / softcap),  s = score function of s,
//     s += bias,  s -= slope * |i + offset - j|,  s = -inf where masked
//
// Absent options generate no code (options.cuh).
#pragma once

#include "attention/score/options.cuh"
#include "attention/score/params.cuh"
#include "common/math.cuh"

// Which form of the sinks a thread keeps, whichever takes fewer registers.
#if __CUDA_ARCH__ >= 900 && !defined(LONG_AXES)
constexpr bool kSinksOfAllHeads = true;
#else
constexpr bool kSinksOfAllHeads = false;
#endif
#if KEY_PARTS
// A split of the keys is weighted by exp(lse), lse = m + log l: the rounding of a large
// lse would be an error of the result.
using maximum_t = double;
struct row_lse_t {
  double m, l;  // as in attention/combine.cu
};
__device__ __forceinline__ row_lse_t lse_of(double m, accum_t l) {
  return {l == 0 ? -infinity<double>() : m, l};
}
#else
using maximum_t = accum_t;
using row_lse_t = accum_t;
__device__ __forceinline__ row_lse_t lse_of(accum_t m, accum_t l) {
  return l == 0 ? -infinity<accum_t>() : m + log_of(l);
}
#endif

// The arrays of every forward kernel. The gradient kernels read the first three.
//   q      (batch, heads, queries, head_dim)
//   k, v   (batch, kv heads, keys, head_dim), (batch, kv heads, keys, head_dim_v)
//   out    (batch, heads, queries, head_dim_v)
//   lse    (batch, heads, queries), or null
#define QKV_PARAMETERS                                        \
  const elem_t* __restrict__ q, const elem_t* __restrict__ k, \
      const elem_t* __restrict__ v
#define FORWARD_PARAMETERS \
  QKV_PARAMETERS, elem_t* __restrict__ out, row_lse_t* __restrict__ lse

// The options, as the last parameters of every kernel and as arguments of scores_t.
// Strides are in params; absent arrays are null.
//   bias, mask      (batch, heads, queries, keys); mask: true is visible
//   sinks           (heads), or (heads, queries) where queries are heads of a group
//   alibi_slopes    (batch, heads)
//   query_offsets, query_lengths, key_lengths  (batch)
#define SCORE_PARAMETERS                                                          \
  const bias_t *__restrict__ bias, const bool *__restrict__ mask,                 \
      const sink_t *__restrict__ sinks, const slope_t *__restrict__ alibi_slopes, \
      const query_offset_t *__restrict__ query_offsets,                           \
      const query_length_t *__restrict__ query_lengths,                           \
      const key_length_t *__restrict__ key_lengths, const index_t query_offset,   \
      const __grid_constant__ params_t params
#define SCORE_ARGUMENTS                                                               \
  params, bias, mask, sinks, alibi_slopes, query_offsets, query_lengths, key_lengths, \
      query_offset

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

__device__ __forceinline__ index_t smaller(index_t a, index_t b) {
  return a < b ? a : b;
}
__device__ __forceinline__ index_t clamp(index_t x, index_t low, index_t high) {
  return x < low ? low : x > high ? high : x;
}

// An integer of any type as a position.
template <typename T> __device__ __forceinline__ index_t position(T x) {
  return clamp(static_cast<index_t>(x), -kFar, kFar);
}
__device__ __forceinline__ index_t position(unsigned long long x) {
  return x > static_cast<unsigned long long>(kFar) ? kFar : static_cast<index_t>(x);
}

// x after one step of the computation, rounded where each step is.
__device__ __forceinline__ accum_t step(accum_t x) {
  if constexpr (kRoundSteps) return to<accum_t>(to<elem_t>(x));
  return x;
}

// exp(s - m). A hidden key (s = -inf) has weight -0: it changes no sum, and yet differs
// from the +0 of a key far below the maximum, whose value counts if it is NaN.
__device__ __forceinline__ accum_t weight(accum_t s, accum_t m) {
  return s == -infinity<accum_t>() ? accum_t(-0.0) : exp_of(s - m);
}
__device__ __forceinline__ bool is_unseen(float p) {
  return __float_as_uint(p) == 0x80000000u;
}
__device__ __forceinline__ bool is_unseen(double p) {
  return static_cast<unsigned long long>(__double_as_longlong(p)) ==
         0x8000000000000000u;
}

struct range_t {
  index_t first, last;  // [first, last); may be empty
};

// Which queries of a tile of scores see which keys, relative to its corner: those with
// low <= col - row < high, row < num_queries, col < num_keys.
struct mask_bounds_t {
  int low, high, num_queries, num_keys;

  __device__ bool sees(int row, int col) const {
    return low <= col - row && col - row < high && row < num_queries && col < num_keys;
  }
  // Whether each of the first `rows` queries sees each of the first `cols` keys.
  __device__ bool sees_all(int rows, int cols) const {
    return !kHasMask && low <= 1 - rows && cols <= high && rows <= num_queries &&
           cols <= num_keys;
  }
};

// The end of a row: 1 / sum, and lse.
struct finished_t {
  accum_t inverse;
  row_lse_t lse;
};

// The scores of one head of one batch entry.
class scores_t {
 public:
  __device__ scores_t(const tile_coord_t& at, const params_t& params,
                      const bias_t* bias, const bool* mask, const sink_t* sinks,
                      const slope_t* alibi_slopes, const query_offset_t* query_offsets,
                      const query_length_t* query_lengths,
                      const key_length_t* key_lengths, index_t query_offset)
      : params_(params), key_length_(params.seqlen_k), query_length_(params.seqlen_q) {
    if constexpr (kHasBias) bias_ = at.at(bias, params.bias);
    if constexpr (kHasMask) mask_ = at.at(mask, params.mask);
    if constexpr (kHasSinks) {
      sinks_ = kSinksOfAllHeads ? sinks : at.at(sinks, params.sinks);
      head_ = kSinksOfAllHeads ? static_cast<int>(at.head) : 0;
    }
    if constexpr (kHasAlibi) {
      slope_ = to<accum_t>(*at.at(alibi_slopes, params.alibi_slopes));
    }
    if constexpr (kHasQueryLengths) {
      query_length_ = clamp(position(*at.at(query_lengths, params.query_lengths)), 0,
                            params.seqlen_q);
    }
    if constexpr (kHasKeyLengths) {
      key_length_ =
          clamp(position(*at.at(key_lengths, params.key_lengths)), 0, params.seqlen_k);
    }
#if SCORE_FUNCTION || MASK_FUNCTION
    entry_ = divide(at.row_of_heads, params.num_heads);
    if constexpr (kHasParts) {  // each split has all batch entries
      const index_t of_part = divide(params.part.head, params.num_heads);
      entry_ -= divide(entry_, of_part) * of_part;
    }
    query_head_ = at.head;
#endif
    if constexpr (kHasParts) {
      part_first_ = params.part.offset(at.batch, 0) * params.keys_of_part;
    }
    offset_ = query_offset;
    if constexpr (kHasQueryOffsets) {
      offset_ = position(*at.at(query_offsets, params.query_offsets));
    } else if constexpr (kHasQueryLengths || kHasKeyLengths) {
      if (params.offset_from_lengths) offset_ = key_length_ - query_length_;
    }
  }

  // Queries from here on are padding.
  __device__ index_t num_queries() const { return query_length_; }
  // Keys from here on are padding.
  __device__ index_t num_keys() const { return key_length_; }

  // Whether query i is not padding.
  __device__ bool is_query(index_t i) const { return i < query_length_; }

  // Keys outside this range are hidden from all queries in [i_first, i_last); mask
  // aside.
  __device__ range_t keys_of(index_t i_first, index_t i_last) const {
    i_last = i_last < query_length_ ? i_last : query_length_;
    if (i_first >= i_last) return {0, 0};
    const range_t seen = {clamp(i_first + offset_ - params_.left, 0, key_length_),
                          clamp(i_last + offset_ + params_.right, 0, key_length_)};
    if constexpr (kHasParts) {
      const index_t part_last = part_first_ + params_.keys_of_part;
      return {clamp(seen.first, part_first_, part_last),
              clamp(seen.last, part_first_, part_last)};
    }
    return seen;
  }

  // Queries outside this range see no key in [j_first, j_last); mask aside.
  __device__ range_t queries_of(index_t j_first, index_t j_last) const {
    j_last = j_last < key_length_ ? j_last : key_length_;
    if (j_first >= j_last) return {0, 0};
    return {clamp(j_first - offset_ - params_.right, 0, query_length_),
            clamp(j_last - offset_ + params_.left, 0, query_length_)};
  }

  // The keys of this split, without padding.
  __device__ range_t part() const {
    if constexpr (kHasParts) {
      const index_t last = part_first_ + params_.keys_of_part;
      return {part_first_, last < key_length_ ? last : key_length_};
    }
    return {0, key_length_};
  }

  // The bounds of the tile of scores at query i0 and key j0; mask aside.
  __device__ mask_bounds_t mask_bounds(index_t i0, index_t j0) const {
    constexpr index_t kMany = 1 << 30;  // far more than a tile has rows or columns
    const index_t diagonal = i0 + offset_ - j0;
    return {static_cast<int>(clamp(diagonal - params_.left, -kMany, kMany)),
            static_cast<int>(clamp(diagonal + params_.right + 1, -kMany, kMany)),
            static_cast<int>(clamp(query_length_ - i0, 0, kMany)),
            static_cast<int>(clamp(key_length_ - j0, 0, kMany))};
  }

  // How much of keys [j_first, j_last) the mask function shows to queries [i_first,
  // i_last); other masks aside.
  __device__ shown_t shown(index_t i_first, index_t i_last, index_t j_first,
                           index_t j_last) const {
#if MASK_FUNCTION
    return static_cast<shown_t>(
        mask_mod_tile<accum_t>(expr::point(entry_), expr::point(query_head_),
                               {i_first + offset_, i_last - 1 + offset_, true},
                               {j_first, j_last - 1, true}, params_.functions.mask));
#endif
    return kShowsAll;
  }

  // Whether key j is hidden from query i although mask_bounds() shows it. A score
  // function hides a key if it does so for any score; two are tested here.
  __device__ bool hides(index_t i, index_t j) const {
    if constexpr (kHasScoreFunction) {
      if ((*this)(1, i, j) != -infinity<accum_t>()) return false;
    }
    if constexpr (kHidesKeys) return (*this)(0, i, j) == -infinity<accum_t>();
    return false;
  }

  // The final score of query i and key j, if keys_of() or mask_bounds() let i see j.
  // With kShown the mask function is known to show the key.
  template <bool kShown>
  __device__ accum_t of(accum_t q_dot_k, index_t i, index_t j) const {
    accum_t unused;
    return with_derivative<kShown>(q_dot_k, i, j, unused);
  }
  __device__ accum_t operator()(accum_t q_dot_k, index_t i, index_t j) const {
    return of<false>(q_dot_k, i, j);
  }

  // The same, and its derivative with respect to scale * q.k. Everything that changes a
  // score is here, for forward and gradients of all kernels. What depends only on batch
  // entry and head is read in the constructor.
  template <bool kShown = false>
  __device__ accum_t with_derivative(accum_t q_dot_k, index_t i, index_t j,
                                     accum_t& derivative) const {
    accum_t s = step(static_cast<accum_t>(params_.scale) * q_dot_k);
    derivative = 1;
    if constexpr (kHasSoftcap) s = capped(s, derivative);
    if constexpr (kHasScoreFunction) s = step(of_function(s, i, j, derivative));
    if constexpr (kHasBias) s = step(s + to<accum_t>(*bias_at(i, j)));
    if constexpr (kHasAlibi) s = step(s - step(slope_ * distance(i, j)));
    if (!shows(i, j)) s = -infinity<accum_t>();
    if (kHasMaskFunction && !kShown && !shows_by_function(i, j)) {
      s = -infinity<accum_t>();
    }
    // Hidden keys have weight 0, which must not multiply an infinite derivative.
    if (kHasScoreFunction && s == -infinity<accum_t>()) derivative = 0;
    return s;
  }
  // Applies the score function to s; multiplies `derivative` by its own.
  __device__ accum_t of_function(accum_t s, index_t i, index_t j,
                                 accum_t& derivative) const {
#if SCORE_FUNCTION
    accum_t by_s;
    s = score_mod_with_derivative<accum_t>(s, entry_, query_head_, diagonal(i), j,
                                           params_.functions.score, by_s);
    derivative *= by_s;
#endif
    return s;
  }
  __device__ bool shows_by_function(index_t i, index_t j) const {
#if MASK_FUNCTION
    return mask_mod<accum_t>(0, entry_, query_head_, diagonal(i), j,
                             params_.functions.mask);
#endif
    return true;
  }

  // Parts of a score, for kernels that apply them to a tile at a time.
  __device__ const bias_t* bias_at(index_t i, index_t j) const {
    return bias_ + (i * params_.bias.row + j * params_.bias.col);
  }
  __device__ const bool* mask_at(index_t i, index_t j) const {
    return mask_ + (i * params_.mask.row + j * params_.mask.col);
  }
  __device__ accum_t slope() const { return slope_; }
  // Batch entry and head as functions see them.
#if SCORE_FUNCTION || MASK_FUNCTION
  __device__ index_t entry() const { return entry_; }
  __device__ index_t query_head() const { return query_head_; }
#else
  __device__ index_t entry() const { return 0; }
  __device__ index_t query_head() const { return 0; }
#endif
  __device__ index_t diagonal(index_t i) const { return i + offset_; }

  // The sink, an extra score of row i or of every row; -inf if there is none.
  __device__ accum_t sink(index_t i = 0) const {
    if constexpr (kHasSinks) {
      return to<accum_t>(sinks_[head_ * params_.sinks.head + i * params_.sinks.row]);
    }
    return -infinity<accum_t>();
  }

  // Adds the sink to row i, with maximum m and sum l = sum exp(s - m). Rows that see
  // nothing get 0 and -inf, or the sink; padding gets 0 and -inf.
  __device__ finished_t finish(index_t i, maximum_t m, accum_t l) const {
    if (!is_query(i)) return {0, lse_of(0, 0)};
    accum_t factor = 1;
    if constexpr (kHasSinks) {
      // With split keys, only the first split adds it.
      const bool joins = !kHasParts || part_first_ == 0;
      const maximum_t sink_i = joins ? sink(i) : -infinity<accum_t>();
      const maximum_t top = larger(m, sink_i);
      auto weight = [&](maximum_t x) {
        return x == -infinity<maximum_t>() ? accum_t(0)
                                           : exp_of(static_cast<accum_t>(x - top));
      };
      factor = weight(m);
      l = l * factor + weight(sink_i);
      m = top;
    }
    return {l == 0 ? accum_t(0) : factor / l, lse_of(m, l)};
  }

 private:
  // softcap * tanh(s / softcap); its derivative is 1 - tanh^2.
  __device__ accum_t capped(accum_t s, accum_t& derivative) const {
    const accum_t cap = static_cast<accum_t>(params_.softcap);
    const accum_t tanh = step(tanh_of(step(s / cap)));
    derivative *= fma_of(-tanh, tanh, accum_t(1));
    return step(cap * tanh);
  }
  // Distance between query i and key j, for alibi.
  __device__ accum_t distance(index_t i, index_t j) const {
    const index_t x = i + offset_ - j;
    return static_cast<accum_t>(x < 0 ? -x : x);
  }
  // Whether the mask shows key j to query i. Other masks by position belong here.
  __device__ bool shows(index_t i, index_t j) const {
    if constexpr (kHasMask) {
      return mask_[i * params_.mask.row + j * params_.mask.col];
    }
    return true;
  }

  const params_t& params_;
  const bias_t* bias_;
  const bool* mask_;
  const sink_t* sinks_;  // of all heads, or from this head on
  int head_;             // relative to that
  accum_t slope_;
  index_t offset_, key_length_, query_length_, part_first_;
#if SCORE_FUNCTION || MASK_FUNCTION
  index_t entry_, query_head_;  // as functions see them
#endif
};

// SPDX-License-Identifier: MIT
// Score and mask functions on a thread's scores of a tile. The generated text is
// divided into stages (_expr/emit_stages.py): what depends on the head and on the two
// rows of a thread is computed before the loop over tiles, what depends on a column
// once for both rows.
#pragma once

#include "attention/score/score.cuh"

// Without functions all of this is empty.
#if SCORE_FUNCTION || MASK_FUNCTION
using position_t = expr::int_t;
#else
using position_t = int;
#endif
#if SCORE_FUNCTION
using score_head_t = score_mod_head<float>;
using score_query_t = score_mod_row<float>;
using score_key_t = score_mod_col<float>;
using score_diagonal_t = score_mod_diag<float>;
enum : bool { kScoreHasDerivative = score_mod_has_derivative };
#else
struct score_head_t {};
struct score_query_t {};
struct score_key_t {};
struct score_diagonal_t {};
enum : bool { kScoreHasDerivative = false };
#endif
#if MASK_FUNCTION
using mask_head_t = mask_mod_head<float>;
using mask_query_t = mask_mod_row<float>;
using mask_key_t = mask_mod_col<float>;
using mask_diagonal_t = mask_mod_diag<float>;
#else
struct mask_head_t {};
struct mask_query_t {};
struct mask_key_t {};
struct mask_diagonal_t {};
#endif

// What the functions precompute for a head, a query and a key.
struct function_head_t {
  position_t b, h;
  score_head_t score;
  mask_head_t mask;
};
struct function_query_t {
  position_t i;  // position on the axis of keys
  score_query_t score;
  mask_query_t mask;
};
struct function_key_t {
  position_t j;
  score_key_t score;
  mask_key_t mask;
};

// The distance query - key, as an integer and as a float.
struct function_diagonal_t {
  int apart;
  float apart_float;
  score_diagonal_t score;
  mask_diagonal_t mask;
};

class score_function_t {
 public:
  __device__ __forceinline__ explicit score_function_t(const params_t& params)
      : params_(params) {}

  template <bool kScore = true, bool kMask = true>
  __device__ __forceinline__ function_head_t of_head(index_t b, index_t h) const {
    function_head_t head;
    head.b = static_cast<position_t>(b);
    head.h = static_cast<position_t>(h);
#if SCORE_FUNCTION
    if constexpr (kScore) {
      head.score = score_mod_of_head<float>(head.b, head.h, params_.functions.score);
    }
#endif
#if MASK_FUNCTION
    if constexpr (kMask) {
      head.mask = mask_mod_of_head<float>(head.b, head.h, params_.functions.mask);
    }
#endif
    return head;
  }
  template <bool kScore = true, bool kMask = true>
  __device__ __forceinline__ function_query_t of_query(const function_head_t& head,
                                                       index_t i) const {
    function_query_t query;
    query.i = static_cast<position_t>(i);
#if SCORE_FUNCTION
    if constexpr (kScore) {
      query.score = score_mod_of_row<float>(head.score, head.b, head.h, query.i,
                                            params_.functions.score);
    }
#endif
#if MASK_FUNCTION
    if constexpr (kMask) {
      query.mask = mask_mod_of_row<float>(head.mask, head.b, head.h, query.i,
                                          params_.functions.mask);
    }
#endif
    return query;
  }
  template <bool kScore = true, bool kMask = true>
  __device__ __forceinline__ function_key_t of_key(const function_head_t& head,
                                                   index_t j) const {
    function_key_t key;
    key.j = static_cast<position_t>(j);
#if SCORE_FUNCTION
    if constexpr (kScore) {
      key.score = score_mod_of_col<float>(head.score, head.b, head.h, key.j,
                                          params_.functions.score);
    }
#endif
#if MASK_FUNCTION
    if constexpr (kMask) {
      key.mask = mask_mod_of_col<float>(head.mask, head.b, head.h, key.j,
                                        params_.functions.mask);
    }
#endif
    return key;
  }

  template <bool kScore = true, bool kMask = true>
  __device__ __forceinline__ function_diagonal_t
  of_diagonal(const function_head_t& head, int apart, float apart_float) const {
    function_diagonal_t diagonal;
    diagonal.apart = apart;
    diagonal.apart_float = apart_float;
#if SCORE_FUNCTION
    if constexpr (kScore) {
      diagonal.score = score_mod_of_diag<float>(head.score, head.b, head.h, apart,
                                                apart_float, params_.functions.score);
    }
#endif
#if MASK_FUNCTION
    if constexpr (kMask) {
      diagonal.mask = mask_mod_of_diag<float>(head.mask, head.b, head.h, apart,
                                              apart_float, params_.functions.mask);
    }
#endif
    return diagonal;
  }

  // The score of one pair.
  __device__ __forceinline__ float score(float s, const function_head_t& head,
                                         const function_query_t& query,
                                         const function_key_t& key,
                                         const function_diagonal_t& diagonal) const {
#if SCORE_FUNCTION
    return score_mod_at<float>(s, query.i, key.j, diagonal.apart, diagonal.apart_float,
                               head.b, head.h, head.score, query.score, key.score,
                               diagonal.score, params_.functions.score);
#else
    return s;
#endif
  }
  // The same, and its derivative with respect to s.
  __device__ __forceinline__ float score(float s, const function_head_t& head,
                                         const function_query_t& query,
                                         const function_key_t& key,
                                         const function_diagonal_t& diagonal,
                                         float& derivative) const {
#if SCORE_FUNCTION
    return score_mod_at_with_derivative<float>(
        s, query.i, key.j, diagonal.apart, diagonal.apart_float, head.b, head.h,
        head.score, query.score, key.score, diagonal.score, params_.functions.score,
        derivative);
#else
    derivative = 1;
    return s;
#endif
  }
  // Whether the mask function shows the key to the query.
  __device__ __forceinline__ bool shows(const function_head_t& head,
                                        const function_query_t& query,
                                        const function_key_t& key,
                                        const function_diagonal_t& diagonal) const {
#if MASK_FUNCTION
    return mask_mod_at<float>(0.f, query.i, key.j, diagonal.apart, diagonal.apart_float,
                              head.b, head.h, head.mask, query.mask, key.mask,
                              diagonal.mask, params_.functions.mask);
#else
    return true;
#endif
  }

 private:
  const params_t& params_;
};

// SPDX-License-Identifier: MIT
// The options of a call. The host defines those that it has, arrays by their type and
// others as 1; the rest become `void` here, and each gets a constant.
#pragma once

#include "common/types.cuh"

#ifndef BIAS_T
#define BIAS_T void
#endif
#ifndef SINKS_T
#define SINKS_T void
#endif
#ifndef ALIBI_SLOPES_T
#define ALIBI_SLOPES_T void
#endif
#ifndef QUERY_OFFSETS_T
#define QUERY_OFFSETS_T void
#endif
#ifndef QUERY_LENGTHS_T
#define QUERY_LENGTHS_T void
#endif
#ifndef KEY_LENGTHS_T
#define KEY_LENGTHS_T void
#endif

template <typename T> struct option_t {
  using type = T;
  static constexpr bool kIsGiven = true;
};
template <> struct option_t<void> {
  using type = char;  // of an absent array
  static constexpr bool kIsGiven = false;
};

using bias_t = option_t<BIAS_T>::type;
using sink_t = option_t<SINKS_T>::type;
using slope_t = option_t<ALIBI_SLOPES_T>::type;
using query_offset_t = option_t<QUERY_OFFSETS_T>::type;
using query_length_t = option_t<QUERY_LENGTHS_T>::type;
using key_length_t = option_t<KEY_LENGTHS_T>::type;
constexpr bool kHasBias = option_t<BIAS_T>::kIsGiven;
constexpr bool kHasSinks = option_t<SINKS_T>::kIsGiven;
constexpr bool kHasAlibi = option_t<ALIBI_SLOPES_T>::kIsGiven;
constexpr bool kHasQueryOffsets = option_t<QUERY_OFFSETS_T>::kIsGiven;
constexpr bool kHasQueryLengths = option_t<QUERY_LENGTHS_T>::kIsGiven;
constexpr bool kHasKeyLengths = option_t<KEY_LENGTHS_T>::kIsGiven;
constexpr bool kHasMask = IS_GIVEN(MASK);
constexpr bool kHasSoftcap = IS_GIVEN(SOFTCAP);
// See functions.cuh. An enum needs no storage, which would appear in all kernels.
enum : bool {
  kHasScoreFunction = IS_GIVEN(SCORE_FUNCTION),
  kHasMaskFunction = IS_GIVEN(MASK_FUNCTION)
};
constexpr bool kHasParts =
    IS_GIVEN(KEY_PARTS);  // splits of the keys are an axis of the batch
constexpr bool kRoundSteps = IS_GIVEN(ROUND_STEPS);  // to elem_t (the naive kernel)

// What kernels need to know about options that change scores. A new option is added
// here and in scores_t::with_derivative().
// The score is more than scale * q.k.
constexpr bool kChangesScores = kHasSoftcap || kHasBias || kHasAlibi || kHasMask ||
                                kHasScoreFunction || kHasMaskFunction;
// Its derivative with respect to scale * q.k is not always 1.
constexpr bool kHasDerivative = kHasSoftcap || kHasScoreFunction;
// A key may be hidden although the position bounds of the query allow it.
constexpr bool kHidesKeys =
    kHasMask || kHasBias || kHasScoreFunction || kHasMaskFunction;
// The score is scale * q.k + bias.
constexpr bool kAddsBiasAlone = kHasBias && !kHasSoftcap && !kHasAlibi && !kHasMask &&
                                !kHasScoreFunction && !kHasMaskFunction;

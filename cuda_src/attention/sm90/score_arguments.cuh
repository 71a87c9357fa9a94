// SPDX-License-Identifier: MIT
// SCORE_ARGUMENTS as one struct, for functions that need all of them.
#pragma once

#include "attention/score/score.cuh"
#include "attention/sm90/score_function.cuh"
#include "ptx/opaque.cuh"

struct score_arguments_t {
  const params_t& params;
  const bias_t* bias;
  const bool* mask;
  const sink_t* sinks;
  const slope_t* alibi_slopes;
  const query_offset_t* query_offsets;
  const query_length_t* query_lengths;
  const key_length_t* key_lengths;
  index_t query_offset;

  __device__ __forceinline__ scores_t scores_of(const tile_coord_t& at) const {
    return scores_t(at, SCORE_ARGUMENTS);
  }
  __device__ __forceinline__ score_function_t function() const {
    return score_function_t(params);
  }
  // The same arguments, reloaded: the compiler cannot reuse earlier computations.
  __device__ __forceinline__ score_arguments_t reloaded() const {
    return {ptx::reload(params), bias,          mask,        sinks,       alibi_slopes,
            query_offsets,       query_lengths, key_lengths, query_offset};
  }
};

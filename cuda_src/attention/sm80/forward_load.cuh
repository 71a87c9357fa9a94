// SPDX-License-Identifier: MIT
// attention_mma: loads of q, k and v.
#pragma once

#include "attention/sm80/forward_state.cuh"

// The rows of k or v.
struct source_t {
  const elem_t* rows;
  bool aligned;
  int last;
};

class loader_t {
 public:
  const params_t& params;
  const smem_t smem;
  block_state_t& state;
  // For float32. The 16-bit loop has no registers for these: it reads the state.
  const elem_t *k_rows, *v_rows;
  bool aligned_k, aligned_v;
  int dim, dim_v;
  int first, last;  // keys of the work tile

  // The stage of the tile at key j0.
  static __device__ __forceinline__ int stage_of(int j0) {
    return kStages == 2 ? j0 / kBlockN % 2 : 0;
  }

  __device__ __forceinline__ source_t source_k() const {
    if constexpr (kSplits) return {k_rows, aligned_k, last};
    return {reload_state(state).k_rows, reload_state(state).has_aligned_k(), last};
  }
  __device__ __forceinline__ source_t source_v() const {
    if constexpr (kSplits) return {v_rows, aligned_v, last};
    return {reload_state(state).v_rows, reload_state(state).has_aligned_v(), last};
  }

  __device__ __forceinline__ void load_q(const work_tile_t& work, bool aligned) const {
    copy_tile<kBlockM, kHeadDim>(smem.q, work.q_rows, params.q.row, 0, work.num_rows,
                                 dim, aligned);
  }
  __device__ __forceinline__ void load_k(int j0, source_t source) const {
    const int tile = j0 / kBlockN, stage = stage_of(j0);
    if (j0 < source.last) {
      if constexpr (kPrepared) {
        copy_operand<kBytesOperandK>(
            smem.k + stage * kStage,
            reload_state(state).operands + index_t(tile) * kBytesOperands);
      } else if constexpr (!kSplits) {
        copy_tile<kBlockN, kHeadDim>(smem.k + stage * kStage, source.rows, params.k.row,
                                     j0, source.last, dim, source.aligned);
      } else {
        load_tile<kBlockN, kHeadDim>(kStaged ? smem.staging_k : smem.k + stage * kStage,
                                     source.rows + j0 * params.k.row, params.k.row,
                                     last - j0, dim, source.aligned, place<kHeadDim>);
      }
    }
    ptx::commit_copies();
  }
  __device__ __forceinline__ void load_v(int j0, source_t source) const {
    const int tile = j0 / kBlockN, stage = stage_of(j0);
    if (j0 < source.last) {
      if constexpr (kPrepared) {
        copy_operand<kBytesOperandV>(smem.v + stage * kStage,
                                     reload_state(state).operands +
                                         index_t(tile) * kBytesOperands +
                                         kBytesOperandK);
      } else if constexpr (!kSplits) {
        copy_tile<kBlockN, kHeadDimV>(smem.v + stage * kStage, source.rows,
                                      params.v.row, j0, source.last, dim_v,
                                      source.aligned);
      } else {
        load_tile<kBlockN, kHeadDimV>(
            kStaged ? smem.staging_v : smem.v + stage * kStage,
            source.rows + j0 * params.v.row, params.v.row, last - j0, dim_v,
            source.aligned, place<kHeadDimV>);
      }
    }
    ptx::commit_copies();
  }

  // The first loads of a pass over 16-bit tiles.
  __device__ __forceinline__ void begin(const work_tile_t& work, bool aligned_q,
                                        const elem_t* k_rows, bool aligned_k,
                                        const elem_t* v_rows, bool aligned_v,
                                        bool with_q = true) const {
    if (with_q) load_q(work, aligned_q);
    load_k(work.first, {k_rows, aligned_k, work.last});
    load_v(work.first, {v_rows, aligned_v, work.last});
  }

  // Prepares copies that the 16-bit loop issues after a barrier: the addresses are
  // computed while other warps still arrive there.
  __device__ __forceinline__ auto ready_k(int j0) const {
    const block_state_t& with = reload_state(state);
    return copy_t<kBlockN, kHeadDim>(smem.k + stage_of(j0) * kStage, with.k_rows,
                                     params.k.row, j0, last, dim, with.has_aligned_k());
  }
  __device__ __forceinline__ auto ready_v(int j0) const {
    const block_state_t& with = reload_state(state);
    return copy_t<kBlockN, kHeadDimV>(smem.v + stage_of(j0) * kStage, with.v_rows,
                                      params.v.row, j0, last, dim_v,
                                      with.has_aligned_v());
  }
  __device__ __forceinline__ void start_k(const copy_t<kBlockN, kHeadDim>& copy,
                                          int j0) const {
    if (!copy.is_ready) {
      load_k(j0, source_k());
      return;
    }
    if (j0 < last) copy.start(params.k.row);
    ptx::commit_copies();
  }
  __device__ __forceinline__ void start_v(const copy_t<kBlockN, kHeadDimV>& copy,
                                          int j0) const {
    if (!copy.is_ready) {
      load_v(j0, source_v());
      return;
    }
    if (j0 < last) copy.start(params.v.row);
    ptx::commit_copies();
  }

 private:
  template <int kDim>
  static __device__ __forceinline__ unsigned place(int row, int chunk) {
    if constexpr (kSplits) return staging_t<kDim>::offset(row, chunk);
    return tile_t<kDim>::offset(row, chunk);
  }
};

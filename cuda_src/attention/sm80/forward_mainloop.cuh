// SPDX-License-Identifier: MIT
// attention_mma: the loop over the keys of a work tile.
#pragma once

#include "attention/sm80/forward_load.cuh"
#include "attention/sm80/forward_scores.cuh"
#include "attention/sm80/nonfinite_values.cuh"

class mainloop_t : public loader_t {
 public:
  lanes_t lanes;
  unsigned base_k, base_v;
  const scores_t& scores;
  index_t i0;     // with score options, there is one work tile per block
  float to_log2;  // from scores to exponents of 2
  int num_tiles;
  shown_tiles_t<kBlockN> tiles;

  __device__ __forceinline__ mainloop_t(const loader_t& loader, const scores_t& scores,
                                        int i0, float to_log2, int num_tiles,
                                        const shown_tiles_t<kBlockN>& tiles)
      : loader_t(loader),
        lanes(shared_address(smem.q), shared_address(smem.k), shared_address(smem.v),
              shared_address(smem.p)),
        base_k(lanes.k.base),
        base_v(lanes.v.base),
        scores(scores),
        i0(i0),
        to_log2(to_log2),
        num_tiles(num_tiles),
        tiles(tiles) {}

  // Reloaded, or the loop would recompute it for each tile.
  __device__ __forceinline__ const block_bounds_t& bounds() const {
    return reload_state(state).work.block;
  }
  // The first key; in a register only where each tile checks whether it is the first.
  __device__ __forceinline__ int start() const {
    return kWeighsAtOnce ? first : reload_state(state).work.first;
  }
  // Shared rows have two stages of weights, by parity of the tile.
  static __device__ __forceinline__ int weights_of(int j0) { return j0 / kBlockN % 2; }
  // Moves the operand address of the products to the next stage of weights.
  __device__ __forceinline__ void move_weights(int from, int to) {
    lanes.p.base += ((to ^ 1) - from) * kBytesP;
  }

  __device__ __forceinline__ void reset(const result_t& at) const {
    at.rows = softmax_t();
    at.two_level.begin();
    if (at.careful) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (at.centers.has(r)) at.rows.reference[r] = -kShift;
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) at.o[m][n][e] = 0;
      }
    }
  }

  // Loads q, and the first tiles of k and v unless they are already in flight.
  __device__ __forceinline__ void load_first(queries_t<kKeepQ>& q_frags,
                                             split_queries_t& q, const result_t& at) {
    if constexpr (kStaged) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int n = 0; n < 4; ++n) smem.stats_k[n].clear();
      }
    }
    if constexpr (kSplits) {
      if (threadIdx.x == 0) *smem.largest_q = 0;
      load_k(start(), source_k());
      if (kStaged || kStages == 2) load_v(start(), source_v());
      __syncthreads();  // the statistics are cleared
      q.size = split_q(smem.q, smem.largest_q, reload_state(state).work.q_rows,
                       params.q.row, reload_state(state).work.num_rows, dim,
                       reload_state(state).has_aligned_q(), q.unit);
      if (kWide && threadIdx.x == 0) state.split_q = q;
    } else {
      if (at.careful) {
        if (kOutByP && at.begun) {  // too early
          ptx::wait_copy_groups<0>();
          __syncthreads();
          at.begun = false;
        }
        const block_state_t& with = reload_state(state);
        begin(with.work, with.has_aligned_q(), with.k_rows, with.has_aligned_k(),
              with.v_rows, with.has_aligned_v());
      }
      if constexpr (kKeepQ) {
        ptx::wait_copy_groups<1>();
        __syncthreads();  // q has arrived
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          ::load_q(q_frags.a[step], lanes, step);
        }
      }
    }
  }

  // --- rows shared by two warps ------------------------------------------------------

  // The weights of a tile overlap with the product of the previous one with v.
  __device__ __forceinline__ void attend_shared_rows(const queries_t<kKeepQ>& q_frags,
                                                     const result_t& at) {
    __syncthreads();  // the state is stored
    scores_frag_t s;
    float sums[kRows];
    // The first tile has no reference yet.
    bool again = true, is_first = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = infinity<float>();
#pragma unroll 1
    for (int j0 = reload_state(state).work.first; j0 < last; j0 += kBlockN) {
      const auto next_v = ready_v(j0);
      const auto next_k = ready_k(j0 + 2 * kBlockN);
      const bool sees_next = bounds().sees_all(j0 + kBlockN);
      if (is_first) {
        ptx::wait_copy_groups<1>();
      } else {
        ptx::wait_copy_groups<0>();
      }
      // The weights of this tile are complete, the next tile of k has arrived, and all
      // warps have read the previous ones.
      if (__syncthreads_or(again)) weigh_again(s, sums, q_frags, at, j0, is_first);
      add(at.rows, sums);
      if (!is_first) start_v(next_v, j0);
      is_first = false;
      if (at.careful) {
        ptx::wait_copy_groups<0>();
        __syncthreads();  // v has arrived
        if (clean_values(smem.v)) state.special = true;
        __syncthreads();  // all warps have scrubbed their part
      }
      lanes.p.base += weights_of(j0) ? kBytesP : 0 - kBytesP;
      const int next = j0 + kBlockN;
      if (next < last) {
        multiply_qk(s, q_frags, lanes);
        ptx::wait_copy_groups<0>();
        __syncthreads();  // v has arrived; all warps have read k
        start_k(next_k, j0 + 2 * kBlockN);
        if (at.careful) {
          multiply_pv(at.o, s, lanes);
          if (!sees_next) mask_scores(s, bounds(), next);
          center(s, at.o, at.rows, at.centers, *smem.exchange, to_log2, next);
          weigh(at.rows, s, to_log2, sums);
        } else {
          if (!sees_next) mask_scores(s, bounds(), next);
          weigh_and_multiply(at.rows, s, to_log2, sums, at.o, lanes);
        }
        store_weights(s, next);
      } else {
        finish_shared_rows(s, at);
      }
      again = !are_small(sums);
    }
    const int start = reload_state(state).work.first;
    if (start < last) move_weights(weights_of(last - 1), weights_of(start));
  }

  // Recomputes the tile at j0 with a new reference; its keys are loaded again.
  __device__ __forceinline__ void weigh_again(scores_frag_t& s, float (&sums)[kRows],
                                              const queries_t<kKeepQ>& q_frags,
                                              const result_t& at, int j0,
                                              bool is_first) {
    if (!is_first) {
      load_k(j0, source_k());
      ptx::wait_copy_groups<0>();
      __syncthreads();
    }
    multiply_qk(s, q_frags, lanes);
    if (!bounds().sees_all(j0)) mask_scores(s, bounds(), j0);
    if (at.careful) {
      center(s, at.o, at.rows, at.centers, *smem.exchange, to_log2, j0);
    }
    raise_shared(at.rows, s, *smem.exchange, to_log2, sums);
    rescale(at.o, at.rows);
    weigh(at.rows, s, to_log2, sums);
    store_weights(s, j0);
    __syncthreads();  // all warps have read k
    load_k(j0 + kBlockN, source_k());
    ptx::wait_copy_groups<0>();
    __syncthreads();
  }

  __device__ __forceinline__ void store_weights(const scores_frag_t& s, unsigned j0) {
    ptx::launder(j0);
    put_weights(smem.p + j0 / kBlockN % 2 * kBytesP, s);
  }

  // The last product with v. q and k are free: loads those of the next work tile.
  __device__ __forceinline__ void finish_shared_rows(const scores_frag_t& s,
                                                     const result_t& at) {
    if constexpr (kOutByP) {
      if (!at.careful) {
        const block_state_t& with = reload_state(state);
        const int query = query_of_turn(with.turn + 1, num_tiles);
        if (query >= 0) {
          const work_tile_t work(with.head, with.q_head, params.q.row, query);
          load_q(work, with.has_aligned_q());
          load_k(work.first, {with.k_rows, with.has_aligned_k(), work.last});
          at.begun = true;
        }
      }
      if (!at.begun) ptx::commit_copies();
      ptx::wait_copy_groups<1>();
      __syncthreads();  // v has arrived
    } else {
      ptx::wait_copy_groups<0>();
      __syncthreads();  // v has arrived
    }
    multiply_pv(at.o, s, lanes);
  }

  // --- rows owned by one warp --------------------------------------------------------

  __device__ __forceinline__ void attend(const queries_t<kKeepQ>& q_frags,
                                         const split_queries_t& q, const result_t& at) {
    bool is_first = true;
    float unit_o = 1;  // factor from products of parts to p v
#pragma unroll 1
    for (int j0 = start(); j0 < last; j0 += tiles.distance) {
      scores_frag_t s;
      const bool is_shown = find_following(j0);
      const int tile = j0 / kBlockN, stage = stage_of(j0);
      const tile_stats_t* of_k =
          reinterpret_cast<tile_stats_t*>(smem.k + stage * kStage + kParts * kBytesK);
      const tile_stats_t* of_v =
          reinterpret_cast<tile_stats_t*>(smem.v + stage * kStage + kParts * kBytesV);
      // Computed before a barrier, like addresses of copies. Parts leave no register.
      const bool sees_all = !kSplits && bounds().sees_all(j0);
      if constexpr (kStaged) {
        of_k = smem.stats_k + tile % 2;
        of_v = smem.stats_v + tile % 2;
        split_staged(j0);
      } else {
        await_tile(j0, is_first);
      }
      is_first = false;

      if constexpr (kSplits) {
        multiply_qk_parts(s, q_frags, q, *of_k, at, j0);
      } else if constexpr (!kWeighsAtOnce) {
        multiply_qk(s, q_frags, lanes);
      }
      if constexpr (kWeighsAtOnce) {
        weigh_at_once(s, q_frags, at, j0, sees_all);
      } else {
        if (kHasMaskFunction && is_shown) {
          finish_scores<true>(s, scores, params, i0, j0);
        } else {
          finish_scores<false>(s, scores, params, i0, j0);
        }
        if (!(kSplits ? bounds().sees_all(j0) : sees_all)) {
          mask_scores(s, bounds(), j0);
        }
        if (at.careful) {
          center(s, at.o, at.rows, at.centers, *smem.exchange, to_log2, j0);
          at.two_level.follow(at.rows);
        }
        if (raise(at.rows, s, to_log2)) {
          rescale(at.o, at.rows);
          at.two_level.follow(at.rows);
        }
      }
      await_values(j0);
      if constexpr (kSplits) {
        add_values_in_parts(s, *of_v, at, j0, unit_o);
      } else {
        if (at.careful) {
          if (clean_values(smem.v + stage * kStage)) state.special = true;
          __syncthreads();  // all warps have scrubbed their part
        }
        if constexpr (!kWeighsAtOnce) exponentiate(at.rows, s, to_log2);
        multiply_pv(at.o, s, lanes);
      }
    }
    if constexpr (kSplits && kParts == 1) multiply_by(at.o, unit_o);
  }

  // Finds the tile after j0 that a mask function does not hide; returns whether the
  // function shows all of this one.
  __device__ __forceinline__ bool find_following(int j0) {
    if constexpr (kHasMaskFunction) {
      const bool is_shown = tiles.is_whole(j0);
      constexpr bool kInTurn = kStages == 2 || kStaged;
      tiles.step<kInTurn>(j0, last, shown_to(scores, params, i0));
      return is_shown;
    }
    return false;
  }

  // Splits the staged float32 tile at j0, then loads the next one.
  __device__ __forceinline__ void split_staged(int j0) {
    ptx::wait_copy_groups<0>();
    const int parity = j0 / kBlockN % 2;
    auto chunk_of_k = [&](int n) {
      return *reinterpret_cast<const float4*>(smem.staging_k + n * 16);
    };
    auto chunk_of_v = [&](int n) {
      return *reinterpret_cast<const float4*>(smem.staging_v + n * 16);
    };
    inspect<kHeadDim>(smem.stats_k[parity], chunk_of_k);
    inspect<kHeadDimV>(smem.stats_v[parity], chunk_of_v);
    __syncthreads();  // the statistics are complete; the previous tiles have been read
    if (threadIdx.x == 0) {
      smem.stats_k[parity ^ 1].clear();
      smem.stats_v[parity ^ 1].clear();
    }
    split_tile<kHeadDim>(smem.k, scale_t(smem.stats_k[parity].largest).to_parts,
                         chunk_of_k);
    split_tile<kHeadDimV>(smem.v, values_t(smem.stats_v[parity]).to_parts, chunk_of_v);
    load_k(j0 + tiles.distance, source_k());
    load_v(j0 + tiles.distance, source_v());
    __syncthreads();  // the parts of k and v are complete
  }

  // Waits for the tile at j0 (with one stage, for its k), then starts the next loads.
  __device__ __forceinline__ void await_tile(int j0, bool is_first) {
    const unsigned stage = stage_of(j0) * kStage;
    if constexpr (kSplits) {
      ptx::wait_copy_groups<0>();
      // All warps have also read the previous tile, or with one stage its v.
      __syncthreads();
      if constexpr (kStages == 2) {
        load_k(j0 + tiles.distance, source_k());
        load_v(j0 + tiles.distance, source_v());
        lanes.k.base = base_k + stage;
        lanes.v.base = base_v + stage;
      } else {
        load_v(j0, source_v());
      }
    } else if constexpr (kStages == 2) {
      const int next = j0 + tiles.distance;
      const auto next_k = ready_k(next);
      const auto next_v = ready_v(next);
      ptx::wait_copy_groups<0>();
      __syncthreads();  // this tile has arrived; the previous one has been read
      start_k(next_k, next);
      start_v(next_v, next);
      lanes.k.base = base_k + stage;
      lanes.v.base = base_v + stage;
    } else {
      const auto this_v = ready_v(j0);
      ptx::wait_copy_groups<0>();
      __syncthreads();  // this tile of k has arrived; the previous v has been read
      if (!is_first) start_v(this_v, j0);
    }
  }

  // With one stage: waits for v of the tile at j0, then loads the next k.
  __device__ __forceinline__ void await_values(int j0) {
    if constexpr (!kSplits && kStages == 1) {
      const auto next_k = ready_k(j0 + tiles.distance);
      ptx::wait_copy_groups<0>();
      __syncthreads();  // this tile of v has arrived; all warps have read k
      start_k(next_k, j0 + tiles.distance);
    } else if constexpr (!kStaged && kStages == 1) {
      ptx::wait_copy_groups<0>();
      __syncthreads();  // this tile of v has arrived; all warps have read k
      load_k(j0 + tiles.distance, source_k());
    }
  }

  // s = q k^T from parts; scores that parts cannot represent are computed one by one.
  __device__ __forceinline__ void multiply_qk_parts(scores_frag_t& s,
                                                    const queries_t<kKeepQ>& q_frags,
                                                    const split_queries_t& split_q,
                                                    const tile_stats_t& of_k,
                                                    const result_t& at, int j0) {
    const split_queries_t& q = kWide ? reload_state(state).split_q : split_q;
    const scale_t scale(of_k.largest);
    const float unit = q.unit * scale.from_parts;
    if constexpr (kWide) {
      multiply_qk_wide(s, smem.q, smem.k + stage_of(j0) * kStage, unit);
    } else if constexpr (kParts == 2) {
      multiply_qk_split(s, lanes, unit);
    } else {
      multiply_qk(s, q_frags, lanes);
      multiply_by(s, unit);
    }
    const float size = q.size * __int_as_float(of_k.largest) *
                       fabsf(static_cast<float>(params.scale)) * kHeadDim;
    const bool whole = !scale.fits || !(size <= kLargestScore);
    if (whole || any_marked(of_k)) {
      float s_on_stack[kRowTiles * kScoreTiles * 4];
      float o_on_stack[kRowTiles * kOutTiles * 4];
      put<kScoreTiles>(s_on_stack, s);
      put<kOutTiles>(o_on_stack, at.o);
      ptx::launder(o_on_stack);
      compute_marked_scores(s_on_stack, of_k.marked, whole, state.work.q_rows,
                            state.k_rows, params, state.work.num_rows, j0);
      ptx::launder(o_on_stack);
      get<kScoreTiles>(s, s_on_stack);
      get<kOutTiles>(at.o, o_on_stack);
    }
  }

  // o += p v from parts; with one part o is kept in the unit of the tile.
  __device__ __forceinline__ void add_values_in_parts(scores_frag_t& s,
                                                      const tile_stats_t& of_v,
                                                      const result_t& at, int j0,
                                                      float& unit_o) {
    const values_t values(of_v);
    if constexpr (kParts == 1) {
      if (values.from_parts != unit_o) {
        multiply_by(at.o, unit_o * values.to_unit);
        unit_o = values.from_parts;
      }
    }
    if (values.whole || any_marked(of_v)) {
      float o_on_stack[kRowTiles * kOutTiles * 4];
      float s_on_stack[kRowTiles * kScoreTiles * 4], reference[kRows];
      put<kOutTiles>(o_on_stack, at.o);
      put<kScoreTiles>(s_on_stack, s);
#pragma unroll
      for (int r = 0; r < kRows; ++r) reference[r] = at.rows.reference[r];
      add_marked_values(o_on_stack, s_on_stack, reference, to_log2,
                        kParts == 1 ? values.to_unit : 1.f, of_v.marked, values.whole,
                        state.v_rows, params, j0, last);
      ptx::launder(s_on_stack);
      get<kScoreTiles>(s, s_on_stack);
      get<kOutTiles>(at.o, o_on_stack);
    }
    exponentiate(at.rows, s, to_log2);
    if constexpr (kParts == 2) {
      if constexpr (kWide) {
        multiply_pv_wide(at.o, s, smem.v + stage_of(j0) * kStage, values.from_parts);
      } else {
        multiply_pv_split(at.o, s, lanes, values.from_parts);
      }
      at.two_level.end_tile(at.o, j0, j0 + tiles.distance, last);
    } else {
      multiply_pv(at.o, s, lanes);
    }
  }

  // Computes weights with the current reference, and again with a new one if a weight
  // came out too large.
  __device__ __forceinline__ void weigh_at_once(scores_frag_t& s,
                                                const queries_t<kKeepQ>& q_frags,
                                                const result_t& at, int j0,
                                                bool sees_all) {
    float sums[kRows];
    // The same code twice: without masks there is no branch, and the compiler
    // interleaves exponentials with products.
    if (sees_all && j0 != first && !at.careful) {
      multiply_qk(s, q_frags, lanes);
      weigh(at.rows, s, to_log2, sums);
    } else {
      ptx::compiler_fence();
      multiply_qk(s, q_frags, lanes);
      if (!sees_all) mask_scores(s, bounds(), j0);
      if (at.careful) {
        center(s, at.o, at.rows, at.centers, *smem.exchange, to_log2, j0);
      }
      if (j0 == first) {
        // With the initial reference all sums would be too large.
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r] = infinity<float>();
        raise_where(at.rows, s, to_log2, sums);
      }
      weigh(at.rows, s, to_log2, sums);
    }
    if (__any_sync(kFullMask, !are_small(sums))) {
      multiply_qk(s, q_frags, lanes);
      if (!bounds().sees_all(j0)) mask_scores(s, bounds(), j0);
      if (at.careful) {
        center(s, at.o, at.rows, at.centers, *smem.exchange, to_log2, j0);
      }
      raise_where(at.rows, s, to_log2, sums);
      rescale(at.o, at.rows);
      weigh(at.rows, s, to_log2, sums);
    }
    add(at.rows, sums);
  }

  // --- the end of the keys -----------------------------------------------------------

  // Reduces the sums over the lanes, and warps, that share rows.
  __device__ __forceinline__ void finish_sums(const result_t& at) const {
    at.two_level.finish(at.o);
    float l[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      l[r] = at.rows.l[r] + at.rows.rest[r];
      l[r] += shuffle_xor(l[r], 1);
      l[r] += shuffle_xor(l[r], 2);
    }
    if constexpr (kWarpsPerRow > 1) add_other_warp(*smem.exchange, l);
#pragma unroll
    for (int r = 0; r < kRows; ++r) at.rows.l[r] = l[r];
    if (!kOutByP || !at.begun) ptx::wait_copy_groups<0>();
  }

  // Loads the next work tile while this one is stored through `smem_out`; i0 < 0 if
  // there is none.
  __device__ __forceinline__ work_tile_t begin_next(unsigned char*& smem_out,
                                                    const result_t& at) const {
    smem_out = smem.front;
    work_tile_t next;
    next.i0 = -1;
    if constexpr (kPersistent) {
      const int query = query_of_turn(state.turn + 1, num_tiles);
      next = work_tile_t(state.head, state.q_head, params.q.row, query);
      smem_out = kOutByQ     ? smem.q
                 : kOutByP   ? smem.p
                 : kOutApart ? smem.front + kBytesTiles
                             : smem.k + (stage_of(next.first) ^ 1) * kStage;
      if (next.i0 >= 0) {
        if (kOutByP && at.begun) {
          load_v(next.first, {state.v_rows, state.has_aligned_v(), next.last});
        } else {
          begin(next, state.has_aligned_q(), state.k_rows, state.has_aligned_k(),
                state.v_rows, state.has_aligned_v(), !kOutByQ);
        }
      }
    }
    return next;
  }

  // Continues with work tile `next`.
  __device__ __forceinline__ void advance(const work_tile_t& next) {
    if constexpr (kWarpsPerRow > 1) {
      // Weights start in the other stage.
      const int by = weights_of(next.first) - weights_of(state.work.first);
      lanes.p.base -= by * kBytesP;
    }
    first = next.first;
    last = next.last;
    __syncthreads();  // this tile of queries is stored and no longer needed
    if constexpr (kOutByQ) {
      load_q(next, state.has_aligned_q());
      ptx::commit_copies();
      ptx::wait_copy_groups<0>();
    }
    if (threadIdx.x == 0) {
      state.work = next;
      state.turn += 1;
      state.special = false;
    }
  }
};

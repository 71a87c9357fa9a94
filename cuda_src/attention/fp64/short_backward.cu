// SPDX-License-Identifier: MIT
// attention_vjp_short_f64: all gradients of float64 for entries with few keys, in one
// launch. A block keeps the keys of an entry and loops over its queries.
//
// Algorithm  A team of kTeam warps takes tiles of 16 kTeam queries in turn. Of 16 of
//            them, a warp computes
//                S = score(q k^T),  P = exp(S - lse) factor,  dP = dO v^T
//                delta = rowsum P dP - dlse,  dS = P (dP - delta) score'(q k^T)
//            which sees all keys: so the factor with which P sums to 1 is known at once
//            (backward_row.cuh). Where lse covers keys of other calls, delta is
//            sum(dO * out) - dlse. Then each warp adds the products of all queries of
//            the tile to some columns of
//                dv += P^T dO,  dk += scale dS^T q
//            which stay in registers, and computes dq = scale dS k of its own 16,
//            while those of the next tile are on their way
// Grid       1-D, one block per entry of k and v that is not shared; with LOOP_SPLITS,
//            several share its queries
// Shared     k, v    kBlockN x kDim  once
//            q, dO   16 x kDim       of each warp
//            P, dS   kBlockN x 16    of each warp, transposed
// Memory     global: each array once, except out, which is read where lse covers keys
//            of other calls
// Numbers    all in float64; the products of 16 queries are summed on their own before
//            they are added to dk and dv. A fixed order of sums: the same bits in every
//            run. Hidden keys weigh 0: after 0 * NaN in a gradient the block starts
//            again with such values set to 0; if something that is seen is not finite,
//            `found` asks for the fallback, which reads delta
// Limits     kBlockN keys; head dimensions up to kDim
#include "attention/fp64/short_block.cuh"

constexpr int kBlockM = kTeam * kWarpRows;  // queries of a tile
constexpr int kJobs = 2 * kChunks / kTeam;  // chunks of dv and dk of a warp
static_assert(kDim % 32 == 0 && kBlockN % 16 == 0 && kWarps % kTeam == 0);
static_assert(kTeam == 1 || kChunks % kJobs == 0);

// Numbers in shared memory.
constexpr int kWarpNumbers = 2 * (kRowsSize + kWeightsSize);
static_assert(kTeam * kWarpNumbers >= 2 * kKeysSize);

using sums_t = sum_t[kJobs];

struct block_t {
  offsets_t<3> kept;           // offsets of the entry in the gradients
  unsigned odd_keys[kStepsN];  // bit n: key n of 16 has a number that is not finite
  exp2_table_t exp2;
  tile_t warps[kWarps];  // 16 queries each
};

// q, dO, P and dS of a warp.
__device__ __forceinline__ double* shared_rows(int warp) {
  return shared_keys() + 2 * kKeysSize + warp * kWarpNumbers;
}
constexpr int kDoutAt = kRowsSize, kWeightsAt = 2 * kRowsSize;
constexpr int kScoresAt = kWeightsAt + kWeightsSize;  // dS

__device__ __forceinline__ void sync_team(const thread_t& me) {
  if constexpr (kTeam == 1) {
    __syncwarp();
  } else {
    ptx::bar_sync<kTeam * kWarpSize>(1 + me.team());
  }
}

// Starts copies of k and v, by all warps. Entries that are summed share them.
__device__ __forceinline__ void copy_keys(const offsets_t<3>& kept,
                                          const params_t& params, const grads_t& grads,
                                          const elem_t* k, const elem_t* v, int dim,
                                          int dim_v) {
  const int num_keys = static_cast<int>(params.seqlen_k);
  const tile_coord_t at = grads.entry(params, kept.of[0], 0);
#pragma unroll 1
  for (int n = thread_t().warp; n < 2 * kStepsN; n += kWarps) {
    const bool is_k = n < kStepsN;
    const int first = n % kStepsN * 16;
    const operand_t& operand = is_k ? params.k : params.v;
    copy_16_rows<kWarpSize>((is_k ? shared_keys() : shared_values()) + first * kDim,
                            at.at_kv(is_k ? k : v, operand) + first * operand.row,
                            operand.row, num_keys - first, is_k ? dim : dim_v,
                            thread_t().lane);
  }
  ptx::commit_copy_group();  // some warps have no queries to copy behind
}

// c = rows keys^T. As in backward.cuh, holds enclose each product, together with the
// loads for the next one; `count` is any number >= 0.
__device__ __forceinline__ void dot(product_t& c, const double* rows,
                                    const double* keys, int count) {
  const thread_t me;
  const int near = place<kDim>(me.g, me.t), far = place<kDim>(me.g, 4 + me.t);
  constexpr int kProducts = kChunks * kTiles;
  // From 32 keys on, a fragment a serves so many products that it needs no second
  // place.
  constexpr int kPlaces = kTiles > 2 ? 1 : 2;
  double a[kPlaces][8], b[2][4];
  const auto load_a = [&](int step) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const double2 x = ptx::load_here(rows + near + 8 * h * kDim + 16 * step);
      const double2 y = ptx::load_here(rows + far + 8 * h * kDim + 16 * step);
      double (&to)[8] = a[step % kPlaces];
      to[h] = x.x, to[2 + h] = x.y, to[4 + h] = y.x, to[6 + h] = y.y;
    }
  };
  const auto load_keys = [&](int product) {
    const int at = 8 * (product % kTiles) * kDim + 16 * (product / kTiles);
    load_b(b[product % 2], keys + near + at, keys + far + at);
  };
#pragma unroll
  for (int n = 0; n < kTiles; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
  load_a(0);
  load_keys(0);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int step = i / kTiles, n = i % kTiles;
    ptx::hold(count, i);
    if (i + 1 < kProducts) load_keys(i + 1);
    // Not before the first product of a step: the previous product may still be reading
    // these registers.
    if (kPlaces == 2 && n == 1 && step + 1 < kChunks) load_a(step + 1);
    if (kPlaces == 1 && n == 0 && step > 0) load_a(step);
    add_product(c[n], a[step % kPlaces], b[i % 2]);
  }
}

// P and dS of the 16 queries of this warp, into shared memory; delta, and terms of
// dsinks.
__device__ __forceinline__ void weigh(const block_t& block, const params_t& params,
                                      const grads_t& grads, bool is_exact,
                                      double* delta, double* sink_terms, int* found) {
  const thread_t me;
  const tile_t& own = block.warps[me.warp];
  double* const rows = shared_rows(me.warp);
  double* const weights = rows + kWeightsAt;
  double* const score_grads = rows + kScoresAt;
  const auto plus = [](double a, double b) { return a + b; };
  product_t c;
  dot(c, rows, shared_keys(), own.num_rows);

  double l[2] = {};
  bool sees_odd = false;  // something visible is not finite
  const exp2_t exp2(block.exp2);
  const auto make = [&](auto check) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = me.g + 8 * (e / 2), key = 8 * n + 2 * me.t + e % 2;
        // The compiler would start the next before the end of this one, and run out of
        // registers.
        if (kHasSoftcap) ptx::hold(own.num_rows, 1000 + 4 * n + e);
        double derivative;
        const double p = weight_of<check.value>(
            c[n][e], own.bounds.sees(query, key), exp2, own.scores(), params.scale,
            own.i0 + query, key, own.lse_of[query], derivative);
        l[e / 2] += p;
        c[n][e] = p;
        if constexpr (kHasDerivative) {
          score_grads[weight_at(query, key)] = p * derivative;
        }
        if (check.value && is_exact && !is_unseen(p)) {
          sees_odd |= (own.odd_rows >> query | block.odd_keys[n / 2] >> key % 16) & 1;
        }
      }
    }
  };
  if (!kTerms && !is_exact && own.bounds.sees_all(kWarpRows, kBlockN)) {
    make(flag_t<false>{});
  } else {
    make(flag_t<true>{});
  }
  if (sees_odd) *found = 1;

  // Lane t < 2 has row g + 8 t.
  l[0] = warp_reduce<4>(l[0], plus);
  l[1] = warp_reduce<4>(l[1], plus);
  const int own_row = me.g + 8 * (me.t % 2);
  const double l_of = me.t % 2 == 0 ? l[0] : l[1], lse_of = own.lse_of[own_row];
  const scores_t& scores = own.scores();
  const bool exists = own_row < own.bounds.num_queries && own_row < own.num_rows;
  const double sink = own.sink_of(exists, lse_of);
  const bool is_whole = sums_to_one(l_of + sink, lse_of);
  const double factor_of_row = is_whole ? 1 / (l_of + sink) : 1;
  // A row that sees nothing adds to dsinks alone.
  bool needs_out = kHasSinks ? !is_whole || l_of == 0 : !is_whole && l_of != 0;
  if (is_exact) {
    const unsigned odd = __ballot_sync(kFullMask, sees_odd);
    needs_out |= (odd >> 4 * me.g & 15) != 0;
  }
  const unsigned ask_out = __ballot_sync(kFullMask, exists && needs_out && me.t < 2);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const double factor = __shfl_sync(kFullMask, factor_of_row, 4 * me.g + r);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = weight_at(me.g + 8 * r, 8 * n + 2 * me.t + e);
        weights[at] = c[n][2 * r + e] * factor;
        if constexpr (kHasDerivative) score_grads[at] *= factor;
      }
    }
  }

  dot(c, rows + kDoutAt, shared_values(), own.num_rows);
  double delta_of[2] = {};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (n % 2 == 0) ptx::hold(own.num_rows, 2000 + n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const double p = weights[weight_at(me.g + 8 * (e / 2), 8 * n + 2 * me.t + e % 2)];
      if (!is_unseen(p)) delta_of[e / 2] = fma_of(p, c[n][e], delta_of[e / 2]);
    }
  }
  delta_of[0] = warp_reduce<4>(delta_of[0], plus);
  delta_of[1] = warp_reduce<4>(delta_of[1], plus);
  bool has_out = true;  // of lane t < 2
  if (ask_out != 0) {
#pragma unroll 1
    for (int n = 0; n < kWarpRows; ++n) {
      const int lane = n % 8 * 4 + n / 8;
      if ((ask_out >> lane & 1) == 0) continue;
      bool any = false;
      const double sum =
          dot_out(own.out + (own.i0 + n) * params.out.row, params.out.col,
                  own.dout + (own.i0 + n) * grads.dout.row,
                  static_cast<int>(params.head_dim_v), any);
      if (n % 8 == me.g) delta_of[0] = n < 8 ? sum : delta_of[0];
      if (n % 8 == me.g) delta_of[1] = n < 8 ? delta_of[1] : sum;
      if (lane == me.lane) has_out = any;
    }
  }
  double delta_of_row = me.t % 2 == 0 ? delta_of[0] : delta_of[1];
  if (own.dlse != nullptr && exists) {
    const double down = own.dlse[(own.i0 + own_row) * grads.dlse.row];
    // The lse of a row that sees no key is the sink, which then receives its gradient
    // unless that is not finite.
    const bool is_sink = kHasSinks && !has_out && lse_of == scores.sink();
    if (!is_sink || is_finite(down)) delta_of_row -= down;
  }
  if (!exists) delta_of_row = 0;
  if (me.t < 2 && own_row < own.num_rows) {
    own.write_row(own_row, delta_of_row, sink, factor_of_row, delta, sink_terms);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const double of_row = __shfl_sync(kFullMask, delta_of_row, 4 * me.g + r);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n % 2 == 0) ptx::hold(own.num_rows, 3000 + n + r);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = weight_at(me.g + 8 * r, 8 * n + 2 * me.t + e);
        const double p = weights[at];
        const double by_score = kHasDerivative ? score_grads[at] : p;
        const double ds = by_score * (c[n][2 * r + e] - of_row);
        score_grads[at] = is_unseen(p) ? -0.0 : ds;  // avoids 0 * NaN
      }
    }
  }
}

// dv and dk of each team take the place of its queries, as rows of keys.
__device__ __forceinline__ void share_sums(const sums_t& sums) {
  const thread_t me;
#pragma unroll
  for (int j = 0; j < kJobs; ++j) {
    const int job = me.member() * kJobs + j;
    double* const rows =
        shared_rows(me.warp - me.member()) + (job < kChunks ? 0 : kKeysSize);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = 8 * n + 2 * me.t + e;
        *reinterpret_cast<double2*>(rows +
                                    place<kDim>(key, job % kChunks * 8 + me.g)) = {
            sums[j][n][e], sums[j][n][2 + e]};
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_short_f64(SHORT_PARAMETERS,
                            const __grid_constant__ short_f64_t more) {
  __shared__ block_t block;
  static_assert(sizeof(block_t) <= 3072);  // _STATIC_SMEM of the host

  const index_t work = work_index(num_splits);
  if (work >= grads.num_kept) return;
  if (threadIdx.x == 0) block.kept = locate(grads.kept, work);
  if (threadIdx.x < kWarpSize) block.exp2.fill(kLog2e);
  if (threadIdx.x < kStepsN) block.odd_keys[threadIdx.x] = 0;
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);
  if (thread_t().lane == 0) block.warps[thread_t().warp].summed = -1;
  __syncthreads();  // `block` is complete
  copy_keys(block.kept, params, grads, k, v, dim, dim_v);
  // The tiles of all summed entries are one sequence.
  const int tiles = static_cast<int>((params.seqlen_q + kBlockM - 1) / kBlockM);
  int first = 0, last = static_cast<int>(grads.num_summed) * tiles;
  if constexpr (kSplitsLoop) {
    const index_t split = split_index(num_splits), units = last;
    first = static_cast<int>(divide(units * split, num_splits));
    last = static_cast<int>(divide(units * (split + 1), num_splits));
  }

  // Starts copies of the queries of a unit of this warp.
  const auto fetch = [&](int unit, double* rows) {
    const thread_t me;
    tile_t& own = block.warps[me.warp];
    __syncwarp();  // all lanes have read what was there
    if (unit >= last) return;
    if (me.lane == 0) {
      const int summed = unit / tiles;
      if (summed != own.summed) {
        const tile_coord_t at = grads.entry(params, block.kept.of[0], summed);
        own.set_entry(at, {q, dout, out, lse, dlse, dq}, params, grads, more);
        own.summed = summed;
        new (own.scores_bytes) scores_t(at, SCORE_ARGUMENTS);
      }
      own.set_rows((unit - summed * tiles) * kBlockM + me.member() * kWarpRows,
                   params.seqlen_q);
    }
    __syncwarp();
    if (!own.is_seen) return;
    const int num = min(own.num_rows, own.bounds.num_queries);
    copy_16_rows<kWarpSize>(rows, own.q + own.i0 * params.q.row, params.q.row, num, dim,
                            me.lane);
    copy_16_rows<kWarpSize>(rows + kDoutAt, own.dout + own.i0 * grads.dout.row,
                            grads.dout.row, num, dim_v, me.lane);
    own.copy_lse(me.lane, num, grads.lse.row);
    ptx::commit_copy_group();
  };

  sums_t sums;
  bool is_exact = false;
#pragma unroll 1
  while (true) {
    zero_sums(sums);
    bool nonfinite = false;
    int unit = first + thread_t().team();
    fetch(unit, shared_rows(thread_t().warp));
    ptx::wait_copy_groups<0>();
    __syncthreads();  // k and v have arrived
    if (is_exact) {
      clean_keys(block.odd_keys);
      __syncthreads();  // the cleaned values are stored
    }
#pragma unroll 1
    for (; unit < last; unit += kTeams) {
      ptx::wait_copy_groups<0>();
      __syncwarp();
      {
        const thread_t me;
        tile_t& own = block.warps[me.warp];
        if (own.is_seen) {
          if (is_exact) {
            const unsigned odd =
                clean(shared_rows(me.warp)) | clean(shared_rows(me.warp) + kDoutAt);
            if (me.lane == 0) own.odd_rows = odd;
            __syncwarp();
          }
          weigh(block, params, grads, is_exact, delta, sink_terms, found);
        } else if (me.lane < own.num_rows) {
          own.write_row(me.lane, 0, 0, 1, delta, sink_terms);
        }
        sync_team(me);  // P and dS are complete
      }
      {
        const thread_t me;
        const int first_warp = me.warp - me.member();
        if constexpr (kTeam == 1) {
          if (block.warps[me.warp].is_seen) {
            const double* const rows = shared_rows(me.warp);
            add_transposed<0, kChunks>(sums, rows + kWeightsAt, rows + kDoutAt, 0,
                                       block.warps[me.warp].num_rows);
            add_transposed<kChunks, kChunks>(sums, rows + kScoresAt, rows, 0,
                                             block.warps[me.warp].num_rows);
          }
        } else {
          const int job = me.member() * kJobs;
          const bool is_dv = job < kChunks;
#pragma unroll 1
          for (int n = 0; n < kTeam; ++n) {
            if (!block.warps[first_warp + n].is_seen) continue;
            const double* const rows = shared_rows(first_warp + n);
            add_transposed<0, kJobs>(sums, rows + (is_dv ? kWeightsAt : kScoresAt),
                                     rows + (is_dv ? kDoutAt : 0), job % kChunks,
                                     block.warps[first_warp + n].num_rows);
          }
        }
        sync_team(me);  // all have read the tile
      }
      {
        const thread_t me;
        const tile_t& own = block.warps[me.warp];
        double* const to = own.dq + own.i0 * more.dq.row;
        const int num_rows = own.num_rows;
        const bool is_seen = own.is_seen;
        fetch(unit + kTeams, shared_rows(me.warp));
        nonfinite |=
            write_dq<kChunks>(to, shared_rows(me.warp) + kScoresAt, shared_keys(),
                              more.dq, 0, num_rows, is_seen, dim, params.scale);
      }
    }
    find_nonfinite(sums, nonfinite);
    if (is_exact) {
      if (nonfinite) *found = 1;
      break;
    }
    if (!__syncthreads_or(nonfinite)) break;
    is_exact = true;
    if (thread_t().lane == 0) block.warps[thread_t().warp].summed = -1;
  }

  __syncthreads();  // all warps have read what was there
  share_sums(sums);
  __syncthreads();  // the sums are complete
  const index_t split = split_index(num_splits);
  write_sums<kTeam * kWarpNumbers>(dv, block.kept.of[2], shared_rows(0), 1, dim_v,
                                   split, params, grads, 1);
  write_sums<kTeam * kWarpNumbers>(dk, block.kept.of[1], shared_rows(0) + kKeysSize, 0,
                                   dim, split, params, grads, params.scale);
}

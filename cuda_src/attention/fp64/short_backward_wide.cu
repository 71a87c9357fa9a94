// SPDX-License-Identifier: MIT
// attention_vjp_short_f64_wide: as attention_vjp_short_f64 (short_backward.cu), for
// wide heads: the warps of a team share a tile of 16 queries and divide its columns.
//
// Algorithm  A team takes tiles of 16 queries in turn. Half of its warps compute
//            q k^T, half dO v^T, each for 16 keys and half of the columns. Then each
//            warp adds the halves of some rows and computes, with a lane for each key,
//                P = exp(S - lse) factor,  delta = rowsum P dP - dlse
//                dS = P (dP - delta) score'(q k^T)
//            as short_backward.cu. Then each adds the products of the tile to some
//            columns of
//                dv += P^T dO,  dk += scale dS^T q
//            which stay in registers, and computes some columns of dq = scale dS k,
//            while the next tile is on its way
// Grid       1-D, one block per entry of k and v that is not shared; with LOOP_SPLITS,
//            several share its queries
// Shared     k, v            kBlockN x kDim  once
//            q, dO           16 x kDim       of each team
//            halves of S, dP 16 x kBlockN    of each team, two of both
//            P, dS           kBlockN x 16    of each team, transposed
// Memory     global: each array once, except out, which is read where lse covers keys
//            of other calls
// Numbers    as short_backward.cu; sums over columns are those of two halves
// Limits     kBlockN keys, which is 4 kTeam; head dimensions up to kDim
#include "attention/fp64/short_block.cuh"

constexpr int kHalf = kDim / 2;              // columns of a product of a warp
constexpr int kPairs = kTiles / 2;           // of tiles of keys
constexpr int kOwnRows = kWarpRows / kTeam;  // queries that a warp weighs
// Of each of dq, dv and dk of a warp. Of 12 and 8 warps, two have none.
constexpr int kOwnChunks = (kChunks + kTeam - 1) / kTeam;
static_assert(kDim % 32 == 0 && kBlockN % 16 == 0 && kBlockN <= kWarpSize);
static_assert(kTeam == 4 * kPairs && kWarps % kTeam == 0 && kTeams < 16);
constexpr int kJobs = 2 * kOwnChunks;
// A sum over more columns ends further from that of the kernel which made lse.
constexpr int kRoundings = 16;
static_assert(kChunks % kOwnChunks == 0);

// Numbers in shared memory.
constexpr int kTeamNumbers = 2 * kRowsSize + 6 * kWeightsSize;
static_assert(2 * kKeysSize + kTeams * kTeamNumbers >= 2 * kTeams * kKeysSize);

using sums_t = sum_t[kJobs];  // dv, then dk

struct block_t {
  offsets_t<3> kept;           // offsets of the entry in the gradients
  unsigned odd_keys[kStepsN];  // bit n: key n of 16 has a number that is not finite
  exp2_table_t exp2;
  tile_t tiles[kTeams][2];  // of a team: this one and the next
};

// q, dO, halves of S and of dP, P and dS of a team.
__device__ __forceinline__ double* shared_tile(int team) {
  return shared_keys() + 2 * kKeysSize + team * kTeamNumbers;
}
constexpr int kDoutAt = kRowsSize, kHalvesAt = 2 * kRowsSize;
constexpr int kWeightsAt = kHalvesAt + 4 * kWeightsSize;
constexpr int kScoresAt = kWeightsAt + kWeightsSize;  // dS

// Of a half of S or dP. Odd rows begin with other banks than even ones.
__device__ __forceinline__ int half_at(int query, int key) {
  return query * kBlockN + (key ^ query % 2 * 8);
}

__device__ __forceinline__ void sync_team(const thread_t& me) {
  ptx::bar_sync<kTeam * kWarpSize>(1 + me.team());
}

// Starts copies of k and v, by all warps. Entries that are summed share them.
__device__ __forceinline__ void copy_keys(const offsets_t<3>& kept,
                                          const params_t& params, const grads_t& grads,
                                          const elem_t* k, const elem_t* v, int dim,
                                          int dim_v) {
  const int num_keys = static_cast<int>(params.seqlen_k);
  const tile_coord_t at = grads.entry(params, kept.of[0], 0);
#pragma unroll 1
  for (int n = 0; n < 2 * kStepsN; ++n) {
    const bool is_k = n < kStepsN;
    const int first = n % kStepsN * 16;
    const operand_t& operand = is_k ? params.k : params.v;
    copy_16_rows<kNumThreads>((is_k ? shared_keys() : shared_values()) + first * kDim,
                              at.at_kv(is_k ? k : v, operand) + first * operand.row,
                              operand.row, num_keys - first, is_k ? dim : dim_v,
                              threadIdx.x);
  }
}

// Starts copies of dO of a tile, by its team.
__device__ __forceinline__ void copy_dout(const tile_t& own, double* rows,
                                          const grads_t& grads, int dim_v) {
  const thread_t me;
  const int num = min(own.num_rows, own.bounds.num_queries);
  copy_16_rows<kTeam * kWarpSize>(rows + kDoutAt, own.dout + own.i0 * grads.dout.row,
                                  grads.dout.row, num, dim_v,
                                  me.member() * kWarpSize + me.lane);
}

// Starts copies of q and lse of a tile, by its team.
__device__ __forceinline__ void copy_queries(const tile_t& own, double* rows,
                                             const params_t& params, int dim,
                                             const grads_t& grads) {
  const thread_t me;
  const int lane = me.member() * kWarpSize + me.lane;
  const int num = min(own.num_rows, own.bounds.num_queries);
  copy_16_rows<kTeam * kWarpSize>(rows, own.q + own.i0 * params.q.row, params.q.row,
                                  num, dim, lane);
  own.copy_lse(lane, num, grads.lse.row);
  ptx::commit_copy_group();
}

// This warp's part of q k^T or dO v^T, to shared memory. Holds as in short_backward.cu.
__device__ __forceinline__ void multiply(double* tile, int count) {
  const thread_t me;
  const int half = me.member() % 2, part = me.member() / 2 % kPairs;
  const bool is_dp = me.member() / 2 >= kPairs;
  const int near = place<kDim>(me.g, me.t), far = place<kDim>(me.g, 4 + me.t);
  const double* const rows = tile + (is_dp ? kDoutAt : 0) + half * kHalf;
  const double* const keys =
      (is_dp ? shared_values() : shared_keys()) + part * 16 * kDim + half * kHalf;
  constexpr int kSteps = kHalf / 16, kProducts = 2 * kSteps;
  double a[2][8], b[2][4], c[2][4] = {};
  const auto load_a = [&](int step) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const double2 x = ptx::load_here(rows + near + 8 * h * kDim + 16 * step);
      const double2 y = ptx::load_here(rows + far + 8 * h * kDim + 16 * step);
      double (&to)[8] = a[step % 2];
      to[h] = x.x, to[2 + h] = x.y, to[4 + h] = y.x, to[6 + h] = y.y;
    }
  };
  const auto load_keys = [&](int product) {
    const int at = 8 * (product % 2) * kDim + 16 * (product / 2);
    load_b(b[product % 2], keys + near + at, keys + far + at);
  };
  load_a(0);
  load_keys(0);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int step = i / 2, n = i % 2;
    ptx::hold(count, i);
    if (i + 1 < kProducts) load_keys(i + 1);
    if (n == 1 && step + 1 < kSteps) load_a(step + 1);
    add_product(c[n], a[step % 2], b[i % 2]);
  }
  double* const to = tile + kHalvesAt + (2 * is_dp + half) * kWeightsSize;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = half_at(me.g + 8 * h, 16 * part + 8 * n + 2 * me.t);
      *reinterpret_cast<double2*>(to + at) = {c[n][2 * h], c[n][2 * h + 1]};
    }
  }
}

// sums_to_one, mostly without a logarithm.
__device__ __forceinline__ bool is_whole_sum(double total, double lse) {
  const double off = total - 1;
  if (abs_of(off) > 0x1p-20) return sums_to_one<kRoundings>(total, lse);
  const double roundings = kRoundings * 0x1p-52 * larger(1.0, abs_of(lse));
  return abs_of(fma_of(off * off, -0.5, off)) < roundings;
}

// P and dS of the queries of this warp, into shared memory; delta, and terms of dsinks.
// A lane has a key.
__device__ __forceinline__ void weigh(const block_t& block, const tile_t& own,
                                      double* tile, const params_t& params,
                                      const grads_t& grads, bool is_exact,
                                      double* delta, double* sink_terms, int* found) {
  constexpr int kRowsAtOnce = kWarpSize / kBlockN, kTurns = kOwnRows / kRowsAtOnce;
  const thread_t me;
  const auto plus = [](double a, double b) { return a + b; };
  const int key = me.lane % kBlockN, group = me.lane / kBlockN;
  const int first = me.member() * kOwnRows;
  const scores_t& scores = own.scores();
  const exp2_t exp2(block.exp2);
  // All turns at once: most of the time passes with waiting for results.
  double p[kTurns], dp[kTurns], derivative[kTurns], l[kTurns], p_dp[kTurns];
#pragma unroll
  for (int n = 0; n < kTurns; ++n) {
    if (kHasSoftcap) ptx::hold(own.num_rows, 1000 + n);  // saves registers
    const int query = first + n * kRowsAtOnce + group;
    const double* const at = tile + kHalvesAt + half_at(query, key);
    dp[n] = at[2 * kWeightsSize] + at[3 * kWeightsSize];
    p[n] = weight_of<true>(at[0] + at[kWeightsSize], own.bounds.sees(query, key), exp2,
                           scores, params.scale, own.i0 + query, key, own.lse_of[query],
                           derivative[n]);
  }
#pragma unroll
  for (int n = 0; n < kTurns; ++n) {
    l[n] = warp_reduce<kBlockN>(p[n], plus);
    p_dp[n] = warp_reduce<kBlockN>(is_unseen(p[n]) ? 0.0 : p[n] * dp[n], plus);
  }
#pragma unroll
  for (int n = 0; n < kTurns; ++n) {
    const int query = first + n * kRowsAtOnce + group;
    const double lse_of = own.lse_of[query];
    const bool unseen = is_unseen(p[n]);
    const bool sees_odd =
        is_exact && !unseen &&
        ((own.odd_rows >> query | block.odd_keys[key / 16] >> key % 16) & 1);
    if (sees_odd) *found = 1;
    const bool exists = query < own.bounds.num_queries && query < own.num_rows;
    const double sink = own.sink_of(exists, lse_of);
    const double total = l[n] + sink;
    const bool is_whole = is_whole_sum(total, lse_of);
    const double factor = is_whole ? 1 / total : 1;
    // A row that sees nothing adds to dsinks alone.
    bool needs_out = kHasSinks ? !is_whole || l[n] == 0 : !is_whole && l[n] != 0;
    if (is_exact) {
      const unsigned odd = __ballot_sync(kFullMask, sees_odd);
      needs_out |= (odd >> group * kBlockN & kFullMask >> (kWarpSize - kBlockN)) != 0;
    }
    double delta_of = p_dp[n] * factor;
    bool has_out = true;
    const unsigned ask_out = __ballot_sync(kFullMask, exists && needs_out);
    if (ask_out != 0) {
#pragma unroll 1
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if ((ask_out >> r * kBlockN & 1) == 0) continue;
        const int row = own.i0 + first + n * kRowsAtOnce + r;
        bool any = false;
        const double sum = dot_out(own.out + row * params.out.row, params.out.col,
                                   own.dout + row * grads.dout.row,
                                   static_cast<int>(params.head_dim_v), any);
        if (group == r) delta_of = sum, has_out = any;
      }
    }
    if (own.dlse != nullptr && exists) {
      const double down = own.dlse[(own.i0 + query) * grads.dlse.row];
      // The lse of a row that sees no key is the sink, which then receives its gradient
      // unless that is not finite.
      const bool is_sink = kHasSinks && !has_out && lse_of == scores.sink();
      if (!is_sink || is_finite(down)) delta_of -= down;
    }
    if (!exists) delta_of = 0;
    if (key == 0 && query < own.num_rows) {
      own.write_row(query, delta_of, sink, factor, delta, sink_terms);
    }
    const double weight = p[n] * factor;
    const double by_score = kHasDerivative ? weight * derivative[n] : weight;
    const int to = weight_at(query, key);
    tile[kWeightsAt + to] = weight;
    // Avoids 0 * NaN.
    tile[kScoresAt + to] = unseen ? -0.0 : by_score * (dp[n] - delta_of);
  }
}

// dv and dk of each team take the place of keys and queries, as rows of keys.
__device__ __forceinline__ void share_sums(const sums_t& sums) {
  const thread_t me;
  if (me.member() * kOwnChunks >= kChunks) return;
#pragma unroll
  for (int j = 0; j < kJobs; ++j) {
    const int chunk = me.member() * kOwnChunks + j % kOwnChunks;
    double* const rows = shared_keys() + (2 * me.team() + j / kOwnChunks) * kKeysSize;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = 8 * n + 2 * me.t + e;
        *reinterpret_cast<double2*>(rows + place<kDim>(key, chunk * 8 + me.g)) = {
            sums[j][n][e], sums[j][n][2 + e]};
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_short_f64_wide(SHORT_PARAMETERS,
                                 const __grid_constant__ short_f64_t more) {
  __shared__ block_t block;
  static_assert(sizeof(block_t) <= 3072);  // _STATIC_SMEM of the host

  const index_t work = work_index(num_splits);
  if (work >= grads.num_kept) return;
  if (threadIdx.x == 0) block.kept = locate(grads.kept, work);
  if (threadIdx.x < kWarpSize) block.exp2.fill(kLog2e);
  if (threadIdx.x < kStepsN) block.odd_keys[threadIdx.x] = 0;
  if (threadIdx.x < 2 * kTeams) {
    block.tiles[threadIdx.x / 2][threadIdx.x % 2].summed = -1;
  }
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);
  __syncthreads();  // `block` is complete
  copy_keys(block.kept, params, grads, k, v, dim, dim_v);
  // The tiles of all summed entries are one sequence.
  const int tiles = static_cast<int>((params.seqlen_q + kWarpRows - 1) / kWarpRows);
  int first = 0, last = static_cast<int>(grads.num_summed) * tiles;
  if constexpr (kSplitsLoop) {
    const index_t split = split_index(num_splits), units = last;
    first = static_cast<int>(divide(units * split, num_splits));
    last = static_cast<int>(divide(units * (split + 1), num_splits));
  }

  // Says what a tile is, by one thread of its team.
  const auto prepare = [&](tile_t& own, int unit) {
    const thread_t me;
    if (unit >= last || me.lane != 0 || me.member() != kTeam - 1) return;
    const int summed = unit / tiles;
    if (summed != own.summed) {
      const tile_coord_t at = grads.entry(params, block.kept.of[0], summed);
      own.set_entry(at, {q, dout, out, lse, dlse, dq}, params, grads, more);
      own.summed = summed;
      new (own.scores_bytes) scores_t(at, SCORE_ARGUMENTS);
    }
    own.set_rows((unit - summed * tiles) * kWarpRows, params.seqlen_q);
  };

  sums_t sums;
  bool is_exact = false;
#pragma unroll 1
  while (true) {
    zero_sums(sums);
    bool nonfinite = false;
    int unit = first + thread_t().team(), slot = 0;
    {
      const thread_t me;
      prepare(block.tiles[me.team()][0], unit);
      sync_team(me);  // the tile is known
      const tile_t& own = block.tiles[me.team()][0];
      if (unit < last && own.is_seen) {
        copy_dout(own, shared_tile(me.team()), grads, dim_v);
        copy_queries(own, shared_tile(me.team()), params, dim, grads);
      }
    }
    ptx::commit_copy_group();  // also k and v of teams without queries
    ptx::wait_copy_groups<0>();
    __syncthreads();  // k and v have arrived
    if (is_exact) {
      clean_keys(block.odd_keys);
      __syncthreads();  // the cleaned values are stored
    }
#pragma unroll 1
    for (; unit < last; unit += kTeams, slot ^= 1) {
      ptx::wait_copy_groups<0>();
      {
        const thread_t me;
        sync_team(me);  // the tile has arrived
        tile_t& own = block.tiles[me.team()][slot];
        double* const tile = shared_tile(me.team());
        if (own.is_seen) {
          if (is_exact) {
            if (me.member() < 2) {
              const unsigned odd = clean(tile + me.member() * kDoutAt);
              if (me.lane == 0 && odd != 0) atomicOr(&own.odd_rows, odd);
            }
            sync_team(me);  // the cleaned values are stored
          }
          multiply(tile, own.num_rows);
        }
        sync_team(me);  // the halves are complete
      }
      {
        const thread_t me;
        tile_t& own = block.tiles[me.team()][slot];
        if (own.is_seen) {
          weigh(block, own, shared_tile(me.team()), params, grads, is_exact, delta,
                sink_terms, found);
        } else if (me.member() == 0 && me.lane < own.num_rows) {
          own.write_row(me.lane, 0, 0, 1, delta, sink_terms);
        }
        prepare(block.tiles[me.team()][slot ^ 1], unit + kTeams);
        sync_team(me);  // P and dS are complete, and the next tile is known
      }
      {
        const thread_t me;
        const tile_t& own = block.tiles[me.team()][slot];
        const tile_t& next = block.tiles[me.team()][slot ^ 1];
        double* const tile = shared_tile(me.team());
        const bool copies = unit + kTeams < last && next.is_seen;
        const int chunk = me.member() * kOwnChunks;
        const bool adds = own.is_seen && chunk < kChunks;
        if (adds) {
          add_transposed<0, kOwnChunks>(sums, tile + kWeightsAt, tile + kDoutAt, chunk,
                                        own.num_rows);
        }
        sync_team(me);  // all have read dO
        if (copies) copy_dout(next, tile, grads, dim_v);
        if (adds) {
          add_transposed<kOwnChunks, kOwnChunks>(sums, tile + kScoresAt, tile, chunk,
                                                 own.num_rows);
        }
        sync_team(me);  // all have read q
        if (copies) copy_queries(next, tile, params, dim, grads);
      }
      {
        const thread_t me;
        const tile_t& own = block.tiles[me.team()][slot];
        const int chunk = me.member() * kOwnChunks;
        if (chunk < kChunks) {
          nonfinite |= write_dq<kOwnChunks>(own.dq + own.i0 * more.dq.row,
                                            shared_tile(me.team()) + kScoresAt,
                                            shared_keys(), more.dq, chunk, own.num_rows,
                                            own.is_seen, dim, params.scale);
        }
      }
    }
    find_nonfinite(sums, nonfinite);
    if (is_exact) {
      if (nonfinite) *found = 1;
      break;
    }
    if (!__syncthreads_or(nonfinite)) break;
    is_exact = true;
  }

  __syncthreads();  // all warps have read what was there
  share_sums(sums);
  __syncthreads();  // the sums are complete
  const index_t split = split_index(num_splits);
  write_sums<2 * kKeysSize>(dv, block.kept.of[2], shared_keys(), 1, dim_v, split,
                            params, grads, 1);
  write_sums<2 * kKeysSize>(dk, block.kept.of[1], shared_keys() + kKeysSize, 0, dim,
                            split, params, grads, params.scale);
}

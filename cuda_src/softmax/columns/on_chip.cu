// SPDX-License-Identifier: MIT
// softmax_columns: columns are read once, held on chip, and written once.
//
// Algorithm  As softmax_tiled, along an axis that is not contiguous:
//                m = max_i s_i,  e_i = exp(s_i - m),  l = sum_i e_i,  out_i = e_i / l
//            (log_softmax: out_i = (s_i - m) - log l), s = scale * x. In a cluster each
//            block computes m' and l' of its piece of a column; these are combined by
//                m = max m',  l = sum l' exp(m' - m),  out_i = e_i exp(m' - m) / l
// Grid       1-D; a block takes kGroupsPerBlock tiles at a time, a cluster takes one
//            (or a team of blocks anywhere on the card: softmax/detail/column_team.cuh)
// Tiles      kColumns columns of one slab; a thread has kInRegisters x kVector elements
// in
//            registers and kInSmem x kVector in shared memory
// Memory     x and out once, up to 16 bytes per access, lanes contiguous; shared: one
//            number per warp and column; blocks exchange two numbers per column
// Numbers    exponentials in acc_t of exact differences, sums in double, rounded once;
//            for 16-bit results plain differences, the fast exponential, float sums
// Limits     columns of at most kDeep * (kInRegisters + kInSmem) elements per block;
// the last
//            outer axis has stride 1 in x and out, and there is one reduced axis
#include "softmax/detail/params.cuh"
#include "softmax/detail/column_tile.cuh"
#include "softmax/detail/exp2_units.cuh"
#if TEAMS
#include "softmax/detail/column_team.cuh"
#include "softmax/detail/partial_sum.cuh"
#endif

using part_t = few<acc_t, kCoarse>::type;
using total_t = decltype(total(part_t()));

// Exponentials replace x where they fit; otherwise they are computed twice.
constexpr bool kKeepsExp = kSame<x_t, acc_t> && !kLog;

// Missing floats are -inf, which adds nothing. Other types must track which slots are
// valid.
constexpr bool kTracksRows = kHasWhere || kScaled || !kHasInfinity<x_t>;

// The exponent that a thread subtracts from the scores of one of its columns: a block's
// sum of exponentials is l exp(shift). Doubles and 16 bits subtract the maximum; for
// float see power_t. Chosen per column, so that its bits do not depend on other
// columns.
struct natural_t {
  acc_t m;

  __device__ __forceinline__ natural_t(acc_t m) : m(shift_by(m)) {}
  __device__ __forceinline__ double shift() const { return m; }
  __device__ __forceinline__ acc_t operator()(score_t s) const {
    return s.exp_minus(m);
  }
};

// Not for logs: where one score dominates, log l must be accurate near 0.
constexpr bool kInPowers = sizeof(acc_t) == 4 && !kCoarse && !kScaled && kKeepsExp;

__device__ __forceinline__ double shift_of(acc_t m) {
  if constexpr (kInPowers) {
    if (power_t::takes(m)) return power_t(m).shift();
  }
  return natural_t(m).shift();
}

// Doubles subtract the maximum of the whole column: a second factor, exp(m' - m), would
// cost the last digits.
constexpr bool kSharesMax = kCluster > 1 && sizeof(acc_t) == sizeof(double);

// The larger of two, or NaN: power_t must know of a NaN in advance.
struct larger_seen_t {
  __device__ __forceinline__ acc_t operator()(acc_t a, acc_t b) const {
    if constexpr (kInPowers) return detail::largest_nan(a, b);
    return larger_t()(a, b);
  }
};

// The sum of exponentials over a block's piece of a column, and its largest score, as
// the blocks of a cluster exchange them.
template <bool kIsNarrow> struct alignas(16) piece {
  double l, m;
};
template <> struct alignas(8) piece<true> {
  float l, m;
};
using piece_t = piece<kCoarse>;
// What one block receives from all in one exchange.
[[maybe_unused]] constexpr int kPiecesBytes =
    kCluster * kColumns * int(sizeof(piece_t));

// The last step for a column with sum l exp(shift) and exponentials of another shift.
__device__ __forceinline__ finish_t finish_column(double shift, double l,
                                                  double weight) {
  return finish_t(acc_t(shift), l, weight);
}

using tile_t = place_t<layout_t, int>;

struct on_chip_t {
  rows_t<x_t> value;
  unsigned long long selected;  // one bit per slot

  __device__ __forceinline__ explicit on_chip_t(void* memory) : value(memory) {}

  __device__ __forceinline__ void load(const x_t* x, const bool* where,
                                       const tile_t& tile) {
    tile.load(value, x, kX, padding<x_t>());
    if constexpr (kHasWhere) {
      selected = tile.template selected<true, kSlots>(where + tile.start(kWhere),
                                                      kWhere, 0, tile.rows);
    }
  }

  __device__ __forceinline__ bool is_selected(const tile_t& tile, int row,
                                              int j) const {
    if (kHasWhere) return selected >> (row * kVector + j) & 1;
    return !kTracksRows || row < tile.rows;
  }
  // The score of element j of slot k, which is in this row of the thread.
  template <typename Slots>
  __device__ __forceinline__ score_t score(const tile_t& tile, const Slots& slots,
                                           int k, int row, int j) const {
    if (!is_selected(tile, row, j)) return score_t::absent(tile.layout);
    return score_t(to<acc_t>(slots.get(k, j)), tile.layout);
  }

  // The largest score of each of this thread's columns.
  __device__ __forceinline__ void largest(const tile_t& tile, acc_t (&m)[kVector]) {
    if constexpr (!kTracksRows && kMaxInPairs<x_t, kVector>) {
      vector_t<x_t, kVector> of_pairs;
#pragma unroll
      for (int j = 0; j < kVector; ++j) of_pairs.element[j] = padding<x_t>();
      value.each<false>([&](const auto& slots, int k, int) {
        of_pairs = larger_of(of_pairs, slots.get(k));
      });
#pragma unroll
      for (int j = 0; j < kVector; ++j) m[j] = to<acc_t>(of_pairs.element[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) m[j] = -infinity<acc_t>();
      value.each<false>([&](const auto& slots, int k, int row) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          m[j] = larger_seen_t()(m[j], score(tile, slots, k, row, j).key);
        }
      });
    }
  }

  // Sums the exponentials exp_of_column(j, score) of each of this thread's columns, and
  // keeps them if they fit.
  template <typename Exp>
  __device__ __forceinline__ void sum(const tile_t& tile, Exp exp_of_column,
                                      total_t (&sums)[kVector]) {
    constexpr bool kPairs = sizeof(acc_t) == 4;  // halves the conversions to double
    part_t sum[kVector] = {};
    acc_t first[kVector];  // of a pair
    value.each<kKeepsExp>([&](auto& slots, int k, int row) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const acc_t e = exp_of_column(j, score(tile, slots, k, row, j));
        if constexpr (kKeepsExp) slots.set(k, j, to<x_t>(e));
        if (!kPairs) {
          sum[j] += e;
        } else if (k % 2 == 0) {
          first[j] = e;
        } else {
          sum[j] += first[j] + e;
        }
      }
    });
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (kPairs && kSlots % 2 == 1) sum[j] += first[j];
      sums[j] = total(sum[j]);
    }
  }
};

struct shared_t {
  union {  // used one after the other
    partials_t<acc_t> max;
    partials_t<total_t> sum;
  };
  acc_t m[kColumns];
  finish_t finish[kColumns];
#if CLUSTER > 1
  piece_t piece[kCluster][kColumns];
  piece_t of_block[kSharesMax ? kCluster : 1][kColumns];  // for maxima only
  unsigned long long barrier[2];
#endif
  __device__ shared_t() {}
};

#if CLUSTER > 1
// Separate, because a block that is ahead may publish its sums while another still
// waits for maxima.
struct meetings_t {
  meeting_t of_max, of_sum;

  __device__ __forceinline__ explicit meetings_t(shared_t& shared)
      : of_max(&shared.barrier[0], threadIdx.x == 0),
        of_sum(&shared.barrier[1], threadIdx.x == 0) {}
};

// Publishes a column to all blocks of the cluster.
__device__ __forceinline__ void publish(const meeting_t& meeting,
                                        piece_t (&pieces)[kColumns], int c, double l,
                                        acc_t m) {
#pragma unroll 4
  for (int rank = 0; rank < kCluster; ++rank) {
    meeting.send(&pieces[c], rank, decltype(piece_t::l)(l), decltype(piece_t::m)(m));
  }
}

// The last step for a column from what all blocks published.
__device__ __forceinline__ finish_t finish_pieces(const shared_t& shared, int c,
                                                  [[maybe_unused]] keys_t keys) {
  const auto piece = [&](int rank) { return shared.piece[rank][c]; };
  const acc_t own = acc_t(piece(cluster_rank()).m);
  acc_t m = -infinity<acc_t>();
  double l = 0;
  if constexpr (kSharesMax) {
#pragma unroll 4
    for (int rank = 0; rank < kCluster; ++rank) l += piece(rank).l;
    return finish_column(shift_of(own), l, 1);
  }
  // A piece whose maximum is -inf has no exponentials but 0 (or NaN), whatever its
  // weight.
  bool all_in_powers = kInPowers;
#pragma unroll 4
  for (int rank = 0; rank < kCluster; ++rank) {
    const acc_t of_piece = acc_t(piece(rank).m);
    m = larger_t()(m, of_piece);
    if constexpr (kInPowers) {
      all_in_powers = all_in_powers && power_t::takes(of_piece);
    }
  }
  if constexpr (kInPowers) {
    if (all_in_powers) {
      const float unit = power_t(m).unit;
      const auto weight = [&](float m) {
        return m == -infinity<float>() ? 1 : power_t(m).weight(unit);
      };
#pragma unroll 4
      for (int rank = 0; rank < kCluster; ++rank) {
        l += piece(rank).l * weight(float(piece(rank).m));
      }
      return finish_column(unit * kLn2, l, weight(own));
    }
  }
  double shift = -infinity<double>();
#pragma unroll 4
  for (int rank = 0; rank < kCluster; ++rank) {
    const acc_t of_piece = acc_t(piece(rank).m);
    if (is_finite(of_piece)) shift = larger_t()(shift, shift_of(of_piece));
  }
  if (!is_finite(m)) shift = 0;
  const auto weight = [&](acc_t m) -> double {
    if (m == -infinity<acc_t>()) return 1;
    if constexpr (kCoarse) return exp_fast(float(keys.factor * (shift_of(m) - shift)));
    return keys.exp_diff_exact(shift_of(m), shift);
  };
#pragma unroll 4
  for (int rank = 0; rank < kCluster; ++rank) {
    l += double(piece(rank).l) * weight(acc_t(piece(rank).m));
  }
  return finish_column(shift, l, kLog ? 1 : weight(own));
}
#elif TEAMS
using meetings_t = team_t;

// The last step for a column from the sum of the team, for the exponentials of this
// block, whose largest score is `own`.
__device__ __forceinline__ finish_t finish_team(const partial_t& sum, acc_t own,
                                                keys_t keys) {
  const double shift = is_finite(sum.m) ? sum.m : 0;
  const bool is_one = kLog || !is_finite(own);
  return finish_column(shift, sum.l,
                       is_one ? 1 : keys.exp_diff_exact(shift_of(own), shift));
}
#else
struct meetings_t {
  __device__ __forceinline__ explicit meetings_t(shared_t&) {}
};
#endif

// The maximum of each of this thread's columns over the block or, for doubles, the
// cluster.
__device__ __forceinline__ void join_max(shared_t& shared,
                                         [[maybe_unused]] meetings_t& meetings,
                                         acc_t (&m)[kVector]) {
  if constexpr (kInWarp) {
    combine_in_warp(m, larger_seen_t());
  } else {
#if CLUSTER > 1
    if (kSharesMax && threadIdx.x == 0) meetings.of_max.expect(kPiecesBytes);
#endif
    write_partials(shared.max, m, larger_seen_t());
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
      const acc_t m = combine_partials(shared.max, c, larger_seen_t());
#if CLUSTER > 1
      if constexpr (kSharesMax) {
        publish(meetings.of_max, shared.of_block[cluster_rank()], c, 0, m);
      }
#endif
      shared.m[c] = m;
    }
#if CLUSTER > 1
    if constexpr (kSharesMax) {
      meetings.of_max.wait(threadIdx.x < kColumns);
#pragma unroll 1
      for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
        acc_t m = acc_t(shared.of_block[0][c].m);
#pragma unroll 4
        for (int rank = 1; rank < kCluster; ++rank) {
          m = larger_seen_t()(m, acc_t(shared.of_block[rank][c].m));
        }
        shared.m[c] = m;
      }
    }
#endif
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVector; ++j) m[j] = shared.m[tile_t::side() * kVector + j];
  }
}

// The last step for each of this thread's columns, from its own part of their sums.
__device__ __forceinline__ void finish_columns(shared_t& shared,
                                               [[maybe_unused]] meetings_t& meetings,
                                               const acc_t (&m)[kVector],
                                               total_t (&sum)[kVector],
                                               finish_t (&finish)[kVector],
                                               [[maybe_unused]] keys_t keys) {
  if constexpr (kInWarp) {
    combine_in_warp(sum, plus_t());
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      finish[j] = finish_column(shift_of(m[j]), double(sum[j]), 1);
    }
  } else {
#if CLUSTER > 1
    if (threadIdx.x == 0) meetings.of_sum.expect(kPiecesBytes);
#endif
    write_partials(shared.sum, sum, plus_t());
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
      const double l = sum_of_partials(shared.sum, c);
#if CLUSTER > 1
      publish(meetings.of_sum, shared.piece[cluster_rank()], c, l, shared.m[c]);
#elif TEAMS
      const acc_t m = shared.m[c];
      meetings.publish(c, {l, is_finite(m) ? shift_of(m) : -infinity<double>()});
#else
      shared.finish[c] = finish_column(shift_of(shared.m[c]), l, 1);
#endif
    }
#if CLUSTER > 1
    meetings.of_sum.wait(threadIdx.x < kColumns);
#pragma unroll 1
    for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
      shared.finish[c] = finish_pieces(shared, c, keys);
    }
#elif TEAMS
    meetings.add([&](auto& own) { return join(own, keys); });
#pragma unroll 1
    for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
      shared.finish[c] = finish_team(meetings.total(c), shared.m[c], keys);
    }
#endif
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      finish[j] = shared.finish[tile_t::side() * kVector + j];
    }
  }
}

__device__ __forceinline__ void softmax(on_chip_t& in_registers, out_t* out,
                                        const tile_t& tile, shared_t& shared,
                                        meetings_t& meetings) {
  acc_t m[kVector];
  in_registers.largest(tile, m);
  join_max(shared, meetings, m);
  in_registers.value.in_registers.launder();

  total_t sum[kVector];
  if constexpr (kInPowers) {
    bool all_in_powers = true;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      all_in_powers = all_in_powers && power_t::takes(m[j]);
    }
    if (all_in_powers) {
      in_registers.sum(tile, [&](int j, score_t s) { return power_t(m[j])(s); }, sum);
    } else {
      in_registers.sum(
          tile,
          [&](int j, score_t s) {
            return power_t::takes(m[j]) ? power_t(m[j])(s) : natural_t(m[j])(s);
          },
          sum);
    }
  } else {
    in_registers.sum(tile, [&](int j, score_t s) { return natural_t(m[j])(s); }, sum);
  }

  finish_t finish[kVector];
  finish_columns(shared, meetings, m, sum, finish, keys_t(tile.layout));
  in_registers.value.in_registers.launder();

  const auto result = [&](const auto& slots, int k, int row, int j) {
    acc_t value;
    if constexpr (kLog) {
      value = finish[j](in_registers.score(tile, slots, k, row, j));
    } else if (kKeepsExp) {
      value = to<acc_t>(slots.get(k, j)) * finish[j].inverse;
    } else {
      value = natural_t(m[j])(in_registers.score(tile, slots, k, row, j)) *
              finish[j].inverse;
    }
    if (kHasWhere && !in_registers.is_selected(tile, row, j)) value = unselected();
    return to<out_t>(value);
  };
  tile.store_each(out, kOut, [&](auto write) {
    in_registers.value.each<false>([&](const auto& slots, int k, int row) {
      write(row, [&](int j) { return result(slots, k, row, j); });
    });
  });
}

extern __shared__ __align__(128) uint4 parking[];

#if TEAMS
#define WORDS unsigned long long *words,
// Clears what the blocks of softmax_columns publish; of the same grid.
extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_columns_clear(const x_t*, const bool*, out_t*, unsigned long long* words,
                          const __grid_constant__ layout_t layout) {
  team_t{words}.clear(num_tiles(layout));
}
#else
#define WORDS
#endif

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(kNumThreads, RESIDENT)
    softmax_columns(const x_t* x, const bool* where, out_t* out,
                    WORDS const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
#if TEAMS
  meetings_t meetings{words};
#else
  meetings_t meetings(shared);
#endif
  announce_block<kCluster>();
  bool has_started = false;
  const thread_map how =
      takes_vectors(x, layout, kX) && takes_vectors(out, layout, kOut)
          ? thread_map::kVectors
          : thread_map::kSingles;
  const tile_index_t end = num_tiles(layout);
  for (tile_index_t at = first_tile(); at < end; at += tile_step()) {
    const tile_t tile(layout, how, at);
    on_chip_t in_registers(parking);
    in_registers.load(x, where, tile);
    if (!has_started) await_blocks<kCluster>();
    has_started = true;
    if (kInSmem > 0) wait_for_copies();
#if TEAMS
    meetings.tile = at;
#endif
    softmax(in_registers, out, tile, shared, meetings);
    // No block may send its next numbers to one that still reads these.
    if (kCluster > 1 && at + tile_step() < end) cluster_sync();
  }
}

// SPDX-License-Identifier: MIT
// softmax_columns: columns are read once, stay in registers, and are written once.
//
// Algorithm  As softmax_tiled, along an axis that is not the contiguous one:
//                m = max_i s_i,  e_i = exp(s_i - m),  l = sum_i e_i,  out_i = e_i / l
//            (log_softmax: out_i = (s_i - m) - log l), s = scale * x. In a cluster each
//            block takes its own m' and l' from its piece of a column; they are merged
//                m = max m',  l = sum l' exp(m' - m),  out_i = e_i exp(m' - m) / l
// Grid       1-D; a block takes kGroupsPerBlock tiles at a time, a cluster takes one
// Tiles      kColumns columns of one slab; a thread holds kHeld x kVector elements
// Memory     x and out once, up to 16 bytes an access, neighbouring lanes side by side;
//            shared: a number a warp and column; between blocks: two numbers a column
// Numbers    exponentials in acc_t of exact differences, sums in double, one rounding;
//            for results of 16 bits plain differences, the fast exponential, float sums
// Limits     columns of at most kCluster * kDeep * kHeld elements; the last outer axis
//            has stride 1 in x and out, and there is one reduced axis
//
// Parameters as in softmax/score.cuh and softmax/columns.cuh
#include "ptx/max.cuh"
#include "softmax/score.cuh"
#include "softmax/columns.cuh"

using part_t = few<acc_t, kCoarse>::type;
using total_t = decltype(total(part_t()));

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

// Exponentials take the place of x where they fit; else they are computed again.
constexpr bool kKeepsExp = kSame<x_t, acc_t> && !kLog;

template <typename T>
constexpr bool kIsFloat =
    kSame<T, half_t> || kSame<T, bfloat16_t> || kSame<T, float> || kSame<T, double>;
template <bool kFloat>
struct absent {
  template <typename T>
  static __device__ __forceinline__ T of() {
    return to<T>(-infinity<acc_t>());
  }
};
template <>
struct absent<false> {
  template <typename T>
  static __device__ __forceinline__ T of() {
    return T(0);
  }
};

// A float that is not there is -inf, which adds nothing. For the rest the slots have to
// be told apart.
constexpr bool kTracksRows = kHasWhere || kScaled || !kIsFloat<x_t>;

// What a thread subtracts from the scores of one of its columns: a block's sum of
// exponentials is l exp(shift). Doubles and 16 bits subtract the maximum; for float see
// power_t. A column is on its own: what others hold must not show in its bits.
struct natural_t {
  acc_t m;

  __device__ __forceinline__ natural_t(acc_t m) : m(shift_by(m)) {}
  __device__ __forceinline__ double shift() const { return m; }
  __device__ __forceinline__ acc_t operator()(score_t s) const {
    return s.exp_minus(m);
  }
};

// exp(x) = 2^k 2^r with k = round(x / ln 2). Counted in units of a power of two near
// the largest of them, exponentials need no difference that could be rounded, and a
// third of the instructions.
struct power_t {
  static constexpr float kLargest = 1 << 20;  // beyond, k is not found in this way
  static constexpr float kHigh = float(kLog2e), kLow = float(kLog2e - double(kHigh));

  float unit, round, lowest;

  __device__ __forceinline__ power_t(float m) {
    unit = m == -infinity<float>() ? 0.0f : rintf(m * kHigh);
    // Adding this rounds to a whole number and leaves k - unit in the low bits.
    round = 12582912.0f - unit;  // 1.5 * 2^23
    // Here and below the result is subnormal, and flushed to 0 when it is used.
    lowest = (unit - 126.75f) * float(kLn2);
  }
  static __device__ __forceinline__ bool takes(float m) {
    return abs_of(m) <= kLargest || m == -infinity<float>();
  }
  __device__ __forceinline__ double shift() const { return unit * kLn2; }
  __device__ __forceinline__ float operator()(score_t s) const {
    const float x = fmaxf(s.high, lowest);
    const float rounded = fmaf(x, kHigh, round);
    const float k = rounded - round;
    const float r = fmaf(x, kLow, fmaf(x, kHigh, -k));
    return __int_as_float((__float_as_int(rounded) << 23) + __float_as_int(exp2f(r)));
  }
};
// Not for logs: where one score outweighs the rest, the log of l is to be exact near 0.
constexpr bool kInPowers = sizeof(acc_t) == 4 && !kCoarse && !kScaled && kKeepsExp;

__device__ __forceinline__ double shift_of(acc_t m) {
  if constexpr (kInPowers) {
    if (power_t::takes(m)) return power_t(m).shift();
  }
  return natural_t(m).shift();
}

// Doubles subtract the maximum of the whole column at once: a second factor, exp(m' -
// m), would take the last digits.
constexpr bool kSharesMax = kCluster > 1 && sizeof(acc_t) == sizeof(double);

// The larger of two, or NaN: power_t has to know of a NaN before.
struct larger_seen_t {
  __device__ __forceinline__ acc_t operator()(acc_t a, acc_t b) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    if constexpr (kInPowers) return ptx::max_nan_f32(a, b);
#else
    if constexpr (kInPowers) return max_nan(a, b);
#endif
    return larger_t()(a, b);
  }
};

// The sum over a block's piece of a column is l exp(shift); m is the largest score.
struct piece_t {
  double l, shift;
  acc_t m;

  // exp(shift - of_all). A piece of -inf has no exponentials but 0 (and NaN).
  __device__ __forceinline__ double weight(double of_all) const {
    return m == -infinity<acc_t>() ? 1 : exp_diff_exact(shift, of_all);
  }
};

// The last step for a column with sum l exp(shift), and exponentials of another shift.
__device__ __forceinline__ finish_t finish_column(double shift,
                                                  double l,
                                                  double weight) {
  return finish_t(acc_t(shift), l, weight);
}

using tile_t = place_t<layout_t>;

static_assert(!kHasWhere || kHeld * kVector <= 64, "a bit an element");

struct held_t {
  slots_t<x_t> value;
  unsigned long long selected;  // a bit a slot

  __device__ __forceinline__ void load(const x_t* x,
                                       const bool* where,
                                       const tile_t& tile) {
    value.fill(absent<kIsFloat<x_t>>::template of<x_t>());
    tile.load(value, x, kX);
    load_mask(where, tile);
  }
  __device__ __forceinline__ void load_mask(const bool* where, const tile_t& tile) {
    selected = 0;
    if (kHasWhere) {
      const long long step = tile.step(kWhere);
      const long long side_step = tile.layout.outer.stride[kWhere][OUTER_AXES - 1];
      where += tile.start(kWhere);
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const int i = tile.offset(j);
          if (k < tile.rows && i < tile.columns && where[k * step + i * side_step]) {
            selected |= 1ull << (k * kVector + j);
          }
        }
      }
    }
  }

  __device__ __forceinline__ bool is_selected(const tile_t& tile, int k, int j) const {
    if (kHasWhere) return selected >> (k * kVector + j) & 1;
    return !kTracksRows || k < tile.rows;
  }
  __device__ __forceinline__ score_t score(const tile_t& tile, int k, int j) const {
    if (!is_selected(tile, k, j)) return score_t();
    return score_t(to<acc_t>(value.get(k, j)), tile.layout);
  }
  __device__ __forceinline__ void keep(int k, int j, acc_t e) {
    if (kKeepsExp) value.set(k, j, to<x_t>(e));
  }
};

struct shared_t {
  partials_t<acc_t> max;
  partials_t<total_t> sum;
  acc_t m[kColumns];
  double shift[kColumns];
  finish_t finish[kColumns];
#if CLUSTER > 1
  piece_t piece[kCluster][kColumns];
  acc_t of_block[kSharesMax ? kCluster : 1][kColumns];  // maxima
#endif
};

// The maximum of each of this thread's columns over the cluster, from that over its
// block.
__device__ __forceinline__ void cluster_max(shared_t& shared, acc_t (&m)[kVector]) {
#if CLUSTER > 1
  if (threadIdx.x < kSide) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      share(&shared.of_block[cluster_rank()][threadIdx.x * kVector + j], m[j]);
    }
  }
  cluster_sync();
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int c = tile_t::side() * kVector + j;
    m[j] = shared.of_block[0][c];
#pragma unroll
    for (int rank = 1; rank < kCluster; ++rank) {
      m[j] = larger_seen_t()(m[j], shared.of_block[rank][c]);
    }
  }
#endif
}

// The maximum of each of this thread's columns over the block.
__device__ __forceinline__ void block_max(shared_t& shared, acc_t (&m)[kVector]) {
  if constexpr (kInWarp) {
    combine_in_warp(m, larger_seen_t());
  } else {
    write_partials(shared.max, m, larger_seen_t());
    __syncthreads();
    if constexpr (kPartials <= 16) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        m[j] =
            combine_partials(shared.max, tile_t::side() * kVector + j, larger_seen_t());
      }
    } else {
#pragma unroll 1
      for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
        shared.max[0][c] = combine_partials(shared.max, c, larger_seen_t());
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        m[j] = shared.max[0][tile_t::side() * kVector + j];
      }
    }
  }
}

// The last step for each of this thread's columns, from its own part of their sums.
__device__ __forceinline__ void finish_columns(shared_t& shared,
                                               const acc_t (&m)[kVector],
                                               total_t (&sum)[kVector],
                                               finish_t (&finish)[kVector]) {
  if constexpr (kInWarp) {
    combine_in_warp(sum, plus_t());
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      finish[j] = finish_column(shift_of(m[j]), double(sum[j]), 1);
    }
  } else {
    write_partials(shared.sum, sum, plus_t());
    if (threadIdx.x < kSide) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        shared.m[threadIdx.x * kVector + j] = m[j];
        shared.shift[threadIdx.x * kVector + j] = shift_of(m[j]);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
      const double l = sum_of_partials(shared.sum, c);
#if CLUSTER > 1
      share(&shared.piece[cluster_rank()][c], piece_t{l, shared.shift[c], shared.m[c]});
#else
      shared.finish[c] = finish_column(shared.shift[c], l, 1);
#endif
    }
#if CLUSTER > 1
    cluster_sync();
#pragma unroll 1
    for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
      acc_t m = -infinity<acc_t>();
      double shift = -infinity<double>();
#pragma unroll
      for (int rank = 0; rank < kCluster; ++rank) {
        const piece_t piece = shared.piece[rank][c];
        m = larger_t()(m, piece.m);
        if (is_finite(piece.m)) shift = larger_t()(shift, piece.shift);
      }
      if (!is_finite(m)) shift = 0;
      double l = 0;
#pragma unroll
      for (int rank = 0; rank < kCluster; ++rank) {
        const piece_t piece = shared.piece[rank][c];
        l += piece.l * piece.weight(shift);
      }
      const piece_t own = shared.piece[cluster_rank()][c];
      shared.finish[c] = finish_column(shift, l, kLog ? 1 : own.weight(shift));
    }
#endif
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      finish[j] = shared.finish[tile_t::side() * kVector + j];
    }
  }
}

// Sums the exponentials of one of this thread's columns, and keeps them if they fit.
template <typename Exp>
__device__ __forceinline__ total_t
sum_column(held_t& held, const tile_t& tile, int j, Exp exp) {
  constexpr bool kPairs = sizeof(acc_t) == 4;  // half of the conversions to double
  part_t sum = {};
#pragma unroll
  for (int k = 0; k < kHeld; k += kPairs ? 2 : 1) {
    acc_t e = exp(held.score(tile, k, j));
    held.keep(k, j, e);
    if (kPairs && k + 1 < kHeld) {
      const acc_t next = exp(held.score(tile, k + 1, j));
      held.keep(k + 1, j, next);
      e += next;
    }
    sum += e;
  }
  return total(sum);
}

__device__ __forceinline__ void softmax(held_t& held,
                                        out_t* out,
                                        const tile_t& tile,
                                        shared_t& shared) {
  const unsigned zero = unsigned(tile.layout.row_length >> 32);
  acc_t m[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) m[j] = -infinity<acc_t>();
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      m[j] = larger_seen_t()(m[j], held.score(tile, k, j).high);
    }
  }
  block_max(shared, m);
  if (kSharesMax) cluster_max(shared, m);
  held.value.forget(zero);

  total_t sum[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if constexpr (kInPowers) {
      sum[j] = power_t::takes(m[j]) ? sum_column(held, tile, j, power_t(m[j]))
                                    : sum_column(held, tile, j, natural_t(m[j]));
    } else {
      sum[j] = sum_column(held, tile, j, natural_t(m[j]));
    }
  }

  finish_t finish[kVector];
  finish_columns(shared, m, sum, finish);
  held.value.forget(zero);

  tile.store(out, kOut, [&](int k, int j) {
    acc_t value;
    if constexpr (kLog) {
      value = finish[j](held.score(tile, k, j));
    } else if (kKeepsExp) {
      value = to<acc_t>(held.value.get(k, j)) * finish[j].inverse;
    } else {
      value = natural_t(m[j])(held.score(tile, k, j)) * finish[j].inverse;
    }
    if (kHasWhere && !held.is_selected(tile, k, j)) value = unselected();
    return to<out_t>(value);
  });
}

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(kNumThreads, RESIDENT)
    softmax_columns(const x_t* x,
                    const bool* where,
                    out_t* out,
                    const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
  const deal how = takes_vectors(x, layout, kX) && takes_vectors(out, layout, kOut)
                       ? deal::kVectors
                       : deal::kSingles;
  if (kCluster > 1) cluster_sync();  // no block is written to before it runs
  const tile_index_t end = num_tiles(layout);
  for (tile_index_t at = first_tile(); at < end; at += tile_step()) {
    const tile_t tile(layout, how, at);
    held_t held;
    held.load(x, where, tile);
    softmax(held, out, tile, shared);
    // No block may write its next numbers to one that still reads these.
    if (kCluster > 1 && at + tile_step() < end) cluster_sync();
  }
}

// SPDX-License-Identifier: MIT
// attention_tiled_f64: FlashAttention in float64 on tensor cores.
//
// Algorithm  FlashAttention-2 forward (Dao 2023, algorithm 1), with a reference m in
//            place of the running maximum. For each tile of keys
//                s = score(q k^T),  p = exp(s - m),  l += rowsum p,  o += p v
//            and at the end  out = o / l,  lse = m + log l. Only if a score exceeds m
//            by more than kRoom, m becomes the largest score of the tile, and o and l
//            are rescaled: p up to 2^kRoom is as accurate as p up to 1.
// Grid       1-D, one block per tile of queries of one head; if causal, longest first:
//            the last tiles of all heads
// Tiles      q     kBlockM x kHeadDim                 shared, loaded once
//            k, v  kBlockN x kHeadDim (kHeadDimV)     shared, kSlots buffers, in turn
//            s, p, o  registers; a warp owns 16 rows, or two warps do: each then sums
//                  q k^T over half of the columns, they exchange the sums, and each
//                  adds p v to half of the columns of o
// Memory     global: q and out once; k and v once per block, mostly from L2. Copies run
//            kSlots - 1 tiles ahead. With 3 buffers, one is free once all warps have
//            read it, and no barrier holds all warps of a block: while one computes
//            weights, another multiplies. With 2, warps wait for each other
// Schedule   a product of 16 rows, 8 columns and 16 slots occupies the tensor cores of
//            a quarter of a multiprocessor for 64 clocks. Each is enclosed by two holds
//            (ptx/hold.cuh), with loads and additions for others beside it, so that the
//            next is ready when the tensor cores are free
// Numbers    all in float64. p v of a tile is summed on its own before it is added to
//            o, and so are runs of tiles (attention/simt/long_sums.cuh)
// Limits     the host rounds kHeadDim and kHeadDimV up; zeros pad. With PARTIAL_ROWS
//            rows that are shorter, or begin between 16-byte vectors, are copied fast
//
// The products are s = q k^T and o^T = v^T p^T: a lane holds of s, as a result, exactly
// what it needs of p as the second operand, and reads two adjacent columns of v, 16
// bytes, for the first (tile.cuh tells which slots they are).
#include "attention/simt/long_sums.cuh"
#include "attention/score/mask_bits.cuh"
#include "attention/score/score.cuh"
#include "attention/fp64/tile.cuh"
#include "common/exp2_f64.cuh"
#include "common/reduce.cuh"
#include "ptx/barrier.cuh"
#include "ptx/hold.cuh"
#include "ptx/mbarrier_copy.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_M) || \
    !defined(BLOCK_N) || !defined(SLOTS) || !defined(SHARERS) ||       \
    !defined(IN_REGISTERS) || !defined(MIN_BLOCKS)
#error \
    "HEAD_DIM, .. BLOCK_N, SLOTS, SHARERS, IN_REGISTERS and MIN_BLOCKS come from the host"
#endif
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kSlots = SLOTS;        // buffers for tiles of k and v
constexpr bool kDrift = kSlots > 2;  // warps need not be at the same tile
// Lanes per warp that report that it has read a tile: all for racecheck, which does not
// understand one lane that arrives for its warp.
constexpr int kArrivals = IS_GIVEN(EACH_LANE_ARRIVES) ? 32 : 1;
constexpr int kSharers = SHARERS;  // warps that own 16 rows together: 1 or 2
// Steps of q.k with q in registers, per warp.
constexpr int kInRegisters = IN_REGISTERS;
constexpr int kMinBlocks = MIN_BLOCKS;  // blocks per multiprocessor; limits registers
// Whether scores are finished one by one; otherwise they are q.k, and the scale is
// applied in the exponential.
constexpr bool kTerms = IS_GIVEN(SCALE_SCORES) || kChangesScores;

// The mask comes as bits, and scores know nothing of it.
constexpr bool kMaskBits = IS_GIVEN(MASK_BITS);
static_assert(!kMaskBits || !kTerms);

// Fragments of k are loaded this many products ahead. With options, two would spill at
// 128 columns.
constexpr int kAhead = kTerms || kMaskBits || kHasSinks || kHasQueryOffsets ||
                               kHasQueryLengths || kHasKeyLengths
                           ? 1
                           : 2;

constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr int kNumTeams = kNumWarps / kSharers;  // of warps with the same rows
constexpr int kTiles = kBlockN / 8;              // of s, 8 columns each
// Per warp: steps of the sum q.k and of the sum p v, and chunks of o, two tiles of 8
// columns each.
constexpr int kStepsD = kHeadDim / 16 / kSharers;
constexpr int kStepsInShared = kStepsD - kInRegisters;  // with q in shared memory
constexpr int kStepsN = kBlockN / 16;
constexpr int kChunks = kHeadDimV / 16 / kSharers;
static_assert(kNumTeams * kWarpRows == kBlockM && kBlockN % 16 == 0);
static_assert(kHeadDim % (16 * kSharers) == 0 && kHeadDimV % (16 * kSharers) == 0);
static_assert(kSlots >= 2 && kStepsInShared >= 0);

// How many powers of 2 the largest score may exceed m by.
constexpr double kRoom = 8;

constexpr int kDimOfSlot = kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV;
constexpr int kSlotSize = kBlockN * kDimOfSlot;

// Position of a warp among those that share its rows.
__device__ __forceinline__ int team() { return threadIdx.x / kWarpSize / kSharers; }
__device__ __forceinline__ int sharer() { return threadIdx.x / kWarpSize % kSharers; }

// State common to the threads of a block, or of a warp; in shared memory, since
// registers are scarce.
struct block_t : bits_of_rows_t<kMaskBits> {
  const double *q, *k, *v;
  double* out;
  row_lse_t* lse;
  index_t i0, first, last;  // queries from i0 on see keys of [first, last)
  int num_cols, num_kv_tiles;
  // Keys that some query of a team sees, and that all of them see; relative to `first`.
  int first_key[kNumTeams], last_key[kNumTeams];
  int first_common[kNumTeams], last_common[kNumTeams];
  // The buffer holds its tile; all warps have read it.
  ptx::copy_barrier_t full[kSlots], empty[kSlots];
  double unit;  // a score of 1 is unit * log2(e) in exponents of 2
  double room;  // kRoom as a score
  exp2_table_t exp2;
};

// What a lane owns: rows g and g + 8 of its warp, called 0 and 1.
template <int kCount> struct rows_t {
  double s[kTiles][4];      // scores; fragments c
  double p[kStepsN][2][4];  // weights of rows g and g + 8; fragments b
  // Rows 2 t + (0, 1, 0, 1) and those + 8, columns 2 g + (0, 0, 1, 1) of a chunk: the
  // fragments c of the transposed product.
  using o_t = double[kCount][2][4];
  using l_t = double[2];
  o_t o;
  double m[2];
  l_t l;  // over the lane's own columns
};

// Fragments a of the steps of q that a warp keeps in registers.
struct q_in_registers_t {
  double a[kInRegisters > 0 ? kInRegisters : 1][8];

  __device__ q_in_registers_t(const double* q, index_t stride, index_t num_rows,
                              int dim) {
#pragma unroll
    for (int n = 0; n < 8 * kInRegisters; ++n) {
      const int step = sharer() * kStepsD + kStepsInShared + n / 8, i = n % 8 / 2;
      const int row = lane_g() + 8 * (n % 2);
      const int col = 16 * step + 8 * (i / 2) + 2 * lane_t() + i % 2;
      a[n / 8][n % 8] = row < num_rows && col < dim ? q[row * stride + col] : 0;
    }
  }
};

// s = q k^T over this warp's part of the columns.
template <int kCount>
__device__ __forceinline__ void dot(rows_t<kCount>& rows,
                                    const q_in_registers_t& q_in_registers,
                                    const double* q, const double* k,
                                    const block_t& block) {
  q += sharer() * kStepsInShared * kStepSize + threadIdx.x % kWarpSize * kVec;
  k += sharer() * kStepsD * 16;
  const double* const k_lane[2] = {k + place<kHeadDim>(lane_g(), lane_t()),
                                   k + place<kHeadDim>(lane_g(), 4 + lane_t())};
  // Fragments of q are loaded one step ahead of the products.
  constexpr int kProducts = kTiles * kStepsD;
  double a[2][8], b[kAhead + 1][4];
  const auto load_q = [&](int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double2 x = ptx::load_here(q + step * kStepSize + i * kWarpSize * kVec);
      a[step % 2][2 * i] = x.x;
      a[step % 2][2 * i + 1] = x.y;
    }
  };
  const auto load_k = [&](int product) {
    const int at = 8 * (product % kTiles) * kHeadDim + 16 * (product / kTiles);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const double2 x = ptx::load_here(k_lane[i] + at);
      b[product % (kAhead + 1)][2 * i] = x.x;
      b[product % (kAhead + 1)][2 * i + 1] = x.y;
    }
  };
  const int count = block.num_cols;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) rows.s[n][e] = 0;
  }
  if constexpr (kStepsInShared > 0) load_q(0);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_k(i);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int step = i / kTiles, n = i % kTiles;
    ptx::hold(count, i);
    if (i + kAhead < kProducts) load_k(i + kAhead);
    // Not before the first product of a step, because the previous one may still be
    // reading these registers; before the second of two it would be late.
    if (n == (kTiles > 2 ? 1 : 0) && step + 1 < kStepsInShared) load_q(step + 1);
    add_product(rows.s[n],
                *(step < kStepsInShared ? &a[step % 2]
                                        : &q_in_registers.a[step - kStepsInShared]),
                b[i % (kAhead + 1)]);
  }
}

// Loops over a tile of keys. With kExact they stay loops and the tile is on the stack:
// few blocks need that code, and it is compiled with each kernel.
template <bool kExact> constexpr int kUnrolled = kExact ? 1 : 4 * kTiles;

// dot() with kExact: the same sums in the same order.
template <int kCount>
__device__ __forceinline__ void dot_in_loop(rows_t<kCount>& rows,
                                            const q_in_registers_t& q_in_registers,
                                            const double* q, const double* k) {
  q += sharer() * kStepsInShared * kStepSize + threadIdx.x % kWarpSize * kVec;
  k += sharer() * kStepsD * 16;
#pragma unroll 1
  for (int n = 0; n < kTiles; ++n) {
    double sum[4] = {};
#pragma unroll
    for (int step = 0; step < kStepsD; ++step) {
      double a[8], b[4];
      if (step < kStepsInShared) load_own(a, q, step);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const double2 x = load2(k + 8 * n * kHeadDim + 16 * step +
                                place<kHeadDim>(lane_g(), 4 * i + lane_t()));
        b[2 * i] = x.x;
        b[2 * i + 1] = x.y;
      }
      const auto& own = q_in_registers.a[max(step - kStepsInShared, 0)];
      add_product(sum, *(step < kStepsInShared ? &a : &own), b);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) rows.s[n][e] = sum[e];
  }
}

// Adds the sums of two warps; both get the same bits.
template <bool kExact, int kCount>
__device__ __forceinline__ void exchange_sums(rows_t<kCount>& rows, double* exchange) {
  constexpr int kSize = kWarpRows * kBlockN;
  double* const mine = exchange + threadIdx.x / kWarpSize * kSize;
  const double* const other = exchange + (threadIdx.x / kWarpSize ^ 1) * kSize;
  const int lane = threadIdx.x % kWarpSize * kVec;
  ptx::bar_sync<2 * kWarpSize>(1 + team());  // both have read the previous exchange
#pragma unroll(kUnrolled<kExact>)
  for (int n = 0; n < 2 * kTiles; ++n) {
    *reinterpret_cast<double2*>(mine + n * kWarpSize * kVec + lane) =
        make_double2(rows.s[n / 2][n % 2 * 2], rows.s[n / 2][n % 2 * 2 + 1]);
  }
  ptx::bar_sync<2 * kWarpSize>(1 + team());  // both have written
#pragma unroll(kUnrolled<kExact>)
  for (int n = 0; n < 2 * kTiles; ++n) {
    const double2 x = load2(other + n * kWarpSize * kVec + lane);
    rows.s[n / 2][n % 2 * 2] += x.x;
    rows.s[n / 2][n % 2 * 2 + 1] += x.y;
  }
}

// What the mask shows of a tile of keys to rows g and g + 8: key 8 n + 2 t + e in bit 2
// n + e.
using shown_bits_t = unsigned[2];

__device__ __forceinline__ void load_shown(shown_bits_t& shown, const block_t& block,
                                           int first_row, index_t j) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    shown[r] = block.word(first_row + lane_g() + 8 * r, j, lane_t());
  }
}

// Turns raw scores into final ones; with kCheck hidden keys get -inf.
template <bool kExact, bool kCheck, int kCount>
__device__ __forceinline__ void score(rows_t<kCount>& rows, const scores_t& scores,
                                      const mask_bounds_t& bounds,
                                      const shown_bits_t& shown, index_t i0,
                                      index_t j0) {
#pragma unroll(kUnrolled<kExact>)
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll(kUnrolled<kExact>)
    for (int e = 0; e < 4; ++e) {
      const int row = lane_g() + 8 * (e / 2), col = 8 * n + 2 * lane_t() + e % 2;
      double& s = rows.s[n][e];
      const bool is_shown = !kMaskBits || shown[e / 2] >> (2 * n + e % 2) & 1;
      if ((kCheck && !bounds.sees(row, col)) || !is_shown) {
        s = -infinity<double>();
      } else if constexpr (kTerms) {
        s = scores(s, i0 + row, j0 + col);
      }
    }
  }
}

// The value that the lanes of row 2 t + e hold.
__device__ __forceinline__ double of_row(double x, int e) {
  return __shfl_sync(kFullMask, x, 4 * (2 * lane_t() + e));
}

// If a score is far above m, m becomes the largest of the tile. From a NaN or +inf on,
// the sum of a row is NaN.
template <bool kExact, int kCount>
__device__ __forceinline__ void raise(rows_t<kCount>& rows, const exp2_t& exp2,
                                      const block_t& block, const float (&limit)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    double top = -infinity<double>();
    bool nonfinite = false;
#pragma unroll(kUnrolled<kExact>)
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const double s = rows.s[n][2 * r + e];
        top = s > top ? s : top;
        nonfinite |= !(s < infinity<double>());
      }
    }
    top = warp_reduce<4>(top, [](double a, double b) { return a > b ? a : b; });
    // The same test as the caller's, per row: its bits do not depend on other rows.
    const bool is_raised =
        !(high_word_as_float(top) <= limit[r]) && top > rows.m[r] + block.room;
    const double power = exp2(rows.m[r] - top);
    const double alpha = is_raised ? power : 1;
    if (is_raised) rows.m[r] = top;
    rows.l[r] = nonfinite ? nan_value<double>() : rows.l[r] * alpha;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const double factor = of_row(alpha, e);
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        rows.o[c][r][e] *= factor;
        rows.o[c][r][2 + e] *= factor;
      }
    }
  }
}

// Two-level sums of o and l over many keys.
template <int kCount> class two_level_rows_t {
 public:
  __device__ __forceinline__ void begin() {
    o_.begin();
    l_.begin();
  }

  // Ends a run.
  __device__ __forceinline__ void end(rows_t<kCount>& rows, const exp2_t& exp2) {
    const factors_t by(*this, rows, exp2);
    o_.end(rows.o, [&](int n) { return by.of_o[n / 4 % 2 * 2 + n % 2]; });
    l_.end(rows.l, [&](int n) { return by.of_l[n]; });
  }

  __device__ __forceinline__ void finish(rows_t<kCount>& rows, const exp2_t& exp2) {
    if (!o_.any()) return;
    const factors_t by(*this, rows, exp2);
    o_.finish(rows.o, [&](int n) { return by.of_o[n / 4 % 2 * 2 + n % 2]; });
    l_.finish(rows.l, [&](int n) { return by.of_l[n]; });
  }

 private:
  // Factors from the scale of the last run to the current one: of rows 2 t + (0, 1) and
  // those + 8; of rows g and g + 8.
  struct factors_t {
    double of_o[4], of_l[2];

    __device__ __forceinline__ factors_t(two_level_rows_t& two_level,
                                         const rows_t<kCount>& rows,
                                         const exp2_t& exp2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const double before = two_level.m_[r];
        const double power = exp2(before - rows.m[r]);
        of_l[r] = two_level.o_.any() && before != -infinity<double>() ? power : 0;
        two_level.m_[r] = rows.m[r];
#pragma unroll
        for (int e = 0; e < 2; ++e) of_o[2 * r + e] = of_row(of_l[r], e);
      }
    }
  };

  two_level_sum_t<double, typename rows_t<kCount>::o_t> o_;
  two_level_sum_t<double, typename rows_t<kCount>::l_t> l_;
  volatile double m_[2];  // at the end of the last run
};

// Turns scores into weights, exp(unit (s - m)), and adds these to l. With kExact they
// can be told apart as in weight() of attention/score/score.cuh: -0 for a hidden key, 0
// for a weight of 0, and small numbers.
template <bool kExact, int kCount>
__device__ __forceinline__ void softmax(rows_t<kCount>& rows, const block_t& block) {
  const exp2_t exp2(block.exp2);
  bool above = false;
  float limit[2];  // the high word of m + room
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // For scores in the millions the high word is too coarse.
    limit[r] = abs_of(rows.m[r]) * block.unit < 1e6
                   ? high_word_as_float(rows.m[r] + block.room)
                   : nan_value<float>();
  }
#pragma unroll(kUnrolled<kExact>)
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // Also true for NaN and infinities, whose high words are NaN as floats.
      above |= !(high_word_as_float(rows.s[n][e]) <= limit[e / 2]);
    }
  }
  if (__any_sync(kFullMask, above)) raise<kExact>(rows, exp2, block, limit);

  double m[2], l[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    m[r] = rows.m[r] == -infinity<double>() ? 0 : rows.m[r];
  }
#pragma unroll(kUnrolled<kExact>)
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const double s = rows.s[n][e], x = s - m[e / 2];
      double p = exp2(x);
      if constexpr (kExact) {
        constexpr double kSmallest = 4.9406564584124654e-324;  // 2^-1074
        if (p == 0 && x * block.unit > -1074 * kLn2) p = kSmallest;
        if (s == -infinity<double>()) p = -0.0;
      }
      l[e / 2] += p;
      rows.p[n / 2][e / 2][n % 2 * 2 + e % 2] = p;
    }
  }
  rows.l[0] += l[0];
  rows.l[1] += l[1];
}

// o += p v.
template <int kCount>
__device__ __forceinline__ void add_values(rows_t<kCount>& rows, const double* v,
                                           const block_t& block) {
  const double* v_lane[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    v_lane[e] = v + place<kHeadDimV>(2 * lane_t() + e, lane_g());
  }
  // Two products per fragment of v, which is loaded one ahead. A sum is added to o two
  // products later: it is complete by then, and nothing waits for it.
  constexpr int kFragments = kStepsN * kCount, kProducts = 2 * kFragments, kDelay = 3;
  double a[2][8], sum[2][2][4];
  const auto load = [&](int fragment) {
    const int step = fragment % kStepsN, c = fragment / kStepsN;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double2 x = ptx::load_here(v_lane[i % 2] +
                                       (16 * step + 8 * (i / 2)) * kHeadDimV + 16 * c);
      a[fragment % 2][2 * i] = x.x;
      a[fragment % 2][2 * i + 1] = x.y;
    }
  };
  const int count = block.num_cols;
  load(0);
#pragma unroll
  for (int i = 0; i < kProducts + kDelay; ++i) {
    const int done = i - kDelay;
    if (done >= 0 && done / 2 % kStepsN == kStepsN - 1) {
      const int c = done / 2 / kStepsN, h = done % 2;
      ptx::hold(count, 2 * i);
#pragma unroll
      for (int n = 0; n < 4; ++n) rows.o[c][h][n] += sum[c % 2][h][n];
    }
    if (i >= kProducts) continue;
    const int fragment = i / 2, h = i % 2;
    const int step = fragment % kStepsN, c = fragment / kStepsN;
    ptx::hold(count, 2 * i + 1);
    if (h == 1 && fragment + 1 < kFragments) load(fragment + 1);
    if (step == 0) {
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[c % 2][h][n] = 0;
    }
    add_product(sum[c % 2][h], a[fragment % 2], rows.p[step][h]);
  }
}

// Counts nonfinite values: the product of a code of p and one of v is 0 if it adds
// nothing. A sum of 256 codes of one kind does not reach the next.
constexpr double kPlusInf = 1, kMinusInf = 1 << 8, kNotANumber = 1 << 16;
__device__ __forceinline__ double code_of_p(double p) {
  return p > 0 ? 1 : is_unseen(p) || is_nan(p) ? 0 : kNotANumber;  // 0 inf is NaN
}
__device__ __forceinline__ double code_of_v(double v) {
  return is_finite(v) ? 0 : is_nan(v) ? kNotANumber : v > 0 ? kPlusInf : kMinusInf;
}
// What the counted values add to a finite sum.
__device__ __forceinline__ double special(double count) {
  const bool plus = static_cast<index_t>(count) % 256 != 0, minus = count >= kMinusInf;
  if (count >= kNotANumber || (plus && minus)) return nan_value<double>();
  return plus ? infinity<double>() : minus ? -infinity<double>() : 0;
}

// Sums of the largest numbers overflow although their means do not. With kExact, o is
// that of values times kDown.
constexpr double kDown = 0x1p-64, kUp = 0x1p64;

// o += p v with kExact, where a hidden key adds nothing, not even 0 * NaN: finite
// values are summed, then the others counted.
template <int kCount>
__device__ __forceinline__ void add_values_exactly(rows_t<kCount>& rows,
                                                   const double* v) {
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const bool counts = pass == 1;
    const auto value = [=](double x) {
      return counts ? code_of_v(x) : is_finite(x) ? x * kDown : 0;
    };
    double sum[kCount][2][4] = {};
#pragma unroll 1
    for (int step = 0; step < kStepsN; ++step) {
      double p[2][4];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const double x = rows.p[step][n / 4][n % 4];
        p[n / 4][n % 4] = counts ? code_of_p(x) : x;
      }
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        double a[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const double2 x = load2(v + place<kHeadDimV>(2 * lane_t() + i % 2, lane_g()) +
                                  (16 * step + 8 * (i / 2)) * kHeadDimV + 16 * c);
          a[2 * i] = value(x.x);
          a[2 * i + 1] = value(x.y);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) add_product(sum[c][h], a, p[h]);
      }
    }
#pragma unroll
    for (int n = 0; n < 8 * kCount; ++n) {
      const double x = sum[n / 8][n / 4 % 2][n % 4];
      rows.o[n / 8][n / 4 % 2][n % 4] += counts ? special(x) : x;
    }
  }
}

// Whether a run ends before this tile, counted from key `first`. There is no register
// to count keys in addition to tiles.
__device__ __forceinline__ bool run_ends_before(index_t first, unsigned tile) {
  ptx::launder(tile);
  return (static_cast<unsigned>(first) / kBlockN + tile) % kRunTiles == 0;
}

// The end of a range of queries, at most the number of queries.
__device__ __forceinline__ index_t last_query(const params_t& params, index_t i_last) {
  return i_last < params.seqlen_q ? i_last : params.seqlen_q;
}

// Loops over all keys and stores the results of kCount chunks of columns. Returns
// whether all are finite; otherwise kExact = false stores nothing.
template <bool kExact, int kCount>
__device__ __forceinline__ bool walk(block_t& block, const scores_t& scores,
                                     const params_t& params, const double* smem_q,
                                     double* slots, int first_chunk) {
  const int first_row = team() * kWarpRows;
  double* const exchange = slots + kSlots * kSlotSize;

  if (kDrift && threadIdx.x == 0) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::copy_barrier_init(&block.full[slot], kNumThreads);
      ptx::copy_barrier_init(&block.empty[slot], kNumWarps * kArrivals);
    }
  }
  __syncthreads();  // `block` is complete

  const auto wait = [](ptx::copy_barrier_t& barrier, int parity) {
    while (!ptx::copy_barrier_test(&barrier, parity)) {
    }
  };
  // Copies of tiles that a warp skips are short code, as all are with kExact.
  constexpr flag_t<false> kK;
  constexpr flag_t<true> kV;
  constexpr flag_t<kExact> kFast;
  constexpr flag_t<true> kShort;
  // Items are tiles of k and v in turn: k of the first tile, its v, k of the second.
  const auto copy = [&](auto is_v, int kv_tile, auto is_short) {
    double* const to = slots + kv_tile % kSlots * kSlotSize;
    const index_t j = index_t(kv_tile / 2) * kBlockN;
    const index_t num_keys = block.last - block.first - j;
    if constexpr (is_v.value) {
      copy_rows<kBlockN, kHeadDimV, kHeadDimV, is_short.value>(
          to, block.v + j * params.v.row, params.v.row, num_keys, block.num_cols);
    } else {
      copy_rows<kBlockN, kHeadDim, kHeadDim, is_short.value>(
          to, block.k + j * params.k.row, params.k.row, num_keys,
          static_cast<int>(params.head_dim));
    }
  };
  const auto fetch = [&](auto is_v, int kv_tile, auto is_short) {
    if constexpr (kDrift) {
      if (kv_tile >= block.num_kv_tiles) return;
      const int slot = kv_tile % kSlots, turn = kv_tile / kSlots;
      if (turn > 0) wait(block.empty[slot], (turn - 1) % 2);
      copy(is_v, kv_tile, is_short);
      ptx::copy_barrier_arrive_after_copies(&block.full[slot]);
    } else {
      if (kv_tile < block.num_kv_tiles) copy(is_v, kv_tile, is_short);
      ptx::commit_copy_group();
    }
  };
  constexpr int kAhead = kSlots - 1;
  // Waits for a tile.
  const auto take = [&](auto is_v, int kv_tile, auto is_short) {
    if constexpr (kDrift) {
      wait(block.full[kv_tile % kSlots], kv_tile / kSlots % 2);
    } else {
      ptx::wait_copy_groups<kSlots - 2>();
      __syncthreads();  // the tile is visible; all warps have read the one before
      fetch(flag_t<(is_v.value + kAhead) % 2>{}, kv_tile + kAhead, is_short);
    }
    return slots + kv_tile % kSlots * kSlotSize;
  };
  // This warp has read a tile.
  const auto release = [&](int kv_tile) {
    if constexpr (kDrift) {
      __syncwarp();  // all lanes have
      if (threadIdx.x % kWarpSize < kArrivals) {
        ptx::copy_barrier_arrive(&block.empty[kv_tile % kSlots]);
      }
    }
  };
  // Starts the copy of a later tile, unless take() did.
  const auto go_on = [&](auto is_v, int kv_tile, auto is_short) {
    if constexpr (kDrift)
      fetch(flag_t<(is_v.value + kAhead) % 2>{}, kv_tile + kAhead, is_short);
  };

  const q_in_registers_t q_in_registers(
      block.q + first_row * params.q.row, params.q.row,
      params.seqlen_q - block.i0 - first_row, static_cast<int>(params.head_dim));
  rows_t<kCount> rows;
  two_level_rows_t<kCount> two_level;
  if constexpr (kTwoLevelSums) two_level.begin();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.m[r] = -infinity<double>();
    rows.l[r] = 0;
  }
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
#pragma unroll
    for (int n = 0; n < 8; ++n) rows.o[c][n / 4][n % 4] = 0;
  }
#pragma unroll
  for (int kv_tile = 0; kv_tile < kSlots - 1; kv_tile += 2) {
    fetch(kK, kv_tile, kFast);
    if (kv_tile + 1 < kSlots - 1) fetch(kV, kv_tile + 1, kFast);
  }

#pragma unroll 1
  for (int kv_tile = 0; kv_tile < block.num_kv_tiles; kv_tile += 2) {
    const int j = kv_tile / 2 * kBlockN;
    if constexpr (kTwoLevelSums) {
      if (kv_tile > 0 && run_ends_before(block.first, kv_tile / 2)) {
        two_level.end(rows, exp2_t(block.exp2));
      }
    }
    const bool some =
        j < block.last_key[team()] && j + kBlockN > block.first_key[team()] &&
        scores.shown(block.i0 + first_row, block.i0 + first_row + kWarpRows,
                     block.first + j, block.first + j + kBlockN) != kShowsNone;
    if (!some) {
      take(kK, kv_tile, kShort);
      release(kv_tile);
      go_on(kK, kv_tile, kShort);
      take(kV, kv_tile + 1, kShort);
      release(kv_tile + 1);
      go_on(kV, kv_tile + 1, kShort);
      continue;
    }
    shown_bits_t shown;
    load_shown(shown, block, first_row, block.first + j);
    const double* const own_q = smem_q + first_row * 16 * kSharers * kStepsInShared;
    if constexpr (kExact) {
      dot_in_loop(rows, q_in_registers, own_q, take(kK, kv_tile, kFast));
    } else {
      dot(rows, q_in_registers, own_q, take(kK, kv_tile, kFast), block);
    }
    release(kv_tile);
    if constexpr (kSharers == 2) exchange_sums<kExact>(rows, exchange);
    // The softcap and score functions are inlined once: each tanh is long to compile.
    if (!kExact && !kHasSoftcap && !kHasScoreFunction &&
        j >= block.first_common[team()] && j + kBlockN <= block.last_common[team()]) {
      if constexpr (kTerms || kMaskBits) {
        score<kExact, false>(rows, scores, {}, shown, block.i0 + first_row,
                             block.first + j);
      }
    } else {
      const index_t i0 = block.i0 + first_row, j0 = block.first + j;
      score<kExact, true>(rows, scores, scores.mask_bounds(i0, j0), shown, i0, j0);
    }
    softmax<kExact>(rows, block);
    go_on(kK, kv_tile, kFast);
    const double* const v_tile = take(kV, kv_tile + 1, kFast) + 16 * first_chunk;
    if constexpr (kExact) {
      add_values_exactly(rows, v_tile);
    } else {
      add_values(rows, v_tile, block);
    }
    release(kv_tile + 1);
    go_on(kV, kv_tile + 1, kFast);
  }

  if constexpr (kTwoLevelSums) two_level.finish(rows, exp2_t(block.exp2));
  __syncthreads();  // all warps have passed the last barriers
  if (kDrift && threadIdx.x == 0) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::copy_barrier_end(&block.full[slot]);
      ptx::copy_barrier_end(&block.empty[slot]);
    }
  }
  if constexpr (!kExact) {
    bool nonfinite = false;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
#pragma unroll
      for (int n = 0; n < 8; ++n) nonfinite |= !is_finite(rows.o[c][n / 4][n % 4]);
    }
    if (__syncthreads_or(nonfinite)) return false;
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + lane_g() + 8 * r;
    const index_t i = block.i0 + row;
    const double l =
        warp_reduce<4>(rows.l[r], [](double a, double b) { return a + b; });
    const finished_t finished = scores.finish(i, rows.m[r] * block.unit, l);
    if (block.lse != nullptr && i < params.seqlen_q && sharer() == 0 && lane_t() == 0) {
      block.lse[row] = finished.lse;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const double inverse = of_row(finished.inverse, e) * (kExact ? kUp : 1);
      const int out_row = first_row + 8 * r + 2 * lane_t() + e;
      if (block.i0 + out_row >= params.seqlen_q) continue;
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int col = 16 * (first_chunk + c) + 2 * lane_g() + n;
          if (col < block.num_cols) {
            block.out[out_row * params.out.row + col * params.out.col] =
                rows.o[c][r][2 * n + e] * inverse;
          }
        }
      }
    }
  }
  return true;
}

// The same with everything that infinities and NaN among the values require. A separate
// function, so that it does not affect the registers of the other.
__device__ __noinline__ void walk_exactly(block_t& block, const scores_t& scores,
                                          const params_t& params, const double* smem_q,
                                          double* slots) {
  // Few columns at a time, since counts need registers, too.
  constexpr int kCount = kChunks % 2 == 0 ? 2 : 1;
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; chunk += kCount) {
    __syncthreads();  // the barriers of the previous pass have ended
    walk<true, kCount>(block, scores, params, smem_q, slots,
                       sharer() * kChunks + chunk);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_tiled_f64(FORWARD_PARAMETERS, MASK_BITS_PARAMETER SCORE_PARAMETERS) {
  extern __shared__ __align__(16) unsigned char smem[];
  double* const smem_q = reinterpret_cast<double*>(smem);
  double* const slots = smem_q + kBlockM * 16 * kSharers * kStepsInShared;
  __shared__ block_t block;

  const index_t num_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const index_t num_heads = params.batch_size * params.num_heads;
  // Position bounds make tiles of several lengths. If all are alike, those of a head
  // follow each other, since they read the same keys.
  const bool by_length = params.left < kFar || params.right < kFar;
  const index_t in_turn = by_length ? num_heads : num_tiles;
  const index_t turn = divide(block_index(), in_turn);
  const index_t rest = block_index() - turn * in_turn;
  if (turn * in_turn >= num_heads * num_tiles) return;
  const tile_coord_t at(params, by_length ? rest : turn);
  const index_t from_last = by_length ? turn : rest;
  const scores_t scores(at, SCORE_ARGUMENTS);
  {
    const int own = team();
    const index_t i_block = (num_tiles - 1 - from_last) * kBlockM;
    const index_t i0 = i_block + own * kWarpRows;
    const range_t keys = scores.keys_of(i_block, last_query(params, i_block + kBlockM));
    // Tiles start at multiples of kBlockN, so that the order of summation of a row does
    // not depend on its tile of queries.
    const index_t first = keys.first / kBlockN * kBlockN;
    const double* const q_block = at.at(q, params.q) + i_block * params.q.row;
    if constexpr (kStepsInShared > 0) {
      constexpr int kDim = 16 * kStepsInShared;  // of the columns of a warp
#pragma unroll
      for (int share = 0; share < kSharers; ++share) {
        copy_own<kDim, kSharers>(
            smem_q + (own * kSharers + share) * kWarpRows * kDim,
            q_block + own * kWarpRows * params.q.row + share * 16 * kStepsD,
            params.q.row, static_cast<int>(clamp(params.seqlen_q - i0, 0, kWarpRows)),
            static_cast<int>(params.head_dim) - share * 16 * kStepsD);
      }
    }
    if (threadIdx.x == 0) {
      block.num_cols = static_cast<int>(params.head_dim_v);
      block.q = q_block;
      block.k = at.at_kv(k, params.k) + first * params.k.row;
      block.v = at.at_kv(v, params.v) + first * params.v.row;
      block.out = at.at(out, params.out) + i_block * params.out.row;
      block.lse =
          lse == nullptr ? nullptr : lse + at.row_of_heads * params.seqlen_q + i_block;
      block.begin(MASK_BITS_ARGUMENT, at, i_block, params.seqlen_q - i_block);
      block.unit = kTerms ? 1 : params.scale;
      block.room = kRoom / (block.unit * kLog2e);
      block.i0 = i_block;
      block.first = first;
      block.last = keys.last;
      block.num_kv_tiles =
          keys.last > first
              ? 2 * static_cast<int>((keys.last - first + kBlockN - 1) / kBlockN)
              : 0;
    }
    if (threadIdx.x < kWarpSize) block.exp2.fill((kTerms ? 1 : params.scale) * kLog2e);
    if (threadIdx.x % (kWarpSize * kSharers) == 0) {
      const range_t seen = scores.keys_of(i0, last_query(params, i0 + kWarpRows));
      block.first_key[own] = static_cast<int>(seen.first - first);
      block.last_key[own] = static_cast<int>(seen.last - first);
      // Rows past the end are not stored; only options must not be read there.
      const index_t i_last = last_query(params, i0 + kWarpRows);
      const bool whole = scores.is_query(i_last - 1) &&
                         (kTerms ? i_last == i0 + kWarpRows : i_last > i0) &&
                         !kHasMask && !kHasScoreFunction && !kHasMaskFunction;
      block.first_common[own] =
          whole ? static_cast<int>(scores.keys_of(i_last - 1, i_last).first - first)
                : 0;
      block.last_common[own] =
          whole ? static_cast<int>(scores.keys_of(i0, i0 + 1).last - first) : 0;
    }
  }
  if (!walk<false, kChunks>(block, scores, params, smem_q, slots, sharer() * kChunks)) {
    // A nonfinite result may come from a hidden key, as 0 * NaN.
    walk_exactly(block, scores, params, smem_q, slots);
  }
}

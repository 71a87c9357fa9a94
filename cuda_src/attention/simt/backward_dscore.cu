// SPDX-License-Identifier: MIT
// attention_vjp_dscore: gradients of the arrays that a score function reads.
//
// Algorithm  Each read of an array adds dS * d score / d element to that element. Any
//            block may add to any element, and yet the bits must be the same in every
//            run: so sums are integers, whose order does not matter. A first pass
//            (LARGEST) finds the largest term of each array. A second one makes terms
//            multiples of a unit so small that a word holds the sum of all of them, and
//            what that cuts off multiples of a second unit, for a word of its own.
//            backward_dscore_finish.cu makes floats of both.
// Grid       1-D, a block a tile of queries of an entry
// Tiles      tile.cuh; queries are owned, keys walked over
// Memory     global: q and dO once; k and v once a block, mostly from L2; two words and
//            flags of an element, by atomics. Terms of one element that follow each
//            other in a thread are added up first: an index without j costs a thread
//            one addition
// Numbers    terms in accum_t; their sums lose nothing above 2^-44 of the largest term
//            for 2^40 terms, and less for fewer
// Limits     none
#include "attention/simt/tile.cuh"
#include "common/reduce.cuh"

#if !defined(LARGEST) || !SCORE_FUNCTION
#error "LARGEST and a score function with its reads come from the host"
#endif
constexpr bool kLargest = LARGEST;
constexpr int kReads = score_mod_num_reads, kArrays = score_mod_num_arrays;

// Flags of an element that a word cannot hold.
enum nonfinite_t : unsigned { kInfinite = 1, kNegativeInfinite = 2, kNaN = 4 };

// The sums of all elements of all arrays.
struct words_t {
  long long *high, *low;
  unsigned* flags;
  const unsigned long long* largest;  // of each array, the bits of a double
  int bits;                           // of a term in a word

  // Adds a term to an element of an array.
  __device__ void add(int array, long long place, double term) const {
    if (term == 0) return;
    if (!is_finite(term)) {
      atomicOr(flags + place, unsigned(is_nan(term) ? kNaN
                                       : term > 0   ? kInfinite
                                                    : kNegativeInfinite));
      return;
    }
    const double top = __longlong_as_double(static_cast<long long>(largest[array]));
    const double x = ldexp(term, bits - 1 - ilogb(top));  // at most 2^bits for a term
    const long long whole = llrint(x);
    const long long rest = llrint(ldexp(x - static_cast<double>(whole), bits));
    add_to(high + place, whole);
    if (rest != 0) add_to(low + place, rest);
  }

 private:
  __device__ static void add_to(long long* word, long long x) {
    atomicAdd(reinterpret_cast<unsigned long long*>(word),
              static_cast<unsigned long long>(x));
  }
};

// The terms of a thread.
struct terms_t {
  double largest[kArrays] = {};
  double sum[kReads] = {};
  long long place[kReads] = {};

  __device__ void add(const words_t& words, int read, long long at, accum_t term) {
    const int array = score_mod_array_of(read);
    if constexpr (kLargest) {
      const double size = term < 0 ? -term : term;
      if (is_finite(term) && size > largest[array]) largest[array] = size;
      return;
    }
    if (at != place[read]) {
      words.add(array, place[read], sum[read]);
      place[read] = at;
      sum[read] = 0;
    }
    sum[read] += term;
  }

  __device__ void finish(const words_t& words, unsigned long long* all_largest) const {
    if constexpr (kLargest) {
#pragma unroll
      for (int n = 0; n < kArrays; ++n) {
        const double top = warp_reduce<32>(
            largest[n], [](double a, double b) { return a > b ? a : b; });
        if (threadIdx.x % 32 == 0 && top > 0) {
          // Numbers above 0 are ordered as their bits are.
          atomicMax(all_largest + n,
                    static_cast<unsigned long long>(__double_as_longlong(top)));
        }
      }
      return;
    }
#pragma unroll
    for (int t = 0; t < kReads; ++t) words.add(score_mod_array_of(t), place[t], sum[t]);
  }
};

// What the score function is told of a score: all that stands before it.
__device__ __forceinline__ accum_t before_function(accum_t q_dot_k,
                                                   const params_t& params) {
  accum_t s = static_cast<accum_t>(params.scale) * q_dot_k;
  if constexpr (kHasSoftcap) {
    const accum_t cap = static_cast<accum_t>(params.softcap);
    s = cap * tanh_of(s / cap);
  }
  return s;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_vjp_dscore(
        BACKWARD_PARAMETERS, ROW_PARAMETERS, long long* high,
        long long* low,               // (elements of all arrays), 0 first
        unsigned* flags,              // the same
        unsigned long long* largest,  // (arrays), 0 before the first pass
        const index_t bits, SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  extern __shared__ __align__(16) unsigned char smem[];
  accum_t* const smem_q = reinterpret_cast<accum_t*>(smem);
  accum_t* const smem_dout = smem_q + (kSingle ? kBlockM * kStride : 0);
  accum_t* const smem_kv = smem_dout + kBlockM * kStride;

  const index_t num_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const tile_coord_t at(params, block_index(), num_tiles);
  if (!at.exists) return;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const index_t i0 = at.tile * kBlockM;
  const index_t num_rows = smaller(kBlockM, params.seqlen_q - i0);
  const rows_t q_rows(at.at(q, params.q) + i0 * params.q.row, params.q.row, num_rows,
                      params.head_dim);
  const rows_t dout_rows(at.at(dout, grads.dout) + i0 * grads.dout.row, grads.dout.row,
                         num_rows, params.head_dim_v);
  const accum_t* const lse_rows = at.at(lse, grads.lse);
  const accum_t* const delta_rows = delta + at.row_of_heads * params.seqlen_q;
  if (kSingle) {
    load_rows<kBlockM>(smem_q, q_rows, 0);
    load_rows<kBlockM>(smem_dout, dout_rows, 0);
  }

  const words_t words = {high, low, flags, largest, static_cast<int>(bits)};
  terms_t terms;
  const range_t keys = scores.keys_of(i0, i0 + num_rows);
  for (index_t j0 = keys.first / kBlockN * kBlockN; j0 < keys.last; j0 += kBlockN) {
    if (scores.shown(i0, i0 + num_rows, j0, j0 + kBlockN) == kShowsNone) continue;
    const rows_t k_rows(at.at_kv(k, params.k) + j0 * params.k.row, params.k.row,
                        keys.last - j0, params.head_dim);
    const rows_t v_rows(at.at_kv(v, params.v) + j0 * params.v.row, params.v.row,
                        keys.last - j0, params.head_dim_v);
    tile_t s, dp;
    dot<kSingle>(dp, dout_rows, smem_dout, v_rows, smem_kv);
    dot<kSingle>(s, q_rows, smem_q, k_rows, smem_kv);
    const mask_bounds_t bounds = scores.mask_bounds(i0, j0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const index_t i = i0 + smaller(own_row(r), num_rows - 1);
      const accum_t lse_i = lse_rows[i * grads.lse.row], delta_i = delta_rows[i];
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const index_t j = j0 + other_row(c);
        const accum_t before = before_function(s[r][c], params);
        differentiate<true>(s[r][c], dp[r][c], bounds.sees(own_row(r), other_row(c)),
                            scores, i, j, lse_i, delta_i);
        if (is_unseen(s[r][c])) continue;
        accum_t partials[kReads];
        long long places[kReads];
        score_mod_gradients<accum_t>(before, scores.entry(), scores.query_head(),
                                     scores.diagonal(i), j, params.functions.score,
                                     partials, places);
#pragma unroll
        for (int t = 0; t < kReads; ++t) {
          terms.add(words, t, places[t], dp[r][c] * partials[t]);
        }
      }
    }
  }
  terms.finish(words, largest);
}

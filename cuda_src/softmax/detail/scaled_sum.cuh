// SPDX-License-Identifier: MIT
// Sums of exponentials as l * 2^shift: one pass, no overflow, no rounded difference.
//
// exp(x) = 2^k exp(r) with k = round(x / ln 2) and |r| <= ln(2) / 2. A sum in units of
// a power of two needs no maximum to be subtracted: k is an integer, so no difference
// is rounded, and changing the unit is exact.
#pragma once

#include "common/exp2_f64.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "ptx/convert.cuh"
#include "softmax/detail/sum.cuh"

namespace detail {

__device__ __forceinline__ float smallest_nan(float a, float b) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return ptx::min_nan_f32(a, b);
#else
  return -max_nan(-a, -b);
#endif
}

// x times 2^count, exactly; x is normal and stays so.
__device__ __forceinline__ double times_power(double x, int count) {
  return __hiloint2double(__double2hiint(x) + (count << 20), __double2loint(x));
}

// exp(r) - 1 for |r| <= ln(2) / 2: r + r^2 q(r), q by Chebyshev interpolation.
__device__ __forceinline__ float expm1_reduced(float r) {
  float q = 0.0013926213f;  // gives exp(r) to 2^-26.5
  q = fmaf(q, r, 0.008363203f);
  q = fmaf(q, r, 0.041666556f);
  q = fmaf(q, r, 0.16666576f);
  q = fmaf(q, r, 0.5f);
  return fmaf(r * r, q, r);
}
__device__ __forceinline__ double expm1_reduced(double r) {
  double q = 2.5100424157005067e-08;  // gives exp(r) to 2^-55.7
  q = fma(q, r, 2.7620138719733994e-07);
  q = fma(q, r, 2.7557268378684192e-06);
  q = fma(q, r, 2.480152119021773e-05);
  q = fma(q, r, 0.00019841269863105968);
  q = fma(q, r, 0.0013888888917281794);
  q = fma(q, r, 0.008333333333330051);
  q = fma(q, r, 0.04166666666662399);
  q = fma(q, r, 0.16666666666666669);
  q = fma(q, r, 0.5000000000000001);
  return fma(r * r, q, r);
}

// Adding and subtracting kRound rounds to an integer, which is then in the low bits of
// the sum; and ln 2 in two parts.
template <typename T> struct range;
template <> struct range<float> {
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  static constexpr float kLn2High = 0.693147182464599609375f;
  static constexpr float kLn2Low = -1.9046542e-9f;
  static constexpr int kReach = 125;  // powers of two that are certainly normal
  static __device__ __forceinline__ int low_bits(float x) { return __float_as_int(x); }
  static __device__ __forceinline__ float times_power(float x, int count) {
    return __int_as_float(__float_as_int(x) + (count << 23));
  }
};
template <> struct range<double> {
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = kLn2, kLn2Low = 2.3190468138462996e-17;
  static constexpr int kReach = 1000;
  static __device__ __forceinline__ int low_bits(double x) { return __double2loint(x); }
  static __device__ __forceinline__ double times_power(double x, int count) {
    return detail::times_power(x, count);
  }
};

__device__ __forceinline__ double widened_term(float x) { return ptx::f64_from_f32(x); }
__device__ __forceinline__ double widened_term(double x) { return x; }

}  // namespace detail

// With these a warp computes exponentials of doubles together: lane j has 2^(j / 32),
// and the others fetch it by a shuffle. A polynomial covers the rest, up to 2^(1 / 64):
// half as long as one up to 2^(1 / 2).
template <typename T> struct roots_t {};
template <> struct roots_t<double> {
  static constexpr int kCount = 32;
  int high;  // its upper half, less what the index of the root adds to it below
  int low;

  __device__ __forceinline__ roots_t() {
    const int lane = threadIdx.x % kCount;
    high = __double2hiint(detail::kRootsOfTwo[lane]) - lane * (1 << 20) / kCount;
    low = __double2loint(detail::kRootsOfTwo[lane]);
  }

  // exp(x) / 2^shift, with round = kRound - kCount * shift, to half an ulp plus, since
  // x is multiplied once, |x| / 8: an eighth of an ulp of the log.
  __device__ __forceinline__ double exp_of(double x, double round) const {
    const double whole = rounded(x, round);
    const double f = fma(x, kCount * kLog2e, round - whole);  // |f| <= 1/2
    double q = 3.9737294057829113e-11;  // 2^(f / kCount) - 1, to 2^-53
    q = fma(q, f, 9.172612911737504e-09);
    q = fma(q, f, 1.6938509724129054e-06);
    q = fma(q, f, 0.00023459619819832414);
    q = fma(q, f, 0.02166084939249829);
    const double power = power_of(whole);
    return fma(power, q * f, power);
  }
  // 2^((count + f) / kCount) to half an ulp, with the count in the low bits of
  // `rounded` and |f| at most about 1/2.
  __device__ __forceinline__ double exp2_of(double f, double rounded) const {
    double q = 1.4345655584131934e-13;  // (ln(2) / kCount)^n / n!: to 2^-57
    q = fma(q, f, 3.973709984549416e-11);
    q = fma(q, f, 9.172562701824643e-09);
    q = fma(q, f, 1.693850972437182e-06);
    q = fma(q, f, 0.0002345961982022468);
    q = fma(q, f, 0.02166084939249829);
    const double power = power_of(rounded);
    return fma(power, q * f, power);
  }
  // exp(x) to one ulp, for |x| < 700.
  __device__ __forceinline__ double exp_of(double x) const {
    constexpr double kRound = detail::range<double>::kRound;
    const double whole = rounded(x, kRound);
    return of_rest(rest(x, whole - kRound), whole);
  }
  // round plus the integer multiple of ln 2 / kCount nearest to x.
  static __device__ __forceinline__ double rounded(double x, double round) {
    return fma(x, kCount * kLog2e, round);
  }

 private:
  // What remains of x after k such multiples.
  static __device__ __forceinline__ double rest(double x, double k) {
    using range = detail::range<double>;
    const double r = fma(k, -range::kLn2High / kCount, x);
    return fma(k, -range::kLn2Low / kCount, r);
  }
  __device__ __forceinline__ double of_rest(double r, double rounded) const {
    double q = 1.0 / 720;  // |r| < 0.011: to 2^-57
    q = fma(q, r, 1.0 / 120);
    q = fma(q, r, 1.0 / 24);
    q = fma(q, r, 1.0 / 6);
    q = fma(q, r, 0.5);
    const double p = fma(r * r, q, r);
    const double power = power_of(rounded);
    return fma(power, p, power);
  }
  // 2^(count / kCount), with the count in the low bits of `rounded`: root number count
  // % kCount times a power of two.
  __device__ __forceinline__ double power_of(double rounded) const {
    const int count = detail::range<double>::low_bits(rounded);
    const int upper =
        __shfl_sync(kFullMask, high, count) + count * ((1 << 20) / kCount);
    return __hiloint2double(upper, __shfl_sync(kFullMask, low, count));
  }
};

// Adds exp(score - m), score <= m, to about an eighth of an ulp: the power of two and
// the polynomial part are added separately. Their sum would be rounded by half an ulp.
__device__ __forceinline__ void add_exp(wide_sum_t& sum, double score, double m) {
  const pair_t<double> d = exact_sum(score, -m);
  if (!(d.high > -700)) {  // -inf, NaN, or negligible next to the 1 of the largest
    sum += exp_of(d);
    return;
  }
  using range = detail::range<double>;
  const double rounded = fma(d.high, kLog2e, range::kRound);
  const double k = rounded - range::kRound;
  double r = fma(k, -range::kLn2High, d.high);
  r = fma(k, -range::kLn2Low, r) + d.low;
  const double unit = detail::times_power(1.0, range::low_bits(rounded));
  sum += unit;
  sum += detail::expm1_reduced(r) * unit;
}

// m + log(1 + s) for s >= 0, where m and the log may cancel: to a fraction of an ulp of
// the larger one. A log that is rounded first would be off by up to a whole ulp.
__device__ __forceinline__ double log_beside(double m, wide_sum_t terms) {
  const double s = total(terms);
  if (s < 0.04) return m + log1p(s);
  if (!is_finite(s)) return m + s;
  // 1 + s = 2^e (f + f_low), 1/sqrt(2) <= f < sqrt(2); log f as in power_sum_t::log
  pair_t<double> sum = exact_sum(1.0, terms.high);
  sum = exact_sum(sum.high, sum.low + terms.low);
  const int e = (__double2hiint(sum.high) - 0x3fe6a09e) >> 20;
  const double f = detail::times_power(sum.high, -e);
  const double f_low = sum.low * detail::times_power(1.0, -e);
  const double y = __logf(float(f)), inverse_less_1 = detail::expm1_reduced(-y);
  const double d = fma(f, inverse_less_1, f - 1) + f_low * (1 + inverse_less_1);
  const double ln2 = e * kLn2;
  const pair_t<double> whole = exact_sum(m, ln2), all = exact_sum(whole.high, y);
  const double low =
      fma(double(e), kLn2, -ln2) + e * detail::range<double>::kLn2Low + whole.low;
  return all.high + (all.low + (low + (d - d * d / 2)));
}

// exp(x + low) / 2^shift to half an ulp of T, for scores up to kReach above the shift;
// 0 if as far below.
template <typename T> struct scaled_exp_t {
  using range = detail::range<T>;
  T lowest, round;

  __device__ __forceinline__ explicit scaled_exp_t(int shift)
      : lowest(T(shift - range::kReach) * T(kLn2)), round(range::kRound - T(shift)) {}

  // The largest score for this shift; a sum has room for 2^20 of them and more.
  static __device__ __forceinline__ T largest(int shift) {
    return T(shift + range::kReach - 25) * T(kLn2);
  }

  __device__ __forceinline__ T operator()(T x, T low = 0) const {
    const T rounded = fma_of(x, T(kLog2e), round);  // k - shift, in its low bits
    const T k = rounded - round;
    T r = fma_of(k, -range::kLn2High, x);
    r = fma_of(k, -range::kLn2Low, r) + low;
    const T e = 1 + detail::expm1_reduced(r);
    return x > lowest ? range::times_power(e, range::low_bits(rounded)) : T(0);
  }
};

// A sum in memory.
template <typename T> struct stored_sum_t {
  double l;
  T top;
  int shift;

  // l in the unit of a sum with shift `other`, which is not smaller.
  __device__ __forceinline__ double in_unit(int other) const {
    const int count = shift - other;
    return count < -1000 ? 0.0 : l * detail::times_power(1.0, count);
  }
};

// The sum of exponentials so far: l * 2^shift, if |top| <= kLargestTop. kIsCoarse: to
// about 2^-21, for 16-bit results.
template <typename T, bool kIsCoarse> struct power_sum_t {
  using range = detail::range<T>;

  // Larger scores are too far apart for this way of finding k.
  static constexpr T kLargestTop = T(1 << 20);
  static constexpr int kNothing = -(1 << 21);  // the shift before any score
  // A score may exceed the shift by kSlack powers of two before the shift moves; kReach
  // powers of two below, terms count as nothing.
  static constexpr int kSlack = 8, kReach = 800;

  T top = -infinity<T>();  // the largest score; NaN if there was one
  int shift = kNothing;
  sum_t l;

  power_sum_t() = default;
  __device__ __forceinline__ explicit power_sum_t(const stored_sum_t<T>& sum)
      : top(sum.top), shift(sum.shift) {
    l.value = sum.l;
  }
  __device__ __forceinline__ stored_sum_t<T> stored() const {
    return {l.value, top, shift};
  }

  // The shift of a sum whose largest score is m. If m is out of range any will do,
  // because `top` shows it.
  static __device__ __forceinline__ int shift_of(T m) {
    return int(T(kLog2e) *
               (m < kLargestTop ? (m > -kLargestTop ? m : -kLargestTop) : kLargestTop));
  }

  __device__ __forceinline__ void move_to(int other) {
    const int count = shift - other;
    const double factor = count < -1000 ? 0.0 : detail::times_power(1.0, count);
    l.value *= factor;
    l.lost *= factor;
    shift = other;
  }

  // Makes room for scores whose largest is m.
  __device__ __forceinline__ void see(T m) {
    top = detail::largest_nan(top, m);
    if (m > T(shift + kSlack) * T(kLn2)) move_to(shift_of(m));
  }

  template <int kCount, typename Score>
  static __device__ __forceinline__ T largest(Score score) {
    T m = score(0);
#pragma unroll
    for (int j = 1; j < kCount; ++j) m = detail::largest_nan(m, score(j));
    return m;
  }

  // Adds the exponentials of score(0), ..., score(kCount - 1), for which see() made
  // room; empty slots hold -inf. Scores may have a second part, low(j).
  template <int kCount, typename Score>
  __device__ __forceinline__ void add(Score score) {
    add_scores<kCount>(score, [](T r, int) { return r; });
  }
  template <int kCount, typename Score, typename Low>
  __device__ __forceinline__ void add(Score score, Low low) {
    add_scores<kCount>(score, [&](T r, int j) { return r + low(j); });
  }
  // The same for keys, in a unit of exponents; coarse.
  template <int kCount, typename Key, typename Unit>
  __device__ __forceinline__ void add_keys(Key key, const Unit& unit) {
    const float rest = unit.high * unit.rest;
    float part = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float x = fmaxf(key(j), -3e38f);  // -inf times the rest might be NaN
      part += exp2f(fmaf(x, rest, fmaf(x, unit.high, -float(shift))));
    }
    l += part;
  }
  // Makes room for scores and adds them; called by all lanes of a warp. kLanes adjacent
  // lanes end with the same shift and top, if they start so.
  template <int kCount, int kLanes, typename Score>
  __device__ __forceinline__ void take_in(Score score, const roots_t<T>& roots) {
    if constexpr (sizeof(T) == sizeof(double)) {
      // As floats, the upper halves of doubles have the same order. If all are near 0,
      // there is room for their exponentials, whichever is largest.
      constexpr float kNear = 3.75f;  // the upper half of 256
      float high = -infinity<float>(), low = infinity<float>();
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float half = __int_as_float(__double2hiint(score(j)));
        high = fmaxf(high, half);
        low = detail::smallest_nan(low, half);  // halves of infinities are NaN
      }
      const bool is_near =
          high < kNear && low > -kNear && (shift == kNothing || abs(shift) <= 512);
      if (__all_sync(kFullMask, is_near)) {
        if (shift == kNothing) shift = 0;
        high = warp_reduce<kLanes>(high, larger_t());
        top = detail::largest_nan(top, __hiloint2double(__float_as_int(high), 0));
        const double round = range::kRound - double(roots.kCount) * shift;
        add_terms<kCount>([&](int j) { return roots.exp_of(score(j), round); });
        return;
      }
    }
    see(warp_reduce<kLanes>(largest<kCount>(score), largest_nan_t()));
    add<kCount>(score);
  }

  // Adds another sum.
  __device__ __forceinline__ void take(power_sum_t other) {
    meet(other);
    l.value += other.l.value;
  }
  // The same; for many sums in sequence, this loses less.
  __device__ __forceinline__ void take_next(power_sum_t other) {
    meet(other);
    l += other.l.value;
  }

  // 2^shift / exp(m), for m near shift ln 2.
  static __device__ __forceinline__ double power_about(int shift, double m) {
    const double high = shift * kLn2;
    const double low =
        fma(double(shift), kLn2, -high) + shift * detail::range<double>::kLn2Low;
    pair_t<double> d = exact_sum(high, -m);
    d.low += low;
    return exp_of(d);
  }

  // The sum over kLanes adjacent lanes, in each of them; called by all lanes of a warp.
  template <int kLanes> __device__ __forceinline__ void join() {
    top = warp_reduce<kLanes>(top, largest_nan_t());
    move_to(shift_of(top));
    l.value = warp_reduce<kLanes>(l.value, plus_t());
  }

  // Whether log() would lose digits: near 0 it is the log of a sum near 1, which
  // swallowed its small terms. Sums of doubles have no spare digits: the last ones are
  // lost where log and largest score are within 2 of each other.
  __device__ __forceinline__ bool is_doubtful() const {
    constexpr bool kIsDouble = sizeof(T) == sizeof(double);
    if (!is_finite(top)) return false;
    if (abs_of(top) > kLargestTop) return true;
    if (kIsDouble && abs_of(top) >= 2) return false;
    const int exponent = (__double2hiint(l.value) >> 20) - 1023 + shift;
    constexpr int kLowest = kIsDouble ? -3 : -1, kHighest = kIsDouble ? 2 : 0;
    if (exponent < kLowest || exponent > kHighest) return false;
    const double sum = detail::times_power(l.value, shift);
    // The log is within 2, or within 0.51.
    return kIsDouble ? sum > 0.135 && sum < 7.4 : sum > 0.6 && sum < 1.66;
  }

  // log of the sum, if that is not doubtful.
  __device__ __forceinline__ double log() const {
    if (!is_finite(top)) return top;
    // l = 2^e f, 1/sqrt(2) <= f < sqrt(2)
    const int e = (__double2hiint(l.value) - 0x3fe6a09e) >> 20;
    const double f = detail::times_power(l.value, -e);
    const double n = e + shift;
    const double y = __logf(float(f));
    if constexpr (kIsCoarse) return n * kLn2 + y;
    // log f = y + log(1 + d), d = f exp(-y) - 1, which is small.
    const double d = fma(f, detail::expm1_reduced(-y), f - 1);
    const double high = n * kLn2;
    double low = fma(n, kLn2, -high) + n * detail::range<double>::kLn2Low;
    low += d - d * d / 2;
    const pair_t<double> sum = exact_sum(high, y);
    return sum.high + (sum.low + low);
  }

 private:
  // As add(), with adjust(r, j) applied to what remains of score(j) after the power of
  // two.
  template <int kCount, typename Score, typename Adjust>
  __device__ __forceinline__ void add_scores(Score score, Adjust adjust) {
    if constexpr (kIsCoarse) {
      float part = 0;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        part += exp2f(fmaf(score(j), float(kLog2e), -float(shift)));
      }
      l += part;
    } else {
      const T lowest = T(shift - kReach) * T(kLn2);
      const T round = range::kRound - T(shift);
      add_terms<kCount>([&](int j) {
        const T x = larger_t()(score(j), lowest);
        const T rounded = fma_of(x, T(kLog2e), round);  // k - shift, in its low bits
        const T k = rounded - round;
        T r = fma_of(k, -range::kLn2High, x);
        r = adjust(fma_of(k, -range::kLn2Low, r), j);
        const double e = 1 + detail::widened_term(detail::expm1_reduced(r));
        return detail::times_power(e, range::low_bits(rounded));
      });
    }
  }

  // Adds term(0), ..., term(kCount - 1): pairs first, so that few additions depend on
  // each other.
  template <int kCount, typename Term>
  __device__ __forceinline__ void add_terms(Term term) {
    constexpr int kTogether = kCount % 8 == 0   ? 8
                              : kCount % 4 == 0 ? 4
                              : kCount % 2 == 0 ? 2
                                                : 1;
#pragma unroll
    for (int first = 0; first < kCount; first += kTogether) {
      double terms[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) terms[j] = term(first + j);
#pragma unroll
      for (int step = 1; step < kTogether; step *= 2) {
#pragma unroll
        for (int j = 0; j + step < kTogether; j += 2 * step) {
          terms[j] += terms[j + step];
        }
      }
      l += terms[0];
    }
  }

  // Brings both to the same shift.
  __device__ __forceinline__ void meet(power_sum_t& other) {
    top = detail::largest_nan(top, other.top);
    const int larger = shift_of(top);
    move_to(larger);
    other.move_to(larger);
  }
};

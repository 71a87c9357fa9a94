// SPDX-License-Identifier: MIT
// attention_hopper_wide: forward for head dimensions above 256 by wgmma, with any
// strides and all options.
//
// Algorithm  Online softmax as in attention_tiled. For each tile of keys
//                s = score(q k^T),  m' = max(m, rowmax s),  p = exp(s - m')
//                l = l exp(m - m') + rowsum p,  o = o exp(m - m') + p v
//            and at the end  out = o / l,  lse = m + log l.
//            Two warpgroups ("sides") share the same 64 rows. Each computes the scores
//            of half of the keys of a tile, and half of the columns of o, which would
//            not fit into the registers of one warpgroup. They exchange row maxima and
//            weights through shared memory. p v of a tile overlaps with the softmax of
//            the next.
// Grid       one block per tile of queries of one head; last tiles first, since causal
//            ones are longest
// Tiles      q     64 x kHeadDim               shared, loaded once
//            k, v  64 x kHeadDim (kHeadDimV)   shared, one of each: the next k loads
//                  during softmax and p v, the next v during q k
//            p     64 x 64                     shared
//            s, o  registers, in the layout of wgmma
// Memory     global: q and out once; k and v once per block, mostly from L2 (cp.async)
//            shared: see smem() in _attention/gpu/sm90/forward_wide.py
// Numbers    s, m, l, o in float32; p is rounded to 16 bits before p v. With split keys
//            (KEY_PARTS) out is float32
// Limits     kHeadDim and kHeadDimV are multiples of 64 up to 576, padded with zeros;
//            sm_90a. A block starts over with scrubbed values if nonfinite values of
//            hidden keys reached its result
#include "attention/sm80/tile.cuh"
#include "attention/sm90/wgmma_operands.cuh"
#include "ptx/cluster_mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma_shapes.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V)
#error "HEAD_DIM and HEAD_DIM_V come from the host"
#endif
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = 64, kBlockN = 64;  // rows of q, and of k and v
constexpr int kSides = 2, kKeys = kBlockN / kSides;
static_assert(kNumThreads == kSides * 128);

// A tile in shared memory consists of panels of 64 columns, each [64][128 bytes],
// swizzled. A side owns kOwn panels of v; if their number is odd, both compute the one
// in the middle.
constexpr int kPanels = kHeadDim / 64, kPanelsV = kHeadDimV / 64;
constexpr int kOwn = (kPanelsV + 1) / 2;
constexpr unsigned kPanel = 64 * 128;
static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0);

// Whether scores are finished one by one before the softmax, or it scales them.
constexpr bool kHasTerms =
    kScaleScores || kHasSoftcap || kHasBias || kHasAlibi || kHasMask;

// k and v are loaded by TMA; otherwise by cp.async.
#ifdef MAPPED
constexpr bool kMapped = true;
struct alignas(64) maps_t {
  ptx::tensor_map_t k, v;
};
#define MAPS_PARAMETER const __grid_constant__ maps_t maps,
#else
constexpr bool kMapped = false;
#define MAPS_PARAMETER
#endif

// Split keys write float32, which attention/combine.cu combines.
template <bool kInParts> struct out_of {
  using type = elem_t;
};
template <> struct out_of<true> {
  using type = float;
};
using out_t = out_of<kHasParts>::type;

// Whether p v of a tile overlaps with finish of the next scores, as registers allow.
constexpr bool kOverlaps = !kHasTerms || kOwn <= 4;

// Number n of s or o of a thread is in row n / 2 % 2 * 8 + row() of the tile, and in
// column n / 4 * 8 + column() + n % 2 of its side's columns.
constexpr int kRows = 2;
constexpr int kScores = kKeys / 2, kOutputs = 32 * kOwn;
__device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int side() { return threadIdx.x / 128; }
__device__ __forceinline__ int warp_row() { return threadIdx.x / kWarpSize % 4 * 16; }
__device__ __forceinline__ int row() { return warp_row() + lane() / 4; }
__device__ __forceinline__ int column() { return lane() % 4 * 2; }
__device__ __forceinline__ int first_panel() {
  return side() == 0 ? 0 : kPanelsV - kOwn;
}

// --- tiles ---------------------------------------------------------------------------

// Starts copying rows [0, num_rows) of a matrix (.., dim) into panels, padded with
// zeros to 64 x kDim.
template <int kDim>
__device__ __forceinline__ void load_panels(unsigned char* smem, const elem_t* x,
                                            index_t row_stride, int num_rows, int dim,
                                            bool aligned) {
  auto place = [](int row, int chunk) {
    return chunk / 8 * kPanel + row * 128 + (chunk % 8 ^ row % 8) * 16;
  };
  if (!aligned) {
    load_tile<64, kDim>(smem, x, row_stride, num_rows, dim, false, place);
    return;
  }
  // Eight lanes copy 64 columns of a row; panels lie at constant offsets.
  constexpr int kStep = kNumThreads / 8;
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  unsigned to = shared_address(smem) + place(row, chunk);
  const elem_t* from = x + row * row_stride + chunk * 8;
#pragma unroll
  for (int first = 0; first < 64; first += kStep) {
    const int columns = first + row < num_rows ? dim - chunk * 8 : 0;
#pragma unroll
    for (int panel = 0; panel < kDim / 64; ++panel) {
      // Rows that do not exist are not read.
      ptx::copy_async_or_zero(to + panel * kPanel, from + panel * 64,
                              panel * 64 < columns ? 16 : 0);
    }
    to += kStep * 128;
    from += kStep * row_stride;
  }
}

// A single buffer for tiles of k or v, filled by TMA once every warp has read the tile
// before. One thread loads and releases.
template <int kDim> struct feed_t {
  const ptx::tensor_map_t& map;
  unsigned tile, full, empty;  // shared memory addresses
  int head, batch[2];
  int waits, releases;  // phases so far

  __device__ __forceinline__ feed_t(const ptx::tensor_map_t& map, unsigned char* tile,
                                    unsigned long long* barriers,
                                    const tile_coord_t& at, const operand_t& operand)
      : map(map),
        tile(shared_address(tile)),
        full(shared_address(barriers)),
        empty(full + 8),
        head(coordinate(at.kv_head, operand.head)),
        waits(0),
        releases(0) {
    batch_coordinates(batch, at, operand);
  }
  __device__ __forceinline__ void begin() const {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(empty, 1);
  }
  __device__ __forceinline__ void load(index_t j0) const {
    if (releases > 0) wait(empty, (releases - 1) & 1);
    ptx::mbarrier_arrive_expect_tx(full, kDim * 128);
#pragma unroll
    for (int panel = 0; panel < kDim / 64; ++panel) {
      ptx::cp_async_bulk_tensor_5d(tile + panel * kPanel, map, full, panel * 64,
                                   static_cast<int>(j0), head, batch[0], batch[1]);
    }
  }
  __device__ __forceinline__ void wait_for_tile() { wait(full, waits++ & 1); }
  __device__ __forceinline__ void release(bool elected) {
    if (elected) ptx::mbarrier_arrive_cluster_relaxed(ptx::mapa(empty, 0));
    ++releases;
  }
};

template <unsigned kBytes> __device__ __forceinline__ void clear(unsigned char* smem) {
#pragma unroll 1
  for (unsigned n = threadIdx.x * 16; n < kBytes; n += kNumThreads * 16) {
    *reinterpret_cast<uint4*>(smem + n) = make_uint4(0, 0, 0, 0);
  }
}

// Zeroes the nonfinite numbers of the tile of v; returns whether this thread found any.
__device__ __forceinline__ bool clean_values(unsigned char* tile) {
  constexpr unsigned kExponent = pair16_t::kIsBfloat16 ? 0x7f80u : 0x7c00u;
  bool found_any = false;
#pragma unroll 1
  for (int n = threadIdx.x; n < kPanelsV * int(kPanel) / 4; n += kNumThreads) {
    unsigned& at = reinterpret_cast<unsigned*>(tile)[n];
    const unsigned word = at;
    const bool low = (word & kExponent) == kExponent;
    const bool high = (word >> 16 & kExponent) == kExponent;
    if (low || high) at = word & (low ? 0xffff0000u : ~0u) & (high ? 0xffffu : ~0u);
    found_any |= low | high;
  }
  return found_any;
}

// --- products ------------------------------------------------------------------------

// s = q k^T for this side's keys. Tensor cores truncate low bits of a sum, so products
// of 64 columns are summed separately and added with rounding.
__device__ __forceinline__ void multiply_qk(float (&s)[kScores], unsigned long long q,
                                            unsigned long long k) {
  constexpr int kAtOnce = kOverlaps ? 2 : 1;  // sums in flight, as registers allow
  float parts[kAtOnce][kScores];
  auto start = [&](int panel) {
    if (panel >= kPanels) return;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const unsigned at = (panel * kPanel + step * 32) / 16;
      ptx::wgmma_t<elem_t, kKeys>::ss(parts[panel % kAtOnce], q + at, k + at, step > 0);
    }
    ptx::wgmma_commit_group();
  };
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    if (panel == 0 || kAtOnce == 1) start(panel);
    if constexpr (kAtOnce == 2) start(panel + 1);
    if (kAtOnce == 2 && panel + 1 < kPanels) {
      ptx::wgmma_wait_group<1>();
    } else {
      ptx::wgmma_wait_group<0>();
    }
    float (&part)[kScores] = parts[panel % kAtOnce];
    compiler_fence(part);
#pragma unroll
    for (int e = 0; e < kScores; ++e) s[e] = panel == 0 ? part[e] : s[e] + part[e];
  }
}

// o += p v for columns [64 kFirst, 64 (kFirst + kCount)) of this side.
template <int kFirst, int kCount>
__device__ __forceinline__ void multiply_panels(float (&o)[kOutputs],
                                                const unsigned (&p)[4],
                                                unsigned long long v) {
  auto& some = *reinterpret_cast<float (*)[32 * kCount]>(&o[32 * kFirst]);
  ptx::wgmma_t<elem_t, 64 * kCount>::rs(some, p, v + kFirst * kPanel / 16, 1);
}

// Starts o += p v for this side's columns; reads all weights first. A step covers 16
// rows of v, 128 bytes each.
struct weights_t {
  unsigned a[kBlockN / 16][4];
};
__device__ __forceinline__ void start_pv(float (&o)[kOutputs], weights_t& p,
                                         const tile_t<kBlockN>& tile,
                                         unsigned long long v) {
  constexpr int kMost = 4;  // panels per instruction
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    ptx::ldmatrix_x4(p.a[step], tile.at(0, 2 * step));
  }
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    const unsigned long long rows = v + step * (16 * 128 / 16);
    multiply_panels<0, (kOwn < kMost ? kOwn : kMost)>(o, p.a[step], rows);
    if constexpr (kOwn > kMost) {
      multiply_panels<kMost, kOwn - kMost>(o, p.a[step], rows);
    }
  }
  ptx::wgmma_commit_group();
}

// Waits for p v. The weights must stay in their registers until then.
__device__ __forceinline__ void end_pv(float (&o)[kOutputs], weights_t& p) {
  ptx::wgmma_wait_group<0>();
  compiler_fence(o);
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
#pragma unroll
    for (int n = 0; n < 4; ++n) ptx::launder(p.a[step][n]);
  }
}

// --- softmax -------------------------------------------------------------------------

// One number per row and side, to be read by the other side.
struct across_t {
  float of[kSides][kBlockM];

  __device__ __forceinline__ void put(int r, float x) {
    if (lane() % 4 == 0) of[side()][row() + 8 * r] = x;
  }
  __device__ __forceinline__ float other(int r) const {
    return of[side() ^ 1][row() + 8 * r];
  }
};

// State of a thread's rows: largest score so far, sum of the weights over this thread's
// columns, and its rounding error.
struct softmax_t {
  float m[kRows], l[kRows], rest[kRows];

  __device__ __forceinline__ softmax_t() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      m[r] = -infinity<float>();
      l[r] = 0;
      rest[r] = 0;
    }
  }
};

// Turns the products of the tile at query i0 and key j0 into final scores, -inf for
// hidden keys. Every score passes through here before the softmax.
__device__ __forceinline__ void score_mod(float (&s)[kScores], const scores_t& scores,
                                          index_t i0, index_t j0) {
  const mask_bounds_t bounds = scores.mask_bounds(i0, j0);
  const bool sees_all = bounds.sees_all(kBlockM, kBlockN);
  if (!kHasTerms && sees_all) return;
  auto finish = [&](float& x, int n) {
    const int i = row() + n / 2 % 2 * 8;
    const int j = side() * kKeys + n / 4 * 8 + column() + n % 2;
    if (!sees_all && !bounds.sees(i, j)) {
      x = -infinity<float>();
    } else if constexpr (kHasTerms) {
      x = scores(x, i0 + i, j0 + j);
    }
  };
  if constexpr (kHasTerms && kOwn > 4) {
    // o occupies the registers: handle one score at a time, through the stack.
    float on_stack[kScores];
#pragma unroll
    for (int n = 0; n < kScores; ++n) on_stack[n] = s[n];
#pragma unroll 1
    for (int n = 0; n < kScores; ++n) finish(on_stack[n], n);
    ptx::launder(on_stack);
#pragma unroll
    for (int n = 0; n < kScores; ++n) s[n] = on_stack[n];
  } else {
#pragma unroll
    for (int n = 0; n < kScores; ++n) finish(s[n], n);
  }
}

__device__ __forceinline__ void put_largest(across_t& across,
                                            const float (&s)[kScores]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float largest = -infinity<float>();
#pragma unroll
    for (int n = 2 * r; n < kScores; n += 4) {
      largest = fmaxf(largest, fmaxf(s[n], s[n + 1]));
    }
    largest = fmaxf(largest, shuffle_xor(largest, 1));
    across.put(r, fmaxf(largest, shuffle_xor(largest, 2)));
  }
}

// Updates the maximum, l, and the factor alpha for o; s becomes p = exp(s - m), and is
// added to l with Kahan compensation. Scores are subtracted before they are scaled, so
// that large ones stay accurate.
__device__ __forceinline__ void weigh(softmax_t& rows, float (&s)[kScores],
                                      float (&alpha)[kRows], const across_t& across,
                                      float to_log2) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float own = across.of[side()][row() + 8 * r];
    const float before = rows.m[r], m = fmaxf(before, fmaxf(own, across.other(r)));
    // inf - inf is NaN: avoid it. Before the first visible key, weights are 0.
    const float base = m == -infinity<float>() ? 0.f : m;
    alpha[r] = m == before ? 1.f : ptx::ex2_approx_ftz((before - base) * to_log2);
    rows.m[r] = m;
    float sum = rows.rest[r] * alpha[r];
#pragma unroll
    for (int n = 2 * r; n < kScores; n += 4) {
#pragma unroll
      for (int e = n; e < n + 2; ++e) {
        s[e] = ptx::ex2_approx_ftz((s[e] - base) * to_log2);
        sum += s[e];
      }
    }
    const float l = rows.l[r] * alpha[r], next = l + sum;
    rows.rest[r] = sum - (next - l);
    rows.l[r] = next;
  }
}

__device__ __forceinline__ void rescale(float (&o)[kOutputs],
                                        const float (&alpha)[kRows]) {
  if (__any_sync(kFullMask, alpha[0] != 1 || alpha[1] != 1)) {
#pragma unroll
    for (int n = 0; n < kOutputs; ++n) o[n] *= alpha[n / 2 % 2];
  }
}

// Stores the weights as 16 bits in shared memory, where both sides read them.
__device__ __forceinline__ void put_weights(unsigned char* smem_p,
                                            const float (&p)[kScores]) {
#pragma unroll
  for (int n = 0; n < kScores; n += 2) {
    const int chunk = (side() * kKeys + n / 4 * 8) / 8;
    const unsigned at = tile_t<kBlockN>::offset(row() + n / 2 % 2 * 8, chunk);
    *reinterpret_cast<unsigned*>(smem_p + at + column() * 2) =
        pair16_t::from(p[n], p[n + 1]);
  }
}

// --- results -------------------------------------------------------------------------

__device__ __forceinline__ void store_pair(out_t* to, float x, float y) {
  if constexpr (kHasParts) {
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
  } else {
    *reinterpret_cast<unsigned*>(to) = pair16_t::from(x, y);
  }
}

// Stores out and lse of this thread's rows.
__device__ __forceinline__ void store(out_t* out_rows, row_lse_t* lse,
                                      const tile_coord_t& at, const scores_t& scores,
                                      const params_t& params, const softmax_t& rows,
                                      const float (&o)[kOutputs], index_t i_first,
                                      double scale) {
  const int dim_v = static_cast<int>(params.head_dim_v);
  const bool as_pairs =
      params.out.col == 1 && (params.out.row | dim_v) % 2 == 0 &&
      reinterpret_cast<unsigned long long>(out_rows) % (2 * sizeof(out_t)) == 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const index_t i = i_first + row() + 8 * r;
    if (i >= params.seqlen_q) continue;
    // lse needs m * scale exactly; what does not fit into `high` goes into l. Beyond a
    // million the rest is below one ulp of lse.
    const double m = rows.m[r] * scale;
    const maximum_t high =
        rows.l[r] == 0 ? -infinity<float>() : static_cast<maximum_t>(m);
    const float low =
        !kHasParts && fabs(high) < 1e6 ? static_cast<float>(m - high) : 0.f;
    const finished_t finished = scores.finish(i, high, rows.l[r] * (1 + low));
    const float inverse = finished.inverse * (1 + low);
    if (lse != nullptr && side() == 0 && lane() % 4 == 0) {
      lse[at.row_of_heads * params.seqlen_q + i] = finished.lse;
    }
    out_t* const out_row = out_rows + i * params.out.row;
#pragma unroll
    for (int n = 2 * r; n < kOutputs; n += 4) {
      const int j = first_panel() * 64 + n / 4 * 8 + column();
      // A row that sees no key gives 0, whatever its sums are.
      const float x = inverse == 0 ? 0.f : o[n] * inverse;
      const float y = inverse == 0 ? 0.f : o[n + 1] * inverse;
      if (as_pairs) {
        if (j < dim_v) store_pair(out_row + j, x, y);
      } else {
        if (j < dim_v) out_row[j * params.out.col] = to<out_t>(x);
        if (j + 1 < dim_v) out_row[(j + 1) * params.out.col] = to<out_t>(y);
      }
    }
  }
}

// Adds the nonfinite values that the stored rows [i0, i_last) see among keys [first,
// last). Each number of out belongs to one thread.
__device__ __forceinline__ void add_specials(out_t* out_rows, const elem_t* v_rows,
                                             const scores_t& scores,
                                             const params_t& params, index_t i0,
                                             index_t i_last, index_t first,
                                             index_t last) {
  const index_t dim = params.head_dim_v;
#pragma unroll 1
  for (index_t j0 = first; j0 < last; j0 += kWarpSize) {
    // Each lane checks one key; then the warp handles the keys with nonfinite values.
    bool special = false;
#pragma unroll 1
    for (index_t n = 0; n < dim && j0 + lane() < last; ++n) {
      special |= !is_finite(to<float>(v_rows[(j0 + lane()) * params.v.row + n]));
    }
#pragma unroll 1
    for (unsigned left = __ballot_sync(kFullMask, special); left != 0;
         left &= left - 1) {
      const index_t j = j0 + __ffs(left) - 1;
#pragma unroll 1
      for (index_t i = i0 + threadIdx.x / kWarpSize; i < i_last;
           i += kNumThreads / kWarpSize) {
        const range_t seen = scores.keys_of(i, i + 1);
        if (j < seen.first || j >= seen.last) continue;
        if constexpr (kHasMask || kHasBias) {
          if (scores(0.f, i, j) == -infinity<float>()) continue;
        }
#pragma unroll 1
        for (index_t n = lane(); n < dim; n += kWarpSize) {
          const float x = to<float>(v_rows[j * params.v.row + n]);
          out_t& sum = out_rows[i * params.out.row + n * params.out.col];
          if (!is_finite(x)) sum = to<out_t>(to<float>(sum) + x);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) attention_hopper_wide(
    MAPS_PARAMETER QKV_PARAMETERS,
    out_t* __restrict__ out,      // (batch, heads, queries, head_dim_v)
    row_lse_t* __restrict__ lse,  // (batch, heads, queries), or null
    SCORE_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* const smem_k = smem + kPanels * kPanel;  // behind q
  unsigned char* const smem_v = smem_k + kPanels * kPanel;
  unsigned char* const smem_p = smem_v + kPanelsV * kPanel;
  across_t& across = *reinterpret_cast<across_t*>(smem_p + kPanel);
  auto* const barriers = reinterpret_cast<unsigned long long*>(&across + 1);

  const index_t num_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const tile_coord_t at(params, block_index(), num_tiles);
  if (!at.exists) return;
  const index_t i0 = (num_tiles - 1 - at.tile) * kBlockM;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const range_t keys = scores.keys_of(i0, min(i0 + kBlockM, params.seqlen_q));
  // Tiles start at multiples of kBlockN, so that the order of summation of a row does
  // not depend on its tile of queries.
  const index_t first = keys.first / kBlockN * kBlockN;

  const elem_t* const k_rows = at.at_kv(k, params.k);
  const elem_t* const v_rows = at.at_kv(v, params.v);
  const int dim = static_cast<int>(params.head_dim);
  const int dim_v = static_cast<int>(params.head_dim_v);
  const bool aligned_k = has_aligned_rows(k_rows, params.k.row, dim);
  const bool aligned_v = has_aligned_rows(v_rows, params.v.row, dim_v);
#ifdef MAPPED
  feed_t<kHeadDim> feed_k(maps.k, smem_k, barriers, at, params.k);
  feed_t<kHeadDimV> feed_v(maps.v, smem_v, barriers + 2, at, params.v);
  const bool feeds = threadIdx.x == 0;
  if (feeds) {
    feed_k.begin();
    feed_v.begin();
    ptx::fence_mbarrier_init();
  }
  auto load_k = [&](index_t j0) {
    if (feeds && j0 < keys.last) feed_k.load(j0);
  };
  auto load_v = [&](index_t j0) {
    if (feeds) feed_v.load(j0);
  };
  auto wait_for_k = [&] { feed_k.wait_for_tile(); };
  auto wait_for_v = [&] { feed_v.wait_for_tile(); };
  auto release_k = [&] { feed_k.release(feeds); };
  auto release_v = [&] { feed_v.release(feeds); };
#else
  auto rows_from = [&](index_t j0) {
    return static_cast<int>(min(keys.last - j0, index_t(kBlockN)));
  };
  auto load_k = [&](index_t j0) {
    if (j0 < keys.last) {
      load_panels<kHeadDim>(smem_k, k_rows + j0 * params.k.row, params.k.row,
                            rows_from(j0), dim, aligned_k);
    }
    ptx::commit_copies();
  };
  auto load_v = [&](index_t j0) {
    load_panels<kHeadDimV>(smem_v, v_rows + j0 * params.v.row, params.v.row,
                           rows_from(j0), dim_v, aligned_v);
    ptx::commit_copies();
  };
  // v of a tile is loaded after k of the next one, so k is the older of two groups.
  auto wait_for_k = [&] {
    ptx::wait_copy_groups<1>();
    ptx::fence_proxy_async();
    __syncthreads();
  };
  auto wait_for_v = [&] {
    ptx::wait_copy_groups<0>();
    ptx::fence_proxy_async();
    __syncthreads();
  };
  auto release_k = [] {};
  auto release_v = [] {};
#endif
  {
    const elem_t* const q_rows = at.at(q, params.q) + i0 * params.q.row;
    const index_t count = min(params.seqlen_q - i0, index_t(kBlockM));
    load_panels<kHeadDim>(smem, q_rows, params.q.row, static_cast<int>(count), dim,
                          has_aligned_rows(q_rows, params.q.row, dim));
  }
  if constexpr (kMapped) {
    ptx::commit_copies();
    ptx::wait_copy_groups<0>();
    ptx::fence_proxy_async();
    __syncthreads();  // q has arrived and the barriers are initialized
  }

  const unsigned long long q_tile = descriptor(shared_address(smem), 16);
  const unsigned long long k_tile =
      descriptor(shared_address(smem_k) + side() * kKeys * 128, 16);
  const unsigned long long v_tile =
      descriptor(shared_address(smem_v) + first_panel() * kPanel, kPanel);
  const tile_t<kBlockN> p_tile(shared_address(smem_p), warp_row() + lane() % 16,
                               lane() / 16);
  // to_log2 converts scores to exponents of 2.
  const double scale = kHasTerms ? 1.0 : params.scale;
  const float to_log2 = static_cast<float>(scale * kLog2e);

  softmax_t rows;
  float o[kOutputs];
  bool special = false;  // a value of this block's keys is not finite
#pragma unroll 1
  for (bool careful = false;; careful = true) {
    load_k(first);
    if constexpr (!kMapped)
      ptx::commit_copies();  // stands for the v of an earlier tile
    rows = softmax_t();
#pragma unroll
    for (int n = 0; n < kOutputs; ++n) o[n] = 0;
    weights_t p;
    // The first product with v belongs to no tile: multiply zeros.
    clear<(kPanelsV + 1) * kPanel>(smem_v);  // and p
    ptx::fence_proxy_async();
    __syncthreads();
    auto clean = [&] {
      __syncthreads();  // v has arrived
      special |= clean_values(smem_v);
      ptx::fence_proxy_async();
      __syncthreads();  // all warps have scrubbed their part
    };
#pragma unroll 1
    for (index_t j0 = first; j0 < keys.last; j0 += kBlockN) {
      float s[kScores], alpha[kRows];
      wait_for_k();
      multiply_qk(s, q_tile, k_tile);
      // p v of the previous tile overlaps with the softmax of this one.
      if (j0 > first) wait_for_v();
      if (careful) clean();
      start_pv(o, p, p_tile, v_tile);
      if constexpr (!kOverlaps) end_pv(o, p);
      score_mod(s, scores, i0, j0);
      put_largest(across, s);
      __syncthreads();  // k and p have been read; the maxima of both sides are stored
      release_k();
      load_k(j0 + kBlockN);
      weigh(rows, s, alpha, across, to_log2);
      put_weights(smem_p, s);
      if constexpr (kOverlaps) end_pv(o, p);
      rescale(o, alpha);
      __syncthreads();  // all warps have read v; p is complete
      release_v();
      load_v(j0);
    }
    if (first < keys.last) {
      wait_for_v();
      if (careful) clean();
      start_pv(o, p, p_tile, v_tile);
      end_pv(o, p);
    }

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float& l = rows.l[r];
      l += rows.rest[r];
      l += shuffle_xor(l, 1);
      l += shuffle_xor(l, 2);
      across.put(r, l);
    }
    __syncthreads();  // the sums of both sides are stored
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows.l[r] += across.other(r);
    if (careful) break;
    // Hidden keys may have contributed 0 * NaN.
    float nonfinite = 0;
#pragma unroll
    for (int n = 0; n < kOutputs; ++n) nonfinite = fmaf(o[n], 0, nonfinite);
    if (!__syncthreads_or(nonfinite != 0)) break;
  }

  // Recomputed, because it did not fit into registers during the loop.
  index_t block = block_index();
  ptx::launder(block);
  const tile_coord_t here(params, block, num_tiles);
  const scores_t rows_of(here, SCORE_ARGUMENTS);
  out_t* const out_rows = here.at(out, params.out);
  const index_t i_first = (num_tiles - 1 - here.tile) * kBlockM;
  store(out_rows, lse, here, rows_of, params, rows, o, i_first, scale);
  if (__syncthreads_or(special)) {  // also: all rows are stored
    add_specials(out_rows, here.at_kv(v, params.v), rows_of, params, i_first,
                 min(i_first + kBlockM, params.seqlen_q), first, keys.last);
  }
}

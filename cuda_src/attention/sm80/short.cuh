// SPDX-License-Identifier: MIT
// Shared by the kernels for short entries: a block has one head of k and v with all its
// keys on chip, and its warps loop over the queries of its heads.
//
// An operand of mma.sync is two words per lane and 32 bytes of a row deep: 16 numbers
// of 16 bits, or 8 of float32. A float32 is the sum of two tf32 numbers, x = high +
// low, off by at most 2^-23 of x at any magnitude; a product then takes three, high
// high + high low + low high. precision="tf32" uses only high.
//
// Rows in shared memory are padded by 16 bytes: 8 rows start in different banks.
#pragma once

#include "attention/sm80/tile.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_N) || \
    !defined(WARPS) || !defined(MIN_BLOCKS)
#error "HEAD_DIM, HEAD_DIM_V, BLOCK_N, WARPS and MIN_BLOCKS come from the host"
#endif
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kBlockN = BLOCK_N;  // keys, padded with zeros to whole tiles
constexpr int kWarps = WARPS;
constexpr int kMinBlocks = MIN_BLOCKS;
static_assert(kWarpSize * kWarps == kNumThreads);
static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0);
static_assert(kBlockN % (kSplits ? 8 : 16) == 0);

#ifdef PARTS
constexpr int kParts = PARTS;  // tf32 numbers per float32
#else
constexpr int kParts = 1;
#endif
static_assert(kParts == 1 || (kParts == 2 && kSplits));

// Columns of a result that a warp computes at a time: a few equal steps.
template <int kDim, int kMost = 64>
constexpr int kChunk = kDim / ((kDim + kMost - 1) / kMost);
constexpr int kRows = 16;                   // queries, or keys, per warp
constexpr int kStep = 32 / sizeof(elem_t);  // depth of an operand
constexpr int kKeyTiles = kBlockN / 8;      // accumulators over the keys
constexpr int kColTiles = kHeadDim / 8;     // over the columns of q and k
constexpr int kColTilesV = kHeadDimV / 8;   // over those of v and out

template <int kTiles> using sums_t = float[kTiles][4];

__device__ __forceinline__ int lane_index() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int warp_index() { return threadIdx.x / kWarpSize; }

// Waits until all warps arrive.
__device__ __forceinline__ void sync_warps() {
  if constexpr (kWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// --- matrices in shared memory -------------------------------------------------------

// A matrix with rows of kCols numbers.
template <int kCols> struct matrix_t {
  static constexpr unsigned kPitch = kCols * sizeof(elem_t) + 16;
  static constexpr int kNextRow = kPitch / sizeof(elem_t);
  static constexpr int kChunks = kCols * sizeof(elem_t) / 16;

  unsigned char* rows;

  static __host__ __device__ constexpr unsigned bytes(int num_rows) {
    return num_rows * kPitch;
  }
  __device__ __forceinline__ unsigned address() const { return shared_address(rows); }
  __device__ __forceinline__ elem_t* at(int row, int col) const {
    return reinterpret_cast<elem_t*>(rows + row * kPitch) + col;
  }

  // Starts copying rows [0, num_rows) of x (.., dim), padded with zeros to kCount rows;
  // `thread` is the index of this one of kThreads.
  template <int kCount, int kThreads>
  __device__ __forceinline__ void load(const elem_t* x, index_t row_stride,
                                       int num_rows, int dim, int thread) const {
    if (!has_aligned_rows(x, row_stride, dim) && has_words(x, row_stride)) {
      load_words<kCount, kThreads>(x, row_stride, num_rows, dim, thread);
    } else if constexpr (kThreads < kChunks) {
      static_assert(kChunks % 2 == 0);  // a row in two halves
      load_columns<kCount, kThreads, kChunks / 2>(x, row_stride, num_rows, dim, thread,
                                                  0);
      load_columns<kCount, kThreads, kChunks / 2>(x, row_stride, num_rows, dim, thread,
                                                  kCols / 2);
    } else {
      load_columns<kCount, kThreads, kChunks>(x, row_stride, num_rows, dim, thread, 0);
    }
  }

  // The same in 4-byte words: neighbours copy neighbours.
  template <int kCount, int kThreads>
  __device__ __forceinline__ void load_words(const elem_t* x, index_t row_stride,
                                             int num_rows, int dim, int thread) const {
    constexpr int kWord = 4, kWords = kChunks * 16 / kWord;  // of a row
    const unsigned to = address();
#pragma unroll 4
    for (int n = thread; n < kCount * kWords; n += kThreads) {
      const int row = n / kWords, at = n % kWords * kWord;
      const int left = row < num_rows ? dim * int(sizeof(elem_t)) - at : 0;
      const elem_t* const from = x + row * row_stride + at / int(sizeof(elem_t));
      ptx::copy_async_or_zero<kWord>(to + row * kPitch + at, left > 0 ? from : x,
                                     min(max(left, 0), kWord));
    }
  }

  // The same for kOfRow chunks of each row, from a column on.
  template <int kCount, int kThreads, int kOfRow>
  __device__ __forceinline__ void load_columns(const elem_t* x, index_t row_stride,
                                               int num_rows, int dim, int thread,
                                               int first_col) const {
    constexpr int kElems = 16 / sizeof(elem_t);
    constexpr int kAtOnce = kThreads / kOfRow;  // rows
    static_assert(kAtOnce > 0);
    const int first = thread / kOfRow, col = first_col + thread % kOfRow * kElems;
    if (kThreads % kOfRow != 0 && first >= kAtOnce) return;
    const int end = col < dim ? num_rows : 0;
    const elem_t* from = x + first * row_stride + col;
    if (has_aligned_rows(x, row_stride, dim)) {
      const unsigned to = address() + first * kPitch + col / kElems * 16;
#pragma unroll
      for (int row = 0; row < kCount; row += kAtOnce, from += kAtOnce * row_stride) {
        if (kCount % kAtOnce != 0 && first + row >= kCount) break;
        const bool exists = first + row < end;
        ptx::copy_async_or_zero(to + row * kPitch, exists ? from : x, exists ? 16 : 0);
      }
    } else if constexpr (sizeof(elem_t) == 2) {
      constexpr int kBatch = 2;  // rows that load side by side
#pragma unroll 1
      for (int row = first; row < kCount; row += kBatch * kAtOnce) {
        uint4 words[kBatch];
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
          const int i = row + n * kAtOnce;
          words[n] = i < end ? gather_words(x + i * row_stride, col, dim)
                             : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
          const int i = row + n * kAtOnce;
          if (i < kCount) *reinterpret_cast<uint4*>(at(i, col)) = words[n];
        }
      }
    }
  }
};

// --- operands ------------------------------------------------------------------------

// 16 rows by kStep, and kStep by 8 columns, in the layout of mma.sync.
struct left_t {
  unsigned parts[kParts][4];
};
struct right_t {
  unsigned parts[kParts][2];
};

// Splits a word from memory into kParts operands. mma.sync ignores the 13 low bits, so
// that adding half of the last one it reads rounds; the rest then has only one bit more
// than it reads.
__device__ __forceinline__ void split_word(unsigned word, unsigned (&parts)[kParts]) {
  if constexpr (!kSplits) {
    parts[0] = word;
  } else if constexpr (kParts == 1) {
    parts[0] = ptx::tf32_from_f32(__uint_as_float(word));
  } else {
    parts[0] = (word + 0x1000) & ~0x1fffu;
    parts[1] = __float_as_uint(__uint_as_float(word) - __uint_as_float(parts[0]));
  }
}
template <int kWords>
__device__ __forceinline__ void split_words(const unsigned (&words)[kWords],
                                            unsigned (&parts)[kParts][kWords]) {
#pragma unroll
  for (int n = 0; n < kWords; ++n) {
    unsigned of_word[kParts];
    split_word(words[n], of_word);
#pragma unroll
    for (int part = 0; part < kParts; ++part) parts[part][n] = of_word[part];
  }
}
// Four words form two operands of 8 columns.
__device__ __forceinline__ void split_pair(const unsigned (&words)[4],
                                           right_t (&pair)[2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const unsigned half[2] = {words[2 * n], words[2 * n + 1]};
    split_words(half, pair[n].parts);
  }
}

// Rows [row, row + 16) of x as the left operand of x y.
template <int kCols>
__device__ __forceinline__ left_t left(const matrix_t<kCols>& x, int row, int step) {
  const int lane = lane_index();
  unsigned words[4];
  ptx::ldmatrix_x4(words, x.address() + (row + lane % 16) * matrix_t<kCols>::kPitch +
                              (2 * step + lane / 16) * 16);
  left_t operand;
  split_words(words, operand.parts);
  return operand;
}

// Columns [col, col + 16) of x as the left operand of x^T y.
template <int kCols>
__device__ __forceinline__ left_t left_trans(const matrix_t<kCols>& x, int col,
                                             int step) {
  const int lane = lane_index();
  unsigned words[4];
  if constexpr (kSplits) {
    // Slots 0 to 3 of an operand hold even rows here and slots 4 to 7 odd ones, as in
    // right_trans() and left_of().
    const elem_t* const from = x.at(kStep * step + lane % 4 * 2, col + lane / 4);
    constexpr int kNext = matrix_t<kCols>::kNextRow;
    words[0] = __float_as_uint(to<float>(from[0]));
    words[1] = __float_as_uint(to<float>(from[8]));
    words[2] = __float_as_uint(to<float>(from[kNext]));
    words[3] = __float_as_uint(to<float>(from[kNext + 8]));
  } else {
    const int row = kStep * step + lane / 16 * 8 + lane % 8;
    ptx::ldmatrix_x4_trans(words, x.address() + row * matrix_t<kCols>::kPitch +
                                      (col / 8 + lane / 8 % 2) * 16);
  }
  left_t operand;
  split_words(words, operand.parts);
  return operand;
}

// Rows [8 tile, 8 tile + 16) of y as two right operands of x y^T. After an odd number
// of tiles the last is there twice.
template <int kCols>
__device__ __forceinline__ void right(const matrix_t<kCols>& y, int tile, int step,
                                      right_t (&pair)[2]) {
  const int lane = lane_index();
  const int row = 8 * tile + (tile + 1 < kKeyTiles ? lane / 16 * 8 : 0) + lane % 8;
  unsigned words[4];
  ptx::ldmatrix_x4(words, y.address() + row * matrix_t<kCols>::kPitch +
                              (2 * step + lane / 8 % 2) * 16);
  split_pair(words, pair);
}

// Columns [8 tile, 8 tile + 16) of y as two right operands of x y.
template <int kCols>
__device__ __forceinline__ void right_trans(const matrix_t<kCols>& y, int tile,
                                            int step, right_t (&pair)[2]) {
  const int lane = lane_index();
  unsigned words[4];
  if constexpr (kSplits) {
    const elem_t* const from = y.at(kStep * step + lane % 4 * 2, 8 * tile + lane / 4);
    constexpr int kNext = matrix_t<kCols>::kNextRow;
    words[0] = __float_as_uint(to<float>(from[0]));
    words[1] = __float_as_uint(to<float>(from[kNext]));
    words[2] = __float_as_uint(to<float>(from[8]));
    words[3] = __float_as_uint(to<float>(from[kNext + 8]));
  } else {
    ptx::ldmatrix_x4_trans(
        words, y.address() + (kStep * step + lane % 16) * matrix_t<kCols>::kPitch +
                   (tile + lane / 16) * 16);
  }
  split_pair(words, pair);
}

// Accumulators, 16 rows by the keys, as the left operand of the next product.
template <int kTiles>
__device__ __forceinline__ left_t left_of(const sums_t<kTiles>& x, int step) {
  unsigned words[4];
  if constexpr (kSplits) {
    words[0] = __float_as_uint(x[step][0]);
    words[1] = __float_as_uint(x[step][2]);
    words[2] = __float_as_uint(x[step][1]);
    words[3] = __float_as_uint(x[step][3]);
  } else {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float (&tile)[4] = x[2 * step + n / 2];
      words[n] = pair16_t::from(tile[n % 2 * 2], tile[n % 2 * 2 + 1]);
    }
  }
  left_t operand;
  split_words(words, operand.parts);
  return operand;
}

// --- products ------------------------------------------------------------------------

// sum += a b, small parts first.
__device__ __forceinline__ void multiply(float (&sum)[4], const left_t& a,
                                         const right_t& b) {
  if constexpr (kSplits) {
    auto add = [&](int of_a, int of_b) {
      ptx::mma_m16n8k8_tf32(sum, a.parts[of_a], b.parts[of_b][0], b.parts[of_b][1]);
    };
    if constexpr (kParts == 2) {
      add(1, 0);
      add(0, 1);
    }
    add(0, 0);
  } else {
    pair16_t::mma(sum, a.parts[0], b.parts[0][0], b.parts[0][1]);
  }
}

// Tensor cores truncate: for float32 they sum this many steps, and the sums are added
// with rounding.
constexpr int kApart = kSplits ? 2 : 1;

// sums += x y over kSteps steps; `left(step)` and `right(tile, step, pair)` give the
// operands. With float32, steps are interleaved only if necessary, to save registers.
template <int kSteps, bool kInLoop, int kTiles, typename Left, typename Right>
__device__ __forceinline__ void add_products(float (&sums)[kTiles][4], Left left,
                                             Right right) {
  constexpr bool kLoops = kInLoop && kSteps % kApart == 0;
#pragma unroll(kLoops&& kSplits ? 1 : kSteps)
  for (int first = 0; first < kSteps; first += kApart) {
    const int steps = kLoops || first + kApart <= kSteps ? kApart : 1;
    left_t a[kApart];
#pragma unroll
    for (int step = 0; step < steps; ++step) a[step] = left(first + step);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      float sum[2][4] = {};
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        right_t b[2];
        right(tile, first + step, b);
#pragma unroll
        for (int n = 0; n < 2 && tile + n < kTiles; ++n) {
          multiply(kSplits ? sum[n] : sums[tile + n], a[step], b[n]);
        }
      }
      if constexpr (kSplits) {
#pragma unroll
        for (int e = 0; e < 8 && tile + e / 4 < kTiles; ++e) {
          sums[tile + e / 4][e % 4] += sum[e / 4][e % 4];
        }
      }
    }
  }
}

template <int kTiles>
__device__ __forceinline__ bool any_nonfinite(const float (&x)[kTiles][4]) {
  float nonfinite = 0;
#pragma unroll
  for (int e = 0; e < 4 * kTiles; ++e) nonfinite = fmaf(x[e / 4][e % 4], 0, nonfinite);
  return nonfinite != 0;
}

// s = x y^T for rows [row, row + 16) of x and all of y, over kSteps steps of columns.
template <int kSteps, int kCols>
__device__ __forceinline__ void multiply_columns(sums_t<kKeyTiles>& s,
                                                 const matrix_t<kCols>& x, int row,
                                                 const matrix_t<kCols>& y, int first) {
#pragma unroll
  for (int e = 0; e < 4 * kKeyTiles; ++e) s[e / 4][e % 4] = 0;
  add_products<kSteps, true>(
      s, [&](int step) { return left(x, row, first + step); },
      [&](int tile, int step, right_t(&pair)[2]) {
        right(y, tile, first + step, pair);
      });
}
// Where one part is infinite the other is NaN, and so is a product over all columns
// that should not be: such products are computed again.
template <int kCols>
__device__ __forceinline__ void mend_nonfinite(sums_t<kKeyTiles>& s,
                                               const matrix_t<kCols>& x, int row,
                                               const matrix_t<kCols>& y) {
  if (kParts == 2 && any_nonfinite(s)) {
#pragma unroll
    for (int e = 0; e < 4 * kKeyTiles; ++e) {
      float& sum = s[e / 4][e % 4];
      if (is_finite(sum)) continue;
      const elem_t* const a = x.at(row + lane_index() / 4 + e % 4 / 2 * 8, 0);
      const elem_t* const b = y.at(e / 4 * 8 + lane_index() % 4 * 2 + e % 2, 0);
      sum = 0;
#pragma unroll 1
      for (int d = 0; d < kCols; ++d) sum = fmaf(to<float>(a[d]), to<float>(b[d]), sum);
    }
  }
}
template <int kCols>
__device__ __forceinline__ void multiply_rows(sums_t<kKeyTiles>& s,
                                              const matrix_t<kCols>& x, int row,
                                              const matrix_t<kCols>& y) {
  multiply_columns<kCols / kStep>(s, x, row, y, 0);
  mend_nonfinite(s, x, row, y);
}

// --- rows of scores ------------------------------------------------------------------

// Number e of an accumulator is in row lane / 4 + e / 2 * 8 and column lane % 4 * 2 + e
// % 2: a lane has two rows, shared with three others.

// The keys that this lane's rows see, mask and bias aside.
struct seen_t {
  int first[2], last[2];

  __device__ __forceinline__ seen_t(const mask_bounds_t& bounds) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_index() / 4 + 8 * r;
      first[r] = bounds.low + row;
      last[r] = row < bounds.num_queries ? min(bounds.high + row, bounds.num_keys) : 0;
    }
  }
  __device__ __forceinline__ bool operator()(int r, int key) const {
    return first[r] <= key && key < last[r];
  }
};

template <typename Combine>
__device__ __forceinline__ float over_row(float x, Combine combine) {
  return warp_reduce<4>(x, combine);
}

// exp(s - m) as in weight(); 16-bit results need fewer digits.
__device__ __forceinline__ float weight_of(float s, float m) {
  const float p = kSplits ? exp_of(s - m) : exp_fast(s - m);
  return s == -infinity<float>() ? -0.f : p;
}

// Turns scores into weights, at most 1; m and l are those of the two rows.
__device__ __forceinline__ void weigh(sums_t<kKeyTiles>& s, float (&m)[2],
                                      float (&l)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    m[r] = -infinity<float>();
    l[r] = 0;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      m[r] = larger(m[r], larger(s[n][2 * r], s[n][2 * r + 1]));
    }
    m[r] = over_row(m[r], [](float a, float b) { return larger(a, b); });
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        s[n][e] = weight_of(s[n][e], m[r]);
        l[r] += s[n][e];
      }
    }
    l[r] = over_row(l[r], [](float a, float b) { return a + b; });
  }
}

// --- stores --------------------------------------------------------------------------

// Where rows of a result go.
template <typename T> struct target_t {
  T* x;
  index_t row, col;  // strides
  int num_rows, dim;

  // The columns from `first` on.
  __device__ __forceinline__ target_t from(int first) const {
    return {x + first * col, row, col, num_rows, dim - first};
  }
};

// Stores 16 rows of sums, each times its factor.
template <int kTiles, typename T>
__device__ __forceinline__ void store_rows(const target_t<T>& to_rows,
                                           const float (&sums)[kTiles][4],
                                           const float (&factor)[2]) {
  const int lane = lane_index();
  constexpr int kElems = 8 / sizeof(T);  // per 8 bytes
  const bool as_vectors =
      to_rows.col == 1 && (reinterpret_cast<unsigned long long>(to_rows.x) % 8 |
                           to_rows.row % kElems | to_rows.dim % kElems) == 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    const bool exists = row < to_rows.num_rows;
    T* const x = to_rows.x + row * to_rows.row;
    if (!as_vectors) {
#pragma unroll
      for (int e = 0; e < 2 * kTiles; ++e) {
        const int column = e / 2 * 8 + lane % 4 * 2 + e % 2;
        if (exists && column < to_rows.dim) {
          x[column * to_rows.col] = to<T>(sums[e / 2][2 * r + e % 2] * factor[r]);
        }
      }
      continue;
    }
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      uint2 words[2];
      int column[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = sums[n + i][2 * r] * factor[r];
        const float high = sums[n + i][2 * r + 1] * factor[r];
        column[i] = 8 * (n + i) + lane % 4 * 2;
        if constexpr (sizeof(T) == 4) {
          words[i] = make_uint2(__float_as_uint(low), __float_as_uint(high));
        } else {
          words[i].x = pair16_t::from(low, high);
        }
      }
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (exists && column[i] < to_rows.dim) {
            *reinterpret_cast<uint2*>(x + column[i]) = words[i];
          }
        }
      } else {
        // Even lanes take the first tile and odd ones the second, 4 columns each.
        const bool odd = lane % 2;
        const unsigned own = odd ? words[1].x : words[0].x;
        const unsigned other =
            __shfl_xor_sync(kFullMask, odd ? words[0].x : words[1].x, 1);
        const int first = odd ? column[1] - 2 : column[0];
        if (exists && first < to_rows.dim) {
          *reinterpret_cast<uint2*>(x + first) =
              odd ? make_uint2(other, own) : make_uint2(own, other);
        }
      }
    }
  }
}

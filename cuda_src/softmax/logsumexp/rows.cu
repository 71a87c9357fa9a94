// SPDX-License-Identifier: MIT
// softmax_logsumexp_rows: log sum exp of contiguous rows.
//
// Algorithm  sum_i exp(a_i) = l 2^shift (softmax/detail/scaled_sum.cuh),  out = its
//            log. If that would lose digits (results near 0, scores beyond 2^20), the
//            row is read again:  out = max + log1p(sum of the others).
// Grid       1-D; a block of kNumThreads takes kRowsPerBlock * kSets rows at a time,
//            until none are left. If there are few long rows,
//            softmax_logsumexp_rows_parts sums kParts parts of each row, one per block,
//            and softmax_logsumexp_rows_merge adds them.
// Tiles      a lane has kInRegisters elements of each of kSets rows in registers; if
// SETS is
//            0, it loops over a row of any length, kInRegisters elements at a time. The
//            next ones, also those of the next row, load meanwhile.
// Memory     a once, one number per row is written; 16 bytes per access. Short
//            unaligned contiguous rows go through shared memory, or are read element by
//            element; the ends of longer ones are read one by one.
// Numbers    exponentials to half an ulp of acc_t, for floats to 2^-22 where the error
//            bound of the log allows it; sums and log in double; for 16-bit results the
//            fast exponential and a float log
// Limits     no weights, no mask; rows of at least 2 elements
//
// Parameters IN_REGISTERS, SETS, PARTS   as above
//            MIN_BLOCKS          blocks per multiprocessor, by registers
#include "softmax/detail/aligned_span.cuh"
#include "softmax/detail/row_log.cuh"

constexpr int kInRegisters = IN_REGISTERS, kSets = SETS > 0 ? SETS : 1, kParts = PARTS;
constexpr int kMinBlocks = MIN_BLOCKS;
constexpr int kVector = 16 / sizeof(a_t);  // elements per vector access
constexpr int kNumVectors = kInRegisters / kVector;
constexpr bool kHolds = SETS > 0;  // whole rows; otherwise lanes loop over a row
constexpr int kWarpLanes = kLanes < kWarpSize ? kLanes : kWarpSize;
static_assert(kInRegisters % kVector == 0 && (kHolds ? kLanes <= 32 : kLanes >= 32));

// --- quick sums ----------------------------------------------------------------------

// A log of 4 or more tolerates the error of the hardware exponential, 2^-22 of each
// term, which takes a third fewer instructions. A row whose log turns out smaller is
// summed again.
constexpr bool kCanBeQuick = sizeof(acc_t) == sizeof(float) && !kCoarse;

// Rows with fewer elements would be summed again too often.
constexpr int kShortestQuick = 64;

// Whether the log of a quick sum may be below 4: exp(4) < 2^6.
__device__ __forceinline__ bool is_too_quick(const total_t& sum) {
  const int exponent = (__double2hiint(sum.l.value) >> 20) - 1023 + sum.shift;
  return is_finite(sum.top) && exponent >= -6 && exponent < 6;
}

template <bool kValue> struct constant_t {
  static constexpr bool value = kValue;
};

// As take_in() of the sum.
template <int kCount, int kTogether, typename Score>
__device__ __forceinline__ void take_in_quickly(total_t& sum, Score score) {
  using range = detail::range<float>;
  constexpr float kHigh = float(kLog2e), kLow = float(kLog2e - double(kHigh));
  constexpr int kAtOnce = 4;  // added as floats
  static_assert(kCount % kAtOnce == 0);
  sum.see(warp_reduce<kTogether>(total_t::largest<kCount>(score), largest_nan_t()));
  const float lowest = float(sum.shift - range::kReach) * float(kLn2);
  const float round = range::kRound - float(sum.shift);
  const auto term = [&](int j) {
    const float x = fmaxf(score(j), lowest);
    const float rounded = fmaf(x, kHigh, round);  // k - shift, in its low bits
    const float k = rounded - round;
    const float r = fmaf(x, kLow, fmaf(x, kHigh, -k));
    return range::times_power(exp2f(r), range::low_bits(rounded));
  };
#pragma unroll
  for (int j = 0; j < kCount; j += kAtOnce) {
    sum.l += (term(j) + term(j + 1)) + (term(j + 2) + term(j + 3));
  }
}

// --- elements to registers -----------------------------------------------------------

// A lane's elements of a row, as they were read: in whole vectors or, interleaved over
// the lanes one by one, in the same slots. Slots beyond the row hold -inf.
struct on_chip_t {
  vector_t<a_t, kVector> read[kNumVectors];

  __device__ __forceinline__ void clear(int v) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) read[v].element[k] = to<a_t>(-infinity<acc_t>());
  }

  // Loads the next vectors of each lane, of `left` in total. All loads are issued
  // before the first is waited for.
  __device__ __forceinline__ void load_vectors(const a_t* a, int left) {
    if (left >= kNumVectors * kLanes) return load_vectors(a);
#pragma unroll
    for (int v = 0; v < kNumVectors; ++v) {
      const int i = v * kLanes + lane();
      if (i < left) {
        read[v] = load_vector<kVector>(a + i * kVector);
      } else {
        clear(v);
      }
    }
  }

  // The same, if none is missing.
  __device__ __forceinline__ void load_vectors(const a_t* a) {
#pragma unroll
    for (int v = 0; v < kNumVectors; ++v) {
      read[v] = load_vector<kVector>(a + (v * kLanes + lane()) * kVector);
    }
  }

  // Loads the first of `length` elements; also from shared memory.
  __device__ __forceinline__ void load_singles(const a_t* a, int length) {
#pragma unroll
    for (int j = 0; j < kInRegisters; ++j) {
      const int i = j * kLanes + lane();
      read[j / kVector].element[j % kVector] =
          i < length ? a[i] : to<a_t>(-infinity<acc_t>());
    }
  }

  __device__ __forceinline__ acc_t score(int j) const {
    return to<acc_t>(read[j / kVector].element[j % kVector]);
  }
  // Adds all elements of the lane; kTogether lanes share a row.
  template <int kTogether, bool kQuickly = false>
  __device__ __forceinline__ void add_to(total_t& sum,
                                         const roots_t<acc_t>& roots) const {
    const auto of = [&](int j) { return score(j); };
    if constexpr (kQuickly) {
      take_in_quickly<kInRegisters, kTogether>(sum, of);
    } else {
      sum.take_in<kInRegisters, kTogether>(of, roots);
    }
  }
};

// A row, or a part of one, of any length and alignment: whole vectors, and before and
// after them fewer elements than lanes.
struct piece_t {
  const a_t* a = nullptr;
  int head = 0, vectors = 0, tail = 0;  // the host takes longer rows elsewhere

  piece_t() = default;
  __device__ __forceinline__ piece_t(const a_t* a, long long length) : a(a) {
    const int before = num_before_aligned<kVector>(a);
    head = before < length ? before : int(length);
    vectors = int((length - head) / kVector);
    tail = int(length - head - (long long)vectors * kVector);
  }
};

// What a lane is loading: the next vectors of a piece, and one of its edges.
struct ahead_t {
  on_chip_t in_registers;
  acc_t edge;

  __device__ __forceinline__ void begin(const piece_t& piece) {
    in_registers.load_vectors(piece.a + piece.head, piece.vectors);
    edge = -infinity<acc_t>();
    if (lane() < piece.head + piece.tail) {
      const long long i = lane() < piece.head ? 0 : (long long)piece.vectors * kVector;
      edge = to<acc_t>(piece.a[i + lane()]);
    }
  }
};

// The sum of a piece whose loads have started; those of `next` start during the last
// vectors. Called by all lanes of a warp, for the same piece.
template <bool kQuickly>
__device__ __forceinline__ total_t sum_of(const piece_t& piece, const piece_t& next,
                                          ahead_t& ahead, const roots_t<acc_t>& roots) {
  constexpr int kTogether = kNumVectors * kLanes;
  const acc_t edge[1] = {ahead.edge};
  const a_t* at = piece.a + piece.head;
  total_t sum;
  int left = piece.vectors;
  do {
    const on_chip_t in_registers = ahead.in_registers;
    left -= kTogether;
    at += kTogether * kVector;
    if (left > 0) {
      ahead.in_registers.load_vectors(at, left);
    } else {
      ahead.begin(next);
    }
    in_registers.add_to<1, kQuickly>(sum, roots);
  } while (left > 0);
  if (piece.head + piece.tail > 0) {
    sum.take_in<1, 1>([&](int) { return edge[0]; }, roots);
  }
  return sum;
}

// --- short rows ----------------------------------------------------------------------

// Contiguous rows of one block: read as vectors, then stored in shared memory with the
// alignment that they have in global memory.
struct staged_t {
  static constexpr int kSize =
      kHolds ? kNumThreads * kInRegisters * kSets + kVector : 1;
  static constexpr int kSteps = kInRegisters * kSets / kVector;
  vector_t<a_t, kVector> read[kSteps];
  a_t before, after;  // before the first aligned vector, after the last

  __device__ __forceinline__ void load(const a_t* a, int count) {
    const int head = min(num_before_aligned<kVector>(a), count);
    const int num_vectors = (count - head) / kVector;
    const int tail = head + num_vectors * kVector;
#pragma unroll
    for (int v = 0; v < kSteps; ++v) {
      const int i = v * kNumThreads + threadIdx.x;
      if (i < num_vectors) read[v] = load_vector<kVector>(a + head + i * kVector);
    }
    if (threadIdx.x < head) before = a[threadIdx.x];
    if (tail + int(threadIdx.x) < count) after = a[tail + threadIdx.x];
  }

  // Returns the address of the first element; `a` and `count` as in load.
  __device__ __forceinline__ const a_t* store(const a_t* a, int count) const {
    __shared__ __align__(16) unsigned char bytes[kSize * sizeof(a_t)];
    const int head = min(num_before_aligned<kVector>(a), count);
    const int num_vectors = (count - head) / kVector;
    const int tail = head + num_vectors * kVector;
    a_t* first = reinterpret_cast<a_t*>(bytes) + (head == 0 ? 0 : kVector - head);
    __syncthreads();  // the previous rows have been read
#pragma unroll
    for (int v = 0; v < kSteps; ++v) {
      const int i = v * kNumThreads + threadIdx.x;
      if (i < num_vectors) {
        *reinterpret_cast<vector_t<a_t, kVector>*>(first + head + i * kVector) =
            read[v];
      }
    }
    if (threadIdx.x < head) first[threadIdx.x] = before;
    if (tail + int(threadIdx.x) < count) first[tail + threadIdx.x] = after;
    __syncthreads();
    return first;
  }
};

// The row of a lane among those of a block. Rows of a warp are adjacent, so that their
// results are written together.
__device__ __forceinline__ int index_of_set(int set) {
  constexpr int kAtOnce = kWarpSize / kWarpLanes;  // rows of a warp
  const int warp = threadIdx.x / kWarpSize;
  return (warp * kSets + set) * kAtOnce + threadIdx.x % kWarpSize / kWarpLanes;
}
__device__ __forceinline__ long long row_of_set(long long block_row, int set) {
  return block_row + index_of_set(set);
}

// One result per row of this lane's group; lane j has those of sets j, j + kLanes, ...
[[maybe_unused]] constexpr int kResults = (kSets + kLanes - 1) / kLanes;

// How the elements of short rows reach their lanes.
enum class path { kVectors, kStaged, kSingles };

template <path kPath>
__device__ __forceinline__ void short_rows(const a_t* a, out_t* out, out_t* sign,
                                           const layout_t& layout) {
  const int length = int(layout.row_length);
  constexpr int kRows = kRowsPerBlock * kSets;
  const auto start_of = [&](long long row) {
    return a + (row < layout.num_rows ? locate(layout.outer, row).of[kA] : 0);
  };
  const auto num_left = [&](long long block_row) {
    const long long left = layout.num_rows - block_row;
    return left < kRows ? (left > 0 ? int(left) : 0) : kRows;
  };

  // The next rows load while these are processed.
  on_chip_t ahead[kSets];
  staged_t staged;
  const auto load = [&](long long block_row) {
    if constexpr (kPath == path::kStaged) {
      staged.load(a + block_row * length, num_left(block_row) * length);
    } else {
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const long long row = row_of_set(block_row, set);
        const bool exists = row < layout.num_rows;
        if constexpr (kPath == path::kVectors) {
          ahead[set].load_vectors(start_of(row), exists ? length / kVector : 0);
        } else {
          ahead[set].load_singles(start_of(row), exists ? length : 0);
        }
      }
    }
  };

  const roots_t<acc_t> roots;
  load((long long)blockIdx.x * kRows);
  for (long long block_row = (long long)blockIdx.x * kRows; block_row < layout.num_rows;
       block_row += (long long)gridDim.x * kRows) {
    on_chip_t in_registers[kSets];
    const a_t* rows = nullptr;
    if constexpr (kPath == path::kStaged) {
      rows = staged.store(a + block_row * length, num_left(block_row) * length);
    } else {
#pragma unroll
      for (int set = 0; set < kSets; ++set) in_registers[set] = ahead[set];
    }
    load(block_row + (long long)gridDim.x * kRows);

    // Each lane keeps the sums of its own sets, so that logs are computed in parallel.
    total_t kept[kResults];
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if constexpr (kPath == path::kStaged) {
        const int row = index_of_set(set);
        in_registers[set].load_singles(rows + row * length,
                                       row < num_left(block_row) ? length : 0);
      }
      const auto sum_up = [&](auto quickly) {
        total_t sum;
        in_registers[set].add_to<kWarpLanes, decltype(quickly)::value>(sum, roots);
        sum.l.value = warp_reduce<kWarpLanes>(sum.l.value, plus_t());
        return sum;
      };
      total_t sum;
      if (kCanBeQuick && length >= kShortestQuick) {
        sum = sum_up(constant_t<kCanBeQuick>());
        const bool again = is_too_quick(sum);
        if (__any_sync(kFullMask, again)) {
          const total_t careful = sum_up(constant_t<false>());
          if (again) sum = careful;
        }
      } else {
        sum = sum_up(constant_t<false>());
      }
      if (set % kLanes == lane()) kept[set / kLanes] = sum;
    }
#pragma unroll
    for (int n = 0; n < kResults; ++n) {
      const int own = n * kLanes + lane();
      const long long row = row_of_set(block_row, own);
      const bool exists = own < kSets && row < layout.num_rows;
      double log = kept[n].log();
      const bool is_doubtful = exists && kept[n].is_doubtful();
      if (__any_sync(kFullMask, is_doubtful)) {
        for (int set = n * kLanes; set < min(kSets, (n + 1) * kLanes); ++set) {
          if (!__any_sync(kFullMask, is_doubtful && set == own)) continue;
          const long long again = row_of_set(block_row, set);
          const bool is_row = again < layout.num_rows;
          const a_t* start = a + (is_row ? locate(layout.outer, again).of[kA] : 0);
          const double careful = careful_log(start, is_row ? length : 0);
          if (is_doubtful && set == own) log = careful;
        }
      }
      if (exists) store(layout, row, kept[n], log, out, sign);
    }
  }
}

// --- long rows -----------------------------------------------------------------------

// The sum over the lanes of a row, in each of them. Consecutive calls alternate between
// two slots, so that none writes what another warp still reads.
__device__ __forceinline__ total_t join_lanes(total_t sum, int place) {
  sum.join<kWarpLanes>();
  if constexpr (kLanes > kWarpSize) {
    constexpr int kWarps = kLanes > kWarpSize ? kLanes / kWarpSize : 1;
    __shared__ partial_t found[2][kWarps];
    const int warp = threadIdx.x / kWarpSize;
    if (threadIdx.x % kWarpSize == 0) found[place][warp] = sum.stored();
    __syncthreads();
    sum = total_t(found[place][threadIdx.x % kWarps]);
    sum.join<kWarps>();
  }
  return sum;
}

// All lanes of the row have `sum`.
__device__ __forceinline__ void finish_row(const a_t* a, out_t* out, out_t* sign,
                                           const layout_t& layout, long long row,
                                           const total_t& sum) {
  double log = 0;
  if (sum.is_doubtful()) {
    log = careful_log(a + locate(layout.outer, row).of[kA], layout.row_length);
  } else if (lane() < kWarpSize) {
    log = sum.log();
  }
  if (lane() == 0) store(layout, row, sum, log, out, sign);
}

__device__ __forceinline__ void long_rows(const a_t* a, out_t* out, out_t* sign,
                                          partial_t* partial, const layout_t& layout) {
  const long long length = layout.row_length;
  // Whole vectors per part: all parts of a row have its alignment.
  long long size = (length + kParts - 1) / kParts;
  size = (size + kVector - 1) / kVector * kVector;
  const int part = blockIdx.x % kParts;
  const long long begin = part * size;
  const long long end = begin + size < length ? begin + size : length;
  const roots_t<acc_t> roots;
  const auto piece_of = [&](long long row) {
    if (row >= layout.num_rows || begin >= end) return piece_t();
    return piece_t(a + locate(layout.outer, row).of[kA] + begin, end - begin);
  };
  long long row = row_of_lane(blockIdx.x / kParts * kRowsPerBlock);
  const long long step = row_step() / kParts;
  piece_t next = piece_of(row);
  ahead_t ahead;
  ahead.begin(next);
  int place = 0;
  for (; row < layout.num_rows; row += step) {
    const piece_t piece = next;
    next = piece_of(row + step);
    // For parts, it is not known yet how large the log will be.
    constexpr bool kQuickly = kCanBeQuick && kParts == 1;
    total_t sum = join_lanes(sum_of<kQuickly>(piece, next, ahead, roots), place);
    if (kQuickly && is_too_quick(sum)) {  // all threads of the row agree
      place ^= 1;
      ahead_t again;
      again.begin(piece);
      sum = join_lanes(sum_of<false>(piece, piece_t(), again, roots), place);
    }
    if constexpr (kParts == 1) {
      finish_row(a, out, sign, layout, row, sum);
    } else if (lane() == 0) {
      partial[row * kParts + part] = sum.stored();
    }
    place ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    softmax_logsumexp_rows(const a_t* a,
                           const void*,  // no weights,
                           const void*,  // and no mask
                           out_t* out,
                           out_t* sign,  // written if layout.returns_sign
                           const __grid_constant__ layout_t layout) {
  if constexpr (kHolds) {
    bool is_aligned_row =
        is_aligned<a_t, kVector>(a) && layout.row_length % kVector == 0;
#pragma unroll
    for (int axis = 0; axis < OUTER_AXES; ++axis) {
      if (layout.outer.stride[kA][axis] % kVector != 0) is_aligned_row = false;
    }
    // Through shared memory, unless elements have 8 bytes: these are read as fast
    // alone.
    const bool is_staged = sizeof(a_t) < 8 && OUTER_AXES == 1 &&
                           layout.outer.stride[kA][0] == layout.row_length;
    if (is_aligned_row) {
      short_rows<path::kVectors>(a, out, sign, layout);
    } else if (is_staged) {
      short_rows<path::kStaged>(a, out, sign, layout);
    } else {
      short_rows<path::kSingles>(a, out, sign, layout);
    }
  } else if constexpr (kParts == 1) {
    long_rows(a, out, sign, nullptr, layout);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    softmax_logsumexp_rows_parts(const a_t* a, const void*, const void*, out_t* out,
                                 out_t* sign,
                                 partial_t* partial,  // (num_rows, kParts)
                                 const __grid_constant__ layout_t layout) {
  if constexpr (!kHolds && kParts > 1) long_rows(a, out, sign, partial, layout);
}

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_logsumexp_rows_merge(const a_t* a, const void*, const void*, out_t* out,
                                 out_t* sign, const partial_t* partial,
                                 const __grid_constant__ layout_t layout) {
  if constexpr (!kHolds && kParts > 1) {
    int place = 0;
    for (long long row = row_of_lane(first_row()); row < layout.num_rows;
         row += row_step()) {
      total_t sum;
      for (int i = lane(); i < kParts; i += kLanes) {
        sum.take_next(total_t(partial[row * kParts + i]));
      }
      sum = join_lanes(sum, place);
      finish_row(a, out, sign, layout, row, sum);
      place ^= 1;
    }
  }
}

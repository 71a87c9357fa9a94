// SPDX-License-Identifier: MIT
// softmax_stream: rows that only many multiprocessors can hold, read once.
//
// Algorithm  softmax_stream_clear: nothing is told yet. softmax_stream: a group of
//            blocks takes a row at a time. A block has the next rows under way to its
//            shared memory, sums the exponentials of one row in units of its own, tells
//            the group, and writes the row before, whose news have come meanwhile:
//                out_i = e_i 2^(own unit - unit of the row) / l
//            (log_softmax: out_i = (s_i - m) - log l). Rows whose scores are too large
//            for powers of two are read again, as softmax_safe does.
// Grid       (blocks of a group, groups), all at once, two on a multiprocessor: while
// one
//            waits the other works
// Tiles      a row: kHeld vectors a thread of the group, in registers from when it is
//            summed until it is written; kBuffers rows on their way in shared memory
// Memory     x and out once; 16 bytes an access where out is aligned as x is; between
//            blocks, two doubles a row and block
// Numbers    as softmax_tiled
// Limits     rows of at most kHeld * LANES vectors a block of the group; reduced axis
//            contiguous in x and out, of one type; no mask, no scale; sm_80 or newer
//
// Parameters as in softmax/score.cuh and softmax/group.cuh
//            HELD      vectors of a row a thread
//            BUFFERS   rows that shared memory has places for
#include "ptx/copy.cuh"
#include "softmax/board.cuh"
#include "softmax/peeled.cuh"
#include "softmax/row_power.cuh"

#ifndef HELD
#error "HELD and BUFFERS come from the host"
#endif
constexpr int kHeld = HELD, kBuffers = BUFFERS;
constexpr int kVector = 16 / sizeof(x_t);  // elements a vector access
constexpr int kWarps = kLanes / kWarpSize;
static_assert(kWarps <= kWarpSize && kSame<x_t, out_t>);

using board_of_row_t = board_t<3>;
using vector_of_x_t = vector_t<x_t, kVector>;

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_stream_clear(const x_t* x,
                         const bool* where,
                         out_t* out,
                         unsigned long long* told,
                         const __grid_constant__ layout_t layout) {
  board_of_row_t{told}.clear(layout.num_rows);
}

// --- sums of parts of a row ----------------------------------------------------------

// The sum of exponentials of some scores, the largest of which is m: in powers of two
// l 2^unit, else l exp(m).
template <typename Part>
__device__ __forceinline__ Part part_of(double l) {
  if constexpr (kSame<Part, wide_sum_t>) {
    return {l, 0};
  } else {
    return l;
  }
}

struct news_t {
  static constexpr acc_t kReach = 1 << 20;

  acc_t m = -infinity<acc_t>();
  part_t l = {};

  // Of powers of two, within their reach: what is below counts for nothing, and of what
  // is above is_sum() tells.
  static __device__ __forceinline__ acc_t reference(acc_t m) {
    if constexpr (!kInPowers) return shift_by(m);
    return m > kReach ? kReach : m < -kReach ? -kReach : m;
  }
  // Whether sums of rows with this largest score are right.
  static __device__ __forceinline__ bool is_sum(acc_t m) {
    return m == -infinity<acc_t>() || (kInPowers ? abs_of(m) <= kReach : is_finite(m));
  }
  // What 1 of a sum with largest score `own` is in one with `all`, which is not less.
  static __device__ __forceinline__ double weight(acc_t own, acc_t all) {
    if constexpr (kInPowers) {
      const int count = power_of_row_t::unit_of(reference(own)) -
                        power_of_row_t::unit_of(reference(all));
      return count < -1020 ? 0.0 : __hiloint2double((1023 + count) << 20, 0);
    } else if constexpr (kCoarse) {
      return own == -infinity<acc_t>() ? 0.0 : double(exp_fast(own - all));
    } else {
      return exp_diff(double(own), double(all));
    }
  }
  // The sum over the lanes of a warp.
  __device__ __forceinline__ void join() {
    const acc_t all = warp_reduce(m, largest_t());
    const double factor = weight(m, all);
    l = scaled(l, factor);
    l = warp_reduce(l, plus_t());
    m = all;
  }
  static __device__ __forceinline__ double scaled(double l, double factor) {
    return l * factor;
  }
  static __device__ __forceinline__ wide_sum_t scaled(wide_sum_t l, double factor) {
    return {l.high * factor, l.low * factor};
  }
};

// What the warps of a block find, and what the row comes to; of two in turn one is
// written while the other may still be read.
struct shared_t {
  acc_t m[kWarps];
  double l[kWarps];
  finish_t finish;
  acc_t largest;
};

// --- a row as a thread has it --------------------------------------------------------

struct place_t {
  const x_t* x;
  out_t* out;
  peeled_t peeled;

  __device__ __forceinline__ place_t(const x_t* x,
                                     out_t* out,
                                     const layout_t& layout,
                                     long long row) {
    const auto at = locate(layout.outer, row);
    this->x = x + at.of[kX];
    this->out = out + at.of[kOut];
    peeled =
        peeled_t::of<kVector>(num_before_aligned<kVector>(this->x), layout.row_length);
  }
  static __device__ __forceinline__ long long vector(int v) {
    return ((long long)v * gridDim.x + blockIdx.x) * kLanes + threadIdx.x;
  }
  __device__ __forceinline__ bool has(int v) const {
    return vector(v) < peeled.num_vectors;
  }
  __device__ __forceinline__ long long position(int v) const {
    return peeled.head + vector(v) * kVector;
  }
  // The element of this thread, of those in no whole vector.
  __device__ __forceinline__ bool has_edge() const {
    return blockIdx.x == 0 && threadIdx.x < peeled.head + peeled.tail;
  }
  __device__ __forceinline__ long long edge() const {
    return peeled.edge<kVector>(threadIdx.x);
  }
};

// Of 16 bits, two at a time.
template <typename Vector>
__device__ __forceinline__ Vector largest_of(const Vector (&value)[kHeld]) {
  Vector largest = value[0];
#if __CUDA_ARCH__ >= 800
#pragma unroll
  for (int v = 1; v < kHeld; ++v) {
    if constexpr (sizeof(x_t) == 2) largest = larger_of(largest, value[v]);
  }
#endif
  return largest;
}

struct row_t {
  vector_of_x_t value[kHeld];  // elements, or the exponentials that became of them
  x_t edge;
  acc_t m;  // the largest score of the warp

  template <typename F>
  __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) f(value[v].element[k]);
    }
  }

  // The sum of this warp.
  __device__ __forceinline__ news_t sum(const roots_t<acc_t>& roots,
                                        const layout_t& layout) {
    news_t news;
    const bool has_edges = __any_sync(kFullMask, to<acc_t>(edge) != news.m);
    news.m = to<acc_t>(edge);
    if constexpr (sizeof(x_t) == 2) {
      const vector_of_x_t largest = largest_of(value);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        news.m = largest_t()(news.m, to<acc_t>(largest.element[k]));
      }
    } else {
      each([&](x_t x) { news.m = largest_t()(news.m, to<acc_t>(x)); });
    }
    m = news.m = warp_reduce(news.m, largest_t());

    const acc_t shift = news_t::reference(m);
    if constexpr (kInPowers) {
      const power_of_row_t power(roots, shift);
      news.l = power.none();
      const auto add = [&](auto& x) {
        const acc_t e = power(to<acc_t>(x));
        power.add(news.l, e);
        if constexpr (kInPowers) x = e;
      };
      each(add);
      if (has_edges) add(edge);
      news.l = power.sum_of(news.l);
    } else {
      const auto add = [&](x_t x) {
        news.l += as_term(score_t(to<acc_t>(x), layout).exp_minus(shift));
      };
      each(add);
      if (has_edges) add(edge);
    }
    news.l = warp_reduce(news.l, plus_t());
    return news;
  }

  __device__ __forceinline__ void write(const place_t& place,
                                        const finish_t& finish,
                                        acc_t largest,
                                        const layout_t& layout) const {
    const double factor = kInPowers ? news_t::weight(m, largest) : 1;
    const acc_t scale = sizeof(acc_t) == sizeof(double)
                            ? acc_t(factor)
                            : acc_t(factor * double(finish.inverse));
    const auto result = [&](x_t x) {
      const acc_t value = to<acc_t>(x);
      if constexpr (!kInPowers) return finish(score_t(value, layout));
      // A factor of doubles may be too small for all its digits.
      if constexpr (sizeof(acc_t) == sizeof(double)) {
        return value * finish.inverse * scale;
      }
      return value * scale;
    };
    const bool in_vectors =
        num_before_aligned<kVector>(place.out + place.peeled.head) == 0;
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      acc_t y[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) y[k] = result(value[v].element[k]);
      const auto written = to_vector<out_t, kVector>::of(y);
      out_t* const home = place.out + place.position(v);
      if (!place.has(v)) continue;
      if (in_vectors) {
        store_vector<kVector>(home, written);
      } else {
#pragma unroll
        for (int k = 0; k < kVector; ++k) home[k] = written.element[k];
      }
    }
    if (place.has_edge()) place.out[place.edge()] = to<out_t>(result(edge));
  }
};

// --- rows whose scores are too large -------------------------------------------------

// f(i) for the elements of this thread.
template <typename F>
__device__ __forceinline__ void for_each(const place_t& place, F f) {
#pragma unroll 1
  for (int v = 0; v < kHeld; ++v) {
    if (!place.has(v)) continue;
#pragma unroll 1
    for (int k = 0; k < kVector; ++k) f(place.position(v) + k);
  }
  if (place.has_edge()) f(place.edge());
}

// Reads the row anew. All blocks of the group come here for the same row.
__device__ __noinline__ void write_again(const place_t& place,
                                         const board_of_row_t& board,
                                         long long row,
                                         acc_t largest,
                                         const layout_t& layout) {
  const acc_t m = shift_by(largest);
  const auto score = [&](long long i) {
    return score_t(to<acc_t>(place.x[i]), layout);
  };
  double l = 0;
  for_each(place, [&](long long i) { l += double(score(i).exp_minus(m)); });
  l = group_reduce<kLanes>(l, plus_t());
  if (threadIdx.x == 0) board.tell(row, 2, l);
  l = 0;
  for (int block = threadIdx.x; block < gridDim.x; block += kLanes) {
    l += board.hear(row, block, 2);
  }
  const finish_t finish(m, group_reduce<kLanes>(l, plus_t()));
  for_each(place, [&](long long i) { place.out[i] = to<out_t>(finish(score(i))); });
}

// --- the kernel ----------------------------------------------------------------------

extern __shared__ uint4 memory[];

struct stream_t {
  const x_t* const x;
  out_t* const out;
  const layout_t& layout;
  const board_of_row_t board;
  const roots_t<acc_t> roots;
  x_t edge_ahead;  // of the next row

  // Vector v of this thread in a buffer.
  __device__ __forceinline__ vector_of_x_t& home(int buffer, int v) const {
    return reinterpret_cast<vector_of_x_t*>(
        memory)[(buffer * kHeld + v) * kLanes + threadIdx.x];
  }

  // Starts to load a row; slots beyond it hold -inf.
  __device__ __forceinline__ void load(long long row, int buffer) const {
    if (row < layout.num_rows) {
      const place_t place(x, out, layout, row);
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        if (place.has(v)) {
          ptx::copy_async<16>(&home(buffer, v), place.x + place.position(v));
        } else {
#pragma unroll
          for (int k = 0; k < kVector; ++k) {
            home(buffer, v).element[k] = padding<x_t>();
          }
        }
      }
    }
    ptx::commit_copies();  // a group for each row, even if there is none
  }
  __device__ __forceinline__ void load_edge(long long row) {
    edge_ahead = padding<x_t>();
    if (blockIdx.x > 0 || row >= layout.num_rows) return;
    const place_t place(x, out, layout, row);
    if (place.has_edge()) edge_ahead = place.x[place.edge()];
  }

  // What the blocks of the group tell of a row, by one warp: many are asked together.
  __device__ __forceinline__ void hear(long long row, shared_t& shared) const {
    constexpr int kAtOnce = 3;  // more of them spill
    news_t news;
    for (int first = threadIdx.x % kWarpSize; first < gridDim.x;
         first += kAtOnce * kWarpSize) {
      double m[kAtOnce], l[kAtOnce];
      board.hear_all(row, first, m, l);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kWarpSize >= gridDim.x) continue;
        // Both in the unit of the larger.
        const acc_t own = acc_t(m[i]), all = largest_t()(news.m, own);
        news.l =
            plus_t()(news_t::scaled(news.l, news_t::weight(news.m, all)),
                     news_t::scaled(part_of<part_t>(l[i]), news_t::weight(own, all)));
        news.m = all;
      }
    }
    __syncwarp();
    news.join();
    if (threadIdx.x % kWarpSize == 0) {
      shared.finish = finish_t(shift_by(news.m), total(news.l));
      shared.largest = news.m;
    }
  }

  // What the warps of this block have found, by one of them.
  __device__ __forceinline__ void tell(long long row, const shared_t& shared) const {
    news_t news;
    const int warp = threadIdx.x % kWarpSize;
    if (warp < kWarps) {
      news.m = shared.m[warp];
      news.l = part_of<part_t>(shared.l[warp]);
    }
    news.join();
    if (warp == 0) {
      board.tell(row, 0, news.m);
      board.tell(row, 1, total(news.l));
    }
  }

  __device__ __forceinline__ void run() {
    __shared__ shared_t shared_of[2];
    const int warp = threadIdx.x / kWarpSize;
    const long long step = gridDim.y;
#pragma unroll
    for (int b = 0; b < kBuffers; ++b) load(blockIdx.y + b * step, b);
    load_edge(blockIdx.y);
    row_t now, before;
    int buffer = 0, turn = 0;
    for (long long row = blockIdx.y; row < layout.num_rows + step; row += step) {
      shared_t& shared = shared_of[turn];
      const bool is_row = row < layout.num_rows, has_before = row >= step;
      if (is_row) {
        ptx::wait_copy_groups<kBuffers - 1>();
#pragma unroll
        for (int v = 0; v < kHeld; ++v) now.value[v] = home(buffer, v);
        now.edge = edge_ahead;
        load(row + kBuffers * step, buffer);
        load_edge(row + step);
        buffer = buffer + 1 == kBuffers ? 0 : buffer + 1;
        const news_t news = now.sum(roots, layout);
        if (threadIdx.x % kWarpSize == 0) {
          shared.m[warp] = news.m;
          shared.l[warp] = total(news.l);
        }
      }
      if (has_before && warp == kWarps - 1) hear(row - step, shared);
      // Both are known to all; what is written next is the other of shared_of.
      __syncthreads();
      if (is_row && warp == 0) tell(row, shared);
      if (has_before) {
        const place_t place(x, out, layout, row - step);
        if (news_t::is_sum(shared.largest)) {
          before.write(place, shared.finish, shared.largest, layout);
        } else {
          write_again(place, board, row - step, shared.largest, layout);
        }
      }
      before = now;
      turn ^= 1;
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 2)
    softmax_stream(const x_t* x,
                   const bool* where,
                   out_t* out,
                   unsigned long long* told,  // (num_rows, gridDim.x, 3)
                   const __grid_constant__ layout_t layout) {
  stream_t{x, out, layout, {told}}.run();
}

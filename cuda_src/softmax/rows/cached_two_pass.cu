// SPDX-License-Identifier: MIT
// softmax_trail: long rows in one launch; rows are written so soon after they are
// summed that the second read hits L2.
//
// Algorithm  softmax_trail_clear resets what blocks publish. softmax_trail walks over a
//            queue of row parts (softmax/detail/tile_queue.cuh). The block that sums
//            the last part of a row waits for the other sums, adds them and publishes
//            the sum of the row; blocks that write wait for that.
// Grid       1-D; as many blocks of kLanes threads as fit, or fewer
// Tiles      a part of a row: kInRegisters 16-byte vectors per thread, in registers
// Memory     x twice, the second time from L2; out once; 16 bytes per access, ends of
//            unaligned rows element by element; blocks exchange 16 bytes per part
// Numbers    as softmax_split; the exponentials that are summed are those that are
//            written. Doubles by a table, as softmax_tiled
// Limits     reduced axis contiguous in x and out; rows that L2 can hold; no mask;
//            sm_80 or newer
//
// Parameters MIN_BLOCKS   blocks per multiprocessor that registers must suffice for
#include "softmax/detail/tile_queue.cuh"
#include "softmax/detail/partial_sum.cuh"
#include "softmax/detail/row_exp.cuh"

constexpr int kVector = kRowVector;
static_assert(!kHasWhere && kLanes >= 2 * kVector, "a thread has an edge at most");

// How a part is summed: doubles by a table; floats in powers of two, in the same way as
// they are written if that is cheap.
constexpr bool kHasRoots = sizeof(acc_t) == sizeof(double);
constexpr bool kHasPowers = finish_in_powers_t::kTakes || kCoarse;
constexpr exps kHow = kHasRoots ? exps::kByTable : exps::kOfScore;

// --- the queue -----------------------------------------------------------------------

__device__ __forceinline__ tile_queue_t queue_of(const layout_t& layout) {
  return {layout.num_rows, layout.row_length, kVector};
}

// Blocks publish sums l exp(m), as two numbers.
struct board_t : queue_board_t<2> {
  __device__ __forceinline__ unsigned long long* of_part(unsigned part) const {
    return of_row(num_rows + part);
  }
  static __device__ __forceinline__ void publish(unsigned long long* at,
                                                 const partial_t& sum) {
    published_t::publish(at, sum.l);
    published_t::publish(at + 1, sum.m);
  }
  // Waits until it is published.
  static __device__ __forceinline__ partial_t read(const unsigned long long* at) {
    unsigned long long l, m;
    while (true) {
      l = ptx::load_relaxed(at);
      m = ptx::load_relaxed(at + 1);
      if (l != published_t::kUnpublished && m != published_t::kUnpublished) break;
      __nanosleep(64);
    }
    return {__longlong_as_double(l), __longlong_as_double(m)};
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_trail_clear(const x_t* x, const bool*, out_t* out,
                        unsigned long long* words,
                        const __grid_constant__ layout_t layout) {
  board_t{words, 0}.clear(2 + 2 * (layout.num_rows + (long long)queue_of(layout).all));
}

// --- a part of a row -----------------------------------------------------------------

struct piece_t : row_part_t<kVector> {
  const layout_t& layout;
  // A row that fits into L2 has fewer than 2^31 elements.
  const x_t* x;  // from its first whole vector on
  out_t* out;

  __device__ __forceinline__ piece_t(const x_t* x, out_t* out, const layout_t& layout,
                                     const tile_queue_t& queue, unsigned part)
      : row_part_t(queue, part), layout(layout) {
    const auto at = locate(layout.outer, row);
    this->x = x + at.of[kX];
    const auto aligned = aligned_span_t::of<kVector>(
        num_before_aligned<kVector>(this->x), layout.row_length);
    this->x += aligned.head;
    this->out = out + at.of[kOut] + aligned.head;
    find(part - row * queue.parts, aligned);
  }
  __device__ __forceinline__ bool is_whole() const {
    return first - lane() + kPart <= num_vectors;
  }
  __device__ __forceinline__ score_t score(x_t element) const {
    return score_t(to<acc_t>(element), layout);
  }
};

// A thread's elements of a part, in registers. Slots beyond the row hold -inf.
template <typename T> struct on_chip_t {
  using vector = vector_t<T, kVector>;
  vector read[kInRegisters];
  T edge;

  __device__ __forceinline__ const vector& at(int k) const { return read[k]; }

  __device__ __forceinline__ void load(const piece_t& piece,
                                       unsigned long long policy) {
    if (piece.is_whole()) {
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) load(piece, k, policy);
    } else {
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) {
        if (piece.has(k)) {
          load(piece, k, policy);
        } else {
#pragma unroll
          for (int e = 0; e < kVector; ++e) read[k].element[e] = padding<T>();
        }
      }
    }
    edge = piece.has_edge() ? piece.x[piece.edge] : padding<T>();
  }

 private:
  __device__ __forceinline__ void load(const piece_t& piece, int k,
                                       unsigned long long policy) {
    read[k].word = load_word<kVector>(piece.x + piece.position(k), policy);
  }
};

// Calls visit(score) for all elements.
template <typename Visit>
__device__ __forceinline__ void each(const on_chip_t<x_t>& in_registers,
                                     const piece_t& piece, Visit visit) {
#pragma unroll
  for (int k = 0; k < kInRegisters; ++k) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) visit(piece.score(in_registers.at(k).element[e]));
  }
  visit(piece.score(in_registers.edge));
}

// The largest score of the warp; NaN if there is one, except for doubles.
__device__ __forceinline__ acc_t larger(acc_t a, acc_t b) {
  if constexpr (kHasRoots) return larger_finite_t()(a, b);
  return detail::largest_nan(a, b);
}
template <typename T>
__device__ __forceinline__ acc_t largest(const on_chip_t<T>& in_registers,
                                         const piece_t& piece) {
  acc_t m = piece.score(in_registers.edge).key;
  if constexpr (sizeof(T) == 2 && kVector % 2 == 0 && !kScaled) {
    auto of_all = in_registers.at(0);  // no conversion needed
#pragma unroll
    for (int k = 1; k < kInRegisters; ++k)
      of_all = larger_of(of_all, in_registers.at(k));
#pragma unroll
    for (int e = 0; e < kVector; ++e) m = larger(m, to<acc_t>(of_all.element[e]));
  } else {
    each(in_registers, piece, [&](score_t s) { m = larger(m, s.key); });
  }
  return warp_reduce(m, [](acc_t a, acc_t b) { return larger(a, b); });
}

// --- sums ----------------------------------------------------------------------------

// The sum of a warp for any scores, one by one, with a second read.
__device__ __forceinline__ partial_t careful_sum(const piece_t& piece) {
  running_t<acc_t> sum;
  const auto take = [&](x_t element) {
    const score_t s[1] = {piece.score(element)};
    take_scores(sum, s, keys_t(piece.layout));
  };
#pragma unroll 1
  for (int i = 0; i < kInRegisters * kVector; ++i) {
    const int k = i / kVector;
    if (piece.has(k)) take(piece.x[piece.position(k) + i % kVector]);
  }
  if (piece.has_edge()) take(piece.x[piece.edge]);
  return partial_of(warp_reduce(sum, combine_t<>()), keys_t(piece.layout));
}

// The sum of a warp; invalid if it is not finite.
template <exps kHow>
__device__ __forceinline__ partial_t sum_of_roots(const on_chip_t<x_t>& in_registers,
                                                  const piece_t& piece, acc_t m) {
  const row_exp_t<kHow> exp_of_row(shift_by(m));
  auto sum = exp_of_row.none();
  each(in_registers, piece, [&](score_t s) { exp_of_row.add(sum, exp_of_row(s)); });
  return {total(warp_reduce(exp_of_row.sum_of(sum), plus_t())), double(m)};
}
__device__ __forceinline__ partial_t sum_of_powers(const on_chip_t<x_t>& in_registers,
                                                   const piece_t& piece, acc_t m) {
  if (m == -infinity<acc_t>()) return {0, double(m)};
  if (!power_t::takes(m)) return {infinity<double>(), 0};
  const power_t power(m);
  const auto term = [&](score_t s) {
    if constexpr (kCoarse) return exp2f(fmaf(s.key, float(kLog2e), -power.unit));
    return power(s);
  };
  // Four terms are added as floats; for 16-bit results, those of a vector.
  double l = term(piece.score(in_registers.edge));
#pragma unroll
  for (int k = 0; k < kInRegisters; ++k) {
    float part = 0;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      part += term(piece.score(in_registers.at(k).element[e]));
    }
    l += part;
  }
  l = warp_reduce(l, plus_t());
  return {l * power_sum_t<float, false>::power_about(int(power.unit), m), double(m)};
}
__device__ __forceinline__ partial_t sum_of_pairs(const on_chip_t<x_t>& in_registers,
                                                  const piece_t& piece) {
  powers_t sum;
#pragma unroll
  for (int k = 0; k < kInRegisters; ++k) {
    score_t s[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) s[e] = piece.score(in_registers.at(k).element[e]);
    take_scores(sum, s, keys_t(piece.layout));
  }
  const score_t s[1] = {piece.score(in_registers.edge)};
  take_scores(sum, s, keys_t(piece.layout));
  sum.template join<kWarpSize>();
  if (!is_sum(sum)) return {infinity<double>(), 0};
  return partial_of(sum, keys_t(piece.layout));
}

// The sum of a warp; `m` is the largest of its scores.
template <exps kHow>
__device__ __forceinline__ partial_t sum_up(const on_chip_t<x_t>& in_registers,
                                            const piece_t& piece, acc_t m) {
  partial_t sum;
  if constexpr (kHasRoots) {
    sum = sum_of_roots<kHow>(in_registers, piece, m);
  } else if constexpr (kHasPowers) {
    sum = sum_of_powers(in_registers, piece, m);
  } else {
    sum = sum_of_pairs(in_registers, piece);
  }
  if (!is_finite(sum.l)) {
    sum = careful_sum(piece);
    // In the unit of the other sums.
    if constexpr (kHasRoots && !kLog) {
      sum.l *= __hiloint2double((1023 + row_exp_t<kHow>::kRoom) << 20, 0);
    }
  }
  return sum;
}

// Adds the sums of warps, in all lanes of one warp.
__device__ __forceinline__ partial_t join_warps(const partial_t (&sums)[kWarps],
                                                keys_t keys) {
  const partial_t own = sums[threadIdx.x % kWarps];
  const double m = warp_reduce<kWarps>(own.m, larger_finite_t());
  return {warp_reduce<kWarps>(scaled_to(own, m, keys), plus_t()), m};
}

// Adds the published sums of the parts of a row, by one block, and publishes the total.
__device__ __forceinline__ void join_parts(const board_t& board, unsigned row,
                                           unsigned parts, keys_t keys) {
  const unsigned long long* const published = board.of_part(row * parts);
  partial_t own = {0, -infinity<double>()};
  for (unsigned i = lane(); i < parts; i += kLanes) {
    const partial_t next = board_t::read(published + 2 * i);
    const double m = larger_finite_t()(own.m, next.m);
    own = {scaled_to(own, m, keys) + scaled_to(next, m, keys), m};
  }
  const double m = group_reduce<kLanes>(own.m, larger_finite_t());
  const double l = group_reduce<kLanes>(scaled_to(own, m, keys), plus_t());
  if (threadIdx.x == 0) board_t::publish(board.of_row(row), {l, m});
}

// --- results -------------------------------------------------------------------------

// The last step for a row.
struct last_step_t {
  finish_t usual;
  finish_in_powers_t in_powers;
  bool takes_powers;

  last_step_t() = default;
  __device__ __forceinline__ explicit last_step_t(const partial_t& sum)
      : takes_powers(false) {
    const acc_t m = acc_t(sum.m);
    if constexpr (finish_in_powers_t::kTakes) {
      takes_powers = finish_in_powers_t::takes(sum.l, m);
      if (takes_powers) {
        in_powers = finish_in_powers_t(sum.l, m);
        return;
      }
    }
    usual = finish_t(shift_by(m), sum.l);
  }
};

template <typename Finish>
__device__ __forceinline__ void write(const on_chip_t<x_t>& in_registers,
                                      const piece_t& piece, const Finish& finish) {
  const unsigned long long policy = ptx::policy_evict_first();
  const bool in_vectors = is_aligned<out_t, kVector>(piece.out);
#pragma unroll
  for (int k = 0; k < kInRegisters; ++k) {
    acc_t result[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      result[e] = finish(piece.score(in_registers.at(k).element[e]));
    }
    const auto written = to_vector<out_t, kVector>::of(result);
    if (!piece.has(k)) continue;
    store_vector(piece.out + piece.position(k), written, in_vectors, policy);
  }
  const acc_t of_edge = finish(piece.score(in_registers.edge));
  if (piece.has_edge()) piece.out[piece.edge] = to<out_t>(of_edge);
}

// The same for scores out of range of the quick way, one by one, with a second read.
__device__ __forceinline__ void write_carefully(const piece_t& piece,
                                                const finish_t& finish) {
  const auto write_one = [&](int i) {
    piece.out[i] = to<out_t>(finish(piece.score(piece.x[i])));
  };
#pragma unroll 1
  for (int i = 0; i < kInRegisters * kVector; ++i) {
    const int k = i / kVector;
    if (piece.has(k)) write_one(piece.position(k) + i % kVector);
  }
  if (piece.has_edge()) write_one(piece.edge);
}

template <exps kHow>
__device__ __forceinline__ void write(const on_chip_t<x_t>& in_registers,
                                      const piece_t& piece, const last_step_t& step) {
  if constexpr (finish_in_powers_t::kTakes) {
    if (step.takes_powers) {
      write(in_registers, piece, step.in_powers);
    } else {
      write_carefully(piece, step.usual);
    }
  } else if constexpr (kHasRoots && !kLog) {
    const row_exp_t<kHow> exp_of_row(step.usual.m);
    const auto finish = [&](score_t s) { return exp_of_row(s) * step.usual.inverse; };
    write(in_registers, piece, finish);
  } else {
    write(in_registers, piece, step.usual);
  }
}

// --- the blocks ----------------------------------------------------------------------

// Shared by the threads of a block. Two slots: one is written while the other may still
// be read.
struct shared_t {
  unsigned next[2];
  last_step_t step[2];
  partial_t sums[2][kWarps];
  __device__ shared_t() {}
};

struct block_t {
  const x_t* const x;
  out_t* const out;
  const layout_t& layout;
  const tile_queue_t& queue;
  const board_t& board;
  shared_t& shared;

  __device__ __forceinline__ piece_t piece(unsigned part) const {
    return piece_t(x, out, layout, queue, part);
  }
  __device__ __forceinline__ unsigned take_first() const {
    if (threadIdx.x == 0) shared.next[1] = board.take_next();
    __syncthreads();
    return shared.next[1];
  }
  // Sums a part and publishes it; takes the next position meanwhile.
  __device__ __forceinline__ void sum(on_chip_t<x_t>& in_registers,
                                      const piece_t& piece, unsigned part,
                                      int turn) const {
    unsigned ahead;
    const acc_t m = largest(in_registers, piece);
    keep_narrow(in_registers.read);
    if (threadIdx.x == 0) ahead = board.take_next();
    const partial_t found = sum_up<kHow>(in_registers, piece, m);
    if (threadIdx.x % kWarpSize == 0) {
      shared.sums[turn][threadIdx.x / kWarpSize] = found;
    }
    if (threadIdx.x == 0) shared.next[turn] = ahead;
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
      const partial_t of_part = join_warps(shared.sums[turn], keys_t(layout));
      if (threadIdx.x == 0) board_t::publish(board.of_part(part), of_part);
    }
    if (piece.is_last) join_parts(board, piece.row, queue.parts, keys_t(layout));
  }
  // Waits for the last step of a row.
  __device__ __forceinline__ void hear(const piece_t& piece, int turn) const {
    if (threadIdx.x == 0) {
      shared.step[turn] = last_step_t(board_t::read(board.of_row(piece.row)));
    }
    __syncthreads();
  }
};

// Walks along the queue.
__device__ __forceinline__ void walk(const block_t& block) {
  const tile_queue_t& queue = block.queue;
  unsigned number = block.take_first();
  for (int turn = 0; number < 2 * queue.all; turn ^= 1) {
    const tile_queue_t::place_t place = queue.at(number);
    const piece_t piece = block.piece(place.part);
    on_chip_t<x_t> in_registers;
    in_registers.load(
        piece, place.is_written ? ptx::policy_evict_first() : ptx::policy_evict_last());
    if (place.is_written) {
      unsigned ahead;
      block.hear(piece, turn);
      if (threadIdx.x == 0) ahead = block.board.take_next();
      const last_step_t step = block.shared.step[turn];
      write<kHow>(in_registers, piece, step);
      if (threadIdx.x == 0) block.shared.next[turn] = ahead;
      __syncthreads();
    } else {
      block.sum(in_registers, piece, place.part, turn);
    }
    number = block.shared.next[turn];
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, MIN_BLOCKS)
    softmax_trail(const x_t* x,
                  const bool*,  // no mask
                  out_t* out, unsigned long long* words,
                  const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
  const tile_queue_t queue = queue_of(layout);
  const board_t board{words, unsigned(layout.num_rows)};
  walk(block_t{x, out, layout, queue, board, shared});
}

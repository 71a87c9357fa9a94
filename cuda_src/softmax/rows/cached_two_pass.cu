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
#include "softmax/detail/long_row.cuh"

static_assert(!kHasWhere && kLanes >= 2 * kVector, "a thread has an edge at most");

// --- the queue -----------------------------------------------------------------------

__device__ __forceinline__ tile_queue_t queue_of(const layout_t& layout) {
  return {layout.num_rows, layout.row_length, kVector};
}

struct board_t : queue_board_t<2> {
  __device__ __forceinline__ unsigned long long* of_part(unsigned part) const {
    return of_row(num_rows + part);
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
struct on_chip_t {
  static constexpr int kCount = kInRegisters;
  static constexpr bool kHasEdge = true, kKeepsExps = false;
  const piece_t& piece;
  const layout_t& layout;
  out_t* const out;
  vector_t<x_t, kVector> read[kInRegisters];
  x_t edge;

  __device__ __forceinline__ on_chip_t(const piece_t& piece, unsigned long long policy)
      : piece(piece), layout(piece.layout), out(piece.out) {
    if (piece.is_whole()) {
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) load(k, policy);
    } else {
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) {
        if (has(k)) {
          load(k, policy);
        } else {
#pragma unroll
          for (int e = 0; e < kVector; ++e) read[k].element[e] = padding<x_t>();
        }
      }
    }
    edge = piece.has_edge() ? piece.x[piece.edge] : padding<x_t>();
  }
  __device__ __forceinline__ const vector_t<x_t, kVector>& at(int k) const {
    return read[k];
  }
  __device__ __forceinline__ bool has(int k) const { return piece.has(k); }
  __device__ __forceinline__ int position(int k) const { return piece.position(k); }
  __device__ __forceinline__ bool has_edge() const { return piece.has_edge(); }
  __device__ __forceinline__ int edge_position() const { return piece.edge; }
  // With a second read of x.
  template <typename Visit>
  __device__ __forceinline__ void each_again(Visit visit) const {
    const auto one = [&](int i) { visit(i, piece.score(piece.x[i])); };
#pragma unroll 1
    for (int i = 0; i < kInRegisters * kVector; ++i) {
      const int k = i / kVector;
      if (piece.has(k)) one(piece.position(k) + i % kVector);
    }
    if (piece.has_edge()) one(piece.edge);
  }

 private:
  __device__ __forceinline__ void load(int k, unsigned long long policy) {
    read[k].word = load_word<kVector>(piece.x + piece.position(k), policy);
  }
};

// --- sums ----------------------------------------------------------------------------

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
    const partial_t next = wait_for(published + 2 * i);
    const double m = larger_finite_t()(own.m, next.m);
    own = {scaled_to(own, m, keys) + scaled_to(next, m, keys), m};
  }
  const double m = group_reduce<kLanes>(own.m, larger_finite_t());
  const double l = group_reduce<kLanes>(scaled_to(own, m, keys), plus_t());
  if (threadIdx.x == 0) publish(board.of_row(row), {l, m});
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
  __device__ __forceinline__ void sum(on_chip_t& in_registers, unsigned part,
                                      int turn) const {
    const piece_t& piece = in_registers.piece;
    unsigned ahead;
    const acc_t m = largest(in_registers);
    keep_narrow(in_registers.read);
    if (threadIdx.x == 0) ahead = board.take_next();
    const partial_t found = sum_up(in_registers, m);
    if (threadIdx.x % kWarpSize == 0) {
      shared.sums[turn][threadIdx.x / kWarpSize] = found;
    }
    if (threadIdx.x == 0) shared.next[turn] = ahead;
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
      const partial_t of_part = join_warps(shared.sums[turn], keys_t(layout));
      if (threadIdx.x == 0) publish(board.of_part(part), of_part);
    }
    if (piece.is_last) join_parts(board, piece.row, queue.parts, keys_t(layout));
  }
  // Waits for the last step of a row.
  __device__ __forceinline__ void hear(const piece_t& piece, int turn) const {
    if (threadIdx.x == 0) {
      shared.step[turn] = last_step_t(wait_for(board.of_row(piece.row)));
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
    on_chip_t in_registers(
        piece, place.is_written ? ptx::policy_evict_first() : ptx::policy_evict_last());
    if (place.is_written) {
      unsigned ahead;
      block.hear(piece, turn);
      if (threadIdx.x == 0) ahead = block.board.take_next();
      const last_step_t step = block.shared.step[turn];
      write(in_registers, step);
      if (threadIdx.x == 0) block.shared.next[turn] = ahead;
      __syncthreads();
    } else {
      block.sum(in_registers, place.part, turn);
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

// SPDX-License-Identifier: MIT
// softmax_vjp_trail: gradients of long rows in one launch; rows are written so soon
// after they are summed that the second read hits L2.
//
// Algorithm  softmax_vjp_trail_clear resets what blocks publish. softmax_vjp_trail
//            walks over a queue of row parts (softmax/detail/tile_queue.cuh), as
//            softmax_trail. The block that sums the last part of a row waits for the
//            other sums, adds them and publishes c of the row; blocks that write wait
//            for that. log_softmax sums only dy, and reads only dy twice.
// Grid       1-D; as many blocks of kLanes threads as fit, or fewer
// Tiles      a part of a row: kInRegisters vectors of y and of dy per thread, in
// registers Memory     dy twice, for softmax y as well, the second time from L2; the
// rest once;
//            16 bytes per access where dy and dx are aligned like y; blocks exchange 8
//            bytes per part
// Numbers    as softmax_vjp; for log_softmax of doubles, exponentials by a table
// Limits     reduced axis contiguous in y, dy and dx; rows that L2 can hold; sm_80 or
//            newer
//
// Parameters MIN_BLOCKS   blocks per multiprocessor that registers must suffice for
#include "ptx/registers.cuh"
#include "softmax/detail/tile_queue.cuh"
#include "softmax/detail/backward.cuh"

static_assert(kLanes >= 2 * kVector, "a thread has an edge at most");

__device__ __forceinline__ tile_queue_t queue_of(const layout_t& layout) {
  return {layout.num_rows, layout.row_length, kVector};
}

// Blocks publish sums of one number.
struct board_t : queue_board_t<1> {
  __device__ __forceinline__ unsigned long long* of_part(unsigned part) const {
    return of_row(num_rows) + part;
  }
  // Waits until it is published.
  static __device__ __forceinline__ double read(const unsigned long long* at) {
    unsigned long long bits;
    while ((bits = ptx::load_relaxed(at)) == published_t::kUnpublished) __nanosleep(64);
    return __longlong_as_double(bits);
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_vjp_trail_clear(const y_t* y, const dy_t* dy, out_t* dx,
                            unsigned long long* words,
                            const __grid_constant__ layout_t layout) {
  board_t{words, 0}.clear(1 + layout.num_rows + (long long)queue_of(layout).all);
}

// A part of a row.
struct piece_t : row_part_t<kVector> {
  // A row that fits into L2 has fewer than 2^31 elements.
  const y_t* y;  // from its first whole vector on
  const dy_t* dy;
  out_t* dx;

  __device__ __forceinline__ piece_t(const y_t* y, const dy_t* dy, out_t* dx,
                                     const layout_t& layout, const tile_queue_t& queue,
                                     unsigned part)
      : row_part_t(queue, part) {
    const auto at = locate(layout.outer, row);
    this->y = y + at.of[kY];
    const auto aligned = aligned_span_t::of<kVector>(
        num_before_aligned<kVector>(this->y), layout.row_length);
    this->y += aligned.head;
    this->dy = dy + at.of[kDy] + aligned.head;
    this->dx = dx + at.of[kOut] + aligned.head;
    find(part - row * queue.parts, aligned);
  }
};

// A thread's elements of a part of y or dy, in registers; 0 beyond the row.
template <typename T> struct on_chip_t {
  using vector = vector_t<T, kVector>;
  vector read[kInRegisters];
  T edge;

  __device__ __forceinline__ on_chip_t(const T* p, const piece_t& piece,
                                       unsigned long long policy) {
    if (is_aligned<T, kVector>(p)) {
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) {
        using word_t = typename vector::word_t;
        const T* const from = p + piece.position(k);
        read[k].word = piece.has(k) ? ptx::load_global(
                                          reinterpret_cast<const word_t*>(from), policy)
                                    : word_t();
      }
    } else {
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) {
        vector gathered = {typename vector::word_t()};
        if (piece.has(k)) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            gathered.element[e] = p[piece.position(k) + e];
          }
        }
        read[k] = gathered;
        ptx::compiler_fence();  // limits loads in flight, and registers
      }
    }
    edge = piece.has_edge() ? p[piece.edge] : T();
    keep_narrow(read);
  }
};

// The sum of a part, by one warp.
__device__ __forceinline__ double sum_of(const piece_t& piece) {
  const unsigned long long policy = ptx::policy_evict_last();
  const on_chip_t<dy_t> g(piece.dy, piece, policy);
  sum_t sum;
  if constexpr (kLog) {
#pragma unroll
    for (int k = 0; k < kInRegisters; ++k) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum += to<double>(g.read[k].element[e]);
    }
    sum += to<double>(g.edge);
  } else {
    const on_chip_t<y_t> p(piece.y, piece, policy);
#pragma unroll
    for (int k = 0; k < kInRegisters; ++k) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        sum +=
            product(to<acc_t>(p.read[k].element[e]), to<acc_t>(g.read[k].element[e]));
      }
    }
    sum += product(to<acc_t>(p.edge), to<acc_t>(g.edge));
  }
  return warp_reduce(total(sum), plus_t());
}

// Adds the published sums of the parts of a row, by one block, and publishes the total.
__device__ __forceinline__ void join_parts(const board_t& board, unsigned row,
                                           unsigned parts) {
  sum_t sum;
  for (unsigned i = lane(); i < parts; i += kLanes) {
    sum += board_t::read(board.of_part(row * parts + i));
  }
  const double c = row_sum(sum);
  if (threadIdx.x == 0) published_t::publish(board.of_row(row), c);
}

// Shared by the threads of a block. Two slots: one is written while the other may still
// be read.
struct shared_t {
  unsigned next[2];
  double c[2];
  double sums[2][kWarps];
};

extern "C" __global__ void __launch_bounds__(kNumThreads, MIN_BLOCKS)
    softmax_vjp_trail(const y_t* y, const dy_t* dy, out_t* dx,
                      unsigned long long* words,
                      const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
  const tile_queue_t queue = queue_of(layout);
  const board_t board{words, unsigned(layout.num_rows)};
  const roots_t<acc_t> roots;
  if (threadIdx.x == 0) shared.next[1] = board.take_next();
  __syncthreads();
  unsigned number = shared.next[1], ahead;
  for (int turn = 0; number < 2 * queue.all; turn ^= 1) {
    const tile_queue_t::place_t place = queue.at(number);
    const piece_t piece(y, dy, dx, layout, queue, place.part);
    if (place.is_written) {
      const unsigned long long policy = ptx::policy_evict_first();
      const on_chip_t<y_t> p(piece.y, piece, policy);
      const on_chip_t<dy_t> g(piece.dy, piece, policy);
      if (threadIdx.x == 0) {
        shared.c[turn] = board_t::read(board.of_row(piece.row));
      }
      __syncthreads();
      if (threadIdx.x == 0) ahead = board.take_next();
      const gradient_t gradient(shared.c[turn], layout);
      const bool in_vectors = is_aligned<out_t, kVector>(piece.dx);
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) {
        acc_t result[kVector];
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          result[e] = gradient(to<acc_t>(p.read[k].element[e]),
                               to<acc_t>(g.read[k].element[e]), roots);
        }
        const auto written = to_vector<out_t, kVector>::of(result);
        if (!piece.has(k)) continue;
        store_vector(piece.dx + piece.position(k), written, in_vectors, policy);
      }
      const acc_t of_edge = gradient(to<acc_t>(p.edge), to<acc_t>(g.edge), roots);
      if (piece.has_edge()) piece.dx[piece.edge] = to<out_t>(of_edge);
      if (threadIdx.x == 0) shared.next[turn] = ahead;
      __syncthreads();
    } else {
      const double found = sum_of(piece);
      if (threadIdx.x == 0) ahead = board.take_next();
      if (threadIdx.x % kWarpSize == 0) {
        shared.sums[turn][threadIdx.x / kWarpSize] = found;
      }
      if (threadIdx.x == 0) shared.next[turn] = ahead;
      __syncthreads();
      if (threadIdx.x < kWarpSize) {
        const double of_part =
            warp_reduce<kWarps>(shared.sums[turn][threadIdx.x % kWarps], plus_t());
        if (threadIdx.x == 0) published_t::publish(board.of_part(place.part), of_part);
      }
      if (piece.is_last) join_parts(board, piece.row, queue.parts);
    }
    number = shared.next[turn];
  }
}

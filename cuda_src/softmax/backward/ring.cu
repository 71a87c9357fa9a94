// SPDX-License-Identifier: MIT
// softmax_vjp_stream: gradients of rows that fit only into many multiprocessors
// together.
//
// Algorithm  softmax_vjp_stream_clear resets what blocks publish. softmax_vjp_stream
//            does both launches of softmax_vjp_split in one
//            (softmax/detail/row_ring.cuh).
// Grid       (blocks per group, groups), all resident; a group takes a row at a time
// Tiles      a step of a row: a vector of y and one of dy per thread of the group, the
//            wider of 16 bytes; a ring of kRing steps of both in shared memory
// Memory     y, dy and dx once; 16 bytes per access where dy and dx are aligned like y;
//            blocks exchange a double per row and block
// Numbers    as softmax_vjp
// Limits     rows of at most (kLag + 1) * LANES vectors per block of the group; reduced
//            axis contiguous in y, dy and dx; sm_80 or newer
#include "softmax/detail/row_ring.cuh"
#include "softmax/detail/backward.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_vjp_stream_clear(const y_t* y, const dy_t* dy, out_t* dx,
                             unsigned long long* published,
                             const __grid_constant__ layout_t layout) {
  board_t{published}.clear(layout.num_rows);
}

// A row of y, dy and dx, traversed vector by vector.
struct strip_t {
  const y_t* y;
  const dy_t* dy;
  out_t* dx;
  aligned_span_t aligned;
  bool dy_in_vectors;

  __device__ __forceinline__ void enter(const y_t* y, const dy_t* dy, out_t* dx,
                                        const layout_t& layout, long long row) {
    if (row >= layout.num_rows) return;
    const auto at = locate(layout.outer, row);
    this->y = y + at.of[kY];
    this->dy = dy + at.of[kDy];
    this->dx = dx + at.of[kOut];
    aligned = aligned_span_t::of<kVector>(num_before_aligned<kVector>(this->y),
                                          layout.row_length);
    dy_in_vectors = num_before_aligned<kVector>(this->dy + aligned.head) == 0;
  }
  __device__ __forceinline__ bool has(long long vector) const {
    return vector < aligned.num_vectors;
  }
  __device__ __forceinline__ long long position(long long vector) const {
    return aligned.head + vector * kVector;
  }
  // Calls f(i) for this thread's elements outside whole vectors.
  template <typename F> __device__ __forceinline__ void for_each_edge(F f) const {
    if (blockIdx.x > 0) return;
    for (int i = lane(); i < aligned.head + aligned.tail; i += kLanes) {
      f(aligned.edge<kVector>(i));
    }
  }
};

extern __shared__ uint4 memory[];

struct stream_t {
  using y_ring_t = ring_t<y_t, kVector>;

  const y_t* const y;
  const dy_t* const dy;
  out_t* const dx;
  const layout_t& layout;
  const board_t board;
  const y_ring_t y_ring;
  const ring_t<dy_t, kVector> dy_ring;
  const int steps;

  walk_t loading, summing, writing;
  strip_t loaded, summed, written;
  sum_t sum;
  gradient_t gradient;

  __device__ __forceinline__ stream_t(const y_t* y, const dy_t* dy, out_t* dx,
                                      const layout_t& layout,
                                      unsigned long long* published)
      : y(y),
        dy(dy),
        dx(dx),
        layout(layout),
        board{published},
        y_ring(memory),
        dy_ring(reinterpret_cast<unsigned char*>(memory) + y_ring_t::kBytes),
        steps(num_steps<kVector>(layout.row_length)),
        gradient(0, layout) {
    loaded.enter(y, dy, dx, layout, loading.row);
    summed = written = loaded;
  }

  // Loads this thread's next vectors, if there are any.
  __device__ __forceinline__ void load() {
    if (loading.row < layout.num_rows) {
      if (loaded.has(loading.vector)) {
        const long long i = loaded.position(loading.vector);
        y_ring.load(loading.slot, loaded.y + i);
        if (loaded.dy_in_vectors) {
          dy_ring.load(loading.slot, loaded.dy + i);
        } else {
          dy_ring.gather(loading.slot, loaded.dy + i);
        }
      }
      if (loading.next(steps)) loaded.enter(y, dy, dx, layout, loading.row);
    }
    ptx::commit_copies();  // one group per step, even if empty
  }

  __device__ __forceinline__ static double term(y_t p, dy_t g) {
    return kLog ? to<double>(g) : product(to<acc_t>(p), to<acc_t>(g));
  }

  __device__ __forceinline__ void sum_step() {
    if (summed.has(summing.vector)) {
      const auto p = y_ring.at(summing.slot);
      const auto g = dy_ring.at(summing.slot);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum += term(p.element[e], g.element[e]);
    }
    if (summing.step == steps - 1) {
      summed.for_each_edge(
          [&](long long i) { sum += term(summed.y[i], summed.dy[i]); });
      const double found = row_sum(sum);
      if (threadIdx.x == 0) board.publish(summing.row, found, 0);
      sum = sum_t();
    }
    if (summing.next(steps)) summed.enter(y, dy, dx, layout, summing.row);
  }

  // Adds what the blocks of the group publish for the row to be written.
  __device__ __forceinline__ void hear() {
    sum_t sum;
    for (int block = lane(); block < gridDim.x; block += kLanes) {
      sum += board.first_of(writing.row, block);
    }
    gradient = gradient_t(row_sum(sum), layout);
  }

  __device__ __forceinline__ void write_step() {
    if (writing.step == 0) hear();
    if (written.has(writing.vector)) {
      const auto p = y_ring.at(writing.slot);
      const auto g = dy_ring.at(writing.slot);
      acc_t result[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        result[e] = gradient(to<acc_t>(p.element[e]), to<acc_t>(g.element[e]));
      }
      const auto found = to_vector<out_t, kVector>::of(result);
      out_t* const home = written.dx + written.position(writing.vector);
      if (is_aligned<out_t, kVector>(home)) {
        store_vector<kVector>(home, found);
      } else {
#pragma unroll
        for (int e = 0; e < kVector; ++e) home[e] = found.element[e];
      }
    }
    if (writing.step == steps - 1) {
      written.for_each_edge([&](long long i) {
        const acc_t p = to<acc_t>(written.y[i]), g = to<acc_t>(written.dy[i]);
        written.dx[i] = to<out_t>(gradient(p, g));
      });
    }
    if (writing.next(steps)) written.enter(y, dy, dx, layout, writing.row);
  }

  __device__ __forceinline__ void run() {
    for (int i = 0; i <= kAhead; ++i) load();
    for (int i = 0; writing.row < layout.num_rows; ++i) {
      ptx::wait_copy_groups<kAhead>();
      if (summing.row < layout.num_rows) sum_step();
      if (i >= kLag) {
        i = kLag;
        write_step();
      }
      load();
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    softmax_vjp_stream(const y_t* y, const dy_t* dy, out_t* dx,
                       unsigned long long* published,  // (num_rows, gridDim.x, 2)
                       const __grid_constant__ layout_t layout) {
  stream_t(y, dy, dx, layout, published).run();
}

// SPDX-License-Identifier: MIT
// softmax_vjp_split: gradients of long rows in two launches.
//
// Algorithm  As softmax_vjp. softmax_vjp_split_sum: each block sums its part of a row;
//            softmax_vjp_split_write: each block adds the sums of its row and writes
//            its part.
// Grid       1-D, num_rows * kParts blocks of kLanes threads
// Memory     y and dy twice, the second time from L2 where they fit; dx once; 16 bytes
//            per access, unaligned ends element by element
// Numbers    as softmax_vjp
// Limits     reduced axis contiguous in y, dy and dx
#include "softmax/detail/row_splits.cuh"
#include "softmax/detail/backward.cuh"

constexpr int kTogether = 2;  // vectors of each input loaded together

// A part of a row of y, dy and dx.
struct work_t {
  const y_t* y;
  const dy_t* dy;
  out_t* dx;
  aligned_span_t aligned;
  bool dy_in_vectors, dx_in_vectors;

  __device__ __forceinline__ work_t(const y_t* y, const dy_t* dy, out_t* dx,
                                    const layout_t& layout, const part_t& part) {
    const auto at = locate(layout.outer, part.row);
    this->y = y + at.of[kY] + part.begin;
    this->dy = dy + at.of[kDy] + part.begin;
    this->dx = dx + at.of[kOut] + part.begin;
    aligned = aligned_span_t::of<kVector>(num_before_aligned<kVector>(this->y),
                                          part.length());
    dy_in_vectors = num_before_aligned<kVector>(this->dy + aligned.head) == 0;
    dx_in_vectors = num_before_aligned<kVector>(this->dx + aligned.head) == 0;
  }

  __device__ __forceinline__ vector_t<dy_t, kVector> load_dy(long long i) const {
    if (dy_in_vectors) return load_vector<kVector>(dy + i);
    vector_t<dy_t, kVector> read;
#pragma unroll
    for (int e = 0; e < kVector; ++e) read.element[e] = dy[i + e];
    return read;
  }

  // Calls visit(first element, y, dy) for this thread's vectors, then
  // visit_edge(element) for its elements of head and tail.
  template <typename Visit, typename VisitEdge>
  __device__ __forceinline__ void for_each(Visit visit, VisitEdge visit_edge) const {
    for (long long first = lane(); first < aligned.num_vectors;
         first += kTogether * kLanes) {
      vector_t<y_t, kVector> p[kTogether];
      vector_t<dy_t, kVector> g[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const long long v = first + k * kLanes;
        if (v < aligned.num_vectors) {
          p[k] = load_vector<kVector>(y + aligned.head + v * kVector);
          g[k] = load_dy(aligned.head + v * kVector);
        }
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const long long v = first + k * kLanes;
        if (v < aligned.num_vectors) visit(aligned.head + v * kVector, p[k], g[k]);
      }
    }
    for (int i = lane(); i < aligned.head + aligned.tail; i += kLanes) {
      visit_edge(aligned.edge<kVector>(i));
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 2)
    softmax_vjp_split_sum(const y_t* y, const dy_t* dy, out_t* dx,
                          double* partial,  // (num_rows, kParts)
                          const __grid_constant__ layout_t layout) {
  const part_t part(blockIdx.x, layout.row_length);
  const work_t work(y, dy, dx, layout, part);
  sum_t sum;
  const auto add = [&](y_t p, dy_t g) {
    sum += kLog ? to<double>(g) : to<double>(p) * to<double>(g);
  };
  work.for_each(
      [&](long long, const vector_t<y_t, kVector>& p,
          const vector_t<dy_t, kVector>& g) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) add(p.element[e], g.element[e]);
      },
      [&](long long i) { add(work.y[i], work.dy[i]); });
  const double total = row_sum(sum);
  if (lane() == 0) partial[blockIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 2)
    softmax_vjp_split_write(const y_t* y, const dy_t* dy, out_t* dx,
                            const double* partial,
                            const __grid_constant__ layout_t layout) {
  // From the last part to the first: what was read last is still in L2.
  const part_t part(gridDim.x - 1 - blockIdx.x, layout.row_length);
  const work_t work(y, dy, dx, layout, part);
  sum_t sum;
  for (int i = lane(); i < kParts; i += kLanes) sum += partial[part.row * kParts + i];
  const gradient_t gradient(row_sum(sum), layout);
  const auto result = [&](y_t p, dy_t g) {
    return to<out_t>(gradient(to<acc_t>(p), to<acc_t>(g)));
  };
  work.for_each(
      [&](long long i, const vector_t<y_t, kVector>& p,
          const vector_t<dy_t, kVector>& g) {
        store_results<kVector>(work.dx + i, work.dx_in_vectors, [&](int e) {
          return result(p.element[e], g.element[e]);
        });
      },
      [&](long long i) { work.dx[i] = result(work.y[i], work.dy[i]); });
}

// SPDX-License-Identifier: MIT
// softmax_tiled: a row is read once, held on chip, and written once.
//
// Algorithm  As softmax_safe, on a row held on chip:
//                m = max_i s_i,  e_i = exp(s_i - m),  l = sum_i e_i,  out_i = e_i / l
//            (log_softmax: out_i = (s_i - m) - log l), s = scale * x.
// Grid       1-D; a block of kNumThreads takes kRowsPerBlock rows at a time, or
//            kCluster blocks take one
// Tiles      a row; each of its kCluster * kLanes threads holds IN_REGISTERS elements
// in
//            registers and IN_SMEM in shared memory (softmax/detail/row_tile.cuh)
// Memory     x and out once; 16 bytes per access where a row is contiguous, for any
//            length and alignment; blocks exchange only maxima and sums
// Numbers    exponentials in acc_t of exact differences, sums in double (of doubles: to
//            twice the digits), rounded once; for 16-bit results plain differences and
//            the fast exponential
// Limits     rows of at most kCluster * kLanes * (IN_REGISTERS + IN_SMEM) elements; any
// strides
#include "softmax/detail/row_tile.cuh"
#include "softmax/detail/exp_policy.cuh"
#include "softmax/detail/row.cuh"
#include "softmax/detail/row_exp.cuh"

constexpr int kVector = kRowVector;

// Exponentials replace the elements where they fit; otherwise they are computed twice,
// and the elements stay as narrow as they were read.
constexpr bool kKeepsExp = !kLog && kSame<x_t, acc_t>;

// The score of slots beyond the row is -inf, which adds nothing. It can be set at the
// load, unless a mask must know of it, or x has no -inf. A scale of 0, which would turn
// it into NaN, is handled elsewhere by the host.
constexpr bool kPads = kHasInfinity<x_t> && !kHasWhere;

using row_map_t = thread_map_t<kVector>;

// Which of a thread's elements are selected by the mask.
struct marks_t {
  static constexpr int kCount = row_map_t::kSlots * kVector + row_map_t::kEdges;
  unsigned bits[(kCount + 31) / 32] = {};

  __device__ __forceinline__ void set(int j) { bits[j / 32] |= 1u << j % 32; }
  __device__ __forceinline__ bool get(int j) const {
    return bits[j / 32] >> j % 32 & 1;
  }
};
// The bits stay in registers if all indices are constants.
constexpr int kUnrollSmem = kHasWhere ? 64 : 2;
// With 2, variants limited to 64 registers would spill; those with more have few
// threads.
constexpr int kUnrollTable = kNumThreads * kMinBlocks > 768 ? 1 : 2;
constexpr int kUnrollExp = kExps == exps::kByTable ? kUnrollTable : kUnrollSmem;

// The element whose score is -inf.
__device__ __forceinline__ x_t pad_of(const layout_t& layout) {
  if constexpr (kPads && kScaled) {
    if (layout.key_factor < 0) return to<x_t>(infinity<float>());
  }
  return padding<x_t>();
}

// Aligned to memory lines; 16-byte alignment is slower.
extern __shared__ __align__(128) uint4 parking[];

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(kNumThreads, kMinBlocks)
    softmax_tiled(const x_t* x, const bool* where, out_t* out,
                  const __grid_constant__ layout_t layout) {
  __shared__ shared_parts_t<acc_t> maxima[1];
  __shared__ shared_parts_t<part_t> sums[1];
  combiner_t<acc_t> combine_max(maxima);
  combiner_t<part_t> combine_sum(sums);
  announce_block<kCluster>();
  bool has_started = false;

  const long long first = (long long)(blockIdx.x / kCluster) * kRowsPerBlock;
  const long long step = (long long)(gridDim.x / kCluster) * kRowsPerBlock;
  on_chip_t<x_t, kVector> in_registers(parking);
  for (long long at = first; at < layout.num_rows; at += step) {
    const row_t row(x, where, out, layout, at);
    const row_map_t map(row.out, row.length);
    in_registers.load(map, address_in(row, row.x, kX), pad_of(layout));
    marks_t marks;
    if constexpr (kHasWhere) {
#pragma unroll
      for (int v = 0; v < row_map_t::kSlots; ++v) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          if (map.has(v, k) && row.selected(map.position(v, k))) {
            marks.set(v * kVector + k);
          }
        }
      }
#pragma unroll
      for (int e = 0; e < row_map_t::kEdges; ++e) {
        const int i = map.edge_position(e);
        if (i < map.length && row.selected(i)) {
          marks.set(row_map_t::kSlots * kVector + e);
        }
      }
    }
    const auto score = [&](acc_t element, bool is_in_row, int j) {
      if (kHasWhere) is_in_row = marks.get(j);
      return kPads || is_in_row ? score_t(element, layout) : score_t::absent(layout);
    };
    if (!has_started) await_blocks<kCluster>();
    has_started = true;
    if (IN_SMEM > 0) wait_for_copies();

    acc_t m = -infinity<acc_t>();
    if constexpr (kPads && !kScaled && kMaxInPairs<x_t, kVector>) {
      m = in_registers.largest(map, largest_t());
    } else {
      in_registers.each<false, kUnrollSmem>(
          map, [&](acc_t element, bool is_in_row, int j) {
            m = largest_t()(m, score(element, is_in_row, j).key);
            return element;
          });
    }
    const acc_t largest = combine_max(m, -infinity<acc_t>(), largest_t());
    m = shift_by(largest);
    in_registers.launder();

    const exp_of_row_t exp_of_row(m, exp_unit_t(layout));
    part_t sum = exp_of_row.none();
    in_registers.each<kKeepsExp, kUnrollExp, exp_of_row_t::kTogether>(
        map, [&](acc_t element, bool is_in_row, int j) {
          const acc_t e = exp_of_row(score(element, is_in_row, j));
          exp_of_row.add(sum, e);
          return e;
        });
    sum = exp_of_row.sum_of(sum);
    const double l = total(combine_sum(sum, part_t(), plus_t()), largest);
    in_registers.launder();

    const finish_t finish(m, l);
    const auto result = [&](acc_t element, bool is_in_row, int j) {
      if (kHasWhere && !marks.get(j)) return unselected();
      if (kKeepsExp) return element * finish.inverse;
      const score_t s = score(element, is_in_row, j);
      return kLog ? finish(s) : exp_of_row(s) * finish.inverse;
    };
    in_registers.store<out_t, kUnrollSmem>(map, address_in(row, row.out, kOut), result);
  }
}

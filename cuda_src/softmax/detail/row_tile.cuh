// SPDX-License-Identifier: MIT
// A row held on chip by its threads, and their reductions.
//
// A row is cut into vectors of kVector elements, which are aligned in the result and
// distributed cyclically over the threads. A thread holds kInRegisters of its vectors
// in registers and parks kInSmem more in shared memory, where no other thread touches
// them. The elements before the first whole vector and after the last are the edges of
// the row; the first threads hold one each. If neighbours in the row are not contiguous
// in memory, the elements are distributed one by one and there are no edges.
//
// Parameters CLUSTER     blocks that share a row; more than 1 needs sm_90
//            IN_REGISTERS        elements per thread in registers
//            IN_SMEM      further elements per thread in shared memory
//            CONTIGUOUS  1 if rows are contiguous in every array; rows over several
//                        axes, if they are whole vectors that are aligned in all
//            SHIFTS      1 if there is shared memory for 16-bit rows that are not
//                        aligned like the result
//            MIN_BLOCKS  blocks per multiprocessor that registers must suffice for
#pragma once

#include "common/vector.cuh"
#include "softmax/detail/cluster_exchange.cuh"
#include "softmax/detail/parking.cuh"
#include "softmax/detail/thread_group.cuh"

constexpr int kCluster = CLUSTER;
constexpr int kThreadsOfRow = kCluster * kLanes;
constexpr bool kContiguous = CONTIGUOUS, kOneAxis = REDUCED_AXES == 1;
constexpr int kMinBlocks = MIN_BLOCKS;  // per multiprocessor, by registers
static_assert(kCluster == 1 || (kLanes > kWarpSize && kRowsPerBlock == 1));

// The index of this block among those that share its row, and of this thread among
// theirs.
__device__ __forceinline__ int rank_of_block() {
#if __CUDA_ARCH__ >= 900
  // Saves a register: without it doubles spill, while 16 bits would spill with it.
  if (kCluster > 1 && sizeof(acc_t) == 8) return ptx::cluster_rank_again();
#endif
  return kCluster > 1 ? blockIdx.x % kCluster : 0;
}
__device__ __forceinline__ int lane_of_row() {
  return rank_of_block() * kLanes + lane();
}

// Which elements of its row a thread has, in vectors of kVector.
template <int kVector> struct thread_map_t {
  static constexpr int kInRegisters = IN_REGISTERS / kVector,
                       kInSmem = IN_SMEM / kVector;
  static constexpr int kSlots = kInRegisters + kInSmem;
  static_assert(IN_REGISTERS % kVector == 0 && IN_SMEM % kVector == 0, "whole vectors");
  static constexpr int kStride = kThreadsOfRow * kVector;  // from slot to slot
  // Up to kVector - 1 elements at either end.
  static constexpr int kEdges =
      kContiguous ? (2 * kVector - 2 + kThreadsOfRow - 1) / kThreadsOfRow : 0;

  int length;
  int head = 0;     // elements before the first whole vector
  int vectors = 0;  // whole vectors
  int left;         // of these, or of single elements, from this thread's first on

  template <typename T>
  __device__ __forceinline__ thread_map_t(const T* out, long long length)
      : length(int(length)) {
    if constexpr (kContiguous) {
      const int phase =
          int(reinterpret_cast<unsigned long long>(out) / sizeof(T) % kVector);
      head = min((kVector - phase) % kVector, this->length);
      vectors = (this->length - head) / kVector;
    }
    left = (kContiguous ? vectors : this->length) - lane_of_row();
  }

  // Position of element k of slot v.
  __device__ __forceinline__ int position(int v, int k) const {
    return kContiguous ? head + lane_of_row() * kVector + v * kStride + k
                       : (v * kVector + k) * kThreadsOfRow + lane_of_row();
  }
  // Address of slot v, for a contiguous row.
  template <typename Address>
  __device__ __forceinline__ auto slot(Address address, int v) const {
    if constexpr (kOneAxis) return address(position(0, 0)) + v * kStride;
    return address(position(v, 0));
  }
  __device__ __forceinline__ bool has(int v, int k) const {
    return (kContiguous ? v : v * kVector + k) * kThreadsOfRow < left;
  }
  __device__ __forceinline__ bool has_edge(int e) const {
    return kEdges > 0 && edge_position(e) < length;
  }
  // Whether this thread handles edges. For floats only threads that have any do, which
  // saves the others an eighth of their work; otherwise the saving is smaller, and such
  // a branch spills.
  __device__ __forceinline__ bool has_edges() const {
    return kVector == 4 ? has_edge(0) : kEdges > 0 && length != vectors * kVector;
  }
  __device__ __forceinline__ int edge_position(int e) const {
    const int i = e * kThreadsOfRow + lane_of_row();
    return i < head ? i : i + vectors * kVector;
  }
};

template <int kVector, typename Out, typename Address>
__device__ __forceinline__ void store_slot(const thread_map_t<kVector>& d,
                                           Address address, int v,
                                           const vector_t<Out, kVector>& written) {
  if (kContiguous) {
    if (d.has(v, 0)) store_vector(d.slot(address, v), written);
  } else {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      if (d.has(v, k)) *address(d.position(v, k)) = written.element[k];
    }
  }
}

// The address of element i of a row that starts at p.
template <typename Row, typename T>
__device__ __forceinline__ auto address_in(const Row& row, T* p, int array) {
  return [=, &row](int i) {
    return p + (kContiguous && kOneAxis ? i : row.near_offset(array, i));
  };
}

// A barrier for all threads of the block that share a row.
__device__ __forceinline__ void sync_row() {
  if constexpr (kLanes <= kWarpSize) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Whether rows that are not aligned like the result go through shared memory: loading
// 16-bit elements one by one would take too many accesses.
template <typename T, int kVector>
constexpr bool kShifts = kContiguous && sizeof(T) == 2 && kVector == 8 && SHIFTS;

// Bytes of shared memory per block for rows of T.
template <typename T, int kVector>
constexpr int kSharedBytes =
    kShifts<T, kVector> ? IN_REGISTERS / kVector * (kLanes + 1) * kRowsPerBlock * 16
                        : IN_SMEM * int(sizeof(T)) * kNumThreads;

// The part of a row that one thread holds.
template <typename T, int kVector> struct on_chip_t {
  using map_t = thread_map_t<kVector>;
  using vector = vector_t<T, kVector>;
  static constexpr int kRegisterSlots =
      map_t::kInRegisters > 0 ? map_t::kInRegisters : 1;
  static constexpr int kEdgeSlots = map_t::kEdges > 0 ? map_t::kEdges : 1;

  vector slot[kRegisterSlots];
  T edge[kEdgeSlots];
  vector* memory;
  vector* in_smem;  // slot v at in_smem[(v - kInRegisters) * kNumThreads]

  // `memory` is shared memory of kSharedBytes.
  __device__ __forceinline__ on_chip_t(void* memory)
      : memory(static_cast<vector*>(memory)), in_smem(this->memory + threadIdx.x) {}

  // Starts to load; slots beyond the row become `pad`. address(i) is that of element i.
  template <typename Address>
  __device__ __forceinline__ void load(const map_t& d, Address address, T pad) {
    bool in_vectors = kContiguous && is_aligned<T, kVector>(address(d.head));
    if constexpr (kShifts<T, kVector> && kLanes <= kWarpSize) {
      in_vectors = __all_sync(kFullMask, in_vectors);
    }
    // All loads are issued before the first is waited for.
    if (in_vectors) {
#pragma unroll
      for (int v = map_t::kInRegisters; v < map_t::kSlots; ++v)
        park_vector(d, address, pad, v);
#pragma unroll
      for (int v = 0; v < map_t::kInRegisters; ++v) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) slot[v].element[k] = pad;
        if (d.has(v, 0)) slot[v] = load_vector<kVector>(d.slot(address, v));
      }
    } else if constexpr (kShifts<T, kVector>) {
      load_shifted(d, address, pad);
    } else {
#pragma unroll
      for (int v = 0; v < map_t::kInRegisters; ++v)
        slot[v] = gather(d, address, pad, v);
#pragma unroll 1
      for (int v = map_t::kInRegisters; v < map_t::kSlots; ++v) {
        in_smem[(v - map_t::kInRegisters) * kNumThreads] = gather(d, address, pad, v);
      }
    }
    // Some rows of a warp may have edges.
    if (kLanes < kWarpSize || d.has_edges()) {
#pragma unroll
      for (int e = 0; e < map_t::kEdges; ++e) {
        edge[e] = d.has_edge(e) ? *address(d.edge_position(e)) : pad;
      }
    }
  }

  // Calls f(element, whether it belongs to the row, slot * kVector + k) for all. With
  // kWrites the result of f replaces the element; with kTogether all lanes of a warp
  // call f together.
  template <bool kWrites, int kUnroll = 2, bool kTogether = false, typename F>
  __device__ __forceinline__ void each(const map_t& d, F f) {
    const auto visit = [&](vector& of, int v) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const acc_t y = f(element_as<acc_t>(of, k), d.has(v, k), v * kVector + k);
        if constexpr (kWrites) of.element[k] = y;
      }
    };
#pragma unroll
    for (int v = 0; v < map_t::kInRegisters; ++v) visit(slot[v], v);
#pragma unroll kUnroll
    for (int v = map_t::kInRegisters; v < map_t::kSlots; ++v) {
      vector& home = in_smem[(v - map_t::kInRegisters) * kNumThreads];
      vector copy = home;
      visit(copy, v);
      if (kWrites) home = copy;
    }
    if (kTogether ? __any_sync(kFullMask, d.has_edge(0)) : d.has_edges()) {
#pragma unroll
      for (int e = 0; e < map_t::kEdges; ++e) {
        const acc_t y =
            f(to<acc_t>(edge[e]), d.has_edge(e), map_t::kSlots * kVector + e);
        if constexpr (kWrites) edge[e] = y;
      }
    }
  }

  // The largest element by `larger`, for 16 bits, two at a time (sm_80 or newer); slots
  // beyond the row hold -inf.
  template <typename Larger>
  __device__ __forceinline__ acc_t largest(const map_t& d, Larger larger) const {
    acc_t largest = -infinity<acc_t>();
#if __CUDA_ARCH__ >= 800
    vector m = map_t::kInRegisters > 0 ? slot[0] : in_smem[0];
#pragma unroll
    for (int v = 1; v < map_t::kInRegisters; ++v) m = larger_of(m, slot[v]);
#pragma unroll 2
    for (int v = 0; v < map_t::kInSmem; ++v) m = larger_of(m, in_smem[v * kNumThreads]);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      largest = larger(largest, to<acc_t>(m.element[k]));
    }
    if (d.has_edges()) {
#pragma unroll
      for (int e = 0; e < map_t::kEdges; ++e) {
        largest = larger(largest, to<acc_t>(edge[e]));
      }
    }
#endif
    return largest;
  }

  __device__ __forceinline__ void launder() {
    if constexpr (map_t::kInRegisters > 0) keep_narrow(slot);
  }

  // Stores f(element, whether it belongs to the row, slot * kVector + k) for all,
  // rounded.
  template <typename Out, int kUnroll = 2, typename Address, typename F>
  __device__ __forceinline__ void store(const map_t& d, Address address, F f) {
#pragma unroll
    for (int v = 0; v < map_t::kInRegisters; ++v) {
      write<Out>(d, address, f, v, slot[v]);
    }
#pragma unroll kUnroll
    for (int v = map_t::kInRegisters; v < map_t::kSlots; ++v) {
      write<Out>(d, address, f, v, in_smem[(v - map_t::kInRegisters) * kNumThreads]);
    }
    if (d.has_edges()) {
#pragma unroll
      for (int e = 0; e < map_t::kEdges; ++e) {
        if (d.has_edge(e)) {
          *address(d.edge_position(e)) =
              to<Out>(f(to<acc_t>(edge[e]), true, map_t::kSlots * kVector + e));
        }
      }
    }
  }

 private:
  template <typename Out, typename Address, typename F>
  static __device__ __forceinline__ void write(const map_t& d, Address address, F f,
                                               int v, const vector& from) {
    acc_t result[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      result[k] = f(element_as<acc_t>(from, k), d.has(v, k), v * kVector + k);
    }
    store_slot(d, address, v, to_vector<Out, kVector>::of(result));
  }

  template <typename Address>
  __device__ __forceinline__ void park_vector(const map_t& d, Address address, T pad,
                                              int v) {
    vector& home = in_smem[(v - map_t::kInRegisters) * kNumThreads];
    if (d.has(v, 0)) {
      copy_vector(&home, d.slot(address, v));
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k) home.element[k] = pad;
    }
  }

  // Loads the row into shared memory in vectors aligned at the source, and reads it
  // from there in vectors aligned like the result.
  template <typename Address>
  __device__ __forceinline__ void load_shifted(const map_t& d, Address address, T pad) {
    constexpr int kWindow = kLanes + 1;  // one vector more than there are threads
    vector* const windows =
        memory + threadIdx.x / kLanes * (map_t::kInRegisters * kWindow);  // of this row
    const auto start = reinterpret_cast<unsigned long long>(address(d.position(0, 0)));
    const int shift = int(start / sizeof(T) % kVector);
    sync_row();  // all threads have read the previous row
#pragma unroll
    for (int v = 0; v < map_t::kInRegisters; ++v) {
      const int first = d.position(v, 0) - shift;
      vector* const window = windows + v * kWindow + lane();
      bring(d, address, first, window);
      if (lane() == kLanes - 1) bring(d, address, first + kVector, window + 1);
    }
    wait_for_copies();
    sync_row();
#pragma unroll
    for (int v = 0; v < map_t::kInRegisters; ++v) {
      // Five words, the first of which may start one element early.
      const auto words =
          reinterpret_cast<const unsigned*>(windows + v * kWindow + lane()) + shift / 2;
      unsigned* const to = reinterpret_cast<unsigned*>(&slot[v]);
      unsigned word = words[0];
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        const unsigned next = words[i + 1];
        to[i] = __funnelshift_r(word, next, shift % 2 * 16);
        word = next;
      }
      if (!d.has(v, 0)) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) slot[v].element[k] = pad;
      }
    }
  }

  // Loads the kVector elements from `first` on, as far as the row has them.
  template <typename Address>
  static __device__ __forceinline__ void bring(const map_t& d, Address address,
                                               int first, vector* home) {
    if (first >= 0 && first + kVector <= d.length) {
      copy_vector(home, address(first));
    } else if (first < d.length) {
#pragma unroll 1
      for (int i = first < 0 ? 0 : first; i < first + kVector && i < d.length; ++i) {
        home->element[i - first] = *address(i);
      }
    }
  }

  // Vector v from an address that is not aligned to it.
  template <typename Address>
  static __device__ __forceinline__ vector gather(const map_t& d, Address address,
                                                  T pad, int v) {
    vector read;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      read.element[k] = d.has(v, k) ? *address(d.position(v, k)) : pad;
    }
    return read;
  }
};

// Calls f(a, b) for the elements of two rows with the same distribution.
template <int kVector, typename A, typename B, typename F>
__device__ __forceinline__ void each_pair(const thread_map_t<kVector>& d,
                                          on_chip_t<A, kVector>& a,
                                          on_chip_t<B, kVector>& b, F f) {
  using map_t = thread_map_t<kVector>;
#pragma unroll
  for (int v = 0; v < map_t::kInRegisters; ++v) {
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      f(element_as<acc_t>(a.slot[v], k), element_as<acc_t>(b.slot[v], k));
  }
#pragma unroll 2
  for (int v = 0; v < map_t::kInSmem; ++v) {
    const auto a_copy = a.in_smem[v * kNumThreads];
    const auto b_copy = b.in_smem[v * kNumThreads];
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      f(element_as<acc_t>(a_copy, k), element_as<acc_t>(b_copy, k));
  }
  if (d.has_edges()) {
#pragma unroll
    for (int e = 0; e < map_t::kEdges; ++e)
      f(to<acc_t>(a.edge[e]), to<acc_t>(b.edge[e]));
  }
}

// Stores f(a, b) for the elements of two rows.
template <typename Out, int kVector, typename A, typename B, typename Address,
          typename F>
__device__ __forceinline__ void store_pair(const thread_map_t<kVector>& d,
                                           on_chip_t<A, kVector>& a,
                                           on_chip_t<B, kVector>& b, Address address,
                                           F f) {
  using map_t = thread_map_t<kVector>;
  const auto write = [&](int v, const vector_t<A, kVector>& x,
                         const vector_t<B, kVector>& y) {
    acc_t result[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      result[k] = f(element_as<acc_t>(x, k), element_as<acc_t>(y, k));
    store_slot(d, address, v, to_vector<Out, kVector>::of(result));
  };
#pragma unroll
  for (int v = 0; v < map_t::kInRegisters; ++v) {
    write(v, a.slot[v], b.slot[v]);
  }
#pragma unroll 2
  for (int v = 0; v < map_t::kInSmem; ++v) {
    write(v + map_t::kInRegisters, a.in_smem[v * kNumThreads],
          b.in_smem[v * kNumThreads]);
  }
  if (d.has_edges()) {
#pragma unroll
    for (int e = 0; e < map_t::kEdges; ++e) {
      if (d.has_edge(e)) {
        *address(d.edge_position(e)) =
            to<Out>(f(to<acc_t>(a.edge[e]), to<acc_t>(b.edge[e])));
      }
    }
  }
}

// The blocks of a cluster exchange maxima and sums: each warp stores its part to the
// memory of all blocks.
constexpr int kPartials = kThreadsOfRow > kWarpSize ? kThreadsOfRow / kWarpSize : 1;

// Memory in which the threads of a row combine their values; all get the same result.
// There are kTurns sets; one may be written again once all threads have read it, that
// is, after another exchange: in the next set, or in another object.
template <typename T> struct shared_parts_t {
  T part[kPartials];
  unsigned long long barrier;  // of a cluster
};

#if __CUDA_ARCH__ >= 900
template <typename T>
__device__ __forceinline__ void send(unsigned address, unsigned barrier, T value) {
  ptx::store_async(address, barrier, value);
}
__device__ __forceinline__ void send(unsigned address, unsigned barrier,
                                     wide_sum_t value) {
  ptx::store_async(address, barrier, value.high);
  ptx::store_async(address + sizeof(double), barrier, value.low);
}
#endif

template <typename T, int kTurns = 1> struct combiner_t {
  shared_parts_t<T>* const all;
  int uses = 0;

  __device__ __forceinline__ combiner_t(shared_parts_t<T> (&parts)[kTurns])
      : all(parts) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster > 1) {
      if (threadIdx.x == 0) {
        for (int i = 0; i < kTurns; ++i) {
          ptx::mbarrier_init(ptx::shared_address(&parts[i].barrier), 1);
        }
        ptx::fence_mbarrier_init();
      }
    }
#endif
  }

  template <typename Combine>
  __device__ __forceinline__ T operator()(T value, T neutral, Combine combine) {
    if constexpr (kThreadsOfRow <= kWarpSize) {
      return warp_reduce<kThreadsOfRow>(value, combine);
    } else {
      value = warp_reduce(value, combine);
      shared_parts_t<T>& parts = all[uses % kTurns];
      publish(parts, value);
      const int in_warp = threadIdx.x % kWarpSize;
      value = in_warp < kPartials ? parts.part[in_warp] : neutral;
#pragma unroll
      for (int i = kWarpSize; i < kPartials; i += kWarpSize) {
        if (i + in_warp < kPartials) value = combine(value, parts.part[i + in_warp]);
      }
      return warp_reduce(value, combine);
    }
  }

 private:
  // Gives the value of this warp to all threads of the row, and waits for all others.
  __device__ __forceinline__ void publish(shared_parts_t<T>& parts, T value) {
    const int in_warp = threadIdx.x % kWarpSize;
    T* const mine = parts.part + lane_of_row() / kWarpSize;
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster > 1) {
      const unsigned barrier = ptx::shared_address(&parts.barrier);
      if (threadIdx.x == 0) {
        ptx::mbarrier_arrive_expect_tx(barrier, kPartials * sizeof(T));
      }
      if (in_warp < kCluster) {
        send(ptx::mapa(ptx::shared_address(mine), in_warp), ptx::mapa(barrier, in_warp),
             value);
      }
      while (!ptx::mbarrier_try_wait_parity(barrier, uses / kTurns & 1)) {
      }
      ++uses;
      return;
    }
#endif
    if (in_warp == 0) *mine = value;
    __syncthreads();
    ++uses;
  }
};

// SPDX-License-Identifier: MIT
// Columns, where the reduced axis is not contiguous: which thread holds which elements.
//
// A slab is what remains for one index of the outermost axes: row_length rows of
// `inner` contiguous elements. A tile is kColumns adjacent columns of a slab. A group
// of kSide * kDeep threads takes one tile: kSide threads side by side, each with
// kVector columns of its own, and kDeep threads along the columns, each with
// kInRegisters rows. A group is a part of a warp, a block, or a cluster of kCluster
// blocks, which then divide the rows.
//
// Parameters VECTOR    adjacent columns per thread, read in one access
//            SIDE      threads side by side
//            DEEP      threads per block along a column
//            IN_REGISTERS      rows per thread in registers
//            IN_SMEM    further rows per thread in shared memory; even, as IN_REGISTERS
//            then is CLUSTER   blocks along a column (above 1: sm_90) RESIDENT  blocks
//            per multiprocessor that registers must suffice for SPLITS    1 if the grid
//            has a second axis of blocks along a column
//            TEAMS     1 if the grid is (blocks of a team, teams): the blocks of a team
//            share a tile and meet through memory (column_team.cuh)
#pragma once

#include "common/reduce.cuh"
#include "common/strides.cuh"
#include "common/types.cuh"
#include "common/vector.cuh"
#include "ptx/opaque.cuh"
#include "ptx/registers.cuh"
#include "softmax/detail/cluster_exchange.cuh"
#include "softmax/detail/parking.cuh"
#include "softmax/detail/sum.cuh"

constexpr int kVector = VECTOR, kSide = SIDE, kDeep = DEEP, kInRegisters = IN_REGISTERS;
constexpr int kInSmem = IN_SMEM, kSlots = kInRegisters + kInSmem;
constexpr int kCluster = CLUSTER;
#ifndef SPLITS
#define SPLITS 0
#endif
#ifndef TEAMS
#define TEAMS 0
#endif
constexpr bool kSplits = SPLITS, kTeams = TEAMS;
static_assert(!(kSplits || kTeams) || kCluster == 1);
static_assert(kInSmem == 0 || (kInRegisters % 2 == 0 && kInSmem % 2 == 0));
constexpr int kColumns = kSide * kVector;  // per tile
constexpr int kGroup = kSide * kDeep;

__host__ __device__ constexpr bool is_power_of_two(int n) { return (n & (n - 1)) == 0; }

// Small groups share a warp and need only shuffles.
constexpr bool kInWarp = kGroup <= kWarpSize && is_power_of_two(kGroup);
constexpr int kNumThreads =
    kInWarp ? 128 : (kGroup + kWarpSize - 1) / kWarpSize * kWarpSize;
constexpr int kGroupsPerBlock = kInWarp ? kNumThreads / kGroup : 1;

static_assert(!kInWarp || kCluster == 1, "only whole blocks make a cluster");

// Whether lanes of a warp hold the same columns; the first kSide lanes speak for all.
constexpr bool kShuffles = kSide < kWarpSize && is_power_of_two(kSide);
// Numbers per column that remain for shared memory.
constexpr int kPartials = kShuffles ? kNumThreads / kWarpSize : kDeep;
static_assert(!kShuffles || kGroup % kWarpSize == 0 || kInWarp, "whole warps");

#if CLUSTER > 1
__device__ __forceinline__ int cluster_rank() { return ptx::cluster_rank(); }
__device__ __forceinline__ void cluster_sync() {
  ptx::cluster_arrive();
  ptx::cluster_wait();
}
// Stores a number of this block in every block of the cluster.
template <typename T> __device__ __forceinline__ void share(T* shared, T value) {
#pragma unroll
  for (int rank = 0; rank < kCluster; ++rank) *ptx::in_block(shared, rank) = value;
}
#else
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
template <typename T> __device__ __forceinline__ void share(T* shared, T value) {
  *shared = value;
}
#endif

// How the columns of a tile are distributed over the threads side by side: kVector
// adjacent ones each, or interleaved, which needs no alignment.
enum class thread_map { kVectors, kSingles };

// A thread's elements of one array. Pairs of 16-bit numbers stay in the registers into
// which they were loaded: twice as many fit, and they are unpacked when used.
template <typename T, int kRows = kInRegisters,
          bool kPairs = sizeof(T) == 2 && kVector % 2 == 0>
struct slots_t {
  vector_t<T, kVector> value[kRows];

  __device__ __forceinline__ T get(int k, int j) const { return value[k].element[j]; }
  __device__ __forceinline__ vector_t<T, kVector> get(int k) const { return value[k]; }
  __device__ __forceinline__ void set(int k, int j, T x) { value[k].element[j] = x; }
  __device__ __forceinline__ void set(int k, vector_t<T, kVector> x) { value[k] = x; }
  __device__ __forceinline__ void fill(T x) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) set(k, j, x);
    }
  }
  __device__ __forceinline__ void launder() {}
};

template <typename T, int kRows> struct slots_t<T, kRows, true> {
  static constexpr int kWords = (kVector + 1) / 2;
  using words_t = vector_t<unsigned, kWords>;
  unsigned pair[kRows][kWords];

  __device__ __forceinline__ T get(int k, int j) const {
    const unsigned bits = pair[k][j / 2];
    T x;
    reinterpret_cast<unsigned short&>(x) = j % 2 ? bits >> 16 : bits & 0xffff;
    return x;
  }
  __device__ __forceinline__ vector_t<T, kVector> get(int k) const {
    words_t words;
#pragma unroll
    for (int i = 0; i < kWords; ++i) words.element[i] = pair[k][i];
    return {words.word};
  }
  __device__ __forceinline__ void set(int k, int j, T x) {
    const unsigned bits = reinterpret_cast<const unsigned short&>(x);
    unsigned& to = pair[k][j / 2];
    to = j % 2 ? (to & 0xffff) | bits << 16 : (to & 0xffff0000u) | bits;
  }
  __device__ __forceinline__ void set(int k, vector_t<T, kVector> x) {
    const words_t words = {x.word};
#pragma unroll
    for (int i = 0; i < kWords; ++i) pair[k][i] = words.element[i];
  }
  __device__ __forceinline__ void fill(T x) {
    const unsigned bits = reinterpret_cast<const unsigned short&>(x);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) pair[k][i] = bits | bits << 16;
    }
  }
  // Values computed from the elements occupy more registers than these: makes the
  // compiler recompute them.
  __device__ __forceinline__ void launder() {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) ptx::launder(pair[k][i]);
    }
  }
};

// All rows of a thread: the first kInRegisters in registers, the others in shared
// memory.
template <typename T> struct rows_t {
  slots_t<T> in_registers;
  vector_t<T, kVector>* in_smem;  // row kInRegisters + k at in_smem[k * kNumThreads]

  // Bytes of shared memory per block for parked rows.
  static constexpr int kBytes = kInSmem * kNumThreads * int(sizeof(T)) * kVector;

  __device__ __forceinline__ explicit rows_t(void* memory)
      : in_smem(static_cast<vector_t<T, kVector>*>(memory) + threadIdx.x) {}

  // Calls f(slots, k, row) for each row of this thread, which is at k in slots.
  // Adjacent rows, the first of them even, have adjacent k. With kWrites, f may modify
  // the slots.
  template <bool kWrites, typename F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int k = 0; k < kInRegisters; ++k) f(in_registers, k, k);
#pragma unroll 1
    for (int k = 0; k < kInSmem; k += 2) {
      slots_t<T, 2> pair;
      pair.set(0, in_smem[k * kNumThreads]);
      pair.set(1, in_smem[(k + 1) * kNumThreads]);
      f(pair, 0, kInRegisters + k);
      f(pair, 1, kInRegisters + k + 1);
      if constexpr (kWrites) {
        in_smem[k * kNumThreads] = pair.get(0);
        in_smem[(k + 1) * kNumThreads] = pair.get(1);
      }
    }
  }
};

// Calls f(slots of a, slots of b, k, row) for each row of two arrays.
template <typename A, typename B, typename F>
__device__ __forceinline__ void each_of_two(rows_t<A>& a, rows_t<B>& b, F f) {
#pragma unroll
  for (int k = 0; k < kInRegisters; ++k) f(a.in_registers, b.in_registers, k, k);
#pragma unroll 2
  for (int k = 0; k < kInSmem; ++k) {
    slots_t<A, 1> of_a;
    slots_t<B, 1> of_b;
    of_a.set(0, a.in_smem[k * kNumThreads]);
    of_b.set(0, b.in_smem[k * kNumThreads]);
    f(of_a, of_b, 0, kInRegisters + k);
  }
}

// Tiles of a block are counted in an int; the host ensures that this suffices.
using tile_index_t = conditional<kInWarp, long long, int>::type;

__device__ __forceinline__ int divide_tiles(int a, int b) {
  return unsigned(a) / unsigned(b);
}
__device__ __forceinline__ long long divide_tiles(long long a, long long b) {
  return divide(a, b);
}

template <typename Layout>
__device__ __forceinline__ tile_index_t num_slabs(const Layout& layout) {
  tile_index_t count = 1;
#pragma unroll
  for (int axis = 0; axis < OUTER_AXES - 1; ++axis) count *= layout.outer.size[axis];
  return count;
}
template <typename Layout>
__device__ __forceinline__ tile_index_t tiles_of_slab(const Layout& layout) {
  const long long last = layout.outer.size[OUTER_AXES - 1] - 1;
  return tile_index_t(is_power_of_two(kColumns) ? last / kColumns
                                                : divide(last, kColumns)) +
         1;
}

// A block takes tile after tile; gridDim.x is a multiple of kCluster.
template <typename Layout>
__device__ __forceinline__ tile_index_t num_tiles(const Layout& layout) {
  return num_slabs(layout) * tiles_of_slab(layout);
}
__device__ __forceinline__ tile_index_t first_tile() {
  if constexpr (kTeams) return blockIdx.y;
  return tile_index_t(blockIdx.x / kCluster) * kGroupsPerBlock;
}
__device__ __forceinline__ tile_index_t tile_step() {
  if constexpr (kTeams) return gridDim.y;
  return tile_index_t(gridDim.x / kCluster) * kGroupsPerBlock;
}
// The blocks of a column, in a cluster or not, take one piece of it each.
__device__ __forceinline__ int num_pieces() {
  return kTeams ? gridDim.x : kSplits ? gridDim.y : kCluster;
}
__device__ __forceinline__ int piece_index() {
  return kTeams ? blockIdx.x : kSplits ? blockIdx.y : cluster_rank();
}

// A thread's part of a tile. The layout of the problem is a template parameter, since
// kernels have different arrays. Row counts the rows of a column: int if all are on
// chip, else long long.
template <typename Layout, typename Row> struct place_t {
  const Layout& layout;
  thread_map how;
  tile_index_t slab;
  long long column;  // the first column of the tile
  int columns;       // number of columns
  Row row;           // the first row of this thread
  int rows;          // number of rows

  __device__ __forceinline__ place_t(const Layout& layout, thread_map how,
                                     tile_index_t first)
      : layout(layout), how(how) {
    const int in_group = kInWarp ? threadIdx.x % kGroup : threadIdx.x;
    const tile_index_t tile = first + (kInWarp ? threadIdx.x / kGroup : 0);
    const tile_index_t tiles = tiles_of_slab(layout);
    slab = OUTER_AXES > 1 ? divide_tiles(tile, tiles) : tile >= tiles;
    column = (long long)(tile - slab * tiles) * kColumns;
    const long long left = layout.outer.size[OUTER_AXES - 1] - column;
    columns = left < kColumns ? int(left) : kColumns;
    const bool has_rows = (!kInWarp || slab < num_slabs(layout)) && in_group < kGroup;
    const Row length = Row(layout.row_length);
    const int pieces = num_pieces();
    const Row piece = (length + pieces - 1) / pieces;
    const Row first_row = piece_index() * piece;
    const Row last = first_row + piece < length ? first_row + piece : length;
    row = first_row + in_group / kSide;
    rows = has_rows && row < last ? int((last - row + kDeep - 1) / kDeep) : 0;
  }

  static __device__ __forceinline__ int side() { return threadIdx.x % kGroup % kSide; }

  // Offset of slot j of this thread from the first column of the tile.
  __device__ __forceinline__ int offset(int j) const {
    return how == thread_map::kVectors ? side() * kVector + j : side() + j * kSide;
  }

  // Offset of this thread's first row, in the tile's first column, from the array's
  // start.
  __device__ __forceinline__ long long start(int array) const {
    long long at = row * layout.reduced.stride[array][0] +
                   column * layout.outer.stride[array][OUTER_AXES - 1];
    tile_index_t index = slab;
#pragma unroll
    for (int axis = OUTER_AXES - 2; axis >= 0; --axis) {
      const tile_index_t size = tile_index_t(layout.outer.size[axis]);
      const tile_index_t next = axis > 0 ? divide_tiles(index, size) : 0;
      at += (index - next * size) * layout.outer.stride[array][axis];
      index = next;
    }
    return at;
  }
  // Offset from one row of this thread to the next.
  __device__ __forceinline__ long long step(int array) const {
    return kDeep * layout.reduced.stride[array][0];
  }

  // Which elements of kRows of this thread's rows, from number `first` on, exist and
  // are selected by the mask, if there is one: bit k * kVector + j. `rows` rows are
  // left; `where` is at the first row of the thread.
  template <bool kMasked, int kRows = kInRegisters>
  __device__ __forceinline__ unsigned long long selected(const bool* where, int array,
                                                         int first, int rows) const {
    static_assert(kRows * kVector <= 64, "a bit an element");
    const long long side_step = layout.outer.stride[array][OUTER_AXES - 1];
    unsigned long long bits = 0;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int i = offset(j);
        if (k >= rows || i >= columns) continue;
        if (!kMasked || where[(first + k) * step(array) + i * side_step]) {
          bits |= 1ull << (k * kVector + j);
        }
      }
    }
    return bits;
  }

  // Whether this thread is the first of those with the same columns.
  __device__ __forceinline__ bool is_first() const {
    return (kInWarp ? threadIdx.x % kGroup : threadIdx.x) < kSide;
  }

  // Starts to load all rows of this thread; empty slots become `absent`.
  template <typename T>
  __device__ __forceinline__ void load(rows_t<T>& to, const T* p, int array,
                                       T absent) const {
    p += start(array);
    if (how == thread_map::kVectors && rows >= kSlots && offset(0) < columns) {
      // All rows exist: only address arithmetic between the loads.
      const long long step = this->step(array);
      p += offset(0);
#pragma unroll
      for (int k = 0; k < kInSmem; ++k) {
        copy_vector(&to.in_smem[k * kNumThreads], p + (kInRegisters + k) * step);
      }
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) {
        to.in_registers.set(k, load_vector<kVector>(p + k * step));
      }
      return;
    }
    park(to, p, array, absent);
    to.in_registers.fill(absent);
    load_rows(to.in_registers, p, array, 0, rows < kInRegisters ? rows : kInRegisters);
  }

  // Loads `rows` rows of this thread, from row number `first` on; p is at the first.
  template <typename T>
  __device__ __forceinline__ void load_rows(slots_t<T>& in_registers, const T* p,
                                            int array, int first, int rows) const {
    const long long step = this->step(array);
    p += first * step;
    if (how == thread_map::kVectors) {
      if (offset(0) >= columns) return;
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) {
        if (k < rows)
          in_registers.set(k, load_vector<kVector>(p + offset(0) + k * step));
      }
    } else {
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const int i = offset(j);
          if (k < rows && i < columns) in_registers.set(k, j, p[i + k * step]);
        }
        // Limits loads in flight, and registers.
        if (sizeof(T) < 4) ptx::compiler_fence();
      }
    }
  }

  // Calls visit(write), which calls write(row, value) for rows of this thread; value(j)
  // goes to column j. The two branches stay separate: where they merge, the compiler
  // would split the vectors.
  template <typename T, typename Visit>
  __device__ __forceinline__ void store_each(T* p, int array, Visit visit) const {
    store_from(p + start(array), array, rows, visit);
  }

  // Stores value(k, j) to `rows` rows of this thread, from row number `first` on; p is
  // at the first.
  template <typename T, typename Value>
  __device__ __forceinline__ void store_rows(T* p, int array, int first, int rows,
                                             Value value) const {
    store_from(p + first * step(array), array, rows, [&](auto write) {
#pragma unroll
      for (int k = 0; k < kInRegisters; ++k) {
        write(k, [&](int j) { return value(k, j); });
      }
    });
  }

 private:
  // Rows [0, rows), as in store_each.
  template <typename T, typename Visit>
  __device__ __forceinline__ void store_from(T* p, int array, int rows,
                                             Visit visit) const {
    const long long step = this->step(array);
    const int before = how == thread_map::kVectors ? side() * kVector : side();
    const int left = columns - before;
    p += before;
    if (left <= 0) return;
    if (how == thread_map::kVectors) {
      visit([&](int row, auto value) {
        vector_t<T, kVector> y;
#pragma unroll
        for (int j = 0; j < kVector; ++j) y.element[j] = value(j);
        if (row < rows) store_vector(p + row * step, y);
      });
    } else {
      visit([&](int row, auto value) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          if (row < rows && j * kSide < left) p[row * step + j * kSide] = value(j);
        }
      });
    }
  }

  // Writes the rows after the first kInRegisters to shared memory; p is at the first.
  template <typename T>
  __device__ __forceinline__ void park(rows_t<T>& to, const T* p, int array,
                                       T absent) const {
    const long long step = this->step(array);
#pragma unroll 1
    for (int k = 0; k < kInSmem; ++k) {
      const int row = kInRegisters + k;
      vector_t<T, kVector>& home = to.in_smem[k * kNumThreads];
      if (how == thread_map::kVectors && row < rows && offset(0) < columns) {
        copy_vector(&home, p + offset(0) + row * step);
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const int i = offset(j);
          home.element[j] = row < rows && i < columns ? p[i + row * step] : absent;
        }
      }
    }
  }
};

// Whether an array can be accessed in vectors of adjacent columns.
template <typename T, typename Layout>
__device__ __forceinline__ bool takes_vectors(const T* p, const Layout& layout,
                                              int array) {
  constexpr int kLast = OUTER_AXES - 1;
  long long steps = layout.reduced.stride[array][0] | layout.outer.size[kLast];
#pragma unroll
  for (int axis = 0; axis < kLast; ++axis) steps |= layout.outer.stride[array][axis];
  return is_aligned<T, kVector>(p) && steps % kVector == 0 &&
         layout.outer.stride[array][kLast] == 1;
}

// --- numbers of a column -------------------------------------------------------------

// One number for each column of the tile from each part of the block.
template <typename T> using partials_t = T[kPartials][kColumns];

// Reduces over the lanes of this warp that hold the same columns.
template <typename T, typename Combine>
__device__ __forceinline__ void combine_in_warp(T (&value)[kVector], Combine combine) {
  if constexpr (kShuffles) {
    constexpr int kSpan = kInWarp ? kGroup : kWarpSize;
#pragma unroll
    for (int offset = kSide; offset < kSpan; offset *= 2) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        value[j] = combine(value[j], shuffle_xor(value[j], offset));
      }
    }
  }
}

// Reduces over the warp and stores what remains; a barrier must follow. As long as a
// lane has several columns, each step lets two lanes divide their columns.
template <typename T, typename Combine>
__device__ __forceinline__ void write_partials(partials_t<T>& partials,
                                               T (&value)[kVector], Combine combine) {
  const int side = threadIdx.x % kSide;
  if constexpr (kShuffles) {
    const int lane = threadIdx.x % kWarpSize;
    int first = 0, left = kVector;  // columns of this lane
    bool writes = true;
#pragma unroll
    for (int offset = kSide; offset < kWarpSize; offset *= 2) {
      const bool is_upper = lane & offset;
      if (left > 1) {
        left /= 2;
        first += is_upper ? left : 0;
#pragma unroll
        for (int j = 0; j < left; ++j) {
          const T kept = is_upper ? value[j + left] : value[j];
          const T sent = is_upper ? value[j] : value[j + left];
          value[j] = combine(kept, shuffle_xor(sent, offset));
        }
      } else {
        value[0] = combine(value[0], shuffle_xor(value[0], offset));
        writes = writes && !is_upper;
      }
    }
    T* const to = &partials[threadIdx.x / kWarpSize][side * kVector + first];
#pragma unroll
    for (int j = 0; j < left; ++j) {
      if (writes) to[j] = value[j];
    }
  } else if (threadIdx.x < kGroup) {
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      partials[threadIdx.x / kSide][side * kVector + j] = value[j];
  }
}

// Reduces the partial numbers of one column.
template <typename T, typename Combine>
__device__ __forceinline__ T combine_partials(const partials_t<T>& partials, int column,
                                              Combine combine) {
  T value = partials[0][column];
#pragma unroll
  for (int part = 1; part < kPartials; ++part) {
    value = combine(value, partials[part][column]);
  }
  return value;
}

template <typename T>
__device__ __forceinline__ double sum_of_partials(const partials_t<T>& partials,
                                                  int column) {
  sum_t sum;
#pragma unroll
  for (int part = 0; part < kPartials; ++part) sum += partials[part][column];
  return total(sum);
}
template <typename T>
__device__ __forceinline__ T combine_partials(const partials_t<T>& partials, int column,
                                              plus_t) {
  return sum_of_partials(partials, column);
}

// SPDX-License-Identifier: MIT
// attention_mma_few: float32 attention of few queries over many keys on tensor cores.
//
// Algorithm  FlashAttention-2 forward, for calls whose time is that of reading k and v.
//            All warps have all queries of the tile. For scores a warp has some of the
//            keys, for out some of the columns of v: each number of k and v is read and
//            split into parts by one lane, once. Scores go through shared memory, and
//            each warp computes all weights from them.
// Grid       1-D, one block of kWarps warps per tile of queries of one head
// Tiles      q     kBlockM x kHeadDim         shared, loaded once
//            k, v  pieces of 4 KB             shared, a ring per warp
//            s     kBlockM x kBlockN          shared, two tiles; final scores
//            o     registers: all rows, the warp's columns
// Memory     global: q and out once, k and v once per tile of queries. Pieces of the
//            next tile are on their way during the products of this one; the block
//            waits once per tile of keys, for scores
// Numbers    s, p and o in float32, products in tf32 parts (few_forward.cuh). Where o
//            is not finite the block begins again: values that parts cannot represent,
//            and those of hidden keys, which contribute 0 * NaN, are then added one by
//            one
// Limits     head dimensions up to kHeadDim and kHeadDimV; rows start anywhere with
//            UNALIGNED, else at multiples of 16 bytes
#include "attention/sm80/few_forward.cuh"

// The pieces of k and v of a warp, in the order in which it needs them.
class ring_t {
 public:
  __device__ __forceinline__ ring_t(unsigned char* smem, const float* k, const float* v,
                                    const params_t& params, int first, int last)
      : smem_(smem),
        k_(k + warp_index() * 8 * kKeyTiles * params.k.row),
        v_(v + warp_index() * kColumns),
        params_(params),
        j0_(first),
        last_(last) {
#pragma unroll 1
    for (; started_ < kStages - 1; ++started_) start(started_);
  }

  // The next piece, which is number `piece` of its tile, has arrived, and the one
  // kStages - 1 further is on its way.
  __device__ __forceinline__ unsigned char* next(int piece) {
    ptx::wait_copy_groups<kStages - 2>();
    __syncwarp();  // and all lanes have read the piece before
    start(piece + kStages - 1);
    const unsigned place = started_ + 1 == kStages ? 0 : started_ + 1;
    started_ = place;
    return smem_ + place * kBytesPiece;
  }
  __device__ __forceinline__ void end_tile() { j0_ += kBlockN; }
  // The warp's keys of the tile.
  __device__ __forceinline__ const float* keys() const {
    return k_ + j0_ * params_.k.row;
  }

 private:
  // Piece `piece` of the tile at j0_, or of those that follow.
  __device__ __forceinline__ void start(int piece) {
    const int j0 = j0_ + piece / kPieces * kBlockN;
    piece %= kPieces;
    unsigned char* const to = smem_ + started_ * kBytesPiece;
    if (j0 >= last_) {
    } else if (piece < kPiecesK) {
      copy_rows<along_t<kDepth>, 8 * kKeyTiles, kWarpSize>(
          to, k_ + j0 * params_.k.row + piece * kDepth, params_.k.row,
          last_ - j0 - warp_index() * 8 * kKeyTiles,
          static_cast<int>(params_.head_dim) - piece * kDepth);
    } else {
      const int first = j0 + (piece - kPiecesK) * kDepthV;
      copy_rows<across_t<kColumns>, kDepthV, kWarpSize>(
          to, v_ + first * params_.v.row, params_.v.row, last_ - first,
          static_cast<int>(params_.head_dim_v) - warp_index() * kColumns);
    }
    ptx::commit_copies();
  }

  unsigned char* const smem_;
  const float *const k_, *const v_;
  const params_t& params_;
  int j0_;
  const int last_;
  int started_ = 0;  // the place of the latest piece
};

// Scores that are not finite once more, one by one: where one part is infinite the
// other is NaN. Rare, so the scores go through the stack.
__device__ __forceinline__ void mend_nonfinite(scores_frag_t& s, const unsigned char* q,
                                               const float* k, const params_t& params,
                                               int num_keys) {
  constexpr int kCount = kRowTiles * kKeyTiles * 4;
  float nonfinite = 0;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    nonfinite = fmaf(s[n / 4 / kKeyTiles][n / 4 % kKeyTiles][n % 4], 0, nonfinite);
  }
  if (nonfinite == 0) return;
  float on_stack[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    on_stack[n] = s[n / 4 / kKeyTiles][n / 4 % kKeyTiles][n % 4];
  }
  ptx::launder(on_stack);
#pragma unroll 1
  for (int n = 0; n < kCount; ++n) {
    const int row = n / 4 / kKeyTiles * 16 + n % 4 / 2 * 8 + lane_index() / 4;
    const int key = n / 4 % kKeyTiles * 8 + lane_index() % 4 * 2 + n % 2;
    if (is_finite(on_stack[n]) || key >= num_keys) continue;
    float sum = 0;
#pragma unroll 1
    for (int d = 0; d < params.head_dim; ++d) {
      const unsigned char* const from = q + along_t<kHeadDim>::offset(row, d / 4);
      sum = fmaf(reinterpret_cast<const float*>(from)[d % 4], k[key * params.k.row + d],
                 sum);
    }
    on_stack[n] = sum;
  }
  ptx::launder(on_stack);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    s[n / 4 / kKeyTiles][n / 4 % kKeyTiles][n % 4] = on_stack[n];
  }
}

// The rows of a lane.
struct rows_t {
  float m[kRows], l[kRows];  // l: of the lane's keys alone
  out_frag_t o;
};

__device__ __forceinline__ float exponential(float s, float m) {
  return ptx::ex2_approx_ftz((s - m) * float(kLog2e));
}
// What is subtracted from the scores of a row.
__device__ __forceinline__ float reference(float m) {
  return m == -infinity<float>() ? 0.f : m;
}

// Row r of group g of a tile of scores, as 4 keys of the lane.
__device__ __forceinline__ void read_scores(float (&x)[4], const unsigned char* scores,
                                            int r, int g) {
  read(x, scores + along_t<kBlockN>::offset(lane_index() / 4 + 8 * r,
                                            4 * g + lane_index() % 4));
}

// Lets m, l and o follow the largest scores of a tile.
__device__ __forceinline__ void follow(rows_t& rows, const unsigned char* scores) {
  float alpha[kRows];
  bool moves = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float m = rows.m[r];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float x[4];
      read_scores(x, scores, r, g);
      m = larger(larger(m, larger(x[0], x[1])), larger(x[2], x[3]));
    }
    m = warp_reduce<4>(m, [](float a, float b) { return larger(a, b); });
    alpha[r] = exponential(rows.m[r], reference(m));
    moves |= m != rows.m[r];
    rows.m[r] = m;
  }
  if (!__any_sync(kFullMask, moves)) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows.l[r] *= alpha[r];
#pragma unroll
    for (int n = 0; n < kSpans * kVec; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        rows.o[n / kVec][r / 2][n % kVec][r % 2 * 2 + e] *= alpha[r];
      }
    }
  }
}

// The weights of a group as a left operand; adds them to l.
__device__ __forceinline__ void weigh(left_t (&p)[kRowTiles], rows_t& rows,
                                      const unsigned char* scores, int g) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    float x[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 2 * m + half;
      read_scores(x[half], scores, r, g);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[half][i] = exponential(x[half][i], reference(rows.m[r]));
      }
      rows.l[r] += (x[half][0] + x[half][1]) + (x[half][2] + x[half][3]);
    }
    p[m] = left_t(x[0], x[1]);
  }
}

// Takes the values that parts cannot represent out of a piece: adds them to o one by
// one, for the rows that see them. Keys of the piece start at key `first` of the tile.
__device__ __forceinline__ void take_odd_values(rows_t& rows,
                                                const unsigned char* scores,
                                                unsigned char* piece, int first) {
#pragma unroll 1
  for (int key = 0; key < kDepthV; ++key) {
#pragma unroll
    for (int n = 0; n < kSpans * kVec * 2; ++n) {
      const int column = out_column(n / 2 / kVec, n / 2 % kVec, n);
      const float value = reinterpret_cast<const float*>(
          piece + across_t<kColumns>::offset(key, column / 4))[column % 4];
      if (!is_odd(value)) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float s = *reinterpret_cast<const float*>(
            scores + score_offset(lane_index() / 4 + 8 * r, first + key));
        if (s == -infinity<float>()) continue;
        float& sum = rows.o[n / 2 / kVec][r / 2][n / 2 % kVec][r % 2 * 2 + n % 2];
        sum = fmaf(exponential(s, reference(rows.m[r])), value, sum);
      }
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int n = lane_index(); n < kDepthV * kColumns; n += kWarpSize) {
    float& value = reinterpret_cast<float*>(piece)[n];
    if (is_odd(value)) value = 0;
  }
  __syncwarp();
}

// o += p v for a tile whose scores are complete.
__device__ __forceinline__ void attend(rows_t& rows, ring_t& ring,
                                       const unsigned char* scores, bool exact) {
#pragma unroll 1
  for (int first = 0; first < kBlockN; first += kDepthV) {
    unsigned char* const piece = ring.next(kPiecesK + first / kDepthV);
    if (exact) take_odd_values(rows, scores, piece, first);
#pragma unroll
    for (int g = 0; g < kDepthV / kGroup; ++g) {
      left_t p[kRowTiles];
      weigh(p, rows, scores, first / kGroup + g);
      multiply_pv(rows.o, p, piece, g * kGroup);
    }
  }
}

// Turns products into final scores, and puts them where all warps find them.
__device__ __forceinline__ void put_scores(unsigned char* to, const scores_frag_t& s,
                                           const scores_t& scores, index_t i0,
                                           index_t j0, int num_rows) {
  const mask_bounds_t bounds = scores.mask_bounds(i0, j0);
  const bool sees_all = bounds.sees_all(kChangesScores ? kBlockM : num_rows, kBlockN);
#pragma unroll
  for (int n = 0; n < kRowTiles * kKeyTiles * 4; ++n) {
    const int row = n / 4 / kKeyTiles * 16 + n % 4 / 2 * 8 + lane_index() / 4;
    const int key = (warp_index() * kKeyTiles + n / 4 % kKeyTiles) * 8 +
                    lane_index() % 4 * 2 + n % 2;
    const float dot = s[n / 4 / kKeyTiles][n / 4 % kKeyTiles][n % 4];
    *reinterpret_cast<float*>(to + score_offset(row, key)) =
        sees_all || bounds.sees(row, key) ? scores(dot, i0 + row, j0 + key)
                                          : -infinity<float>();
  }
}

// A number that is not 0 if some number of o is not finite.
__device__ __forceinline__ float nonfinite_of(const out_frag_t& o) {
  float nonfinite = 0;
#pragma unroll
  for (int n = 0; n < kSpans * kRowTiles * kVec * 4; ++n) {
    const float x =
        o[n / 4 / kVec / kRowTiles][n / 4 / kVec % kRowTiles][n / 4 % kVec][n % 4];
    nonfinite = fmaf(x, 0, nonfinite);
  }
  return nonfinite;
}

// Divides o by l, and stores it and lse.
__device__ __forceinline__ void store(const rows_t& rows, const scores_t& scores,
                                      const tile_coord_t& at, const params_t& params,
                                      float* out, row_lse_t* lse, index_t i0) {
  const int num_rows = static_cast<int>(smaller(params.seqlen_q - i0, kBlockM));
  const int dim = static_cast<int>(params.head_dim_v) - warp_index() * kColumns;
  float* const columns = at.at(out, params.out) + i0 * params.out.row +
                         warp_index() * kColumns * params.out.col;
  const bool as_vectors =
      params.out.col == 1 && has_aligned_rows(columns, params.out.row, dim);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float l = warp_reduce<4>(rows.l[r], [](float a, float b) { return a + b; });
    const int row = lane_index() / 4 + 8 * r;
    if (row >= num_rows) continue;
    const finished_t finished = scores.finish(i0 + row, rows.m[r], l);
    float* const x = columns + row * params.out.row;
#pragma unroll
    for (int n = 0; n < kSpans * 2; ++n) {
      float values[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        values[i] = rows.o[n / 2][r / 2][i][r % 2 * 2 + n % 2] * finished.inverse;
      }
      const int column = out_column(n / 2, 0, n);
      if (kVec == 4 && as_vectors) {
        if (column < dim) {
          *reinterpret_cast<float4*>(x + column) =
              make_float4(values[0], values[1], values[kVec - 2], values[kVec - 1]);
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (column + i < dim) x[(column + i) * params.out.col] = values[i];
      }
    }
    if (lse != nullptr && threadIdx.x < kWarpSize && lane_index() % 4 == 0) {
      lse[at.row_of_heads * params.seqlen_q + i0 + row] = finished.lse;
    }
  }
}

// The coordinates of this block. The compiler forgets that it computed them before:
// the loop over keys has no registers for what comes before or after it.
__device__ __forceinline__ tile_coord_t coordinates(const params_t& params) {
  index_t block = block_index();
  ptx::launder(block);
  return tile_coord_t(params, block, (params.seqlen_q + kBlockM - 1) / kBlockM);
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attention_mma_few(FORWARD_PARAMETERS, SCORE_PARAMETERS) {
  extern __shared__ __align__(128) unsigned char smem[];
  unsigned char *const smem_q = smem, *const smem_s = smem_q + kBytesQ;
  unsigned char* const pieces =
      smem_s + 2 * kBytesS + warp_index() * kStages * kBytesPiece;

  rows_t rows;
#pragma unroll 1
  for (bool exact = false;; exact = true) {
    const tile_coord_t at = coordinates(params);
    if (!at.exists) return;
    const index_t i0 = at.tile * kBlockM;
    const int num_rows = static_cast<int>(smaller(params.seqlen_q - i0, kBlockM));
    const scores_t scores(at, SCORE_ARGUMENTS);
    const range_t keys = scores.keys_of(i0, i0 + num_rows);
    // Tiles start at multiples of kBlockN, so that the order of summation of a row does
    // not depend on its tile of queries.
    const int first = static_cast<int>(keys.first) / kBlockN * kBlockN;
    const int last = static_cast<int>(keys.last);
    copy_rows<along_t<kHeadDim>, kBlockM, kNumThreads>(
        smem_q, at.at(q, params.q) + i0 * params.q.row, params.q.row, num_rows,
        static_cast<int>(params.head_dim));
    ring_t ring(pieces, at.at_kv(k, params.k), at.at_kv(v, params.v), params, first,
                last);
    rows = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows.m[r] = -infinity<float>();
    ptx::wait_copy_groups<kStages - 2>();
    __syncthreads();  // q has arrived with the first pieces

    unsigned char* to = smem_s;
#pragma unroll 1
    for (int j0 = first; j0 < last; j0 += kBlockN) {
      scores_frag_t s = {};
#pragma unroll 1
      for (int piece = 0; piece < kPiecesK; ++piece) {
        multiply_qk(s, smem_q, ring.next(piece), piece * kDepth);
      }
      mend_nonfinite(s, smem_q, ring.keys(), params,
                     last - j0 - warp_index() * 8 * kKeyTiles);
      put_scores(to, s, scores, i0, j0, num_rows);
      __syncthreads();  // the scores of all warps; those of the tile before are read
      follow(rows, to);
      attend(rows, ring, to, exact);
      ring.end_tile();
      to = to == smem_s ? smem_s + kBytesS : smem_s;
    }
    ptx::wait_copies();
    // All warps have read the last scores.
    if (!__syncthreads_or(nonfinite_of(rows.o) != 0) || exact) break;
  }
  const tile_coord_t at = coordinates(params);
  store(rows, scores_t(at, SCORE_ARGUMENTS), at, params, out, lse, at.tile * kBlockM);
}

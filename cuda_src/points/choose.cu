// SPDX-License-Identifier: MIT
// points_choose: decides whether series.cu takes the smooth pairs of tiles, and its
// degree.
//
// Algorithm  Counts pairs of sampled row blocks and tiles: those that matter at all,
//            and those among them that each degree could take. The degree with the
//            least cost wins, where a pair on tensor cores costs 1.
// Grid       (sampled row blocks, batch); the last block of an entry decides

#include "points/tiles.cuh"

constexpr int kThreads = 256;
constexpr int kGroups = 8;
constexpr int kDegrees = 3;
constexpr int kMostTiles = 1024;  // sampled per block
constexpr float kWorthwhile = 0.9f;

struct degrees_t {
  int degree[kDegrees];
  float cut[kDegrees], cost[kDegrees];
};

// Per entry; all 0 at the start.
struct tally_t {
  int num_pairs, num_smooth[kDegrees], num_blocks;
};

extern "C" __global__ void points_choose(
    const float* __restrict__ row_boxes,  // (batch, groups, kBoxSize)
    const float* __restrict__ key_boxes,  // (batch, num_tiles, kBoxSize)
    points_facts_t* __restrict__ facts,   // (batch)
    tally_t* __restrict__ tallies,        // (batch)
    points_params_t params, degrees_t degrees) {
  __shared__ tile_list_t<kGroups, kThreads> list;
  __shared__ int counts[1 + kDegrees];
  const int entry = blockIdx.y;
  const int row_blocks = params.padded_rows / (kGroups * kGroup);
  const int block =
      static_cast<int>(static_cast<long long>(blockIdx.x) * row_blocks / gridDim.x);
  const float* boxes =
      key_boxes + static_cast<long long>(entry) * params.num_tiles * kBoxSize;
  const float scale = float(params.scale);
  if (threadIdx.x < 1 + kDegrees) counts[threadIdx.x] = 0;
  list.load<1>(row_boxes + (static_cast<long long>(entry) * row_blocks + block) *
                               kGroups * kBoxSize,
               from_ordered(facts[entry].values));
  float mid[kBoxDim + 1];
  const float reach = list.middle(mid);
  const bool is_wide = !(rounded_product(reach, scale) <= params.limit);
  if (kHasWeights) {
    float score;
    const int best = list.find_best(boxes, params.num_tiles, scale, score);
    if (threadIdx.x < kGroups) {
      const float* keys =
          boxes + static_cast<long long>(best < 0 ? 0 : best) * kBoxSize;
      list.floor_[threadIdx.x] = least_score(list.rows[threadIdx.x], keys, scale);
    }
    __syncthreads();
  }

  int num_pairs = 0, num_smooth[kDegrees] = {};
  const int looked_at = min(params.num_tiles, kMostTiles);
  for (int n = threadIdx.x; n < looked_at; n += kThreads) {
    const int tile =
        static_cast<int>(static_cast<long long>(n) * params.num_tiles / looked_at);
    const float* keys = boxes + static_cast<long long>(tile) * kBoxSize;
    for (int group = 0; group < kGroups; ++group) {
      const float score = best_score(list.rows[group], keys, scale);
      if (!(score >= list.floor_[group] - params.drop)) continue;
      ++num_pairs;
      for (int k = 0; k < kDegrees; ++k) {
        num_smooth[k] += !is_wide && is_smooth(reach, keys, degrees.cut[k]);
      }
    }
  }
  atomicAdd(&counts[0], num_pairs);
  for (int k = 0; k < kDegrees; ++k) atomicAdd(&counts[1 + k], num_smooth[k]);
  __syncthreads();
  if (threadIdx.x != 0) return;
  tally_t& tally = tallies[entry];
  atomicAdd(&tally.num_pairs, counts[0]);
  for (int k = 0; k < kDegrees; ++k) atomicAdd(&tally.num_smooth[k], counts[1 + k]);
  __threadfence();
  if (atomicAdd(&tally.num_blocks, 1) != int(gridDim.x) - 1) return;
  __threadfence();
  const float pairs = float(atomicAdd(&tally.num_pairs, 0));
  float least = kWorthwhile * pairs;
  for (int k = 0; k < kDegrees; ++k) {
    const float smooth = float(atomicAdd(&tally.num_smooth[k], 0));
    const float cost = pairs - smooth + degrees.cost[k] * smooth;
    if (smooth > 0 && cost < least) {
      least = cost;
      facts[entry].degree = degrees.degree[k];
      facts[entry].cut = degrees.cut[k];
    }
  }
}

// What the kernels of route share: ids, chunks, clusters of blocks, and slots taken in order.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "kernels.h"
#include "slot.cuh"
#include "sync.cuh"

namespace epbuf::cuda {

constexpr std::uint32_t kNoExpert = 0xFFFFFFFF;
constexpr std::int64_t kMaxCluster = 8;       // what every GPU takes
constexpr std::int64_t kClusterSlots = 2048;  // of a block, while the cluster may still grow

// Blocks of a cluster that looks at all ids.
inline std::uint32_t num_cluster_blocks(const KernelIds& ids, const Target& target) {
  const std::int64_t limit =
      target.max_num_sms != 0 ? std::min<std::int64_t>(target.max_num_sms, kMaxCluster) : kMaxCluster;
  const std::int64_t num_slots = static_cast<std::int64_t>(ids.num_tokens) * ids.num_topk;
  std::uint32_t num_blocks = 1;
  while (2 * num_blocks <= limit && num_blocks * kClusterSlots < num_slots) num_blocks *= 2;
  return num_blocks;
}

// All blocks of the cluster have come here, and what they wrote to shared memory may be read.
__device__ inline void meet() {
  if (gridDim.x == 1) {
    __syncthreads();
  } else {
    cooperative_groups::this_cluster().sync();
  }
}

__device__ inline std::int32_t num_live(const KernelIds& ids) {
  if (ids.live_tokens == 0) return ids.num_tokens;
  const bool wide = ids.live_tokens_bytes == 8;
  const std::int64_t live = wide ? *at<const std::int64_t>(ids.live_tokens) : *at<const std::int32_t>(ids.live_tokens);
  return static_cast<std::int32_t>(live < 0 ? 0 : live < ids.num_tokens ? live : ids.num_tokens);
}

__device__ __forceinline__ std::int64_t id_at(const KernelIds& ids, std::int64_t index) {
  return ids.topk_idx_bytes == 8 ? at<const std::int64_t>(ids.topk_idx)[index]
                                 : at<const std::int32_t>(ids.topk_idx)[index];
}

// The id at `slot` = token * K + k, which is below 2^31.
__device__ __forceinline__ std::int64_t load_id(const KernelIds& ids, std::uint32_t slot) {
  const auto topk = static_cast<std::uint32_t>(ids.num_topk);
  return id_at(ids, static_cast<std::int64_t>(slot / topk) * ids.row_stride + slot % topk);
}

// Walks the ids of slots `first`, `first` + 32, ..: a division at the start, none on the way.
class IdWalk {
 public:
  __device__ __forceinline__ IdWalk(const KernelIds& ids, std::uint32_t first) : ids_(ids) {
    const auto topk = static_cast<std::uint32_t>(ids.num_topk);
    token_ = first / topk;
    topk_ = first % topk;
    tokens_ = kWarpSize / topk;
    rest_ = kWarpSize % topk;
  }
  // The next id; -1 unless `wanted`.
  __device__ __forceinline__ std::int64_t next(bool wanted) {
    const std::int64_t index = token_ * ids_.row_stride + topk_;
    topk_ += rest_;
    const bool wraps = topk_ >= static_cast<std::uint32_t>(ids_.num_topk);
    token_ += tokens_ + (wraps ? 1 : 0);
    topk_ -= wraps ? ids_.num_topk : 0;
    return wanted ? id_at(ids_, index) : -1;
  }

 private:
  const KernelIds& ids_;
  std::int64_t token_;
  std::uint32_t topk_, tokens_, rest_;
};

__host__ __device__ inline std::int32_t num_chunks_of(const KernelIds& ids, std::int32_t chunk_tokens) {
  return (ids.num_tokens + chunk_tokens - 1) / chunk_tokens;
}

// What slots are taken for: the expert, or kNoExpert.
__device__ __forceinline__ std::uint32_t key_of(std::int64_t id, std::int32_t num_experts) {
  return id >= 0 && id < num_experts ? static_cast<std::uint32_t>(id) : kNoExpert;
}

// Ids >= E of this rank: how many, and the lowest slot among them.
struct BadIds {
  unsigned long long num, first;

  __device__ __noinline__ void note(std::int64_t slot) {
    atomicAdd(&num, 1ull);
    atomicMin(&first, static_cast<unsigned long long>(slot));
  }
};
constexpr BadIds kNoBadIds = {0, ~0ull};

// One warp: for each group the lanes whose key equals this lane's, for keys below `num_keys`; none for others. A ballot
// for each bit: match.any takes as long as there are different keys, and here most of them are.
template <std::int32_t kGroups>
__device__ __forceinline__ void find_same(const std::uint32_t (&key)[kGroups], std::int32_t num_bits,
                                          std::uint32_t num_keys, std::uint32_t (&same)[kGroups]) {
#pragma unroll
  for (std::int32_t g = 0; g < kGroups; ++g) same[g] = __ballot_sync(kAllLanes, key[g] < num_keys);
#pragma unroll 1
  for (std::int32_t bit = 0; bit < num_bits; ++bit) {
#pragma unroll
    for (std::int32_t g = 0; g < kGroups; ++g) {
      const bool is_set = (key[g] >> bit) & 1;
      const std::uint32_t set = __ballot_sync(kAllLanes, is_set);
      same[g] &= is_set ? set : ~set;
    }
  }
#pragma unroll
  for (std::int32_t g = 0; g < kGroups; ++g) same[g] = key[g] < num_keys ? same[g] : 0;
}

// One warp: ranks the experts of `keys` [num] in order and writes their slots. The next token for expert e takes slot
// base[e] + next[e]. A key without an expert is larger than any expert.
template <typename Kernel, typename Key>
__device__ void take_slots(const Kernel& k, const Key* keys, const std::int64_t* base, std::uint32_t* next,
                           std::int32_t num, std::int64_t* slots) {
  constexpr std::int32_t kGroups = 4;
  const std::int32_t lane = threadIdx.x % kWarpSize;
  const std::uint32_t lower_lanes = (1u << lane) - 1;
  const std::int32_t num_bits = 32 - __clz(k.num_experts);
  for (std::int32_t begin = lane; begin < num + lane; begin += kGroups * kWarpSize) {
    std::uint32_t key[kGroups], same[kGroups];
#pragma unroll
    for (std::int32_t g = 0; g < kGroups; ++g) {
      const std::int32_t i = begin + g * static_cast<std::int32_t>(kWarpSize);
      key[g] = i < num ? keys[i] : static_cast<Key>(kNoExpert);
    }
    find_same(key, num_bits, static_cast<std::uint32_t>(k.num_experts), same);
#pragma unroll
    for (std::int32_t g = 0; g < kGroups; ++g) {
      const std::int32_t i = begin + g * static_cast<std::int32_t>(kWarpSize);
      const bool live = same[g] != 0;
      const std::uint32_t taken = live ? next[key[g]] : 0;
      __syncwarp();
      if (live && (same[g] & lower_lanes) == 0) next[key[g]] = taken + __popc(same[g]);
      __syncwarp();
      const std::int64_t slot = live ? base[key[g]] + taken + __popc(same[g] & lower_lanes) : kNoSlot;
      if (i < num) slots[i] = live && row_of(slot) < k.capacity_rows ? slot : kNoSlot;
    }
  }
}

}  // namespace epbuf::cuda

// From the rows of every expert to the zones of this rank, the demand of all ranks and the overflow flag. One block of
// kZoneThreads; `Kernel` is any struct that has the regions and sizes which are written and asked for here.
#pragma once

#include <cstdint>

#include "record.cuh"

namespace epbuf::cuda {

constexpr std::uint32_t kZoneThreads = 512;  // half an SM: it must find room beside the experts of other ranks

__device__ __forceinline__ std::int32_t warp_index() { return static_cast<std::int32_t>(threadIdx.x / kWarpSize); }
__device__ __forceinline__ std::int32_t lane_index() { return static_cast<std::int32_t>(threadIdx.x % kWarpSize); }

__device__ inline std::int64_t warp_inclusive_sum(std::int64_t value) {
  const std::uint32_t lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (std::uint32_t step = 1; step < kWarpSize; step *= 2) {
    const std::int64_t lower = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += lower;
  }
  return value;
}

// prefix[e] = padded rows of the experts before e, over all ranks; prefix[E] = all of them.
template <typename Kernel>
__device__ void sum_zones(const Kernel& k, const std::uint32_t* totals, std::int64_t* prefix) {
  constexpr std::int32_t kThreads = kZoneThreads;
  constexpr std::int32_t kWarps = kZoneThreads / kWarpSize;
  __shared__ std::int64_t warp_sums[2][kWarps];  // in turns: a fast warp may be one turn ahead
  const std::int64_t alignment = k.expert_alignment;
  std::int64_t carry = 0;
#pragma unroll 1
  for (std::int32_t begin = 0, turn = 0; begin < k.num_experts; begin += kThreads, turn ^= 1) {
    const std::int32_t e = begin + static_cast<std::int32_t>(threadIdx.x);
    const std::int64_t rows = e < k.num_experts ? (totals[e] + alignment - 1) & -alignment : 0;
    const std::int64_t inclusive = warp_inclusive_sum(rows);
    if (lane_index() == static_cast<std::int32_t>(kWarpSize) - 1) warp_sums[turn][warp_index()] = inclusive;
    __syncthreads();
    const std::int64_t upto = warp_inclusive_sum(lane_index() < kWarps ? warp_sums[turn][lane_index()] : 0);
    const std::int64_t before = __shfl_sync(kAllLanes, upto, max(warp_index() - 1, 0));
    if (e < k.num_experts) prefix[e + 1] = carry + (warp_index() == 0 ? 0 : before) + inclusive;
    carry += __shfl_sync(kAllLanes, upto, kWarps - 1);
  }
  if (threadIdx.x == 0) prefix[0] = 0;
  __syncthreads();
}

// Zone j of this rank is rows [start, end). Rows at or past the capacity are dropped by position.
template <typename Kernel>
__device__ void write_zone(const Kernel& k, std::int32_t j, std::int64_t start, std::int64_t end, std::int64_t count) {
  const std::int64_t capacity = k.capacity_rows;
  auto* counts = at<std::int64_t>(k.counts);
  at<std::int32_t>(k.offs)[j] = static_cast<std::int32_t>(min(end, capacity));
  counts[j] = min(end, capacity) - min(start, capacity);
  counts[k.num_local_experts + j] = min(count, max(capacity - start, std::int64_t{0}));
  if (j == k.num_local_experts - 1) counts[2 * k.num_local_experts] = end;
}

// One warp: the largest demand of all ranks, the overflow flag and, if the round counts, the peak.
template <typename Kernel>
__device__ void write_demand(const Kernel& k, const std::int64_t* prefix, bool counts) {
  std::int64_t largest = -1;
  std::int32_t largest_rank = 0;
#pragma unroll 1
  for (std::int32_t rank = lane_index(); rank < k.call.num_ranks; rank += kWarpSize) {
    const std::int64_t demand = prefix[(rank + 1) * k.num_local_experts] - prefix[rank * k.num_local_experts];
    if (demand > largest) largest = demand, largest_rank = rank;
  }
#pragma unroll 1
  for (std::uint32_t step = kWarpSize / 2; step > 0; step /= 2) {
    const std::int64_t other = __shfl_xor_sync(kAllLanes, largest, step);
    const std::int32_t other_rank = __shfl_xor_sync(kAllLanes, largest_rank, step);
    if (other > largest || (other == largest && other_rank < largest_rank)) largest = other, largest_rank = other_rank;
  }
  if (lane_index() != 0) return;
  *at<float>(k.overflow) = largest > k.capacity_rows ? 1.0f : 0.0f;
  if (!counts) return;
  auto* peak = reinterpret_cast<long long*>(&at<FrameCounters>(k.frame_counters)->demand_peak_rows);
  atomicMax(peak, static_cast<long long>(largest));  // nobody waits for what was there
  if (largest > k.capacity_rows) record_overflow(k.call, largest, largest_rank);
}

}  // namespace epbuf::cuda

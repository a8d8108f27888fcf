// What the kernels that push rows share: where the rows of a token go, their scales, and padding.
#pragma once

#include "record.cuh"
#include "rows.cuh"
#include "wire.cuh"

namespace epbuf::cuda {

constexpr std::int32_t kScaleWordBytes = 4;

__device__ __forceinline__ std::int32_t num_scale_words(const RowFormat& format) {
  return static_cast<std::int32_t>(format.wire_row_bytes / kScaleWordBytes);
}

// Where one row goes: its data and its scales; 0 for no slot.
struct Destination {
  std::uint64_t data, scales;
};

// Slots k = lane and lane + 32 of one token.
struct Destinations {
  Destination low, high;

  __device__ __forceinline__ std::uint64_t live() const {
    return static_cast<std::uint64_t>(__ballot_sync(kAllLanes, high.data != 0)) << kWarpSize |
           __ballot_sync(kAllLanes, low.data != 0);
  }
  __device__ __forceinline__ std::uint64_t data_of(std::uint32_t k) const { return pick(k, low.data, high.data); }
  __device__ __forceinline__ std::uint64_t scales_of(std::uint32_t k) const { return pick(k, low.scales, high.scales); }

 private:
  __device__ static __forceinline__ std::uint64_t pick(std::uint32_t k, std::uint64_t low, std::uint64_t high) {
    const std::uint64_t from_low = __shfl_sync(kAllLanes, low, k % kWarpSize);
    return k < kWarpSize ? from_low : __shfl_sync(kAllLanes, high, k % kWarpSize);
  }
};

// Also sends the slot's weight and `row_scale`, if this warp is the one of the row that does.
__device__ __forceinline__ Destination destination(const PushKernel& k, std::int64_t token, std::int32_t topk,
                                                   std::int64_t slot, float row_scale, bool sends) {
  if (slot == kNoSlot) return {0, 0};
  const std::uint64_t window = at<const std::uint64_t>(k.call.peers)[rank_of(slot)];
  const std::int64_t row = row_of(slot);
  if (sends && k.weights_region >= 0) {
    const float* weights = at<const float>(k.weights) + token * k.weights_row_stride;
    at<float>(window, k.weights_region)[row] = k.weights != 0 ? weights[topk] : 1.0f;
  }
  if (sends && k.row_scales_region >= 0) at<float>(window, k.row_scales_region)[row] = row_scale;
  return {window + k.rows_region + row * k.row_bytes, window + k.scales_region + row * k.format.wire_row_bytes};
}

// Of several slots on another rank the first stands for all: the row goes to wire_rows there, and to none of them.
__device__ __forceinline__ Destination destination_by_wire(const PushKernel& k, std::int64_t token, std::int64_t slot,
                                                           const Company& company, const Destination& direct) {
  if (slot == kNoSlot || !goes_by_wire(k.call.rank, rank_of(slot), company.num)) return direct;
  if (company.before != 0) return {0, 0};
  const std::uint64_t window = at<const std::uint64_t>(k.call.peers)[rank_of(slot)];
  const std::uint64_t row = window + k.wire_region + wire_offset(k.call.rank, token, k.max_tokens, k.wire.row_bytes);
  return {row, row + k.wire.scales_offset};
}

__device__ __forceinline__ Slots slots_of(const PushKernel& k, std::int64_t token, std::uint32_t lane) {
  return Slots::load(at<const std::int64_t>(k.slot_map) + token * k.num_topk, k.num_topk, lane);
}

__device__ __forceinline__ Destinations destinations(const PushKernel& k, std::int64_t token, const Slots& slots,
                                                     std::uint32_t lane, float row_scale, bool sends) {
  Destinations to{destination(k, token, lane, slots.low, row_scale, sends),
                  destination(k, token, lane + kWarpSize, slots.high, row_scale, sends)};
  if (k.wire_region < 0) return to;
  const Companies companies(slots, k.num_topk, lane);
  to.low = destination_by_wire(k, token, slots.low, companies.low, to.low);
  to.high = destination_by_wire(k, token, slots.high, companies.high, to.high);
  return to;
}

// The grid: peers read the slots of every token that there may be; those behind this call's tokens are none.
__device__ __forceinline__ void clear_other_slots(const PushKernel& k) {
  if (k.shares_slots == 0) return;
  auto* slots = at<std::int64_t>(k.slot_map);
  const std::int64_t end = static_cast<std::int64_t>(k.max_tokens) * k.num_topk;
  const std::int64_t first = static_cast<std::int64_t>(k.num_tokens) * k.num_topk;
  for (std::int64_t i = first + blockIdx.x * blockDim.x + threadIdx.x; i < end; i += gridDim.x * blockDim.x) {
    slots[i] = kNoSlot;
  }
}

__device__ __forceinline__ void zero_row(const PushKernel& k, std::int64_t row, std::uint32_t lane) {
  uint4* to = at<uint4>(k.call.window, k.rows_region + row * k.row_bytes);
  const std::int32_t num_vecs = static_cast<std::int32_t>(k.row_bytes / kVecBytes);
#pragma unroll 4
  for (std::int32_t v = lane; v < num_vecs; v += kWarpSize) store_vec(to + v, uint4{0, 0, 0, 0});
  if (lane == 0 && k.weights_region >= 0) at<float>(k.call.window, k.weights_region)[row] = 0.0f;
  if (lane == 0 && k.row_scales_region >= 0) at<float>(k.call.window, k.row_scales_region)[row] = 0.0f;
  if (k.scales_region < 0) return;
  auto* scales = at<std::uint32_t>(k.call.window, k.scales_region + row * k.format.wire_row_bytes);
  for (std::int32_t w = lane; w < num_scale_words(k.format); w += kWarpSize) scales[w] = 0;
}

// Padding rows are numbered through all zones; the warp takes numbers first, first + num_warps, ... Lane j looks at
// zone j of each 32: `begin` is its first padding row, `upto` the number after its last one.
__device__ inline void zero_padding(const PushKernel& k, std::uint32_t first, const GridWarp& warp) {
  const auto* offs = at<const std::int32_t>(k.offs);
  const auto* valid = at<const std::int64_t>(k.valid);
  std::uint32_t number = first;
  std::uint32_t before = 0;
  for (std::int32_t zone = 0; zone < k.num_local_experts; zone += kWarpSize) {
    const std::int32_t j = zone + warp.lane;
    const bool is_zone = j < k.num_local_experts;
    const std::int32_t begin = is_zone ? (j == 0 ? 0 : offs[j - 1]) + static_cast<std::int32_t>(valid[j]) : 0;
    const std::uint32_t num = is_zone ? offs[j] - begin : 0;
    std::uint32_t upto = num;
#pragma unroll
    for (std::uint32_t step = 1; step < kWarpSize; step *= 2) {
      const std::uint32_t lower = __shfl_up_sync(kAllLanes, upto, step);
      if (warp.lane >= step) upto += lower;
    }
    upto += before;
    before = __shfl_sync(kAllLanes, upto, kWarpSize - 1);
    for (; number < before; number += warp.num) {
      const std::uint32_t holder = __ffs(__ballot_sync(kAllLanes, number < upto)) - 1;
      const std::int32_t row = __shfl_sync(kAllLanes, begin + static_cast<std::int32_t>(number - (upto - num)), holder);
      zero_row(k, row, warp.lane);
    }
  }
}

}  // namespace epbuf::cuda

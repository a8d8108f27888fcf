// dispatch and combine backward: push rows into the peers' slots, zero the padding of the own zones.
#include "kernels.h"
#include "record.cuh"
#include "rows.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kThreads = 512;
constexpr std::uint32_t kBlocksPerSm = 2;
constexpr std::int64_t kMinWarps = 1024;  // below as many tokens, warps share rows
constexpr std::int32_t kVecs = 4;         // 16-byte loads in flight per lane, and as many of the next round
constexpr std::uint32_t kAllLanes = 0xFFFFFFFF;

struct Batch {
  uint4 vecs[kVecs];
};

// Vectors first, first + 32, .. below `end` of a row; zeros without a row.
__device__ __forceinline__ Batch load_batch(const uint4* row, std::int32_t first, std::int32_t end) {
  Batch batch;
#pragma unroll
  for (std::int32_t i = 0; i < kVecs; ++i) {
    const std::int32_t v = first + i * static_cast<std::int32_t>(kWarpSize);
    batch.vecs[i] = row != nullptr && v < end ? load_vec_once(row + v) : uint4{0, 0, 0, 0};
  }
  return batch;
}

__device__ __forceinline__ void store_batch(uint4* row, const Batch& batch, std::int32_t first, std::int32_t end) {
#pragma unroll
  for (std::int32_t i = 0; i < kVecs; ++i) {
    const std::int32_t v = first + i * static_cast<std::int32_t>(kWarpSize);
    if (v < end) store_vec(row + v, batch.vecs[i]);
  }
}

// Slots k = lane and lane + 32 of one token: where its row goes, 0 for no slot.
struct Destinations {
  std::uint64_t low, high;

  __device__ __forceinline__ std::uint64_t of(std::uint32_t k) const {
    const std::uint64_t from_low = __shfl_sync(kAllLanes, low, k % kWarpSize);
    return k < kWarpSize ? from_low : __shfl_sync(kAllLanes, high, k % kWarpSize);
  }
};

// Also sends the weight of the slot, if this warp is the one of the row that does.
__device__ __forceinline__ std::uint64_t destination(const PushKernel& k, std::int64_t token, std::int32_t topk,
                                                     bool sends) {
  if (topk >= k.num_topk) return 0;
  const std::int64_t slot = at<const std::int64_t>(k.slot_map)[token * k.num_topk + topk];
  if (slot == kNoSlot) return 0;
  const std::uint64_t window = at<const std::uint64_t>(k.call.peers)[slot >> kSlotRankShift];
  const std::int64_t row = slot & 0xFFFFFFFF;
  if (sends && k.weights_region >= 0) {
    const float* weights = at<const float>(k.weights) + token * k.weights_row_stride;
    at<float>(window, k.weights_region)[row] = k.weights != 0 ? weights[topk] : 1.0f;
  }
  return window + k.rows_region + row * k.row_bytes;
}

// One warp reads its part of a token's row once and writes it to every slot of the token.
__device__ __forceinline__ void push_token(const PushKernel& k, std::int64_t token, const Split& split,
                                           std::uint32_t lane) {
  const bool sends = split.begin == 0;
  const uint4* row = k.rows != 0 ? at<const uint4>(k.rows, token * k.row_stride_bytes) : nullptr;
  Batch next = load_batch(row, split.begin + lane, split.end);  // on its way while the slots are looked up
  const Destinations to{destination(k, token, lane, sends), destination(k, token, lane + kWarpSize, sends)};
  const std::uint64_t live = static_cast<std::uint64_t>(__ballot_sync(kAllLanes, to.high != 0)) << kWarpSize |
                             __ballot_sync(kAllLanes, to.low != 0);
  if (live == 0) return;
  const std::int32_t step = kVecs * kWarpSize;
  for (std::int32_t v = split.begin; v < split.end; v += step) {
    const Batch batch = next;
    next = load_batch(row, v + step + lane, split.end);
    for (std::uint64_t rest = live; rest != 0; rest &= rest - 1) {
      const std::uint64_t address = to.of(__ffsll(rest) - 1);
      store_batch(at<uint4>(address), batch, v + lane, split.end);
    }
  }
}

__device__ __forceinline__ void zero_row(const PushKernel& k, std::int64_t row, std::uint32_t lane) {
  uint4* to = at<uint4>(k.call.window, k.rows_region + row * k.row_bytes);
  const std::int32_t num_vecs = static_cast<std::int32_t>(k.row_bytes / kVecBytes);
#pragma unroll 4
  for (std::int32_t v = lane; v < num_vecs; v += kWarpSize) store_vec(to + v, uint4{0, 0, 0, 0});
  if (lane == 0 && k.weights_region >= 0) at<float>(k.call.window, k.weights_region)[row] = 0.0f;
}

// Padding rows are numbered through all zones; the warp takes numbers first, first + num_warps, ... Lane j looks at
// zone j of each 32: `begin` is its first padding row, `upto` the number after its last one.
__device__ void zero_padding(const PushKernel& k, std::uint32_t first, const GridWarp& warp) {
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

// Shapes: rows [T, H]; slot_map [T, K] int64; offs [L] int32, valid [L] int64; recv_tokens or grad_expert_out [C, H] of
// every rank: out. A warp takes every num_warps-th item: first the tokens (times splits), then the padding rows.
//
// Example, 3 warps, T = 2, K = 2, no splits, slots {{rank 0 row 1, rank 1 row 0}, {-1, rank 0 row 0}}, own offs = {4},
// valid = {2}: warp 0 stores x[0] into row 1 of rank 0 and row 0 of rank 1; warp 1 x[1] into row 0 of rank 0; items 2
// and 3 are the padding rows 2 and 3, zeroed by warp 2 and warp 0.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) push_kernel(const __grid_constant__ PushKernel k) {
  await_previous();
  release_next();
  if (warp_stops(k.call)) return;

  const GridWarp warp;
  const std::int32_t num_vecs = static_cast<std::int32_t>(k.row_bytes / kVecBytes);
  const std::uint32_t num_items = static_cast<std::uint32_t>(k.num_tokens) * k.num_splits;
  std::uint32_t item = warp.index;
  for (; item < num_items; item += warp.num) {
    push_token(k, item / k.num_splits, Split(num_vecs, k.num_splits, item % k.num_splits), warp.lane);
  }
  zero_padding(k, item - num_items, warp);
}

}  // namespace

void launch_push(const PushKernel& kernel, std::int64_t max_padding_rows, const Target& target) {
  PushKernel k = kernel;
  k.num_splits = num_splits_for(k.num_tokens, k.row_bytes, kMinWarps);
  const std::int64_t num_items = static_cast<std::int64_t>(k.num_tokens) * k.num_splits + max_padding_rows;
  const std::int64_t warps_per_block = kThreads / kWarpSize;
  const std::uint32_t num_blocks = target.fit((num_items + warps_per_block - 1) / warps_per_block, kBlocksPerSm);
  launch("push_kernel", push_kernel, {num_blocks, kThreads}, k, target.stream);
}

void load_dispatch() { load("push_kernel", push_kernel); }

}  // namespace epbuf::cuda

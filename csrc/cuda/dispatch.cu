// dispatch and combine backward: push rows as they are into the peers' slots, zero the padding of the own zones.
#include "batch.cuh"
#include "chain.cuh"
#include "kernels.h"
#include "push.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kThreads = 512;
constexpr std::uint32_t kBlocksPerSm = 2;  // that an SM holds
constexpr std::int64_t kMinWarps = 1024;   // below as many tokens, warps share rows
constexpr std::int64_t kMaxVecs = 256;     // of a row that a warp takes: short pieces end together

// Scales of rows that are encoded already, row by row at the source, to every slot of the token.
__device__ void push_scales(const PushKernel& k, std::int64_t token, const Destinations& to, std::uint64_t live,
                            std::uint32_t lane) {
  const auto* from = at<const std::uint8_t>(k.scales, token * k.scales_row_stride_bytes);
  const std::int32_t num_words = num_scale_words(k.format);
  for (std::int32_t begin = 0; begin < num_words; begin += kWarpSize) {
    const std::int32_t w = begin + static_cast<std::int32_t>(lane);
    std::uint32_t word = 0;
#pragma unroll
    for (std::int32_t i = 0; i < kScaleWordBytes; ++i) {
      const std::int64_t byte = static_cast<std::int64_t>(w) * kScaleWordBytes + i;
      if (k.scales != 0 && byte < k.format.scale_bytes) word |= static_cast<std::uint32_t>(from[byte]) << 8 * i;
    }
    for (std::uint64_t rest = live; rest != 0; rest &= rest - 1) {
      const std::uint64_t scales = to.scales_of(__ffsll(rest) - 1);
      if (w < num_words) at<std::uint32_t>(scales)[w] = word;
    }
  }
}

// A part of a token's row, and what of it is on its way before anything is known of the round.
struct Part {
  std::int64_t token;
  Split split;
  const uint4* row;
  Batch first;
  Slots slots;

  __device__ __forceinline__ Part(const PushKernel& k, std::uint32_t item, std::uint32_t lane)
      : token(item / k.num_splits),
        split(static_cast<std::int32_t>(k.row_bytes / kVecBytes), k.num_splits, item % k.num_splits),
        row(from_here(k.rows != 0 ? at<const uint4>(k.rows, token * k.row_stride_bytes) : nullptr)),
        first(load_batch(row, split.begin + lane, split.end)),
        slots(slots_of(k, token, lane)) {}
};

// One warp reads its part of a token's row once and writes it to every slot of the token.
template <bool kHasScales>
__device__ __forceinline__ void push_part(const PushKernel& k, const Part& part, std::uint32_t lane) {
  const bool sends = part.split.begin == 0;
  const float row_scale = kHasScales && k.row_scales != 0 ? at<const float>(k.row_scales)[part.token] : 0.0f;
  const Destinations to = destinations(k, part.token, part.slots, lane, row_scale, sends);
  const std::uint64_t live = to.live();
  if (live == 0) return;
  if (kHasScales && sends) push_scales(k, part.token, to, live, lane);
  Batch next = part.first;
  for (std::int32_t v = part.split.begin; v < part.split.end; v += kBatchStep) {
    const Batch batch = next;
    next = load_batch(part.row, v + kBatchStep + lane, part.split.end);
    for (std::uint64_t rest = live; rest != 0; rest &= rest - 1) {
      const std::uint64_t address = to.data_of(__ffsll(rest) - 1);
      store_batch(at<uint4>(address), batch, v + lane, part.split.end);
    }
  }
}

// Shapes: rows [T, row_bytes] as they travel, scales [T, scale_bytes]; slot_map [T, K] int64; offs [L] int32, valid [L]
// int64; recv_tokens or grad_expert_out [C, row_bytes] of every rank, and their scales: out. A warp takes every
// num_warps-th item: first the tokens (times splits), then the padding rows.
//
// Example, 3 warps, T = 2, K = 2, no splits, slots {{rank 0 row 1, rank 1 row 0}, {-1, rank 0 row 0}}, own offs = {4},
// valid = {2}: warp 0 stores x[0] into row 1 of rank 0 and row 0 of rank 1; warp 1 x[1] into row 0 of rank 0; items 2
// and 3 are the padding rows 2 and 3, zeroed by warp 2 and warp 0.
template <bool kHasScales>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) push_kernel(const __grid_constant__ PushKernel k) {
  prefetch_windows(k.call);
  await_previous();
  release_next();
  const Marks marks(k.call);
  const GridWarp warp;
  const std::uint32_t num_items = static_cast<std::uint32_t>(k.num_tokens) * k.num_splits;
  std::uint32_t item = warp.index;
  for (; item < num_items; item += warp.num) {
    const Part part(k, item, warp.lane);
    if (__any_sync(kAllLanes, marks.stop())) return;
    push_part<kHasScales>(k, part, warp.lane);
  }
  if (__any_sync(kAllLanes, marks.stop())) return;
  zero_padding(k, item - num_items, warp);
  clear_other_slots(k);
}

}  // namespace

void launch_push(const PushKernel& kernel, std::int64_t max_padding_rows, const Target& target) {
  PushKernel k = kernel;
  k.num_splits = num_splits_for(k.num_tokens, k.row_bytes, kMinWarps, kMaxVecs);
  const std::int64_t num_items = static_cast<std::int64_t>(k.num_tokens) * k.num_splits + max_padding_rows;
  const std::int64_t warps_per_block = kThreads / kWarpSize;
  const std::uint32_t num_blocks = target.fit((num_items + warps_per_block - 1) / warps_per_block, kUnlimited);
  const auto function = k.scales_region >= 0 ? push_kernel<true> : push_kernel<false>;
  launch("push_kernel", function, {num_blocks, kThreads}, k, target.stream);
}

void load_dispatch() {
  load("push_kernel", push_kernel<false>);
  load("push_kernel", push_kernel<true>);
}

}  // namespace epbuf::cuda

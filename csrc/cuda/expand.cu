// dispatch and combine backward with wire="dedup": rows that came once, into their slots on this rank. Local, but for
// the slots, which are read in the slot map of the rank that sent the row.
#include "batch.cuh"
#include "chain.cuh"
#include "kernels.h"
#include "record.cuh"
#include "wire.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kThreads = 512;
constexpr std::uint32_t kBlocksPerSm = 2;
constexpr std::int64_t kMinWarps = 1024;  // below as many tokens, warps share rows

// One warp copies its part of one row to the same place in the rows of `here` whose bits are set in `mask`.
__device__ __forceinline__ void copy_row(const WireKernel& k, std::uint64_t from, const RowsHere& here,
                                         std::uint64_t mask, const Split& split, std::uint32_t lane) {
  const auto* row = at<const uint4>(from);
  Batch next = load_batch(row, split.begin + lane, split.end);
#pragma unroll 1
  for (std::int32_t v = split.begin; v < split.end; v += kBatchStep) {
    const Batch batch = next;
    next = load_batch(row, v + kBatchStep + lane, split.end);
    for (std::uint64_t rest = mask; rest != 0; rest &= rest - 1) {
      store_batch(at<uint4>(k.rows, here.at(__ffsll(rest) - 1) * k.row_bytes), batch, v + lane, split.end);
    }
  }
}

// The same of its scales, all of them.
__device__ __forceinline__ void copy_scales(const WireKernel& k, std::uint64_t from, const RowsHere& here,
                                            std::uint64_t mask, std::uint32_t lane) {
  const auto* scales = at<const uint4>(from);
  const std::int32_t num_vecs = static_cast<std::int32_t>(k.scale_bytes / kVecBytes);
#pragma unroll 1
  for (std::int32_t first = 0; first < num_vecs; first += kWarpSize) {
    const std::int32_t v = first + static_cast<std::int32_t>(lane);
    const uint4 vec = v < num_vecs ? load_vec_once(scales + v) : uint4{0, 0, 0, 0};
    for (std::uint64_t rest = mask; rest != 0; rest &= rest - 1) {
      uint4* to = at<uint4>(k.scales, here.at(__ffsll(rest) - 1) * k.scale_bytes);
      if (v < num_vecs) store_vec(to + v, vec);
    }
  }
}

// Shapes: slot_map [T, K] int64 of every rank; wire_rows [R * T, wire row] of this one; recv_tokens or grad_expert_out
// [C, row_bytes] of this rank, and its scales row by row: out, where slots say so. A warp takes every num_warps-th of
// the tokens of all other ranks (times splits).
//
// Example, rank 1 of 2, T = 2, K = 3, slots of rank 0 {{rank 1 row 4, rank 0 row 0, rank 1 row 2}, {rank 1 row 5, -1,
// -1}}: row 0 of wire_rows is copied to rows 4 and 2; token 1 has one slot here, which rank 0 wrote itself.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) expand_kernel(const __grid_constant__ WireKernel k) {
  await_previous();
  release_next();
  if (warp_stops(k.call)) return;

  const GridWarp warp;
  const std::int32_t num_vecs = static_cast<std::int32_t>(k.row_bytes / kVecBytes);
  const std::uint32_t num_items = num_peer_items(k);
  RowsHere next = rows_of_item(k, warp.index, warp.lane);
  for (std::uint32_t item = warp.index; item < num_items; item += warp.num) {
    const RowsHere here = next;
    next = rows_of_item(k, item + warp.num, warp.lane);
    const PeerToken token(k, item);
    const std::uint64_t mask = here.mask();
    if (!goes_by_wire(token.rank, k.call.rank, __popcll(mask))) continue;
    const Split split(num_vecs, k.num_splits, static_cast<std::int32_t>(item % k.num_splits));
    const std::uint64_t from = k.wire + wire_offset(token.rank, token.token, k.max_tokens, k.wire_format.row_bytes);
    copy_row(k, from, here, mask, split, warp.lane);
    if (k.scale_bytes != 0 && split.begin == 0) {
      copy_scales(k, from + k.wire_format.scales_offset, here, mask, warp.lane);
    }
  }
}

}  // namespace

void launch_expand(const WireKernel& kernel, const Target& target) {
  WireKernel k = kernel;
  const std::int64_t num_tokens = static_cast<std::int64_t>(k.call.num_ranks - 1) * k.max_tokens;
  k.num_splits = num_splits_for(num_tokens, k.row_bytes, kMinWarps);
  const std::int64_t warps_per_block = kThreads / kWarpSize;
  const std::int64_t num_items = num_tokens * k.num_splits;
  const std::uint32_t num_blocks = target.fit((num_items + warps_per_block - 1) / warps_per_block, kBlocksPerSm);
  launch("expand_kernel", expand_kernel, {num_blocks, kThreads}, k, target.stream);
}

void load_expand() { load("expand_kernel", expand_kernel); }

}  // namespace epbuf::cuda

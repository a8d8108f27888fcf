// combine and dispatch backward with combine_order="by_rank": each rank adds its rows of a token of another one, and
// that one adds what it gets.
#include "chain.cuh"
#include "kernels.h"
#include "pull.cuh"
#include "record.cuh"
#include "sum.cuh"
#include "wire.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kAddThreads = 256;
constexpr std::uint32_t kAddBlocksPerSm = 4;
constexpr std::uint32_t kAddWarps = kAddThreads / kWarpSize;
constexpr std::int64_t kAddMinWarps = 1024;  // below as many tokens, warps share rows
constexpr std::int64_t kAddMaxVecs = 256;    // of a row that a warp takes: each warp fetches the token's slots
constexpr std::int32_t kAddends = 4;         // of a token in flight per lane

// One warp: where a token's rows on this rank are, in k order, into `rows`.
__device__ __forceinline__ void list_rows(const WireKernel& k, const RowsHere& here, std::uint64_t mask,
                                          std::uint32_t lane, std::uint64_t* rows) {
  const std::uint64_t low = 1ull << lane, high = low << kWarpSize;
  if (here.low >= 0) rows[__popcll(mask & (low - 1))] = k.rows + here.low * k.row_bytes;
  if (here.high >= 0) rows[__popcll(mask & (high - 1))] = k.rows + here.high * k.row_bytes;
  __syncwarp();
}

// Shapes: slot_map [T, K] int64 of every rank; expert_out or grad_recv_tokens [C, H] of this one; wire_rows [R * T,
// wire row] of this rank: out, a row for each token of another rank that has several rows here.
//
// Example, rank 1 of 2, T = 1, K = 3, slots of rank 0 {rank 1 row 4, rank 0 row 0, rank 1 row 2}, H = 2, rows 4 and 2
// {1, 2} and {10, 20}: row 0 of wire_rows becomes {11, 22}.
template <typename Dtype>
__global__ void __launch_bounds__(kAddThreads, kAddBlocksPerSm) add_kernel(const __grid_constant__ WireKernel k) {
  __shared__ std::uint64_t sources[kAddWarps][kMaxTopk];
  await_previous();
  release_next();
  if (warp_skips(k.call)) return;

  const GridWarp warp;
  std::uint64_t* rows = sources[threadIdx.x / kWarpSize];
  const std::int32_t num_vecs = static_cast<std::int32_t>(k.row_bytes / kVecBytes);
  const std::uint32_t num_items = num_peer_items(k);
  RowsHere next = rows_of_item(k, warp.index, warp.lane);
  for (std::uint32_t item = warp.index; item < num_items; item += warp.num) {
    const RowsHere here = next;
    next = rows_of_item(k, item + warp.num, warp.lane);
    const PeerToken token(k, item);
    const std::uint64_t mask = here.mask();
    const std::int32_t num = __popcll(mask);
    if (!goes_by_wire(token.rank, k.call.rank, num)) continue;
    list_rows(k, here, mask, warp.lane, rows);
    const Split split(num_vecs, k.num_splits, static_cast<std::int32_t>(item % k.num_splits));
    uint4* sum = at<uint4>(k.wire, wire_offset(token.rank, token.token, k.max_tokens, k.wire_format.row_bytes));
    for (std::int32_t v = split.begin + warp.lane; v < split.end; v += kWarpSize) {
      store_vec(sum + v, sum_vec<Dtype>(rows, num, v));
    }
    __syncwarp();  // `rows` is read to the end before the next token's
  }
}

// What a token is the sum of, in rank order; those in [own_begin, own_end) are this rank's rows, whose sum is rounded.
struct Addends {
  std::int32_t num, own_begin, own_end;
};

// One slot as an addend. Of several slots on another rank the first stands for all.
struct Addend {
  std::int64_t slot;
  Company company;
  std::int32_t position = 0;

  __device__ __forceinline__ bool counts(std::int32_t own_rank) const {
    return slot != kNoSlot && (rank_of(slot) == own_rank || company.before == 0);
  }
  __device__ __forceinline__ void meet(std::int64_t other, bool is_lower) {
    const bool is_same_rank = rank_of(other) == rank_of(slot);
    position += rank_of(other) < rank_of(slot) || (is_same_rank && is_lower) ? 1 : 0;
  }
  __device__ __forceinline__ std::uint64_t address(const PullKernel& k, std::int64_t token) const {
    const std::int32_t rank = rank_of(slot);
    const std::uint64_t window = at<const std::uint64_t>(k.call.peers)[rank];
    if (!goes_by_wire(k.call.rank, rank, company.num)) return window + k.rows_region + row_of(slot) * k.row_bytes;
    return window + k.wire_region + wire_offset(k.call.rank, token, k.max_tokens, k.wire_row_bytes);
  }
};

// One warp: the addresses of a token's addends, in order, into `rows`.
__device__ __forceinline__ Addends list_addends(const PullKernel& k, std::int64_t token, const Slots& slots,
                                                std::uint32_t lane, std::uint64_t* rows) {
  const Companies companies(slots, k.num_topk, lane);
  Addend low{slots.low, companies.low}, high{slots.high, companies.high};
  const bool low_counts = low.counts(k.call.rank), high_counts = high.counts(k.call.rank);
  const std::uint64_t counting = ballot_topk(low_counts, high_counts);
  std::int32_t own_begin = 0;
  for (std::uint64_t rest = counting; rest != 0; rest &= rest - 1) {
    const std::int32_t topk = __ffsll(rest) - 1;
    const std::int64_t other = slots.at(topk);
    low.meet(other, topk < static_cast<std::int32_t>(lane));
    high.meet(other, topk < static_cast<std::int32_t>(lane + kWarpSize));
    own_begin += rank_of(other) < k.call.rank ? 1 : 0;
  }
  if (low_counts) rows[low.position] = low.address(k, token);
  if (high_counts) rows[high.position] = high.address(k, token);
  __syncwarp();
  return {__popcll(counting), own_begin, own_begin + __popcll(slots.on(k.call.rank))};
}

// Adds vector `v` of the addends, as sum_vec does; the sum of the own rows is rounded before it is added.
template <typename Dtype>
__device__ __forceinline__ uint4 sum_by_rank(const std::uint64_t* rows, const Addends& addends, std::int32_t v) {
  constexpr int kNum = Elements<Dtype>::kNum;
  float sum[kNum], own[kNum];
#pragma unroll
  for (int i = 0; i < kNum; ++i) {
    sum[i] = addends.num == 0 ? 0.0f : -0.0f;
    own[i] = -0.0f;
  }
  for (std::int32_t first = 0; first < addends.num; first += kAddends) {
    uint4 vecs[kAddends];
#pragma unroll
    for (std::int32_t r = 0; r < kAddends; ++r) {
      if (first + r < addends.num) vecs[r] = load_vec(at<const uint4>(rows[first + r]) + v);
    }
#pragma unroll
    for (std::int32_t r = 0; r < kAddends; ++r) {
      if (first + r >= addends.num) break;
      const bool is_own = first + r >= addends.own_begin && first + r < addends.own_end;
      float f[kNum];
      Elements<Dtype>::unpack(vecs[r], f);
      if (is_own) {
#pragma unroll
        for (int i = 0; i < kNum; ++i) own[i] += f[i];
        if (first + r + 1 != addends.own_end) continue;
        Elements<Dtype>::unpack(Elements<Dtype>::pack(own), f);
      }
#pragma unroll
      for (int i = 0; i < kNum; ++i) sum[i] += f[i];
    }
  }
  return Elements<Dtype>::pack(sum);
}

__device__ __forceinline__ void pull_weight(const PullKernel& k, std::int64_t token, std::uint32_t topk,
                                            std::int64_t slot) {
  if (static_cast<std::int32_t>(topk) >= k.num_topk) return;
  const float* weights = nullptr;
  if (slot != kNoSlot)
    weights = at<const float>(at<const std::uint64_t>(k.call.peers)[rank_of(slot)], k.weights_region);
  at<float>(k.out_weights)[token * k.num_topk + topk] = weights != nullptr ? weights[row_of(slot)] : 0.0f;
}

// Shapes: slot_map [T, K] int64; expert_out or grad_recv_tokens [C, H] and wire_rows [R * T, wire row] of every rank;
// out [T, H]; out_weights [T, K] float32.
//
// Example, rank 0 of 3, T = 1, K = 5, slots {rank 2 row 0, rank 0 row 1, rank 1 row 7, rank 2 row 3, rank 0 row 4}:
// addends are rows 1 and 4 of this rank, whose sum is rounded, row 7 of rank 1, and row 0 of wire_rows of rank 2.
template <typename Dtype>
__global__ void __launch_bounds__(kPullThreads, kPullBlocksPerSm)
    pull_by_rank_kernel(const __grid_constant__ PullKernel k) {
  __shared__ std::uint64_t sources[kPullWarps][kMaxTopk];
  await_previous();
  release_next();
  if (warp_stops(k.call)) return;

  const GridWarp warp;
  std::uint64_t* rows = sources[threadIdx.x / kWarpSize];
  const std::int32_t num_vecs = static_cast<std::int32_t>(k.row_bytes / kVecBytes);
  const std::uint32_t num_items = static_cast<std::uint32_t>(k.num_tokens) * k.num_splits;
  for (std::uint32_t item = warp.index; item < num_items; item += warp.num) {
    const std::int64_t token = item / k.num_splits;
    const Split split(num_vecs, k.num_splits, item % k.num_splits);
    const Slots slots = Slots::load(at<const std::int64_t>(k.slot_map) + token * k.num_topk, k.num_topk, warp.lane);
    if (k.out_weights != 0 && split.begin == 0) {
      pull_weight(k, token, warp.lane, slots.low);
      pull_weight(k, token, warp.lane + kWarpSize, slots.high);
    }
    if (k.out == 0) continue;
    const Addends addends = list_addends(k, token, slots, warp.lane, rows);
    uint4* out = at<uint4>(k.out, token * k.out_row_stride_bytes);
    for (std::int32_t v = split.begin + warp.lane; v < split.end; v += kWarpSize) {
      store_vec(out + v, sum_by_rank<Dtype>(rows, addends, v));
    }
    __syncwarp();  // `rows` is read to the end before the next token's
  }
}

void (*add_of(TokenDtype dtype))(WireKernel) {
  return dtype == kBf16 ? add_kernel<Bf16> : dtype == kFp16 ? add_kernel<Fp16> : add_kernel<Fp32>;
}

void (*pull_of(TokenDtype dtype))(PullKernel) {
  return dtype == kBf16   ? pull_by_rank_kernel<Bf16>
         : dtype == kFp16 ? pull_by_rank_kernel<Fp16>
                          : pull_by_rank_kernel<Fp32>;
}

}  // namespace

void launch_add(const WireKernel& kernel, TokenDtype dtype, const Target& target) {
  WireKernel k = kernel;
  const std::int64_t num_tokens = static_cast<std::int64_t>(k.call.num_ranks - 1) * k.max_tokens;
  k.num_splits = num_splits_for(num_tokens, k.row_bytes, kAddMinWarps, kAddMaxVecs);
  const std::int64_t num_warps = num_tokens * k.num_splits;
  const std::uint32_t num_blocks = target.fit((num_warps + kAddWarps - 1) / kAddWarps, kAddBlocksPerSm);
  launch("add_kernel", add_of(dtype), {num_blocks, kAddThreads}, k, target.stream);
}

void launch_pull_by_rank(const PullKernel& kernel, TokenDtype dtype, const Target& target) {
  launch_pull_kernel("pull_by_rank_kernel", pull_of(dtype), kernel, target);
}

void load_by_rank() {
  for (const TokenDtype dtype : {kBf16, kFp16, kFp32}) {
    load("add_kernel", add_of(dtype));
    load("pull_by_rank_kernel", pull_of(dtype));
  }
}

}  // namespace epbuf::cuda

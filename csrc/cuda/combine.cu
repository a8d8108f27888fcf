// combine and dispatch backward: stage own rows, pull the peers'.
#include "kernels.h"
#include "pull.cuh"
#include "record.cuh"
#include "slot.cuh"
#include "sum.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kStageThreads = 512;
constexpr std::uint32_t kStageBlocksPerSm = 4;       // that an SM holds
constexpr std::uint32_t kStageGridBlocksPerSm = 32;  // the host does not know how many rows there are
constexpr std::int32_t kStageVecs = 2;               // 16-byte loads in flight per lane
constexpr std::int64_t kStageMaxVecs = 448;          // of a row that a warp takes; few tokens lose with less

template <typename Dtype>
__device__ __forceinline__ uint4 scale(uint4 v, float factor) {
  float f[Elements<Dtype>::kNum];
  Elements<Dtype>::unpack(v, f);
#pragma unroll
  for (int i = 0; i < Elements<Dtype>::kNum; ++i) f[i] *= factor;
  return Elements<Dtype>::pack(f);
}

template <typename Dtype>
__device__ __forceinline__ void stage_row(const StageKernel& k, std::int64_t row, const Split& split,
                                          std::uint32_t lane) {
  uint4* to = at<uint4>(k.staged_rows, row * k.row_bytes);
  const uint4* from = at<const uint4>(k.rows, row * k.row_stride_bytes);
  const bool is_copy = k.rows_source == kSourceTensor;
  const float factor = k.factors != 0 ? at<const float>(k.factors)[row] : 1.0f;
  for (std::int32_t begin = split.begin + lane; begin < split.end; begin += kStageVecs * kWarpSize) {
    uint4 vecs[kStageVecs];
#pragma unroll
    for (std::int32_t i = 0; i < kStageVecs; ++i) {
      const std::int32_t v = begin + i * static_cast<std::int32_t>(kWarpSize);
      vecs[i] = is_copy && v < split.end ? load_vec(from + v) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (std::int32_t i = 0; i < kStageVecs; ++i) {
      const std::int32_t v = begin + i * static_cast<std::int32_t>(kWarpSize);
      if (v < split.end) store_vec(to + v, k.factors != 0 ? scale<Dtype>(vecs[i], factor) : vecs[i]);
    }
  }
}

// Shapes: rows [C, H] token dtype; staged_rows [C, H] of this rank: out; rows at or past offs[-1] are not touched.
// In the backward also weights [C] float32 to staged_weights.
//
// Example, H = 2, offs[-1] = 2, rows = {{1, 2}, {3, 4}, {NaN, NaN}}, factors = {0.5, 2, _}: staged {{0.5, 1}, {6, 8}}.
template <typename Dtype>
__global__ void __launch_bounds__(kStageThreads, kStageBlocksPerSm)
    stage_kernel(const __grid_constant__ StageKernel k) {
  await_previous();
  release_next();
  const Marks marks(k.call);
  const GridWarp warp;
  const std::int64_t num_rows = *at<const std::int32_t>(k.num_rows);
  if (__any_sync(kAllLanes, marks.skip(k.call))) return;

  if (k.weights_source != kSourceWindow && k.staged_weights != 0) {
    auto* to = at<float>(k.staged_weights);
    for (std::int64_t row = warp.index * kWarpSize + warp.lane; row < num_rows; row += warp.num * kWarpSize) {
      to[row] = k.weights_source == kSourceTensor ? at<const float>(k.weights)[row] : 0.0f;
    }
  }
  if (k.rows_source == kSourceWindow) return;

  const std::int32_t num_vecs = static_cast<std::int32_t>(k.row_bytes / kVecBytes);
  for (std::int64_t item = warp.index; item < num_rows * k.num_splits; item += warp.num) {
    stage_row<Dtype>(k, item / k.num_splits, Split(num_vecs, k.num_splits, item % k.num_splits), warp.lane);
  }
  if (warp.index == 0 && warp.lane == 0) {
    auto* staged_bytes = reinterpret_cast<unsigned long long*>(&control_of(k.call)->staged_bytes);
    atomicAdd(staged_bytes, static_cast<unsigned long long>(num_rows * k.row_bytes));
  }
}

struct Source {
  std::uint64_t row;  // 0: no slot
  float weight;
};

// Route wrote the slots, two kernels ahead at least: a pull may ask for them before await_previous, past the
// first-level cache, which may hold older ones.
__device__ __forceinline__ std::int64_t load_slot(const PullKernel& k, std::int64_t token, std::int32_t topk) {
  if (topk >= k.num_topk) return kNoSlot;
  return load_relaxed_device(at<const std::int64_t>(k.slot_map) + token * k.num_topk + topk);
}

__device__ __forceinline__ Source source(const PullKernel& k, std::int64_t slot, bool wants_weight) {
  if (slot == kNoSlot) return {0, 0.0f};
  const std::uint64_t window = at<const std::uint64_t>(k.call.peers)[rank_of(slot)];
  const std::int64_t row = row_of(slot);
  const float weight = wants_weight ? at<const float>(window, k.weights_region)[row] : 0.0f;
  return {window + k.rows_region + row * k.row_bytes, weight};
}

// One warp: the addresses of a token's live rows, in k order, into `rows`; its weights into out_weights. Returns how
// many. `slot`: that of k = lane.
__device__ __forceinline__ std::int32_t gather_sources(const PullKernel& k, std::int64_t token, std::int64_t slot,
                                                       bool wants_weights, std::uint32_t lane, std::uint64_t* rows) {
  std::int32_t num = 0;
  for (std::int32_t first = 0; first < k.num_topk; first += kWarpSize) {
    const std::int32_t topk = first + static_cast<std::int32_t>(lane);
    const Source from = source(k, first == 0 ? slot : load_slot(k, token, topk), wants_weights);
    if (wants_weights && topk < k.num_topk) at<float>(k.out_weights)[token * k.num_topk + topk] = from.weight;
    const std::uint32_t live = __ballot_sync(kAllLanes, from.row != 0);
    if (from.row != 0) rows[num + __popc(live & ((1u << lane) - 1))] = from.row;
    num += __popc(live);
  }
  __syncwarp();
  return num;
}

// Shapes: slot_map [T, K] int64; expert_out or grad_recv_tokens [C, H] of every rank; out [T, H]; out_weights [T, K]
// float32.
//
// Example, T = 1, K = 3, slots {rank 1 row 4, -1, rank 0 row 2}, H = 2, rank 1 row 4 = {1, 2}, rank 0 row 2 = {10, 20}:
// out = {11, 22}; with weights 0.5 at rank 1 row 4 and 0.25 at rank 0 row 2, out_weights = {0.5, 0, 0.25}.
template <typename Dtype>
__global__ void __launch_bounds__(kPullThreads, kPullBlocksPerSm) pull_kernel(const __grid_constant__ PullKernel k) {
  __shared__ std::uint64_t sources[kPullWarps][kMaxTopk];
  const GridWarp warp;
  const std::uint32_t num_items = static_cast<std::uint32_t>(k.num_tokens) * k.num_splits;
  const auto slot_of = [&](std::uint32_t item) {
    return item < num_items ? load_slot(k, item / k.num_splits, static_cast<std::int32_t>(warp.lane)) : kNoSlot;
  };
  prefetch_windows(k.call);
  std::int64_t next = slot_of(warp.index);
  await_previous();
  release_next();
  if (warp_stops(k.call)) return;

  std::uint64_t* rows = sources[threadIdx.x / kWarpSize];
  const std::int32_t num_vecs = static_cast<std::int32_t>(k.row_bytes / kVecBytes);
  for (std::uint32_t item = warp.index; item < num_items; item += warp.num) {
    const std::int64_t slot = next;
    next = slot_of(item + warp.num);
    const std::int64_t token = item / k.num_splits;
    const Split split(num_vecs, k.num_splits, item % k.num_splits);
    const std::int32_t num = gather_sources(k, token, slot, k.out_weights != 0 && split.begin == 0, warp.lane, rows);
    if (k.out != 0) {
      uint4* out = at<uint4>(k.out, token * k.out_row_stride_bytes);
      for (std::int32_t v = split.begin + warp.lane; v < split.end; v += kWarpSize) {
        store_vec(out + v, sum_vec<Dtype>(rows, num, v));
      }
    }
    __syncwarp();  // `rows` is read to the end before the next token's
  }
}

void (*stage_of(TokenDtype dtype))(StageKernel) {
  return dtype == kBf16 ? stage_kernel<Bf16> : dtype == kFp16 ? stage_kernel<Fp16> : stage_kernel<Fp32>;
}

void (*pull_of(TokenDtype dtype))(PullKernel) {
  return dtype == kBf16 ? pull_kernel<Bf16> : dtype == kFp16 ? pull_kernel<Fp16> : pull_kernel<Fp32>;
}

}  // namespace

void launch_stage(const StageKernel& kernel, TokenDtype dtype, std::int64_t max_rows, const Target& target) {
  const std::int64_t warps_per_block = kStageThreads / kWarpSize;
  StageKernel k = kernel;
  k.num_splits = num_splits_for(max_rows, k.row_bytes, target.num_sms * warps_per_block, kStageMaxVecs);
  const std::int64_t num_warps = max_rows * k.num_splits;
  const std::uint32_t num_blocks =
      target.fit((num_warps + warps_per_block - 1) / warps_per_block, kStageGridBlocksPerSm);
  launch("stage_kernel", stage_of(dtype), {num_blocks, kStageThreads}, k, target.stream);
}

void launch_pull(const PullKernel& kernel, TokenDtype dtype, const Target& target) {
  launch_pull_kernel("pull_kernel", pull_of(dtype), kernel, target);
}

void load_combine() {
  for (const TokenDtype dtype : {kBf16, kFp16, kFp32}) {
    load("stage_kernel", stage_of(dtype));
    load("pull_kernel", pull_of(dtype));
  }
}

}  // namespace epbuf::cuda

// All of route in one launch, where the ids fit in the shared memory of a cluster: its blocks count them, the first one
// exchanges the counts, and all take slots.
#include <cooperative_groups.h>

#include "exchange.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::size_t kMaxFusedBytes = 64 * 1024;

using Key = std::uint16_t;
static_assert(kMaxFusedBytes / sizeof(std::uint32_t) / kCountWarps < 0xFFFF, "a key holds every expert that fits");

struct FusedShared : ExchangeShared {
  std::uint32_t* counts;  // [count warps, E] rows of each warp's slots, then of the block's warps before
  std::uint32_t* own;     // [E] rows of the block's slots
  Key* keys;              // [slots of the block]
};

// Slots that one warp of the cluster counts and places: whole groups of 32.
__host__ __device__ inline std::int32_t slots_per_warp(const KernelIds& ids, std::uint32_t num_blocks) {
  const std::int32_t num_warps = static_cast<std::int32_t>(num_blocks * kCountWarps);
  const std::int32_t per_warp = (ids.num_tokens * ids.num_topk + num_warps - 1) / num_warps;
  return (per_warp + static_cast<std::int32_t>(kWarpSize) - 1) / kWarpSize * kWarpSize;
}

// The slots of a count warp, numbered in the block and from there on in the whole.
struct WarpSlots {
  std::int32_t in_block, first, num;

  __device__ explicit WarpSlots(const KernelIds& ids) {
    const std::int32_t per_warp = slots_per_warp(ids, gridDim.x);
    in_block = warp_index() * per_warp;
    first = static_cast<std::int32_t>(blockIdx.x * kCountWarps) * per_warp + in_block;
    num = max(0, min(per_warp, ids.num_tokens * ids.num_topk - first));
  }
  __device__ std::int32_t num_of_live(const KernelIds& ids) const {
    return max(0, min(num, num_live(ids) * ids.num_topk - first));
  }
};

// Returns the bytes used.
__host__ __device__ std::size_t carve(void* shared, const KernelIds& ids, std::int64_t num_experts,
                                      std::int64_t num_ranks, std::uint32_t num_blocks, FusedShared* memory) {
  Pieces pieces;
  take_exchange(&pieces, shared, num_experts, num_ranks, memory);
  memory->counts = pieces.take<std::uint32_t>(shared, kCountWarps * num_experts);
  memory->own = pieces.take<std::uint32_t>(shared, num_experts);
  memory->keys = pieces.take<Key>(shared, kCountWarps * slots_per_warp(ids, num_blocks));
  return pieces.used;
}

// One count warp: the keys of its slots, and how many there are of each expert.
__device__ void count_slots(const RouteExchangeKernel& k, const FusedShared& memory, Notes* notes) {
  std::uint32_t* counts = memory.counts + warp_index() * k.num_experts;
  const WarpSlots slots(k.ids);
  const std::int32_t num = slots.num_of_live(k.ids);
  IdWalk walk(k.ids, slots.first + lane_index());
#pragma unroll 1
  for (std::int32_t begin = lane_index(); begin < num; begin += kBatch * kWarpSize) {
    std::int64_t ids[kBatch];
#pragma unroll
    for (std::int32_t j = 0; j < kBatch; ++j)
      ids[j] = walk.next(begin + j * static_cast<std::int32_t>(kWarpSize) < num);
#pragma unroll
    for (std::int32_t j = 0; j < kBatch; ++j) {
      const std::int32_t i = begin + j * static_cast<std::int32_t>(kWarpSize);
      const std::uint32_t key = key_of(ids[j], k.num_experts);
      if (i < num) memory.keys[slots.in_block + i] = static_cast<Key>(key);
      if (key != kNoExpert) atomicAdd(&counts[key], 1u);
      if (ids[j] >= k.num_experts) notes->own.note(slots.first + i);
    }
  }
}

// The block's rows for every expert; each warp's counts become the sums of the warps before it.
__device__ void sum_warps(const RouteExchangeKernel& k, const FusedShared& memory) {
#pragma unroll 1
  for (std::int32_t e = threadIdx.x; e < k.num_experts; e += blockDim.x) {
    std::uint32_t before = 0;
#pragma unroll
    for (std::uint32_t warp = 0; warp < kCountWarps; ++warp) {
      std::uint32_t* count = &memory.counts[warp * k.num_experts + e];
      const std::uint32_t own = *count;
      *count = before;
      before += own;
    }
    memory.own[e] = before;
  }
}

// One count warp: its slots.
__device__ void place_slots(const RouteExchangeKernel& k, const FusedShared& memory) {
  const WarpSlots mine(k.ids);
  const std::int32_t num = mine.num_of_live(k.ids);
  auto* slots = at<std::int64_t>(k.slot_map) + mine.first;
  std::uint32_t* next = memory.counts + warp_index() * k.num_experts;
  take_slots(k, memory.keys + mine.in_block, memory.base, next, num, slots);
#pragma unroll 1
  for (std::int32_t i = num + lane_index(); i < mine.num; i += kWarpSize) slots[i] = kNoSlot;
}

// The speaker: the bad ids of all blocks.
__device__ BadIds sum_bad_ids(Notes* notes) {
  const auto cluster = cooperative_groups::this_cluster();
  BadIds bad = kNoBadIds;
  if (lane_index() < static_cast<std::int32_t>(gridDim.x)) bad = cluster.map_shared_rank(notes, lane_index())->own;
  if (!__any_sync(kAllLanes, bad.num != 0)) return kNoBadIds;
#pragma unroll 1
  for (std::uint32_t step = kWarpSize / 2; step > 0; step /= 2) {
    bad.num += __shfl_xor_sync(kAllLanes, bad.num, step);
    bad.first = min(bad.first, __shfl_xor_sync(kAllLanes, bad.first, step));
  }
  return bad;
}

// The first block: adds up the blocks and exchanges the sums. False: no slots are taken.
__device__ bool exchange_sums(const RouteExchangeKernel& k, const FusedShared& memory, std::uint32_t round,
                              Notes* notes) {
  const auto cluster = cooperative_groups::this_cluster();
  const BadIds bad = is_speaker() ? sum_bad_ids(notes) : kNoBadIds;
  publish_round(k, memory, round, bad, notes, [&](std::int32_t e) {
    std::uint32_t count = 0;
#pragma unroll
    for (std::uint32_t block = 0; block < kMaxCluster; ++block) {
      if (block < gridDim.x) count += cluster.map_shared_rank(memory.own, block)[e];
    }
    return count;
  });
  return finish_round(k, memory, round, nullptr, notes);
}

// The other blocks: rows of the lower blocks' slots into `base`.
__device__ void sum_lower_blocks(const RouteExchangeKernel& k, const FusedShared& memory) {
  const auto cluster = cooperative_groups::this_cluster();
#pragma unroll 1
  for (std::int32_t e = threadIdx.x; e < k.num_experts; e += blockDim.x) {
    std::uint32_t count = 0;
#pragma unroll
    for (std::uint32_t block = 0; block < kMaxCluster; ++block) {
      if (block < blockIdx.x) count += cluster.map_shared_rank(memory.own, block)[e];
    }
    memory.base[e] = count;
  }
}

// The first block of the cluster talks to the peers; the others wait at a barrier.
__device__ void route(const RouteExchangeKernel& k, const FusedShared& memory, std::uint32_t round, Notes* notes) {
  const auto cluster = cooperative_groups::this_cluster();
  const bool leads = blockIdx.x == 0;
  if (!leads) release_next();
  bool opened = true;
  if (!is_speaker()) count_slots(k, memory, notes);
  if (is_speaker() && leads) opened = open_round(k, notes);
  if (leads) fence_release_system();  // for what every thread publishes, while others still count
  opened = __syncthreads_and(opened);
  sum_warps(k, memory);
  meet();

  if (!leads) sum_lower_blocks(k, memory);
  const bool places = leads && opened && exchange_sums(k, memory, round, notes);
  if (leads && threadIdx.x == 0) notes->places = places;
  meet();

  const bool takes = cluster.map_shared_rank(notes, 0)->places;
  if (takes && !leads) {
    const std::int64_t* base = cluster.map_shared_rank(memory.base, 0);
#pragma unroll 1
    for (std::int32_t e = threadIdx.x; e < k.num_experts; e += blockDim.x) memory.base[e] += base[e];
  }
  if (gridDim.x != 1) {
    __syncthreads();
    cluster.barrier_arrive();
  }
  if (takes && !is_speaker()) place_slots(k, memory);
  if (gridDim.x != 1) cluster.barrier_wait();  // the first block's memory lasts until all have read it
}

// Shapes: a cluster of up to 8 blocks, whose first one talks. topk_idx [T, K]; count_cells [R, E + 8] of every rank;
// slot_map [T, K] int64, offs [L] int32, counts [2 L + 1] int64, overflow [1] float32: out. Each count warp has a
// contiguous part of the slots. For examples see route_exchange_kernel, of zones, and route_slots_kernel, of slots.
__global__ void __launch_bounds__(kExchangeThreads, 2)
    route_fused_kernel(const __grid_constant__ RouteExchangeKernel k) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Notes notes;
  FusedShared memory;
  carve(shared, k.ids, k.num_experts, k.call.num_ranks, gridDim.x, &memory);
  prepare(k, memory, &notes, memory.counts, kCountWarps * k.num_experts);
  await_previous();
  route(k, memory, round_of(k), &notes);
}

std::size_t shared_bytes(const RouteExchangeKernel& k, std::uint32_t num_blocks) {
  FusedShared memory;
  return carve(nullptr, k.ids, k.num_experts, k.call.num_ranks, num_blocks, &memory);
}

}  // namespace

bool fits_fused_route(const RouteExchangeKernel& kernel, const Target& target) {
  return shared_bytes(kernel, num_cluster_blocks(kernel.ids, target)) <= kMaxFusedBytes;
}

void launch_route_fused(const RouteExchangeKernel& kernel, const Target& target) {
  const std::uint32_t num_blocks = num_cluster_blocks(kernel.ids, target);
  const Grid grid{num_blocks, kExchangeThreads, shared_bytes(kernel, num_blocks), num_blocks != 1};
  launch("route_fused_kernel", route_fused_kernel, grid, kernel, target.stream);
}

void load_route_fused() {
  load("route_fused_kernel", route_fused_kernel);
  allow_all_shared("route_fused_kernel", route_fused_kernel);
}

}  // namespace epbuf::cuda

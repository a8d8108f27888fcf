// route for many tokens, before and after the exchange: count the experts of every chunk, turn its ids into slots. No
// sort, and the same slots whatever the timing.
#include "chain.cuh"
#include "record.cuh"
#include "route.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kCountThreads = 256;
constexpr std::uint32_t kSlotsThreads = 128;
constexpr std::uint32_t kBlocksPerSm = 8;

// Tokens of a chunk: [first, first + num), and how many of them are live.
struct Chunk {
  std::int32_t first, num, num_live;
};

__device__ Chunk chunk_of(const KernelIds& ids, std::int32_t chunk, std::int32_t chunk_tokens) {
  const std::int32_t first = chunk * chunk_tokens;
  const std::int32_t live = num_live(ids) - first;
  const std::int32_t num = min(chunk_tokens, ids.num_tokens - first);
  return {first, num, max(0, min(num, live))};
}

// One block: the experts of a chunk into `histogram` [E], which is zero, and ids >= E into bad_ids.
__device__ void count_chunk(const RouteCountKernel& k, std::int32_t chunk_idx, std::uint32_t* histogram) {
  const Chunk chunk = chunk_of(k.ids, chunk_idx, k.chunk_tokens);
  for (std::int32_t i = threadIdx.x; i < chunk.num_live * k.ids.num_topk; i += blockDim.x) {
    const std::int32_t slot = chunk.first * k.ids.num_topk + i;
    const std::int64_t id = load_id(k.ids, slot);
    const std::uint32_t key = key_of(id, k.num_experts);
    if (key != kNoExpert) atomicAdd(&histogram[key], 1u);
    if (id >= k.num_experts) at<BadIds>(k.bad_ids)->note(slot);
  }
}

// Shapes: topk_idx [T, K] int32 or int64; route_scratch [chunks, E] int32: out. A block for each chunk, in turns.
//
// Example, E = 4, K = 2, chunks of 2 tokens, topk_idx = {{0, 3}, {3, 9}, {1, -1}}: row 0 is {1, 0, 0, 2} and bad_ids
// becomes {1, 3} (one id >= 4, first at token 1, k 1); row 1 is {0, 1, 0, 0}.
__global__ void __launch_bounds__(kCountThreads) route_count_kernel(const __grid_constant__ RouteCountKernel k) {
  extern __shared__ __align__(16) std::int64_t shared[];  // histogram uint32 [E]
  await_previous();
  release_next();
  auto* histogram = reinterpret_cast<std::uint32_t*>(shared);
  for (std::int32_t e = threadIdx.x; e < k.num_experts; e += blockDim.x) histogram[e] = 0;
  if (block_skips(k.call)) return;  // a barrier too

  for (std::int32_t chunk = blockIdx.x; chunk < num_chunks_of(k.ids, k.chunk_tokens); chunk += gridDim.x) {
    count_chunk(k, chunk, histogram);
    __syncthreads();
    auto* counts = at<std::uint32_t>(k.route_scratch) + static_cast<std::int64_t>(chunk) * k.num_experts;
    for (std::int32_t e = threadIdx.x; e < k.num_experts; e += blockDim.x) {
      counts[e] = histogram[e];
      histogram[e] = 0;
    }
    __syncthreads();
  }
}

struct SlotsShared {
  std::int64_t* base;   // [E] the slot of the chunk's first token for an expert
  std::uint32_t* next;  // [E] slots taken from there on
  std::uint32_t* keys;  // [chunk_tokens * K]
};

// One block: the slots of a chunk. The ranks within the chunk are one warp's work; the others fetch for it.
__device__ void place_chunk(const RouteSlotsKernel& k, std::int32_t chunk_idx, const SlotsShared& memory) {
  const Chunk chunk = chunk_of(k.ids, chunk_idx, k.chunk_tokens);
  const std::int32_t num_slots = chunk.num * k.ids.num_topk;
  const std::int32_t num_live_slots = chunk.num_live * k.ids.num_topk;
  const std::int32_t first = chunk.first * k.ids.num_topk;
  auto* slots = at<std::int64_t>(k.slot_map) + first;
  const auto* before = at<const std::uint32_t>(k.route_scratch) + static_cast<std::int64_t>(chunk_idx) * k.num_experts;
  const auto* route_base = at<const std::int64_t>(k.route_base);

  for (std::int32_t e = threadIdx.x; e < k.num_experts; e += blockDim.x) {
    memory.base[e] = route_base[e] + before[e];
    memory.next[e] = 0;
  }
  for (std::int32_t i = threadIdx.x; i < num_live_slots; i += blockDim.x) {
    memory.keys[i] = key_of(load_id(k.ids, first + i), k.num_experts);
  }
  for (std::int32_t i = num_live_slots + threadIdx.x; i < num_slots; i += blockDim.x) slots[i] = kNoSlot;
  __syncthreads();
  if (threadIdx.x < kWarpSize) take_slots(k, memory.keys, memory.base, memory.next, num_live_slots, slots);
  __syncthreads();
}

// Shapes: topk_idx [T, K]; route_scratch [chunks, E] int32, the prefixes; slot_map [T, K] int64: out. A block for each
// chunk, in turns.
//
// Example, rank 1 of the exchange's example, K = 2, topk_idx = {{0, 3}, {3, 0}}: route_base has rows 3 and 9 of rank 0,
// rows 0 and 5 of rank 1, so the slots are {{rank 0 row 3, rank 1 row 5}, {rank 1 row 6, rank 0 row 4}}.
__global__ void __launch_bounds__(kSlotsThreads) route_slots_kernel(const __grid_constant__ RouteSlotsKernel k) {
  extern __shared__ __align__(16) std::int64_t shared[];
  await_previous();
  release_next();
  if (block_stops(k.call)) return;

  SlotsShared memory{shared, reinterpret_cast<std::uint32_t*>(shared + k.num_experts), nullptr};
  memory.keys = memory.next + k.num_experts;
  for (std::int32_t chunk = blockIdx.x; chunk < num_chunks_of(k.ids, k.chunk_tokens); chunk += gridDim.x) {
    place_chunk(k, chunk, memory);
  }
}

std::size_t count_bytes(std::int64_t num_experts) { return sizeof(std::uint32_t) * num_experts; }

}  // namespace

std::size_t slots_shared_bytes(std::int64_t num_experts, std::int64_t chunk_tokens, std::int64_t num_topk) {
  return (sizeof(std::int64_t) + sizeof(std::uint32_t)) * num_experts + sizeof(std::uint32_t) * chunk_tokens * num_topk;
}

void launch_route_count(const RouteCountKernel& kernel, const Target& target) {
  const std::int32_t num_chunks = num_chunks_of(kernel.ids, kernel.chunk_tokens);
  if (num_chunks == 0) return;
  const std::uint32_t num_blocks = target.fit(num_chunks, kBlocksPerSm);
  launch("route_count_kernel", route_count_kernel, {num_blocks, kCountThreads, count_bytes(kernel.num_experts)}, kernel,
         target.stream);
}

void launch_route_slots(const RouteSlotsKernel& kernel, const Target& target) {
  const std::int32_t num_chunks = num_chunks_of(kernel.ids, kernel.chunk_tokens);
  if (num_chunks == 0) return;
  const std::size_t shared_bytes = slots_shared_bytes(kernel.num_experts, kernel.chunk_tokens, kernel.ids.num_topk);
  launch("route_slots_kernel", route_slots_kernel, {target.fit(num_chunks, kBlocksPerSm), kSlotsThreads, shared_bytes},
         kernel, target.stream);
}

void load_route() {
  load("route_count_kernel", route_count_kernel);
  load("route_slots_kernel", route_slots_kernel);
  allow_all_shared("route_count_kernel", route_count_kernel);
  allow_all_shared("route_slots_kernel", route_slots_kernel);
}

}  // namespace epbuf::cuda

// route where other kernels move rows: what their library is told of the ids, and what it does not tell. Between the
// two kernels ranks gather their rows of counts, by whatever means.
#include <algorithm>

#include "chain.cuh"
#include "route.cuh"
#include "zones.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kCountThreads = 512;
constexpr std::uint32_t kNoBadSlot = 0xFFFFFFFF;

// What the threads of a block find.
struct Found {
  std::uint32_t first_bad;    // the lowest slot with an id >= E; kNoBadSlot: none
  std::uint32_t is_repeated;  // some token names an expert twice
};

// An earlier k of the slot's token has the same id.
__device__ __forceinline__ bool repeats_earlier(const KernelIds& ids, std::uint32_t slot, std::int64_t id) {
  for (std::uint32_t topk = slot % static_cast<std::uint32_t>(ids.num_topk); topk > 0; --topk) {
    if (load_id(ids, slot - topk) == id) return true;
  }
  return false;
}

// The blocks in turns: each slot's id as it is sent, and the block's ids by expert in `histogram` [E + 2]: none, the
// experts, ids >= E.
__device__ void count_slots(const CountIdsKernel& k, std::uint32_t* histogram, Found* found) {
  const std::int64_t num_experts = k.num_experts;
  const auto num_slots = static_cast<std::uint32_t>(k.ids.num_tokens * k.ids.num_topk);
  const auto num_live_slots = static_cast<std::uint32_t>(num_live(k.ids) * k.ids.num_topk);
  auto* sent = at<std::int64_t>(k.sent_ids);
  for (std::uint32_t slot = blockIdx.x * blockDim.x + threadIdx.x; slot < num_slots; slot += gridDim.x * blockDim.x) {
    std::int64_t id = slot < num_live_slots ? load_id(k.ids, slot) : -1;
    if (id >= num_experts) atomicMin(&found->first_bad, slot);
    if (id >= 0 && id < num_experts && repeats_earlier(k.ids, slot, id)) {
      found->is_repeated = 1;
      id = -1;
    }
    id = max(std::int64_t{-1}, min(id, num_experts));
    atomicAdd(&histogram[id + 1], 1u);
    sent[slot] = id == num_experts ? -1 : id;
  }
}

// One thread, once all blocks have counted.
__device__ void write_facts(const CountIdsKernel& k, const Found* found) {
  const auto cluster = cooperative_groups::this_cluster();
  Found all{kNoBadSlot, 0};
  for (std::uint32_t block = 0; block < gridDim.x; ++block) {
    const Found& own = *cluster.map_shared_rank(found, block);
    all = {min(all.first_bad, own.first_bad), all.is_repeated | own.is_repeated};
  }
  const std::uint32_t refusal = all.is_repeated != 0 ? kRefusalRepeatedExpert : kRefusalNone;
  const bool has_bad = all.first_bad != kNoBadSlot;
  const auto num_topk = static_cast<std::uint32_t>(k.ids.num_topk);
  auto* facts = at<std::int64_t>(k.count_row) + k.num_experts;
  facts[kColumnRefusal] = k.call.refusal != kRefusalNone ? k.call.refusal : refusal;
  facts[kColumnBadToken] = has_bad ? all.first_bad / num_topk : 0;
  facts[kColumnBadTopk] = has_bad ? all.first_bad % num_topk : 0;
  facts[kColumnBadValue] = has_bad ? load_id(k.ids, all.first_bad) : 0;
}

// Shapes: topk_idx [T, K] int32 or int64; sent_ids [T, K] int64, row [E + 8] int64: out. A cluster of up to 8 blocks.
//
// Example, E = 4, K = 2, topk_idx = {{0, 3}, {3, 9}, {1, 1}}: sent_ids = {{0, 3}, {3, -1}, {1, -1}}, and the row is
// {1, 1, 1, 0, 2, 1, kRefusalRepeatedExpert, 1, 1, 9, _, _}: one id means no expert, as it is repeated, and one is >=
// 4, that of token 1 and k 1.
__global__ void __launch_bounds__(kCountThreads) count_ids_kernel(const __grid_constant__ CountIdsKernel k) {
  extern __shared__ std::uint32_t histogram[];  // [E + 2]
  __shared__ Found found;
  await_previous();
  const std::int32_t num_columns = k.num_experts + 2;
  for (std::int32_t column = threadIdx.x; column < num_columns; column += blockDim.x) histogram[column] = 0;
  if (threadIdx.x == 0) found = {kNoBadSlot, 0};
  __syncthreads();
  count_slots(k, histogram, &found);
  meet();

  const auto cluster = cooperative_groups::this_cluster();
  const std::int32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  for (std::int32_t column = first; column < num_columns; column += gridDim.x * blockDim.x) {
    std::uint32_t count = 0;
    for (std::uint32_t block = 0; block < gridDim.x; ++block)
      count += cluster.map_shared_rank(histogram, block)[column];
    at<std::int64_t>(k.count_row)[column] = count;
  }
  if (first == 0) write_facts(k, &found);
  meet();  // each block's memory lasts until all have read it
}

// One thread: what the rows say beside the counts. All ranks name the lowest one.
__device__ void note_facts(const SummariseKernel& k) {
  std::int32_t bad_rank = -1, refusing_rank = -1;
  std::uint64_t num_bad_ids = 0;
  const std::int64_t width = k.num_experts + kCountHeader;
  const auto* facts = at<const std::int64_t>(k.count_rows) + k.num_experts;
#pragma unroll 4
  for (std::int32_t rank = k.call.num_ranks - 1; rank >= 0; --rank) {
    const std::int64_t bad = facts[rank * width + kColumnNumBadIds];
    num_bad_ids += bad;
    if (bad != 0) bad_rank = rank;
    if (facts[rank * width + kColumnRefusal] != kRefusalNone) refusing_rank = rank;
  }
  if (bad_rank >= 0) {
    const std::int64_t* bad = facts + bad_rank * width;
    change_control(k.call, [&](Control& control) {
      control.num_bad_ids += num_bad_ids;
      control.bad_rank = bad_rank;
      control.bad_token = static_cast<std::int32_t>(bad[kColumnBadToken]);
      control.bad_topk = static_cast<std::uint32_t>(bad[kColumnBadTopk]);
      control.bad_value = bad[kColumnBadValue];
    });
  }
  if (refusing_rank >= 0) {
    record_refusal(k.call, refusing_rank, static_cast<std::uint32_t>(facts[refusing_rank * width + kColumnRefusal]));
  }
}

struct ZonesShared {
  std::int64_t* prefix;   // [E + 1] padded rows of the experts before
  std::int64_t* base;     // [E] on an overflow: the slot of this rank's first token
  std::uint32_t* totals;  // [E] rows from all ranks
  std::uint32_t* next;    // [E] on an overflow: slots taken from there on
};

std::size_t zones_bytes(std::int64_t num_experts) {
  return sizeof(std::int64_t) * (2 * num_experts + 1) + 2 * sizeof(std::uint32_t) * num_experts;
}

__device__ void add_ranks(const SummariseKernel& k, std::uint32_t* totals) {
  const std::int64_t width = k.num_experts + kCountHeader;
  for (std::int32_t e = threadIdx.x; e < k.num_experts; e += blockDim.x) {
    const auto* counts = at<const std::int64_t>(k.count_rows) + 1 + e;
    std::int64_t total = 0;
#pragma unroll 4
    for (std::int32_t rank = 0; rank < k.call.num_ranks; ++rank) total += counts[rank * width];
    totals[e] = static_cast<std::uint32_t>(total);
  }
}

__device__ bool overflows(const SummariseKernel& k, const std::int64_t* prefix) {
  bool over = false;
  for (std::int32_t rank = 0; rank < k.call.num_ranks; ++rank) {
    over |= prefix[(rank + 1) * k.num_local_experts] - prefix[rank * k.num_local_experts] > k.capacity_rows;
  }
  return over;
}

// The block: ids of rows at or past the capacity become -1, so that the library never has more rows than its budget.
__device__ void drop_rows(const SummariseKernel& k, const ZonesShared& memory) {
  const std::int64_t width = k.num_experts + kCountHeader;
  for (std::int32_t e = threadIdx.x; e < k.num_experts; e += blockDim.x) {
    const auto* counts = at<const std::int64_t>(k.count_rows) + 1 + e;
    const std::int32_t owner = e / k.num_local_experts;
    std::int64_t row = memory.prefix[e] - memory.prefix[owner * k.num_local_experts];
    for (std::int32_t rank = 0; rank < k.call.rank; ++rank) row += counts[rank * width];
    memory.base[e] = slot_at(owner, row);
    memory.next[e] = 0;
  }
  __syncthreads();
  auto* sent = at<std::int64_t>(k.sent_ids);
  auto* slots = at<std::int64_t>(k.slot_map);
  if (threadIdx.x < kWarpSize) take_slots(k, sent, memory.base, memory.next, k.num_slots, slots);
  __syncthreads();
  for (std::int32_t i = threadIdx.x; i < k.num_slots; i += blockDim.x) {
    if (slots[i] == kNoSlot) sent[i] = -1;
  }
}

// Shapes: rows [R, E + 8] int64; offs [L] int32, counts [2 L + 1] int64, overflow [1] float32: out; sent_ids [T, K]
// int64: in and, on an overflow, out. One block.
//
// Example, R = 2, E = 4 (L = 2), A = 4, C = 12, counts {3, 1, 0, 5} and {2, 0, 0, 2}: on rank 1 the zones are rows [0,
// 0) and [0, 8), offs = {0, 8}, counts = {0, 8, 0, 7, 8}. Demands are 12 and 8: overflow 0. With C = 4 it is 1, and
// rank 0, whose five tokens for expert 3 take rows 0 to 4 there, sends four of them.
__global__ void __launch_bounds__(kZoneThreads) summarise_kernel(const __grid_constant__ SummariseKernel k) {
  extern __shared__ __align__(16) std::int64_t shared[];
  await_previous();
  ZonesShared memory{shared, shared + k.num_experts + 1,
                     reinterpret_cast<std::uint32_t*>(shared + 2 * k.num_experts + 1), nullptr};
  memory.next = memory.totals + k.num_experts;
  add_ranks(k, memory.totals);
  __syncthreads();
  sum_zones(k, memory.totals, memory.prefix);

  const std::int32_t first_own = k.call.rank * k.num_local_experts;
  for (std::int32_t j = threadIdx.x; j < k.num_local_experts; j += blockDim.x) {
    const std::int64_t* prefix = memory.prefix + first_own;
    write_zone(k, j, prefix[j] - prefix[0], prefix[j + 1] - prefix[0], memory.totals[first_own + j]);
  }
  if (threadIdx.x < kWarpSize) write_demand(k, memory.prefix, true);
  if (threadIdx.x == 0) note_facts(k);
  if (overflows(k, memory.prefix)) drop_rows(k, memory);
}

std::size_t histogram_bytes(std::int64_t num_experts) { return sizeof(std::uint32_t) * (num_experts + 2); }

}  // namespace

std::size_t counts_shared_bytes(std::int64_t num_experts) {
  return std::max(histogram_bytes(num_experts), zones_bytes(num_experts));
}

void launch_count_ids(const CountIdsKernel& kernel, const Target& target) {
  const std::uint32_t num_blocks = num_cluster_blocks(kernel.ids, target);
  const Grid grid{num_blocks, kCountThreads, histogram_bytes(kernel.num_experts), num_blocks != 1};
  launch("count_ids_kernel", count_ids_kernel, grid, kernel, target.stream);
}

void launch_summarise(const SummariseKernel& kernel, const Target& target) {
  launch("summarise_kernel", summarise_kernel, {1, kZoneThreads, zones_bytes(kernel.num_experts)}, kernel,
         target.stream);
}

void load_counts() {
  load("count_ids_kernel", count_ids_kernel);
  load("summarise_kernel", summarise_kernel);
  allow_all_shared("count_ids_kernel", count_ids_kernel);
  allow_all_shared("summarise_kernel", summarise_kernel);
}

}  // namespace epbuf::cuda

// route: from topk_idx to a destination slot for every (token, k), without a sort and independent of timing.
#include <algorithm>

#include "kernels.h"
#include "wait.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kCountThreads = 256;
constexpr std::uint32_t kExchangeThreads = 384;  // half an SM: it must find room beside the experts of other ranks
constexpr std::uint32_t kSlotsThreads = 128;
constexpr std::uint32_t kNoExpert = 0xFFFFFFFF;
constexpr std::uint32_t kBlocksPerSm = 8;
constexpr std::int32_t kBatch = 8;  // loads in flight per thread
constexpr std::int32_t kMaxFusedChunks = 4;
constexpr std::size_t kMaxFusedBytes = 65536;
constexpr std::size_t kStaticSharedBytes = 512;  // the exchange's, at most

__device__ std::int32_t num_live(const KernelIds& ids) {
  if (ids.live_tokens == 0) return ids.num_tokens;
  const bool wide = ids.live_tokens_bytes == 8;
  const std::int64_t live = wide ? *at<const std::int64_t>(ids.live_tokens) : *at<const std::int32_t>(ids.live_tokens);
  return static_cast<std::int32_t>(live < 0 ? 0 : live < ids.num_tokens ? live : ids.num_tokens);
}

__device__ std::int64_t load_id(const KernelIds& ids, std::int64_t token, std::int32_t k) {
  const std::int64_t index = token * ids.row_stride + k;
  return ids.topk_idx_bytes == 8 ? at<const std::int64_t>(ids.topk_idx)[index]
                                 : at<const std::int32_t>(ids.topk_idx)[index];
}

// What slots are taken for: the expert, or kNoExpert. Notes ids >= E in `bad_ids` unless that is null.
__device__ std::uint32_t key_of(std::int64_t id, std::int32_t num_experts, std::int64_t slot, std::uint64_t bad_ids) {
  if (id >= num_experts && bad_ids != 0) {
    atomicAdd(at<unsigned long long>(bad_ids), 1ull);
    atomicMin(at<unsigned long long>(bad_ids) + 1, static_cast<unsigned long long>(slot));
  }
  return id >= 0 && id < num_experts ? static_cast<std::uint32_t>(id) : kNoExpert;
}

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

__host__ __device__ std::int32_t num_chunks_of(const KernelIds& ids, std::int32_t chunk_tokens) {
  return (ids.num_tokens + chunk_tokens - 1) / chunk_tokens;
}

// One block: the experts of a chunk into `histogram` [E], which is zero, and ids >= E into bad_ids.
__device__ void count_chunk(const RouteCountKernel& k, std::int32_t chunk_idx, std::uint32_t* histogram) {
  const Chunk chunk = chunk_of(k.ids, chunk_idx, k.chunk_tokens);
  for (std::int32_t i = threadIdx.x; i < chunk.num_live * k.ids.num_topk; i += blockDim.x) {
    const std::int64_t token = chunk.first + i / k.ids.num_topk;
    const std::int32_t topk = i % k.ids.num_topk;
    const std::int64_t id = load_id(k.ids, token, topk);
    const std::uint32_t key = key_of(id, k.num_experts, token * k.ids.num_topk + topk, k.bad_ids);
    if (key != kNoExpert) atomicAdd(&histogram[key], 1u);
  }
}

// Shapes: topk_idx [T, K] int32 or int64; route_scratch [chunks, E] int32: out. A block for each chunk, in turns.
//
// Example, E = 4, K = 2, chunks of 2 tokens, topk_idx = {{0, 3}, {3, 9}, {1, -1}}: row 0 is {1, 0, 0, 2} and bad_ids
// becomes {1, 3} (one id >= 4, first at token 1, k 1); row 1 is {0, 1, 0, 0}.
__global__ void __launch_bounds__(kCountThreads) route_count_kernel(const __grid_constant__ RouteCountKernel k) {
  extern __shared__ __align__(16) std::int64_t shared[];  // histogram uint32 [E]
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

// Shared memory of the exchange. The last three are there when it does the work of the other two kernels as well.
struct ExchangeShared {
  std::int64_t* prefix;    // [E + 1] padded rows of the experts before
  std::int64_t* next;      // [chunks, E] the row that the chunk's next token for an expert takes
  std::uint32_t* words;    // [max(E, 4 threads)] partial sums of chunk groups, then rows of each expert from all ranks
  std::uint32_t* columns;  // [E + header] what this rank publishes
  std::uint32_t* counts;   // [chunks, E]
  std::uint32_t* keys;     // [T, K]
};

__host__ __device__ std::int64_t max_words(std::int64_t num_experts) {
  return num_experts > 4 * kExchangeThreads ? num_experts : 4 * kExchangeThreads;
}

// E + 1, and what follows stays 16-byte aligned.
__host__ __device__ std::int64_t prefix_words(std::int64_t num_experts) { return (num_experts + 2) / 2 * 2; }

template <bool kFused>
__device__ ExchangeShared carve(std::int64_t* shared, const RouteExchangeKernel& k) {
  const std::int64_t num_counts = kFused ? num_chunks_of(k.ids, k.chunk_tokens) * k.num_experts : 0;
  ExchangeShared memory;
  memory.prefix = shared;
  memory.next = memory.prefix + prefix_words(k.num_experts);
  memory.words = reinterpret_cast<std::uint32_t*>(memory.next + num_counts);
  memory.columns = memory.words + max_words(k.num_experts);
  memory.counts = memory.columns + k.num_experts + kCountHeader;
  memory.keys = memory.counts + num_counts;
  return memory;
}

__device__ __forceinline__ std::uint32_t plus(std::uint32_t a, std::uint32_t b) { return a + b; }
__device__ __forceinline__ uint4 plus(uint4 a, uint4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// The chunks are split into groups so that all threads load. Thread i works on column i % num_columns of group
// i / num_columns; a column is one expert, or four where E is a multiple of four.
template <typename Vec>
struct ChunkGroups {
  std::int32_t num_columns, num_groups, num_chunks, chunks_per_group;

  __device__ ChunkGroups(const RouteExchangeKernel& k) {
    num_columns = k.num_experts / static_cast<std::int32_t>(sizeof(Vec) / sizeof(std::uint32_t));
    num_chunks = k.call.refusal != kRefusalNone ? 0 : num_chunks_of(k.ids, k.chunk_tokens);
    num_groups = max(1, min(32, static_cast<std::int32_t>(kExchangeThreads) / num_columns));
    chunks_per_group = (num_chunks + num_groups - 1) / num_groups;
  }
  __device__ std::int32_t begin(std::int32_t group) const { return min(num_chunks, group * chunks_per_group); }
  __device__ std::int32_t end(std::int32_t group) const { return min(num_chunks, (group + 1) * chunks_per_group); }
};

// partial [groups, columns]: out.
template <typename Vec>
__device__ void sum_groups(const RouteExchangeKernel& k, const ChunkGroups<Vec>& groups, Vec* partial) {
  for (std::int32_t i = threadIdx.x; i < groups.num_groups * groups.num_columns; i += blockDim.x) {
    const std::int32_t group = i / groups.num_columns;
    const Vec* counts = at<const Vec>(k.route_scratch) + i % groups.num_columns;
    const std::int32_t end = groups.end(group);
    Vec sum{};
#pragma unroll 8
    for (std::int64_t c = groups.begin(group); c < end; ++c) sum = plus(sum, counts[c * groups.num_columns]);
    partial[i] = sum;
  }
}

// In place: row c of route_scratch becomes the sum of the rows before it.
template <typename Vec>
__device__ void write_prefixes(const RouteExchangeKernel& k, const ChunkGroups<Vec>& groups, const Vec* partial) {
  for (std::int32_t i = threadIdx.x; i < groups.num_groups * groups.num_columns; i += blockDim.x) {
    const std::int32_t group = i / groups.num_columns;
    const std::int32_t column = i % groups.num_columns;
    Vec* counts = at<Vec>(k.route_scratch) + column;
    const std::int32_t end = groups.end(group);
    Vec before{};
    for (std::int32_t g = 0; g < group; ++g) before = plus(before, partial[g * groups.num_columns + column]);
    for (std::int64_t c = groups.begin(group); c < end; c += kBatch) {
      Vec batch[kBatch];
#pragma unroll
      for (std::int32_t j = 0; j < kBatch; ++j) batch[j] = c + j < end ? counts[(c + j) * groups.num_columns] : Vec{};
#pragma unroll
      for (std::int32_t j = 0; j < kBatch; ++j) {
        if (c + j < end) counts[(c + j) * groups.num_columns] = before;
        before = plus(before, batch[j]);
      }
    }
  }
}

// Few tokens: the ids of all of them and the counts of all chunks, into shared memory.
__device__ void count_all(const RouteExchangeKernel& k, const ExchangeShared& memory) {
  const std::int32_t num_counts = num_chunks_of(k.ids, k.chunk_tokens) * k.num_experts;
  for (std::int32_t i = threadIdx.x; i < num_counts; i += blockDim.x) memory.counts[i] = 0;
  __syncthreads();
  const std::int32_t num_live_slots = num_live(k.ids) * k.ids.num_topk;
  for (std::int32_t i = threadIdx.x; i < num_live_slots; i += blockDim.x) {
    const std::int32_t token = i / k.ids.num_topk;
    const std::uint32_t key = key_of(load_id(k.ids, token, i % k.ids.num_topk), k.num_experts, i, k.bad_ids);
    memory.keys[i] = key;
    if (key != kNoExpert) atomicAdd(&memory.counts[token / k.chunk_tokens * k.num_experts + key], 1u);
  }
}

// One thread: the header words of this rank, and bad_ids back to "none" for the next round. The block may have counted
// ids by atomics just before, so they are not read through the first-level cache.
__device__ void write_header(const RouteExchangeKernel& k, std::uint32_t* header) {
  const bool refuses = k.call.refusal != kRefusalNone;
  auto* bad_ids = at<std::uint64_t>(k.bad_ids);
  const auto num_bad_ids = refuses ? 0 : static_cast<std::uint32_t>(load_relaxed_system(bad_ids));
  const auto first = num_bad_ids == 0 ? 0 : static_cast<std::uint32_t>(load_relaxed_system(bad_ids + 1));
  const std::uint32_t token = first / static_cast<std::uint32_t>(k.ids.num_topk);
  const std::uint32_t topk = first % static_cast<std::uint32_t>(k.ids.num_topk);
  const std::int64_t value = num_bad_ids == 0 ? 0 : load_id(k.ids, token, topk);
  header[kHeaderRefusal] = k.call.refusal;
  header[kHeaderNumBadIds] = num_bad_ids;
  header[kHeaderBadToken] = token;
  header[kHeaderBadTopk] = topk;
  header[kHeaderBadValueLow] = static_cast<std::uint32_t>(value);
  header[kHeaderBadValueHigh] = static_cast<std::uint32_t>(value >> 32);
  header[kHeaderNumTokens] = refuses ? 0 : num_live(k.ids);
  header[kHeaderReserved] = 0;
  if (num_bad_ids == 0) return;
  store_relaxed_system(bad_ids, 0);
  store_relaxed_system(bad_ids + 1, ~std::uint64_t{0});
}

__device__ void publish_counts(const RouteExchangeKernel& k, std::uint32_t round, const std::uint32_t* columns) {
  const std::int32_t width = k.num_experts + kCountHeader;
  __syncthreads();
  fence_release_system();
  for (std::int32_t i = threadIdx.x; i < k.call.num_ranks * width; i += blockDim.x) {
    const std::int32_t peer = i / width;
    const std::int32_t column = i % width;
    Cell* row = at<Cell>(window_of(k.call, peer), k.count_cells) + static_cast<std::int64_t>(k.call.rank) * width;
    store_fenced_system(row + column, {round, columns[column]});
  }
}

// This rank's rows for every expert: the sum of `num` partial counts.
__device__ void sum_columns(const RouteExchangeKernel& k, const std::uint32_t* partial, std::int32_t num,
                            std::uint32_t* columns) {
  for (std::int32_t e = threadIdx.x; e < k.num_experts; e += blockDim.x) {
    std::uint32_t count = 0;
    for (std::int32_t i = 0; i < num; ++i) count += partial[i * k.num_experts + e];
    columns[e] = count;
  }
}

// What one thread learns from one column of COUNT: its cell of every rank.
struct Column {
  std::uint32_t total = 0;
  std::uint32_t before = 0;  // from the ranks below this one
  std::int32_t first = -1;   // lowest rank with a value
};

// False: give up, because of *failure.
__device__ bool await_column(const RouteExchangeKernel& k, const Awaited& awaited, std::int32_t column, Column* sums,
                             Failure* failure) {
  Patience patience;
  for (std::int32_t rank = 0; rank < k.call.num_ranks; rank += kBatch) {
    Cell batch[kBatch];
    std::int32_t late;
    do {
      late = -1;
#pragma unroll
      for (std::int32_t j = 0; j < kBatch; ++j) {
        if (rank + j < k.call.num_ranks) {
          batch[j] = load_fenced_system(awaited.cells + (rank + j) * awaited.cells_per_rank + column);
        }
      }
#pragma unroll
      for (std::int32_t j = kBatch - 1; j >= 0; --j) {
        if (rank + j < k.call.num_ranks && batch[j].epoch != awaited.epoch) late = rank + j;
      }
      if (late >= 0 && !patience.endure(k.call, awaited, late, failure)) return false;
    } while (late >= 0);
#pragma unroll
    for (std::int32_t j = 0; j < kBatch; ++j) {
      if (rank + j >= k.call.num_ranks) continue;
      sums->total += batch[j].value;
      if (rank + j < k.call.rank) sums->before += batch[j].value;
      if (sums->first < 0 && batch[j].value != 0) sums->first = rank + j;
    }
  }
  return true;
}

// What the header columns say of all ranks.
struct Verdict {
  std::int32_t refusing_rank, bad_rank;  // -1: none
  std::uint32_t num_bad_ids;
};

// All threads: rows of every expert into `totals`, rows from lower ranks into route_base. False: poisoned.
__device__ bool await_counts(const RouteExchangeKernel& k, const Awaited& awaited, std::uint32_t* totals,
                             Verdict* verdict, Failure* failure) {
  bool arrived = true;
  for (std::int32_t column = threadIdx.x; column < k.num_experts + kCountHeader; column += blockDim.x) {
    Column sums;
    arrived = arrived && await_column(k, awaited, column, &sums, failure);
    if (column < k.num_experts) {
      totals[column] = sums.total;
      if (k.route_base != 0) at<std::int64_t>(k.route_base)[column] = sums.before;
    } else if (column == k.num_experts + kHeaderRefusal) {
      verdict->refusing_rank = sums.first;
    } else if (column == k.num_experts + kHeaderNumBadIds) {
      verdict->bad_rank = sums.first;
      verdict->num_bad_ids = sums.total;
    }
  }
  fence_acquire_system();
  return __syncthreads_and(arrived) && all_agree(k.call, awaited, failure);
}

__device__ std::uint32_t header_of(const RouteExchangeKernel& k, std::int32_t rank, std::uint32_t word) {
  const std::int64_t width = k.num_experts + kCountHeader;
  return load_relaxed_system(at<const Cell>(k.call.window, k.count_cells) + rank * width + k.num_experts + word).value;
}

// One thread.
__device__ void record_bad_ids(const RouteExchangeKernel& k, const Verdict& verdict) {
  change_control(k.call, [&](Control& control) {
    const std::uint64_t high = header_of(k, verdict.bad_rank, kHeaderBadValueHigh);
    control.num_bad_ids += verdict.num_bad_ids;
    control.bad_value = static_cast<std::int64_t>(high << 32 | header_of(k, verdict.bad_rank, kHeaderBadValueLow));
    control.bad_rank = verdict.bad_rank;
    control.bad_token = static_cast<std::int32_t>(header_of(k, verdict.bad_rank, kHeaderBadToken));
    control.bad_topk = header_of(k, verdict.bad_rank, kHeaderBadTopk);
  });
}

__device__ std::int64_t warp_inclusive_sum(std::int64_t value) {
  const std::uint32_t lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (std::uint32_t step = 1; step < kWarpSize; step *= 2) {
    const std::int64_t lower = __shfl_up_sync(0xFFFFFFFF, value, step);
    if (lane >= step) value += lower;
  }
  return value;
}

// prefix[e] = padded rows of the experts before e, over all ranks; prefix[E] = all of them.
__device__ void sum_zones(const RouteExchangeKernel& k, const std::uint32_t* totals, std::int64_t* prefix) {
  constexpr std::uint32_t kWarps = kExchangeThreads / kWarpSize;
  __shared__ std::int64_t warp_sums[kWarpSize];  // of kWarps warps, then zeros
  const std::uint32_t warp = threadIdx.x / kWarpSize;
  const std::int64_t alignment = k.expert_alignment;
  std::int64_t carry = 0;
  for (std::int32_t begin = 0; begin < k.num_experts; begin += kExchangeThreads) {
    const std::int32_t e = begin + threadIdx.x;
    const std::int64_t rows = e < k.num_experts ? (totals[e] + alignment - 1) & -alignment : 0;
    std::int64_t inclusive = warp_inclusive_sum(rows);
    if (threadIdx.x < kWarpSize && threadIdx.x >= kWarps) warp_sums[threadIdx.x] = 0;
    if (threadIdx.x % kWarpSize == kWarpSize - 1) warp_sums[warp] = inclusive;
    __syncthreads();
    if (warp == 0) warp_sums[threadIdx.x] = warp_inclusive_sum(warp_sums[threadIdx.x]);
    __syncthreads();
    inclusive += carry + (warp == 0 ? 0 : warp_sums[warp - 1]);
    if (e < k.num_experts) prefix[e + 1] = inclusive;
    carry += warp_sums[kWarps - 1];
    __syncthreads();
  }
  if (threadIdx.x == 0) prefix[0] = 0;
  __syncthreads();
}

// Zone j of this rank is rows [start, end). Rows at or past the capacity are dropped by position.
__device__ void write_zone(const RouteExchangeKernel& k, std::int32_t j, std::int64_t start, std::int64_t end,
                           std::int64_t count) {
  const std::int64_t capacity = k.capacity_rows;
  auto* counts = at<std::int64_t>(k.counts);
  at<std::int32_t>(k.offs)[j] = static_cast<std::int32_t>(min(end, capacity));
  counts[j] = min(end, capacity) - min(start, capacity);
  counts[k.num_local_experts + j] = min(count, max(capacity - start, std::int64_t{0}));
  if (j == k.num_local_experts - 1) counts[2 * k.num_local_experts] = end;
}

__device__ void write_zones(const RouteExchangeKernel& k, const std::uint32_t* totals, const std::int64_t* prefix) {
  for (std::int32_t e = threadIdx.x; e < k.num_experts; e += blockDim.x) {
    const std::int32_t owner = e / k.num_local_experts;
    const std::int64_t base = prefix[owner * k.num_local_experts];
    at<std::int64_t>(k.route_base)[e] += prefix[e] - base;
    if (owner != k.call.rank) continue;
    write_zone(k, e % k.num_local_experts, prefix[e] - base, prefix[e + 1] - base, totals[e]);
  }
}

// One warp: the largest demand of all ranks, the overflow flag, the peak.
__device__ void write_demand(const RouteExchangeKernel& k, const std::int64_t* prefix) {
  std::int64_t largest = -1;
  std::int32_t largest_rank = 0;
  for (std::int32_t rank = threadIdx.x; rank < k.call.num_ranks; rank += kWarpSize) {
    const std::int64_t demand = prefix[(rank + 1) * k.num_local_experts] - prefix[rank * k.num_local_experts];
    if (demand > largest) largest = demand, largest_rank = rank;
  }
#pragma unroll
  for (std::uint32_t step = kWarpSize / 2; step > 0; step /= 2) {
    const std::int64_t other = __shfl_xor_sync(0xFFFFFFFF, largest, step);
    const std::int32_t other_rank = __shfl_xor_sync(0xFFFFFFFF, largest_rank, step);
    if (other > largest || (other == largest && other_rank < largest_rank)) largest = other, largest_rank = other_rank;
  }
  if (threadIdx.x != 0) return;
  auto* counters = at<FrameCounters>(k.frame_counters);
  counters->demand_peak_rows = max(counters->demand_peak_rows, largest);
  *at<float>(k.overflow) = largest > k.capacity_rows ? 1.0f : 0.0f;
  if (largest > k.capacity_rows) record_overflow(k.call, largest, largest_rank);
}

// One warp: ranks the experts of `keys` [num] in order and writes their slots. `next` [E]: the row that the chunk's
// next token for an expert takes.
template <typename Kernel>
__device__ void take_slots(const Kernel& k, const std::uint32_t* keys, std::int64_t* next, std::int32_t num,
                           std::int64_t* slots) {
  constexpr std::int32_t kGroups = 4;
  const std::int32_t lane = threadIdx.x % kWarpSize;
  const std::uint32_t lower_lanes = (1u << lane) - 1;
  for (std::int32_t begin = 0; begin < num; begin += kGroups * kWarpSize) {
    std::uint32_t key[kGroups], same[kGroups];
#pragma unroll
    for (std::int32_t g = 0; g < kGroups; ++g) {
      const std::int32_t i = begin + g * kWarpSize + lane;
      key[g] = i < num ? keys[i] : kNoExpert;
      same[g] = __match_any_sync(0xFFFFFFFF, key[g]);
    }
#pragma unroll
    for (std::int32_t g = 0; g < kGroups; ++g) {
      const std::int32_t i = begin + g * kWarpSize + lane;
      const bool live = key[g] != kNoExpert;
      const std::int64_t base = live ? next[key[g]] : 0;
      const std::int64_t row = base + __popc(same[g] & lower_lanes);
      __syncwarp();
      if (live && (same[g] & lower_lanes) == 0) next[key[g]] = base + __popc(same[g]);
      __syncwarp();
      const std::int64_t owner = live ? key[g] / static_cast<std::uint32_t>(k.num_local_experts) : 0;
      if (i < num) slots[i] = live && row < k.capacity_rows ? owner << kSlotRankShift | row : kNoSlot;
    }
  }
}

// Few tokens: all slots, from the ids and counts in shared memory. One warp for each chunk.
__device__ void place_all(const RouteExchangeKernel& k, const ExchangeShared& memory) {
  const std::int32_t num_chunks = num_chunks_of(k.ids, k.chunk_tokens);
  const std::int32_t num_slots = k.ids.num_tokens * k.ids.num_topk;
  const std::int32_t num_live_slots = num_live(k.ids) * k.ids.num_topk;
  const std::int32_t chunk_slots = k.chunk_tokens * k.ids.num_topk;
  auto* slots = at<std::int64_t>(k.slot_map);
  for (std::int32_t i = threadIdx.x; i < num_chunks * k.num_experts; i += blockDim.x) {
    const std::int32_t expert = i % k.num_experts;
    std::int64_t row = at<const std::int64_t>(k.route_base)[expert];
    for (std::int32_t before = expert; before < i; before += k.num_experts) row += memory.counts[before];
    memory.next[i] = row;
  }
  for (std::int32_t i = num_live_slots + threadIdx.x; i < num_slots; i += blockDim.x) slots[i] = kNoSlot;
  __syncthreads();
  const std::int32_t chunk = threadIdx.x / kWarpSize;
  const std::int32_t first = chunk * chunk_slots;
  if (chunk < num_chunks) {
    const std::int32_t num = max(0, min(chunk_slots, num_live_slots - first));
    take_slots(k, memory.keys + first, memory.next + chunk * k.num_experts, num, slots + first);
  }
}

__device__ bool await_ack(const RouteExchangeKernel& k, std::uint32_t number, Failure* failure) {
  if (k.ack_use == 0) return true;
  const Cell* cells = at<const Cell>(k.call.window, k.ack_cells);
  return await_all(k.call, {kPhaseAck, *at<const std::uint32_t>(k.ack_use), cells, 1, number}, failure);
}

// This rank's counts, the sums of `num` rows of `partial`, to every rank.
__device__ void send_counts(const RouteExchangeKernel& k, const ExchangeShared& memory, std::uint32_t round,
                            const std::uint32_t* partial, std::int32_t num) {
  __syncthreads();
  if (threadIdx.x == kExchangeThreads - 1) {  // the thread with the fewest columns
    at<FrameCounters>(k.frame_counters)->round = round;
    write_header(k, memory.columns + k.num_experts);
  }
  sum_columns(k, partial, num, memory.columns);
  publish_counts(k, round, memory.columns);
}

// False: give up, because of *failure.
__device__ bool send_chunks(const RouteExchangeKernel& k, const ExchangeShared& memory, std::uint32_t number,
                            std::uint32_t round, Failure* failure) {
  const bool is_wide = k.num_experts % 4 == 0;
  const ChunkGroups<uint4> fours(k);
  const ChunkGroups<std::uint32_t> ones(k);
  auto* partial = reinterpret_cast<uint4*>(memory.words);
  if (is_wide) sum_groups(k, fours, partial);
  if (!is_wide) sum_groups(k, ones, memory.words);
  if (!await_ack(k, number, failure)) return false;
  send_counts(k, memory, round, memory.words, is_wide ? fours.num_groups : ones.num_groups);
  if (is_wide) write_prefixes(k, fours, partial);
  if (!is_wide) write_prefixes(k, ones, memory.words);
  return true;
}

// Few tokens: the counts stay in shared memory.
__device__ bool send_all(const RouteExchangeKernel& k, const ExchangeShared& memory, std::uint32_t number,
                         std::uint32_t round, Failure* failure) {
  count_all(k, memory);
  if (!await_ack(k, number, failure)) return false;
  send_counts(k, memory, round, memory.counts, num_chunks_of(k.ids, k.chunk_tokens));
  return true;
}

// What follows from everybody's counts. A refusal of the lowest rank that has one completes the round with ARRIVED.
template <bool kFused>
__device__ void conclude(const RouteExchangeKernel& k, const ExchangeShared& memory, const Verdict& verdict,
                         std::uint32_t round) {
  const bool refused = verdict.refusing_rank >= 0;
  if (threadIdx.x == 0) store_relaxed_device(at<std::uint32_t>(k.call.refused), refused ? kOpRoute : kOpNone);
  if (refused) {
    const std::uint32_t refusal = header_of(k, verdict.refusing_rank, kHeaderRefusal);
    if (threadIdx.x == 0) record_refusal(k.call, verdict.refusing_rank, refusal);
    publish(k.call, k.arrived_cells, {round, kRefusalNone});
  } else {
    if (threadIdx.x == 0 && verdict.num_bad_ids != 0) record_bad_ids(k, verdict);
    sum_zones(k, memory.words, memory.prefix);
    write_zones(k, memory.words, memory.prefix);
    if (threadIdx.x < kWarpSize) write_demand(k, memory.prefix);
    __syncthreads();
    if constexpr (kFused) place_all(k, memory);
  }
  __syncthreads();
}

// False: give up, because of *failure.
template <bool kFused>
__device__ bool exchange(const RouteExchangeKernel& k, std::int64_t* shared, Failure* failure) {
  __shared__ Verdict verdict;
  const ExchangeShared memory = carve<kFused>(shared, k);
  const bool publishes = k.steps & kRoutePublish;
  const std::uint32_t number = publishes ? begin_call(k.call) : current_call(k.call);
  const std::uint32_t round = at<const FrameCounters>(k.frame_counters)->round + (publishes ? 1 : 0);

  if (publishes) {
    constexpr auto send = kFused ? send_all : send_chunks;
    if (!send(k, memory, number, round, failure)) return false;
    __syncthreads();
  }
  if (k.steps & kRouteAwait) {
    const Cell* cells = at<const Cell>(k.call.window, k.count_cells);
    const Awaited awaited{kPhaseCount, round, cells, k.num_experts + kCountHeader, number};
    if (!await_counts(k, awaited, memory.words, &verdict, failure)) return false;
    conclude<kFused>(k, memory, verdict, round);
  }
  if ((k.steps & kRouteAwaitRefused) && refused_op(k.call) == kOpRoute) {
    const Cell* cells = at<const Cell>(k.call.window, k.arrived_cells);
    return await_all(k.call, {kPhaseArrived, round, cells, 1, number}, failure);
  }
  return true;
}

// Shapes: one block. route_scratch [chunks, E] int32: counts in, prefixes over the chunks out; count_cells [R, E + 8]
// of every rank; route_base [E] int64, offs [L] int32, counts [2 L + 1] int64, overflow [1] float32: out.
//
// Example, R = 2, E = 4 (L = 2), A = 4, C = 12; rank 0 counts {3, 1, 0, 5}, rank 1 {2, 0, 0, 2}. Rows of the experts:
// {5, 1, 0, 7}, padded {8, 4, 0, 8}. On rank 1: route_base = {3, 9, 0, 5} (rank 0's rows come first in each zone),
// zones 2 and 3 are rows [0, 0) and [0, 8): offs = {0, 8}, counts = {0, 8, 0, 7, 8}. Demands are 12 and 8: overflow 0.
//
// Fused, it counts the ids before and takes the slots after: a few tokens cost one launch instead of three.
template <bool kFused>
__global__ void __launch_bounds__(kExchangeThreads, 2)
    route_exchange_kernel(const __grid_constant__ RouteExchangeKernel k) {
  extern __shared__ __align__(16) std::int64_t shared[];
  if (block_skips(k.call)) return;
  Failure failure;
  if (!exchange<kFused>(k, shared, &failure)) report(k.call, failure);
}

// One block: the slots of a chunk. The ranks within the chunk are one warp's work; the others fetch for it.
__device__ void place_chunk(const RouteSlotsKernel& k, std::int32_t chunk_idx, std::int64_t* next,
                            std::uint32_t* keys) {
  const Chunk chunk = chunk_of(k.ids, chunk_idx, k.chunk_tokens);
  const std::int32_t num_slots = chunk.num * k.ids.num_topk;
  const std::int32_t num_live_slots = chunk.num_live * k.ids.num_topk;
  auto* slots = at<std::int64_t>(k.slot_map) + static_cast<std::int64_t>(chunk.first) * k.ids.num_topk;
  const auto* before = at<const std::uint32_t>(k.route_scratch) + static_cast<std::int64_t>(chunk_idx) * k.num_experts;
  const auto* route_base = at<const std::int64_t>(k.route_base);

  for (std::int32_t e = threadIdx.x; e < k.num_experts; e += blockDim.x) next[e] = route_base[e] + before[e];
  for (std::int32_t i = threadIdx.x; i < num_live_slots; i += blockDim.x) {
    const std::int64_t id = load_id(k.ids, chunk.first + i / k.ids.num_topk, i % k.ids.num_topk);
    keys[i] = key_of(id, k.num_experts, 0, 0);
  }
  for (std::int32_t i = num_live_slots + threadIdx.x; i < num_slots; i += blockDim.x) slots[i] = kNoSlot;
  __syncthreads();
  if (threadIdx.x < kWarpSize) take_slots(k, keys, next, num_live_slots, slots);
  __syncthreads();
}

// Shapes: topk_idx [T, K]; route_scratch [chunks, E] int32, the prefixes; slot_map [T, K] int64: out. A block for each
// chunk, in turns.
//
// Example, rank 1 of the exchange's example, K = 2, topk_idx = {{0, 3}, {3, 0}}: route_base = {3, 9, 0, 5}, so the
// slots are {{rank 0 row 3, rank 1 row 5}, {rank 1 row 6, rank 0 row 4}}.
__global__ void __launch_bounds__(kSlotsThreads) route_slots_kernel(const __grid_constant__ RouteSlotsKernel k) {
  extern __shared__ __align__(16) std::int64_t shared[];  // next int64 [E], keys uint32 [chunk_tokens * K]
  auto* keys = reinterpret_cast<std::uint32_t*>(shared + k.num_experts);
  if (block_stops(k.call)) return;

  for (std::int32_t chunk = blockIdx.x; chunk < num_chunks_of(k.ids, k.chunk_tokens); chunk += gridDim.x) {
    place_chunk(k, chunk, shared, keys);
  }
}

std::size_t exchange_bytes(std::int64_t num_experts) {
  return sizeof(std::int64_t) * prefix_words(num_experts) +
         sizeof(std::uint32_t) * (max_words(num_experts) + num_experts + kCountHeader);
}

std::size_t fused_bytes(const KernelIds& ids, std::int64_t num_experts, std::int32_t chunk_tokens) {
  const std::int64_t num_counts = num_chunks_of(ids, chunk_tokens) * num_experts;
  const std::int64_t num_slots = static_cast<std::int64_t>(ids.num_tokens) * ids.num_topk;
  return exchange_bytes(num_experts) + sizeof(std::int64_t) * num_counts +
         sizeof(std::uint32_t) * (num_counts + num_slots);
}

std::size_t slots_bytes(std::int64_t num_experts, std::int64_t chunk_tokens, std::int64_t num_topk) {
  return sizeof(std::int64_t) * num_experts + sizeof(std::uint32_t) * chunk_tokens * num_topk;
}

}  // namespace

bool fits_fused_route(const KernelIds& ids, std::int32_t num_experts, std::int32_t chunk_tokens) {
  return num_chunks_of(ids, chunk_tokens) <= kMaxFusedChunks &&
         fused_bytes(ids, num_experts, chunk_tokens) <= kMaxFusedBytes;
}

void launch_route_fused(const RouteExchangeKernel& kernel, const Target& target) {
  const std::size_t shared_bytes = fused_bytes(kernel.ids, kernel.num_experts, kernel.chunk_tokens);
  launch("route_exchange_kernel<fused>", route_exchange_kernel<true>, {1, kExchangeThreads, shared_bytes}, kernel,
         target.stream);
}

void launch_route_count(const RouteCountKernel& kernel, const Target& target) {
  const std::int32_t num_chunks = num_chunks_of(kernel.ids, kernel.chunk_tokens);
  if (num_chunks == 0) return;
  const std::size_t shared_bytes = sizeof(std::uint32_t) * kernel.num_experts;
  launch("route_count_kernel", route_count_kernel, {target.fit(num_chunks, kBlocksPerSm), kCountThreads, shared_bytes},
         kernel, target.stream);
}

void launch_route_exchange(const RouteExchangeKernel& kernel, const Target& target) {
  launch("route_exchange_kernel", route_exchange_kernel<false>,
         {1, kExchangeThreads, exchange_bytes(kernel.num_experts)}, kernel, target.stream);
}

void launch_route_slots(const RouteSlotsKernel& kernel, const Target& target) {
  const std::int32_t num_chunks = num_chunks_of(kernel.ids, kernel.chunk_tokens);
  if (num_chunks == 0) return;
  const std::size_t shared_bytes = slots_bytes(kernel.num_experts, kernel.chunk_tokens, kernel.ids.num_topk);
  launch("route_slots_kernel", route_slots_kernel, {target.fit(num_chunks, kBlocksPerSm), kSlotsThreads, shared_bytes},
         kernel, target.stream);
}

std::size_t route_shared_bytes(const Geometry& g) {
  return kStaticSharedBytes +
         std::max(exchange_bytes(g.num_experts), slots_bytes(g.num_experts, g.route_chunk_tokens, g.num_topk));
}

void load_route() {
  load("route_count_kernel", route_count_kernel);
  load("route_exchange_kernel", route_exchange_kernel<false>);
  load("route_exchange_kernel<fused>", route_exchange_kernel<true>);
  load("route_slots_kernel", route_slots_kernel);
  allow_all_shared("route_count_kernel", route_count_kernel);
  allow_all_shared("route_exchange_kernel", route_exchange_kernel<false>);
  allow_all_shared("route_exchange_kernel<fused>", route_exchange_kernel<true>);
  allow_all_shared("route_slots_kernel", route_slots_kernel);
}

}  // namespace epbuf::cuda

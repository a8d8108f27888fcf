// The exchange of route: every rank tells every rank how many rows it has for each expert, and each computes from all
// counts the zones of its own receive region and the rows that its own tokens take on the peers.
#include <cooperative_groups.h>

#include "chain.cuh"
#include "route.cuh"
#include "wait.cuh"
#include "zones.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kThreads = kZoneThreads;
constexpr std::uint32_t kCountWarps = kThreads / kWarpSize - 1;
constexpr std::uint32_t kCountThreads = kCountWarps * kWarpSize;
constexpr std::int32_t kBatch = 4;  // loads or stores in flight per thread
constexpr std::size_t kMaxFusedBytes = 64 * 1024;
constexpr std::size_t kStaticSharedBytes = 1024;  // at most

using Key = std::uint16_t;  // fused only
static_assert(kMaxFusedBytes / sizeof(std::uint32_t) / kCountWarps < 0xFFFF, "a key holds every expert that fits");

// The last warp talks to the peers while the others count, and compares PROGRESS while they read the peers' counts.
__device__ __forceinline__ bool is_speaker() { return threadIdx.x >= kCountThreads; }

// Shared memory of a block; the partial sums are there for many tokens, the last three for few.
struct ExchangeShared {
  std::int64_t* prefix;    // [E + 1] padded rows of the experts before
  std::int64_t* base;      // [E] rows of lower ranks, then the slot of this rank's first token
  std::uint64_t* windows;  // [R] of all ranks
  std::uint32_t* totals;   // [E] rows from all ranks
  std::uint32_t* partial;  // [max(E, 4 count threads)] sums of chunk groups
  std::uint32_t* counts;   // [count warps, E] rows of each warp's slots, then of the block's warps before
  std::uint32_t* own;      // [E] rows of the block's slots
  Key* keys;               // [slots of the block]
};

// What single threads tell the block.
struct Notes {
  std::uint32_t call;                    // this rank's call number
  std::int32_t refusing_rank, bad_rank;  // -1: none
  std::uint32_t num_bad_ids;             // of all ranks
  bool places;                           // the round holds: slots may be taken
  BadIds own;                            // of this block
  std::uint32_t header[kCountHeader];    // what this rank publishes beside its counts
};

__host__ __device__ inline std::size_t align16(std::size_t nbytes) { return (nbytes + 15) / 16 * 16; }

// Hands out pieces of 16-byte aligned memory; counts only, where there is none.
struct Pieces {
  std::size_t used = 0;

  template <typename T>
  __host__ __device__ T* take(void* memory, std::int64_t num) {
    auto* piece = memory == nullptr ? nullptr : static_cast<unsigned char*>(memory) + used;
    used += align16(sizeof(T) * static_cast<std::size_t>(num));
    return reinterpret_cast<T*>(piece);
  }
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
template <bool kFused>
__host__ __device__ std::size_t carve(void* shared, const KernelIds& ids, std::int64_t num_experts,
                                      std::int64_t num_ranks, std::uint32_t num_blocks, ExchangeShared* memory) {
  const std::int64_t most = num_experts > 4 * kCountThreads ? num_experts : 4 * kCountThreads;
  Pieces pieces;
  memory->prefix = pieces.take<std::int64_t>(shared, num_experts + 1);
  memory->base = pieces.take<std::int64_t>(shared, num_experts);
  memory->windows = pieces.take<std::uint64_t>(shared, num_ranks);
  memory->totals = pieces.take<std::uint32_t>(shared, num_experts);
  memory->partial = pieces.take<std::uint32_t>(shared, kFused ? 0 : most);
  memory->counts = pieces.take<std::uint32_t>(shared, kFused ? kCountWarps * num_experts : 0);
  memory->own = pieces.take<std::uint32_t>(shared, kFused ? num_experts : 0);
  memory->keys = pieces.take<Key>(shared, kFused ? kCountWarps * slots_per_warp(ids, num_blocks) : 0);
  return pieces.used;
}

__device__ __forceinline__ std::uint32_t plus(std::uint32_t a, std::uint32_t b) { return a + b; }
__device__ __forceinline__ uint4 plus(uint4 a, uint4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// The chunks are split into groups so that all threads load. Thread i works on column i % num_columns of group
// i / num_columns; a column is one expert, or four where E is a multiple of four.
template <typename Vec>
struct ChunkGroups {
  std::int32_t num_columns, num_groups, num_chunks, chunks_per_group;

  __device__ ChunkGroups(const RouteExchangeKernel& k) {
    num_columns = max(1, k.num_experts / static_cast<std::int32_t>(sizeof(Vec) / sizeof(std::uint32_t)));
    num_chunks = k.call.refusal != kRefusalNone ? 0 : num_chunks_of(k.ids, k.chunk_tokens);
    num_groups = max(1, min(32, static_cast<std::int32_t>(kCountThreads) / num_columns));
    chunks_per_group = (num_chunks + num_groups - 1) / num_groups;
  }
  __device__ std::int32_t begin(std::int32_t group) const { return min(num_chunks, group * chunks_per_group); }
  __device__ std::int32_t end(std::int32_t group) const { return min(num_chunks, (group + 1) * chunks_per_group); }
};

// partial [groups, columns]: out.
template <typename Vec>
__device__ void sum_groups(const RouteExchangeKernel& k, const ChunkGroups<Vec>& groups, Vec* partial) {
  for (std::int32_t i = threadIdx.x; i < groups.num_groups * groups.num_columns; i += kCountThreads) {
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

// What the block needs and no earlier kernel writes. Ends with a barrier.
template <bool kFused>
__device__ void prepare(const RouteExchangeKernel& k, const ExchangeShared& memory, Notes* notes) {
#pragma unroll 1
  for (std::int32_t rank = threadIdx.x; rank < k.call.num_ranks; rank += kThreads) {
    memory.windows[rank] = window_of(k.call, rank);
  }
  if (threadIdx.x == 0) notes->own = kNoBadIds;
  const auto num_counts = static_cast<std::int32_t>(kFused ? kCountWarps * k.num_experts : 0);
#pragma unroll 1
  for (std::int32_t i = threadIdx.x; i < num_counts; i += kThreads) memory.counts[i] = 0;
  __syncthreads();
}

// One count warp, few tokens: the keys of its slots, and how many there are of each expert.
__device__ void count_slots(const RouteExchangeKernel& k, const ExchangeShared& memory, Notes* notes) {
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

// The block's rows for every expert, few tokens; each warp's counts become the sums of the warps before it.
__device__ void sum_warps(const RouteExchangeKernel& k, const ExchangeShared& memory) {
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

// The speaker: numbers the call and tells every rank. False: nothing is done, see Marks::skip.
__device__ bool open_round(const RouteExchangeKernel& k, Notes* notes) {
  const LaneWindows windows(k.call);
  const std::uint32_t before = current_call(k.call);
  if (warp_skips(k.call)) return false;
  const std::uint32_t number = before + ((k.steps & kRoutePublish) ? 1 : 0);
  if (k.steps & kRoutePublish) announce(k.call, windows, number);
  if (lane_index() == 0) notes->call = number;
  return true;
}

// One thread: the header words of this rank, and bad_ids back to "none" for the next round.
__device__ void write_header(const RouteExchangeKernel& k, const BadIds& bad, std::uint32_t* header) {
  const bool refuses = k.call.refusal != kRefusalNone;
  const bool has_bad = !refuses && bad.num != 0;
  const auto first = has_bad ? static_cast<std::uint32_t>(bad.first) : 0;
  const std::int64_t value = has_bad ? load_id(k.ids, first) : 0;
  header[kHeaderRefusal] = k.call.refusal;
  header[kHeaderNumBadIds] = has_bad ? static_cast<std::uint32_t>(bad.num) : 0;
  header[kHeaderBadToken] = first / static_cast<std::uint32_t>(k.ids.num_topk);
  header[kHeaderBadTopk] = first % static_cast<std::uint32_t>(k.ids.num_topk);
  header[kHeaderBadValueLow] = static_cast<std::uint32_t>(value);
  header[kHeaderBadValueHigh] = static_cast<std::uint32_t>(value >> 32);
  header[kHeaderNumTokens] = refuses ? 0 : num_live(k.ids);
  header[kHeaderReserved] = 0;
  if (has_bad) *at<BadIds>(k.bad_ids) = kNoBadIds;
}

// A cell of this rank's row of COUNT, to every rank.
__device__ __forceinline__ void publish_cell(const RouteExchangeKernel& k, const ExchangeShared& memory,
                                             std::int32_t column, Cell cell) {
  const std::int64_t width = k.num_experts + kCountHeader;
  const std::int64_t at_rank = k.count_cells + static_cast<std::int64_t>(sizeof(Cell)) * (k.call.rank * width + column);
#pragma unroll 4
  for (std::int32_t rank = 0; rank < k.call.num_ranks; ++rank) {
    store_fenced_system(at<Cell>(memory.windows[rank], at_rank), cell);
  }
}

// The block publishes this rank's row, every thread behind a fence of its own. `count_of(e)`: rows for expert e, asked
// by one count thread. The speaker's cells are those that its PROGRESS came before.
template <typename CountOf>
__device__ void publish_round(const RouteExchangeKernel& k, const ExchangeShared& memory, std::uint32_t round,
                              const BadIds& bad, Notes* notes, CountOf count_of) {
  if (!is_speaker()) {
#pragma unroll 1
    for (std::int32_t e = threadIdx.x; e < k.num_experts; e += kCountThreads) {
      publish_cell(k, memory, e, {round, count_of(e)});
    }
    return;
  }
  if (lane_index() == 0) {
    at<FrameCounters>(k.frame_counters)->round = round;
    write_header(k, bad, notes->header);
  }
  __syncwarp();
  const std::int32_t word = lane_index();
  if (word < static_cast<std::int32_t>(kCountHeader)) {
    publish_cell(k, memory, k.num_experts + word, {round, notes->header[word]});
  }
}

// What one thread learns from one column of COUNT: its cell of every rank.
struct Column {
  std::uint32_t total = 0;
  std::uint32_t before = 0;  // from the ranks below this one
};

// False: given up.
__device__ bool await_column(const RouteExchangeKernel& k, const Awaited& awaited, std::int32_t column, Column* sums) {
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
      if (late >= 0 && !patience.endure(k.call, awaited, late)) return false;
    } while (late >= 0);
#pragma unroll
    for (std::int32_t j = 0; j < kBatch; ++j) {
      if (rank + j >= k.call.num_ranks) continue;
      sums->total += batch[j].value;
      if (rank + j < k.call.rank) sums->before += batch[j].value;
    }
  }
  return true;
}

// The count threads: rows of every expert into `totals`, rows of lower ranks into `base`. What the cells permit, the
// speaker acquires; their values are in them.
__device__ bool await_counts(const RouteExchangeKernel& k, const Awaited& awaited, const ExchangeShared& memory) {
  bool arrived = true;
#pragma unroll 1
  for (std::int32_t e = threadIdx.x; e < k.num_experts; e += kCountThreads) {
    Column sums;
    arrived = arrived && await_column(k, awaited, e, &sums);
    memory.totals[e] = sums.total;
    memory.base[e] = sums.before;
  }
  return arrived;
}

// The speaker: what the headers say. Then no peer may run another op, frame or workspace as the same call: the cells of
// COUNT are the same for all workspaces, so the wait for them cannot tell.
__device__ bool await_headers(const RouteExchangeKernel& k, const Awaited& awaited, Notes* notes) {
  constexpr auto kWords = static_cast<std::int32_t>(kCountHeader);
  std::int32_t refusing = k.call.num_ranks, bad_rank = k.call.num_ranks;
  std::uint32_t num_bad_ids = 0;
  bool arrived = true;
  Patience patience;
#pragma unroll 1
  for (std::int32_t i = lane_index(); arrived && i < kWords * k.call.num_ranks; i += kWarpSize) {
    const std::int32_t rank = i / kWords, word = i % kWords;
    const Cell* cell = awaited.cells + rank * awaited.cells_per_rank + k.num_experts + word;
    Cell seen = load_fenced_system(cell);
    while (arrived && seen.epoch != awaited.epoch) {
      arrived = patience.endure(k.call, awaited, rank);
      seen = load_fenced_system(cell);
    }
    if (word == kHeaderRefusal && seen.value != kRefusalNone) refusing = min(refusing, rank);
    if (word == kHeaderNumBadIds && seen.value != 0) bad_rank = min(bad_rank, rank);
    if (word == kHeaderNumBadIds) num_bad_ids += seen.value;
  }
  fence_acquire_system();
  __syncwarp();  // what one lane has acquired, all have
  refusing = __reduce_min_sync(kAllLanes, refusing);
  bad_rank = __reduce_min_sync(kAllLanes, bad_rank);
  num_bad_ids = __reduce_add_sync(kAllLanes, num_bad_ids);
  if (lane_index() == 0) {
    notes->refusing_rank = refusing < k.call.num_ranks ? refusing : -1;
    notes->bad_rank = bad_rank < k.call.num_ranks ? bad_rank : -1;
    notes->num_bad_ids = num_bad_ids;
  }
  return arrived && (k.call.check_progress == 0 || all_agree(k.call, awaited, {lane_index(), kWarpSize}));
}

__device__ std::uint32_t header_of(const RouteExchangeKernel& k, std::int32_t rank, std::uint32_t word) {
  const std::int64_t width = k.num_experts + kCountHeader;
  return load_relaxed_system(at<const Cell>(k.call.window, k.count_cells) + rank * width + k.num_experts + word).value;
}

// One thread.
__device__ __noinline__ void record_bad_ids(const RouteExchangeKernel& k, const Notes& notes) {
  change_control(k.call, [&](Control& control) {
    const std::uint64_t high = header_of(k, notes.bad_rank, kHeaderBadValueHigh);
    control.num_bad_ids += notes.num_bad_ids;
    control.bad_value = static_cast<std::int64_t>(high << 32 | header_of(k, notes.bad_rank, kHeaderBadValueLow));
    control.bad_rank = notes.bad_rank;
    control.bad_token = static_cast<std::int32_t>(header_of(k, notes.bad_rank, kHeaderBadToken));
    control.bad_topk = header_of(k, notes.bad_rank, kHeaderBadTopk);
  });
}

// The count threads. `base`: in, rows of lower ranks; out, the slot of this rank's first token, also to `route_base`
// unless that is null.
__device__ void write_zones(const RouteExchangeKernel& k, const ExchangeShared& memory, std::int64_t* route_base) {
#pragma unroll 1
  for (std::int32_t e = threadIdx.x; e < k.num_experts; e += kCountThreads) {
    const std::int32_t owner = e / k.num_local_experts;
    const std::int64_t first = memory.prefix[owner * k.num_local_experts];
    const std::int64_t start = memory.prefix[e] - first;
    memory.base[e] = slot_at(owner, start + memory.base[e]);
    if (route_base != nullptr) route_base[e] = memory.base[e];
    if (owner == k.call.rank) {
      write_zone(k, e - owner * k.num_local_experts, start, memory.prefix[e + 1] - first, memory.totals[e]);
    }
  }
}

// One count warp, few tokens: its slots.
__device__ void place_slots(const RouteExchangeKernel& k, const ExchangeShared& memory) {
  const WarpSlots mine(k.ids);
  const std::int32_t num = mine.num_of_live(k.ids);
  auto* slots = at<std::int64_t>(k.slot_map) + mine.first;
  std::uint32_t* next = memory.counts + warp_index() * k.num_experts;
  take_slots(k, memory.keys + mine.in_block, memory.base, next, num, slots);
#pragma unroll 1
  for (std::int32_t i = num + lane_index(); i < mine.num; i += kWarpSize) slots[i] = kNoSlot;
}

// The speaker: a refusal of the lowest rank that has one completes the round with ARRIVED.
__device__ __noinline__ void end_refused(const RouteExchangeKernel& k, const Notes& notes, std::uint32_t round) {
  if (lane_index() == 0) record_refusal(k.call, notes.refusing_rank, header_of(k, notes.refusing_rank, kHeaderRefusal));
  __syncwarp();
  fence_release_system();  // all that was read of the headers
  publish(k.call, LaneWindows(k.call), k.arrived_cells, {round, kRefusalNone});
}

// What follows from everybody's counts. True: refused.
__device__ bool conclude(const RouteExchangeKernel& k, const ExchangeShared& memory, const Notes& notes,
                         std::uint32_t round, std::int64_t* route_base) {
  const bool refused = notes.refusing_rank >= 0;
  if (threadIdx.x == 0) store_relaxed_device(at<std::uint32_t>(k.call.refused), refused ? k.call.order : 0);
  if (refused) {
    if (is_speaker()) end_refused(k, notes, round);
    return true;
  }
  release_next();
  sum_zones(k, memory.totals, memory.prefix);
  if (!is_speaker()) {
    write_zones(k, memory, route_base);
    return false;
  }
  write_demand(k, memory.prefix, k.repeats == 0);
  if (lane_index() == 0 && notes.num_bad_ids != 0 && k.repeats == 0) record_bad_ids(k, notes);
  return false;
}

// Waits for COUNT and draws the conclusions; a refused round ends with ARRIVED. False: refused, or given up.
// `route_base`: see write_zones.
__device__ bool finish_round(const RouteExchangeKernel& k, const ExchangeShared& memory, std::uint32_t round,
                             std::int64_t* route_base, Notes* notes) {
  bool refused = false;
  if (k.steps & kRouteAwait) {
    const Cell* cells = at<const Cell>(k.call.window, k.count_cells);
    const Awaited awaited{kPhaseCount, round, cells, k.num_experts + kCountHeader, notes->call};
    const bool arrived = is_speaker() ? await_headers(k, awaited, notes) : await_counts(k, awaited, memory);
    if (!__syncthreads_and(arrived)) return false;
    refused = conclude(k, memory, *notes, round, route_base);
  } else if (k.steps & kRouteAwaitRefused) {
    refused = refused_order(k.call) == k.call.order;
  }
  if (refused && (k.steps & kRouteAwaitRefused) && is_speaker()) {
    const Cell* cells = at<const Cell>(k.call.window, k.arrived_cells);
    await_all(k.call, {kPhaseArrived, round, cells, 1, notes->call});
  }
  return !refused;
}

// Many tokens: the counts of all chunks lie in route_scratch and become prefixes over the chunks.
__device__ void exchange(const RouteExchangeKernel& k, const ExchangeShared& memory, std::uint32_t round,
                         Notes* notes) {
  const bool is_wide = k.num_experts % 4 == 0;
  const ChunkGroups<uint4> fours(k);
  const ChunkGroups<std::uint32_t> ones(k);
  auto* partial = reinterpret_cast<uint4*>(memory.partial);
  const bool publishes = k.steps & kRoutePublish;
  bool opened = true;
  if (is_speaker()) {
    if (lane_index() == 0 && k.call.refusal == kRefusalNone) notes->own = *at<const BadIds>(k.bad_ids);
    opened = open_round(k, notes);
  } else if (publishes) {
    if (is_wide) sum_groups(k, fours, partial);
    if (!is_wide) sum_groups(k, ones, memory.partial);
  }
  fence_release_system();
  if (!__syncthreads_and(opened)) return;

  if (publishes) {
    const std::int32_t num_groups = is_wide ? fours.num_groups : ones.num_groups;
    publish_round(k, memory, round, notes->own, notes, [&](std::int32_t e) {
      std::uint32_t count = 0;
      for (std::int32_t i = 0; i < num_groups; ++i) count += memory.partial[i * k.num_experts + e];
      return count;
    });
    if (is_wide) write_prefixes(k, fours, partial);
    if (!is_wide) write_prefixes(k, ones, memory.partial);
  }
  finish_round(k, memory, round, at<std::int64_t>(k.route_base), notes);
}

// The speaker, few tokens: the bad ids of all blocks.
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

// The first block, few tokens: adds up the blocks and exchanges the sums. False: no slots are taken.
__device__ bool exchange_sums(const RouteExchangeKernel& k, const ExchangeShared& memory, std::uint32_t round,
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
__device__ void sum_lower_blocks(const RouteExchangeKernel& k, const ExchangeShared& memory) {
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

// Few tokens: all of route. The first block of the cluster talks to the peers; the others wait at a barrier.
__device__ void route(const RouteExchangeKernel& k, const ExchangeShared& memory, std::uint32_t round, Notes* notes) {
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

// Shapes: one block; fused, a cluster of up to 8, whose first one talks. route_scratch [chunks, E] int32: counts in,
// prefixes over the chunks out; count_cells [R, E + 8] of every rank; route_base [E] int64, offs [L] int32, counts [2 L
// + 1] int64, overflow [1] float32: out.
//
// Example, R = 2, E = 4 (L = 2), A = 4, C = 12; rank 0 counts {3, 1, 0, 5}, rank 1 {2, 0, 0, 2}. Rows of the experts:
// {5, 1, 0, 7}, padded {8, 4, 0, 8}. On rank 1: the slots in route_base are rows {3, 9, 0, 5} of ranks {0, 0, 1, 1}
// (rank 0's rows come first in each zone), zones 2 and 3 are rows [0, 0) and [0, 8): offs = {0, 8}, counts = {0, 8, 0,
// 7, 8}. Demands are 12 and 8: overflow 0.
//
// Fused, it counts the ids before and takes the slots after: one launch instead of three, of a cluster of blocks, for
// as many tokens as their shared memory holds ids. Each count warp has a contiguous part of the slots.
template <bool kFused>
__global__ void __launch_bounds__(kThreads, 2) route_exchange_kernel(const __grid_constant__ RouteExchangeKernel k) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Notes notes;
  ExchangeShared memory;
  carve<kFused>(shared, k.ids, k.num_experts, k.call.num_ranks, gridDim.x, &memory);
  prepare<kFused>(k, memory, &notes);
  await_previous();
  const std::uint32_t round = at<const FrameCounters>(k.frame_counters)->round + ((k.steps & kRoutePublish) ? 1 : 0);

  if constexpr (kFused) {
    route(k, memory, round, &notes);
  } else {
    exchange(k, memory, round, &notes);
  }
}

template <bool kFused>
std::size_t shared_bytes(const KernelIds& ids, std::int64_t num_experts, std::int64_t num_ranks,
                         std::uint32_t num_blocks) {
  ExchangeShared memory;
  return carve<kFused>(nullptr, ids, num_experts, num_ranks, num_blocks, &memory);
}

}  // namespace

bool fits_fused_route(const RouteExchangeKernel& kernel, const Target& target) {
  const std::uint32_t num_blocks = num_cluster_blocks(kernel.ids, target);
  return shared_bytes<true>(kernel.ids, kernel.num_experts, kernel.call.num_ranks, num_blocks) <= kMaxFusedBytes;
}

std::size_t exchange_shared_bytes(std::int64_t num_experts, std::int64_t num_ranks) {
  return kStaticSharedBytes + shared_bytes<false>({}, num_experts, num_ranks, 1);
}

void launch_route_fused(const RouteExchangeKernel& kernel, const Target& target) {
  const std::uint32_t num_blocks = num_cluster_blocks(kernel.ids, target);
  const std::size_t nbytes = shared_bytes<true>(kernel.ids, kernel.num_experts, kernel.call.num_ranks, num_blocks);
  launch("route_exchange_kernel<fused>", route_exchange_kernel<true>, {num_blocks, kThreads, nbytes, num_blocks != 1},
         kernel, target.stream);
}

void launch_route_exchange(const RouteExchangeKernel& kernel, const Target& target) {
  const std::size_t nbytes = shared_bytes<false>(kernel.ids, kernel.num_experts, kernel.call.num_ranks, 1);
  launch("route_exchange_kernel", route_exchange_kernel<false>, {1, kThreads, nbytes}, kernel, target.stream);
}

void load_route_exchange() {
  load("route_exchange_kernel", route_exchange_kernel<false>);
  load("route_exchange_kernel<fused>", route_exchange_kernel<true>);
  allow_all_shared("route_exchange_kernel", route_exchange_kernel<false>);
  allow_all_shared("route_exchange_kernel<fused>", route_exchange_kernel<true>);
}

}  // namespace epbuf::cuda

// A round of COUNT as one block of kExchangeThreads runs it: this rank's rows for every expert go to all ranks, and
// from everybody's follow the zones of its own receive region and the slots of its own tokens' first rows.
#pragma once

#include "chain.cuh"
#include "route.cuh"
#include "wait.cuh"
#include "zones.cuh"

namespace epbuf::cuda {

constexpr std::uint32_t kExchangeThreads = kZoneThreads;
constexpr std::uint32_t kCountWarps = kExchangeThreads / kWarpSize - 1;
constexpr std::uint32_t kCountThreads = kCountWarps * kWarpSize;
constexpr std::int32_t kBatch = 4;  // loads or stores in flight per thread

// The last warp opens the round while the others count, and reads the headers of COUNT while they read the counts.
__device__ __forceinline__ bool is_speaker() { return threadIdx.x >= kCountThreads; }

// Shared memory of the block; what the counting needs comes behind it.
struct ExchangeShared {
  std::int64_t* prefix;    // [E + 1] padded rows of the experts before
  std::int64_t* base;      // [E] rows of lower ranks, then the slot of this rank's first token
  std::uint64_t* windows;  // [R] of all ranks
  std::uint32_t* totals;   // [E] rows from all ranks
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

__host__ __device__ inline void take_exchange(Pieces* pieces, void* shared, std::int64_t num_experts,
                                              std::int64_t num_ranks, ExchangeShared* memory) {
  memory->prefix = pieces->take<std::int64_t>(shared, num_experts + 1);
  memory->base = pieces->take<std::int64_t>(shared, num_experts);
  memory->windows = pieces->take<std::uint64_t>(shared, num_ranks);
  memory->totals = pieces->take<std::uint32_t>(shared, num_experts);
}

// What the block needs and no earlier kernel writes, and zeros in `counts`. Ends with a barrier.
__device__ inline void prepare(const RouteExchangeKernel& k, const ExchangeShared& memory, Notes* notes,
                               std::uint32_t* counts, std::int32_t num_counts) {
#pragma unroll 1
  for (std::int32_t rank = threadIdx.x; rank < k.call.num_ranks; rank += kExchangeThreads) {
    memory.windows[rank] = window_of(k.call, rank);
  }
  if (threadIdx.x == 0) notes->own = kNoBadIds;
#pragma unroll 1
  for (std::int32_t i = threadIdx.x; i < num_counts; i += kExchangeThreads) counts[i] = 0;
  __syncthreads();
}

// The number of the frame's round that this kernel works on.
__device__ __forceinline__ std::uint32_t round_of(const RouteExchangeKernel& k) {
  return at<const FrameCounters>(k.frame_counters)->round + ((k.steps & kRoutePublish) ? 1 : 0);
}

// The speaker: numbers the call and tells every rank. False: nothing is done, see Marks::skip.
__device__ inline bool open_round(const RouteExchangeKernel& k, Notes* notes) {
  const LaneWindows windows(k.call);
  const std::uint32_t before = current_call(k.call);
  if (warp_skips(k.call)) return false;
  const std::uint32_t number = before + ((k.steps & kRoutePublish) ? 1 : 0);
  if (k.steps & kRoutePublish) announce(k.call, windows, number);
  if (lane_index() == 0) notes->call = number;
  return true;
}

// One thread: the header words of this rank, and bad_ids back to "none" for the next round.
__device__ inline void write_header(const RouteExchangeKernel& k, const BadIds& bad, std::uint32_t* header) {
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

// The block publishes this rank's row; before its last barrier every thread has issued fence_release_system.
// `count_of(e)`: rows for expert e, asked by one count thread. PROGRESS comes before the speaker's cells, the header.
template <typename CountOf>
__device__ inline void publish_round(const RouteExchangeKernel& k, const ExchangeShared& memory, std::uint32_t round,
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
__device__ inline bool await_column(const RouteExchangeKernel& k, const Awaited& awaited, std::int32_t column,
                                    Column* sums) {
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
__device__ inline bool await_counts(const RouteExchangeKernel& k, const Awaited& awaited,
                                    const ExchangeShared& memory) {
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
__device__ inline bool await_headers(const RouteExchangeKernel& k, const Awaited& awaited, Notes* notes) {
  constexpr auto kWords = static_cast<std::int32_t>(kCountHeader);
  std::int32_t refusing = k.call.num_ranks, bad_rank = k.call.num_ranks;
  std::uint32_t num_bad_ids = 0;
  bool arrived = true;
  Patience patience;
#pragma unroll 1
  for (std::int32_t i = lane_index(); arrived && i < kWords * k.call.num_ranks; i += kWarpSize) {
    const std::int32_t rank = i / kWords, word = i % kWords;
    const Cell* cell = awaited.cells + rank * awaited.cells_per_rank + k.num_experts + word;
    const Cell seen = await_cell(k.call, awaited, rank, cell, &patience, &arrived);
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
  return arrived && (k.call.check_progress == 0 || all_agree(k.call, awaited));
}

__device__ inline std::uint32_t header_of(const RouteExchangeKernel& k, std::int32_t rank, std::uint32_t word) {
  const std::int64_t width = k.num_experts + kCountHeader;
  return load_relaxed_system(at<const Cell>(k.call.window, k.count_cells) + rank * width + k.num_experts + word).value;
}

// One thread.
__device__ __noinline__ inline void record_bad_ids(const RouteExchangeKernel& k, const Notes& notes) {
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
__device__ inline void write_zones(const RouteExchangeKernel& k, const ExchangeShared& memory,
                                   std::int64_t* route_base) {
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

// The speaker: records the refusal of the lowest rank that has one, and completes the round with ARRIVED.
__device__ __noinline__ inline void end_refused(const RouteExchangeKernel& k, const Notes& notes, std::uint32_t round) {
  if (lane_index() == 0) record_refusal(k.call, notes.refusing_rank, header_of(k, notes.refusing_rank, kHeaderRefusal));
  __syncwarp();
  fence_release_system();  // all that was read of the headers
  publish(k.call, LaneWindows(k.call), k.arrived_cells, {round, kRefusalNone});
}

// What follows from everybody's counts. True: refused.
__device__ inline bool conclude(const RouteExchangeKernel& k, const ExchangeShared& memory, const Notes& notes,
                                std::uint32_t round, std::int64_t* route_base) {
  const bool refused = notes.refusing_rank >= 0;
  if (threadIdx.x == 0) mark_frame(k.call, refused);
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
__device__ inline bool finish_round(const RouteExchangeKernel& k, const ExchangeShared& memory, std::uint32_t round,
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

}  // namespace epbuf::cuda

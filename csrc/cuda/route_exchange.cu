// The exchange of route for many tokens, the second of three kernels: the first has counted them in chunks, the third
// takes the slots of each chunk.
#include "exchange.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::size_t kStaticSharedBytes = 1024;  // at most

struct ChunkedShared : ExchangeShared {
  std::uint32_t* partial;  // [max(E, 4 count threads)] sums of chunk groups
};

// Returns the bytes used.
__host__ __device__ std::size_t carve(void* shared, std::int64_t num_experts, std::int64_t num_ranks,
                                      ChunkedShared* memory) {
  Pieces pieces;
  take_exchange(&pieces, shared, num_experts, num_ranks, memory);
  memory->partial =
      pieces.take<std::uint32_t>(shared, num_experts > 4 * kCountThreads ? num_experts : 4 * kCountThreads);
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

// The counts of all chunks lie in route_scratch and become prefixes over the chunks.
__device__ void exchange(const RouteExchangeKernel& k, const ChunkedShared& memory, std::uint32_t round, Notes* notes) {
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

// Shapes: one block. route_scratch [chunks, E] int32: counts in, prefixes over the chunks out; count_cells [R, E + 8]
// of every rank; route_base [E] int64, offs [L] int32, counts [2 L + 1] int64, overflow [1] float32: out.
//
// Example, R = 2, E = 4 (L = 2), A = 4, C = 12; rank 0 counts {3, 1, 0, 5}, rank 1 {2, 0, 0, 2}. Rows of the experts:
// {5, 1, 0, 7}, padded {8, 4, 0, 8}. On rank 1: the slots in route_base are rows {3, 9, 0, 5} of ranks {0, 0, 1, 1}
// (rank 0's rows come first in each zone), zones 2 and 3 are rows [0, 0) and [0, 8): offs = {0, 8}, counts = {0, 8, 0,
// 7, 8}. Demands are 12 and 8: overflow 0.
__global__ void __launch_bounds__(kExchangeThreads, 2)
    route_exchange_kernel(const __grid_constant__ RouteExchangeKernel k) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Notes notes;
  ChunkedShared memory;
  carve(shared, k.num_experts, k.call.num_ranks, &memory);
  prepare(k, memory, &notes, nullptr, 0);
  await_previous();
  exchange(k, memory, round_of(k), &notes);
}

std::size_t shared_bytes(std::int64_t num_experts, std::int64_t num_ranks) {
  ChunkedShared memory;
  return carve(nullptr, num_experts, num_ranks, &memory);
}

}  // namespace

std::size_t exchange_shared_bytes(std::int64_t num_experts, std::int64_t num_ranks) {
  return kStaticSharedBytes + shared_bytes(num_experts, num_ranks);
}

void launch_route_exchange(const RouteExchangeKernel& kernel, const Target& target) {
  const std::size_t nbytes = shared_bytes(kernel.num_experts, kernel.call.num_ranks);
  launch("route_exchange_kernel", route_exchange_kernel, {1, kExchangeThreads, nbytes}, kernel, target.stream);
}

void load_route_exchange() {
  load("route_exchange_kernel", route_exchange_kernel);
  allow_all_shared("route_exchange_kernel", route_exchange_kernel);
}

}  // namespace epbuf::cuda

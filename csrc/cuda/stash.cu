// The stash: pages that hold received rows from combine to combine backward, one pool for all frames of the rank.
// Local: it talks to no peer.
#include "batch.cuh"
#include "kernels.h"
#include "record.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kPagesThreads = 1024;
constexpr std::uint32_t kThreads = 512;
constexpr std::uint32_t kBlocksPerSm = 2;

// Frames of two streams take turns. Whoever holds the lock waits for nobody.
__device__ __forceinline__ void lock_pages(StashCounters* counters) {
  if (threadIdx.x == 0) {
    while (atomicCAS(&counters->lock, 0u, 1u) != 0u) __nanosleep(100);
    __threadfence();
  }
  __syncthreads();
}

__device__ __forceinline__ void unlock_pages(StashCounters* counters) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicExch(&counters->lock, 0u);
  }
}

// Shapes: free_pages int32 [num_pages]; the table's page numbers int32 [ceil(C / page_rows)]; one block. Free pages are
// those from num_taken on; what is returned goes before them in the frame's order, and the next is taken from there.
//
// Example, 5 pages of 128 rows, 3 taken: free_pages = {_, _, _, 4, 2}; the frame has {1} and receives 300 rows:
// {_, _, 1, 4, 2} after its return, then it takes {1, 4, 2}, and num_taken is 5. With 700 rows it would take the same
// and want 6.
__global__ void __launch_bounds__(kPagesThreads) pages_kernel(const __grid_constant__ PagesKernel k) {
  await_previous();
  release_next();
  if (block_stops(k.call)) return;

  auto* counters = at<StashCounters>(k.counters);
  auto* free_pages = at<std::int32_t>(k.free_pages);
  auto* table = at<StashTable>(k.table);
  auto* numbers = at<std::int32_t>(k.table, sizeof(StashTable));
  const std::int32_t num_rows = k.takes != 0 ? *at<const std::int32_t>(k.num_rows) : 0;
  const std::int32_t num_wanted = (num_rows + k.page_rows - 1) / k.page_rows;
  lock_pages(counters);
  const StashTable old = *table;
  const std::int32_t num_kept = counters->num_taken - old.num_pages;
  const std::int32_t num_taken = min(num_wanted, k.num_pages - num_kept);
  for (std::int32_t i = threadIdx.x; i < old.num_pages; i += blockDim.x) free_pages[num_kept + i] = numbers[i];
  __syncthreads();
  for (std::int32_t i = threadIdx.x; i < num_taken; i += blockDim.x) numbers[i] = free_pages[num_kept + i];
  if (threadIdx.x == 0) {
    *table = {num_taken, num_wanted};
    counters->num_taken = num_kept + num_taken;
    counters->num_wanted += num_wanted - old.num_wanted;
    counters->peak_pages = max(counters->peak_pages, counters->num_wanted);
  }
  unlock_pages(counters);
}

// One warp copies data of a row; zeros where `from` is null.
__device__ __forceinline__ void copy_vecs(const uint4* from, uint4* to, std::int32_t num_vecs, std::uint32_t lane) {
  for (std::int32_t v = lane; v < num_vecs; v += kBatchStep)
    store_batch(to, load_batch(from, v, num_vecs), v, num_vecs);
}

// One warp copies scales of a row; zeros where `from` is null. In tiles the bytes at a row's place are those of other
// rows, too: a page has whole tiles, so that all of them move.
__device__ __forceinline__ void copy_words(const std::uint32_t* from, std::uint32_t* to, std::int32_t num_words,
                                           std::uint32_t lane) {
  for (std::int32_t w = lane; w < num_words; w += kWarpSize) to[w] = from != nullptr ? from[w] : 0;
}

// Shapes: the regions of received rows [C, row_bytes] of each part; pages uint8 [num_pages, page_bytes]; the table's
// page numbers int32. A warp takes every num_warps-th row below offs[-1]. A row without a page is left out, or comes
// back as zeros.
//
// Example, pages of 128 rows, the frame's numbers {7, 3}: row 130 is row 2 of page 3; with numbers {7} it has none.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) stash_kernel(const __grid_constant__ StashKernel k) {
  await_previous();
  release_next();
  if (warp_stops(k.call)) return;

  const GridWarp warp;
  const std::int32_t num_pages = at<const StashTable>(k.table)->num_pages;
  const auto* numbers = at<const std::int32_t>(k.table, sizeof(StashTable));
  const std::int64_t num_rows = *at<const std::int32_t>(k.num_rows);
  for (std::int64_t row = warp.index; row < num_rows; row += warp.num) {
    const std::int64_t index = row / k.page_rows, row_of_page = row % k.page_rows;
    const bool has_page = index < num_pages;
    if (!has_page && k.restores == 0) continue;
    const std::uint64_t page = k.pages + (has_page ? numbers[index] * k.page_bytes : 0);
#pragma unroll
    for (std::int32_t i = 0; i < 3; ++i) {
      const StashPart& part = k.parts[i];
      const std::uint64_t in_region = part.region + row * part.row_bytes;
      const std::uint64_t in_page = page + part.page_offset + row_of_page * part.row_bytes;
      const std::uint64_t to = k.restores != 0 ? in_region : in_page;
      const std::uint64_t from = k.restores == 0 ? in_region : has_page ? in_page : 0;
      if (i == 0) {
        const auto num_vecs = static_cast<std::int32_t>(part.row_bytes / kVecBytes);
        copy_vecs(at<const uint4>(from), at<uint4>(to), num_vecs, warp.lane);
      } else {
        const auto num_words = static_cast<std::int32_t>(part.row_bytes / sizeof(std::uint32_t));
        copy_words(at<const std::uint32_t>(from), at<std::uint32_t>(to), num_words, warp.lane);
      }
    }
  }
}

}  // namespace

void launch_pages(const PagesKernel& kernel, const Target& target) {
  launch("pages_kernel", pages_kernel, {1, kPagesThreads}, kernel, target.stream);
}

void launch_stash(const StashKernel& kernel, std::int64_t max_rows, const Target& target) {
  const std::int64_t warps_per_block = kThreads / kWarpSize;
  const std::uint32_t num_blocks = target.fit((max_rows + warps_per_block - 1) / warps_per_block, kBlocksPerSm);
  launch("stash_kernel", stash_kernel, {num_blocks, kThreads}, kernel, target.stream);
}

void load_stash() {
  load("pages_kernel", pages_kernel);
  load("stash_kernel", stash_kernel);
}

}  // namespace epbuf::cuda

#include "context.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace epbuf::cuda {
namespace {

template <typename T>
const T& element(const std::vector<T>& all, std::int32_t index, const char* what) {
  EPBUF_CHECK(index >= 0 && static_cast<std::size_t>(index) < all.size(), what, " ", index,
              " was asked for; the arena has ", all.size());
  return all[static_cast<std::size_t>(index)];
}

bool is_power_of_two(std::int32_t value) { return value >= 1 && (value & (value - 1)) == 0; }

void check_ranks(const Geometry& g, std::size_t num_windows) {
  EPBUF_CHECK(g.num_ranks >= 1 && static_cast<std::size_t>(g.num_ranks) == num_windows, "num_ranks is ", g.num_ranks,
              ", windows given: ", num_windows);
  EPBUF_CHECK(g.rank >= 0 && g.rank < g.num_ranks, "rank is ", g.rank, " of ", g.num_ranks);
  EPBUF_CHECK(g.num_experts == g.num_local_experts * g.num_ranks && g.num_local_experts >= 1, "num_experts is ",
              g.num_experts, " with ", g.num_local_experts, " local experts on ", g.num_ranks, " ranks");
}

void check_sizes(const Geometry& g) {
  const std::int64_t elem_bytes = g.token_dtype == kFp32 ? 4 : 2;
  EPBUF_CHECK(g.token_dtype >= kBf16 && g.token_dtype <= kFp32, "token_dtype is ", g.token_dtype,
              "; the engine knows bf16, fp16 and fp32 (0, 1, 2)");
  EPBUF_CHECK(g.token_row_bytes == g.hidden * elem_bytes && g.token_row_bytes % 16 == 0, "token_row_bytes is ",
              g.token_row_bytes, " with hidden = ", g.hidden, "; must be their size and a multiple of 16");
  EPBUF_CHECK(g.num_topk >= 1 && g.num_topk <= kMaxTopk, "num_topk is ", g.num_topk, "; at most ", kMaxTopk);
  EPBUF_CHECK(g.capacity_rows >= 0 && g.capacity_rows <= INT32_MAX, "capacity_rows is ", g.capacity_rows,
              "; offs is int32");
  EPBUF_CHECK(is_power_of_two(g.expert_alignment), "expert_alignment is ", g.expert_alignment,
              "; must be a power of two");
  EPBUF_CHECK(g.route_chunk_tokens >= 1 && g.route_chunk_tokens <= 1024, "route_chunk_tokens is ",
              g.route_chunk_tokens);
  const std::int64_t num_slots = static_cast<std::int64_t>(g.num_ranks) * g.max_tokens_per_rank * g.num_topk;
  EPBUF_CHECK(num_slots / g.num_ranks <= INT32_MAX, "max_tokens_per_rank * num_topk is ", num_slots / g.num_ranks,
              "; the kernels number slots by int32");
  EPBUF_CHECK(num_slots <= UINT32_MAX, "num_ranks * max_tokens_per_rank * num_topk is ", num_slots,
              "; a count is uint32");
}

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Checked before anything is allocated.
const Geometry& checked(const Geometry& g, std::size_t num_windows, int device) {
  check_ranks(g, num_windows);
  check_sizes(g);
  const int available = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const std::size_t needed = std::max(exchange_shared_bytes(g.num_experts),
                                      slots_shared_bytes(g.num_experts, g.route_chunk_tokens, g.num_topk));
  EPBUF_CHECK(needed <= static_cast<std::size_t>(available), "num_experts is ", g.num_experts, ": route needs ", needed,
              " bytes of shared memory in a block; the device has ", available);
  return g;
}

}  // namespace

CudaContext::CudaContext(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
                         std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards,
                         const std::vector<std::uint64_t>& peers, int device)
    : geometry_(checked(geometry, peers.size(), device)),
      arena_(arena),
      frames_(std::move(frames)),
      forwards_(std::move(forwards)),
      backwards_(std::move(backwards)),
      device_(device),
      window_(peers[static_cast<std::size_t>(geometry.rank)]),
      num_sms_(static_cast<std::uint32_t>(device_attribute(cudaDevAttrMultiProcessorCount, device))),
      words_(device, peers, frames_.size(), forwards_.size()) {}

const FrameOffsets& CudaContext::frame(std::int32_t index) const { return element(frames_, index, "frame"); }

const ForwardOffsets& CudaContext::forward(std::int32_t index) const {
  return element(forwards_, index, "forward workspace");
}

const BackwardOffsets& CudaContext::backward(std::int32_t index) const {
  return element(backwards_, index, "backward workspace");
}

void CudaContext::check_num_tokens(std::int32_t num_tokens) const {
  EPBUF_CHECK(num_tokens >= 0 && num_tokens <= geometry_.max_tokens_per_rank, "num_tokens is ", num_tokens,
              "; max_tokens_per_rank is ", geometry_.max_tokens_per_rank);
}

std::uint64_t CudaContext::frame_counters(std::int32_t frame) const {
  return own(arena_.frame_counters) + sizeof(FrameCounters) * static_cast<std::uint64_t>(frame);
}

std::uint64_t CudaContext::forward_use(std::int32_t workspace) const {
  return own(arena_.forward_counters) + sizeof(ForwardCounters) * static_cast<std::uint64_t>(workspace) +
         offsetof(ForwardCounters, use);
}

std::uint64_t CudaContext::backward_use(std::int32_t workspace) const {
  return own(arena_.backward_counters) + sizeof(BackwardCounters) * static_cast<std::uint64_t>(workspace) +
         offsetof(BackwardCounters, use);
}

std::uint64_t CudaContext::backward_last_ready(std::int32_t workspace) const {
  return own(arena_.backward_counters) + sizeof(BackwardCounters) * static_cast<std::uint64_t>(workspace) +
         offsetof(BackwardCounters, last_ready);
}

std::uint64_t CudaContext::last_offs(std::int32_t index) const {
  return own(frame(index).offs) + sizeof(std::int32_t) * static_cast<std::uint64_t>(geometry_.num_local_experts - 1);
}

KernelCall CudaContext::kernel_call(Op op, std::int32_t frame, std::int32_t workspace) const {
  KernelCall k{};
  k.peers = words_.peers();
  k.mirror = words_.mirror();
  k.lock = words_.lock();
  k.refused = words_.refused(frame);
  k.timeout_us = geometry_.timeout_us;
  k.window = window_;
  k.control = arena_.control;
  k.abort_cells = arena_.abort_cells;
  k.progress_cells = arena_.progress_cells;
  k.rank = geometry_.rank;
  k.num_ranks = geometry_.num_ranks;
  k.frame = frame;
  k.workspace = workspace;
  k.op = op;
  return k;
}

Target CudaContext::target(std::uint64_t stream) const {
  return {reinterpret_cast<cudaStream_t>(stream), num_sms_,
          static_cast<std::uint32_t>(std::max(0, geometry_.max_num_sms))};
}

std::int64_t CudaContext::max_padding_rows() const {
  const std::int64_t most = static_cast<std::int64_t>(geometry_.num_local_experts) * (geometry_.expert_alignment - 1);
  return std::min(most, geometry_.capacity_rows);
}

}  // namespace epbuf::cuda

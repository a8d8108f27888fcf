#include "context.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace epbuf::cuda {
namespace {

constexpr std::int64_t kMaxSlots = std::int64_t{1} << 30;  // the last stride of a loop over them stays an int32

bool is_power_of_two(std::int32_t value) { return value >= 1 && (value & (value - 1)) == 0; }

// What the kernels ask beyond what ArenaMap has checked.
void check_sizes(const Geometry& g) {
  EPBUF_CHECK(is_power_of_two(g.expert_alignment), "expert_alignment is ", g.expert_alignment,
              "; must be a power of two");
  EPBUF_CHECK(g.route_chunk_tokens >= 1 && g.route_chunk_tokens <= 1024, "route_chunk_tokens is ",
              g.route_chunk_tokens);
  const std::int64_t num_slots = static_cast<std::int64_t>(g.max_tokens_per_rank) * g.num_topk;
  EPBUF_CHECK(num_slots <= kMaxSlots, "max_tokens_per_rank * num_topk is ", num_slots,
              "; the kernels number slots by int32, and take at most ", kMaxSlots);
  const std::int64_t num_rows = num_slots * g.num_ranks;
  const std::int64_t num_padded = num_rows + static_cast<std::int64_t>(g.num_local_experts) * g.expert_alignment;
  EPBUF_CHECK(num_padded <= UINT32_MAX, "num_ranks * max_tokens_per_rank * num_topk is ", num_rows, ", with padding ",
              num_padded, " rows; rows are numbered by uint32, at most ", UINT32_MAX,
              ": lower one of them, or expert_alignment");
}

// KernelCall::order of an op that repeats nothing.
std::uint32_t order_of(Op op) { return op == kOpDispatchBackward ? 7u : static_cast<std::uint32_t>(op); }

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Before anything is allocated. Returns the device.
int checked(const Geometry& g, int device) {
  check_sizes(g);
  const int available = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const std::size_t needed =
      std::max({exchange_shared_bytes(g.num_experts, g.num_ranks), counts_shared_bytes(g.num_experts),
                slots_shared_bytes(g.num_experts, g.route_chunk_tokens, g.num_topk)});
  EPBUF_CHECK(needed <= static_cast<std::size_t>(available), "num_experts is ", g.num_experts, ": route needs ", needed,
              " bytes of shared memory in a block; the device has ", available);
  return device;
}

}  // namespace

CudaContext::CudaContext(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
                         std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards,
                         const std::vector<std::uint64_t>& peers, int device)
    : ArenaMap(geometry, arena, std::move(frames), std::move(forwards), std::move(backwards), peers.size()),
      device_(checked(geometry, device)),
      window_(peers[static_cast<std::size_t>(geometry.rank)]),
      num_sms_(static_cast<std::uint32_t>(device_attribute(cudaDevAttrMultiProcessorCount, device))),
      words_(device, peers, num_frames(), num_forwards()) {}

std::uint64_t CudaContext::frame_counters(std::int32_t frame) const {
  return own(arena().frame_counters) + sizeof(FrameCounters) * static_cast<std::uint64_t>(frame);
}

std::uint64_t CudaContext::forward_use(std::int32_t workspace) const {
  return own(arena().forward_counters) + sizeof(ForwardCounters) * static_cast<std::uint64_t>(workspace) +
         offsetof(ForwardCounters, use);
}

std::uint64_t CudaContext::backward_use(std::int32_t workspace) const {
  return own(arena().backward_counters) + sizeof(BackwardCounters) * static_cast<std::uint64_t>(workspace) +
         offsetof(BackwardCounters, use);
}

std::uint64_t CudaContext::backward_last_ready(std::int32_t workspace) const {
  return own(arena().backward_counters) + sizeof(BackwardCounters) * static_cast<std::uint64_t>(workspace) +
         offsetof(BackwardCounters, last_ready);
}

std::uint64_t CudaContext::last_offs(std::int32_t index) const {
  return own(frame(index).offs) + sizeof(std::int32_t) * static_cast<std::uint64_t>(geometry().num_local_experts - 1);
}

KernelCall CudaContext::kernel_call(Op op, std::int32_t frame, std::int32_t workspace) const {
  KernelCall k{};
  k.peers = words_.peers();
  k.mirror = words_.mirror();
  k.lock = words_.lock();
  k.refused = words_.refused(frame);
  k.timeout_us = geometry().timeout_us;
  k.window = window_;
  k.control = arena().control;
  k.abort_cells = arena().abort_cells;
  k.progress_cells = arena().progress_cells;
  k.rank = geometry().rank;
  k.num_ranks = geometry().num_ranks;
  k.frame = frame;
  k.workspace = workspace;
  k.op = op;
  k.order = order_of(op);
  return k;
}

Target CudaContext::target(std::uint64_t stream) const {
  return {reinterpret_cast<cudaStream_t>(stream), num_sms_,
          static_cast<std::uint32_t>(std::max(0, geometry().max_num_sms))};
}

std::int64_t CudaContext::max_padding_rows() const {
  const std::int64_t most = static_cast<std::int64_t>(geometry().num_local_experts) * (geometry().expert_alignment - 1);
  return std::min(most, geometry().capacity_rows);
}

}  // namespace epbuf::cuda

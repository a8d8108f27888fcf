#include "context.h"

#include <utility>

namespace epbuf {

Context::Context(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
                 std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards, Windows windows)
    : ArenaMap(geometry, arena, std::move(frames), std::move(forwards), std::move(backwards),
               static_cast<std::size_t>(windows.num_ranks())),
      windows_(std::move(windows)),
      control_(windows_.own<Control>(arena.control)),
      waiter_(windows_, ArenaMap::arena(), &control_, geometry.timeout_us),
      kernels_(row_kernels(geometry.token_dtype)) {}

FrameCounters& Context::frame_counters(std::int32_t frame) const {
  return windows_.own<FrameCounters>(ArenaMap::arena().frame_counters)[frame];
}

ForwardCounters& Context::forward_counters(std::int32_t workspace) const {
  return windows_.own<ForwardCounters>(ArenaMap::arena().forward_counters)[workspace];
}

BackwardCounters& Context::backward_counters(std::int32_t workspace) const {
  return windows_.own<BackwardCounters>(ArenaMap::arena().backward_counters)[workspace];
}

const std::int64_t* Context::slot_map(std::int32_t frame_idx) const {
  return windows_.own<const std::int64_t>(frame(frame_idx).slot_map);
}

std::byte* Context::wire_row(std::int32_t owner, std::int64_t wire_rows, const WireFormat& format,
                             std::int32_t token_rank, std::int64_t token) const {
  const std::int64_t row = token_rank * static_cast<std::int64_t>(geometry().max_tokens_per_rank) + token;
  return windows_.at<std::byte>(owner, wire_rows) + row * format.row_bytes;
}

const std::int32_t* Context::offs(std::int32_t frame_idx) const {
  return windows_.own<const std::int32_t>(frame(frame_idx).offs);
}

std::int64_t Context::num_live_rows(std::int32_t frame_idx) const {
  return offs(frame_idx)[geometry().num_local_experts - 1];
}

Status Context::exchange(const OpState& op, const Signal& signal) const {
  publish(signal);
  return await(op, signal);
}

Status Context::await(const OpState& op, const Signal& signal) const {
  return waiter_.await(op, {signal.phase, windows_.own<const Cell>(signal.cells_offset), 1, signal.epoch});
}

Status Context::await_ack(const OpState& op, std::int32_t workspace) const {
  return await(op, {kPhaseAck, forward(workspace).ack_cells, forward_counters(workspace).use, 0});
}

void Context::publish(const Signal& signal) const {
  windows_.publish(signal.cells_offset, {signal.epoch, signal.value});
}

std::int32_t Context::find_said(const Signal& signal, std::uint32_t mask) const {
  const Cell* cells = windows_.own<const Cell>(signal.cells_offset);
  for (std::int32_t rank = 0; rank < geometry().num_ranks; ++rank) {
    if ((load_relaxed_system(cells + rank).value & mask) != 0) return rank;
  }
  return -1;
}

bool Context::find_refusal(const OpState& op, const Signal& signal, Outcome* outcome) {
  const std::int32_t rank = find_said(signal, ~kStashFull);
  if (rank < 0) return false;
  const Cell* cells = windows_.own<const Cell>(signal.cells_offset);
  record_refusal(op, rank, load_relaxed_system(cells + rank).value & ~kStashFull, outcome);
  return true;
}

void Context::record_refusal(const OpState& op, std::int32_t rank, std::uint32_t refusal, Outcome* outcome) {
  control_.record_refusal(op.op, rank, refusal);
  outcome->refusing_rank = rank;
  outcome->refusal = refusal;
}

}  // namespace epbuf

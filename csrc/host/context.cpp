#include "context.h"

#include <utility>

namespace epbuf {
namespace {

template <typename T>
const T& element(const std::vector<T>& all, std::int32_t index, const char* what) {
  EPBUF_CHECK(index >= 0 && static_cast<std::size_t>(index) < all.size(), what, " ", index,
              " was asked for; the arena has ", all.size());
  return all[static_cast<std::size_t>(index)];
}

std::int64_t elem_bytes(const Geometry& geometry) { return geometry.token_dtype == kFp32 ? 4 : 2; }

const Geometry& checked(const Geometry& g, std::int32_t num_windows) {
  EPBUF_CHECK(g.num_ranks >= 1 && g.num_ranks == num_windows, "num_ranks is ", g.num_ranks,
              ", windows given: ", num_windows);
  EPBUF_CHECK(g.rank >= 0 && g.rank < g.num_ranks, "rank is ", g.rank, " of ", g.num_ranks);
  EPBUF_CHECK(g.num_experts == g.num_local_experts * g.num_ranks && g.num_local_experts >= 1, "num_experts is ",
              g.num_experts, " with ", g.num_local_experts, " local experts on ", g.num_ranks, " ranks");
  EPBUF_CHECK(g.num_topk >= 1 && g.num_topk <= kMaxTopk, "num_topk is ", g.num_topk, "; at most ", kMaxTopk);
  EPBUF_CHECK(g.token_row_bytes == g.hidden * elem_bytes(g) && g.token_row_bytes % 16 == 0, "token_row_bytes is ",
              g.token_row_bytes, " with hidden = ", g.hidden, "; must be their size and a multiple of 16");
  EPBUF_CHECK(g.capacity_rows >= 0 && g.capacity_rows <= INT32_MAX, "capacity_rows is ", g.capacity_rows,
              "; offs is int32");
  EPBUF_CHECK(g.expert_alignment >= 1, "expert_alignment is ", g.expert_alignment);
  return g;
}

}  // namespace

Context::Context(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
                 std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards, Windows windows)
    : geometry_(checked(geometry, windows.num_ranks())),
      arena_(arena),
      frames_(std::move(frames)),
      forwards_(std::move(forwards)),
      backwards_(std::move(backwards)),
      windows_(std::move(windows)),
      control_(windows_.own<Control>(arena.control)),
      waiter_(windows_, arena_, &control_, geometry.timeout_us),
      kernels_(row_kernels(geometry.token_dtype)) {}

const FrameOffsets& Context::frame(std::int32_t frame) const { return element(frames_, frame, "frame"); }

const ForwardOffsets& Context::forward(std::int32_t workspace) const {
  return element(forwards_, workspace, "forward workspace");
}

const BackwardOffsets& Context::backward(std::int32_t workspace) const {
  return element(backwards_, workspace, "backward workspace");
}

FrameCounters& Context::frame_counters(std::int32_t frame) const {
  return windows_.own<FrameCounters>(arena_.frame_counters)[frame];
}

ForwardCounters& Context::forward_counters(std::int32_t workspace) const {
  return windows_.own<ForwardCounters>(arena_.forward_counters)[workspace];
}

BackwardCounters& Context::backward_counters(std::int32_t workspace) const {
  return windows_.own<BackwardCounters>(arena_.backward_counters)[workspace];
}

const std::int64_t* Context::slot_map(std::int32_t frame_idx) const {
  return windows_.own<const std::int64_t>(frame(frame_idx).slot_map);
}

const std::int32_t* Context::offs(std::int32_t frame_idx) const {
  return windows_.own<const std::int32_t>(frame(frame_idx).offs);
}

std::int64_t Context::num_live_rows(std::int32_t frame_idx) const {
  return offs(frame_idx)[geometry_.num_local_experts - 1];
}

std::int64_t Context::row_bytes(const RowFormat& format) const {
  return format.format == kSame ? geometry_.token_row_bytes : format.row_bytes;
}

void Context::check_num_tokens(std::int32_t num_tokens) const {
  EPBUF_CHECK(num_tokens >= 0 && num_tokens <= geometry_.max_tokens_per_rank, "num_tokens is ", num_tokens,
              "; the arena holds 0 to ", geometry_.max_tokens_per_rank);
}

Status Context::exchange(const OpState& op, const Signal& signal) const {
  publish(signal);
  return await(op, signal);
}

Status Context::await(const OpState& op, const Signal& signal) const {
  return waiter_.await(op, {signal.phase, windows_.own<const Cell>(signal.cells_offset), 1, signal.epoch});
}

void Context::publish(const Signal& signal) const {
  windows_.publish(signal.cells_offset, {signal.epoch, signal.value});
}

bool Context::find_refusal(const OpState& op, const Signal& signal, Outcome* outcome) {
  const Cell* cells = windows_.own<const Cell>(signal.cells_offset);
  for (std::int32_t rank = 0; rank < geometry_.num_ranks; ++rank) {
    const std::uint32_t refusal = load_relaxed_system(cells + rank).value;
    if (refusal == kRefusalNone) continue;
    record_refusal(op, rank, refusal, outcome);
    return true;
  }
  return false;
}

void Context::record_refusal(const OpState& op, std::int32_t rank, std::uint32_t refusal, Outcome* outcome) {
  control_.record_refusal(op.op, rank, refusal);
  outcome->refusing_rank = rank;
  outcome->refusal = refusal;
}

}  // namespace epbuf

#include "arena_map.h"

#include <utility>

namespace epbuf {
namespace {

template <typename T>
const T& element(const std::vector<T>& all, std::int32_t index, const char* what) {
  EPBUF_CHECK(index >= 0 && static_cast<std::size_t>(index) < all.size(), what, " ", index,
              " was asked for; the arena has ", all.size());
  return all[static_cast<std::size_t>(index)];
}

const Geometry& checked(const Geometry& g, std::size_t num_windows) {
  EPBUF_CHECK(g.num_ranks >= 1 && static_cast<std::size_t>(g.num_ranks) == num_windows, "num_ranks is ", g.num_ranks,
              ", windows given: ", num_windows);
  EPBUF_CHECK(g.rank >= 0 && g.rank < g.num_ranks, "rank is ", g.rank, " of ", g.num_ranks);
  EPBUF_CHECK(g.num_experts == g.num_local_experts * g.num_ranks && g.num_local_experts >= 1, "num_experts is ",
              g.num_experts, " with ", g.num_local_experts, " local experts on ", g.num_ranks, " ranks");
  EPBUF_CHECK(g.num_topk >= 1 && g.num_topk <= kMaxTopk, "num_topk is ", g.num_topk, "; at most ", kMaxTopk);
  EPBUF_CHECK(g.token_dtype >= kBf16 && g.token_dtype <= kFp32, "token_dtype is ", g.token_dtype,
              "; the engines know bf16, fp16 and fp32 (0, 1, 2)");
  EPBUF_CHECK(g.token_row_bytes == g.hidden * (g.token_dtype == kFp32 ? 4 : 2) && g.token_row_bytes % 16 == 0,
              "token_row_bytes is ", g.token_row_bytes, " with hidden = ", g.hidden,
              "; must be their size and a multiple of 16");
  EPBUF_CHECK(g.capacity_rows >= 0 && g.capacity_rows <= INT32_MAX, "capacity_rows is ", g.capacity_rows,
              "; offs is int32");
  EPBUF_CHECK(g.expert_alignment >= 1, "expert_alignment is ", g.expert_alignment);
  return g;
}

PushTarget target_of(const RowFormat& format, const WireFormat& wire, std::int64_t rows, std::int64_t scales,
                     std::int64_t row_scales) {
  const std::int64_t own_scales = format.scale_row_bytes > 0 ? scales : -1;
  return {format, wire, rows, own_scales, format.format == kNvfp4 ? row_scales : -1, -1, -1, -1};
}

// Of a frame or of a forward workspace: whichever holds the received rows.
template <typename Offsets>
PushTarget receiving(const Geometry& g, const Offsets& set) {
  return target_of(g.recv, g.wire, set.recv_tokens, set.recv_scales, set.recv_row_scales);
}

// Blocked scales travel by way of `wire`, and lie in tiles then.
PushTarget by_wire(PushTarget target, std::int64_t wire) {
  if (target.format.is_blocked == 0) return target;
  target.tiles = target.scales;
  target.scales = wire;
  return target;
}

}  // namespace

ArenaMap::ArenaMap(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
                   std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards,
                   std::size_t num_windows)
    : geometry_(checked(geometry, num_windows)),
      arena_(arena),
      frames_(std::move(frames)),
      forwards_(std::move(forwards)),
      backwards_(std::move(backwards)) {}

const FrameOffsets& ArenaMap::frame(std::int32_t index) const { return element(frames_, index, "frame"); }

const ForwardOffsets& ArenaMap::forward(std::int32_t index) const {
  return element(forwards_, index, "forward workspace");
}

const BackwardOffsets& ArenaMap::backward(std::int32_t index) const {
  return element(backwards_, index, "backward workspace");
}

std::int64_t ArenaMap::row_bytes(const RowFormat& format) const {
  return format.format == kSame ? geometry_.token_row_bytes : format.row_bytes;
}

// Rows that are not kept until backward lie in the forward workspace.
PushTarget ArenaMap::received(std::int32_t frame_idx, std::int32_t workspace) const {
  const FrameOffsets& set = frame(frame_idx);
  return set.recv_tokens >= 0 ? receiving(geometry_, set) : receiving(geometry_, forward(workspace));
}

PushTarget ArenaMap::forward_target(const DispatchCall& call) const {
  PushTarget target = by_wire(received(call.frame, call.workspace), forward(call.workspace).recv_scales_wire);
  if (call.repeats == 0) target.weights = frame(call.frame).recv_topk_weights;
  if (geometry_.dedups != 0) target.wire_rows = forward(call.workspace).wire_rows;
  return target;
}

PushTarget ArenaMap::backward_target(const DispatchCall& call) const {
  const BackwardOffsets& set = backward(call.workspace);
  PushTarget target = target_of(geometry_.grad, geometry_.grad_wire, set.grad_expert_out, set.grad_expert_out_scales,
                                set.grad_expert_out_row_scales);
  if (geometry_.dedups != 0) target.wire_rows = set.grad_wire_rows;
  return by_wire(target, set.grad_expert_out_scales_wire);
}

void ArenaMap::check_num_tokens(std::int32_t num_tokens) const {
  EPBUF_CHECK(num_tokens >= 0 && num_tokens <= geometry_.max_tokens_per_rank, "num_tokens is ", num_tokens,
              "; the arena holds 0 to ", geometry_.max_tokens_per_rank);
}

void ArenaMap::check_rows(const DispatchCall& call, const RowFormat& format) const {
  frame(call.frame);
  if (call.refusal != kRefusalNone) return;
  check_num_tokens(call.num_tokens);
  EPBUF_CHECK(call.scales == 0 || format.scale_row_bytes > 0, "scales were given, and format ", format.format,
              " has none");
  EPBUF_CHECK(call.row_scales == 0 || format.format == kNvfp4, "row scales were given, and format ", format.format,
              " has none");
}

void ArenaMap::check_sources(const CombineCall& call) const {
  frame(call.frame);
  if (call.refusal != kRefusalNone) return;
  check_num_tokens(call.num_tokens);
  EPBUF_CHECK(call.rows_source <= kSourceZero && call.weights_source <= kSourceZero, "rows_source is ",
              call.rows_source, ", weights_source is ", call.weights_source);
}

void ArenaMap::check_stash(const StashCall& call) const {
  EPBUF_CHECK(frame(call.frame).stash_table >= 0, "frame ", call.frame, " stashes no rows");
  EPBUF_CHECK(call.move <= kRestoreRows, "move is ", call.move);
  forward(call.workspace);
}

}  // namespace epbuf

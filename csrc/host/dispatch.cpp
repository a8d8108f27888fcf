// Dispatch and combine backward: push rows into the peers' slots, zero the padding of the own zones.
#include <cstring>

#include "context.h"
#include "slot.h"

namespace epbuf {
namespace {

// Where pushed rows land in every window.
struct Target {
  std::int64_t rows_offset;
  std::int64_t weights_offset;  // -1: no weights travel
};

void push_row(const Context& context, const DispatchCall& call, const Target& target, std::int64_t token, Slot slot) {
  const std::int64_t row_bytes = context.geometry().token_row_bytes;
  std::byte* to = context.windows().at<std::byte>(slot.rank, target.rows_offset) + slot.row * row_bytes;
  if (call.rows == 0) {
    std::memset(to, 0, static_cast<std::size_t>(row_bytes));  // a missing gradient counts as rows of zeros
  } else {
    const std::byte* from = reinterpret_cast<const std::byte*>(call.rows) + token * call.row_stride_bytes;
    std::memcpy(to, from, static_cast<std::size_t>(row_bytes));
  }
}

float weight_of(const DispatchCall& call, std::int64_t token, std::int32_t k) {
  if (call.topk_weights == 0) return 1.0f;
  return reinterpret_cast<const float*>(call.topk_weights)[token * call.topk_weights_row_stride + k];
}

void push_token(const Context& context, const DispatchCall& call, const Target& target, std::int64_t token) {
  const std::int32_t num_topk = context.geometry().num_topk;
  const std::int64_t* slots = context.slot_map(call.frame) + token * num_topk;
  for (std::int32_t k = 0; k < num_topk; ++k) {
    if (slots[k] == kNoSlot) continue;
    const Slot slot = unpack_slot(slots[k]);
    push_row(context, call, target, token, slot);
    if (target.weights_offset < 0) continue;
    context.windows().at<float>(slot.rank, target.weights_offset)[slot.row] = weight_of(call, token, k);
  }
}

void zero_rows(const Context& context, const Target& target, std::int64_t begin, std::int64_t end) {
  const std::int64_t row_bytes = context.geometry().token_row_bytes;
  const auto num_rows = static_cast<std::size_t>(end - begin);
  std::memset(context.windows().own<std::byte>(target.rows_offset) + begin * row_bytes, 0, num_rows * row_bytes);
  if (target.weights_offset < 0) return;
  std::memset(context.windows().own<float>(target.weights_offset) + begin, 0, num_rows * sizeof(float));
}

// Every round, because the user may have written there since; the peers' rows are elsewhere, so no order is needed.
void zero_padding(const Context& context, std::int32_t frame, const Target& target) {
  const std::int32_t num_zones = context.geometry().num_local_experts;
  const std::int32_t* offs = context.offs(frame);
  const std::int64_t* valid = context.windows().own<const std::int64_t>(context.frame(frame).counts) + num_zones;
  for (std::int32_t j = 0; j < num_zones; ++j) {
    const std::int64_t start = j == 0 ? 0 : offs[j - 1];
    zero_rows(context, target, start + valid[j], offs[j]);
  }
}

void push_all(const Context& context, const DispatchCall& call, const Target& target) {
  for (std::int64_t token = 0; token < call.num_tokens; ++token) push_token(context, call, target, token);
  zero_padding(context, call.frame, target);
}

// recv_tokens lie in the frame or, with save_recv=False, in the forward workspace.
Target forward_target(const Context& context, const DispatchCall& call) {
  const FrameOffsets& frame = context.frame(call.frame);
  const bool in_frame = frame.recv_tokens >= 0;
  return {in_frame ? frame.recv_tokens : context.forward(call.workspace).recv_tokens, frame.recv_topk_weights};
}

void note_open(Context& context, const DispatchCall& call) {
  if (call.expects_open != 0 && context.frame_counters(call.frame).open == 0) context.control().count_early_reuse();
}

// The peers that read this workspace's gradients last are done with them.
Status await_grad_ack(const Context& context, const OpState& op, std::int32_t workspace) {
  const std::uint32_t last_use = context.backward_counters(workspace).last_ready;
  return context.await(op, {kPhaseGradAck, context.backward(workspace).grad_ack_cells, last_use, 0});
}

}  // namespace

void check_dispatch(const Context& context, const DispatchCall& call) {
  context.frame(call.frame);
  if (call.refusal != kRefusalNone) return;
  context.check_num_tokens(call.num_tokens);
  EPBUF_CHECK(call.scales == 0 && call.row_scales == 0,
              "the host engine moves rows of the token dtype, without scales");
}

void check_combine_backward(const Context& context, const DispatchCall& call) {
  context.backward(call.workspace);
  check_dispatch(context, call);
}

// The round was agreed on by route, so ARRIVED is the only signal; it carries the refusal of a rank that found its rows
// unusable only now.
Status run_dispatch(Context& context, const OpState& op, const DispatchCall& call, Outcome* outcome) {
  const FrameOffsets& frame = context.frame(call.frame);
  if (call.refusal == kRefusalNone) push_all(context, call, forward_target(context, call));
  const Signal arrived{kPhaseArrived, frame.arrived_cells, context.frame_counters(call.frame).round, call.refusal};
  EPBUF_TRY(context.exchange(op, arrived));
  if (context.find_refusal(op, arrived, outcome)) return kRefused;
  context.frame_counters(call.frame).open = 1;
  return kOk;
}

Status run_combine_backward(Context& context, const OpState& op, const DispatchCall& call, Outcome* outcome) {
  const BackwardOffsets& workspace = context.backward(call.workspace);
  EPBUF_TRY(await_grad_ack(context, op, call.workspace));
  const std::uint32_t use = ++context.backward_counters(call.workspace).use;
  const Signal go{kPhaseGo, workspace.go_cells, use, call.refusal};
  EPBUF_TRY(context.exchange(op, go));
  const bool refused = context.find_refusal(op, go, outcome);
  if (!refused) {
    note_open(context, call);
    push_all(context, call, {workspace.grad_expert_out, -1});
  }
  EPBUF_TRY(context.exchange(op, {kPhaseGradArrived, workspace.grad_arrived_cells, use, 0}));
  return refused ? kRefused : kOk;
}

}  // namespace epbuf

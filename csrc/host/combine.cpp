// Combine and dispatch backward: stage own rows, pull the peers', or sums of them. Weight gradients of a weighted
// combine.
#include <cstring>
#include <vector>

#include "context.h"
#include "slot.h"

namespace epbuf {
namespace {

// Where the rows of a call lie in every window, and the sums of rows by rank.
struct PulledRows {
  std::int64_t rows;
  std::int64_t wire_rows;
  const WireFormat& wire;
};

// Rows without a gap go as one copy: libc then stores past the caches, which the peers' rows need more.
void copy_rows(const Context& context, const CombineCall& call, std::byte* to, std::int64_t num_rows) {
  const std::int64_t row_bytes = context.geometry().token_row_bytes;
  const std::byte* from = reinterpret_cast<const std::byte*>(call.rows);
  if (call.row_stride_bytes == row_bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(num_rows * row_bytes));
    return;
  }
  for (std::int64_t row = 0; row < num_rows; ++row, from += call.row_stride_bytes, to += row_bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(row_bytes));
  }
}

// Each row times its factor, in the copy.
void scale_rows(const Context& context, const CombineCall& call, std::byte* to, const float* factors) {
  const Geometry& g = context.geometry();
  const std::int64_t num_rows = context.num_live_rows(call.frame);
  const std::byte* from = reinterpret_cast<const std::byte*>(call.rows);
  for (std::int64_t row = 0; row < num_rows; ++row, from += call.row_stride_bytes, to += g.token_row_bytes) {
    context.kernels().scale(from, factors[row], to, g.hidden);
  }
}

void stage_rows(Context& context, const CombineCall& call, std::int64_t rows_offset, const float* factors) {
  if (call.rows_source == kSourceWindow) return;
  const std::int64_t num_rows = context.num_live_rows(call.frame);
  const std::int64_t num_bytes = num_rows * context.geometry().token_row_bytes;
  std::byte* to = context.windows().own<std::byte>(rows_offset);
  if (call.rows_source == kSourceTensor && factors != nullptr) {
    scale_rows(context, call, to, factors);
  } else if (call.rows_source == kSourceTensor) {
    copy_rows(context, call, to, num_rows);
  } else {
    std::memset(to, 0, static_cast<std::size_t>(num_bytes));
  }
  context.control().count_staged_bytes(num_bytes);
}

void stage_weights(const Context& context, const CombineCall& call, std::int64_t weights_offset) {
  if (call.weights_source == kSourceWindow) return;
  const std::size_t num_bytes = static_cast<std::size_t>(context.num_live_rows(call.frame)) * sizeof(float);
  float* to = context.windows().own<float>(weights_offset);
  if (call.weights_source == kSourceTensor) {
    std::memcpy(to, reinterpret_cast<const float*>(call.weights), num_bytes);
  } else {
    std::memset(to, 0, num_bytes);
  }
}

// The sum of what several rows of this rank hold for a token of another one, for that rank to pull.
void add_for_peers(const Context& context, std::int32_t frame, const PulledRows& from) {
  const Geometry& g = context.geometry();
  if (g.adds_by_rank == 0) return;
  const std::byte* own = context.windows().own<const std::byte>(from.rows);
  context.for_each_by_wire(frame, from.wire_rows, from.wire, [&](const RowsOnRank& here, std::byte* sum) {
    const std::byte* rows[kMaxTopk];
    for (std::int32_t i = 0; i < here.num; ++i) rows[i] = own + here.rows[i] * g.token_row_bytes;
    context.kernels().sum(rows, here.num, sum, g.hidden);
  });
}

// The rows that a token of this rank is the sum of, in the order of the additions.
class Addends {
 public:
  Addends(const Context& context, const PulledRows& from)
      : context_(context), from_(from), own_sum_(static_cast<std::size_t>(context.geometry().token_row_bytes)) {}

  const std::byte* const* rows() const { return rows_; }
  std::int32_t num() const { return num_; }

  void find(const std::int64_t* slots, std::int64_t token) {
    num_ = 0;
    if (context_.geometry().adds_by_rank == 0) return find_in_k_order(slots);
    for (std::int32_t rank = 0; rank < context_.geometry().num_ranks; ++rank) add_rank(slots, token, rank);
  }

 private:
  const std::byte* row_of(Slot slot) const {
    return context_.windows().at<const std::byte>(slot.rank, from_.rows) +
           slot.row * context_.geometry().token_row_bytes;
  }

  void find_in_k_order(const std::int64_t* slots) {
    for (std::int32_t k = 0; k < context_.geometry().num_topk; ++k) {
      if (slots[k] != kNoSlot) rows_[num_++] = row_of(unpack_slot(slots[k]));
    }
  }

  void add_rank(const std::int64_t* slots, std::int64_t token, std::int32_t rank) {
    const Geometry& g = context_.geometry();
    const RowsOnRank there(slots, g.num_topk, rank);
    if (there.num == 0) return;
    if (goes_by_wire(g.rank, rank, there.num)) {
      rows_[num_++] = context_.wire_row(rank, from_.wire_rows, from_.wire, g.rank, token);
    } else if (there.num == 1) {
      rows_[num_++] = row_of({rank, there.rows[0]});
    } else {
      add_own(there);
    }
  }

  void add_own(const RowsOnRank& here) {
    const std::byte* rows[kMaxTopk];
    for (std::int32_t i = 0; i < here.num; ++i) rows[i] = row_of({context_.geometry().rank, here.rows[i]});
    context_.kernels().sum(rows, here.num, own_sum_.data(), context_.geometry().hidden);
    rows_[num_++] = own_sum_.data();
  }

  const Context& context_;
  const PulledRows& from_;
  std::vector<std::byte> own_sum_;
  const std::byte* rows_[kMaxTopk];
  std::int32_t num_ = 0;
};

// out = sum over the live slots of a token; one without any gets a zero row.
void pull_rows(const Context& context, const CombineCall& call, const PulledRows& from) {
  if (call.out == 0) return;
  const Geometry& g = context.geometry();
  const std::int64_t* slots = context.slot_map(call.frame);
  auto* out = reinterpret_cast<std::byte*>(call.out);
  Addends addends(context, from);
  for (std::int64_t token = 0; token < call.num_tokens;
       ++token, slots += g.num_topk, out += call.out_row_stride_bytes) {
    addends.find(slots, token);
    if (addends.num() == 0) {
      std::memset(out, 0, static_cast<std::size_t>(g.token_row_bytes));
    } else {
      context.kernels().sum(addends.rows(), addends.num(), out, g.hidden);
    }
  }
}

void pull_weights(const Context& context, const CombineCall& call, std::int64_t weights_offset) {
  if (call.out_weights == 0) return;
  const std::int64_t* slots = context.slot_map(call.frame);
  auto* out = reinterpret_cast<float*>(call.out_weights);
  const std::int64_t num_slots = static_cast<std::int64_t>(call.num_tokens) * context.geometry().num_topk;
  for (std::int64_t i = 0; i < num_slots; ++i) {
    const Slot slot = unpack_slot(slots[i]);
    out[i] = slots[i] == kNoSlot ? 0.0f : context.windows().at<const float>(slot.rank, weights_offset)[slot.row];
  }
}

// A use begins with combine backward, or here when there was none (a frozen or unused expert output).
Status begin_use(const Context& context, const OpState& op, const CombineCall& call) {
  if (call.begins_use == 0) return kOk;
  BackwardCounters& counters = context.backward_counters(call.workspace);
  const std::int64_t ack_cells = context.backward(call.workspace).grad_ack_cells;
  EPBUF_TRY(context.await(op, {kPhaseGradAck, ack_cells, counters.last_ready, 0}));
  ++counters.use;
  return kOk;
}

// READY is out on every rank. A refused pull ends with everybody's ACK, so that the next call may follow at once.
Status finish_refused(const Context& context, const OpState& op, const Signal& ack) {
  EPBUF_TRY(context.exchange(op, ack));
  return kRefused;
}

}  // namespace

void check_combine(const Context& context, const CombineCall& call) {
  context.forward(call.workspace);
  context.check_sources(call);
}

void check_dispatch_backward(const Context& context, const CombineCall& call) {
  context.backward(call.workspace);
  context.check_sources(call);
}

Status run_combine(Context& context, const OpState& op, const CombineCall& call, Outcome* outcome) {
  const ForwardOffsets& workspace = context.forward(call.workspace);
  const float* factors = call.weights_source == kSourceTensor ? reinterpret_cast<const float*>(call.weights) : nullptr;
  const PulledRows from{workspace.expert_out, workspace.wire_rows, context.geometry().wire};
  if (call.refusal == kRefusalNone) {
    stage_rows(context, call, workspace.expert_out, factors);
    add_for_peers(context, call.frame, from);
  }
  const std::uint32_t use = ++context.forward_counters(call.workspace).use;
  const Signal ready{kPhaseReady, workspace.ready_cells, use, call.refusal};
  const Signal ack{kPhaseAck, workspace.ack_cells, use, 0};
  EPBUF_TRY(context.exchange(op, ready));
  if (context.find_refusal(op, ready, outcome)) return finish_refused(context, op, ack);
  pull_rows(context, call, from);
  if (context.restores_rows()) context.publish(ack);
  return kOk;
}

Status run_dispatch_backward(Context& context, const OpState& op, const CombineCall& call, Outcome* outcome) {
  const BackwardOffsets& workspace = context.backward(call.workspace);
  const PulledRows from{workspace.grad_recv_tokens, workspace.grad_wire_rows, context.geometry().grad_wire};
  EPBUF_TRY(begin_use(context, op, call));
  if (call.refusal == kRefusalNone) {
    stage_rows(context, call, workspace.grad_recv_tokens, nullptr);
    stage_weights(context, call, workspace.grad_recv_topk_weights);
    add_for_peers(context, call.frame, from);
  }
  BackwardCounters& counters = context.backward_counters(call.workspace);
  counters.last_ready = counters.use;
  const Signal ready{kPhaseGradReady, workspace.grad_ready_cells, counters.use, call.refusal};
  const Signal ack{kPhaseGradAck, workspace.grad_ack_cells, counters.use, 0};
  EPBUF_TRY(context.exchange(op, ready));
  if (context.find_refusal(op, ready, outcome)) return finish_refused(context, op, ack);
  pull_rows(context, call, from);
  pull_weights(context, call, workspace.grad_recv_topk_weights);
  if (call.clears_open != 0) context.frame_counters(call.frame).open = 0;
  context.publish(ack);
  return kOk;
}

Status run_weight_grad(const Context& context, const WeightGradCall& call) {
  const Geometry& g = context.geometry();
  const std::int64_t num_rows = context.num_live_rows(call.frame);
  const auto* expert_out = reinterpret_cast<const std::byte*>(call.expert_out);
  const auto* weights = reinterpret_cast<const float*>(call.weights);
  auto* grad_weights = reinterpret_cast<float*>(call.grad_weights);
  const std::int64_t own_grad = context.backward(call.workspace).grad_expert_out;
  std::byte* grad =
      call.grad_rows != 0 ? reinterpret_cast<std::byte*>(call.grad_rows) : context.windows().own<std::byte>(own_grad);
  for (std::int64_t row = 0; row < num_rows; ++row, grad += g.token_row_bytes) {
    grad_weights[row] = context.kernels().dot(expert_out + row * call.expert_out_row_stride_bytes, grad, g.hidden);
    context.kernels().scale(grad, weights[row], grad, g.hidden);
  }
  return kOk;
}

}  // namespace epbuf

// Dispatch and combine backward: push rows, encoded on the way, into the peers' slots, or once into their wire_rows;
// zero the padding of the own zones. Back from a quantised format.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../formats.h"
#include "codec.h"
#include "context.h"
#include "slot.h"

namespace epbuf {
namespace {

// The rows of a call in the format that travels. A row that is encoded already is read where it lies.
class SentRows {
 public:
  SentRows(const Context& context, const DispatchCall& call, const RowFormat& format)
      : codec_(codec(context.geometry().token_dtype)),
        call_(call),
        format_(format),
        num_elems_(context.geometry().hidden),
        encodes_(call.rows != 0 && is_quantised(format) && call.scales == 0),
        data_(static_cast<std::size_t>(encodes_ || call.rows == 0 ? context.row_bytes(format) : 0)),
        scales_(static_cast<std::size_t>(format.wire_row_bytes)),
        row_{data_.data(), scales_.data(), 0.0f} {}

  // Valid until the next call. A missing gradient counts as rows of zeros, with scales of zero.
  const EncodedRow& row(std::int64_t token) {
    if (call_.rows == 0) return row_;
    const auto* from = reinterpret_cast<const std::byte*>(call_.rows) + token * call_.row_stride_bytes;
    if (encodes_) {
      codec_.encode(format_.format, from, num_elems_, &row_);
    } else {
      row_.data = const_cast<std::byte*>(from);
      take_scales(token);
    }
    return row_;
  }

 private:
  void take_scales(std::int64_t token) {
    if (call_.scales == 0) return;
    const auto* from = reinterpret_cast<const std::byte*>(call_.scales) + token * call_.scales_row_stride_bytes;
    std::memcpy(row_.scales, from, static_cast<std::size_t>(format_.scale_bytes));
    if (call_.row_scales != 0) row_.row_scale = reinterpret_cast<const float*>(call_.row_scales)[token];
  }

  const Codec& codec_;
  const DispatchCall& call_;
  const RowFormat& format_;
  std::int64_t num_elems_;
  bool encodes_;
  std::vector<std::byte> data_;
  std::vector<std::byte> scales_;  // the padding behind a row's scales stays zero
  EncodedRow row_;
};

void push_row(const Context& context, const PushTarget& target, const EncodedRow& row, Slot slot) {
  const Windows& windows = context.windows();
  const std::int64_t row_bytes = context.row_bytes(target.format);
  std::byte* to = windows.at<std::byte>(slot.rank, target.rows) + slot.row * row_bytes;
  std::memcpy(to, row.data, static_cast<std::size_t>(row_bytes));
  if (target.scales >= 0) {
    const std::int64_t wire_row_bytes = target.format.wire_row_bytes;
    std::byte* scales = windows.at<std::byte>(slot.rank, target.scales) + slot.row * wire_row_bytes;
    std::memcpy(scales, row.scales, static_cast<std::size_t>(wire_row_bytes));
  }
}

float weight_of(const DispatchCall& call, std::int64_t token, std::int32_t k) {
  if (call.topk_weights == 0) return 1.0f;
  return reinterpret_cast<const float*>(call.topk_weights)[token * call.topk_weights_row_stride + k];
}

// The floats that belong to a slot; four bytes each go there whichever way the row takes.
void push_floats(const Context& context, const DispatchCall& call, const PushTarget& target, std::int64_t token,
                 float row_scale) {
  const std::int32_t num_topk = context.geometry().num_topk;
  const std::int64_t* slots = context.slot_map(call.frame) + token * num_topk;
  for (std::int32_t k = 0; k < num_topk; ++k) {
    if (slots[k] == kNoSlot) continue;
    const Slot slot = unpack_slot(slots[k]);
    if (target.weights >= 0) {
      context.windows().at<float>(slot.rank, target.weights)[slot.row] = weight_of(call, token, k);
    }
    if (target.row_scales >= 0) context.windows().at<float>(slot.rank, target.row_scales)[slot.row] = row_scale;
  }
}

void push_by_wire(const Context& context, const PushTarget& target, const EncodedRow& row, std::int32_t rank,
                  std::int64_t token) {
  std::byte* to = context.wire_row(rank, target.wire_rows, target.wire, context.geometry().rank, token);
  std::memcpy(to, row.data, static_cast<std::size_t>(context.row_bytes(target.format)));
  if (target.scales < 0) return;
  std::memcpy(to + target.wire.scales_offset, row.scales, static_cast<std::size_t>(target.format.wire_row_bytes));
}

// Whether slot k is one of several on another rank, and the first of them: it stands for all then.
enum class Crossing { kAlone, kFirst, kLater };

Crossing crossing_of(const Context& context, const PushTarget& target, const std::int64_t* slots, std::int32_t k) {
  if (target.wire_rows < 0) return Crossing::kAlone;
  const Geometry& g = context.geometry();
  const Slot slot = unpack_slot(slots[k]);
  const RowsOnRank there(slots, g.num_topk, slot.rank);
  if (!goes_by_wire(g.rank, slot.rank, there.num)) return Crossing::kAlone;
  return slot.row == there.rows[0] ? Crossing::kFirst : Crossing::kLater;
}

// A token without a slot is not read.
void push_token(const Context& context, const DispatchCall& call, const PushTarget& target, std::int64_t token,
                SentRows* rows) {
  const std::int32_t num_topk = context.geometry().num_topk;
  const std::int64_t* slots = context.slot_map(call.frame) + token * num_topk;
  const EncodedRow* row = nullptr;
  for (std::int32_t k = 0; k < num_topk; ++k) {
    if (slots[k] == kNoSlot) continue;
    const Slot slot = unpack_slot(slots[k]);
    if (row == nullptr) row = &rows->row(token);
    const Crossing crossing = crossing_of(context, target, slots, k);
    if (crossing == Crossing::kAlone) push_row(context, target, *row, slot);
    if (crossing == Crossing::kFirst) push_by_wire(context, target, *row, slot.rank, token);
  }
  if (row != nullptr) push_floats(context, call, target, token, row->row_scale);
}

// Rows that came once, into their slots on this rank.
void expand_rows(const Context& context, const DispatchCall& call, const PushTarget& target) {
  if (target.wire_rows < 0) return;
  context.for_each_by_wire(call.frame, target.wire_rows, target.wire, [&](const RowsOnRank& here, std::byte* from) {
    const EncodedRow row{from, from + target.wire.scales_offset, 0.0f};
    for (std::int32_t i = 0; i < here.num; ++i) {
      push_row(context, target, row, {context.geometry().rank, here.rows[i]});
    }
  });
}

// Peers read the slots of every token that there may be; those of another call's tokens are none.
void clear_other_slots(const Context& context, const DispatchCall& call) {
  if (!context.shares_slots()) return;
  const Geometry& g = context.geometry();
  auto* slots = context.windows().own<std::int64_t>(context.frame(call.frame).slot_map);
  std::fill(slots + static_cast<std::int64_t>(call.num_tokens) * g.num_topk,
            slots + static_cast<std::int64_t>(g.max_tokens_per_rank) * g.num_topk, kNoSlot);
}

// Rows [begin, end) of a region.
void zero_bytes(const Context& context, std::int64_t offset, std::int64_t row_bytes, std::int64_t begin,
                std::int64_t end) {
  std::byte* rows = context.windows().own<std::byte>(offset) + begin * row_bytes;
  std::memset(rows, 0, static_cast<std::size_t>((end - begin) * row_bytes));
}

void zero_floats(const Context& context, std::int64_t offset, std::int64_t begin, std::int64_t end) {
  if (offset >= 0) zero_bytes(context, offset, sizeof(float), begin, end);
}

void zero_rows(const Context& context, const PushTarget& target, std::int64_t begin, std::int64_t end) {
  zero_bytes(context, target.rows, context.row_bytes(target.format), begin, end);
  if (target.scales >= 0) zero_bytes(context, target.scales, target.format.wire_row_bytes, begin, end);
  zero_floats(context, target.row_scales, begin, end);
  zero_floats(context, target.weights, begin, end);
}

// Every round, because the user may have written there since; the peers' rows are elsewhere, so no order is needed.
void zero_padding(const Context& context, std::int32_t frame, const PushTarget& target) {
  const std::int32_t num_zones = context.geometry().num_local_experts;
  const std::int32_t* offs = context.offs(frame);
  const std::int64_t* valid = context.windows().own<const std::int64_t>(context.frame(frame).counts) + num_zones;
  for (std::int32_t j = 0; j < num_zones; ++j) {
    const std::int64_t start = j == 0 ? 0 : offs[j - 1];
    zero_rows(context, target, start + valid[j], offs[j]);
  }
}

void push_all(const Context& context, const DispatchCall& call, const PushTarget& target) {
  SentRows rows(context, call, target.format);
  for (std::int64_t token = 0; token < call.num_tokens; ++token) push_token(context, call, target, token, &rows);
  zero_padding(context, call.frame, target);
  clear_other_slots(context, call);
}

// Scales of received rows, padding included, from where they arrived into their tiles.
void tile_scales(const Context& context, std::int32_t frame, const PushTarget& target) {
  if (target.tiles < 0) return;
  const std::int64_t row_bytes = target.format.scale_row_bytes;
  const std::byte* from = context.windows().own<std::byte>(target.scales);
  std::byte* tiles = context.windows().own<std::byte>(target.tiles);
  for (std::int64_t row = 0; row < context.num_live_rows(frame); ++row, from += target.format.wire_row_bytes) {
    for (std::int64_t scale = 0; scale < row_bytes; scale += kTileScales) {
      std::memcpy(tiles + blocked_scale_offset(row, scale, row_bytes), from + scale, kTileScales);
    }
  }
}

// Rows as they lie in a receive region.
class ReceivedRows {
 public:
  ReceivedRows(const DecodeCall& call, const RowFormat& format)
      : call_(call), format_(format), scales_(static_cast<std::size_t>(format.scale_row_bytes)) {}

  std::byte* data(std::int64_t row) const {
    return reinterpret_cast<std::byte*>(call_.data) + row * call_.row_stride_bytes;
  }

  // Of one row, one after the other; valid until the next call.
  std::byte* scales(std::int64_t row) {
    auto* region = reinterpret_cast<std::byte*>(call_.scales);
    if (format_.is_blocked == 0) return region + row * call_.scales_row_stride_bytes;
    for (std::int64_t scale = 0; scale < format_.scale_row_bytes; scale += kTileScales) {
      std::memcpy(scales_.data() + scale, region + blocked_scale_offset(row, scale, format_.scale_row_bytes),
                  kTileScales);
    }
    return scales_.data();
  }

 private:
  const DecodeCall& call_;
  const RowFormat& format_;
  std::vector<std::byte> scales_;
};

void note_open(Context& context, const DispatchCall& call) {
  if (call.expects_open != 0 && context.frame_counters(call.frame).open == 0) context.control().count_early_reuse();
}

// Some rank has too few pages for what it received: flagged on all, as an overflow of its capacity is.
void note_full_stash(Context& context, const DispatchCall& call, const Signal& arrived, Outcome* outcome) {
  const std::int32_t rank = context.find_said(arrived, kStashFull);
  if (rank < 0) return;
  outcome->overflow = 1;
  outcome->stash_rank = rank;
  context.control().record_full_stash(rank);
  *context.windows().own<float>(context.frame(call.frame).overflow) = 1.0f;
}

// The peers that read this workspace's gradients last are done with them.
Status await_grad_ack(const Context& context, const OpState& op, std::int32_t workspace) {
  const std::uint32_t last_use = context.backward_counters(workspace).last_ready;
  return context.await(op, {kPhaseGradAck, context.backward(workspace).grad_ack_cells, last_use, 0});
}

}  // namespace

void check_dispatch(const Context& context, const DispatchCall& call) {
  context.check_rows(call, context.geometry().recv);
}

void check_combine_backward(const Context& context, const DispatchCall& call) {
  context.backward(call.workspace);
  context.check_rows(call, context.geometry().grad);
}

// The round was agreed on by route, so ARRIVED is the only signal; it carries the refusal of a rank that found its rows
// unusable only now.
Status run_dispatch(Context& context, const OpState& op, const DispatchCall& call, Outcome* outcome) {
  const FrameOffsets& frame = context.frame(call.frame);
  std::uint32_t said = call.refusal;
  if (call.refusal == kRefusalNone) {
    push_all(context, call, context.forward_target(call));
    if (frame.stash_table >= 0 && !take_pages(context, call.frame)) said = kStashFull;
  }
  const Signal arrived{kPhaseArrived, frame.arrived_cells, context.frame_counters(call.frame).round, said};
  EPBUF_TRY(context.exchange(op, arrived));
  if (context.find_refusal(op, arrived, outcome)) return kRefused;
  if (frame.stash_table >= 0) note_full_stash(context, call, arrived, outcome);
  expand_rows(context, call, context.forward_target(call));
  tile_scales(context, call.frame, context.forward_target(call));
  if (call.repeats == 0) context.frame_counters(call.frame).open = 1;
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
    push_all(context, call, context.backward_target(call));
  }
  EPBUF_TRY(context.exchange(op, {kPhaseGradArrived, workspace.grad_arrived_cells, use, 0}));
  if (refused) return kRefused;
  expand_rows(context, call, context.backward_target(call));
  tile_scales(context, call.frame, context.backward_target(call));
  return kOk;
}

Status run_decode(const Context& context, const DecodeCall& call) {
  const Geometry& g = context.geometry();
  const RowFormat& format = call.is_grad != 0 ? g.grad : g.recv;
  EPBUF_CHECK(is_quantised(format), "rows of format ", format.format, " were to be decoded");
  const std::int64_t num_rows = std::min(context.num_live_rows(call.frame), call.num_rows);
  const auto* row_scales = reinterpret_cast<const float*>(call.row_scales);
  auto* out = reinterpret_cast<std::byte*>(call.out);
  ReceivedRows rows(call, format);
  for (std::int64_t row = 0; row < num_rows; ++row, out += g.token_row_bytes) {
    const EncodedRow from{rows.data(row), rows.scales(row), row_scales != nullptr ? row_scales[row] : 0.0f};
    codec(g.token_dtype).decode(format.format, from, out, g.hidden);
  }
  return kOk;
}

}  // namespace epbuf

// What every op of the host engine works on, and the steps that several ops share.
#pragma once

#include <cstdint>
#include <vector>

#include "../arena_map.h"
#include "../check.h"
#include "../layout.h"
#include "../wire.h"
#include "control.h"
#include "rows.h"
#include "slot.h"
#include "wait.h"
#include "window.h"

namespace epbuf {

// A signal of this rank: which cells of every peer carry it and what they say.
struct Signal {
  Phase phase;
  std::int64_t cells_offset;  // [R] cells, one per source
  std::uint32_t epoch;
  std::uint32_t value;
};

class Context : public ArenaMap {
 public:
  Context(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
          std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards, Windows windows);

  const Windows& windows() const { return windows_; }
  const Waiter& waiter() const { return waiter_; }
  const RowKernels& kernels() const { return kernels_; }
  ControlBlock& control() { return control_; }
  const ControlBlock& control() const { return control_; }

  FrameCounters& frame_counters(std::int32_t frame) const;
  ForwardCounters& forward_counters(std::int32_t workspace) const;
  BackwardCounters& backward_counters(std::int32_t workspace) const;

  const std::int64_t* slot_map(std::int32_t frame) const;

  // Calls visit(rows, wire_row) for every token of another rank that has several rows here: where they are, and the
  // token's row of `wire_rows`. Valid from the wait for ARRIVED until this rank's next COUNT of the frame.
  template <typename Visit>
  void for_each_by_wire(std::int32_t frame, std::int64_t wire_rows, const WireFormat& format, Visit visit) const;
  std::byte* wire_row(std::int32_t owner, std::int64_t wire_rows, const WireFormat& format, std::int32_t token_rank,
                      std::int64_t token) const;
  const std::int32_t* offs(std::int32_t frame) const;    // [L]
  std::int64_t num_live_rows(std::int32_t frame) const;  // offs[-1]

  // Publishes to all ranks and waits for the same signal from all.
  Status exchange(const OpState& op, const Signal& signal) const;
  Status await(const OpState& op, const Signal& signal) const;
  Status await_ack(const OpState& op, std::int32_t workspace) const;  // its last readers are done with a forward one
  void publish(const Signal& signal) const;

  // The lowest rank whose signal has one of the bits of `mask` in its value; -1: none. Valid as find_refusal.
  std::int32_t find_said(const Signal& signal, std::uint32_t mask) const;

  // Whether the signal of some rank carries a refusal: fills `outcome` with the lowest such rank and counts it. Valid
  // between the wait for the signal and this rank's next signal, until which no peer can overwrite the cells.
  bool find_refusal(const OpState& op, const Signal& signal, Outcome* outcome);
  void record_refusal(const OpState& op, std::int32_t rank, std::uint32_t refusal, Outcome* outcome);

 private:
  Windows windows_;
  ControlBlock control_;
  Waiter waiter_;
  const RowKernels& kernels_;
};

template <typename Visit>
void Context::for_each_by_wire(std::int32_t frame_idx, std::int64_t wire_rows, const WireFormat& format,
                               Visit visit) const {
  const Geometry& g = geometry();
  for (std::int32_t source = 0; source < g.num_ranks; ++source) {
    const auto* slots = windows_.at<const std::int64_t>(source, frame(frame_idx).slot_map);
    for (std::int64_t token = 0; token < g.max_tokens_per_rank; ++token, slots += g.num_topk) {
      const RowsOnRank here(slots, g.num_topk, g.rank);
      if (goes_by_wire(source, g.rank, here.num)) visit(here, wire_row(g.rank, wire_rows, format, source, token));
    }
  }
}

// The ops, in route.cpp, dispatch.cpp and combine.cpp: the calls of layout.h on the protocol of csrc/PROTOCOL.md. The
// checks throw before the op has a call number, so that a call of ours that makes no sense changes nothing.
void check_route(const Context& context, const RouteCall& call);
void check_dispatch(const Context& context, const DispatchCall& call);
void check_combine(const Context& context, const CombineCall& call);
void check_combine_backward(const Context& context, const DispatchCall& call);
void check_dispatch_backward(const Context& context, const CombineCall& call);
void check_stash(const Context& context, const StashCall& call);
Status run_route(Context& context, const OpState& op, const RouteCall& call, Outcome* outcome);
Status run_dispatch(Context& context, const OpState& op, const DispatchCall& call, Outcome* outcome);
Status run_combine(Context& context, const OpState& op, const CombineCall& call, Outcome* outcome);
Status run_combine_backward(Context& context, const OpState& op, const DispatchCall& call, Outcome* outcome);
Status run_dispatch_backward(Context& context, const OpState& op, const CombineCall& call, Outcome* outcome);
Status run_weight_grad(const Context& context, const WeightGradCall& call);
Status run_decode(const Context& context, const DecodeCall& call);
Status run_stash(const Context& context, const StashCall& call);

// A frame returns the pages that it has and takes those for the rows that it received. False: there were too few.
bool take_pages(const Context& context, std::int32_t frame);

}  // namespace epbuf

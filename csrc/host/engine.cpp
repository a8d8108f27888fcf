#include "engine.h"

#include <utility>

namespace epbuf {
namespace {

Outcome empty_outcome() {
  Outcome outcome{};
  outcome.refusing_rank = -1;
  outcome.bad_rank = -1;
  return outcome;
}

template <typename Call>
OpState state_of(Op op, const Call& call) {
  return {op, call.frame, call.workspace, call.check_progress != 0, 0};
}

}  // namespace

HostEngine::HostEngine(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
                       std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards,
                       std::vector<std::uint64_t> peers)
    : context_(geometry, arena, std::move(frames), std::move(forwards), std::move(backwards),
               Windows(geometry.rank, std::move(peers))) {}

// A poisoned arena does nothing: what its peers last saw stays as it was when it failed.
template <typename Body>
Outcome HostEngine::run(OpState op, Body body) {
  const std::lock_guard<std::mutex> guard(op_mutex_);
  Outcome outcome = empty_outcome();
  outcome.status = kPoisoned;
  if (context_.control().poisoned()) return outcome;
  outcome.status = context_.waiter().begin(&op);
  if (outcome.status == kOk) outcome.status = body(op, &outcome);
  return outcome;
}

// The peers have no part in it.
template <typename Body>
Outcome HostEngine::run_local(Body body) {
  const std::lock_guard<std::mutex> guard(op_mutex_);
  Outcome outcome = empty_outcome();
  outcome.status = context_.control().poisoned() ? kPoisoned : kOk;
  if (outcome.status == kOk) outcome.status = body();
  return outcome;
}

Outcome HostEngine::route(const RouteCall& call) {
  check_route(context_, call);
  return run(state_of(kOpRoute, call),
             [&](const OpState& op, Outcome* outcome) { return run_route(context_, op, call, outcome); });
}

Outcome HostEngine::dispatch(const DispatchCall& call) {
  check_dispatch(context_, call);
  return run(state_of(kOpDispatch, call),
             [&](const OpState& op, Outcome* outcome) { return run_dispatch(context_, op, call, outcome); });
}

Outcome HostEngine::combine(const CombineCall& call) {
  check_combine(context_, call);
  return run(state_of(kOpCombine, call),
             [&](const OpState& op, Outcome* outcome) { return run_combine(context_, op, call, outcome); });
}

Outcome HostEngine::combine_backward(const DispatchCall& call) {
  check_combine_backward(context_, call);
  return run(state_of(kOpCombineBackward, call),
             [&](const OpState& op, Outcome* outcome) { return run_combine_backward(context_, op, call, outcome); });
}

Outcome HostEngine::dispatch_backward(const CombineCall& call) {
  check_dispatch_backward(context_, call);
  return run(state_of(kOpDispatchBackward, call),
             [&](const OpState& op, Outcome* outcome) { return run_dispatch_backward(context_, op, call, outcome); });
}

Outcome HostEngine::weight_grad(const WeightGradCall& call) {
  return run_local([&] { return run_weight_grad(context_, call); });
}

Outcome HostEngine::decode(const DecodeCall& call) {
  return run_local([&] { return run_decode(context_, call); });
}

Outcome HostEngine::stash(const StashCall& call) {
  check_stash(context_, call);
  return run_local([&] { return run_stash(context_, call); });
}

Control HostEngine::control() const { return context_.control().snapshot(); }

std::vector<Progress> HostEngine::progress() const { return context_.waiter().progress(); }

void HostEngine::abort(std::uint32_t reason) { context_.waiter().abort(reason); }

}  // namespace epbuf

// The host engine: the five ops of an arena over windows in shared memory.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "context.h"

namespace epbuf {

// One per rank and arena; holds addresses, owns nothing. Ops are collective: every rank issues the same ones in the
// same order, and each returns when its round is complete on this rank. They run one at a time, whatever thread calls;
// control(), progress() and abort() may be called while one waits.
class HostEngine {
 public:
  // `peers`: base address of every rank's window in this process, index = rank.
  HostEngine(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
             std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards,
             std::vector<std::uint64_t> peers);

  Outcome route(const RouteCall& call);
  Outcome dispatch(const DispatchCall& call);
  Outcome combine(const CombineCall& call);
  Outcome combine_backward(const DispatchCall& call);
  Outcome dispatch_backward(const CombineCall& call);
  Outcome weight_grad(const WeightGradCall& call);  // local
  Outcome decode(const DecodeCall& call);           // local
  Outcome stash(const StashCall& call);             // local, but for the wait for ACK before rows are restored

  Control control() const;
  std::vector<Progress> progress() const;  // of every rank, as last seen here

  // Tells every rank that this one gives up, with a reason of the caller's; poisons the arena here.
  void abort(std::uint32_t reason);

 private:
  template <typename Body>
  Outcome run(OpState op, Body body);
  template <typename Body>
  Outcome run_local(Body body);

  Context context_;
  std::mutex op_mutex_;
};

}  // namespace epbuf

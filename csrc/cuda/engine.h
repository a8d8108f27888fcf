// The CUDA engine: the ops of an arena as short chains of kernels on the caller's stream.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "../layout.h"
#include "context.h"

namespace epbuf {

// A rank's PROGRESS, unpacked.
struct CellProgress {
  std::uint32_t call, op, frame, workspace;
};

// One per rank and arena. Ops are collective: every rank issues the same ones in the same order. They only enqueue:
// nothing is allocated or synchronised and no host state moves, so they may be captured, and a replay does all of it.
// Threads may share an engine; the kernels of one op follow each other on the stream.
class CudaEngine {
 public:
  // `peers`: base address of every rank's window in this process, index = rank. Allocates a few words of device memory
  // and one pinned block, and loads every kernel. Synchronises.
  CudaEngine(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
             std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards,
             std::vector<std::uint64_t> peers, int device);

  // Answer kOk, or kPoisoned without a launch when the host knows already; the rest is in status() and control().
  Outcome route(const RouteCall& call);
  Outcome dispatch(const DispatchCall& call);
  Outcome combine(const CombineCall& call);
  Outcome combine_backward(const DispatchCall& call);
  Outcome dispatch_backward(const CombineCall& call);
  Outcome weight_grad(const WeightGradCall& call);  // local
  Outcome decode(const DecodeCall& call);           // local
  Outcome stash(const StashCall& call);             // local, but for the wait for ACK before rows are restored

  // Local halves of a route where other kernels move rows: `sent_ids` [T, K] and this rank's row of counts; then, once
  // all rows are gathered, zones and records.
  Outcome count_ids(const RouteCall& call, std::uint64_t sent_ids, std::uint64_t count_row);
  Outcome summarise(const SummariseCall& call);

  // The same ops in steps, for virtual ranks of one process: phase p on every rank before phase p + 1 on any.
  static std::int32_t phases(std::uint32_t op);
  Outcome run_route_phase(std::int32_t phase, const RouteCall& call);
  Outcome run_dispatch_phase(std::uint32_t op, std::int32_t phase, const DispatchCall& call);
  Outcome run_combine_phase(std::uint32_t op, std::int32_t phase, const CombineCall& call);

  // What the kernels recorded. status() reads the pinned mirror without a synchronisation; its `call` and
  // `staged_bytes` are those of the last event. control() synchronises the device.
  Control status() const { return context_.words().mirrored(); }
  Control control() const;
  std::vector<CellProgress> progress() const;  // of every rank, as last seen here; waits for no op

  // Poisons the arena here and tells every peer, also while a kernel waits. Best effort: does not throw.
  void abort(std::uint32_t reason) noexcept;

  // Loads every variant of every kernel: on all ranks, before any of them waits. The constructor does it too.
  void warm_up() const;

  // Frees what the constructor allocated; a destructor would have to synchronise, so it leaks instead. Synchronises. No
  // op, and no graph that recorded one, may run afterwards.
  void close();

 private:
  template <typename Issue>
  Outcome enqueue(Issue issue);

  cuda::CudaContext context_;
  std::mutex mutex_;
};

}  // namespace epbuf

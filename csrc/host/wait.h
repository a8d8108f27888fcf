// Bounded waits for cells of the peers, and what is concluded when they do not come.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "../layout.h"
#include "control.h"
#include "window.h"

namespace epbuf {

// The op that is running: what PROGRESS says and what an error names.
struct OpState {
  Op op;
  std::int32_t frame;
  std::int32_t workspace;  // -1: a refusing rank that holds none
  bool check_progress;     // compare with the peers' PROGRESS
  std::uint32_t call;      // set by Waiter::begin
};

// A peer's PROGRESS, unpacked.
struct Progress {
  std::uint32_t call, op, frame, workspace;
};

// Cells that carry the signal of a phase: rank p's are at `cells` + p * `cells_per_rank` of the own window.
struct Awaited {
  Phase phase;
  const Cell* cells;
  std::int64_t cells_per_rank;
  std::uint32_t epoch;
};

// Time of one wait: when it gives up and how it passes the time until then.
class WaitClock {
 public:
  explicit WaitClock(std::uint64_t timeout_us);

  bool expired() const;
  void pause() const;
  void shorten(std::chrono::microseconds rest);  // give up at most `rest` from now

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_, deadline_;
};

class Waiter {
 public:
  Waiter(const Windows& windows, const ArenaOffsets& arena, ControlBlock* control, std::uint64_t timeout_us)
      : windows_(windows), arena_(arena), control_(control), timeout_us_(timeout_us) {}

  // Numbers the call and tells every rank what it is. Fails, in phase kPhaseNone, if a peer has given up already: a
  // late rank must not move rows that nobody awaits.
  Status begin(OpState* op) const;

  // Returns kOk once all ranks, this one included, have published `awaited.epoch`; acquires what they published.
  // Otherwise kTimeout, kMismatch or kAborted: the failure is recorded, the arena poisoned, the peers told.
  Status await(const OpState& op, const Awaited& awaited) const;

  // kMismatch if a peer runs the same call with another op, frame or workspace. Called where the awaited cells are the
  // same for both, so that the wait itself cannot tell.
  Status compare_progress(const OpState& op, const Awaited& awaited) const;

  void abort(std::uint32_t reason) const;
  std::vector<Progress> progress() const;

 private:
  Status await_cell(const OpState& op, const Awaited& awaited, std::int32_t peer, const Cell* cell,
                    WaitClock* clock) const;
  Status look_around(const OpState& op, const Awaited& awaited, std::int32_t peer, WaitClock* clock) const;
  Status adopt_abort(const OpState& op, const Awaited& awaited, std::int32_t aborter) const;
  Status fail(Status status, const OpState& op, const Awaited& awaited, std::int32_t peer) const;
  ErrorRecord describe(Status status, const OpState& op, const Awaited& awaited, std::int32_t peer) const;
  std::int32_t find_abort() const;
  std::int32_t find_mismatch(const OpState& op) const;
  void tell_abort(std::uint32_t reason, std::int32_t blamed) const;
  Cell abort_of(std::int32_t peer) const { return load_fenced_system(windows_.own<Cell>(arena_.abort_cells) + peer); }
  Cell progress_of(std::int32_t peer) const {
    return load_relaxed_system(windows_.own<Cell>(arena_.progress_cells) + peer);
  }

  const Windows& windows_;
  const ArenaOffsets& arena_;
  ControlBlock* control_;
  std::uint64_t timeout_us_;
};

}  // namespace epbuf

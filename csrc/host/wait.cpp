#include "wait.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace epbuf {
namespace {

using std::chrono::microseconds;

constexpr microseconds kSpin{50};         // a peer that is in step answers within this
constexpr microseconds kYield{1000};      // a peer that is not may need our core to get there
constexpr microseconds kSleep{50};        // yielding ranks would still take turns with the experts of the others
constexpr microseconds kSettle{1000000};  // a mismatch that one rank saw reaches the others at once

std::uint32_t pack_progress(const OpState& op) {
  const auto index = [](std::int32_t value) { return static_cast<std::uint32_t>(value) & kProgressIndexMask; };
  const std::uint32_t unchecked = op.check_progress ? 0 : kProgressUnchecked;
  return unchecked | op.op << kProgressOpShift | index(op.frame) << kProgressFrameShift | index(op.workspace);
}

Progress unpack_progress(Cell cell) {
  return {cell.epoch, cell.value >> kProgressOpShift & kProgressOpMask,
          cell.value >> kProgressFrameShift & kProgressIndexMask, cell.value & kProgressIndexMask};
}

bool same_progress(std::uint32_t a, std::uint32_t b) {
  if (((a | b) & kProgressUnchecked) != 0) return true;
  const bool any = (a & kProgressIndexMask) == kAnyWorkspace || (b & kProgressIndexMask) == kAnyWorkspace;
  const std::uint32_t ignored = any ? kProgressIndexMask : 0;
  return (a | ignored) == (b | ignored);
}

void relax_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

WaitClock::WaitClock(std::uint64_t timeout_us)
    : start_(Clock::now()), deadline_(start_ + microseconds(static_cast<std::int64_t>(timeout_us))) {}

bool WaitClock::expired() const { return Clock::now() >= deadline_; }

void WaitClock::shorten(microseconds rest) { deadline_ = std::min(deadline_, Clock::now() + rest); }

void WaitClock::pause() const {
  const auto waited = Clock::now() - start_;
  if (waited < kSpin) {
    relax_cpu();
  } else if (waited < kYield) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(kSleep);
  }
}

Status Waiter::begin(OpState* op) const {
  op->call = control_->begin_call();
  windows_.publish_relaxed(arena_.progress_cells, {op->call, pack_progress(*op)});
  WaitClock clock(timeout_us_);
  return look_around(*op, {kPhaseNone, nullptr, 0, 0}, windows_.rank(), &clock);
}

Status Waiter::await(const OpState& op, const Awaited& awaited) const {
  WaitClock clock(timeout_us_);
  for (std::int32_t peer = 0; peer < windows_.num_ranks(); ++peer) {
    const Cell* cells = awaited.cells + peer * awaited.cells_per_rank;
    for (std::int64_t i = 0; i < awaited.cells_per_rank; ++i) {
      EPBUF_TRY(await_cell(op, awaited, peer, cells + i, &clock));
    }
  }
  fence_acquire_system();
  return kOk;
}

Status Waiter::await_cell(const OpState& op, const Awaited& awaited, std::int32_t peer, const Cell* cell,
                          WaitClock* clock) const {
  while (load_fenced_system(cell).epoch != awaited.epoch) {
    EPBUF_TRY(look_around(op, awaited, peer, clock));
    clock->pause();
  }
  return kOk;
}

// ABORT is read before PROGRESS: a rank that saw a mismatch published its PROGRESS before its ABORT.
Status Waiter::look_around(const OpState& op, const Awaited& awaited, std::int32_t peer, WaitClock* clock) const {
  const std::int32_t aborter = find_abort();
  EPBUF_TRY(compare_progress(op, awaited));
  if (aborter < 0) return clock->expired() ? fail(kTimeout, op, awaited, peer) : kOk;
  // The PROGRESS that the aborter found different may still be on its way to this rank.
  const bool settles = op.check_progress && (abort_of(aborter).value & kAbortReasonMask) == kMismatch;
  if (!settles || clock->expired()) return adopt_abort(op, awaited, aborter);
  clock->shorten(kSettle);
  return kOk;
}

Status Waiter::compare_progress(const OpState& op, const Awaited& awaited) const {
  if (!op.check_progress) return kOk;
  const std::int32_t other = find_mismatch(op);
  return other < 0 ? kOk : fail(kMismatch, op, awaited, other);
}

// Names the rank that is missing, not the rank that noticed first.
Status Waiter::adopt_abort(const OpState& op, const Awaited& awaited, std::int32_t aborter) const {
  const std::uint32_t value = abort_of(aborter).value;
  const auto blamed = static_cast<std::int32_t>(value >> kAbortBlameShift) - 1;
  const bool other_is_late = (value & kAbortReasonMask) == kTimeout && blamed >= 0 && blamed != windows_.rank();
  return other_is_late ? fail(kTimeout, op, awaited, blamed) : fail(kAborted, op, awaited, aborter);
}

std::int32_t Waiter::find_abort() const {
  for (std::int32_t peer = 0; peer < windows_.num_ranks(); ++peer) {
    if (abort_of(peer).epoch == 0) continue;
    fence_acquire_system();
    return peer;
  }
  return -1;
}

std::int32_t Waiter::find_mismatch(const OpState& op) const {
  const std::uint32_t mine = pack_progress(op);
  for (std::int32_t peer = 0; peer < windows_.num_ranks(); ++peer) {
    const Cell theirs = progress_of(peer);
    if (theirs.epoch == op.call && !same_progress(theirs.value, mine)) return peer;
  }
  return -1;
}

// kAborted is what an ABORT that went to every rank has told this one.
Status Waiter::fail(Status status, const OpState& op, const Awaited& awaited, std::int32_t peer) const {
  const bool first = control_->record_failure(describe(status, op, awaited, peer));
  if (first && status != kAborted) tell_abort(status, peer);
  return status;
}

ErrorRecord Waiter::describe(Status status, const OpState& op, const Awaited& awaited, std::int32_t peer) const {
  ErrorRecord error{};
  error.status = status;
  error.op = op.op;
  error.phase = awaited.phase;
  error.peer = peer;
  error.call = op.call;
  error.frame = static_cast<std::uint32_t>(op.frame);
  error.workspace = static_cast<std::uint32_t>(op.workspace) & kProgressIndexMask;
  error.expected_epoch = awaited.epoch;
  const Cell* cells = awaited.cells == nullptr ? nullptr : awaited.cells + peer * awaited.cells_per_rank;
  error.seen_epoch = cells == nullptr ? 0 : load_relaxed_system(cells).epoch;
  const Cell progress = progress_of(peer);
  error.peer_call = progress.epoch;
  error.peer_progress = progress.value;
  return error;
}

void Waiter::tell_abort(std::uint32_t reason, std::int32_t blamed) const {
  const std::uint32_t blame = static_cast<std::uint32_t>(blamed + 1) << kAbortBlameShift;
  windows_.publish(arena_.abort_cells, {1, blame | (reason & kAbortReasonMask)});
}

void Waiter::abort(std::uint32_t reason) const {
  ErrorRecord error{};
  error.status = kAborted;
  error.peer = windows_.rank();
  if (control_->record_failure(error)) tell_abort(reason, -1);
}

std::vector<Progress> Waiter::progress() const {
  std::vector<Progress> all;
  for (std::int32_t peer = 0; peer < windows_.num_ranks(); ++peer) all.push_back(unpack_progress(progress_of(peer)));
  return all;
}

}  // namespace epbuf

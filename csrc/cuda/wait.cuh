// Bounded waits for cells of the peers, and what is concluded when they do not come. The conclusions are those of
// host/wait.cpp. One block of a kernel waits at most; of a
// signal, one warp.
#pragma once

#include "record.cuh"
#include "sync.cuh"

namespace epbuf::cuda {

constexpr std::uint32_t kEagerPolls = 64;        // a peer that is in step answers within these
constexpr std::uint32_t kPollsPerLook = 64;      // then the wait looks around about every 50 us
constexpr std::uint32_t kNapNs = 100;            // the load itself takes several times that
constexpr std::uint64_t kSettleNs = 1000000000;  // a mismatch that one rank saw reaches the others at once

// Cells that carry the signal of a phase: rank p's are at `cells` + p * `cells_per_rank` of the own window.
struct Awaited {
  std::uint32_t phase;
  std::uint32_t epoch;
  const Cell* cells;
  std::int64_t cells_per_rank;
  std::uint32_t call;  // this rank's call number
};

__device__ __forceinline__ std::uint64_t window_of(const KernelCall& call, std::int32_t rank) {
  return at<const std::uint64_t>(call.peers)[rank];
}

__device__ __forceinline__ std::uint32_t pack_progress(const KernelCall& call) {
  return (call.check_progress != 0 ? 0 : kProgressUnchecked) | call.op << kProgressOpShift |
         (static_cast<std::uint32_t>(call.frame) & kProgressIndexMask) << kProgressFrameShift |
         (static_cast<std::uint32_t>(call.workspace) & kProgressIndexMask);
}

__device__ __forceinline__ bool same_progress(std::uint32_t a, std::uint32_t b) {
  if (((a | b) & kProgressUnchecked) != 0) return true;
  const bool any = (a & kProgressIndexMask) == kAnyWorkspace || (b & kProgressIndexMask) == kAnyWorkspace;
  const std::uint32_t ignored = any ? kProgressIndexMask : 0;
  return (a | ignored) == (b | ignored);
}

__device__ __forceinline__ Cell progress_of(const KernelCall& call, std::int32_t peer) {
  return load_relaxed_system(at<const Cell>(call.window, call.progress_cells) + peer);
}

__device__ __forceinline__ Cell abort_of(const KernelCall& call, std::int32_t peer) {
  return load_fenced_system(at<const Cell>(call.window, call.abort_cells) + peer);
}

// The loops over all ranks keep several loads in flight: a look must not take longer than the wait it belongs to.
__device__ inline std::int32_t find_abort(const KernelCall& call) {
  std::int32_t aborter = -1;
#pragma unroll 4
  for (std::int32_t peer = call.num_ranks - 1; peer >= 0; --peer) {
    if (abort_of(call, peer).epoch != 0) aborter = peer;
  }
  fence_acquire_system();
  return aborter;
}

// A peer runs the same call with another op, frame or workspace.
__device__ __forceinline__ bool mismatches(const KernelCall& call, const Awaited& awaited, std::int32_t peer) {
  const Cell theirs = progress_of(call, peer);
  return theirs.epoch == awaited.call && !same_progress(theirs.value, pack_progress(call));
}

__device__ inline std::int32_t find_mismatch(const KernelCall& call, const Awaited& awaited) {
  std::int32_t other = -1;
  if (call.check_progress == 0) return other;
#pragma unroll 4
  for (std::int32_t peer = call.num_ranks - 1; peer >= 0; --peer) {
    if (mismatches(call, awaited, peer)) other = peer;
  }
  return other;
}

// One thread tells every rank, this one included.
__device__ inline void tell_abort(const KernelCall& call, std::uint32_t reason, std::int32_t blamed) {
  const std::uint32_t blame = static_cast<std::uint32_t>(blamed + 1) << kAbortBlameShift;
  fence_release_system();
#pragma unroll 1
  for (std::int32_t peer = 0; peer < call.num_ranks; ++peer) {
    Cell* cell = at<Cell>(window_of(call, peer), call.abort_cells) + call.rank;
    store_fenced_system(cell, {1, blame | (reason & kAbortReasonMask)});
  }
}

// Poisons the arena and tells the peers, unless that is done. kAborted is what an ABORT that went to every rank has
// told this one.
__device__ __noinline__ inline void give_up(const KernelCall& call, Awaited awaited, Status status, std::int32_t peer) {
  const Cell progress = progress_of(call, peer);
  ErrorRecord error{};
  error.status = status;
  error.op = call.op;
  error.phase = awaited.phase;
  error.peer = peer;
  error.call = awaited.call;
  error.frame = static_cast<std::uint32_t>(call.frame);
  error.workspace = static_cast<std::uint32_t>(call.workspace) & kProgressIndexMask;
  error.expected_epoch = awaited.epoch;
  error.seen_epoch = load_relaxed_system(awaited.cells + peer * awaited.cells_per_rank).epoch;
  error.peer_call = progress.epoch;
  error.peer_progress = progress.value;
  if (record_failure(call, error) && status != kAborted) tell_abort(call, status, peer);
}

// Because of a peer's ABORT. Names the rank that is missing, not the rank that noticed first.
__device__ inline void give_up_with(const KernelCall& call, const Awaited& awaited, std::int32_t aborter) {
  const std::uint32_t value = abort_of(call, aborter).value;
  const std::int32_t blamed = static_cast<std::int32_t>(value >> kAbortBlameShift) - 1;
  const bool other_is_late = (value & kAbortReasonMask) == kTimeout && blamed >= 0 && blamed != call.rank;
  give_up(call, awaited, other_is_late ? kTimeout : kAborted, other_is_late ? blamed : aborter);
}

// After many polls for `peer`: until when this wait may go on, 0 if it has been given up. `deadline_ns` 0: its first
// look. ABORT is read before PROGRESS: a rank that saw a mismatch published its PROGRESS before its ABORT.
__device__ __noinline__ inline std::uint64_t look_around(const KernelCall& call, Awaited awaited, std::int32_t peer,
                                                         std::uint64_t deadline_ns) {
  const std::uint64_t now = device_time_ns();
  if (deadline_ns == 0) deadline_ns = now + call.timeout_us * 1000;
  const std::int32_t aborter = find_abort(call);
  const std::int32_t other = find_mismatch(call, awaited);
  if (is_poisoned(call)) return 0;
  if (other >= 0) return give_up(call, awaited, kMismatch, other), 0;
  if (aborter < 0 && now < deadline_ns) return deadline_ns;
  if (aborter < 0) return give_up(call, awaited, kTimeout, peer), 0;
  // The PROGRESS that the aborter found different may still be on its way to this rank.
  const bool settles = call.check_progress != 0 && (abort_of(call, aborter).value & kAbortReasonMask) == kMismatch;
  if (!settles || now >= deadline_ns) return give_up_with(call, awaited, aborter), 0;
  return min(deadline_ns, now + kSettleNs);
}

// How one thread passes the time of one wait.
class Patience {
 public:
  // Called after each poll that found nothing. False: this wait has been given up.
  __device__ __forceinline__ bool endure(const KernelCall& call, const Awaited& awaited, std::int32_t peer) {
    if (++num_polls_ < kEagerPolls) return true;
    __nanosleep(kNapNs);
    if (num_polls_ % kPollsPerLook != 0) return true;
    deadline_ns_ = look_around(call, awaited, peer, deadline_ns_);
    return deadline_ns_ != 0;
  }

 private:
  std::uint32_t num_polls_ = 0;
  std::uint64_t deadline_ns_ = 0;
};

// The windows of the ranks that the lanes of one warp look after: rank i for lane i, then i + 32 and so on. The first
// ones are loaded at once: windows never change, so that a kernel may ask before await_previous.
class LaneWindows {
 public:
  __device__ __forceinline__ explicit LaneWindows(const KernelCall& call)
      : first_(threadIdx.x % kWarpSize < call.num_ranks ? window_of(call, threadIdx.x % kWarpSize) : 0) {}
  __device__ __forceinline__ std::uint64_t of(const KernelCall& call, std::int32_t peer) const {
    return peer < static_cast<std::int32_t>(kWarpSize) ? first_ : window_of(call, peer);
  }

 private:
  std::uint64_t first_;
};

// The number of the call that the arena's kernels are at. Right while its ops run on one stream; reports only, else.
__device__ __forceinline__ std::uint32_t current_call(const KernelCall& call) {
  return load_relaxed_device(&control_of(call)->call);
}

// One warp begins call `number`, the one after the current, and tells every rank what it is.
__device__ inline void announce(const KernelCall& call, const LaneWindows& windows, std::uint32_t number) {
  const std::int32_t lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (std::int32_t peer = lane; peer < call.num_ranks; peer += kWarpSize) {
    Cell* cell = at<Cell>(windows.of(call, peer), call.progress_cells) + call.rank;
    store_relaxed_system(cell, {number, pack_progress(call)});
  }
  if (lane == 0) atomicAdd(&control_of(call)->call, 1u);
  __syncwarp();  // a fence that any lane issues from here on comes after the stores of all
}

// One warp, behind its fence_release_system: one cell for each rank, this one included.
__device__ inline void publish(const KernelCall& call, const LaneWindows& windows, std::int64_t cells, Cell value) {
#pragma unroll 1
  for (std::int32_t peer = threadIdx.x % kWarpSize; peer < call.num_ranks; peer += kWarpSize) {
    store_fenced_system(at<Cell>(windows.of(call, peer), cells) + call.rank, value);
  }
}

// One thread: waits until `cell`, of `peer`, has the awaited epoch, and returns it. *here: false, this wait has been
// given up.
__device__ __forceinline__ Cell await_cell(const KernelCall& call, const Awaited& awaited, std::int32_t peer,
                                           const Cell* cell, Patience* patience, bool* here) {
  Cell seen = load_fenced_system(cell);
  while (*here && seen.epoch != awaited.epoch) {
    *here = patience->endure(call, awaited, peer);
    seen = load_fenced_system(cell);
  }
  return seen;
}

// One warp: true once every rank, this one included, has published `awaited.epoch`; *refusals is then the OR of what
// all said with it.
__device__ inline bool await_all(const KernelCall& call, const Awaited& awaited, std::uint32_t* refusals = nullptr) {
  std::uint32_t said = 0;
  bool here = true;
  Patience patience;
#pragma unroll 1
  for (std::int32_t peer = threadIdx.x % kWarpSize; here && peer < call.num_ranks; peer += kWarpSize) {
    const Cell* cell = awaited.cells + peer * awaited.cells_per_rank;
    said |= await_cell(call, awaited, peer, cell, &patience, &here).value;
  }
  fence_acquire_system();
  __syncwarp();  // what one lane has acquired, all have
  const bool arrived = __all_sync(kAllLanes, here);
  if (refusals != nullptr) *refusals = __reduce_or_sync(kAllLanes, said);
  return arrived;
}

// One warp: false in a lane one of whose ranks runs another op, frame or workspace as the same call; then the arena has
// been given up.
__device__ inline bool all_agree(const KernelCall& call, const Awaited& awaited) {
#pragma unroll 1
  for (std::int32_t peer = threadIdx.x % kWarpSize; peer < call.num_ranks; peer += kWarpSize) {
    if (mismatches(call, awaited, peer)) return give_up(call, awaited, kMismatch, peer), false;
  }
  return true;
}

}  // namespace epbuf::cuda

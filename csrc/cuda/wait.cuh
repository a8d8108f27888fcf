// Bounded waits for cells of the peers, and what is concluded when they do not come. The conclusions are those of
// host/wait.cpp. Only one block of a kernel waits.
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

// Why a wait ended without its cells.
struct Failure {
  Status status = kOk;
  std::int32_t peer = 0;
  Awaited awaited = {};
};

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

// Names the rank that is missing, not the rank that noticed first.
__device__ inline Failure adopt_abort(const KernelCall& call, const Awaited& awaited, std::int32_t aborter) {
  const std::uint32_t value = abort_of(call, aborter).value;
  const std::int32_t blamed = static_cast<std::int32_t>(value >> kAbortBlameShift) - 1;
  const bool other_is_late = (value & kAbortReasonMask) == kTimeout && blamed >= 0 && blamed != call.rank;
  return {other_is_late ? kTimeout : kAborted, other_is_late ? blamed : aborter, awaited};
}

// How one thread passes the time of one wait.
class Patience {
 public:
  // Called after each poll that found nothing. False: give up, because of *failure.
  __device__ __forceinline__ bool endure(const KernelCall& call, const Awaited& awaited, std::int32_t peer,
                                         Failure* failure) {
    if (++num_polls_ < kEagerPolls) return true;
    __nanosleep(kNapNs);
    if (num_polls_ % kPollsPerLook != 0) return true;
    *failure = look_around(call, awaited, peer);
    return failure->status == kOk;
  }

 private:
  // ABORT is read before PROGRESS: a rank that saw a mismatch published its PROGRESS before its ABORT.
  __device__ Failure look_around(const KernelCall& call, const Awaited& awaited, std::int32_t peer) {
    const std::uint64_t now = device_time_ns();
    if (deadline_ns_ == 0) deadline_ns_ = now + call.timeout_us * 1000;
    const std::int32_t aborter = find_abort(call);
    const std::int32_t other = find_mismatch(call, awaited);
    if (is_poisoned(call)) return {kPoisoned, peer, awaited};
    if (other >= 0) return {kMismatch, other, awaited};
    if (aborter < 0) return {now < deadline_ns_ ? kOk : kTimeout, peer, awaited};
    // The PROGRESS that the aborter found different may still be on its way to this rank.
    const bool settles = call.check_progress != 0 && (abort_of(call, aborter).value & kAbortReasonMask) == kMismatch;
    if (!settles || now >= deadline_ns_) return adopt_abort(call, awaited, aborter);
    deadline_ns_ = min(deadline_ns_, now + kSettleNs);
    return {kOk, peer, awaited};
  }

  std::uint32_t num_polls_ = 0;
  std::uint64_t deadline_ns_ = 0;
};

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

// Poisons the arena and tells the peers, unless that is done. Called once, at the end of a kernel, by every thread: the
// code is long and cold, and a kernel of one block feels each instruction that it has to fetch. kAborted is what an
// ABORT that went to every rank has told this one.
__device__ inline void report(const KernelCall& call, const Failure& failure) {
  if (failure.status == kOk || failure.status == kPoisoned) return;
  const Awaited& awaited = failure.awaited;
  const Cell progress = progress_of(call, failure.peer);
  ErrorRecord error{};
  error.status = failure.status;
  error.op = call.op;
  error.phase = awaited.phase;
  error.peer = failure.peer;
  error.call = awaited.call;
  error.frame = static_cast<std::uint32_t>(call.frame);
  error.workspace = static_cast<std::uint32_t>(call.workspace) & kProgressIndexMask;
  error.expected_epoch = awaited.epoch;
  error.seen_epoch = load_relaxed_system(awaited.cells + failure.peer * awaited.cells_per_rank).epoch;
  error.peer_call = progress.epoch;
  error.peer_progress = progress.value;
  if (record_failure(call, error) && failure.status != kAborted) tell_abort(call, failure.status, failure.peer);
}

// One warp numbers the call, tells every rank what it is, and returns the number.
__device__ inline std::uint32_t begin_call_as_warp(const KernelCall& call) {
  const std::uint32_t lane = threadIdx.x % kWarpSize;
  std::uint32_t number = 0;
  if (lane == 0) number = atomicAdd(&control_of(call)->call, 1u) + 1;
  number = __shfl_sync(kAllLanes, number, 0);
  for (std::int32_t peer = lane; peer < call.num_ranks; peer += kWarpSize) {
    Cell* cell = at<Cell>(window_of(call, peer), call.progress_cells) + call.rank;
    store_relaxed_system(cell, {number, pack_progress(call)});
  }
  return number;
}

// The block does.
__device__ inline std::uint32_t begin_call(const KernelCall& call) {
  __shared__ std::uint32_t number;
  if (threadIdx.x < kWarpSize) {
    const std::uint32_t begun = begin_call_as_warp(call);
    if (threadIdx.x == 0) number = begun;
  }
  __syncthreads();
  return number;
}

// The number of a call that an earlier kernel began. Right while the arena's ops run on one stream; reports only, else.
__device__ __forceinline__ std::uint32_t current_call(const KernelCall& call) {
  return load_relaxed_device(&control_of(call)->call);
}

// One cell for each rank, this one included. What the block did before comes first: barrier, then each publisher's
// fence.
__device__ inline void publish(const KernelCall& call, std::int64_t cells, Cell value) {
  __syncthreads();
  fence_release_system();
  for (std::int32_t peer = threadIdx.x; peer < call.num_ranks; peer += blockDim.x) {
    store_fenced_system(at<Cell>(window_of(call, peer), cells) + call.rank, value);
  }
}

// The ranks that one of several threads looks after: `first`, `first + step`, ...
struct Each {
  std::int32_t first, step;
};

// True once this thread's ranks have published `awaited.epoch`; *refusals is then the OR of what they said with it.
__device__ inline bool await_ranks(const KernelCall& call, const Awaited& awaited, Each ranks, Failure* failure,
                                   std::uint32_t* refusals = nullptr) {
  bool arrived = true;
  for (std::int32_t peer = ranks.first; arrived && peer < call.num_ranks; peer += ranks.step) {
    Patience patience;
    const Cell* cell = awaited.cells + peer * awaited.cells_per_rank;
    Cell seen = load_fenced_system(cell);
    while (arrived && seen.epoch != awaited.epoch) {
      arrived = patience.endure(call, awaited, peer, failure);
      seen = load_fenced_system(cell);
    }
    if (refusals != nullptr) *refusals |= seen.value;
  }
  fence_acquire_system();
  return arrived;
}

// The block: true once every rank, this one included, has published.
__device__ inline bool await_all(const KernelCall& call, const Awaited& awaited, Failure* failure,
                                 std::uint32_t* refusals = nullptr) {
  const Each ranks{static_cast<std::int32_t>(threadIdx.x), static_cast<std::int32_t>(blockDim.x)};
  return __syncthreads_and(await_ranks(call, awaited, ranks, failure, refusals));
}

// False if one of this thread's ranks runs another op, frame or workspace as the same call.
__device__ inline bool all_agree(const KernelCall& call, const Awaited& awaited, Each ranks, Failure* failure) {
  for (std::int32_t peer = ranks.first; peer < call.num_ranks; peer += ranks.step) {
    if (mismatches(call, awaited, peer)) *failure = {kMismatch, peer, awaited};
  }
  return failure->status == kOk;
}

}  // namespace epbuf::cuda

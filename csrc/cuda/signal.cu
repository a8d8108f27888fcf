// The kernels of one warp that talk to the peers: they run in stream order between the kernels that move rows.
#include "chain.cuh"
#include "kernels.h"
#include "wait.cuh"

namespace epbuf::cuda {
namespace {

// One warp: the lowest rank whose cell says one of the bits of `mask`, num_ranks if none does. Valid between the wait
// for the cells and this rank's next signal, until which no peer can overwrite them.
__device__ std::int32_t find_said(const KernelCall& call, const Cell* cells, std::uint32_t mask) {
  std::int32_t lowest = call.num_ranks;
  for (std::int32_t peer = call.num_ranks - 1 - static_cast<std::int32_t>(threadIdx.x); peer >= 0; peer -= kWarpSize) {
    if (load_relaxed_system(cells + peer).value & mask) lowest = peer;
  }
  return __reduce_min_sync(kAllLanes, lowest);
}

// What this rank says with a signal: its refusal, and in dispatch that it has too few pages for its rows.
__device__ __forceinline__ std::uint32_t said_by(const SignalKernel& k) {
  if (k.stash_table == 0) return k.call.refusal;
  const auto* table = at<const StashTable>(k.stash_table);
  return k.call.refusal | (table->num_pages < table->num_wanted ? kStashFull : 0);
}

// One thread: flags it as an overflow of the capacity is.
__device__ void note_full_stash(const SignalKernel& k, std::int32_t rank) {
  record_full_stash(k.call, rank);
  *at<float>(k.overflow) = 1.0f;
}

// One thread, after an unrefused round.
__device__ void update_open(const SignalKernel& k) {
  auto* counters = at<FrameCounters>(k.frame_counters);
  if ((k.steps & kSignalExpectOpen) && counters->open == 0) record_early_reuse(k.call);
  if (k.steps & kSignalSetOpen) counters->open = 1;
  if (k.steps & kSignalClearOpen) counters->open = 0;
}

// What the warp reads before it says anything, all loads in flight at once: each takes as long as a peer's answer.
struct Words {
  std::uint32_t epoch, ack_use, call, said;
  Marks marks;

  __device__ __forceinline__ explicit Words(const SignalKernel& k)
      : epoch(load_relaxed_device(at<const std::uint32_t>(k.epoch))),
        ack_use((k.steps & kSignalAwaitAck) ? load_relaxed_device(at<const std::uint32_t>(k.ack_use)) : 0),
        call(current_call(k.call)),
        said(said_by(k)),
        marks(k.call) {}
};

// A wait for `ack_cells`.
__device__ __forceinline__ Awaited ack_of(const SignalKernel& k, std::uint32_t epoch, std::uint32_t call) {
  return {k.ack_phase, epoch, at<const Cell>(k.call.window, k.ack_cells), 1, call};
}

// One warp, after a wait for `cells` in which some rank said something. True: the round was refused.
__device__ __noinline__ bool hear(const SignalKernel& k) {
  const Cell* cells = at<const Cell>(k.call.window, k.cells);
  const std::int32_t num_ranks = k.call.num_ranks;
  const std::int32_t refusing = find_said(k.call, cells, ~kStashFull);
  const std::int32_t full = refusing == num_ranks ? find_said(k.call, cells, kStashFull) : num_ranks;
  if (threadIdx.x != 0) return refusing != num_ranks;
  mark_frame(k.call, refusing != num_ranks);
  if (full != num_ranks) note_full_stash(k, full);
  if (refusing == num_ranks) return false;
  record_refusal(k.call, refusing, load_relaxed_system(cells + refusing).value & ~kStashFull);
  return true;
}

// One warp takes the steps.
__device__ void take_steps(const SignalKernel& k, const LaneWindows& windows) {
  const Words words(k);
  fence_release_system();  // for `cells`; as slow as the loads, so it runs beside them
  if (__any_sync(kAllLanes, words.marks.skip(k.call))) return;
  const std::uint32_t call = words.call + ((k.steps & kSignalBegin) ? 1 : 0);
  const std::uint32_t epoch = words.epoch + ((k.steps & kSignalAdvance) ? 1 : 0);
  if (k.steps & kSignalBegin) announce(k.call, windows, call);

  if (k.steps & kSignalAwaitAck) {
    if (!await_all(k.call, ack_of(k, words.ack_use, call))) return;
    fence_release_system();  // what these ranks have read is over, for whoever sees the cells
  }
  if (k.steps & kSignalPublish) publish(k.call, windows, k.cells, {epoch, words.said});
  if (threadIdx.x == 0 && (k.steps & kSignalAdvance)) *at<std::uint32_t>(k.epoch) = epoch;
  if (threadIdx.x == 0 && (k.steps & kSignalMarkReady)) *at<std::uint32_t>(k.ack_use) = epoch;

  std::uint32_t said = 0;
  if (k.steps & kSignalAwait) {
    const Cell* cells = at<const Cell>(k.call.window, k.cells);
    if (!await_all(k.call, {k.phase, epoch, cells, 1, call}, &said)) return;
  }
  bool refused = words.marks.refused == k.call.order;
  if (k.steps & kSignalJudge) {
    refused = said != 0 && hear(k);
    if (said == 0 && threadIdx.x == 0) mark_frame(k.call, false);
  }
  if (!refused) {
    release_next();
    if (threadIdx.x == 0) update_open(k);
    return;
  }
  __syncwarp();
  fence_release_system();  // all that was read of `cells`
  if (k.steps & kSignalPublishRefused) publish(k.call, windows, k.ack_cells, {epoch, kRefusalNone});
  if (k.steps & kSignalAwaitRefused) await_all(k.call, ack_of(k, epoch, call));
}

// Shapes: one warp, a lane for each rank, in turns.
//
// Example, combine of rank 0 of 2 on workspace 0, its third use (*epoch = 2), steps Begin | Advance | Publish | Await |
// Judge | PublishRefused | AwaitRefused: *epoch = 3; cell 0 of READY becomes {3, 0} at ranks 0 and 1; the warp waits
// until both of its own READY cells have epoch 3. If cell 1 says kRefusalDtype, rank 1 is recorded, the frame is marked
// with combine's order, {3, 0} is published and awaited in ACK, and the pull behind it does nothing.
__global__ void __launch_bounds__(kWarpSize) signal_kernel(const __grid_constant__ SignalKernel k) {
  const LaneWindows windows(k.call);
  await_previous();
  take_steps(k, windows);
}

// Example: rank 2 leaves its `with` block by an exception: ABORT cell 2 of every rank becomes {1, kAborted}, its own
// arena is poisoned, and a wait that runs there ends within about 50 us.
__global__ void abort_kernel(const __grid_constant__ AbortKernel k) {
  await_previous();
  ErrorRecord error{};
  error.status = kAborted;
  error.peer = k.call.rank;
  if (record_failure(k.call, error)) tell_abort(k.call, k.reason, -1);
}

}  // namespace

void launch_signal(const SignalKernel& kernel, const Target& target) {
  launch("signal_kernel", signal_kernel, {1, kWarpSize}, kernel, target.stream);
}

void launch_abort(const AbortKernel& kernel, const Target& target) {
  launch("abort_kernel", abort_kernel, {1, 1}, kernel, target.stream);
}

void load_signal() {
  load("signal_kernel", signal_kernel);
  load("abort_kernel", abort_kernel);
}

}  // namespace epbuf::cuda

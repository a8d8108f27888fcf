// The one-block kernels that talk to the peers: they run in stream order between the kernels that move rows.
#include <algorithm>

#include "chain.cuh"
#include "kernels.h"
#include "wait.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kMaxThreads = 256;

// The lowest rank whose cell says one of the bits of `mask`, num_ranks if none does. Valid between the wait for the
// cells and this rank's next signal, until which no peer can overwrite them.
__device__ std::int32_t find_said(const KernelCall& call, const Cell* cells, std::uint32_t mask) {
  __shared__ std::int32_t lowest;
  __syncthreads();  // every thread has read what was found before
  if (threadIdx.x == 0) lowest = call.num_ranks;
  __syncthreads();
  for (std::int32_t peer = threadIdx.x; peer < call.num_ranks; peer += blockDim.x) {
    if (load_relaxed_system(cells + peer).value & mask) atomicMin(&lowest, peer);
  }
  __syncthreads();
  return lowest;
}

// One thread. The mark makes the frame's later ops do nothing; the same op again, or an earlier one, takes it away.
__device__ void judge(const SignalKernel& k, const Cell* cells, std::int32_t refusing) {
  auto* mark = at<std::uint32_t>(k.call.refused);
  if (refusing == k.call.num_ranks) {
    store_relaxed_device(mark, 0);
  } else {
    store_relaxed_device(mark, k.call.order);
    record_refusal(k.call, refusing, load_relaxed_system(cells + refusing).value & ~kStashFull);
  }
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

// One block takes the steps. False: give up, because of *failure. Words are loaded before the waits that do not need
// them: each load costs as much as a peer's answer.
__device__ bool take_steps(const SignalKernel& k, Failure* failure) {
  auto* epoch_word = at<std::uint32_t>(k.epoch);
  const std::uint32_t epoch = *epoch_word + ((k.steps & kSignalAdvance) ? 1 : 0);
  const std::uint32_t last_use = (k.steps & kSignalAwaitAck) ? *at<const std::uint32_t>(k.ack_use) : 0;
  const bool was_refused = (k.steps & kSignalAwaitRefused) && refused_order(k.call) == k.call.order;
  const std::uint32_t number = (k.steps & kSignalBegin) ? begin_call(k.call) : current_call(k.call);
  const Cell* cells = at<const Cell>(k.call.window, k.cells);

  if (k.steps & kSignalAwaitAck) {
    const Cell* ack_cells = at<const Cell>(k.call.window, k.ack_cells);
    if (!await_all(k.call, {k.ack_phase, last_use, ack_cells, 1, number}, failure)) return false;
  }

  __syncthreads();  // every thread has read the old words
  if (threadIdx.x == 0 && (k.steps & kSignalAdvance)) *epoch_word = epoch;
  if (threadIdx.x == 0 && (k.steps & kSignalMarkReady)) *at<std::uint32_t>(k.ack_use) = epoch;
  if (k.steps & kSignalPublish) publish(k.call, k.cells, {epoch, said_by(k)});

  std::uint32_t said = 0;
  if ((k.steps & kSignalAwait) || was_refused) {
    if (!await_all(k.call, {k.phase, epoch, cells, 1, number}, failure, &said)) return false;
  }
  release_next();

  bool refused = was_refused;
  if (k.steps & kSignalJudge) {
    const bool is_said = __syncthreads_or(said != 0);
    const std::int32_t refusing = is_said ? find_said(k.call, cells, ~kStashFull) : k.call.num_ranks;
    refused = refusing != k.call.num_ranks;
    if (threadIdx.x == 0) judge(k, cells, refusing);
    const std::int32_t full = is_said && !refused ? find_said(k.call, cells, kStashFull) : k.call.num_ranks;
    if (threadIdx.x == 0 && full != k.call.num_ranks) note_full_stash(k, full);
  }
  if (threadIdx.x == 0 && !refused) update_open(k);
  return true;
}

// Shapes: one block, a thread for each rank, in turns.
//
// Example, combine of rank 0 of 2 on workspace 0, its third use (*epoch = 2), steps Begin | Advance | Publish | Await |
// Judge: *epoch = 3; cell 0 of READY becomes {3, 0} at ranks 0 and 1; the block waits until its own READY cells are
// {3, _} and {3, _}. If cell 1 is {3, kRefusalDtype}, rank 1 is recorded, the frame is marked with kOpCombine, and the
// pull that follows in the stream does nothing.
__global__ void __launch_bounds__(kMaxThreads) signal_kernel(const __grid_constant__ SignalKernel k) {
  await_previous();
  if (block_skips(k.call)) return;
  Failure failure;
  if (!take_steps(k, &failure)) report(k.call, failure);
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
  const std::uint32_t num_warps = (static_cast<std::uint32_t>(kernel.call.num_ranks) + kWarpSize - 1) / kWarpSize;
  const std::uint32_t num_threads = std::min(num_warps * kWarpSize, kMaxThreads);
  launch("signal_kernel", signal_kernel, {1, num_threads}, kernel, target.stream);
}

void launch_abort(const AbortKernel& kernel, const Target& target) {
  launch("abort_kernel", abort_kernel, {1, 1}, kernel, target.stream);
}

void load_signal() {
  load("signal_kernel", signal_kernel);
  load("abort_kernel", abort_kernel);
}

}  // namespace epbuf::cuda

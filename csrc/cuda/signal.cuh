// What one block says to the peers and awaits of them, before rows move or after.
#pragma once

#include "chain.cuh"
#include "wait.cuh"

namespace epbuf::cuda {

// The lowest rank whose cell says one of the bits of `mask`, num_ranks if none does. Valid between the wait for the
// cells and this rank's next signal, until which no peer can overwrite them.
__device__ inline std::int32_t lowest_that_said(const KernelCall& call, const Cell* cells, std::uint32_t mask) {
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
__device__ inline void judge(const KernelCall& call, const Cell* cells, std::int32_t refusing) {
  auto* mark = at<std::uint32_t>(call.refused);
  if (refusing == call.num_ranks) {
    store_relaxed_device(mark, 0);
  } else {
    store_relaxed_device(mark, call.order);
    record_refusal(call, refusing, load_relaxed_system(cells + refusing).value & ~kStashFull);
  }
}

// What this rank says with a signal: its refusal, and in dispatch that it has too few pages for its rows.
__device__ __forceinline__ std::uint32_t own_value(const KernelCall& call, const SignalSteps& signal) {
  if (signal.stash_table == 0) return call.refusal;
  const auto* table = at<const StashTable>(signal.stash_table);
  return call.refusal | (table->num_pages < table->num_wanted ? kStashFull : 0);
}

// One thread: flags it as an overflow of the capacity is.
__device__ inline void note_full_stash(const KernelCall& call, const SignalSteps& signal, std::int32_t rank) {
  record_full_stash(call, rank);
  *at<float>(signal.overflow) = 1.0f;
}

// One thread, after an unrefused round.
__device__ inline void update_open(const KernelCall& call, const SignalSteps& signal) {
  auto* counters = at<FrameCounters>(signal.frame_counters);
  if ((signal.steps & kSignalExpectOpen) && counters->open == 0) record_early_reuse(call);
  if (signal.steps & kSignalSetOpen) counters->open = 1;
  if (signal.steps & kSignalClearOpen) counters->open = 0;
}

// One block. False: give up, because of *failure. Words are loaded before the waits that do not need them: each load
// costs as much as a peer's answer.
__device__ inline bool try_steps(const KernelCall& call, const SignalSteps& signal, Failure* failure) {
  auto* epoch_word = at<std::uint32_t>(signal.epoch);
  const std::uint32_t epoch = *epoch_word + ((signal.steps & kSignalAdvance) ? 1 : 0);
  const std::uint32_t last_use = (signal.steps & kSignalAwaitAck) ? *at<const std::uint32_t>(signal.ack_use) : 0;
  const bool was_refused = (signal.steps & kSignalAwaitRefused) && refused_order(call) == call.order;
  const std::uint32_t number = (signal.steps & kSignalBegin) ? begin_call(call) : current_call(call);
  const Cell* cells = at<const Cell>(call.window, signal.cells);

  if (signal.steps & kSignalAwaitAck) {
    const Cell* ack_cells = at<const Cell>(call.window, signal.ack_cells);
    if (!await_all(call, {signal.ack_phase, last_use, ack_cells, 1, number}, failure)) return false;
  }

  __syncthreads();  // every thread has read the old words
  if (threadIdx.x == 0 && (signal.steps & kSignalAdvance)) *epoch_word = epoch;
  if (threadIdx.x == 0 && (signal.steps & kSignalMarkReady)) *at<std::uint32_t>(signal.ack_use) = epoch;
  if (signal.steps & kSignalPublish) publish(call, signal.cells, {epoch, own_value(call, signal)});

  std::uint32_t said = 0;
  if ((signal.steps & kSignalAwait) || was_refused) {
    if (!await_all(call, {signal.phase, epoch, cells, 1, number}, failure, &said)) return false;
  }
  release_next();

  bool refused = was_refused;
  if (signal.steps & kSignalJudge) {
    const bool is_said = __syncthreads_or(said != 0);
    const std::int32_t refusing = is_said ? lowest_that_said(call, cells, ~kStashFull) : call.num_ranks;
    refused = refusing != call.num_ranks;
    if (threadIdx.x == 0) judge(call, cells, refusing);
    const std::int32_t full = is_said && !refused ? lowest_that_said(call, cells, kStashFull) : call.num_ranks;
    if (threadIdx.x == 0 && full != call.num_ranks) note_full_stash(call, signal, full);
  }
  if (threadIdx.x == 0 && !refused) update_open(call, signal);
  return true;
}

// One block, which has asked whether the call is skipped.
__device__ inline void take_steps(const KernelCall& call, const SignalSteps& signal) {
  Failure failure;
  if (!try_steps(call, signal, &failure)) report(call, failure);
}

// Not inlined: rows move in registers, and this is what comes after them.
static __device__ __noinline__ void take_last_steps(const KernelCall& call, const SignalSteps& signal) {
  if (!block_skips(call)) take_steps(call, signal);
}

// Every thread of every block, when its rows have moved: the last block to come takes the steps. Rows of all blocks are
// then where the peers read them: each block's fence and addition come before the last one's, and its fence before the
// cells.
__device__ __forceinline__ void end_block(const KernelCall& call, const LastSteps& last) {
  if (last.signal.steps == 0) return;
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    auto* num_ended = at<std::uint32_t>(last.num_ended);
    fence_device();
    is_last = atomicAdd(num_ended, 1u) == gridDim.x - 1;
    if (is_last) store_relaxed_device(num_ended, 0);
    fence_device();
  }
  __syncthreads();
  if (is_last) take_last_steps(call, last.signal);
}

}  // namespace epbuf::cuda

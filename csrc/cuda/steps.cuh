// What a block says to the peers before and after rows move, and what it waits for: the steps of SignalKernel.
#pragma once

#include "chain.cuh"
#include "wait.cuh"

namespace epbuf::cuda {

// The lowest rank whose cell carries a refusal, num_ranks if none does. Valid between the wait for the cells and this
// rank's next signal, until which no peer can overwrite them.
__device__ inline std::int32_t find_refusal(const KernelCall& call, const Cell* cells) {
  __shared__ std::int32_t lowest;
  if (threadIdx.x == 0) lowest = call.num_ranks;
  __syncthreads();
  for (std::int32_t peer = threadIdx.x; peer < call.num_ranks; peer += blockDim.x) {
    if (load_relaxed_system(cells + peer).value != kRefusalNone) atomicMin(&lowest, peer);
  }
  __syncthreads();
  return lowest;
}

// One thread. The mark makes the frame's later ops do nothing; the same op again, or an earlier one, takes it away.
__device__ inline void judge(const SignalKernel& k, const Cell* cells, std::int32_t refusing) {
  auto* mark = at<std::uint32_t>(k.call.refused);
  if (refusing == k.call.num_ranks) {
    store_relaxed_device(mark, kOpNone);
  } else {
    store_relaxed_device(mark, k.call.op);
    record_refusal(k.call, refusing, load_relaxed_system(cells + refusing).value);
  }
}

// One thread, after an unrefused round.
__device__ inline void update_open(const SignalKernel& k) {
  auto* counters = at<FrameCounters>(k.frame_counters);
  if ((k.steps & kSignalExpectOpen) && counters->open == 0) record_early_reuse(k.call);
  if (k.steps & kSignalSetOpen) counters->open = 1;
  if (k.steps & kSignalClearOpen) counters->open = 0;
}

// One block takes the steps. False: give up, because of *failure. Words are loaded before the waits that do not need
// them: each load costs as much as a peer's answer.
__device__ inline bool take_steps(const SignalKernel& k, Failure* failure) {
  auto* epoch_word = at<std::uint32_t>(k.epoch);
  const std::uint32_t epoch = *epoch_word + ((k.steps & kSignalAdvance) ? 1 : 0);
  const std::uint32_t last_use = (k.steps & kSignalAwaitAck) ? *at<const std::uint32_t>(k.ack_use) : 0;
  const bool was_refused = (k.steps & kSignalAwaitRefused) && refused_op(k.call) == k.call.op;
  const std::uint32_t number = (k.steps & kSignalBegin) ? begin_call(k.call) : current_call(k.call);
  const Cell* cells = at<const Cell>(k.call.window, k.cells);

  if (k.steps & kSignalAwaitAck) {
    const Cell* ack_cells = at<const Cell>(k.call.window, k.ack_cells);
    if (!await_all(k.call, {k.ack_phase, last_use, ack_cells, 1, number}, failure)) return false;
  }

  __syncthreads();  // every thread has read the old words
  if (threadIdx.x == 0 && (k.steps & kSignalAdvance)) *epoch_word = epoch;
  if (threadIdx.x == 0 && (k.steps & kSignalMarkReady)) *at<std::uint32_t>(k.ack_use) = epoch;
  if (k.steps & kSignalPublish) publish(k.call, k.cells, {epoch, k.call.refusal});

  std::uint32_t refusals = 0;
  if ((k.steps & kSignalAwait) || was_refused) {
    if (!await_all(k.call, {k.phase, epoch, cells, 1, number}, failure, &refusals)) return false;
  }
  release_next();

  bool refused = was_refused;
  if (k.steps & kSignalJudge) {
    const std::int32_t refusing = __syncthreads_or(refusals != 0) ? find_refusal(k.call, cells) : k.call.num_ranks;
    refused = refusing != k.call.num_ranks;
    if (threadIdx.x == 0) judge(k, cells, refusing);
  }
  if (threadIdx.x == 0 && !refused) update_open(k);
  return true;
}

}  // namespace epbuf::cuda

// What kernels record of this rank's failures, refusals and counts, and whether a kernel may run at all.
#pragma once

#include "chain.cuh"
#include "launch.h"
#include "sync.cuh"

namespace epbuf::cuda {

__device__ __forceinline__ Control* control_of(const KernelCall& call) {
  return at<Control>(call.window, call.control);
}

// The block: asks for the addresses of all windows. They never change, so a kernel may do it before await_previous.
__device__ __forceinline__ void prefetch_windows(const KernelCall& call) {
  for (std::int32_t rank = threadIdx.x; rank < call.num_ranks; rank += blockDim.x) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(at<const std::uint64_t>(call.peers) + rank));
  }
}

__device__ __forceinline__ bool is_poisoned(const KernelCall& call) {
  return load_relaxed_device(&control_of(call)->poisoned) != kOk;
}

__device__ __forceinline__ std::uint32_t refused_order(const KernelCall& call) {
  return load_relaxed_device(at<const std::uint32_t>(call.refused));
}

// One thread. The mark makes the frame's later ops do nothing; the same op again, or an earlier one, takes it away.
__device__ __forceinline__ void mark_frame(const KernelCall& call, bool refused) {
  store_relaxed_device(at<std::uint32_t>(call.refused), refused ? call.order : 0);
}

// What decides whether a kernel of an op runs. Loaded at once and asked later, with other loads in between.
struct Marks {
  std::uint32_t refused, poisoned;

  __device__ __forceinline__ explicit Marks(const KernelCall& call)
      : refused(refused_order(call)), poisoned(load_relaxed_device(&control_of(call)->poisoned)) {}

  // Before this op's own round: the arena is poisoned, or the frame's round was refused in an earlier one. All ranks
  // saw that refusal, so all of them skip, without a signal and without a call number.
  __device__ __forceinline__ bool skip(const KernelCall& call) const {
    return (poisoned != kOk) | ((refused != 0) & (refused < call.order));
  }
  // After this op's own round: it was refused too.
  __device__ __forceinline__ bool stop() const { return (poisoned != kOk) | (refused != 0); }
};

// The same answer for all threads that meet here, also when another stream poisons the arena meanwhile.
__device__ __forceinline__ bool warp_skips(const KernelCall& call) {
  return __any_sync(kAllLanes, Marks(call).skip(call));
}
__device__ __forceinline__ bool warp_stops(const KernelCall& call) { return __any_sync(kAllLanes, Marks(call).stop()); }

__device__ __forceinline__ bool block_skips(const KernelCall& call) {
  return __syncthreads_or(threadIdx.x == 0 && Marks(call).skip(call));
}

__device__ __forceinline__ bool block_stops(const KernelCall& call) {
  return __syncthreads_or(threadIdx.x == 0 && Marks(call).stop());
}

// The host polls `poisoned`, so it is the last word to arrive.
__device__ inline void mirror_control(const KernelCall& call) {
  const auto* words = reinterpret_cast<const std::uint64_t*>(control_of(call));
  auto* mirror = at<std::uint64_t>(call.mirror);
#pragma unroll 1
  for (std::uint32_t i = 1; i < sizeof(Control) / sizeof(std::uint64_t); ++i)
    store_relaxed_system(mirror + i, words[i]);
  fence_release_system();
  store_relaxed_system(mirror, words[0]);
}

// One thread: applies `change` to Control, then mirrors it. Streams of this rank take turns, so that the mirror never
// goes back; the holder of the lock waits for nobody.
template <typename Change>
__device__ __forceinline__ void change_control(const KernelCall& call, Change change) {
  auto* lock = at<std::uint32_t>(call.lock);
  while (atomicCAS(lock, 0u, 1u) != 0u) __nanosleep(100);
  __threadfence();
  change(*control_of(call));
  mirror_control(call);
  __threadfence();
  atomicExch(lock, 0u);
}

// Called, not inlined, like the records below: a kernel of one warp or block feels every instruction that it fetches.
// The latest one is named: an earlier one was raised when the host saw the count change.
__device__ __noinline__ inline void record_refusal(const KernelCall& call, std::int32_t rank, std::uint32_t refusal) {
  change_control(call, [&](Control& control) {
    ++control.num_refusals;
    control.refusing_rank = rank;
    control.refusal = refusal;
    control.refused_op = call.op;
  });
}

__device__ __noinline__ inline void record_overflow(const KernelCall& call, std::int64_t max_demand_rows,
                                                    std::int32_t rank) {
  change_control(call, [&](Control& control) {
    ++control.num_overflows;
    control.max_demand_rows = max_demand_rows;
    control.max_demand_rank = rank;
  });
}

__device__ __noinline__ inline void record_full_stash(const KernelCall& call, std::int32_t rank) {
  change_control(call, [&](Control& control) {
    ++control.num_stash_overflows;
    control.stash_rank = rank;
  });
}

__device__ __noinline__ inline void record_early_reuse(const KernelCall& call) {
  change_control(call, [](Control& control) { ++control.num_early_reuses; });
}

// False: an earlier failure stands. `poisoned` is written last: other streams of this rank read it without the lock.
__device__ inline bool record_failure(const KernelCall& call, const ErrorRecord& error) {
  bool first = false;
  change_control(call, [&](Control& control) {
    first = control.poisoned == kOk;
    if (!first) return;
    control.error = error;
    __threadfence();
    store_relaxed_device(&control.poisoned, error.status);
  });
  return first;
}

}  // namespace epbuf::cuda

// The one-block kernels that talk to the peers: they run in stream order between the kernels that move rows.
#include <algorithm>

#include "kernels.h"
#include "steps.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kMaxThreads = 256;

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

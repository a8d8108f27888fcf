#include "engine.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace epbuf {
namespace {

using namespace cuda;

constexpr std::chrono::milliseconds kAbortPatience{1000};

Outcome empty_outcome(Status status) {
  Outcome outcome{};
  outcome.status = status;
  outcome.refusing_rank = -1;
  outcome.bad_rank = -1;
  return outcome;
}

Phases only(std::uint32_t op, std::int32_t phase) {
  const std::int32_t num = CudaEngine::phases(op);
  EPBUF_CHECK(phase >= 0 && phase < num, "phase ", phase, " of op ", op, " was asked for; it has ", num);
  return Phases{1} << phase;
}

// Device memory at `address`, copied behind no kernel of an op.
void copy_aside(const CudaContext& context, void* to, std::uint64_t address, std::size_t num_bytes) {
  const cudaStream_t stream = context.words().side_stream();
  check_cuda(cudaMemcpyAsync(to, reinterpret_cast<const void*>(address), num_bytes, cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync of control words");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

// Lets this thread call CUDA while another stream captures.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

CudaEngine::CudaEngine(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
                       std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards,
                       std::vector<std::uint64_t> peers, int device)
    : context_(geometry, arena, std::move(frames), std::move(forwards), std::move(backwards), peers, device) {
  warm_up();
}

// A poisoned arena does nothing; the kernels check it themselves, the host only spares the launches.
template <typename Issue>
Outcome CudaEngine::enqueue(Issue issue) {
  const std::lock_guard<std::mutex> guard(mutex_);
  EPBUF_CHECK(!context_.words().closed(), "an op was asked of a CUDA engine that is closed");
  if (context_.words().mirrored_poison() != kOk) return empty_outcome(kPoisoned);
  const DeviceGuard device(context_.device());
  issue();
  return empty_outcome(kOk);
}

Outcome CudaEngine::route(const RouteCall& call) {
  return enqueue([&] { issue_route(context_, call, kAllPhases); });
}

Outcome CudaEngine::dispatch(const DispatchCall& call) {
  return enqueue([&] { issue_dispatch(context_, call, kAllPhases); });
}

Outcome CudaEngine::combine(const CombineCall& call) {
  return enqueue([&] { issue_combine(context_, call, kAllPhases); });
}

Outcome CudaEngine::combine_backward(const DispatchCall& call) {
  return enqueue([&] { issue_combine_backward(context_, call, kAllPhases); });
}

Outcome CudaEngine::dispatch_backward(const CombineCall& call) {
  return enqueue([&] { issue_dispatch_backward(context_, call, kAllPhases); });
}

Outcome CudaEngine::weight_grad(const WeightGradCall& call) {
  return enqueue([&] { issue_weight_grad(context_, call); });
}

Outcome CudaEngine::decode(const DecodeCall& call) {
  return enqueue([&] { issue_decode(context_, call); });
}

Outcome CudaEngine::stash(const StashCall& call) {
  return enqueue([&] { issue_stash(context_, call); });
}

Outcome CudaEngine::count_ids(const RouteCall& call, std::uint64_t sent_ids, std::uint64_t count_row) {
  return enqueue([&] { issue_count_ids(context_, call, sent_ids, count_row); });
}

Outcome CudaEngine::summarise(const SummariseCall& call) {
  return enqueue([&] { issue_summarise(context_, call); });
}

std::int32_t CudaEngine::phases(std::uint32_t op) {
  EPBUF_CHECK(op >= kOpRoute && op <= kOpDispatchBackward, "op ", op, " does not exist");
  return op == kOpDispatch ? 2 : 3;
}

Outcome CudaEngine::run_route_phase(std::int32_t phase, const RouteCall& call) {
  return enqueue([&] { issue_route(context_, call, only(kOpRoute, phase)); });
}

Outcome CudaEngine::run_dispatch_phase(std::uint32_t op, std::int32_t phase, const DispatchCall& call) {
  EPBUF_CHECK(op == kOpDispatch || op == kOpCombineBackward, "op ", op, " takes no DispatchCall");
  const auto issue = op == kOpDispatch ? issue_dispatch : issue_combine_backward;
  return enqueue([&] { issue(context_, call, only(op, phase)); });
}

Outcome CudaEngine::run_combine_phase(std::uint32_t op, std::int32_t phase, const CombineCall& call) {
  EPBUF_CHECK(op == kOpCombine || op == kOpDispatchBackward, "op ", op, " takes no CombineCall");
  const auto issue = op == kOpCombine ? issue_combine : issue_dispatch_backward;
  return enqueue([&] { issue(context_, call, only(op, phase)); });
}

Control CudaEngine::control() const {
  const DeviceGuard device(context_.device());
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  Control control;
  copy_aside(context_, &control, context_.control(), sizeof control);
  return control;
}

std::vector<CellProgress> CudaEngine::progress() const {
  const DeviceGuard device(context_.device());
  std::vector<Cell> cells(static_cast<std::size_t>(context_.geometry().num_ranks));
  copy_aside(context_, cells.data(), context_.progress_cells(), cells.size() * sizeof(Cell));
  std::vector<CellProgress> all;
  for (const Cell& cell : cells) {
    all.push_back({cell.epoch, cell.value >> kProgressOpShift & kProgressOpMask,
                   cell.value >> kProgressFrameShift & kProgressIndexMask, cell.value & kProgressIndexMask});
  }
  return all;
}

// On the side stream, because the ops' stream may be waiting for the very peers that this tells.
void CudaEngine::abort(std::uint32_t reason) noexcept {
  if (context_.words().closed()) return;
  try {
    const RelaxedCapture relaxed;
    const DeviceGuard device(context_.device());
    AbortKernel kernel{};
    kernel.call = context_.kernel_call(kOpNone, 0, 0);
    kernel.reason = reason;
    const cudaStream_t stream = context_.words().side_stream();
    launch_abort(kernel, {stream, 1, 0});
    const auto deadline = std::chrono::steady_clock::now() + kAbortPatience;
    while (cudaStreamQuery(stream) == cudaErrorNotReady && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  } catch (const NativeError&) {
    // The caller is leaving because of an error of its own, which must not be hidden by this one.
  }
}

void CudaEngine::warm_up() const {
  const DeviceGuard device(context_.device());
  load_route();
  load_route_exchange();
  load_route_fused();
  load_counts();
  load_signal();
  load_dispatch();
  load_encode();
  load_expand();
  load_tile();
  load_combine();
  load_by_rank();
  load_weight();
  load_stash();
}

void CudaEngine::close() {
  const std::lock_guard<std::mutex> guard(mutex_);
  context_.words().close();
}

}  // namespace epbuf

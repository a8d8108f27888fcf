#include "capture.h"

#include <cuda_runtime_api.h>

#include "../check.h"
#include "launch.h"

namespace epbuf {
namespace {

using cuda::check_cuda;

struct Capture {
  std::uint64_t id;
  cudaGraph_t graph;
};

Capture capture_of(std::uint64_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaStreamGetCaptureInfo(reinterpret_cast<cudaStream_t>(stream), &status, &id, &graph, nullptr, nullptr, nullptr);
#else
  const cudaError_t error =
      cudaStreamGetCaptureInfo_v2(reinterpret_cast<cudaStream_t>(stream), &status, &id, &graph, nullptr, nullptr);
#endif
  check_cuda(error, "cudaStreamGetCaptureInfo");
  EPBUF_CHECK(status != cudaStreamCaptureStatusInvalidated,
              "the stream's capture was invalidated by an earlier error; end it and capture again");
  return status == cudaStreamCaptureStatusActive ? Capture{id, graph} : Capture{0, nullptr};
}

// Runs when the last graph that retains the object is gone. It may not call CUDA.
void CUDART_CB drop_hold(void* pointer) {
  auto* count = static_cast<std::shared_ptr<std::atomic<int>>*>(pointer);
  (*count)->fetch_sub(1, std::memory_order_release);
  delete count;
}

}  // namespace

std::uint64_t capture_id(std::uint64_t stream) { return capture_of(stream).id; }

GraphHold::GraphHold(std::uint64_t stream) : count_(std::make_shared<std::atomic<int>>(0)) {
  const Capture capture = capture_of(stream);
  EPBUF_CHECK(capture.graph != nullptr, "a hold was asked of a stream that captures no graph");
  auto owner = std::make_unique<std::shared_ptr<std::atomic<int>>>(count_);
  cudaUserObject_t object = nullptr;
  check_cuda(cudaUserObjectCreate(&object, owner.get(), drop_hold, 1, cudaUserObjectNoDestructorSync),
             "cudaUserObjectCreate");
  owner.release();  // drop_hold deletes it
  count_->fetch_add(1, std::memory_order_relaxed);
  const cudaError_t error = cudaGraphRetainUserObject(capture.graph, object, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) cudaUserObjectRelease(object, 1);
  check_cuda(error, "cudaGraphRetainUserObject");
}

}  // namespace epbuf

#include "words.h"

#include <cstring>

#include "launch.h"

namespace epbuf::cuda {
namespace {

constexpr std::size_t kControlWords = sizeof(Control) / sizeof(std::uint64_t);

std::uint64_t device_zeros(std::size_t num_bytes) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, num_bytes), "cudaMalloc of the engine's words");
  check_cuda(cudaMemset(memory, 0, num_bytes), "cudaMemset of the engine's words");
  return reinterpret_cast<std::uint64_t>(memory);
}

void copy_to_device(std::uint64_t to, const std::vector<std::uint64_t>& from) {
  if (from.empty()) return;
  check_cuda(cudaMemcpy(reinterpret_cast<void*>(to), from.data(), from.size() * sizeof from[0], cudaMemcpyHostToDevice),
             "cudaMemcpy of the engine's words");
}

// Kernels may load `peers` before the kernel ahead has ended, so they share no line of a cache with words that change.
constexpr std::size_t kLineBytes = 128;

// bad_ids of each workspace: none so far, and no first one.
std::vector<std::uint64_t> no_bad_ids(std::size_t num_workspaces) {
  std::vector<std::uint64_t> words;
  for (std::size_t w = 0; w < num_workspaces; ++w) words.insert(words.end(), {0, ~std::uint64_t{0}});
  return words;
}

}  // namespace

DeviceGuard::DeviceGuard(int device) {
  check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
  if (previous_ == device) return;
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) cudaSetDevice(previous_);
}

DeviceWords::DeviceWords(int device, const std::vector<std::uint64_t>& peers, std::size_t num_frames,
                         std::size_t num_workspaces)
    : device_(device) {
  const DeviceGuard guard(device);
  const std::vector<std::uint64_t> bad_ids = no_bad_ids(num_workspaces);
  const std::size_t peers_bytes = (8 * peers.size() + kLineBytes - 1) / kLineBytes * kLineBytes;
  base_ = device_zeros(peers_bytes + 8 * bad_ids.size() + 4 * (num_frames + 1));
  bad_ids_ = base_ + peers_bytes;
  refused_ = bad_ids_ + 8 * bad_ids.size();
  lock_ = refused_ + 4 * num_frames;
  copy_to_device(base_, peers);
  copy_to_device(bad_ids_, bad_ids);

  void* mirror = nullptr;
  check_cuda(cudaHostAlloc(&mirror, sizeof(Control), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  std::memset(mirror, 0, sizeof(Control));
  mirror_ = static_cast<Control*>(mirror);
  void* device_mirror = nullptr;
  check_cuda(cudaHostGetDevicePointer(&device_mirror, mirror, 0), "cudaHostGetDevicePointer");
  mirror_device_ = reinterpret_cast<std::uint64_t>(device_mirror);
  check_cuda(cudaStreamCreateWithFlags(&side_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

std::uint32_t DeviceWords::mirrored_poison() const { return __atomic_load_n(&mirror_->poisoned, __ATOMIC_ACQUIRE); }

// The first word is the last that a kernel writes, so it is the first that is read.
Control DeviceWords::mirrored() const {
  const auto* from = reinterpret_cast<const std::uint64_t*>(mirror_);
  std::uint64_t words[kControlWords];
  for (std::size_t i = 0; i < kControlWords; ++i) words[i] = __atomic_load_n(from + i, __ATOMIC_ACQUIRE);
  Control control;
  std::memcpy(&control, words, sizeof control);
  return control;
}

void DeviceWords::close() {
  if (base_ == 0) return;
  const DeviceGuard guard(device_);
  check_cuda(cudaStreamDestroy(side_stream_), "cudaStreamDestroy");
  check_cuda(cudaFreeHost(mirror_), "cudaFreeHost");
  check_cuda(cudaFree(reinterpret_cast<void*>(base_)), "cudaFree");
  base_ = 0;
}

}  // namespace epbuf::cuda

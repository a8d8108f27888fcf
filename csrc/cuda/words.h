// The memory that a CUDA engine owns beside the window: a few words for its kernels, and their mirror for the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "../layout.h"

namespace epbuf::cuda {

// Makes a device current while it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Allocated once; its addresses are in every captured kernel. Frees nothing until close(): cudaFree synchronises, which
// a destructor must not.
class DeviceWords {
 public:
  DeviceWords(int device, const std::vector<std::uint64_t>& peers, std::size_t num_frames, std::size_t num_workspaces);
  DeviceWords(const DeviceWords&) = delete;
  DeviceWords& operator=(const DeviceWords&) = delete;

  std::uint64_t peers() const { return base_; }  // uint64 [R]
  std::uint64_t bad_ids(std::int32_t workspace) const { return bad_ids_ + 16 * static_cast<std::uint64_t>(workspace); }
  std::uint64_t refused(std::int32_t frame) const { return refused_ + 4 * static_cast<std::uint64_t>(frame); }
  std::uint64_t lock() const { return lock_; }  // uint32
  std::uint64_t mirror() const { return mirror_device_; }
  cudaStream_t side_stream() const { return side_stream_; }  // for what must not wait behind an op

  std::uint32_t mirrored_poison() const;
  Control mirrored() const;  // no synchronisation
  bool closed() const { return base_ == 0; }
  void close();

 private:
  int device_;
  std::uint64_t base_ = 0, bad_ids_ = 0, refused_ = 0, lock_ = 0, mirror_device_ = 0;
  Control* mirror_ = nullptr;  // pinned
  cudaStream_t side_stream_ = nullptr;
};

}  // namespace epbuf::cuda

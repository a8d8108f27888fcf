// A symmetric window of NCCL: memory, registration, and the peers' addresses. NCCL is opened at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace epbuf {

struct NcclLibrary;  // the functions that we call, window_nccl.cpp

// Version of the NCCL at a path as ncclGetVersion gives it, 23007 for 2.30.7. 0: it cannot be opened, or is no NCCL.
int nccl_version(const std::string& path);

// Path of the NCCL that this process has loaded, as torch does; empty: none.
std::string nccl_in_process();

// One allocation of ncclMemAlloc, registered once with a communicator of its own, on the current device.
class NcclWindow {
 public:
  // What rank 0 makes and sends to the others by any means.
  static std::string make_unique_id(const std::string& library);

  // Collective: every rank, with rank 0's id and the same number of bytes. Synchronises.
  NcclWindow(const std::string& library, const std::string& unique_id, int rank, int num_ranks, std::size_t num_bytes);
  NcclWindow(const NcclWindow&) = delete;
  NcclWindow& operator=(const NcclWindow&) = delete;

  // Frees the memory if it was deregistered, else leaks it: a destructor must not communicate.
  ~NcclWindow();

  const std::vector<std::uint64_t>& peers() const { return peers_; }  // base of every rank's memory, index = rank
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory_); }
  std::size_t num_bytes() const { return num_bytes_; }

  // ncclWindow_t and ncclComm_t, for kernels that address the window themselves; 0 once deregistered.
  std::uint64_t handle() const { return comm_ != nullptr ? reinterpret_cast<std::uint64_t>(window_) : 0; }
  std::uint64_t communicator() const { return reinterpret_cast<std::uint64_t>(comm_); }

  // Ends the registration and the communicator; the memory stays, and peers() are dead. Collective, behind a barrier,
  // after all kernels that use a peer's memory and all graphs that recorded one. Idempotent. Synchronises.
  void deregister();

 private:
  void open(const std::string& unique_id, int rank, int num_ranks);
  void register_memory(int rank, int num_ranks);
  void find_peers(int num_ranks);

  std::shared_ptr<const NcclLibrary> nccl_;
  std::size_t num_bytes_;
  int device_ = 0;
  void* comm_ = nullptr;
  void* memory_ = nullptr;
  void* window_ = nullptr;
  std::vector<std::uint64_t> peers_;
};

}  // namespace epbuf

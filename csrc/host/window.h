// Every rank's window as mapped here.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "../sync.h"

namespace epbuf {

class Windows {
 public:
  // `bases`: address of each rank's window in this process, index = rank.
  Windows(std::int32_t rank, std::vector<std::uint64_t> bases) : rank_(rank), bases_(std::move(bases)) {}

  std::int32_t rank() const { return rank_; }
  std::int32_t num_ranks() const { return static_cast<std::int32_t>(bases_.size()); }

  template <typename T>
  T* at(std::int32_t rank, std::int64_t offset) const {
    return reinterpret_cast<T*>(bases_[static_cast<std::size_t>(rank)] + static_cast<std::uint64_t>(offset));
  }

  template <typename T>
  T* own(std::int64_t offset) const {
    return at<T>(rank_, offset);
  }

  // Release: what this rank did before is visible to whoever acquires the cell. One cell per source in each window.
  void publish(std::int64_t cells_offset, Cell cell) const {
    fence_release_system();
    for (std::int32_t peer = 0; peer < num_ranks(); ++peer)
      store_fenced_system(at<Cell>(peer, cells_offset) + rank_, cell);
  }

  // Relaxed: carries no data but itself (PROGRESS).
  void publish_relaxed(std::int64_t cells_offset, Cell cell) const {
    for (std::int32_t peer = 0; peer < num_ranks(); ++peer)
      store_relaxed_system(at<Cell>(peer, cells_offset) + rank_, cell);
  }

 private:
  std::int32_t rank_;
  std::vector<std::uint64_t> bases_;
};

}  // namespace epbuf

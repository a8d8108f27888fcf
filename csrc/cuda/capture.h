// Stream capture: which graph is being captured, and what a graph holds on to.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace epbuf {

// The id of the capture that a stream takes part in, 0 when it takes part in none. Legal while capturing.
// Throws NativeError when the capture was invalidated by an earlier error.
std::uint64_t capture_id(std::uint64_t stream);

// Keeps count of the graphs that hold something: the graph being captured and what is instantiated from it. The count
// falls when CUDA has destroyed the last of them, from a thread of CUDA's own.
class GraphHold {
 public:
  // Adds a hold to the graph that `stream` captures now. Throws NativeError when it captures none.
  explicit GraphHold(std::uint64_t stream);

  bool alive() const { return count_->load(std::memory_order_acquire) > 0; }

 private:
  std::shared_ptr<std::atomic<int>> count_;
};

}  // namespace epbuf

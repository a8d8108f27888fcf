// The region `control` of this rank: the first failure it saw, what it counts, and the latest of each that it counted.
#pragma once

#include <cstdint>
#include <mutex>

#include "../layout.h"

namespace epbuf {

// Ids >= E of one round: how many, and the first of them.
struct BadIds {
  std::uint64_t num;
  std::int64_t value;
  std::int32_t rank, token, topk;
};

// Only the rank that owns the window writes the region. The mutex lets another thread of that rank take a snapshot or
// abandon the arena while an op waits; it is never held across a wait.
class ControlBlock {
 public:
  explicit ControlBlock(Control* control) : control_(control) {}

  bool poisoned() const;
  std::uint32_t begin_call();
  bool record_failure(const ErrorRecord& error);  // poisons; false: an earlier failure stands
  void record_refusal(Op op, std::int32_t rank, std::uint32_t refusal);
  void record_bad_ids(const BadIds& bad);
  void record_overflow(std::int64_t max_demand_rows, std::int32_t max_demand_rank);
  void record_full_stash(std::int32_t rank);
  void count_early_reuse();
  void count_staged_bytes(std::int64_t bytes);
  Control snapshot() const;

 private:
  Control* control_;
  mutable std::mutex mutex_;
};

}  // namespace epbuf

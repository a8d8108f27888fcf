#include "control.h"

namespace epbuf {

bool ControlBlock::poisoned() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return control_->poisoned != kOk;
}

std::uint32_t ControlBlock::begin_call() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return ++control_->call;
}

bool ControlBlock::record_failure(const ErrorRecord& error) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (control_->poisoned != kOk) return false;
  control_->error = error;
  control_->poisoned = error.status;
  return true;
}

void ControlBlock::record_refusal(Op op, std::int32_t rank, std::uint32_t refusal) {
  const std::lock_guard<std::mutex> guard(mutex_);
  ++control_->num_refusals;
  control_->refusing_rank = rank;
  control_->refusal = refusal;
  control_->refused_op = op;
}

void ControlBlock::record_bad_ids(const BadIds& bad) {
  const std::lock_guard<std::mutex> guard(mutex_);
  control_->num_bad_ids += bad.num;
  control_->bad_rank = bad.rank;
  control_->bad_token = bad.token;
  control_->bad_topk = static_cast<std::uint32_t>(bad.topk);
  control_->bad_value = bad.value;
}

void ControlBlock::record_overflow(std::int64_t max_demand_rows, std::int32_t max_demand_rank) {
  const std::lock_guard<std::mutex> guard(mutex_);
  ++control_->num_overflows;
  control_->max_demand_rows = max_demand_rows;
  control_->max_demand_rank = max_demand_rank;
}

void ControlBlock::record_full_stash(std::int32_t rank) {
  const std::lock_guard<std::mutex> guard(mutex_);
  ++control_->num_stash_overflows;
  control_->stash_rank = rank;
}

void ControlBlock::count_early_reuse() {
  const std::lock_guard<std::mutex> guard(mutex_);
  ++control_->num_early_reuses;
}

void ControlBlock::count_staged_bytes(std::int64_t bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  control_->staged_bytes += static_cast<std::uint64_t>(bytes);
}

Control ControlBlock::snapshot() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return *control_;
}

}  // namespace epbuf

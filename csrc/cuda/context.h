// What every op of the CUDA engine works on: it turns calls into kernel structs and launches them.
#pragma once

#include <cstdint>
#include <vector>

#include "../arena_map.h"
#include "../check.h"
#include "../layout.h"
#include "kernels.h"
#include "words.h"

namespace epbuf::cuda {

// A rank's sizes, offsets and addresses, all checked.
class CudaContext : public ArenaMap {
 public:
  CudaContext(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
              std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards,
              const std::vector<std::uint64_t>& peers, int device);

  DeviceWords& words() { return words_; }
  const DeviceWords& words() const { return words_; }
  int device() const { return device_; }

  std::uint64_t own(std::int64_t offset) const { return window_ + static_cast<std::uint64_t>(offset); }
  std::uint64_t control() const { return own(arena().control); }
  std::uint64_t progress_cells() const { return own(arena().progress_cells); }
  std::uint64_t frame_counters(std::int32_t frame) const;
  std::uint64_t forward_use(std::int32_t workspace) const;
  std::uint64_t backward_use(std::int32_t workspace) const;
  std::uint64_t backward_last_ready(std::int32_t workspace) const;
  std::uint64_t last_offs(std::int32_t frame) const;  // offs[-1]

  // A call that refuses nothing, compares no PROGRESS and repeats nothing.
  KernelCall kernel_call(Op op, std::int32_t frame, std::int32_t workspace) const;

  template <typename Call>
  KernelCall kernel_call(Op op, const Call& call) const {
    KernelCall k = kernel_call(op, call.frame, call.workspace);
    k.refusal = call.refusal;
    k.check_progress = call.check_progress;
    return k;
  }

  Target target(std::uint64_t stream) const;
  TokenDtype dtype() const { return static_cast<TokenDtype>(geometry().token_dtype); }
  std::int64_t max_padding_rows() const;

 private:
  int device_;
  std::uint64_t window_;  // this rank's
  std::uint32_t num_sms_;
  DeviceWords words_;
};

// Phases of an op that a launch covers: bit p is phase p. The engine runs all of them at once; virtual ranks of one
// process run phase p on every rank before phase p + 1 on any, so that no wait precedes what it waits for.
using Phases = std::uint32_t;
constexpr Phases kAllPhases = 7;

// The ops, in ops.cpp: each enqueues a short chain of kernels on the call's stream.
void issue_route(const CudaContext& context, const RouteCall& call, Phases phases);
void issue_count_ids(const CudaContext& context, const RouteCall& call, std::uint64_t sent_ids,
                     std::uint64_t count_row);
void issue_summarise(const CudaContext& context, const SummariseCall& call);
void issue_dispatch(const CudaContext& context, const DispatchCall& call, Phases phases);
void issue_combine(const CudaContext& context, const CombineCall& call, Phases phases);
void issue_combine_backward(const CudaContext& context, const DispatchCall& call, Phases phases);
void issue_dispatch_backward(const CudaContext& context, const CombineCall& call, Phases phases);
void issue_weight_grad(const CudaContext& context, const WeightGradCall& call);
void issue_decode(const CudaContext& context, const DecodeCall& call);
void issue_stash(const CudaContext& context, const StashCall& call);

}  // namespace epbuf::cuda

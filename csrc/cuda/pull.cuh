// The grid of kernels that pull rows of each token, in k order or by rank.
#pragma once

#include "kernels.h"
#include "rows.cuh"

namespace epbuf::cuda {

constexpr std::uint32_t kPullThreads = 256;
constexpr std::uint32_t kPullBlocksPerSm = 4;  // that an SM holds
constexpr std::uint32_t kPullWarps = kPullThreads / kWarpSize;
constexpr std::int64_t kPullMinWarps = 1024;  // below as many tokens, warps share rows
constexpr std::int64_t kPullMaxVecs = 128;    // of a row that a warp takes: short pieces end together

inline void launch_pull_kernel(const char* name, void (*function)(PullKernel), const PullKernel& kernel,
                               const Target& target) {
  PullKernel k = kernel;
  k.num_splits = num_splits_for(k.num_tokens, k.row_bytes, kPullMinWarps, kPullMaxVecs);
  const std::int64_t num_warps = static_cast<std::int64_t>(k.num_tokens) * k.num_splits;
  if (num_warps == 0) return;
  const std::uint32_t num_blocks = target.fit((num_warps + kPullWarps - 1) / kPullWarps, kUnlimited);
  launch(name, function, {num_blocks, kPullThreads}, k, target.stream);
}

}  // namespace epbuf::cuda

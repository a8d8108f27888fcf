// Rows in pieces of a few vectors a lane, all of whose loads are in flight before the first store.
#pragma once

#include "launch.h"
#include "rows.cuh"

namespace epbuf::cuda {

constexpr std::int32_t kBatchVecs = 4;  // 16-byte vectors of a lane
constexpr std::int32_t kBatchStep = kBatchVecs * static_cast<std::int32_t>(kWarpSize);

struct Batch {
  uint4 vecs[kBatchVecs];
};

// Vectors first, first + 32, .. below `end` of a row; zeros without a row.
__device__ __forceinline__ Batch load_batch(const uint4* row, std::int32_t first, std::int32_t end) {
  Batch batch;
#pragma unroll
  for (std::int32_t i = 0; i < kBatchVecs; ++i) {
    const std::int32_t v = first + i * static_cast<std::int32_t>(kWarpSize);
    batch.vecs[i] = row != nullptr && v < end ? load_vec_once(row + v) : uint4{0, 0, 0, 0};
  }
  return batch;
}

__device__ __forceinline__ void store_batch(uint4* row, const Batch& batch, std::int32_t first, std::int32_t end) {
#pragma unroll
  for (std::int32_t i = 0; i < kBatchVecs; ++i) {
    const std::int32_t v = first + i * static_cast<std::int32_t>(kWarpSize);
    if (v < end) store_vec(row + v, batch.vecs[i]);
  }
}

}  // namespace epbuf::cuda

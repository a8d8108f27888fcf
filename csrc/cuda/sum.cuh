// Sums of rows, one 16-byte vector at a time.
#pragma once

#include "rows.cuh"
#include "sync.cuh"

namespace epbuf::cuda {

constexpr std::int32_t kSumRows = 8;  // rows of a token in flight per lane

// Adds vector `v` of rows [0, num), in order. -0 is what changes no value when added to, not even -0: the sum has the
// bits of one that starts with its first row.
template <typename Dtype>
__device__ __forceinline__ uint4 sum_vec(const std::uint64_t* rows, std::int32_t num, std::int32_t v) {
  constexpr int kNum = Elements<Dtype>::kNum;
  float sum[kNum];
#pragma unroll
  for (int i = 0; i < kNum; ++i) sum[i] = num == 0 ? 0.0f : -0.0f;
  for (std::int32_t first = 0; first < num; first += kSumRows) {
    uint4 vecs[kSumRows];
#pragma unroll
    for (std::int32_t r = 0; r < kSumRows; ++r) {
      if (first + r < num) vecs[r] = load_vec(at<const uint4>(rows[first + r]) + v);
    }
#pragma unroll
    for (std::int32_t r = 0; r < kSumRows; ++r) {
      if (first + r >= num) break;
      float f[kNum];
      Elements<Dtype>::unpack(vecs[r], f);
#pragma unroll
      for (int i = 0; i < kNum; ++i) sum[i] += f[i];
    }
  }
  return Elements<Dtype>::pack(sum);
}

}  // namespace epbuf::cuda

// The backward of a weighted combine's multiplication. Local: it talks to no peer.
#include "kernels.h"
#include "record.cuh"
#include "rows.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kThreads = 512;
constexpr std::uint32_t kBlocksPerSm = 2;
constexpr std::int32_t kVecs = 2;  // pairs of 16-byte loads in flight per lane

// Adds <a, b> to `dot`, element by element, and returns b * weight.
template <typename Dtype>
__device__ __forceinline__ uint4 dot_and_scale(uint4 a, uint4 b, float weight, float* dot) {
  constexpr int kNum = Elements<Dtype>::kNum;
  float left[kNum], right[kNum];
  Elements<Dtype>::unpack(a, left);
  Elements<Dtype>::unpack(b, right);
#pragma unroll
  for (int i = 0; i < kNum; ++i) {
    *dot = fmaf(left[i], right[i], *dot);
    right[i] *= weight;
  }
  return Elements<Dtype>::pack(right);
}

// One warp: the row's gradient is read before it is overwritten, by the same lane.
template <typename Dtype>
__device__ __forceinline__ float weight_grad_row(const uint4* expert_out, uint4* grad, std::int32_t num_vecs,
                                                 float weight, std::uint32_t lane) {
  float dot = 0.0f;
  for (std::int32_t begin = lane; begin < num_vecs; begin += kVecs * kWarpSize) {
    uint4 out[kVecs], gradient[kVecs];
#pragma unroll
    for (std::int32_t i = 0; i < kVecs; ++i) {
      const std::int32_t v = begin + i * static_cast<std::int32_t>(kWarpSize);
      out[i] = v < num_vecs ? load_vec(expert_out + v) : uint4{0, 0, 0, 0};
      gradient[i] = v < num_vecs ? load_vec(grad + v) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (std::int32_t i = 0; i < kVecs; ++i) {
      const std::int32_t v = begin + i * static_cast<std::int32_t>(kWarpSize);
      const uint4 scaled = dot_and_scale<Dtype>(out[i], gradient[i], weight, &dot);
      if (v < num_vecs) store_vec(grad + v, scaled);
    }
  }
#pragma unroll
  for (std::uint32_t step = kWarpSize / 2; step > 0; step /= 2) dot += __shfl_xor_sync(kAllLanes, dot, step);
  return dot;
}

// Shapes: expert_out [C, H]; grad_expert_out [C, H] of this rank: in and out; weights, grad_weights [C] float32; rows
// at or past offs[-1] are not touched. Order: each lane adds its elements from the left, then lanes 16, 8, 4, 2, 1
// apart.
//
// Example, H = 2, expert_out = {{1, 2}}, g = {{10, 20}}, weights = {0.5}: grad_weights = {50}, g = {{5, 10}}.
template <typename Dtype>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    weight_grad_kernel(const __grid_constant__ WeightGradKernel k) {
  await_previous();
  release_next();
  if (warp_stops(k.call)) return;

  const GridWarp warp;
  const std::int64_t num_rows = *at<const std::int32_t>(k.num_rows);
  const std::int32_t num_vecs = static_cast<std::int32_t>(k.row_bytes / kVecBytes);
  for (std::int64_t row = warp.index; row < num_rows; row += warp.num) {
    const uint4* expert_out = at<const uint4>(k.expert_out, row * k.expert_out_row_stride_bytes);
    uint4* grad = at<uint4>(k.grad_rows, row * k.row_bytes);
    const float dot = weight_grad_row<Dtype>(expert_out, grad, num_vecs, at<const float>(k.weights)[row], warp.lane);
    if (warp.lane == 0) at<float>(k.grad_weights)[row] = dot;
  }
}

void (*weight_grad_of(TokenDtype dtype))(WeightGradKernel) {
  return dtype == kBf16   ? weight_grad_kernel<Bf16>
         : dtype == kFp16 ? weight_grad_kernel<Fp16>
                          : weight_grad_kernel<Fp32>;
}

}  // namespace

void launch_weight_grad(const WeightGradKernel& kernel, TokenDtype dtype, std::int64_t max_rows, const Target& target) {
  const std::int64_t warps_per_block = kThreads / kWarpSize;
  const std::uint32_t num_blocks = target.fit((max_rows + warps_per_block - 1) / warps_per_block, kBlocksPerSm);
  launch("weight_grad_kernel", weight_grad_of(dtype), {num_blocks, kThreads}, kernel, target.stream);
}

void load_weight() {
  for (const TokenDtype dtype : {kBf16, kFp16, kFp32}) load("weight_grad_kernel", weight_grad_of(dtype));
}

}  // namespace epbuf::cuda

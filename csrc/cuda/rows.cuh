// Rows as 16-byte vectors, and arithmetic on the token dtypes that gives the bits of host/convert.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "../formats.h"
#include "../layout.h"

namespace epbuf::cuda {

constexpr std::int64_t kVecBytes = 16;

using Fp32 = float;

// Loads are for rows that do not change while the kernel runs, except by the thread that loads. A compiler may move
// them up, but not above a branch on what await_previous has made visible, nor above from_here. Rows are read once, but
// only where one row is read and many are written does it pay to keep them out of the first-level cache: of 8 ranks on
// one H200, dispatch takes 2 % longer without load_vec_once, and combine 6 % longer with it.
__device__ __forceinline__ uint4 load_vec_once(const uint4* from) {
  uint4 v;
  asm("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from));
  return v;
}

__device__ __forceinline__ uint4 load_vec(const uint4* from) {
  uint4 v;
  asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

__device__ __forceinline__ void store_vec(uint4* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Elements of one dtype in a 16-byte vector. kNum floats unpack from it and pack into it, rounded to nearest even.
template <typename Dtype>
struct Elements;

template <>
struct Elements<Bf16> {
  static constexpr int kNum = 8;

  __device__ static __forceinline__ void unpack(uint4 v, float* f) {
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = __uint_as_float(words[i] << 16);
      f[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }

  // The hardware makes NaN 0x7FFF, the host and torch 0x7FC0.
  __device__ static __forceinline__ std::uint32_t pack_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(&pair);
    if (low != low) word = (word & 0xFFFF0000u) | 0x7FC0u;
    if (high != high) word = (word & 0xFFFFu) | 0x7FC00000u;
    return word;
  }

  __device__ static __forceinline__ uint4 pack(const float* f) {
    return {pack_pair(f[0], f[1]), pack_pair(f[2], f[3]), pack_pair(f[4], f[5]), pack_pair(f[6], f[7])};
  }
};

template <>
struct Elements<Fp16> {
  static constexpr int kNum = 8;

  __device__ static __forceinline__ void unpack(uint4 v, float* f) {
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      f[2 * i] = pair.x;
      f[2 * i + 1] = pair.y;
    }
  }

  // The hardware makes NaN 0x7FFF, the host 0x7E00 with the sign.
  __device__ static __forceinline__ std::uint32_t pack_pair(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(&pair);
    if (low != low) word = (word & 0xFFFF0000u) | 0x7E00u | (__float_as_uint(low) >> 16 & 0x8000u);
    if (high != high) word = (word & 0xFFFFu) | 0x7E000000u | (__float_as_uint(high) & 0x80000000u);
    return word;
  }

  __device__ static __forceinline__ uint4 pack(const float* f) {
    return {pack_pair(f[0], f[1]), pack_pair(f[2], f[3]), pack_pair(f[4], f[5]), pack_pair(f[6], f[7])};
  }
};

template <>
struct Elements<Fp32> {
  static constexpr int kNum = 4;

  __device__ static __forceinline__ void unpack(uint4 v, float* f) {
    f[0] = __uint_as_float(v.x);
    f[1] = __uint_as_float(v.y);
    f[2] = __uint_as_float(v.z);
    f[3] = __uint_as_float(v.w);
  }

  __device__ static __forceinline__ uint4 pack(const float* f) {
    return {__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3])};
  }
};

// A warp of the grid, by index.
struct GridWarp {
  std::uint32_t index, num, lane;

  __device__ __forceinline__ GridWarp()
      : index((blockIdx.x * blockDim.x + threadIdx.x) / 32), num(gridDim.x * blockDim.x / 32), lane(threadIdx.x % 32) {}
};

// The vectors [begin, end) of a row that one of `num_splits` warps moves: whole multiples of 32, except at the end.
struct Split {
  std::int32_t begin, end;

  __device__ __forceinline__ Split(std::int32_t num_vecs, std::int32_t num_splits, std::int32_t split) {
    const std::int32_t per_warp = ((num_vecs + num_splits - 1) / num_splits + 31) / 32 * 32;
    begin = min(num_vecs, split * per_warp);
    end = min(num_vecs, begin + per_warp);
  }
};

// Warps that share a row: so many that `num_rows` rows make at least `num_warps` of them, and that none takes more than
// `max_vecs` vectors.
inline std::int32_t num_splits_for(std::int64_t num_rows, std::int64_t row_bytes, std::int64_t num_warps,
                                   std::int64_t max_vecs = INT32_MAX) {
  const std::int64_t num_vecs = row_bytes / kVecBytes;
  const std::int64_t most = (num_vecs + 31) / 32;
  const std::int64_t for_warps = num_rows == 0 ? 1 : (num_warps + num_rows - 1) / num_rows;
  const std::int64_t wanted = std::max(for_warps, (num_vecs + max_vecs - 1) / max_vecs);
  return static_cast<std::int32_t>(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

}  // namespace epbuf::cuda

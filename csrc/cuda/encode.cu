// dispatch and combine backward in a quantised format: rows are encoded on their way into the peers' slots. And back.
#include "chain.cuh"
#include "kernels.h"
#include "push.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kBlocksPerSm = 4;  // that an SM holds
constexpr std::int64_t kWarpsPerBlock = kThreads / kWarpSize;
constexpr std::int64_t kMinWarps = 1024;  // below as many tokens, warps share rows
constexpr std::int32_t kLaneElems = 16;   // of a row that a lane encodes at a time: a vector of E4M3
constexpr std::int32_t kStepElems = kLaneElems * kWarpSize;
constexpr std::int32_t kHeldWords = 128;  // of scales that a warp holds back, to send them together

// Elements [first, first + 16) of a row, as they were loaded.
template <typename Dtype>
struct Loaded {
  static constexpr std::int32_t kVecs = kLaneElems / Elements<Dtype>::kNum;
  uint4 vecs[kVecs];

  // Zeros beyond the row, or without one.
  __device__ __forceinline__ static Loaded of(const uint4* row, std::int32_t first, std::int32_t num_elems) {
    Loaded loaded;
#pragma unroll
    for (std::int32_t i = 0; i < kVecs; ++i) {
      const bool exists = row != nullptr && first < num_elems;
      loaded.vecs[i] = exists ? load_vec(row + first / Elements<Dtype>::kNum + i) : uint4{0, 0, 0, 0};
    }
    return loaded;
  }
  __device__ __forceinline__ void unpack(float* f) const {
#pragma unroll
    for (std::int32_t i = 0; i < kVecs; ++i) Elements<Dtype>::unpack(vecs[i], f + i * Elements<Dtype>::kNum);
  }
};

__device__ __forceinline__ std::uint32_t amax_of(const float* f) {
  std::uint32_t amax = 0;
#pragma unroll
  for (std::int32_t i = 0; i < kLaneElems; ++i) amax = larger(amax, magnitude_of(f[i]));
  return amax;
}

// The largest of `num_lanes` neighbours, a power of two.
template <std::int32_t kNumLanes>
__device__ __forceinline__ std::uint32_t amax_among(std::uint32_t amax) {
#pragma unroll
  for (std::int32_t step = 1; step < kNumLanes; step *= 2) amax = larger(amax, __shfl_xor_sync(kAllLanes, amax, step));
  return amax;
}

// Two E4M3, as encode_e4m3 makes them: rounded to nearest even, saturated, NaN 0x7F.
__device__ __forceinline__ std::uint32_t encode_e4m3_pair(float low, float high) {
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint4 encode_e4m3_vec(const float* f) {
  std::uint32_t words[4];
#pragma unroll
  for (std::int32_t i = 0; i < 4; ++i) {
    words[i] = encode_e4m3_pair(f[4 * i], f[4 * i + 1]) | encode_e4m3_pair(f[4 * i + 2], f[4 * i + 3]) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

// A byte of every `stride`-th lane into words of four: valid in the first lane of each word.
template <std::int32_t kStride>
__device__ __forceinline__ std::uint32_t join_bytes(std::uint8_t byte, std::uint32_t lane) {
  std::uint32_t word = static_cast<std::uint32_t>(byte) << 8 * (lane / kStride % 4);
#pragma unroll
  for (std::int32_t step = kStride; step < 4 * kStride; step *= 2) word |= __shfl_xor_sync(kAllLanes, word, step);
  return word;
}

__device__ __forceinline__ void decode_e4m3_vec(const uint4& data, float scale, float limit, float* f) {
  const std::uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (std::int32_t i = 0; i < kLaneElems; ++i) {
    f[i] = dequantise(decode_e4m3(static_cast<std::uint8_t>(words[i / 4] >> 8 * (i % 4))), scale, limit);
  }
}

// The formats. Of its 16 elements a lane makes `Data` and, with its neighbours, a word of scales that the first of
// kWordLanes lanes sends. Elements that do not `exist`, because the row has ended or is missing, are 0 and so is what
// they add to the word. Every lane of the warp calls; `f` is used up.

struct Mxfp8 {
  using Data = uint4;
  static constexpr std::int32_t kBlockLanes = kMxBlock / kLaneElems;
  static constexpr std::int32_t kWordLanes = 4 * kBlockLanes;
  static constexpr bool kHasRowScale = false;

  __device__ static __forceinline__ uint4 encode(float* f, std::uint32_t lane, bool exists, float,
                                                 std::uint32_t* word) {
    const std::uint8_t scale = mx_scale(amax_among<kBlockLanes>(amax_of(f)));
    const float multiplier = mx_multiplier(scale);
#pragma unroll
    for (std::int32_t i = 0; i < kLaneElems; ++i) f[i] *= multiplier;
    *word = join_bytes<kBlockLanes>(exists ? scale : 0, lane);
    return encode_e4m3_vec(f);
  }
  __device__ static __forceinline__ void decode(const uint4& data, std::uint32_t word, std::uint32_t lane, float,
                                                float limit, float* f) {
    const auto scale = static_cast<std::uint8_t>(word >> 8 * (lane / kBlockLanes % 4));
    decode_e4m3_vec(data, decode_e8m0(scale), limit, f);
  }
};

struct Fp8Block128 {
  using Data = uint4;
  static constexpr std::int32_t kWordLanes = kBlock128 / kLaneElems;
  static constexpr bool kHasRowScale = false;

  __device__ static __forceinline__ uint4 encode(float* f, std::uint32_t, bool exists, float, std::uint32_t* word) {
    const float scale = block128_scale(amax_among<kWordLanes>(amax_of(f)));
#pragma unroll
    for (std::int32_t i = 0; i < kLaneElems; ++i) f[i] /= scale;
    *word = exists ? bits_of(scale) : 0;
    return encode_e4m3_vec(f);
  }
  __device__ static __forceinline__ void decode(const uint4& data, std::uint32_t word, std::uint32_t, float,
                                                float limit, float* f) {
    decode_e4m3_vec(data, float_of(word), limit, f);
  }
};

struct Nvfp4 {
  using Data = uint2;
  static constexpr std::int32_t kWordLanes = 4;
  static constexpr bool kHasRowScale = true;
  static_assert(kNvfp4Block == kLaneElems);

  __device__ static __forceinline__ uint2 encode(float* f, std::uint32_t lane, bool exists, float row_scale,
                                                 std::uint32_t* word) {
    const std::uint8_t scale = nvfp4_scale(amax_of(f), row_scale);
    const E2m1Bounds bounds = e2m1_bounds(scale, row_scale);
    std::uint32_t words[2] = {0, 0};
#pragma unroll
    for (std::int32_t i = 0; i < kLaneElems; ++i) words[i / 8] |= encode_e2m1(f[i], bounds) << 4 * (i % 8);
    *word = join_bytes<1>(exists ? scale : 0, lane);
    return {words[0], words[1]};
  }
  __device__ static __forceinline__ void decode(const uint2& data, std::uint32_t word, std::uint32_t lane,
                                                float row_scale, float limit, float* f) {
    const std::uint32_t words[2] = {data.x, data.y};
    const float scale = decode_e4m3(static_cast<std::uint8_t>(word >> 8 * (lane % 4)));
#pragma unroll
    for (std::int32_t i = 0; i < kLaneElems; ++i) {
      f[i] = dequantise(decode_e2m1(words[i / 8] >> 4 * (i % 8) & 15u) * scale, row_scale, limit);
    }
  }
};

__device__ __forceinline__ void store_data(uint4* to, const uint4& data) { store_vec(to, data); }

__device__ __forceinline__ void store_data(uint2* to, const uint2& data) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(data.x), "r"(data.y) : "memory");
}

// One warp: the scale of a whole row. The row is then read again, from the cache.
template <typename Dtype>
__device__ __forceinline__ float row_scale_of(const uint4* row, std::int32_t num_elems, std::uint32_t lane) {
  std::uint32_t amax = 0;
  for (std::int32_t first = lane * kLaneElems; first < num_elems; first += kStepElems) {
    float f[kLaneElems];
    Loaded<Dtype>::of(row, first, num_elems).unpack(f);
    amax = larger(amax, amax_of(f));
  }
  return nvfp4_row_scale(amax_among<kWarpSize>(amax));
}

// The steps [begin, end) of a row that one of `num_splits` warps takes.
struct Steps {
  std::int32_t begin, end;

  __device__ __forceinline__ Steps(std::int32_t num_elems, std::int32_t num_splits, std::int32_t split) {
    const std::int32_t num_steps = (num_elems + kStepElems - 1) / kStepElems;
    const std::int32_t per_warp = (num_steps + num_splits - 1) / num_splits;
    begin = min(num_steps, split * per_warp);
    end = min(num_steps, begin + per_warp);
  }
};

// The warp's words of scales go to the rows of a token: [begin, end) of each row's words.
__device__ __forceinline__ void send_words(const Destinations& to, std::uint64_t live, const std::uint32_t* words,
                                           std::int32_t begin, std::int32_t end, std::uint32_t lane) {
  __syncwarp();
  for (std::uint64_t rest = live; rest != 0; rest &= rest - 1) {
    auto* scales = at<std::uint32_t>(to.scales_of(__ffsll(rest) - 1));
    for (std::int32_t w = begin + lane; w < end; w += kWarpSize) scales[w] = words[w - begin];
  }
  __syncwarp();
}

// One warp reads its part of a token's row once, encodes it and writes it to every slot of the token. A missing
// gradient is a row of zeros, with scales of zero. Scales are held back in `words` and sent in long pieces: sent word
// by word, mxfp8 of 8 ranks on one H200 took a quarter longer.
template <typename Format, typename Dtype>
__device__ __forceinline__ void encode_token(const PushKernel& k, std::int64_t token, const Steps& steps,
                                             std::uint32_t lane, std::uint32_t* words) {
  using Data = typename Format::Data;
  constexpr std::int32_t kStepWords = kWarpSize / Format::kWordLanes;
  static_assert(kHeldWords % kStepWords == 0);
  const uint4* row = k.rows != 0 ? at<const uint4>(k.rows, token * k.row_stride_bytes) : nullptr;
  const std::int32_t lane_first = static_cast<std::int32_t>(lane) * kLaneElems;
  auto next = Loaded<Dtype>::of(row, steps.begin * kStepElems + lane_first, k.hidden);
  float row_scale = 0.0f;
  if (Format::kHasRowScale && row != nullptr) row_scale = row_scale_of<Dtype>(row, k.hidden, lane);
  const Destinations to = destinations(k, token, slots_of(k, token, lane), lane, row_scale, steps.begin == 0);
  const std::uint64_t live = to.live();
  if (live == 0) return;

  std::int32_t num_words = 0;
  for (std::int32_t step = steps.begin; step < steps.end; ++step) {
    const std::int32_t first = step * kStepElems + lane_first;
    const bool in_row = first < k.hidden;
    float f[kLaneElems];
    next.unpack(f);
    next = Loaded<Dtype>::of(row, first + kStepElems, k.hidden);
    std::uint32_t word;
    const Data data = Format::encode(f, lane, in_row && row != nullptr, row_scale, &word);
    if (lane % Format::kWordLanes == 0) words[num_words + lane / Format::kWordLanes] = word;
    for (std::uint64_t rest = live; rest != 0; rest &= rest - 1) {
      const std::uint64_t to_data = to.data_of(__ffsll(rest) - 1);
      if (in_row) store_data(at<Data>(to_data) + first / kLaneElems, data);
    }
    num_words += kStepWords;
    if (num_words < kHeldWords && step + 1 < steps.end) continue;
    const std::int32_t end = (step + 1) * kStepWords;
    send_words(to, live, words, end - num_words, min(end, num_scale_words(k.format)), lane);
    num_words = 0;
  }
}

// Shapes: rows [T, H] token dtype; slot_map [T, K] int64; offs [L] int32, valid [L] int64; recv_tokens or
// grad_expert_out [C, row_bytes] and their scales, of every rank: out. Items as in push_kernel.
//
// Example, mxfp8, H = 32: of a row whose largest magnitude is 1000 the two first lanes of a warp make the 32 bytes
// E4M3(x / 4), and lane 0 sends the word {129, 0, 0, 0}: the scale 2^2, and the padding of the row's scales.
template <typename Format, typename Dtype>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) encode_kernel(const __grid_constant__ PushKernel k) {
  __shared__ std::uint32_t words[kWarpsPerBlock][kHeldWords];
  await_previous();
  release_next();
  if (warp_stops(k.call)) return;

  const GridWarp warp;
  const std::uint32_t num_items = static_cast<std::uint32_t>(k.num_tokens) * k.num_splits;
  std::uint32_t item = warp.index;
  for (; item < num_items; item += warp.num) {
    const Steps steps(k.hidden, k.num_splits, item % k.num_splits);
    encode_token<Format, Dtype>(k, item / k.num_splits, steps, warp.lane, words[threadIdx.x / kWarpSize]);
  }
  zero_padding(k, item - num_items, warp);
  clear_other_slots(k);
}

template <typename Dtype>
__device__ __forceinline__ void store_decoded(uint4* to, const float* f) {
#pragma unroll
  for (std::int32_t i = 0; i < kLaneElems / Elements<Dtype>::kNum; ++i) {
    store_vec(to + i, Elements<Dtype>::pack(f + i * Elements<Dtype>::kNum));
  }
}

// Word w of the scales of a row lies at scales_of_row + w * scale_step, whatever their layout.
__device__ __forceinline__ std::uint64_t scales_of_row(const DecodeKernel& k, std::int64_t row) {
  if (k.format.is_blocked != 0) return k.scales + blocked_scale_offset(row, 0, k.format.scale_row_bytes);
  return k.scales + row * k.scales_row_stride_bytes;
}

__device__ __forceinline__ std::int64_t scale_step(const RowFormat& format) {
  return format.is_blocked != 0 ? kTileRows * kTileScales : kScaleWordBytes;
}

// Shapes: data [rows, row_bytes], scales, row_scales [rows] float32 as they lie in a receive region; out [rows, H]
// token dtype; rows at or past offs[-1] are not touched.
//
// Example, mxfp8: the byte 0x78 (E4M3 256) under the scale byte 129 (2^2) becomes 1024.
template <typename Format, typename Dtype>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) decode_kernel(const __grid_constant__ DecodeKernel k) {
  using Data = typename Format::Data;
  await_previous();
  release_next();
  if (warp_stops(k.call)) return;

  const GridWarp warp;
  const std::int64_t num_rows = min(static_cast<std::int64_t>(*at<const std::int32_t>(k.num_live_rows)), k.num_rows);
  for (std::int64_t row = warp.index; row < num_rows; row += warp.num) {
    const auto* data = at<const Data>(k.data, row * k.row_stride_bytes);
    const std::uint64_t scales = scales_of_row(k, row);
    const float row_scale = k.row_scales != 0 ? at<const float>(k.row_scales)[row] : 0.0f;
    auto* out = at<uint4>(k.out, row * k.out_row_bytes);
    for (std::int32_t first = warp.lane * kLaneElems; first < k.hidden; first += kStepElems) {
      const std::int64_t w = first / (kLaneElems * Format::kWordLanes);
      const std::uint32_t word = *at<const std::uint32_t>(scales, w * scale_step(k.format));
      float f[kLaneElems];
      Format::decode(data[first / kLaneElems], word, warp.lane, row_scale, float_of(kLimitBits<Dtype>), f);
      store_decoded<Dtype>(out + first / Elements<Dtype>::kNum, f);
    }
  }
}

template <typename Kernel>
using Function = void (*)(Kernel);

template <typename Format>
Function<PushKernel> encode_of(TokenDtype dtype) {
  return dtype == kBf16   ? encode_kernel<Format, Bf16>
         : dtype == kFp16 ? encode_kernel<Format, Fp16>
                          : encode_kernel<Format, Fp32>;
}

template <typename Format>
Function<DecodeKernel> decode_of(TokenDtype dtype) {
  return dtype == kBf16   ? decode_kernel<Format, Bf16>
         : dtype == kFp16 ? decode_kernel<Format, Fp16>
                          : decode_kernel<Format, Fp32>;
}

Function<PushKernel> encode_of(std::int32_t format, TokenDtype dtype) {
  return format == kMxfp8         ? encode_of<Mxfp8>(dtype)
         : format == kFp8Block128 ? encode_of<Fp8Block128>(dtype)
                                  : encode_of<Nvfp4>(dtype);
}

Function<DecodeKernel> decode_of(std::int32_t format, TokenDtype dtype) {
  return format == kMxfp8         ? decode_of<Mxfp8>(dtype)
         : format == kFp8Block128 ? decode_of<Fp8Block128>(dtype)
                                  : decode_of<Nvfp4>(dtype);
}

}  // namespace

void launch_encode(const PushKernel& kernel, TokenDtype dtype, std::int64_t max_padding_rows, const Target& target) {
  PushKernel k = kernel;
  const std::int64_t num_steps = (k.hidden + kStepElems - 1) / kStepElems;
  k.num_splits = num_splits_for(k.num_tokens, num_steps * kWarpSize * kVecBytes, kMinWarps);  // a step is 32 vectors
  const std::int64_t num_items = static_cast<std::int64_t>(k.num_tokens) * k.num_splits + max_padding_rows;
  const std::uint32_t num_blocks = target.fit((num_items + kWarpsPerBlock - 1) / kWarpsPerBlock, kUnlimited);
  launch("encode_kernel", encode_of(k.format.format, dtype), {num_blocks, kThreads}, k, target.stream);
}

void launch_decode(const DecodeKernel& kernel, TokenDtype dtype, const Target& target) {
  if (kernel.num_rows == 0) return;
  const std::uint32_t num_blocks = target.fit((kernel.num_rows + kWarpsPerBlock - 1) / kWarpsPerBlock, kBlocksPerSm);
  launch("decode_kernel", decode_of(kernel.format.format, dtype), {num_blocks, kThreads}, kernel, target.stream);
}

void load_encode() {
  for (const std::int32_t format : {kMxfp8, kFp8Block128, kNvfp4}) {
    for (const TokenDtype dtype : {kBf16, kFp16, kFp32}) {
      load("encode_kernel", encode_of(format, dtype));
      load("decode_kernel", decode_of(format, dtype));
    }
  }
}

}  // namespace epbuf::cuda

#include "codec.h"

#include <cstring>

#include "../check.h"
#include "../formats.h"
#include "../layout.h"
#include "convert.h"

namespace epbuf {
namespace {

template <typename T>
[[gnu::always_inline]] inline std::uint32_t amax_of(const T* row, std::int64_t num_elems) {
  std::uint32_t amax = 0;
  for (std::int64_t i = 0; i < num_elems; ++i) amax = larger(amax, magnitude_of(to_float(row[i])));
  return amax;
}

template <typename T>
[[gnu::always_inline]] inline void encode_mxfp8(const T* row, std::int64_t num_elems, EncodedRow* to) {
  auto* data = reinterpret_cast<std::uint8_t*>(to->data);
  for (std::int64_t begin = 0; begin < num_elems; begin += kMxBlock) {
    const std::uint8_t scale = mx_scale(amax_of(row + begin, kMxBlock));
    const float multiplier = mx_multiplier(scale);
    to->scales[begin / kMxBlock] = std::byte{scale};
    for (std::int64_t i = begin; i < begin + kMxBlock; ++i) data[i] = encode_e4m3(to_float(row[i]) * multiplier);
  }
}

template <typename T>
[[gnu::always_inline]] inline void encode_fp8_block128(const T* row, std::int64_t num_elems, EncodedRow* to) {
  auto* data = reinterpret_cast<std::uint8_t*>(to->data);
  for (std::int64_t begin = 0; begin < num_elems; begin += kBlock128) {
    const float scale = block128_scale(amax_of(row + begin, kBlock128));
    std::memcpy(to->scales + begin / kBlock128 * sizeof scale, &scale, sizeof scale);
    for (std::int64_t i = begin; i < begin + kBlock128; ++i) data[i] = encode_block128(to_float(row[i]), scale);
  }
}

template <typename T>
[[gnu::always_inline]] inline void encode_nvfp4(const T* row, std::int64_t num_elems, EncodedRow* to) {
  to->row_scale = nvfp4_row_scale(amax_of(row, num_elems));
  for (std::int64_t begin = 0; begin < num_elems; begin += kNvfp4Block) {
    const std::uint8_t scale = nvfp4_scale(amax_of(row + begin, kNvfp4Block), to->row_scale);
    const E2m1Bounds bounds = e2m1_bounds(scale, to->row_scale);
    to->scales[begin / kNvfp4Block] = std::byte{scale};
    for (std::int64_t i = begin; i < begin + kNvfp4Block; i += 2) {
      const std::uint32_t low = encode_e2m1(to_float(row[i]), bounds);
      const std::uint32_t high = encode_e2m1(to_float(row[i + 1]), bounds);
      to->data[i / 2] = static_cast<std::byte>(low | high << 4);
    }
  }
}

template <typename T>
[[gnu::always_inline]] inline void decode_e4m3_block(const std::byte* data, float scale, T* row,
                                                     std::int64_t num_elems) {
  for (std::int64_t i = 0; i < num_elems; ++i) {
    const float value = decode_e4m3(static_cast<std::uint8_t>(data[i]));
    row[i] = from_float<T>(dequantise(value, scale, float_of(kLimitBits<T>)));
  }
}

template <typename T>
[[gnu::always_inline]] inline void decode_mxfp8(const EncodedRow& from, T* row, std::int64_t num_elems) {
  for (std::int64_t begin = 0; begin < num_elems; begin += kMxBlock) {
    const float scale = decode_e8m0(static_cast<std::uint8_t>(from.scales[begin / kMxBlock]));
    decode_e4m3_block(from.data + begin, scale, row + begin, kMxBlock);
  }
}

template <typename T>
[[gnu::always_inline]] inline void decode_fp8_block128(const EncodedRow& from, T* row, std::int64_t num_elems) {
  for (std::int64_t begin = 0; begin < num_elems; begin += kBlock128) {
    float scale;
    std::memcpy(&scale, from.scales + begin / kBlock128 * sizeof scale, sizeof scale);
    decode_e4m3_block(from.data + begin, scale, row + begin, kBlock128);
  }
}

// (element * block scale) is exact; the row scale rounds it, and the token dtype once more.
template <typename T>
[[gnu::always_inline]] inline void decode_nvfp4_block(const std::byte* data, float scale, float row_scale, T* row) {
  float values[kNvfp4Block];
  for (std::int64_t i = 0; i < kNvfp4Block / 2; ++i) {
    values[2 * i] = decode_e2m1(static_cast<std::uint32_t>(data[i]) & 15u) * scale;
    values[2 * i + 1] = decode_e2m1(static_cast<std::uint32_t>(data[i]) >> 4) * scale;
  }
  const float limit = float_of(kLimitBits<T>);
  for (std::int64_t i = 0; i < kNvfp4Block; ++i) row[i] = from_float<T>(dequantise(values[i], row_scale, limit));
}

template <typename T>
[[gnu::always_inline]] inline void decode_nvfp4(const EncodedRow& from, T* row, std::int64_t num_elems) {
  for (std::int64_t begin = 0; begin < num_elems; begin += kNvfp4Block) {
    const float scale = decode_e4m3(static_cast<std::uint8_t>(from.scales[begin / kNvfp4Block]));
    decode_nvfp4_block(from.data + begin / 2, scale, from.row_scale, row + begin);
  }
}

template <typename T>
[[gnu::always_inline]] inline void encode_row(std::int32_t format, const std::byte* row, std::int64_t num_elems,
                                              EncodedRow* to) {
  const T* from = reinterpret_cast<const T*>(row);
  if (format == kMxfp8) encode_mxfp8(from, num_elems, to);
  if (format == kFp8Block128) encode_fp8_block128(from, num_elems, to);
  if (format == kNvfp4) encode_nvfp4(from, num_elems, to);
}

template <typename T>
[[gnu::always_inline]] inline void decode_row(std::int32_t format, const EncodedRow& from, std::byte* row,
                                              std::int64_t num_elems) {
  T* to = reinterpret_cast<T*>(row);
  if (format == kMxfp8) decode_mxfp8(from, to, num_elems);
  if (format == kFp8Block128) decode_fp8_block128(from, to, num_elems);
  if (format == kNvfp4) decode_nvfp4(from, to, num_elems);
}

// One plain function per dtype: target clones and templates do not mix.
EPBUF_TARGET_CLONES void encode_bf16(std::int32_t format, const std::byte* row, std::int64_t num_elems,
                                     EncodedRow* to) {
  encode_row<Bf16>(format, row, num_elems, to);
}

EPBUF_TARGET_CLONES void encode_fp16(std::int32_t format, const std::byte* row, std::int64_t num_elems,
                                     EncodedRow* to) {
  encode_row<Fp16>(format, row, num_elems, to);
}

EPBUF_TARGET_CLONES void encode_fp32(std::int32_t format, const std::byte* row, std::int64_t num_elems,
                                     EncodedRow* to) {
  encode_row<float>(format, row, num_elems, to);
}

EPBUF_TARGET_CLONES void decode_bf16(std::int32_t format, const EncodedRow& from, std::byte* row,
                                     std::int64_t num_elems) {
  decode_row<Bf16>(format, from, row, num_elems);
}

EPBUF_TARGET_CLONES void decode_fp16(std::int32_t format, const EncodedRow& from, std::byte* row,
                                     std::int64_t num_elems) {
  decode_row<Fp16>(format, from, row, num_elems);
}

EPBUF_TARGET_CLONES void decode_fp32(std::int32_t format, const EncodedRow& from, std::byte* row,
                                     std::int64_t num_elems) {
  decode_row<float>(format, from, row, num_elems);
}

constexpr Codec kCodecs[] = {{encode_bf16, decode_bf16}, {encode_fp16, decode_fp16}, {encode_fp32, decode_fp32}};

}  // namespace

const Codec& codec(std::int32_t token_dtype) {
  EPBUF_CHECK(token_dtype >= kBf16 && token_dtype <= kFp32, "token_dtype is ", token_dtype,
              "; the engine knows bf16, fp16 and fp32 (0, 1, 2)");
  return kCodecs[token_dtype];
}

}  // namespace epbuf

// Quantised formats, element by element: the same bits on the host and on CUDA, but for the payload of a NaN that is a
// float32 scale; for one thread or a warp that shares a row. Nothing here sees more than a block's largest magnitude, a
// scale and a value.
//
// Only integer operations, IEEE float and double operations in round-to-nearest-even, and divisions where a reciprocal
// would round twice. A product feeds no sum, so that a compiler which fuses multiply and add changes nothing. Must not
// be compiled with fast-math or flush-to-zero.
//
// Magnitudes travel as the bits of a float without its sign: as integers they are ordered like the values, with
// infinity and then NaN above all, so that a maximum over a block, or over a warp, keeps a NaN.
//
// Example, mxfp8: a block whose largest magnitude is 1000 has 1000 / 448 = 2.23, so the scale 4 (byte 129); 1000 is
// sent as E4M3(250) = 256 and comes back as 1024.
#pragma once

#include <cstdint>
#include <cstring>

#include "check.h"

namespace epbuf {

struct Bf16 {
  std::uint16_t bits;
};

struct Fp16 {
  std::uint16_t bits;
};

EPBUF_HOST_DEVICE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

EPBUF_HOST_DEVICE float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// `yes` where the condition holds, else `no`. A mask, because compilers turn ?: over float arithmetic into a branch.
EPBUF_HOST_DEVICE std::uint32_t select(bool condition, std::uint32_t yes, std::uint32_t no) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

EPBUF_HOST_DEVICE float to_float(float value) { return value; }

EPBUF_HOST_DEVICE float to_float(Bf16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }

// Normal: rebias the exponent by 127 - 15 = 112, Inf and NaN by twice that. Subnormal: 0.5 has 2^-24, the unit of the
// half's subnormals, in its last place.
EPBUF_HOST_DEVICE float to_float(Fp16 value) {
  const std::uint32_t magnitude = value.bits & 0x7FFFu;
  const std::uint32_t rebias = 112u << 23;
  const std::uint32_t normal = (magnitude << 13) + rebias + select(magnitude >= 0x7C00u, rebias, 0u);
  const std::uint32_t subnormal = bits_of(float_of(0x3F000000u | magnitude) - 0.5f);
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  return float_of(select(magnitude < 0x400u, subnormal, normal) | sign);
}

constexpr std::uint32_t kInfBits = 0x7F800000u;
constexpr std::uint32_t kNanBits = 0x7FC00000u;

EPBUF_HOST_DEVICE std::uint32_t magnitude_of(float value) { return bits_of(value) & 0x7FFFFFFFu; }

EPBUF_HOST_DEVICE std::uint32_t larger(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }

// E4M3: 4 bits of exponent with bias 7, 3 of mantissa; largest 448, NaN 0x7F, no infinity.
// Source: OCP 8-bit Floating Point Specification (OFP8) revision 1.0, section 5.

constexpr float kE4m3Max = 448.0f;
constexpr std::uint32_t kE4m3Nan = 0x7Fu;

// Rounds to nearest even, saturates at 448; every NaN is 0x7F. Below 2^-6 adding 2^14, whose last place is 2^-9, rounds
// to the unit of the subnormals.
EPBUF_HOST_DEVICE std::uint8_t encode_e4m3(float value) {
  const std::uint32_t magnitude = magnitude_of(value);
  const std::uint32_t normal = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - 0x46800000u;
  std::uint32_t code = select(magnitude < 0x3C800000u, subnormal, normal);
  code = select(code > 0x7Eu, 0x7Eu, code) | (bits_of(value) >> 24 & 0x80u);
  return static_cast<std::uint8_t>(select(magnitude > kInfBits, kE4m3Nan, code));
}

EPBUF_HOST_DEVICE float decode_e4m3(std::uint8_t byte) {
  const std::uint32_t code = byte & 0x7Fu;
  const std::uint32_t subnormal = bits_of(float_of(0x46800000u | code) - 16384.0f);
  std::uint32_t bits = select(code < 8u, subnormal, (code << 20) + (120u << 23));
  bits = select(code == kE4m3Nan, kNanBits, bits);
  return float_of(bits | static_cast<std::uint32_t>(byte & 0x80u) << 24);
}

// mxfp8: a block of 32 E4M3 with one E8M0, in which byte b is 2^(b - 127) and 255 NaN.
// Source: OCP Microscaling Formats (MX) v1.0, sections 5.1 and 5.4; the scale is rounded as torchao 0.18 does in its
// RCEIL mode (torchao/prototype/mx_formats/mx_tensor.py), except that a block with an infinity is a block of NaN.

// The smallest power of two that is not below amax / 448; 0 for a block of zeros.
EPBUF_HOST_DEVICE std::uint8_t mx_scale(std::uint32_t amax) {
  const std::uint32_t ratio = bits_of(float_of(amax) / kE4m3Max);
  const std::uint32_t above = select(ratio <= 0x400000u, 0u, (ratio + 0x7FFFFFu) >> 23);  // 0x400000 is 2^-127
  return static_cast<std::uint8_t>(select(amax >= kInfBits, 255u, above));
}

// What the elements of a block are multiplied by before encode_e4m3: 1 / scale, which is exact. For byte 0 it is 1:
// whatever has so small a scale is sent as zeros. Byte 255 makes every element NaN.
EPBUF_HOST_DEVICE float mx_multiplier(std::uint8_t scale) {
  const std::uint32_t inverse = select(scale == 0u, 127u, 254u - scale) << 23;
  return float_of(select(scale == 255u, kNanBits, inverse));
}

EPBUF_HOST_DEVICE float decode_e8m0(std::uint8_t scale) {
  const std::uint32_t bits = select(scale == 0u, 0x400000u, static_cast<std::uint32_t>(scale) << 23);
  return float_of(select(scale == 255u, kNanBits, bits));
}

// fp8_block128: a block of 128 E4M3 with one float32.
// The scale is amax / 448; 1 where that is zero. An infinity gives an infinite scale, so that no element of its block
// stays a number.
EPBUF_HOST_DEVICE float block128_scale(std::uint32_t amax) {
  const float scale = float_of(amax) / kE4m3Max;
  return scale == 0.0f ? 1.0f : scale;
}

EPBUF_HOST_DEVICE std::uint8_t encode_block128(float value, float scale) { return encode_e4m3(value / scale); }

// nvfp4: a block of 16 E2M1 with one E4M3, and one float32 for the whole row. E2M1 is 0, 0.5, 1, 1.5, 2, 3, 4, 6 and
// their negatives; the even element of a pair is the lower half of its byte. Source: OCP MX v1.0, section 5.3.3 (E2M1).
// Scale and elements are the nearest to the exact quotients, ties to even: what float arithmetic would round on the way
// is kept in double or in comparisons.

constexpr float kE2m1Max = 6.0f;

// amax of the row / (448 * 6); 1 where that is zero.
EPBUF_HOST_DEVICE float nvfp4_row_scale(std::uint32_t amax) {
  const float scale = float_of(amax) / (kE4m3Max * kE2m1Max);
  return scale == 0.0f ? 1.0f : scale;
}

// The float next to a double >= 0 towards zero, its last bit set unless it is exact: rounding it again to fewer bits
// gives what rounding the double at once would.
EPBUF_HOST_DEVICE float to_odd_float(double value) {
  const float nearest = static_cast<float>(value);
  const std::uint32_t below = bits_of(nearest) - (static_cast<double>(nearest) > value ? 1u : 0u);
  return static_cast<double>(nearest) == value ? nearest : float_of(below | 1u);
}

// E4M3 of amax / (6 * row_scale). In a row with an infinity it is NaN or 0, and 0 times the row's scale is NaN too.
EPBUF_HOST_DEVICE std::uint8_t nvfp4_scale(std::uint32_t amax, float row_scale) {
  const double divisor = 6.0 * static_cast<double>(row_scale);
  return encode_e4m3(to_odd_float(static_cast<double>(float_of(amax)) / divisor));
}

// Of one block: at_least[i] is the smallest magnitude that is encoded as i + 1 or more.
struct E2m1Bounds {
  std::uint32_t at_least[7];
};

// The smallest float that is above a double > 0, or equal to it when `or_equal`.
EPBUF_HOST_DEVICE std::uint32_t smallest_above(double bound, bool or_equal) {
  const float nearest = static_cast<float>(bound);
  const bool is_above = or_equal ? static_cast<double>(nearest) >= bound : static_cast<double>(nearest) > bound;
  return bits_of(nearest) + (is_above ? 0u : 1u);
}

// Halfway between two E2M1 values, times both scales, is exact in double. Halfway goes to the even code. A block scale
// of zero or NaN leaves zeros.
EPBUF_HOST_DEVICE E2m1Bounds e2m1_bounds(std::uint8_t block_scale, float row_scale) {
  const double scale = static_cast<double>(decode_e4m3(block_scale)) * static_cast<double>(row_scale);
  const bool is_usable = block_scale != 0u && block_scale != kE4m3Nan;
  const double halfway[7] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0};
  E2m1Bounds bounds;
  for (int i = 0; i < 7; ++i) {
    bounds.at_least[i] = is_usable ? smallest_above(halfway[i] * scale, i % 2 == 1) : 0xFFFFFFFFu;
  }
  return bounds;
}

// Four bits: the sign, then the code.
EPBUF_HOST_DEVICE std::uint32_t encode_e2m1(float value, const E2m1Bounds& bounds) {
  const std::uint32_t magnitude = magnitude_of(value);
  std::uint32_t code = bits_of(value) >> 28 & 8u;
  for (int i = 0; i < 7; ++i) code += magnitude >= bounds.at_least[i] ? 1u : 0u;
  return code;
}

EPBUF_HOST_DEVICE float decode_e2m1(std::uint32_t nibble) {
  const std::uint32_t code = nibble & 7u;
  const std::uint32_t bits = select(code < 2u, code * 0x3F000000u, (code << 22) + (126u << 23));
  return float_of(bits | (nibble & 8u) << 28);
}

// Elements of a block.
constexpr std::int64_t kMxBlock = 32;
constexpr std::int64_t kBlock128 = 128;
constexpr std::int64_t kNvfp4Block = 16;

// The largest finite number of each dtype, as the bits of a float.
template <typename T>
constexpr std::uint32_t kLimitBits = 0x7F7FFFFFu;
template <>
constexpr std::uint32_t kLimitBits<Bf16> = 0x7F7F0000u;
template <>
constexpr std::uint32_t kLimitBits<Fp16> = 0x477FE000u;  // 65504

constexpr std::int64_t kTileRows = 128;
constexpr std::int64_t kTileScales = 4;

// Byte of a one-byte scale in the tiled order, from the start of the region. Zones start at multiples of 128 rows, so
// the tiles of a zone are where they would be if it began at row 0. `row_scales`: scales of a row, a multiple of 4.
// Source: cuBLAS 12.8 manual, "1D block scaling factors layout".
//
// Example, 8 scales a row: row 33, scale 5 lies in the second tile (512), in line 33 % 32 = 1 (16), of row group
// 33 / 32 = 1 (4), at 5 % 4 = 1: byte 533.
EPBUF_HOST_DEVICE std::int64_t blocked_scale_offset(std::int64_t row, std::int64_t scale, std::int64_t row_scales) {
  const std::int64_t tile = row / kTileRows * kTileRows * row_scales + scale / kTileScales * kTileRows * kTileScales;
  return tile + row % 32 * 16 + row % kTileRows / 32 * kTileScales + scale % kTileScales;
}

// value * scale in float. What overflows `limit`, the largest number of the token dtype, was rounded up when it was
// encoded and becomes the limit; under a scale that is no finite number nothing is limited.
EPBUF_HOST_DEVICE float dequantise(float value, float scale, float limit) {
  const float product = value * scale;
  const std::uint32_t sign = bits_of(product) & 0x80000000u;
  const bool overflows =
      magnitude_of(scale) < kInfBits && magnitude_of(value) < kInfBits && magnitude_of(product) > bits_of(limit);
  return float_of(select(overflows, bits_of(limit) | sign, bits_of(product)));
}

}  // namespace epbuf

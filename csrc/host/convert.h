// Token dtypes and their conversions to and from float: round to nearest even, NaN stays NaN, subnormals kept.
// Written without branches so that compilers vectorise the loops over them, and without float subnormals so that a
// thread's flush-to-zero mode does not matter.
#pragma once

#include <cstdint>
#include <cstring>

namespace epbuf {

struct Bf16 {
  std::uint16_t bits;
};

struct Fp16 {
  std::uint16_t bits;
};

[[gnu::always_inline]] inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

[[gnu::always_inline]] inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// `yes` where the condition holds, else `no`. A mask, because compilers turn ?: over float arithmetic into a branch.
[[gnu::always_inline]] inline std::uint32_t select(bool condition, std::uint32_t yes, std::uint32_t no) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

[[gnu::always_inline]] inline float to_float(float value) { return value; }

[[gnu::always_inline]] inline float to_float(Bf16 value) {
  return float_of(static_cast<std::uint32_t>(value.bits) << 16);
}

// Normal: rebias the exponent by 127 - 15 = 112, Inf and NaN by twice that. Subnormal: 0.5 has 2^-24, the unit of the
// half's subnormals, in its last place.
[[gnu::always_inline]] inline float to_float(Fp16 value) {
  const std::uint32_t magnitude = value.bits & 0x7FFFu;
  const std::uint32_t rebias = 112u << 23;
  const std::uint32_t normal = (magnitude << 13) + rebias + select(magnitude >= 0x7C00u, rebias, 0u);
  const std::uint32_t subnormal = bits_of(float_of(0x3F000000u | magnitude) - 0.5f);
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  return float_of(select(magnitude < 0x400u, subnormal, normal) | sign);
}

template <typename T>
T from_float(float value);

template <>
[[gnu::always_inline]] inline float from_float<float>(float value) {
  return value;
}

template <>
[[gnu::always_inline]] inline Bf16 from_float<Bf16>(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return {static_cast<std::uint16_t>(select(is_nan, 0x7FC0u, rounded))};
}

// The inverse of to_float(Fp16). 65520 and above round to Inf; below 2^-14 adding 0.5 rounds to the subnormals' unit.
template <>
[[gnu::always_inline]] inline Fp16 from_float<Fp16>(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  std::uint32_t half = select(magnitude < 0x38800000u, subnormal, normal);
  half = select(magnitude >= 0x477FF000u, 0x7C00u, half);
  half = select(magnitude > 0x7F800000u, 0x7E00u, half);
  return {static_cast<std::uint16_t>(half | (bits >> 16 & 0x8000u))};
}

}  // namespace epbuf

// Conversions of token dtypes from float (to float: formats.h): round to nearest even, NaN stays NaN, subnormals kept.
// Written without branches so that compilers vectorise the loops over them, and without float subnormals so that a
// thread's flush-to-zero mode does not matter.
#pragma once

#include <cstdint>

#include "../formats.h"

namespace epbuf {

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

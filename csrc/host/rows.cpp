#include "rows.h"

#include <algorithm>

#include "../check.h"
#include "../layout.h"
#include "convert.h"

namespace epbuf {
namespace {

constexpr std::int64_t kBlockElems = 1024;  // the float accumulator of a block stays in the first-level cache
constexpr std::int64_t kDotLanes = 16;

template <typename T>
[[gnu::always_inline]] inline void sum_block(const T* const* rows, std::int32_t num_rows, T* out,
                                             std::int64_t num_elems) {
  float total[kBlockElems];
  for (std::int64_t i = 0; i < num_elems; ++i) total[i] = to_float(rows[0][i]);
  for (std::int32_t k = 1; k < num_rows; ++k) {
    const T* row = rows[k];
    for (std::int64_t i = 0; i < num_elems; ++i) total[i] += to_float(row[i]);
  }
  for (std::int64_t i = 0; i < num_elems; ++i) out[i] = from_float<T>(total[i]);
}

template <typename T>
[[gnu::always_inline]] inline void sum_rows(const std::byte* const* rows, std::int32_t num_rows, std::byte* out,
                                            std::int64_t num_elems) {
  const T* block[kMaxTopk];
  for (std::int64_t begin = 0; begin < num_elems; begin += kBlockElems) {
    for (std::int32_t k = 0; k < num_rows; ++k) block[k] = reinterpret_cast<const T*>(rows[k]) + begin;
    sum_block(block, num_rows, reinterpret_cast<T*>(out) + begin, std::min(kBlockElems, num_elems - begin));
  }
}

template <typename T>
[[gnu::always_inline]] inline void scale_row(const std::byte* row, float factor, std::byte* out,
                                             std::int64_t num_elems) {
  const T* from = reinterpret_cast<const T*>(row);
  T* to = reinterpret_cast<T*>(out);
  for (std::int64_t i = 0; i < num_elems; ++i) to[i] = from_float<T>(to_float(from[i]) * factor);
}

template <typename T>
[[gnu::always_inline]] inline float dot_rows(const std::byte* a, const std::byte* b, std::int64_t num_elems) {
  const T* left = reinterpret_cast<const T*>(a);
  const T* right = reinterpret_cast<const T*>(b);
  float lanes[kDotLanes] = {};
  for (std::int64_t begin = 0; begin < num_elems; begin += kDotLanes) {
    const std::int64_t num_lanes = std::min(kDotLanes, num_elems - begin);
    for (std::int64_t i = 0; i < num_lanes; ++i) lanes[i] += to_float(left[begin + i]) * to_float(right[begin + i]);
  }
  float total = 0.0f;
  for (const float lane : lanes) total += lane;
  return total;
}

// One plain function per dtype: target clones and templates do not mix.
EPBUF_TARGET_CLONES void sum_bf16(const std::byte* const* rows, std::int32_t num_rows, std::byte* out,
                                  std::int64_t num_elems) {
  sum_rows<Bf16>(rows, num_rows, out, num_elems);
}

EPBUF_TARGET_CLONES void scale_bf16(const std::byte* row, float factor, std::byte* out, std::int64_t num_elems) {
  scale_row<Bf16>(row, factor, out, num_elems);
}

EPBUF_TARGET_CLONES float dot_bf16(const std::byte* a, const std::byte* b, std::int64_t num_elems) {
  return dot_rows<Bf16>(a, b, num_elems);
}

EPBUF_TARGET_CLONES void sum_fp16(const std::byte* const* rows, std::int32_t num_rows, std::byte* out,
                                  std::int64_t num_elems) {
  sum_rows<Fp16>(rows, num_rows, out, num_elems);
}

EPBUF_TARGET_CLONES void scale_fp16(const std::byte* row, float factor, std::byte* out, std::int64_t num_elems) {
  scale_row<Fp16>(row, factor, out, num_elems);
}

EPBUF_TARGET_CLONES float dot_fp16(const std::byte* a, const std::byte* b, std::int64_t num_elems) {
  return dot_rows<Fp16>(a, b, num_elems);
}

EPBUF_TARGET_CLONES void sum_fp32(const std::byte* const* rows, std::int32_t num_rows, std::byte* out,
                                  std::int64_t num_elems) {
  sum_rows<float>(rows, num_rows, out, num_elems);
}

EPBUF_TARGET_CLONES void scale_fp32(const std::byte* row, float factor, std::byte* out, std::int64_t num_elems) {
  scale_row<float>(row, factor, out, num_elems);
}

EPBUF_TARGET_CLONES float dot_fp32(const std::byte* a, const std::byte* b, std::int64_t num_elems) {
  return dot_rows<float>(a, b, num_elems);
}

constexpr RowKernels kKernelsBf16 = {sum_bf16, scale_bf16, dot_bf16};
constexpr RowKernels kKernelsFp16 = {sum_fp16, scale_fp16, dot_fp16};
constexpr RowKernels kKernelsFp32 = {sum_fp32, scale_fp32, dot_fp32};

}  // namespace

const RowKernels& row_kernels(std::int32_t token_dtype) {
  switch (token_dtype) {
    case kBf16:
      return kKernelsBf16;
    case kFp16:
      return kKernelsFp16;
    default:
      EPBUF_CHECK(token_dtype == kFp32, "token_dtype is ", token_dtype,
                  "; the engine knows bf16, fp16 and fp32 (0, 1, 2)");
      return kKernelsFp32;
  }
}

}  // namespace epbuf

// Arithmetic on rows of one token dtype. Every result has a fixed order of operations: the same bits on every machine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace epbuf {

struct RowKernels {
  // out = ((rows[0] + rows[1]) + rows[2]) + ... in float, rounded once. num_rows >= 1.
  void (*sum)(const std::byte* const* rows, std::int32_t num_rows, std::byte* out, std::int64_t num_elems);

  // out = row * factor in float, rounded once; `out` may be `row`.
  void (*scale)(const std::byte* row, float factor, std::byte* out, std::int64_t num_elems);

  // <a, b> in float: element i is added to lane i % 16 in order of i, then the lanes in order from 0.
  float (*dot)(const std::byte* a, const std::byte* b, std::int64_t num_elems);
};

const RowKernels& row_kernels(std::int32_t token_dtype);

}  // namespace epbuf

// One row of a token dtype into a quantised format and back.
#pragma once

#include <cstddef>
#include <cstdint>

namespace epbuf {

// A row in a quantised format; its scales lie one after the other, whatever the layout of the region.
struct EncodedRow {
  std::byte* data;
  std::byte* scales;
  float row_scale;  // nvfp4
};

struct Codec {
  // Sets `row_scale`, writes data and scales.
  void (*encode)(std::int32_t format, const std::byte* row, std::int64_t num_elems, EncodedRow* to);

  void (*decode)(std::int32_t format, const EncodedRow& from, std::byte* row, std::int64_t num_elems);
};

// Of kBf16, kFp16 or kFp32.
const Codec& codec(std::int32_t token_dtype);

}  // namespace epbuf

// Which rows of a token go by way of `wire_rows`: the one rule that both ends, and both engines, follow.
#pragma once

#include <cstdint>

#include "check.h"

namespace epbuf {

// With wire="dedup" a row that has several slots on another rank crosses once and is copied there; with
// combine_order="by_rank" that rank adds its rows first. A lone row goes to its slot, or comes from it, directly, and
// so do all rows that stay on their rank. Dropped slots count for nothing.
EPBUF_HOST_DEVICE bool goes_by_wire(std::int32_t token_rank, std::int32_t slot_rank, std::int32_t num_slots) {
  return token_rank != slot_rank && num_slots > 1;
}

}  // namespace epbuf

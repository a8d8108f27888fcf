// Entries of slot_map: where the row of (token, k) lives, packed as layout.h says.
#pragma once

#include <cstdint>

#include "../layout.h"

namespace epbuf {

struct Slot {
  std::int32_t rank;
  std::int64_t row;
};

inline std::int64_t pack_slot(Slot slot) { return static_cast<std::int64_t>(slot.rank) << kSlotRankShift | slot.row; }

inline Slot unpack_slot(std::int64_t packed) {
  return {static_cast<std::int32_t>(packed >> kSlotRankShift), packed & 0xFFFFFFFF};
}

// The rows that a token has on one rank, in k order.
struct RowsOnRank {
  std::int64_t rows[kMaxTopk];
  std::int32_t num = 0;

  RowsOnRank(const std::int64_t* slots, std::int32_t num_topk, std::int32_t rank) {
    for (std::int32_t k = 0; k < num_topk; ++k) {
      if (slots[k] == kNoSlot || unpack_slot(slots[k]).rank != rank) continue;
      rows[num++] = unpack_slot(slots[k]).row;
    }
  }
};

}  // namespace epbuf

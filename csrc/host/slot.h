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

}  // namespace epbuf

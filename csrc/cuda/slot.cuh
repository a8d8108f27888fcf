// A slot as one word, as host/slot.h has it: a rank and a row of its receive region.
#pragma once

#include <cstdint>

#include "../layout.h"

namespace epbuf::cuda {

__device__ __forceinline__ std::int32_t rank_of(std::int64_t slot) {  // of kNoSlot: -1
  return static_cast<std::int32_t>(slot >> kSlotRankShift);
}

__device__ __forceinline__ std::int64_t row_of(std::int64_t slot) { return slot & 0xFFFFFFFF; }

__device__ __forceinline__ std::int64_t slot_at(std::int32_t rank, std::int64_t row) {
  return static_cast<std::int64_t>(rank) << kSlotRankShift | row;
}

}  // namespace epbuf::cuda
